"""A run from the driver's side: checks, folder, MLflow run, Ray Train, and a truthful end.

Nothing is written and nothing started before the checks have passed.
"""

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ray.exceptions import ActorDiedError, RayError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from fluxray.config.checks import check_available
from fluxray.config.load import from_yaml
from fluxray.config.schema import TrainConfig
from fluxray.errors import CheckpointError, OutOfMemory, PlanError
from fluxray.protocols import RunSummary
from fluxray.runtime import cluster, ladder, tracking
from fluxray.runtime.board import Assignment, pack, posted_fault, read_board, rebuild_fault, silent_ranks, start_board
from fluxray.runtime.failure import explain, kind_of
from fluxray.runtime.identity import Part
from fluxray.runtime.imports import quick_imports
from fluxray.runtime.outcome import NoRoomError, StoppedError
from fluxray.runtime.paths import (
    CONFIG_FILE,
    RegistryKeeper,
    committed_checkpoints,
    forget_missing_checkpoints,
    home,
    mend_registry,
)
from fluxray.runtime.prepare import Run, again, fetch_lost, prepare, save_config
from fluxray.runtime.progress import Display, Snapshot
from fluxray.runtime.report import WorkerFn, work
from fluxray.runtime.stopping import in_thread, on_stop_signal

CONTROLLER_FAILURES = 2
"""Ray's default is to try for ever."""


NCCL_GRACE_S = 30.0
"""How much longer NCCL waits for a lost rank than the host's network: it ends the process, which then cannot say what it saw."""


@dataclass(frozen=True)
class Steps:
    """What a run calls of the worker's module: on the driver before anything is started, and on each worker."""

    preflight: Callable[[TrainConfig, Path], None]
    run: WorkerFn


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end."""

    name: str
    run_dir: Path
    tracking_uri: str
    summary: RunSummary


def training() -> Steps:
    """Return what a training calls. Its imports take seconds, which the driver of a trial does not need."""
    with quick_imports():
        from fluxray.runtime.worker import preflight, run_worker

    return Steps(preflight, run_worker)


@dataclass(frozen=True)
class Trial:
    """What a run is told that is a trial of a sweep: what it is part of, by what it is judged, and when it is to stop."""

    part: Part
    metric: str
    should_stop: Callable[[], bool]


def train(config: TrainConfig, label: str = "run", verbose: bool = False, steps: Steps | None = None) -> FinishedRun:
    """Train on Ray to the end, or go on with the run of that name.

    `label` begins the name of a run that has none. Raises FluxrayError for the user's faults, FailedError, StoppedError.
    """
    steps = steps or training()
    check_available(config)
    cluster.check_machine(config.resources)
    run = prepare(config, label)
    print("preparing data and model", flush=True)
    steps.preflight(run.config, run.home.cache)
    with cluster.session(verbose, lambda: again(run.run_dir)) as local_cores:
        cluster.check_resources(run.config.resources)
        return carry_out(run, pack(steps.run), local_cores)


def carry_out(run: Run, work_fn: bytes, local_cores: int | None, trial: Trial | None = None) -> FinishedRun:
    """Train a prepared run, whose checks have passed, on the connected Ray. Raises like `train`."""
    missing = _mend_registry(run.run_dir)
    fetch_lost(run)
    save_config(run)
    target = tracking.start_run(run.config, run.home, run.run_dir, run.resumed, trial.part if trial else None)
    with _recorded(target, run.run_dir):
        print(f"run {run.name} {'goes on' if run.resumed is not None else 'starts'} in {run.run_dir}", flush=True)
        for name in missing:
            print(f"checkpoint {name} is gone from {run.run_dir}: not used", flush=True)
        first = Assignment(work_fn, run.config, run.run_dir, run.home.cache, None, target)
        judged = replace(first, metric=trial.metric) if trial else first
        summary = _down_the_ladder(run, judged, local_cores, trial.should_stop if trial else None)
    return FinishedRun(run.name, run.run_dir, target.shown, summary)


def _down_the_ladder(run: Run, first: Assignment, local_cores: int | None, should_stop: Callable[[], bool] | None) -> RunSummary:
    """Fit from the rung on which the run stands; where memory does not suffice, anew on the next one.

    A trial (one with `should_stop`) waits for room: a node that is lost leaves less of it than its sweep had counted.
    """
    rung = ladder.begin(run.config, run.run_dir, run.resumed)
    if rung.number:
        print(f"out of memory earlier: goes on with {rung.words}", flush=True)
    while True:
        assignment = replace(first, board=start_board(), rung=rung.number)
        try:
            return fit(assignment, run.run_dir, local_cores, should_stop)
        except NoRoomError:
            if should_stop is None:
                raise
            if should_stop():
                raise StoppedError(f"run {run.name} was stopped while it waited for room; {again(run.run_dir)}") from None
            _mend_registry(run.run_dir)
            continue
        except PlanError as error:
            raise ladder.refused(run.config, run.run_dir, rung.number, error) from None
        except OutOfMemory as error:
            _mend_registry(run.run_dir)
            down = ladder.step_down(run.config, run.run_dir, rung.number, str(error))
        assert down is not None, "the driver alone writes down where a run stands"
        rung = down.rung
        print(down.told, flush=True)
        assert first.tracking is not None
        tracking.note(first.tracking, {f"oom.{down.count}": down.told})


def evaluate(run_dir: Path, verbose: bool = False, run: WorkerFn | None = None) -> RunSummary:
    """Return loss and perplexity of a run's newest checkpoint on its held-out split. Raises like `train`."""
    if run is None:
        from fluxray.runtime.worker import run_evaluation as run
    config = from_yaml(run_dir / CONFIG_FILE)
    check_available(config)
    if not committed_checkpoints(run_dir):
        raise CheckpointError(f"RUN: {run_dir.name} has no checkpoint yet; train it to checkpoint.every_steps first")
    cluster.check_machine(config.resources)
    print(f"evaluating {run_dir.name}: starting", flush=True)
    scratch = run_dir / ".evaluation"
    with cluster.session(verbose) as local_cores:
        cluster.check_resources(config.resources)
        cache = home(config.storage).cache
        assignment = Assignment(pack(run), config, run_dir, cache, start_board(), None)
        try:
            return fit(assignment, scratch, local_cores)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def fit(
    assignment: Assignment, ray_dir: Path, local_cores: int | None, should_stop: Callable[[], bool] | None = None
) -> RunSummary:
    """Run `assignment` on Ray Train, whose own files go to `ray_dir`; shows progress meanwhile.

    A signal asks the run to save and stop, and so does `should_stop`, which is asked now and then. Raises like `train`, and
    OutOfMemory unless the run was asked to stop.
    """
    config, board, name = assignment.config, assignment.board, assignment.run_dir.name
    stops = threading.Event()

    def request_stop() -> None:
        stops.set()
        print("stopping: finishing this step and saving it; once more stops at once, without saving", flush=True)
        board.request_stop.remote()

    def poll(num_seen: int) -> Snapshot | None:
        keeper.keep()
        if should_stop is not None and not stops.is_set() and should_stop():
            request_stop()
        return read_board(board, num_seen)

    keeper = RegistryKeeper(assignment.run_dir)
    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = str(config.resources.collective_timeout_s)
    outcome: dict[str, Any]
    try:
        with on_stop_signal(request_stop), Display(poll, config.train.num_steps):
            outcome = in_thread(lambda: _fit_on_ray(assignment, ray_dir, local_cores))
    except (TrainingFailedError, RayError) as error:
        fault = posted_fault(board)
        told = explain(error, assignment.run_dir, silent_ranks(board))
        if fault is None:
            raise kind_of(error)(f"{told}; {_again(assignment)}") from error
        outcome = {"fault": (type(fault).__name__, str(fault))}
    except (KeyboardInterrupt, SystemExit):
        raise StoppedError(f"run {name} was stopped; {_again(assignment)}") from None
    if "fault" in outcome:
        fault = rebuild_fault(outcome["fault"])
        if isinstance(fault, OutOfMemory) and stops.is_set():
            raise StoppedError(f"run {name} was stopped, out of memory {fault}; {_again(assignment)}")
        raise fault
    summary: RunSummary = outcome["summary"]
    if summary.eval_loss is None:
        raise StoppedError(f"run {name} was stopped at step {summary.step} and saved; {_again(assignment)}")
    return summary


def _again(assignment: Assignment) -> str:
    """Return what the same command would do now."""
    return "try again" if assignment.tracking is None else again(assignment.run_dir)


def _fit_on_ray(assignment: Assignment, ray_dir: Path, local_cores: int | None) -> dict[str, Any]:
    """Return what rank 0's `work` returns. A controller that dies is started anew, and goes on from the last commit."""
    config = assignment.config
    on_gpus = config.resources.gpu > 0
    served_memory = cluster.find_served_card(config.resources)
    num_deaths = 0
    while True:
        trainer = TorchTrainer(
            work,
            train_loop_config={"assignment": assignment},
            torch_config=TorchConfig(
                backend="nccl" if on_gpus else "gloo",
                timeout_s=math.ceil(config.resources.collective_timeout_s + (NCCL_GRACE_S if on_gpus else 0)),
            ),
            scaling_config=scaling(config),
            run_config=RunConfig(
                name=ray_dir.name,
                storage_path=str(ray_dir.parent),
                failure_config=FailureConfig(
                    max_failures=config.resources.max_failures, controller_failure_limit=CONTROLLER_FAILURES
                ),
                checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.keep),
                worker_runtime_env={"env_vars": cluster.worker_environment(config, local_cores, served_memory)},
            ),
        )
        try:
            return cast(dict[str, Any], trainer.fit().return_value)
        except ActorDiedError:
            num_deaths += 1
            if num_deaths > config.resources.max_failures:
                raise
            print("Ray's controller of the run died: starting another", flush=True)
            _mend_registry(assignment.run_dir)


def _mend_registry(run_dir: Path) -> list[str]:
    """Make the list of committed checkpoints one that Ray starts with; return the names of those that have gone."""
    if mend_registry(run_dir):
        print("the list of committed checkpoints was not written to its end: what it was before is used", flush=True)
    return forget_missing_checkpoints(run_dir)


def scaling(config: TrainConfig) -> ScalingConfig:
    """Return what the workers ask of the cluster."""
    asked = config.resources
    share = {"CPU": asked.cpu, **({"GPU": asked.gpu} if asked.gpu > 0 else {})}
    return ScalingConfig(
        num_workers=asked.num_workers,
        use_gpu=asked.gpu > 0,
        resources_per_worker=share,
        accelerator_type=asked.accelerator,
        label_selector=dict(asked.label_selector) or None,
    )


@contextmanager
def _recorded(target: tracking.Target, run_dir: Path) -> Iterator[None]:
    """End the MLflow run as FINISHED, KILLED or FAILED, whatever happens inside."""
    status: tracking.Status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except (StoppedError, KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        problem = tracking.finish_run(target, status, run_dir)
        if problem:
            print(problem, flush=True)
