"""What `adapter.kind` asks of the other keys."""

from fluxray.config.adapter import LoraConfig
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError


def check_adapter(config: TrainConfig) -> None:
    """Raise ConfigError for what does not go with an adapter."""
    adapter = config.adapter
    if not isinstance(adapter, LoraConfig):
        return
    if config.model.fused_qkv:
        raise ConfigError(
            "model.fused_qkv: true makes one projection of three, and adapter.kind lora adapts each by itself; set "
            "model.fused_qkv=false"
        )
    if adapter.targets == ():
        raise ConfigError("adapter.targets: [] names no layer; name some, such as to_q, or drop the key")
    if config.cuda_graph and adapter.dropout > 0:
        raise ConfigError(
            f"cuda_graph: true, but adapter.dropout {adapter.dropout:g} sets its generator anew in each block, and a graph "
            f"cannot do that; set adapter.dropout=0, or cuda_graph=false"
        )
