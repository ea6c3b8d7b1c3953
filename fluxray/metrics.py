"""Throughput, utilisation and memory of a training run."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

from fluxray.protocols import Batch

GIB = 2**30


def count_forward_flops(forward: Callable[[], Any]) -> int:
    """Return the floating-point operations of matrix products and attention in `forward`, which may run on meta tensors.

    A training step counts three times that (Chowdhery et al., arXiv:2204.02311, appendix B); recomputation is not counted.
    Attention counts in full, as the counter does, whether or not a mask lets kernels skip part of it.
    """
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        forward()
    return counter.get_total_flops()


def measure_matrix_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the TFLOPS that a large square matrix product reaches on `device` in `dtype`: the best of several, data random."""
    size, repeats = (8192, 10) if device.type == "cuda" else (1024, 10)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


class StepMemory:
    """The most bytes that a step has allocated of a device; on a CPU, what the process holds. Never waits for the device.

    On a GPU each step starts the allocator's peaks anew; those before are kept, for `memory_metrics`. What the allocator has
    reserved beyond what is allocated does not count: it gives that back where it would not suffice.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.allocated = self.reserved = 0

    def begin(self) -> None:
        """Begin a step."""
        if self._device.type == "cuda":
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self._device))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> int:
        """Return the peak of the step, of which the host has queued everything."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return psutil.Process().memory_info().rss


def memory_metrics(device: torch.device, before: StepMemory | None = None) -> dict[str, float]:
    """Return GiB of device memory (peak allocated and reserved since the start, and their ratio, which fragmentation raises) and
    of this process on the host.

    `before` has the peaks up to where they were started anew.
    """
    host = psutil.Process().memory_info().rss / GIB
    if device.type != "cuda":
        return {"memory/host_gib": host}
    allocated = max(before.allocated if before else 0, torch.cuda.max_memory_allocated(device))
    reserved = max(before.reserved if before else 0, torch.cuda.max_memory_reserved(device))
    return {
        "memory/allocated_gib": allocated / GIB,
        "memory/reserved_gib": reserved / GIB,
        "memory/reserved_over_allocated": reserved / max(allocated, 1),
        "memory/host_gib": host,
    }


class Throughput:
    """Positions per second and model FLOPs utilisation since the last reading.

    `flops_of` counts the FLOPs of a batch's forward and backward; `peak_tflops` is the rate of one device, of which there are
    `num_devices`. `floor_tflops` is the plan's rate of all devices with nothing lost, if there is a plan. `read_waits` returns
    for how many seconds since it was last called the device has waited for fetches, and fetches for write-backs. `terms` are what
    losses count: `images` are reported by the second, too.
    """

    def __init__(
        self,
        flops_of: Callable[[Batch], float],
        peak_tflops: float,
        num_devices: int,
        floor_tflops: float | None = None,
        read_waits: Callable[[], tuple[float, float]] | None = None,
        terms: str = "tokens",
    ):
        self._flops_of = flops_of
        self._peak = peak_tflops * 1e12 * num_devices
        self._num_devices = num_devices
        self._floor = None if floor_tflops is None else floor_tflops * 1e12
        self._read_waits = read_waits
        self._terms = terms
        self._tokens = self._steps = 0
        self._flops = 0.0
        self._start = time.perf_counter()

    def add(self, batches: Sequence[Batch]) -> None:
        """Count a step: its positions, padding included, and FLOPs, as those of this device on each."""
        self._tokens += self._num_devices * sum(batch.num_tokens for batch in batches)
        self._flops += self._num_devices * sum(self._flops_of(batch) for batch in batches)
        self._steps += 1

    def read(self, num_terms: int = 0) -> dict[str, float]:
        """Return rates and waits since the last reading, and start anew; none where no step was counted.

        The device must have finished what was counted, of which the losses counted `num_terms`.
        """
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        flops_per_s = self._flops / seconds
        found = {"perf/tokens_per_s": self._tokens / seconds, "perf/mfu": flops_per_s / self._peak}
        if self._terms == "images":
            found["perf/images_per_s"] = num_terms / seconds
        if self._floor is not None:
            found["perf/of_floor"] = flops_per_s / self._floor
        if self._read_waits is not None:
            fetch, write = (seconds / max(self._steps, 1) for seconds in self._read_waits())
            found |= {"perf/wait_fetch_s": fetch, "perf/wait_write_s": write}
        counted = self._steps > 0
        self._tokens, self._flops, self._steps, self._start = 0, 0.0, 0, now
        return found if counted else {}

    def pause(self) -> "Pause":
        """Return a context whose time and waits do not count: evaluation, saving. A reading comes right before it."""
        return Pause(self)

    def leave_out(self, seconds: float) -> None:
        """Leave the last `seconds`, and all waits until now, out of the current reading. The device must have finished."""
        self._start += seconds
        if self._read_waits is not None:
            self._read_waits()


class Pause:
    """Leaves the time spent inside it out of a Throughput's reading."""

    def __init__(self, throughput: Throughput):
        self._throughput = throughput

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._throughput.leave_out(time.perf_counter() - self._entered)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
