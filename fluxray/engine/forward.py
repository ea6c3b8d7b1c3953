"""Replacing the forward of one module instance, hooks, name and class left as they are."""

from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Set the instance's `forward` to `wrapper(forward)`. Wrappers nest: the last one applied runs first."""
    module.forward = wrapper(module.forward)
