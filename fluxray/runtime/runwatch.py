"""What is read beside the losses at each log: memory of device, process and host."""

from collections.abc import Callable

import torch

from fluxray.metrics import memory_metrics
from fluxray.runtime.hostmemory import HostWatch


class RunWatch:
    """Reads memory at each log."""

    def __init__(self, engine_kind: str, device: torch.device, notify: Callable[[str], None]):
        self._device = device
        self._host = HostWatch(engine_kind, notify)
        self._host.look()

    def memory(self, step: int) -> dict[str, float]:
        """Return the memory metrics after a step that the device has finished."""
        self._host.look()
        return memory_metrics(self._device)
