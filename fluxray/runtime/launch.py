"""A run from the driver's side: checks, folder, MLflow run, Ray Train, and a truthful end.

Nothing is written and nothing started before the checks have passed.
"""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import ActorDiedError, RayError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

from fluxray.config.checks import check_available
from fluxray.config.load import from_yaml
from fluxray.config.schema import TrainConfig
from fluxray.errors import CheckpointError
from fluxray.protocols import RunSummary
from fluxray.runtime import cluster, tracking
from fluxray.runtime.board import Assignment, pack, posted_fault, read_board, rebuild_fault, start_board
from fluxray.runtime.outcome import FailedError, StoppedError
from fluxray.runtime.paths import CONFIG_FILE, committed_checkpoints, forget_missing_checkpoints, home, write_text
from fluxray.runtime.prepare import prepare, save_config
from fluxray.runtime.progress import Display
from fluxray.runtime.report import WorkerFn, work
from fluxray.runtime.worker import preflight, run_evaluation, run_worker

CONTROLLER_FAILURES = 2
"""Ray's default is to try for ever."""

FAILURE_FILE = "failure.txt"


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


TRAINING = Steps(preflight, run_worker)


def train(config: TrainConfig, label: str = "run", verbose: bool = False, steps: Steps = TRAINING) -> FinishedRun:
    """Train on Ray to the end, or go on with the run of that name.

    `label` begins the name of a run that has none. Raises FluxrayError for the user's faults, FailedError, StoppedError.
    """
    check_available(config)
    run = prepare(config, label)
    steps.preflight(run.config, run.home.cache)
    with cluster.session(verbose) as local_cores:
        cluster.check_resources(run.config.resources)
        missing = forget_missing_checkpoints(run.run_dir)
        save_config(run)
        target = tracking.start_run(run.config, run.home, run.run_dir, run.resumed)
        with _recorded(target, run.run_dir):
            print(f"run {run.name} {'goes on' if run.resumed is not None else 'starts'} in {run.run_dir}", flush=True)
            for name in missing:
                print(f"checkpoint {name} is gone from {run.run_dir}: not used", flush=True)
            assignment = Assignment(pack(steps.run), run.config, run.run_dir, run.home.cache, start_board(), target)
            summary = fit(assignment, run.run_dir, local_cores)
    return FinishedRun(run.name, run.run_dir, target.uri, summary)


def evaluate(run_dir: Path, verbose: bool = False, run: WorkerFn = run_evaluation) -> RunSummary:
    """Return loss and perplexity of a run's newest checkpoint on its held-out split. Raises like `train`."""
    config = from_yaml(run_dir / CONFIG_FILE)
    check_available(config)
    if not committed_checkpoints(run_dir):
        raise CheckpointError(f"run: {run_dir.name} has no checkpoint yet; train it to checkpoint.every_steps first")
    scratch = run_dir / ".evaluation"
    with cluster.session(verbose) as local_cores:
        cluster.check_resources(config.resources)
        cache = home(config.storage).cache
        assignment = Assignment(pack(run), config, run_dir, cache, start_board(), None)
        try:
            return fit(assignment, scratch, local_cores)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def fit(assignment: Assignment, ray_dir: Path, local_cores: int | None) -> RunSummary:
    """Run `assignment` on Ray Train, whose own files go to `ray_dir`; shows progress meanwhile. Raises like `train`."""
    config, board, name = assignment.config, assignment.board, assignment.run_dir.name
    again = f"the same command with name={name} goes on from its last checkpoint" if assignment.tracking else "try again"
    trainer = TorchTrainer(
        work,
        train_loop_config={"assignment": assignment},
        torch_config=TorchConfig(backend="nccl" if config.resources.gpu > 0 else "gloo"),
        scaling_config=scaling(config),
        run_config=RunConfig(
            name=ray_dir.name,
            storage_path=str(ray_dir.parent),
            failure_config=FailureConfig(
                max_failures=config.resources.max_failures, controller_failure_limit=CONTROLLER_FAILURES
            ),
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.keep),
            worker_runtime_env={"env_vars": cluster.worker_environment(config, local_cores)},
        ),
    )
    try:
        with _stoppable(), Display(lambda num_seen: read_board(board, num_seen), config.train.num_steps):
            outcome: Any = trainer.fit().return_value
    except (TrainingFailedError, RayError) as error:
        fault = posted_fault(board)
        raise fault or FailedError(f"{explain(error, assignment.run_dir)}; {again}") from (None if fault else error)
    except (KeyboardInterrupt, SystemExit):
        raise StoppedError(f"run {name} was stopped; {again}") from None
    if "fault" in outcome:
        raise rebuild_fault(outcome["fault"])
    return outcome["summary"]


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


def explain(error: BaseException, run_dir: Path) -> str:
    """Return one line on why Ray gave a run up, and write the whole story to the run's folder."""
    write_text(run_dir / FAILURE_FILE, f"{type(error).__name__}: {error}\n")
    cause = f"Ray's controller failed: {_first_line(error)}"
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, failure = _origin(error.worker_failures)
        cause = f"worker {rank} failed: {type(failure).__name__}: {_first_line(failure)}"
    elif isinstance(error, ActorDiedError):
        cause = "Ray's controller of the run died"
    return f"run {run_dir.name}: {cause}; the whole story is in {run_dir / FAILURE_FILE}"


def _origin(failures: dict[int, Exception]) -> tuple[int, BaseException]:
    """Return rank and cause of the failure that began it: a lost worker or an own error, not a connection that a peer broke."""
    causes = {rank: _unwrapped(failure) for rank, failure in sorted(failures.items())}
    own = {
        rank: cause
        for rank, cause in causes.items()
        if "peer" not in str(cause) and "DistBackendError" not in type(cause).__name__
    }
    rank = min(own or causes)
    return rank, causes[rank]


def _unwrapped(failure: BaseException) -> BaseException:
    for name in ("_base_exc", "cause"):
        inner = getattr(failure, name, None)
        if isinstance(inner, BaseException):
            return inner
    return failure


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


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


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM stop a run as SIGINT does, which Ray Train takes to stop its workers; give both back after the context.

    Must be entered after Ray has been started, whose own handler of SIGTERM ends in an abort.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
