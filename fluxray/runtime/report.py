"""What workers tell: metrics to MLflow, checkpoints to Ray Train; progress, notices, the user's faults to the driver's board."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError

from fluxray import errors
from fluxray.config.schema import TrainConfig
from fluxray.errors import FluxrayError
from fluxray.protocols import Report, RunSummary
from fluxray.runtime.paths import committed_checkpoints
from fluxray.runtime.progress import Snapshot
from fluxray.runtime.tracking import MetricWriter, Target
from fluxray.runtime.worker import WorkerContext

FAULT_AGREEMENT_S = 5.0
"""How long a rank that met a user's fault waits for the others to meet one."""

READ_TIMEOUT_S = 5.0
MAX_NOTICES = 1000

WorkerFn = Callable[[TrainConfig, WorkerContext], RunSummary]
Fault = tuple[str, str]
"""Name of the FluxrayError's class, and its message."""


class Board:
    """A Ray actor on the driver's node that workers write to and the driver reads."""

    def __init__(self) -> None:
        self._step = -1
        self._metrics: dict[str, float] = {}
        self._notices: list[str] = []
        self._faults: dict[int, Fault] = {}

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

    def post_fault(self, rank: int, fault: Fault) -> None:
        """Keep a user's fault for good: whatever Ray restarts would meet it again."""
        self._faults[rank] = fault

    def faults(self) -> dict[int, Fault]:
        """Return the faults by rank."""
        return self._faults


@dataclass(frozen=True)
class Assignment:
    """What the driver hands each worker. `tracking` is None where nothing is logged to MLflow."""

    run: WorkerFn
    config: TrainConfig
    run_dir: Path
    cache_dir: Path
    board: Any
    tracking: Target | None


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


def posted_fault(board: Any) -> FluxrayError | None:
    """Return the fault of the lowest rank that met one."""
    try:
        faults: dict[int, Fault] = ray.get(board.faults.remote(), timeout=READ_TIMEOUT_S)
    except (RayError, TimeoutError):
        return None
    return rebuild_fault(faults[min(faults)]) if faults else None


def rebuild_fault(fault: Fault) -> FluxrayError:
    """Return the exception that a worker met."""
    kind, message = fault
    return getattr(errors, kind, FluxrayError)(message)


def work(settings: Mapping[str, Assignment]) -> dict[str, Any]:
    """Run on each Ray Train worker. Returns `{"summary": RunSummary}`, or `{"fault": Fault}` for a user's fault.

    Ray retries whatever is raised, and a user's fault would only happen again. So a fault that all ranks meet is returned; one
    that some ranks meet is raised, to tear the others out of their collectives, and the next attempt returns it at once.
    """
    assignment = settings["assignment"]
    train = ray.train.get_context()
    rank, num_ranks = train.get_world_rank(), train.get_world_size()
    earlier: dict[int, Fault] = ray.get(assignment.board.faults.remote())
    if earlier:
        fault = earlier[min(earlier)]
        ray.get(assignment.board.post_fault.remote(rank, fault))
        return {"fault": fault}
    reporter = Reporter(assignment, rank)
    context = WorkerContext(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=train.get_local_rank(),
        run_dir=assignment.run_dir,
        cache_dir=assignment.cache_dir,
        report=reporter,
        checkpoints=reporter.checkpoints,
        notify=reporter.notify,
    )
    try:
        return {"summary": assignment.run(assignment.config, context)}
    except FluxrayError as error:
        fault = (type(error).__name__, str(error))
        ray.get(assignment.board.post_fault.remote(rank, fault))
        if not _all_posted(assignment.board, num_ranks):
            raise
        return {"fault": fault}
    finally:
        reporter.close()


class Reporter:
    """Takes the trainer's reports: rank 0 logs the metrics and shows progress, every rank commits the checkpoint."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self.checkpoints = committed_checkpoints(assignment.run_dir)
        self._registered = {path.name for path in self.checkpoints}
        self._board = assignment.board
        self._rank = rank
        logs = rank == 0 and assignment.tracking is not None
        self._writer = MetricWriter(assignment.tracking, self.notify) if logs and assignment.tracking else None

    def __call__(self, report: Report) -> None:
        """Pass a report on; returns once all ranks have brought a report with a checkpoint."""
        if self._rank == 0:
            self._board.push.remote(report.step, dict(report.metrics))
            if self._writer is not None:
                self._writer.log(report.step, report.metrics)
        if report.checkpoint is not None:
            self._commit(report, report.checkpoint)

    def notify(self, text: str) -> None:
        """Show one line to the user; only rank 0's are shown."""
        if self._rank == 0:
            self._board.notify.remote(text)

    def close(self) -> None:
        """Send what MLflow has not got yet."""
        if self._writer is not None:
            self._writer.flush()

    def _commit(self, report: Report, path: Path) -> None:
        """Register a checkpoint with Ray, which then deletes the oldest beyond the number to keep.

        One that was registered before and has been written anew (a damaged one, or the last of a run that had ended) keeps its
        place: registered twice, Ray would delete it while it still counts it.
        """
        if path.name in self._registered:
            return
        ray.train.report(
            {"step": report.step, **report.metrics},
            checkpoint=ray.train.Checkpoint(str(path)),
            checkpoint_dir_name=path.name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
        self._registered.add(path.name)


def _all_posted(board: Any, num_ranks: int) -> bool:
    deadline = time.monotonic() + FAULT_AGREEMENT_S
    while len(ray.get(board.faults.remote())) < num_ranks:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
