"""The moving average of the weights."""

from typing import Literal

from pydantic import Field

from fluxray.config.section import Section


class EmaConfig(Section):
    """An exponential moving average of the master weights, kept beside them and saved with them."""

    decay: float = Field(
        default=0.0, ge=0, lt=1, description="share of the average that each step keeps, fewer at first; 0: no average is kept"
    )
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="bf16 is rounded stochastically")
