"""Load and memory of the machine that a worker runs on."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

GIB = 2**30


class SystemMetrics:
    """Reads `system/...`: CPU load and memory of this node, load and memory of the GPUs that this process may see.

    GPUs are read through NVML; where there is none, torch tells the memory of its current GPU, once something has used it.
    """

    def __init__(self) -> None:
        psutil.cpu_percent()  # the load is that since the last call
        self._read_gpus: Callable[[], dict[str, float]] = _nvml() or _torch_gpu

    def read(self) -> dict[str, float]:
        """Return the load in percent since the last reading, and the memory in use now in GiB and percent."""
        memory = psutil.virtual_memory()
        return {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_gib": (memory.total - memory.available) / GIB,
            "system/memory_percent": memory.percent,
            **self._read_gpus(),
        }


def _nvml() -> Callable[[], dict[str, float]] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = visible_gpus(pynvml)
    except Exception:  # noqa: BLE001 - no package, no driver, no GPU: all the same here
        return None

    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        for index, handle in enumerate(handles):
            with suppress(pynvml.NVMLError):  # a slice of a card has no load of its own
                found[f"system/gpu{index}_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            found[f"system/gpu{index}_memory_gib"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / GIB
        return found

    return read


def visible_gpus(nvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [str(index) for index in range(nvml.nvmlDeviceGetCount())] if named is None else named.split(",")
    handles: list[Any] = []
    for word in words:
        try:
            by_index = word.strip().isdigit()
            find = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
            handles.append(find(int(word) if by_index else word.strip()))
        except nvml.NVMLError:
            break  # as CUDA does at the first that is none
    return handles


def _torch_gpu() -> dict[str, float]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"system/gpu0_memory_gib": (total - free) / GIB}
