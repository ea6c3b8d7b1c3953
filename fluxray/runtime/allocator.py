"""PyTorch's CUDA allocator as `allocator` names it: chosen before CUDA starts, on every path that ends in a worker."""

import os
import sys

from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError

SETTINGS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name that torch reads, and the one that it read before 2.10."""


def allocator_environment(config: TrainConfig) -> dict[str, str]:
    """Return what must be in a process's environment before it imports torch; nothing for torch's own allocator."""
    return dict.fromkeys(VARIABLES, SETTINGS[config.allocator]) if config.allocator != "native" else {}


def restart_with_allocator(config: TrainConfig) -> None:
    """Begin this process anew with the environment that the allocator needs, unless it has it. Its id stays the same."""
    wanted = allocator_environment(config)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


def require_allocator(config: TrainConfig) -> None:
    """Set the allocator where that is still possible, before CUDA starts; raise ConfigError where another one is in place."""
    import torch

    found = torch.cuda.get_allocator_backend()
    wanted = "cudaMallocAsync" if config.allocator == "async" else "native"
    if found != wanted:
        setting = f"with {VARIABLES[0]}={SETTINGS['async']}" if config.allocator == "async" else f"without {VARIABLES[0]}"
        raise ConfigError(
            f"allocator: {config.allocator!r}, but this process imported torch for {found}; start it {setting} in its environment"
        )
    if config.allocator == "expandable":
        torch.cuda.memory._set_allocator_settings(SETTINGS["expandable"])
