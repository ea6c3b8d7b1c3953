"""Building the engine that a configuration names."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh

from fluxray.config.schema import StreamEngineConfig, TrainConfig
from fluxray.engine.average import Averages
from fluxray.engine.clip import Clip, clip_units
from fluxray.engine.cuda_graph import use_own_stream
from fluxray.engine.parallelize import Techniques, parallelize, prepare_stream
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.errors import ConfigError
from fluxray.memory.estimate import FULL_CHUNK, Policy
from fluxray.optim.build import build_by_unit, build_sharded
from fluxray.protocols import BlockStack, Engine, LossFn


def build_engine(  # noqa: PLR0913, PLR0917 - one place where all parts meet
    config: TrainConfig,
    stack: BlockStack,
    loss_fn: LossFn,
    device: torch.device,
    num_ranks: int,
    policy: Policy | None,
    notify: Callable[[str], None],
) -> Engine:
    """Give a stack, which is on the meta device, memory and first values in the engine that runs it. Collective.

    It follows the `policy`, which the sharded engine needs for what `selective` keeps alone. Raises PlanError if the host has not
    the memory for a streamed model or will not lock it, ConfigError if a CUDA graph is wanted of what none can hold.
    """
    if isinstance(config.engine, StreamEngineConfig):
        return build_stream_engine(config, stack, loss_fn, device, policy)
    offloads = config.engine.cpu_offload  # by FSDP2, which may have one rank
    mesh = init_device_mesh(device.type, (num_ranks,)) if num_ranks > 1 or offloads else None
    techniques = Techniques(
        precision=config.precision,
        compile=config.compile,
        activation_checkpoint=config.activation_checkpoint,
        checkpoint_every=config.activation_checkpoint_every or 2,
        kept_operations=policy.kept_operations if policy else (),
        reshard_after_forward=config.engine.reshard_after_forward,
        cpu_offload=offloads,
    )
    if config.cuda_graph:
        if stack.has_dropout:
            raise ConfigError(
                "cuda_graph: true, but the model has dropout, whose generator is set anew in each block, and a graph cannot do "
                "that; set the dropout probabilities of model.config to 0, or cuda_graph=false"
            )
        use_own_stream(device)
    runtime = Runtime(device, techniques.precision, mesh, notify if config.cuda_graph else None, offloads)
    masters = parallelize(stack, techniques, device, mesh, runtime.transfers)
    if config.optim.in_backward:
        optimizer = build_by_unit(masters.named, config.trained_optim, clip_units(stack))
    else:
        optimizer = build_sharded(masters.named, config.trained_optim)
    clip = _clip(config, runtime.step_device)
    averages = Averages(masters, config.ema) if config.ema.decay else None
    return ShardedEngine(stack, loss_fn, masters, optimizer, clip, runtime, config.loss.chunk_tokens, averages)


def build_stream_engine(
    config: TrainConfig, stack: BlockStack, loss_fn: LossFn, device: torch.device, policy: Policy | None = None
) -> StreamEngine:
    """Return the engine that streams the blocks of a stack on the meta device, as `policy` says.

    Without one the configuration's own figures hold, and nothing is resident or kept that it leaves open.
    """
    engine = config.engine
    assert isinstance(engine, StreamEngineConfig)
    policy = policy or Policy(
        engine.weight_slots,
        engine.state_slots,
        engine.resident_blocks or 0,
        engine.kept_blocks or 0,
        config.loss.chunk_tokens or FULL_CHUNK,
    )
    prepare_stream(stack, config.compile, policy.kept_blocks, policy.kept_operations)
    settings = StreamSettings(
        weight_slots=policy.weight_slots,
        state_slots=policy.state_slots,
        resident_blocks=policy.resident_blocks,
        epilogue_tokens=policy.epilogue_tokens,
        offload_inputs=config.activation_checkpoint == "offload",
    )
    clip = _clip(config, device)
    return StreamEngine(stack, loss_fn, config.trained_optim, clip, settings, config.precision, device, average=config.ema)


def _clip(config: TrainConfig, device: torch.device) -> Clip:
    return Clip(config.clip.mode, config.clip.max_norm, device)
