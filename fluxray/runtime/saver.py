"""Saving while training goes on: a copy on the host, written by a thread that has a process group of its own.

Cost: training stands still for the copy, and for the checkpoint before if that is not durable yet; the copy's memory (12 bytes a
parameter with AdamW, divided by the ranks) is kept from the first save on, page-locked where a GPU fills it.
"""

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from fluxray import checkpoint
from fluxray.protocols import RunState, SavedCheckpoint, StateItem
from fluxray.ranks import Ranks

ALIGNMENT = 64
"""Bytes; more than any dtype needs."""


class Saver:
    """Writes a run's checkpoints, one at a time. `ranks` must not be used by anything else: its calls come from a thread."""

    def __init__(self, run_dir: Path, ranks: Ranks, asynchronous: bool):
        self._run_dir = run_dir
        self._ranks = ranks
        self._copy = HostCopy() if asynchronous else None

    def save(self, state: RunState, items: Iterable[StateItem]) -> SavedCheckpoint:
        """Start to save the run as it stands, and return as soon as it may change; durable already without `asynchronous`.

        The checkpoint before must have been waited for.
        """
        start = time.perf_counter()
        durable_s: Future[float] = Future()

        def write(held: Iterable[StateItem]) -> None:
            try:
                checkpoint.save(self._run_dir, state, held, self._ranks)
                durable_s.set_result(time.perf_counter() - start)
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                durable_s.set_exception(error)

        if self._copy is None:
            write(items)
        else:
            Thread(target=write, args=(self._copy.take(list(items)),), name="fluxray-save", daemon=True).start()
        return SavedCheckpoint(self._run_dir / checkpoint.directory_name(state.step), durable_s.result)


class HostCopy:
    """Memory for one copy of an engine's state, allocated at the first and used again for every later one of the same layout."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._registered = False

    def take(self, items: Sequence[StateItem]) -> list[StateItem]:
        """Return the items with their tensors copied; what was taken before is overwritten."""
        sizes = [math.ceil(item.tensor.nbytes / ALIGNMENT) * ALIGNMENT for item in items]
        on_gpu = any(item.tensor.is_cuda for item in items)
        if self._memory.numel() != sum(sizes):
            self._allocate(sum(sizes), page_locked=on_gpu)
        held, begin = [], 0
        for item, size in zip(items, sizes, strict=True):
            source = item.tensor.detach()
            target = self._memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
            held.append(item._replace(tensor=target.copy_(source, non_blocking=True)))
            begin += size
        if on_gpu:
            torch.cuda.synchronize()
        return held

    def _allocate(self, num_bytes: int, page_locked: bool) -> None:
        """Take new memory, touched by all threads. Registered by hand: torch's pinned memory rounds up to a power of two."""
        self._release()
        self._memory = torch.empty(num_bytes, dtype=torch.uint8).fill_(0)
        if page_locked:
            code = _cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)
            self._registered = int(code) == 0  # where the system refuses, copies are only slower

    def _release(self) -> None:
        if self._registered:
            _cudart().cudaHostUnregister(self._memory.data_ptr())
        self._registered = False


def _cudart() -> Any:
    """Return the CUDA runtime that torch has loaded."""
    return torch.cuda.cudart()
