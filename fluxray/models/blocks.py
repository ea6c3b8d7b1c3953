"""What every family of library models has in common: finding the repeated blocks, and giving meta tensors their first values."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from fluxray.models import lora, quantised
from fluxray.seeding import derive_seed


def find_block_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the path and the list of each `nn.ModuleList` that holds the model's repeated blocks.

    The library names their classes itself, in `_repeated_blocks` (diffusers) or `_no_split_modules` (transformers). Call it
    before `fully_shard`, which renames classes.
    """
    names = set(getattr(model, "_repeated_blocks", None) or ()) | set(getattr(model, "_no_split_modules", None) or ())
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and all(type(child).__name__ in names for child in module)
    ]


def first_value(model: nn.Module, name: str, seed: int, initialise: Callable[[nn.Module], None]) -> Tensor:
    """Return the value that `materialise` gives a parameter of a meta model, which stays on the meta device."""
    path, _, leaf = name.rpartition(".")
    materialise(model, [path], torch.device("cpu"), seed, initialise)
    module = model.get_submodule(path)
    value = module.get_parameter(leaf).detach().clone()
    module.to_empty(device="meta", recurse=False)
    return value


def materialise(
    model: nn.Module, paths: Collection[str], device: torch.device, seed: int, initialise: Callable[[nn.Module], None]
) -> None:
    """Allocate the modules at `paths` (and not their children) on `device` and give each its first values.

    The random numbers of a module are keyed by the run's seed and its path, so that they depend neither on the order in which
    modules are visited nor on the ranks: each rank makes the same full tensor and keeps its own shard. A layer that has got an
    adapter has the values that it has without.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=cuda):
        for path in paths:
            module = model.get_submodule(path)
            module.to_empty(device=device, recurse=False)
            torch.manual_seed(derive_seed(seed, "init", lora.library_path(path)))
            if not lora.initialise(path, module):
                with quantised.opened(module) as whole:
                    initialise(whole)
