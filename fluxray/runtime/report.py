"""The workers' side of a run: metrics to MLflow, checkpoints to Ray Train; progress, notices, the user's faults to the board."""

import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.train

from fluxray.config.schema import TrainConfig
from fluxray.errors import FluxrayError, OutOfMemory
from fluxray.protocols import Report, RunSummary, SavedCheckpoint
from fluxray.runtime.board import Assignment, Fault
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.imports import quick_imports
from fluxray.runtime.lost import end_with_parent
from fluxray.runtime.paths import committed_checkpoints, registered_checkpoints
from fluxray.runtime.points import PointWriter
from fluxray.runtime.tracking import MetricWriter

BEAT_EVERY_S = 1.0

FAULT_AGREEMENT_S = 5.0
"""How long a rank that met a user's fault waits for the others to meet one."""

ALIVE_S = 2.0
"""How long a rank that fails waits for the driver to hear of it."""

WorkerFn = Callable[[TrainConfig, WorkerContext], RunSummary]


def work(settings: Mapping[str, Assignment]) -> dict[str, Any]:
    """Run on each Ray Train worker. Returns `{"summary": RunSummary}`, or `{"fault": Fault}` for what would only happen again.

    Ray retries whatever is raised, but a user's fault or a lack of memory would come again. So one that all ranks meet is
    returned; one that some ranks meet is raised, to tear the others out of their collectives, and the next attempt returns it at
    once.
    """
    end_with_parent()
    assignment = settings["assignment"]
    train = ray.train.get_context()
    rank, num_ranks = train.get_world_rank(), train.get_world_size()
    earlier: dict[int, Fault] = ray.get(assignment.board.faults.remote())
    if earlier:
        fault = earlier[min(earlier)]
        ray.get(assignment.board.post_fault.remote(rank, fault))
        return {"fault": fault}
    with quick_imports():  # of the models, before a thread of the reporter's imports MLflow
        run: WorkerFn = pickle.loads(assignment.run)
    reporter = Reporter(assignment, rank)
    context = WorkerContext(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=train.get_local_rank(),
        run_dir=assignment.run_dir,
        cache_dir=assignment.cache_dir,
        report=reporter,
        heartbeat=reporter.heartbeat,
        checkpoints=reporter.checkpoints,
        notify=reporter.notify,
        publish=reporter.publish,
        rung=assignment.rung,
    )
    try:
        if assignment.tracking is not None:
            reporter.adopt()
        return {"summary": run(assignment.config, context)}
    except (FluxrayError, OutOfMemory) as error:
        fault = (type(error).__name__, str(error))
        ray.get(assignment.board.post_fault.remote(rank, fault))
        if not _all_posted(assignment.board, num_ranks):
            raise
        return {"fault": fault}
    except Exception:
        reporter.show_alive()
        raise
    finally:
        reporter.close()


class Reporter:
    """Takes the trainer's reports: rank 0 logs the metrics and shows progress, every rank commits the checkpoint."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self.checkpoints = committed_checkpoints(assignment.run_dir)
        self._registered = {path.name for path in registered_checkpoints(assignment.run_dir)}
        self._board = assignment.board
        self._rank = rank
        self._step = -1
        self._answer: Any = self._board.beat.remote(rank, self._step)
        self._beat_at = 0.0
        self._stops = False
        logs = rank == 0 and assignment.tracking is not None
        self._writer = MetricWriter(assignment.tracking, self.notify) if logs and assignment.tracking else None
        judged = rank == 0 and assignment.metric is not None
        self._points = PointWriter(assignment.run_dir, assignment.metric) if judged and assignment.metric else None

    def adopt(self) -> None:
        """Have Ray register what it does not know and a resume counts on: fetched from the mirror, or written without Ray."""
        for path in reversed(self.checkpoints):
            if path.name not in self._registered:
                ray.train.report(
                    {"step": int(path.name.rpartition("_")[2])},
                    checkpoint=ray.train.Checkpoint(str(path)),
                    checkpoint_dir_name=path.name,
                    checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
                )
                self._registered.add(path.name)

    def __call__(self, report: Report) -> None:
        """Pass a report on. One with a checkpoint returns once all ranks have brought it; Ray goes on when it is durable."""
        if self._rank == 0:
            self._board.push.remote(report.step, dict(report.metrics))
            if self._writer is not None:
                self._writer.log(report.step, report.metrics)
            if self._points is not None:
                self._points.see(report.step, report.metrics)
        if report.checkpoint is not None:
            self._commit(report, report.checkpoint)

    def heartbeat(self, step: int) -> bool:
        """Tell the driver now and then that this rank has finished `step`; return whether it wants the run to stop."""
        self._step = step
        now = time.monotonic()
        if self._answer is None and now >= self._beat_at:
            self._answer = self._board.beat.remote(self._rank, step)
            self._beat_at = now + BEAT_EVERY_S
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self._stops, self._answer = bool(ray.get(self._answer)), None
        return self._stops

    def show_alive(self) -> None:
        """Tell the driver that this rank still runs: who waited in vain for a silent one must not look silent too."""
        ray.wait([self._board.beat.remote(self._rank, self._step)], timeout=ALIVE_S)

    def notify(self, text: str) -> None:
        """Show one line to the user; only rank 0's are shown."""
        if self._rank == 0:
            self._board.notify.remote(text)

    def publish(self, name: str) -> None:
        """Have MLflow keep a file of the run's folder."""
        if self._writer is not None:
            self._writer.artifact(name)

    def close(self) -> None:
        """Leave what MLflow has not got yet to the driver."""
        if self._writer is not None:
            self._writer.close()
        if self._points is not None:
            self._points.close()

    def _commit(self, report: Report, saved: SavedCheckpoint) -> None:
        """Let Ray register a checkpoint as soon as it is durable, and delete the oldest beyond the number to keep.

        Metrics up to it are made durable first: a run that goes on from it does not repeat them.
        One that was registered before and has been written anew (a damaged one, or the last of a run that had ended) keeps its
        place: registered twice, Ray would delete it while it still counts it.
        """
        if self._writer is not None:
            self._writer.flush()
        if self._points is not None:
            self._points.sync()
        path = saved.path
        if path.name in self._registered:
            return

        def once_durable(written: ray.train.Checkpoint, _: str) -> ray.train.Checkpoint:
            saved.wait()
            return written

        ray.train.report(
            {"step": report.step, **report.metrics},
            checkpoint=ray.train.Checkpoint(str(path)),
            checkpoint_dir_name=path.name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=once_durable,
            delete_local_checkpoint_after_upload=False,
        )
        self._registered.add(path.name)


def _all_posted(board: Any, num_ranks: int) -> bool:
    deadline = time.monotonic() + FAULT_AGREEMENT_S
    while len(ray.get(board.faults.remote())) < num_ranks:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
