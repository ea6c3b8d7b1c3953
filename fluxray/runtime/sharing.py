"""What a run may take of its card: `hardware.device_memory`, and with `resources.gpu` below 1 a share of one that others use too.

PyTorch's allocator is held to that everywhere. An MPS server, which lets kernels of several processes run
side by side, also bounds multiprocessors and memory for the whole process. Both limits are read from the environment when a
process first uses CUDA, which Ray Train does before it calls the worker: so they are part of the worker's environment.
"""

import os
from pathlib import Path

from fluxray.errors import ConfigError
from fluxray.memory.estimate import CONTEXT_BYTES
from fluxray.runtime.system import visible_gpus

PIPES = "/tmp/nvidia-mps"
"""Where an MPS server listens unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""

MIB = 2**20


def allocator_share(asked: float, device_memory: int | None, total: int, used: int) -> float:
    """Return the share of a card of `total` bytes that PyTorch's allocator may take.

    `asked` is `resources.gpu`. In a share below 1, as in `device_memory` (bytes), the CUDA context counts; in a share as what it
    may grow to, so that shares that add up to 1 fit the card. `used` bytes are taken before anything is allocated: by the
    context, and by others on a shared card. Raises ConfigError for a card that is smaller than `device_memory`.
    """
    if device_memory is None and asked >= 1:
        return 1.0
    if device_memory is not None and device_memory > total:
        raise ConfigError(
            f"hardware.device_memory: {device_memory / 1e9:.4g} GB, but the card has {total / 1e9:.4g} GB; lower it, or set null"
        )
    context = CONTEXT_BYTES if asked < 1 else min(used, CONTEXT_BYTES)
    return max(0.0, budget(asked, device_memory, total) - context) / total


def budget(asked: float, device_memory: int | None, total: int) -> float:
    """Return the bytes of a card of `total` bytes that a worker may take in all, CUDA context included."""
    return min(total if device_memory is None else device_memory, min(asked, 1.0) * total)


def served_card() -> int | None:
    """Return the memory (bytes) of the first GPU that this process may see if MPS serves it, else None. Does not start CUDA."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or PIPES)
    if not (pipes / "control").exists():
        return None
    import pynvml

    pynvml.nvmlInit()
    handles = visible_gpus(pynvml)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handles[0]).total) if handles else None


def mps_limits(share: float, memory: int) -> dict[str, str]:
    """Return the variables that hold an MPS client to `share` of the multiprocessors and of `memory` bytes of its card."""
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * share:g}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={int(share * memory) // MIB}M",
    }
