"""Building the stream engine from a configuration."""

import torch

from fluxray.config.schema import StreamEngineConfig, TrainConfig
from fluxray.engine.clip import Clip
from fluxray.engine.dropout import apply_dropout_keys
from fluxray.engine.parallelize import apply_compile
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.protocols import BlockStack, LossFn

EPILOGUE_TOKENS = 2048


def build_stream_engine(config: TrainConfig, stack: BlockStack, loss_fn: LossFn, device: torch.device) -> StreamEngine:
    """Return the engine that streams the blocks of a stack on the meta device, which it gives memory and first values.

    Raises PlanError if the host has not the memory or will not lock it.
    """
    engine = config.engine
    assert isinstance(engine, StreamEngineConfig)
    if config.compile:
        apply_compile(stack)
    apply_dropout_keys(stack)
    settings = StreamSettings(
        engine.weight_slots, engine.state_slots, engine.resident_blocks or 0, engine.epilogue_tokens or EPILOGUE_TOKENS
    )
    clip = Clip(config.clip.mode, config.clip.max_norm, device)
    precision = config.precision
    assert precision != "amp-fp16"
    return StreamEngine(stack, loss_fn, config.optim, clip, settings, precision, device)
