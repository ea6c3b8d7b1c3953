"""A card that several runs share, each with `resources.gpu` below 1: what a run may take of it where NVIDIA's MPS server runs.

PyTorch's allocator is held to the share everywhere (`worker.py`). An MPS server, which lets kernels of several processes run
side by side, also bounds multiprocessors and memory for the whole process. Both limits are read from the environment when a
process first uses CUDA, which Ray Train does before it calls the worker: so they are part of the worker's environment.
"""

import os
from pathlib import Path

from fluxray.runtime.system import visible_gpus

PIPES = "/tmp/nvidia-mps"
"""Where an MPS server listens unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""

MIB = 2**20


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
