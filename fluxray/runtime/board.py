"""The driver's board, a Ray actor that workers write to, and what the driver hands each worker.

Ray's controller and the board's own process import this module, so it must stay light: neither torch nor the models.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from fluxray import errors
from fluxray.config.schema import TrainConfig
from fluxray.errors import FluxrayError, OutOfMemory
from fluxray.runtime.progress import Snapshot
from fluxray.runtime.tracking import Target

READ_TIMEOUT_S = 5.0
MAX_NOTICES = 1000

SILENCE_S = 5.0
"""How much longer than the others a rank must have been silent to be named."""

Fault = tuple[str, str]
"""Name of the class of `fluxray.errors`, and its message: a user's fault, or an OutOfMemory."""


class Board:
    """A Ray actor on the driver's node that workers write to and the driver reads."""

    def __init__(self) -> None:
        self._step = -1
        self._metrics: dict[str, float] = {}
        self._notices: list[str] = []
        self._faults: dict[int, Fault] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._stops = False

    def push(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the newest value of each metric."""
        self._step = step
        self._metrics.update(metrics)

    def notify(self, text: str) -> None:
        """Keep one line for the user."""
        if len(self._notices) < MAX_NOTICES:
            self._notices.append(text)

    def read(self, num_seen: int) -> Snapshot:
        """Return the newest report and the notices after the first `num_seen`."""
        return Snapshot(self._step, dict(self._metrics), self._notices[num_seen:])

    def beat(self, rank: int, step: int) -> bool:
        """Note that a rank is alive and has finished `step` (-1: none yet); return whether the run should stop."""
        self._beats[rank] = (step, time.monotonic())
        return self._stops

    def beats(self) -> dict[int, tuple[int, float]]:
        """Return by rank the last finished step that was noted, and how many seconds ago."""
        now = time.monotonic()
        return {rank: (step, now - at) for rank, (step, at) in self._beats.items()}

    def request_stop(self) -> None:
        """Let the workers save and stop after the step they are in."""
        self._stops = True

    def post_fault(self, rank: int, fault: Fault) -> None:
        """Keep a fault for good: whatever Ray restarts would meet it again."""
        self._faults[rank] = fault

    def faults(self) -> dict[int, Fault]:
        """Return the faults by rank."""
        return self._faults


@dataclass(frozen=True)
class Assignment:
    """What the driver hands each worker.

    `run` is a pickled function from TrainConfig and WorkerContext to RunSummary, which only the workers open. `tracking` is None
    where nothing is logged to MLflow. `rung` is that of WorkerContext. `metric` is what a sweep judges the run by.
    """

    run: bytes
    config: TrainConfig
    run_dir: Path
    cache_dir: Path
    board: Any
    tracking: Target | None
    rung: int | None = None
    metric: str | None = None


def pack(function: Callable[..., Any]) -> bytes:
    """Return a function as bytes, by reference if workers can import it, which `pickle.loads` opens."""
    return cloudpickle.dumps(function)  # pyright: ignore[reportPrivateImportUsage]


def start_board() -> Any:
    """Return the handle of a new board on this node."""
    here = ray.get_runtime_context().get_node_id()
    return ray.remote(Board).options(num_cpus=0, label_selector={"ray.io/node-id": here}).remote()


def read_board(board: Any, num_seen: int) -> Snapshot | None:
    """Return what the board knows, or None if it does not answer in time."""
    try:
        return ray.get(board.read.remote(num_seen), timeout=READ_TIMEOUT_S)
    except (RayError, TimeoutError):
        return None


def posted_fault(board: Any) -> FluxrayError | OutOfMemory | None:
    """Return the fault of the lowest rank that met one."""
    try:
        faults: dict[int, Fault] = ray.get(board.faults.remote(), timeout=READ_TIMEOUT_S)
    except (RayError, TimeoutError):
        return None
    return rebuild_fault(faults[min(faults)]) if faults else None


def silent_ranks(board: Any) -> str | None:
    """Return one line on the ranks that have said nothing for much longer than the others, or None if there are none."""
    try:
        beats: dict[int, tuple[int, float]] = ray.get(board.beats.remote(), timeout=READ_TIMEOUT_S)
    except (RayError, TimeoutError):
        return None
    newest = min((age for _, age in beats.values()), default=0.0)
    silent = {rank: step for rank, (step, age) in sorted(beats.items()) if age > newest + SILENCE_S}
    since = {rank: f"step {step}" if step >= 0 else "it was started" for rank, step in silent.items()}
    return ", ".join(f"worker {rank} has said nothing since {when}" for rank, when in since.items()) or None


def rebuild_fault(fault: Fault) -> FluxrayError | OutOfMemory:
    """Return the exception that a worker met."""
    kind, message = fault
    return getattr(errors, kind, FluxrayError)(message)
