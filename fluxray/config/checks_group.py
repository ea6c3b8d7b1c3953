"""What goes with masters, gradients and optimizer states that wait on the host (`engine.cpu_offload`)."""

from fluxray.config.schema import ShardedEngineConfig, TrainConfig
from fluxray.errors import ConfigError


def check_group(config: TrainConfig) -> None:
    """Raise ConfigError for the first key that `engine.cpu_offload` contradicts."""
    engine = config.engine
    if not isinstance(engine, ShardedEngineConfig) or not engine.cpu_offload:
        return
    if config.resources.gpu == 0:
        raise ConfigError(
            "engine.cpu_offload: true copies between a GPU and its host, and resources.gpu is 0; set engine.cpu_offload=false, "
            "or resources.gpu=1"
        )
    if config.optim.kind != "adamw":
        raise ConfigError(
            f"optim.kind: {config.optim.kind!r} has a kernel for GPUs alone, and engine.cpu_offload steps on the host, where it "
            f"would take hundreds of times as long as AdamW; set optim.kind=adamw, or engine.cpu_offload=false"
        )
    if config.optim.in_backward:
        raise ConfigError(
            "optim.in_backward: true would make backward wait for a step on the host in each block, where engine.cpu_offload has "
            "the gradients anyway; set optim.in_backward=false"
        )
    if config.cuda_graph:
        raise ConfigError(
            "cuda_graph: true cannot hold what engine.cpu_offload does on the host; set cuda_graph=false, or "
            "engine.cpu_offload=false"
        )
    if config.ema.decay and config.ema.dtype == "bf16":
        raise ConfigError(
            "ema.dtype: 'bf16' is rounded by a hash of each element, for which engine.cpu_offload leaves only the host's cores; "
            "set ema.dtype=fp32, or engine.cpu_offload=false"
        )
