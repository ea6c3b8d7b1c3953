"""Low-rank adapters (LoRA) in a library's model: peft's own layers, whose names are peft's.

A linear layer X becomes X.base_layer, frozen, beside X.lora_A.default and X.lora_B.default, which are trained. What peft adds is
in the blocks, so that engines keep it with them. First values follow from the run's seed and a parameter's path: A as a linear
layer's own, B zero, so that the adapted model begins as the base.
"""

import difflib
import logging
import math
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import nn

from fluxray.config.adapter import AdapterConfig, LoraConfig
from fluxray.errors import ConfigError
from fluxray.models import quantised

NAME = "default"
"""peft's own name of an adapter that is not called otherwise."""

BASE = ".base_layer"


def add_adapter(model: nn.Module, adapter: AdapterConfig, blocks: Sequence[str]) -> None:
    """Put adapters into a meta model whose repeated blocks are at these paths, and freeze everything else.

    ConfigError for targets that no linear layer of the blocks has.
    """
    if not isinstance(adapter, LoraConfig):
        return
    paths = target_paths(model, adapter.targets, blocks)
    kept = quantised.layer_paths(model, blocks)
    model.requires_grad_(False)
    _peft().inject_adapter_in_model(peft_config(adapter, paths), model, NAME, low_cpu_mem_usage=True)
    if adapter.base == "nf4":
        quantised.require_library()
        quantised.quantise_layers(model, [f"{path}{BASE}" if path in paths else path for path in kept])
    model.train()


def peft_config(adapter: LoraConfig, targets: Collection[str], **keys: Any) -> Any:
    """Return peft's `LoraConfig` of adapters at these layers; `keys` are further ones of it."""
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return _peft().LoraConfig(
        r=adapter.rank, lora_alpha=alpha, lora_dropout=adapter.dropout, target_modules=sorted(targets), **keys
    )


def target_paths(model: nn.Module, targets: Sequence[str] | None, blocks: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers to adapt: those inside an attention for None, else those whose names end so."""
    inside = tuple(f"{block}." for block in blocks)
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path.startswith(inside)]
    if targets is None:
        return [path for path in linear if any("attn" in part or "attention" in part for part in path.split(".")[:-1])]
    for target in targets:
        if not any(_ends(path, target) for path in linear):
            known = sorted({end for path in linear for end in _ends_of(path)})
            close = difflib.get_close_matches(target, known, n=1) or known[:1]
            raise ConfigError(
                f"adapter.targets: {target!r} ends the name of no linear layer in the model's blocks; did you mean {close[0]}?"
            )
    return [path for path in linear if any(_ends(path, target) for target in targets)]


class Base(Protocol):
    """Published weights that can be told from others."""

    def identity(self) -> str | None:
        """Return a hash of what has been read; None on ranks that read nothing."""
        ...


def base_of(weights: Base | None, seed: int, kept: str) -> dict[str, str]:
    """Return what tells the parameters beside the adapters: a hash of published ones, or the seed of random ones.

    `kept` is `adapter.base`: what is not full is told, too. It is empty on ranks that have not read the published ones.
    """
    told = {} if kept == "full" else {"kept": kept}
    if weights is None:
        return {"seed": str(seed), **told}
    identity = weights.identity()
    return {} if identity is None else {"weights": identity, **told}


def kept_of(model: nn.Module) -> str:
    """Return the `adapter.base` that an adapted model has."""
    return quantised.KIND if quantised.is_quantised(model) else "full"


def is_adapted(model: nn.Module) -> bool:
    """Return whether some layer has an adapter."""
    return any(layer_of(path) is not None for path, _ in model.named_modules())


def drops_inputs(model: nn.Module) -> bool:
    """Return whether adapters have dropout."""
    return any(".lora_dropout." in path and isinstance(module, nn.Dropout) for path, module in model.named_modules())


def library_path(path: str) -> str:
    """Return the path that a module of an adapted model has in the library's."""
    return path.removesuffix(BASE)


def layer_of(path: str) -> tuple[str, str] | None:
    """Return the path of the layer that an adapter's module is beside, and `lora_A` or `lora_B`; None for any other module."""
    parts = path.rsplit(".", 2)
    return (parts[0], parts[1]) if len(parts) == 3 and parts[1] in ("lora_A", "lora_B") and parts[2] == NAME else None


def initialise(path: str, module: nn.Module) -> bool:
    """Give an adapter's module its first values, as peft does; return whether the module at `path` is of an adapter."""
    found = layer_of(path)
    if found is None:
        return hasattr(module, "base_layer")  # peft's layer, which holds nothing itself
    assert isinstance(module, nn.Linear)
    if found[1] == "lora_A":
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    else:
        nn.init.zeros_(module.weight)
    return True


def _peft() -> Any:
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # what it lacks is for inference in 4 bits
    import peft

    return peft


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _ends_of(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[-count:]) for count in (1, 2, 3) if not parts[-count].isdigit() and count < len(parts)]
