"""One projection of the hidden states in place of an attention's three.

The weights of queries, keys and values lie one below the other in one matrix, so that one product makes all three. The library's
own forward goes on behind it: it is handed the product as its hidden states, of which its projections are columns now. FLUX's
joint attention has two inputs and three projections of each.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluxray.errors import ConfigError
from fluxray.seeding import derive_seed


class Group(NamedTuple):
    """Projections of one input: their names in the library, the one in their place, the argument that is projected."""

    parts: tuple[str, str, str]
    name: str
    argument: str


GROUPS = (
    Group(("q_proj", "k_proj", "v_proj"), "qkv_proj", "hidden_states"),
    Group(("to_q", "to_k", "to_v"), "qkv_proj", "hidden_states"),
    Group(("add_q_proj", "add_k_proj", "add_v_proj"), "added_qkv_proj", "encoder_hidden_states"),
)


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
    """Give every attention of a meta model one projection an input; ConfigError for a model that has such already."""
    found = [(module, group) for module in model.modules() for group in GROUPS if _has_parts(module, group)]
    if not found:
        raise ConfigError(f"model.fused_qkv: true, but {model_type} has one projection already; drop the key")
    for attention, group in found:
        fused = FusedLinear({name: getattr(attention, name) for name in group.parts})
        begin = 0
        for name, num_rows in fused.rows.items():
            setattr(attention, name, _Columns(begin, begin + num_rows))
            begin += num_rows
        setattr(attention, group.name, fused)
        attention.forward = _behind(fused, group.argument, attention.forward)


def _has_parts(module: nn.Module, group: Group) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in group.parts)


def _behind(fused: FusedLinear, argument: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward with the projection of an argument in its place: the first one, or one that is given by name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(argument) is not None:
            kwargs = {**kwargs, argument: fused(kwargs[argument])}
        elif args and argument == "hidden_states":
            args = (fused(args[0]), *args[1:])
        return forward(*args, **kwargs)

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
    return path[: path.rfind(".") + 1]
