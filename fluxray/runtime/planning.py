"""From a configuration to its memory plan: where models, formats of state and layouts meet the arithmetic of `fluxray.memory`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fluxray.config.adapter import LoraConfig
from fluxray.config.keys import nested
from fluxray.config.load import build, merge
from fluxray.config.schema import ShardedEngineConfig, StreamEngineConfig, TrainConfig
from fluxray.engine.precision import AUTOCAST_DTYPES
from fluxray.engine.stream_layout import Layout
from fluxray.engine.stream_store import resident_indices
from fluxray.errors import ConfigError, PlanError
from fluxray.memory.checkpointing import again_share
from fluxray.memory.estimate import FULL_CHUNK, Demand, Policy, UnitBytes
from fluxray.memory.plan import MemoryPlan, Wanted, fitting_sizes, plan
from fluxray.memory.spec import ModelSpec, ParameterSpec, read_spec
from fluxray.memory.speed import Hardware
from fluxray.memory.table import reason, table
from fluxray.optim.average import DTYPES
from fluxray.optim.states import state_format
from fluxray.runtime.blockprobe import computes_partly_again, hides_operations, probe_blocks
from fluxray.runtime.figures import hardware, host_bytes
from fluxray.runtime.sampling_needs import sampling_needs
from fluxray.runtime.stacks import Known, example, model_of

MAX_SUGGESTIONS = 3

META = torch.device("meta")


def plan_run(config: TrainConfig, spec: ModelSpec | None = None, known: Known = None) -> MemoryPlan:
    """Return the plan of a run, which may not fit. Nothing is allocated but what probes need where `hardware` is open."""
    spec = spec or model_spec(config, known)
    device, spec = _with_blocks(config, hardware(config), spec, known)
    return plan(demand(config, spec), device, _wanted(config, spec))


def check_techniques(config: TrainConfig, has_dropout: bool) -> None:
    """Raise ConfigError for techniques that do not go together on a model with or without dropout.

    `selective` without a budget keeps what it can: nothing where operations are hidden.
    """
    if config.activation_checkpoint_budget is not None and hides_operations(config, has_dropout):
        what, remedy = ("dropout", "model.config's dropout to 0") if has_dropout else ("attention=flex", "attention=varlen")
        raise ConfigError(
            f"activation_checkpoint: 'selective' chooses among operations, which compiled blocks with {what} hide; set "
            f"compile=false, {remedy}, or activation_checkpoint=full"
        )


def policy_without_plan(config: TrainConfig, known: Known) -> Policy | None:
    """Return what the sharded engine must be told where there is no plan: on a CPU, whose ranks share the host."""
    if config.activation_checkpoint != "selective":
        return None
    spec, each = model_spec(config, known), host_bytes(config) // config.resources.num_workers
    return plan(demand(config, spec), Hardware(each, None, None, 1.0, None, None, {}), _wanted(config, spec)).policy


def require_fit(config: TrainConfig, found: MemoryPlan) -> None:
    """Raise PlanError, with the nearest settings that fit, unless the plan does."""
    if found.shortfalls:
        near = nearest(config, found)
        remedy = f"fits with {' or with '.join(near)}" if near else "no single change or two of them would fit"
        raise PlanError(f"plan: {reason(found)}; {remedy}")


def describe(config: TrainConfig, found: MemoryPlan, label: str) -> list[str]:
    """Return the plan as lines for people."""
    spec, batch, policy = found.demand.spec, config.batch, found.policy
    what = "images" if spec.told else "rows"
    on = f"{found.demand.num_ranks} ranks x " if found.demand.num_ranks > 1 else ""
    per_parameter = sum(unit.total for unit in found.demand.blocks) / sum(block.num_parameters for block in spec.blocks)
    lines = [
        f"{label}: {spec.num_parameters / 1e9:.4g}B parameters, {len(spec.blocks)} blocks, engine {config.engine.kind}",
        f"{'a step':<18}{on}{batch.accumulation_steps} micro-batches x {batch.micro_size} {what} x {spec.row_tokens:,} tokens "
        f"= {found.demand.tokens:,} tokens",
    ]
    if batch.dynamic:
        fitting = ", ".join(map(str, fitting_sizes(found, batch.dynamic_sizes))) or "none"
        sizes = ", ".join(map(str, batch.dynamic_sizes))
        lines.append(f"{'micro-batches':<18}change with memory, of {sizes} {what}: fitting are {fitting}")
    if spec.told:
        lines.append(f"{'an image':<18}{spec.told}")
    kept = f"{config.precision}, {config.optim.kind}, master {config.trained_optim.master}, clip {config.clip.mode}"
    if isinstance(config.adapter, LoraConfig):
        share = spec.num_trained / spec.num_parameters
        lines.append(
            f"{'adapter':<18}lora of rank {config.adapter.rank}: {spec.num_trained:,} parameters ({share:.2%}) are trained: they "
            f"alone have gradients, optimizer states and a place in checkpoints"
        )
        if config.adapter.base != "full":
            codes = sum(unit.codes for unit in found.demand.blocks)
            lines.append(f"{'base':<18}{config.adapter.base}: linear layers of the blocks take {codes / 1e9:.3g} GB in 4 bits")
    lines.append(f"{'kept':<18}{per_parameter:.2f} bytes a parameter: {kept}")
    if config.engine.kind == "stream":
        lines.append(
            f"{'policy':<18}{policy.resident_blocks} of {len(spec.blocks)} blocks resident, {policy.weight_slots} weight and "
            f"{policy.state_slots} state slots, "
            + ("" if spec.told else f"logits of {policy.epilogue_tokens:,} tokens at once, ")
            + f"activations of {policy.kept_blocks} kept"
        )
    again = again_share(found.demand, policy)
    told = config.activation_checkpoint
    if told == "selective" and found.demand.hides_operations:
        told += ", of which nothing is kept: with dropout or attention=flex compiled blocks hide their operations"
    elif told == "selective":
        told += f", {policy.checkpoint_budget / 1e9:.3g} GB of results kept at most"
    lines.append(f"{'recomputed':<18}{again:.0%} of the blocks' forward: activation_checkpoint {told}")
    return [*lines, *table(found)]


def nearest(config: TrainConfig, found: MemoryPlan) -> list[str]:
    """Return a few changes, as words for the command line, each of which makes the plan fit: one key if that is enough."""
    changes = list(_changes(config))
    pairs = [{**a, **b} for i, a in enumerate(changes) for b in changes[i + 1 :] if not a.keys() & b.keys()]
    for candidates in (changes, pairs):
        fitting: list[str] = []
        seen: set[frozenset[str]] = set()
        for change in candidates:
            if frozenset(change) not in seen and _fits(config, change, found):
                seen.add(frozenset(change))
                fitting.append(" ".join(f"{key}={'null' if value is None else value}" for key, value in change.items()))
            if len(fitting) == MAX_SUGGESTIONS:
                break
        if fitting:
            return fitting
    return []


def model_spec(config: TrainConfig, known: Known = None) -> ModelSpec:
    """Return the spec of the configured model, from the meta device; ConfigError for a model that does not exist.

    The tokenizer's entries make the vocabulary of a model that leaves it open. Without the sizes of images they are those in the
    caches, or assumed where there are none.
    """
    modelled = model_of(config, known)
    stack = modelled.stack.to(torch.bfloat16 if config.precision == "mixed-bf16" else torch.float32)

    def forward(num_rows: int) -> Tensor:
        return stack(example(config, modelled, num_rows, META), lambda output, _: output)

    spec = read_spec(stack.model, [block.name for block in stack.blocks], forward, modelled.row_tokens)
    return replace(spec, has_dropout=stack.has_dropout, num_sizes=modelled.num_sizes, told=modelled.told)


def most_micro_batches(config: TrainConfig, num_sizes: int) -> int | None:
    """Return how many micro-batches a step has at most, where rows of so many sizes meet in one; None for one size.

    A step holds its rows of a size side by side, those of two epochs apart. The micro-batches of such a run of rows are full but
    for the last.
    """
    if num_sizes == 1:
        return None
    together = config.resources.num_workers * config.batch.micro_size
    num_runs = min(2 * num_sizes, config.global_batch_size)
    return (config.global_batch_size + num_runs * (together - 1)) // together


def demand(config: TrainConfig, spec: ModelSpec) -> Demand:
    """Return what the run asks for."""
    stream, ranks = config.engine.kind == "stream", config.resources.num_workers
    mixed = config.precision == "mixed-bf16"
    split = mixed and (stream or config.trained_optim.master != "fp32")
    size = _unit_sizes(config, torch.bfloat16 if split else torch.float32)
    group = config.engine if isinstance(config.engine, ShardedEngineConfig) else ShardedEngineConfig()
    return Demand(
        engine=config.engine.kind,
        spec=spec,
        blocks=tuple(size(block.parameters) for block in spec.blocks),
        outside=size(spec.outside),
        micro_rows=config.batch.micro_size,
        num_micro_batches=config.batch.accumulation_steps,
        itemsize=2 if mixed else 4,
        num_ranks=ranks,
        on_gpu=config.resources.gpu > 0,
        hold_gradients=stream and config.clip.mode == "exact",
        activation_checkpoint=config.activation_checkpoint,
        checkpoint_every=config.activation_checkpoint_every or 2,
        checkpoint_budget=config.activation_checkpoint_budget,
        partly_again=computes_partly_again(config, spec),
        hides_operations=hides_operations(config, spec.has_dropout),
        whole_copies=mixed and not split and ranks == 1 and not group.cpu_offload,
        paged_states=config.optim.kind == "paged_adam8bit",
        steps_in_backward=config.optim.in_backward,
        fused_loss=config.compile,
        cast_bytes=2 if config.precision in AUTOCAST_DTYPES else 0,
        asynchronous_saves=config.checkpoint.asynchronous and not stream,
        num_checkpoints=config.checkpoint.keep,
        most_micro_batches=most_micro_batches(config, spec.num_sizes),
        saves_frozen=not isinstance(config.adapter, LoraConfig),
        cpu_offload=group.cpu_offload,
        stays_gathered=not group.reshard_after_forward,
        resident_indices=lambda num: resident_indices(len(spec.blocks), num),
        samples=sampling_needs(config, spec.row_tokens),
    )


def _with_blocks(config: TrainConfig, found: Hardware, spec: ModelSpec, known: Known) -> tuple[Hardware, ModelSpec]:
    """Measure the model's blocks where the matrix rate of a GPU that streams was measured too."""
    measured = config.engine.kind == "stream" and config.resources.gpu > 0 and config.hardware.tflops is None
    if measured:
        with suppress(torch.OutOfMemoryError):  # the plan will say what does not fit
            attained, spec = probe_blocks(config, spec, torch.device("cuda"), known)
            sources = {**found.sources, "blocks": f"{attained / 1e12:.4g} TFLOPS, measured"}
            found = replace(found, block_share=min(attained / (found.tflops * 1e12), 1.0), sources=sources)
    return found, spec


def _wanted(config: TrainConfig, spec: ModelSpec) -> Wanted:
    whole = config.batch.micro_size * spec.row_tokens  # FLUX's last layer is as wide as its latents: nothing to cut
    chunk = whole if config.task.kind == "flow" else config.loss.chunk_tokens
    if not isinstance(config.engine, StreamEngineConfig):
        return Wanted(epilogue_tokens=chunk)
    engine, num_blocks = config.engine, len(spec.blocks)
    if engine.resident_blocks is not None and engine.resident_blocks > num_blocks:
        raise ConfigError(f"engine.resident_blocks: {engine.resident_blocks}, but the model has {num_blocks} blocks; lower it")
    if engine.kept_blocks is not None and engine.kept_blocks >= num_blocks:
        raise ConfigError(
            f"engine.kept_blocks: {engine.kept_blocks}, but before the last of the model's {num_blocks} blocks there are "
            f"{num_blocks - 1}; lower it"
        )
    return Wanted(engine.weight_slots, engine.state_slots, engine.resident_blocks, engine.kept_blocks, chunk)


def _unit_sizes(config: TrainConfig, weight: torch.dtype) -> Callable[[tuple[ParameterSpec, ...]], UnitBytes]:
    eight_bit, master = config.optim.has_8_bit_moments, config.trained_optim.master
    frozen = torch.bfloat16 if config.precision == "mixed-bf16" else torch.float32
    average = DTYPES[config.ema.dtype] if config.ema.decay else None

    @cache
    def size(parameters: tuple[ParameterSpec, ...]) -> UnitBytes:
        def dtype(p: ParameterSpec) -> torch.dtype:
            return weight if p.trained else frozen if p.stands_for is None else torch.uint8

        layout = Layout(
            {p.name: (p.shape, state_format(p.shape, eight_bit, master, dtype(p), p.trained, average)) for p in parameters}
        )
        sizes = (layout.weight_bytes, layout.state_bytes, layout.trained_weight_bytes)
        return UnitBytes(*sizes, layout.num_gradients, layout.num_frozen, layout.num_codes)

    return size


def _changes(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of one thing, those first that leave the result as it is."""
    size, steps = config.batch.micro_size, config.batch.accumulation_steps
    factors = [2**i for i in range(1, 10) if size % 2**i == 0]
    for factor in factors:
        yield {"batch.micro_size": size // factor, "batch.accumulation_steps": steps * factor}
    if config.engine.kind == "stream":
        if isinstance(config.engine, StreamEngineConfig) and config.engine.resident_blocks is not None:
            yield from ({"engine.resident_blocks": num} for num in range(1, 65))
            yield {"engine.resident_blocks": 0}
        if isinstance(config.engine, StreamEngineConfig) and config.engine.kept_blocks:
            yield {"engine.kept_blocks": 0}
        if config.clip.mode == "exact":
            yield {"clip.mode": "previous"}
        if config.optim.kind == "adamw":
            yield {"optim.kind": "adam8bit"}
        splits = config.precision == "mixed-bf16" and config.trained_optim is config.optim
        if splits and config.optim.master == "fp32":
            yield {"optim.master": "split24"}
        if splits and config.optim.master != "stochastic":
            yield {"optim.master": "stochastic"}
        yield {"engine.weight_slots": 2, "engine.state_slots": 2}
    yield from _checkpoint_changes(config)
    if config.engine.kind == "sharded" and config.loss.chunk_tokens is None and config.task.kind == "lm":
        yield {"loss.chunk_tokens": FULL_CHUNK}
    if config.engine.kind == "sharded":
        yield from _sharded_changes(config)
    for factor in factors:
        yield {"batch.micro_size": size // factor}
    for fewer in range(steps - 1, 0, -1):
        yield {"batch.accumulation_steps": fewer}


def _checkpoint_changes(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield kinds of activation checkpointing that keep less than the configured one, those first that compute least again."""
    kind, keys = config.activation_checkpoint, ("activation_checkpoint_every", "activation_checkpoint_budget")
    dropped = {key: None for key in keys if getattr(config, key) is not None}
    if kind == "none":
        yield from ({"activation_checkpoint": "every_n", "activation_checkpoint_every": every} for every in (4, 3, 2))
    if kind not in ("full", "offload"):
        yield {"activation_checkpoint": "full", **dropped}
    if kind != "offload":
        yield {"activation_checkpoint": "offload", **dropped}


def _sharded_changes(config: TrainConfig) -> Iterator[dict[str, Any]]:
    if config.optim.kind == "adam8bit" and config.resources.gpu > 0:
        yield {"optim.kind": "paged_adam8bit"}
    if config.clip.mode != "exact" and not config.optim.in_backward:
        yield {"optim.in_backward": True}  # fits only where a step is one micro-batch
    if isinstance(config.engine, ShardedEngineConfig) and not config.engine.reshard_after_forward:
        yield {"engine.reshard_after_forward": True}
    if config.resources.gpu > 0:
        yield {"engine.cpu_offload": True}


def _fits(config: TrainConfig, change: Mapping[str, Any], found: MemoryPlan) -> bool:
    tree = config.model_dump()
    for key, value in change.items():
        tree = merge(tree, nested(key, value))
    try:
        changed = build(tree)
        return not plan(demand(changed, found.demand.spec), found.hardware, _wanted(changed, found.demand.spec)).shortfalls
    except ConfigError:
        return False
