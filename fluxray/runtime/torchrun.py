"""The same worker without Ray: `torchrun --nproc_per_node=N -m fluxray.runtime.worker --profile P --model M key=value ...`.

Rank 0 does what the driver does under Ray: checks, folder, MLflow run. The same command with `name=NAME` goes on from the last
committed checkpoint, and torchrun gives it again as often as its `--max-restarts` says (0 unless given). A rank whose device has
not the memory puts the next rung down in the run's folder and fails; torchrun then ends the others, which wait for it.
"""

import argparse
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from fluxray.checkpoint import committed
from fluxray.config.checks import check_available
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError, FluxrayError, OutOfMemory, PlanError
from fluxray.protocols import Report, RunSummary
from fluxray.runtime import ladder, tracking
from fluxray.runtime.allocator import restart_with_allocator
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.outcome import FailedError
from fluxray.runtime.prepare import Run, fetch_lost, prepare, save_config
from fluxray.runtime.progress import Progress, Snapshot
from fluxray.runtime.worker import preflight, run_worker

T = TypeVar("T")

STOPPED = 130

SPEAKER_S = 10.0
"""How long the others wait when rank 0 has a fault to tell: torchrun ends every rank as soon as one has ended."""


def main(words: Sequence[str]) -> int:
    """Train as one of torchrun's processes; return the exit code: 0, 1 out of memory, 2 for the user's fault, 130 if stopped."""
    parser = argparse.ArgumentParser(prog="python -m fluxray.runtime.worker", description="One worker of a run under torchrun.")
    parser.add_argument("--profile")
    parser.add_argument("--model")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args(words)
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = _configured(arguments.profile, arguments.model, arguments.overrides)
        dist.init_process_group("nccl" if config.resources.gpu > 0 else "gloo")
        name, summary = _train(config, arguments.model or "run", rank)
    except FluxrayError as error:
        if rank == 0:
            print(f"fluxray: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(SPEAKER_S)
        return 2
    except FailedError as error:
        print(f"fluxray: failed: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        print(_ending(name, summary), flush=True)
        print(f"checkpoint {summary.checkpoint or 'none'}", flush=True)
    return 0 if summary.step == config.train.num_steps else STOPPED


def _ending(name: str, summary: RunSummary) -> str:
    if summary.eval_loss is None:
        return f"run {name} was stopped at step {summary.step} and saved; the same command with name={name} goes on"
    return f"run {name} finished at step {summary.step}: held-out {summary.held_out}"


def _configured(profile: str | None, model: str | None, overrides: Sequence[str]) -> TrainConfig:
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError("torchrun: did not start this process; use torchrun --nproc_per_node=N -m fluxray.runtime.worker ...")
    config = resolve(profile, model, overrides)
    restart_with_allocator(config)
    check_available(config)
    num_ranks = int(os.environ["WORLD_SIZE"])
    if config.resources.num_workers != num_ranks:
        raise ConfigError(
            f"resources.num_workers: {config.resources.num_workers}, but torchrun started {num_ranks} processes; "
            f"set resources.num_workers={num_ranks} or --nproc_per_node"
        )
    if config.name is None and _may_restart():
        raise ConfigError(
            "name: is not set, and torchrun's --max-restarts would begin another run each time; set name=NAME or --max-restarts=0"
        )
    num_here, num_cards = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), torch.cuda.device_count()
    if config.resources.gpu > 0 and num_here > num_cards:
        raise ConfigError(
            f"--nproc_per_node: {num_here} processes on a machine with {num_cards} GPUs, and NCCL wants one for each; "
            f"start no more than there are, or use --profile cpu"
        )
    return config


def _may_restart() -> bool:
    """Return whether torchrun would start its processes again if one failed now."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _train(config: TrainConfig, label: str, rank: int) -> tuple[str, RunSummary]:
    run, target, rung = _from_rank_0(rank, lambda: _start(config, label))
    writer = tracking.MetricWriter(target, _say) if rank == 0 else None
    status: tracking.Status = "FAILED"
    stop = _stop_on_signals()
    context = WorkerContext(
        rank=rank,
        num_ranks=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        run_dir=run.run_dir,
        cache_dir=run.home.cache,
        report=_reporter(run, writer),
        heartbeat=lambda _: stop.is_set(),
        checkpoints=committed(run.run_dir),
        notify=_say if rank == 0 else _say_nothing,
        publish=writer.artifact if writer is not None else _say_nothing,
        rung=rung,
    )
    dist.barrier()  # every rank has listed the checkpoints before one is written or deleted
    try:
        summary = run_worker(run.config, context)
        status = "FINISHED" if summary.step == config.train.num_steps else "KILLED"
        return run.name, summary
    except OutOfMemory as error:
        raise _step_down(run, target, rung, error) from error
    except PlanError as error:
        raise ladder.refused(run.config, run.run_dir, rung, error) from None
    finally:
        if writer is not None:
            writer.close()
            problem = tracking.finish_run(target, status, run.run_dir)
            if problem:
                _say(problem)


def _step_down(run: Run, target: tracking.Target, rung: int, error: OutOfMemory) -> FailedError:
    """Put the next rung down for the next start, unless another rank has; return what to fail with. Raises like `step_down`."""
    down = ladder.step_down(run.config, run.run_dir, rung, str(error))
    if down is None:
        return FailedError(f"out of memory {error}")
    tracking.note(target, {f"oom.{down.count}": down.told})
    return FailedError(down.told if _may_restart() else f"{down.told}, once you give the same command with name={run.name}")


def _stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; torchrun hands both to every process."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _start(config: TrainConfig, label: str) -> tuple[Run, tracking.Target, int]:
    run = prepare(config, label)
    preflight(run.config, run.home.cache)
    fetch_lost(run)
    save_config(run)
    target = tracking.start_run(run.config, run.home, run.run_dir, run.resumed)
    _say(f"run {run.name} {'goes on' if run.resumed is not None else 'starts'} in {run.run_dir}")
    rung = ladder.begin(run.config, run.run_dir, run.resumed)
    if rung.number:
        _say(f"out of memory earlier: goes on with {rung.words}")
    return run, target, rung.number


def _from_rank_0(rank: int, compute: Callable[[], T]) -> T:
    """Return on every rank what `compute` returns on rank 0; a user's fault there is raised on every rank."""
    found: list[T | FluxrayError | None] = [None]
    if rank == 0:
        try:
            found = [compute()]
        except FluxrayError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], FluxrayError):
        raise found[0]
    return found[0]  # type: ignore[return-value]


def _reporter(run: Run, writer: tracking.MetricWriter | None) -> Callable[[Report], None]:
    """Return what rank 0 does with reports: metrics to MLflow, a progress line now and then, old checkpoints deleted."""
    progress = Progress(run.config.train.num_steps)

    def report(item: Report) -> None:
        if writer is None:
            return
        writer.log(item.step, item.metrics)
        if "perf/tokens_per_s" in item.metrics:  # the last of some steps that are reported together
            progress.update(Snapshot(item.step, item.metrics, ()), time.monotonic())
            _say(progress.line())
        if item.checkpoint is not None:
            item.checkpoint.wait()
            writer.flush()  # a run that goes on from this checkpoint does not repeat the steps before it
            _prune(run.run_dir, run.config.checkpoint.keep)

    return report


def _prune(run_dir: Path, keep: int) -> None:
    for old in committed(run_dir)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(_: str) -> None:
    """Only rank 0 speaks."""
