"""One worker of a run, under Ray or torchrun, and the place where every part is put together.

`python -m fluxray.runtime.worker` is what torchrun starts.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fluxray import checkpoint
from fluxray.config.schema import ProfileConfig, TrainConfig
from fluxray.engine.stream import StreamEngine
from fluxray.errors import CheckpointError, ConfigError
from fluxray.memory.governor import Governor
from fluxray.memory.plan import MemoryPlan, cut_anew
from fluxray.metrics import StepMemory, Throughput, measure_matrix_tflops
from fluxray.optim.schedule import build_schedule
from fluxray.protocols import Engine, RunState, RunSummary, SavedCheckpoint
from fluxray.ranks import ALONE, Ranks
from fluxray.runtime import mirror
from fluxray.runtime.allocator import require_allocator
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.engines import build_engine
from fluxray.runtime.governing import Governing, governor_of
from fluxray.runtime.ladder import Rung, at_rung, explained, saved_rung
from fluxray.runtime.learn_images import learn_images, preflight_images
from fluxray.runtime.learn_text import learn_text, preflight_text
from fluxray.runtime.learned import Learned
from fluxray.runtime.mirroring import Uploads
from fluxray.runtime.paths import write_text
from fluxray.runtime.pictures import Pictures
from fluxray.runtime.planned import PLAN_FILE, plan_worker
from fluxray.runtime.planning import describe, plan_run, policy_without_plan
from fluxray.runtime.profiling import StepRecorder
from fluxray.runtime.runwatch import RunWatch
from fluxray.runtime.saver import Saver
from fluxray.runtime.sharing import allocator_share
from fluxray.trainer import Cadence, Hooks, Trainer, evaluate


def preflight(config: TrainConfig, cache_dir: Path) -> None:
    """Do on the driver all that can be found wrong before anything is started: data and model. Raises FluxrayError."""
    match config.task.kind:
        case "lm":
            preflight_text(config, cache_dir)
        case "flow":
            preflight_images(config)


def run_worker(config: TrainConfig, context: WorkerContext) -> RunSummary:
    """Train to the end from the newest usable checkpoint, evaluate, and return how it ended. Collective over all ranks.

    Raises OutOfMemory on a rank whose device has not the memory; the others then wait for it in vain.
    """
    rung = _rung(config, context)
    with explained(rung.config, context.rank):
        return _train(rung, context)


def _rung(config: TrainConfig, context: WorkerContext) -> Rung:
    return at_rung(config, saved_rung(context.checkpoints) if context.rung is None else context.rung)


def _train(rung: Rung, context: WorkerContext) -> RunSummary:
    config = rung.config
    parts = build_parts(config, context)
    initial = RunState(config.seed, build_schedule(config.optim, config.train.num_steps), rung=rung.number)
    state = _resume(parts, context, initial)
    if context.rank == 0:
        _describe_run(rung, parts, context)
        for line in (*parts.learned.warnings, parts.learned.summary):
            context.notify(line)
    uploads = _start_uploads(config, context)
    if state is not initial:
        uploads.follow(SavedCheckpoint(context.run_dir / checkpoint.directory_name(state.step), lambda: 0.0))
    asynchronous = config.checkpoint.asynchronous and config.engine.kind == "sharded"  # a streamed model has no room for a copy
    saver = Saver(context.run_dir, _host_ranks(config, context.num_ranks), asynchronous)
    governing = _govern(config, parts, context)
    state = governing.begin(state, config.batch.micro_size) if governing else replace(state, micro_size=None)
    watch = RunWatch(
        parts.engine,
        parts.plan and (cut_anew(parts.plan, state.micro_size.rows) if state.micro_size else parts.plan),
        parts.device,
        context.run_dir,
        context.notify,
        context.publish,
        parts.throughput.pause,
        traces=parts.device.type == "cuda" or not config.compile,
        peaks=governing.memory if governing else None,
    )

    recorder = StepRecorder(
        config.profile if context.rank == 0 else ProfileConfig(),
        parts.device,
        context.run_dir,
        context.publish,
        parts.throughput.pause,
        parts.throughput.read,
    )
    recorder.at(state.step)

    def should_stop(at: RunState) -> bool:
        watch.stepped()
        recorder.at(at.step)
        return parts.ranks.any(context.heartbeat(at.step))

    learned = parts.learned
    pictures = _pictures(parts, context)
    hooks = Hooks(
        batches=governing.batches(learned.loader) if governing else learned.loader.train_batches,
        eval_batches=learned.eval_batches,
        eval_metrics=learned.eval_metrics,
        save=lambda at: uploads.follow(saver.save(at, parts.engine.state_items())),
        memory=watch.memory,
        should_stop=should_stop,
        report=context.report,
        notify=context.notify,
        adapt=governing.after_step if governing else _unchanged,
        first_loss=learned.first_loss,
        sample=None if pictures is None else lambda at: pictures.at(at.step),
        terms=learned.terms,
    )
    sample_every = config.sample.every_steps if pictures else 0
    cadence = Cadence(config.train.log_every, config.evaluation.every_steps, config.checkpoint.every_steps, sample_every)
    trainer = Trainer(parts.engine, hooks, cadence, parts.throughput, config.train.on_nonfinite)
    try:
        summary = trainer.fit(state)
        stopped = summary.step < config.train.num_steps
        uploads.finish(parts.ranks.any, lambda: context.heartbeat(summary.step), stopped)
    finally:
        uploads.close()
    if summary.checkpoint is None and context.checkpoints:
        return replace(summary, checkpoint=str(context.checkpoints[0]))
    return summary


def run_evaluation(config: TrainConfig, context: WorkerContext) -> RunSummary:
    """Evaluate the newest usable checkpoint on the held-out split. Collective over all ranks."""
    context.notify("loading data, model and checkpoint")
    config = _rung(config, context).config
    parts = build_parts(config, context)
    reader = _load_newest(parts, context)
    if reader is None:
        raise CheckpointError(f"RUN: {context.run_dir.name} has no checkpoint yet; train it first")
    metrics = evaluate(parts.engine, parts.learned.eval_batches(), parts.learned.eval_metrics)
    return RunSummary(reader.state.step, None, metrics["eval/loss"], metrics.get("eval/perplexity"), str(reader.directory))


@dataclass(frozen=True)
class Parts:
    """What one worker is made of."""

    learned: Learned
    engine: Engine
    throughput: Throughput
    plan: MemoryPlan | None
    device: torch.device
    ranks: Ranks


def build_parts(config: TrainConfig, context: WorkerContext) -> Parts:
    """Build data, task and model, plan, and engine, in this order."""
    device = _prepare_torch(config, context.local_rank)
    ranks = _host_ranks(config, context.num_ranks)
    match config.task.kind:
        case "lm":
            learned = learn_text(config, context, ranks, device)
        case "flow":
            learned = learn_images(config, context, ranks, device)
    plan = ranks.together(lambda: plan_worker(config, learned.known, context.rank, context.notify, context.run_dir))
    policy = ranks.gather(plan and plan.policy)[0] or policy_without_plan(config, learned.known)
    engine = build_engine(config, learned.stack, learned.loss_fn, device, context.num_ranks, policy, context.notify)
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    peak_tflops = plan.hardware.tflops if plan else config.hardware.tflops or measure_matrix_tflops(device, dtype)
    copies = isinstance(engine, StreamEngine) or config.activation_checkpoint == "offload"
    throughput = Throughput(
        learned.flops_of,
        peak_tflops,
        context.num_ranks,
        floor_tflops=plan.floor_flops / 1e12 if plan else None,
        read_waits=engine.read_waits if copies else None,
        terms=learned.terms,
    )
    return Parts(learned, engine, throughput, plan, device, ranks)


def _host_ranks(config: TrainConfig, num_ranks: int) -> Ranks:
    """Return a new group of all ranks over the host's network, apart from every other group. Collective."""
    if num_ranks == 1:
        return ALONE
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.resources.collective_timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return Ranks.of_group(group)


def _prepare_torch(config: TrainConfig, local_rank: int) -> torch.device:
    """Set what is global to the process and return the worker's device."""
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cuda.enable_cudnn_sdp(False)  # never torch's own choice: its backward has crashed on inputs that flash accepts
    if config.resources.gpu == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"resources.gpu: {config.resources.gpu:g}, but torch finds no GPU here; choose --profile cpu")
    require_allocator(config)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)  # begins the CUDA context
    share = allocator_share(config.resources.gpu, config.hardware.device_memory, total, total - free)
    if share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)
    return device


def _resume(parts: Parts, context: WorkerContext, initial: RunState) -> RunState:
    """Load the newest usable checkpoint into the engine and return its state; `initial` if there is none.

    The saved schedule goes on; only its length may have been changed since, and the rung.
    """
    reader = _load_newest(parts, context)
    if reader is None:
        return initial
    schedule = replace(reader.state.schedule, total_steps=initial.schedule.total_steps)
    state = replace(reader.state, schedule=schedule, rung=initial.rung)
    if state.step > state.schedule.total_steps:
        raise ConfigError(f"train.num_steps: {state.schedule.total_steps}, but {reader.directory.name} is further; raise it")
    context.notify(f"resumed at step {state.step} from {reader.directory.name}")
    return state


def _load_newest(parts: Parts, context: WorkerContext) -> checkpoint.CheckpointReader | None:
    """Load the newest checkpoint that no rank finds damaged into the engine; None if there is none at all."""

    def load(directory: Path) -> checkpoint.CheckpointReader:
        reader = checkpoint.CheckpointReader(directory)
        rounded[:] = parts.engine.load_items(reader)
        return reader

    rounded: list[str] = []
    found = checkpoint.open_newest(
        context.checkpoints, context.notify, lambda directory: parts.ranks.together(lambda: load(directory))
    )
    if rounded:
        context.notify(f"{len(rounded)} parameters were saved in a wider format and are rounded now, such as {rounded[0]}")
    return found


def _govern(config: TrainConfig, parts: Parts, context: WorkerContext) -> Governing | None:
    """Return what decides how large micro-batches are, the same on all ranks; None where the configuration does. Collective."""
    if not config.batch.dynamic:
        return None

    def decide() -> Governor | None:
        if context.rank != 0:
            return None
        return governor_of(config, parts.plan or plan_run(config, known=parts.learned.known))

    governor = parts.ranks.gather(parts.ranks.together(decide))[0]
    return Governing(governor, StepMemory(parts.device), parts.ranks, context.notify)


def _pictures(parts: Parts, context: WorkerContext) -> Pictures | None:
    sampling = parts.learned.sampling
    if sampling is None:
        return None
    return Pictures(sampling, parts.engine, parts.device, parts.ranks, context.run_dir, context.notify, context.publish)


def _unchanged(state: RunState) -> RunState:
    return state


def _start_uploads(config: TrainConfig, context: WorkerContext) -> Uploads:
    """Return what uploads checkpoints to `checkpoint.mirror`; without one it does nothing."""
    name, keep = context.run_dir.name, config.checkpoint.keep
    shown = f"{(config.checkpoint.mirror or '').partition('?')[0].rstrip('/')}/{name}"
    place = (context.rank, context.num_ranks)
    uploads = Uploads(context.run_dir, place, keep, lambda: mirror.of_run(config, name), shown)
    if config.checkpoint.mirror is not None:
        uploads.start(context.notify)
    return uploads


def _describe_run(rung: Rung, parts: Parts, context: WorkerContext) -> None:
    """Put the plan of each rung beside the run, and what evaluation and export need."""
    run_dir = context.run_dir
    parts.learned.describe(run_dir)
    if parts.plan is not None:
        name = f"plan-rung-{rung.number}.txt" if rung.number else PLAN_FILE
        write_text(run_dir / name, "\n".join([*describe(rung.config, parts.plan, run_dir.name), ""]))
        context.publish(name)


if __name__ == "__main__":
    import sys

    from fluxray.runtime.torchrun import main

    sys.exit(main(sys.argv[1:]))
