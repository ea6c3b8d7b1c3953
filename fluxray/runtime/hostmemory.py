"""The host's memory: whether a streamed model finds room, and a word in time before the system or Ray ends a worker."""

import os
from collections.abc import Callable
from typing import Any

import psutil

from fluxray.errors import PlanError
from fluxray.memory.estimate import GIB
from fluxray.memory.host import container_limit
from fluxray.memory.plan import MemoryPlan

MARGIN = 0.02
"""Of the host's memory; so close to the limit it is said."""

RAY_THRESHOLD = 0.95
"""Above this share Ray ends workers, unless RAY_memory_usage_threshold says otherwise."""

LESS = {
    "stream": "set optim.master=stochastic or more engine.resident_blocks",
    "sharded": "set checkpoint.asynchronous=false, or fewer workers a node",
}
"""What takes less of the host, by engine."""


def require_room(plan: MemoryPlan) -> None:
    """Raise PlanError if the blocks do not find room in the memory that is free here now."""
    memory = psutil.virtual_memory()
    free = min(memory.available, container_limit() or memory.available)
    needed = plan.bytes.host["blocks"]
    if needed > free:
        raise PlanError(
            f"hardware.host_memory: the blocks take {needed / GIB:.1f} GiB, and {free / GIB:.1f} of this host's "
            f"{memory.total / GIB:.1f} GiB are free; stop other programs, {LESS['stream']}, or choose a larger host"
        )


class HostWatch:
    """Tells, once each time, that the host runs short. `read` returns what psutil does: `total` and `available` bytes."""

    def __init__(self, engine_kind: str, notify: Callable[[str], None], read: Callable[[], Any] = psutil.virtual_memory):
        self._less = LESS[engine_kind]
        self._notify = notify
        self._read = read
        self._is_short = False

    def look(self) -> None:
        """Read the memory that is free; to be called now and then."""
        memory, threshold = self._read(), float(os.environ.get("RAY_memory_usage_threshold", RAY_THRESHOLD))  # noqa: SIM112
        was_short, self._is_short = self._is_short, memory.available < (1 - min(threshold, 1) + MARGIN) * memory.total
        if self._is_short and not was_short:
            self._notify(
                f"host memory: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free, and Ray ends workers above "
                f"{threshold:.0%}: stop other programs there, or at the next start {self._less}"
            )
