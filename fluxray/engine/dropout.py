"""Dropout keyed by what it is for: (seed, step, samples of the micro-batch, block)."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fluxray.engine.forward import wrap_forward
from fluxray.protocols import BlockStack


def apply_dropout_keys(stack: BlockStack) -> None:
    """Make each block and the embedding's dropout take a `dropout_seed` and start the device's generator there.

    So the masks of a block do not depend on what ran before it, and recomputation draws them again without any saved state.
    """
    if stack.has_dropout:
        for module in stack.dropout_modules:
            wrap_forward(module, _keyed)


def _keyed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(hidden: Tensor, *args: Any, dropout_seed: int | None = None, **kwargs: Any) -> Any:
        if dropout_seed is not None:
            _default_generator(hidden.device).manual_seed(dropout_seed)
        return forward(hidden, *args, **kwargs)

    return run


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
