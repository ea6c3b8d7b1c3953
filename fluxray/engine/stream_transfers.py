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

    def read_waits(self) -> tuple[float, float]:
        """Return the seconds since the last reading for which the computation stood still, and for which fetches stood still
        behind a write-back. The device must have finished.
        """
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

    def read_waits(self) -> tuple[float, float]:
        """Return the seconds spent in copies: each of them stops the computation."""
        waited, self._waited = self._waited, 0.0
        return waited, 0.0

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
        self._behind: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def fetch(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Queue a copy on the fetching stream."""
        self._behind.append(_timed_wait(self._fetching, [event for event in after if event is not None]))
        return self._queue(self._fetching, device, host)

    def write(self, host: Tensor, device: Tensor, after: Sequence[Event]) -> Event:
        """Queue a copy on the writing stream."""
        for event in after:
            if event is not None:
                self._writing.wait_event(event)
        return self._queue(self._writing, host, device)

    def mark(self) -> Event:
        """Record an event on the computing stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Make the computing stream wait; two timed events around the wait tell how long."""
        if event is None:
            return
        self._stalls.append(_timed_wait(torch.cuda.current_stream(self._device), [event]))

    def synchronize(self) -> None:
        """Wait on the host for all streams."""
        torch.cuda.synchronize(self._device)

    def read_waits(self) -> tuple[float, float]:
        """Return the seconds between the events around each wait of the two streams; one that is not over counts next time."""
        return take_ended(self._stalls), take_ended(self._behind)

    def _queue(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> Event:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done


def take_ended(waits: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Take the waits that are over, which come first, out of those of one stream; return their seconds."""
    number = next((index for index, (_, end) in enumerate(waits) if not end.query()), len(waits))
    over, waits[:] = waits[:number], waits[number:]
    return sum(begin.elapsed_time(end) for begin, end in over) / 1000


def _timed_wait(stream: torch.cuda.Stream, events: Sequence[torch.cuda.Event]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Let `stream` wait for `events` between two timed ones, which are returned."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for event in events:
        stream.wait_event(event)
    end.record(stream)
    return begin, end


def transfers_of(device: torch.device) -> Transfers:
    """Return the lanes of a device: copies at once on the host."""
    return CudaTransfers(device) if device.type == "cuda" else SynchronousTransfers()
