"""Copies between host and device beside the computation, and the waits between them.

One lane fetches, one writes back, each in order; the computation goes on between `mark` and `wait`. Streams are made once: new
ones every step strand the memory that the allocator keeps for each.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any
"""What a lane or the computation has reached. None has always happened."""


class Transfers(Protocol):
    """The two lanes of one engine."""

    def fetch(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Copy `host` to `device` once `after` has happened; returns when the copy has been queued."""
        ...

    def write(self, host: Tensor, device: Tensor, after: Sequence[Event]) -> Event:
        """Copy `device` to `host` once `after` has happened; returns when the copy has been queued."""
        ...

    def mark(self) -> Event:
        """Return the event that everything computed so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """Let the computation go on only after `event`, and count how long it stands still."""
        ...

    def synchronize(self) -> None:
        """Return once everything queued is done."""
        ...

    def read_waited_s(self) -> float:
        """Return the seconds for which the computation has stood still since the last reading; synchronise before it."""
        ...


class SynchronousTransfers:
    """Copies at once: the schedule as it is without a GPU."""

    def __init__(self) -> None:
        self._waited = 0.0

    def fetch(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Copy at once."""
        self._copy(device, host)

    def write(self, host: Tensor, device: Tensor, after: Sequence[Event]) -> Event:
        """Copy at once."""
        self._copy(host, device)

    def mark(self) -> Event:
        """Everything is done already."""

    def wait(self, event: Event) -> None:
        """Everything has happened already."""

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def read_waited_s(self) -> float:
        """Return the seconds spent in copies: each of them stops the computation."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _copy(self, target: Tensor, source: Tensor) -> None:
        start = time.perf_counter()
        target.copy_(source)
        self._waited += time.perf_counter() - start


class CudaTransfers:
    """Copies on two streams of `device`, from and to page-locked memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._fetching = torch.cuda.Stream(device)
        self._writing = torch.cuda.Stream(device)
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def fetch(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Queue a copy on the fetching stream."""
        return self._queue(self._fetching, device, host, after)

    def write(self, host: Tensor, device: Tensor, after: Sequence[Event]) -> Event:
        """Queue a copy on the writing stream."""
        return self._queue(self._writing, host, device, after)

    def mark(self) -> Event:
        """Record an event on the computing stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Make the computing stream wait; two timed events around the wait tell how long."""
        if event is None:
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._stalls.append((before, after))

    def synchronize(self) -> None:
        """Wait on the host for all streams."""
        torch.cuda.synchronize(self._device)

    def read_waited_s(self) -> float:
        """Return the seconds between the events around each wait."""
        waited = sum(before.elapsed_time(after) for before, after in self._stalls) / 1000
        self._stalls.clear()
        return waited

    def _queue(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        with torch.cuda.stream(stream):
            for event in after:
                if event is not None:
                    stream.wait_event(event)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done


def transfers_of(device: torch.device) -> Transfers:
    """Return the lanes of a device: copies at once on the host."""
    return CudaTransfers(device) if device.type == "cuda" else SynchronousTransfers()
