"""What a GPU and its host link attain, measured in about a second."""

import time
from collections.abc import Callable

import torch

LINK_BYTES = 2**28
REPEATS = 5


def probe_link(device: torch.device) -> float:
    """Return bytes/s between page-locked host memory and `device`, each way while the other way is in use too.

    Both ways begin together, each on a stream of its own, and the slower one counts.
    """
    host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        for _ in range(2):
            with torch.cuda.stream(streams[0]):
                there[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(there[1], non_blocking=True)

    return 2 * LINK_BYTES / _best(both, device)


def probe_memory_bandwidth(device: torch.device) -> float:
    """Return bytes/s that a copy inside the device's memory reads and writes, together."""
    source = torch.empty(2 * LINK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls, after one that warms up."""
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
