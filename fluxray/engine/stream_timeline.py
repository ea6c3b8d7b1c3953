"""How much of the device a step of the stream engine holds, point by point: exact numbers of the allocator or of tensors."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fluxray.memory.live import LiveBytes


class StreamBytes(NamedTuple):
    """Bytes that the engine allocates for good: blocks on the host, everything else on the device.

    Weights and optimizer states of what is outside the blocks and of resident blocks, sums of gradients, slots.
    """

    host_blocks: int
    outside_weights: int
    outside_states: int
    resident_weights: int
    resident_states: int
    gradients: int
    slots: int

    @property
    def device(self) -> int:
        """Bytes of the device."""
        return sum(self) - self.host_blocks


class Point(NamedTuple):
    """What a step holds beside `StreamBytes` once `phase` of `block` and `micro_batch` (-1: of all, or none) is done.

    `held` bytes are alive there, `peak` is the most since the point before.
    """

    phase: str
    block: int
    micro_batch: int
    held: int
    peak: int


class Timeline:
    """Observes one step (see `StreamEngine.watch`). On a GPU it starts the allocator's peaks anew, which are kept here before.

    `tensors` are those that the engine holds for good.
    """

    def __init__(self, allocated: StreamBytes, tensors: Iterable[Tensor], device: torch.device):
        self.allocated = allocated
        self.points: list[Point] = []
        self.reserved_before = 0
        self._device = device
        self._live = None if device.type == "cuda" else LiveBytes(tensors)

    @property
    def is_complete(self) -> bool:
        """Whether the step has ended."""
        return bool(self.points) and self.points[-1].phase == "end"

    def __call__(self, phase: str, block: int, micro_batch: int) -> None:
        """Note what is held now."""
        if phase == "begin":
            self._begin()
        held, peak = self._read()
        self.points.append(Point(phase, block, micro_batch, held, max(held, peak)))
        if phase == "end" and self._live is not None:
            self._live.__exit__(None, None, None)

    def _begin(self) -> None:
        if self._live is not None:
            self._live.__enter__()
        else:
            self.reserved_before = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def _read(self) -> tuple[int, int]:
        if self._live is not None:
            found = self._live.now, self._live.peak
            self._live.peak = self._live.now
            return found
        found = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return found[0] - self.allocated.device, found[1] - self.allocated.device
