"""What is trained in place of a model's own parameters: the sections that `adapter.kind` chooses from."""

from typing import Literal

from pydantic import Field

from fluxray.config.section import Section


class NoAdapterConfig(Section):
    """Every parameter of the model is trained."""

    kind: Literal["none"] = "none"


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., arXiv:2106.09685) beside linear layers; the model's own parameters stay as they are."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=16.0, gt=0, description="what an adapter adds is multiplied by alpha / rank")
    targets: tuple[str, ...] | None = Field(
        default=None,
        description="ends of the names of linear layers in the blocks, such as to_q or ff.net.2; default: those of attention",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of an adapter's inputs that are dropped in training")
    base: Literal["full", "nf4"] = Field(
        default="full",
        description="how the blocks' frozen linear layers are kept: as the model computes, or in 4 bits, nf4 of bitsandbytes",
    )


AdapterConfig = NoAdapterConfig | LoraConfig


def drops_inputs(adapter: AdapterConfig) -> bool:
    """Return whether adapters have dropout."""
    return isinstance(adapter, LoraConfig) and adapter.dropout > 0
