"""Memory of the stream engine: exactly-sized host buffers, and rings of slots on the device that blocks pass through."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from fluxray.engine.stream_transfers import Event, Transfers
from fluxray.errors import PlanError
from fluxray.memory.host import container_limit

TOUCHED_AT_ONCE = 1 << 28
"""Bytes that one thread touches at a time."""

MOST_THREADS = 16


class HostBuffers:
    """One zeroed buffer (uint8) of exactly the given size for each block, page-locked where a GPU copies from it.

    torch's own pinned memory rounds up to a power of two, which for blocks of 2.3 GB costs as much again. Pages are touched by
    many threads before they are locked, since locking by itself touches them one after the other. Raises PlanError if the system
    has not that much memory or will not lock it.
    """

    def __init__(self, sizes: Sequence[int], page_locked: bool):
        self._locked: list[int] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False  # a process that ends unlocks by itself
        total, free = sum(sizes), psutil.virtual_memory().available
        try:
            self.buffers = [_anonymous(size) for size in sizes]
        except OSError:
            raise PlanError(
                f"hardware.host_memory: {total / 1e9:.1f} GB for the blocks are wanted and the system gives no more "
                f"({free / 1e9:.1f} GB are free); set optim.master=stochastic, engine.resident_blocks, or choose a smaller model"
            ) from None
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
            touched = [[pool.submit(part.zero_) for part in torch.split(buffer, TOUCHED_AT_ONCE)] for buffer in self.buffers]
            for buffer, parts in zip(self.buffers, touched, strict=True):
                for part in parts:
                    part.result()
                if page_locked and buffer.numel() > 0:
                    self._lock(buffer)

    def _lock(self, buffer: Tensor) -> None:
        code = int(_cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
        if code != 0:
            raise PlanError(
                f"engine.kind: stream cannot page-lock {buffer.numel() / 1e9:.1f} GB (CUDA error {code}): {_reason()}"
            )
        self._locked.append(buffer.data_ptr())


def _unlock(addresses: list[int]) -> None:
    """Unlock the memory at `addresses`, before what is mapped there next is locked."""
    for address in addresses:
        _cudart().cudaHostUnregister(address)


def _anonymous(size: int) -> Tensor:
    """Return memory straight from the system (uint8), in large pages where it has them. Raises OSError."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _cudart() -> Any:
    """Return the CUDA runtime that torch has loaded."""
    return torch.cuda.cudart()


def _reason() -> str:
    """Say what on this system most likely refused to lock memory, and what to do."""
    free = psutil.virtual_memory().available / 1e9
    if "microsoft" in os.uname().release.lower():
        return "under WSL at most half of the memory can be locked; raise `memory` in .wslconfig or use Linux"
    limit = container_limit()
    if limit is not None and limit < psutil.virtual_memory().total:
        return f"the container has {limit / 1e9:.0f} GB; start it with more (docker run --memory, Kubernetes resources.limits)"
    return f"{free:.0f} GB are free; stop other programs, or set optim.master=stochastic or engine.resident_blocks"


@dataclass
class _Slot:
    """`filled`: its last fetch is done; `drained`: it has been computed with; `saved`: its last write-back is done."""

    memory: Tensor
    holds: int | None = None
    wanted: bool = False
    filled: Event = None
    drained: Event = None
    saved: Event = None
    last_used: int = 0


@dataclass
class Ring:
    """Slots on the device through which one part (weights or states) of every block passes.

    `host[i]` is that part of block i on the host; `resident[i]` stands instead where the block stays on the device. A block is
    fetched, got, and done; between fetch and done its slot is its own.
    """

    host: Sequence[Tensor]
    resident: dict[int, Tensor]
    slots: list[_Slot]
    transfers: Transfers
    written: dict[int, Event] = field(default_factory=dict)
    clock: int = 0

    @classmethod
    def of(
        cls, host: Sequence[Tensor], resident: dict[int, Tensor], num_slots: int, transfers: Transfers, device: torch.device
    ) -> "Ring":
        """Allocate `num_slots` slots, each as large as the largest part that passes."""
        largest = max((part.numel() for index, part in enumerate(host) if index not in resident), default=0)
        needed = num_slots if len(resident) < len(host) else 0
        slots = [_Slot(torch.zeros(largest, dtype=torch.uint8, device=device)) for _ in range(needed)]
        return cls(host, resident, slots, transfers)

    def fetch(self, index: int) -> None:
        """Queue the copy of block `index` into a free slot, unless it is there already. There must be a free slot."""
        if index in self.resident:
            return
        slot = self._find(index)
        if slot is None:
            slot = min((slot for slot in self.slots if not slot.wanted), key=lambda slot: slot.last_used)
            written_before = None if slot.holds is None else self.written.get(slot.holds)  # may lie behind an earlier use
            part, after = self.host[index], (slot.drained, written_before, self.written.get(index))
            slot.holds = index
            slot.filled = self.transfers.fetch(slot.memory[: part.numel()], part, after)
        slot.wanted = True

    def get(self, index: int) -> Tensor:
        """Return block `index` on the device; what is computed from here on waits for its copy."""
        if index in self.resident:
            return self.resident[index]
        self.fetch(index)
        slot = self._find(index)
        assert slot is not None
        self.transfers.wait(slot.filled)
        slot.filled = None
        return slot.memory[: self.host[index].numel()]

    def claim(self, index: int) -> Tensor:
        """Return the memory of block `index` on the device for what is computed from here on; what it holds is of no matter."""
        if index in self.resident:
            return self.resident[index]
        slot = self._find(index) or min((s for s in self.slots if not s.wanted), key=lambda s: s.last_used)
        slot.holds, slot.wanted = index, True
        self.transfers.wait(slot.saved)
        return slot.memory[: self.host[index].numel()]

    def done(self, index: int, num_written: int = 0) -> None:
        """Give the slot of block `index` back once what has been computed so far is done and `num_written` bytes are written."""
        if index in self.resident:
            return
        slot = self._find(index)
        assert slot is not None and slot.wanted
        slot.wanted = False
        slot.drained = self.transfers.mark()
        if num_written:
            slot.saved = self.transfers.write(self.host[index][:num_written], slot.memory[:num_written], (slot.drained,))
            self.written[index] = slot.saved
        self.clock += 1
        slot.last_used = self.clock

    def release(self) -> None:
        """Give every slot back, unchanged, once what has been computed so far is done."""
        for slot in self.slots:
            if slot.wanted:
                slot.wanted, slot.drained = False, self.transfers.mark()

    def forget(self) -> None:
        """Hold nothing any more: what lies on the host has been changed."""
        for slot in self.slots:
            assert not slot.wanted
            slot.holds = None

    def _find(self, index: int) -> _Slot | None:
        return next((slot for slot in self.slots if slot.holds == index), None)
