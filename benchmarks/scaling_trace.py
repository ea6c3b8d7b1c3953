"""Where the time of some steps goes on one GPU, from the kernels of a profiler's trace."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "optimizer": ("adam", "multi_tensor"),
}
"""Parts of computing, by what a kernel's name holds; the rest is `other kernels`."""


class Kernel(NamedTuple):
    """A kernel or copy on the GPU, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """Return the kernels of a trace in Chrome's format."""
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in trace["traceEvents"] if event.get("cat") in wanted]
    return [Kernel(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events]


def parts(kernels: Sequence[Kernel], num_steps: int) -> dict[str, float]:
    """Return seconds a step: of computing, by its kinds and as a whole, of communication, and of its exposed part.

    Communication is exposed while NCCL's kernels run and no other does. `idle` is when none runs at all, between the first and
    the last. Kernels of several streams count once in `computing`, and each in its own kind.
    """
    if not kernels:
        return {}
    talking = [kernel for kernel in kernels if kernel.name.lower().startswith("nccl")]
    computing = [kernel for kernel in kernels if not kernel.name.lower().startswith("nccl")]
    busy = _length(computing)
    exposed = _length(kernels) - busy
    whole = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    found = {"computing": busy, "communication": _length(talking), "exposed": exposed, "idle": whole - _length(kernels)}
    for kernel in computing:
        name = kernel.name.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other kernels")
        found[kind] = found.get(kind, 0.0) + kernel.end - kernel.start
    return {kind: microseconds / 1e6 / num_steps for kind, microseconds in found.items()}


def _length(kernels: Iterable[Kernel]) -> float:
    """Return how long at least one of some kernels runs."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total
