"""One projection of the hidden states in place of an attention's three.

The weights of queries, keys and values lie one below the other in one matrix, so that one product makes all three. The library's
own forward goes on behind it: it is handed the product as its hidden states, of which its projections are columns now.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fluxray.errors import ConfigError
from fluxray.seeding import derive_seed

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
NAME = "qkv_proj"


class FusedLinear(nn.Linear):
    """Projections of one input as one. `rows` holds the number of rows of each by its name in the library, in order."""

    def __init__(self, parts: Mapping[str, nn.Linear]):
        first = next(iter(parts.values()))
        num_rows = sum(part.out_features for part in parts.values())
        super().__init__(first.in_features, num_rows, first.bias is not None, first.weight.device, first.weight.dtype)
        self.rows = {name: part.out_features for name, part in parts.items()}

    def views(self) -> dict[str, dict[str, Tensor]]:
        """Return the rows of weight and bias that belong to each part: `{part: {leaf: view}}`."""
        leaves = {leaf: parameter.detach().split(list(self.rows.values())) for leaf, parameter in self.named_parameters()}
        return {part: {leaf: rows[i] for leaf, rows in leaves.items()} for i, part in enumerate(self.rows)}


class _Columns(nn.Module):
    def __init__(self, begin: int, end: int):
        super().__init__()
        self._begin, self._end = begin, end

    def forward(self, projected_BSX: Tensor) -> Tensor:
        return projected_BSX[..., self._begin : self._end]


def fuse_projections(model: nn.Module, model_type: str) -> None:
    """Give every attention of a meta model one projection; raises ConfigError for a family that has one already."""
    attentions: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in PROJECTIONS)]
    if not attentions:
        raise ConfigError(f"model.fused_qkv: true, but {model_type} has one projection already; drop the key")
    for attention in attentions:
        fused = FusedLinear({name: getattr(attention, name) for name in PROJECTIONS})
        begin = 0
        for name, num_rows in fused.rows.items():
            setattr(attention, name, _Columns(begin, begin + num_rows))
            begin += num_rows
        attention.qkv_proj = fused
        attention.forward = _behind(fused, attention.forward)


def _behind(fused: FusedLinear, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(fused(hidden_states), *args, **kwargs)

    return run


def rows_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return, for each fused parameter of a model, the library's parameters in it and their numbers of rows, in order."""
    return {
        f"{path}.{leaf}": {f"{_parent(path)}{part}.{leaf}": num_rows for part, num_rows in module.rows.items()}
        for path, module in model.named_modules()
        if isinstance(module, FusedLinear)
        for leaf, _ in module.named_parameters()
    }


def library_tensors(path: str, module: FusedLinear) -> dict[str, Tensor]:
    """Return the parameters of a fused projection under the library's names, as views."""
    return {f"{_parent(path)}{part}.{leaf}": view for part, leaves in module.views().items() for leaf, view in leaves.items()}


@torch.no_grad()
def initialise_parts(path: str, module: FusedLinear, seed: int, initialise: Callable[[nn.Module], None]) -> None:
    """Give a fused projection the first values that the library's own three would have (see `blocks.materialise`)."""
    device = module.weight.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for part, leaves in module.views().items():
            num_rows, width = leaves["weight"].shape
            alone = nn.Linear(width, num_rows, "bias" in leaves, device, module.weight.dtype)
            torch.manual_seed(derive_seed(seed, "init", f"{_parent(path)}{part}"))
            initialise(alone)
            for leaf, view in leaves.items():
                view.copy_(alone.get_parameter(leaf))


def _parent(path: str) -> str:
    return path.removesuffix(NAME)
