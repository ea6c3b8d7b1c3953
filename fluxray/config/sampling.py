"""Pictures while training, and the moving average of the weights that they may be made of."""

from typing import Literal

from pydantic import Field

from fluxray.config.section import Section


class EmaConfig(Section):
    """An exponential moving average of the master weights, kept beside them and saved with them."""

    decay: float = Field(
        default=0.0, ge=0, lt=1, description="share of the average that each step keeps, fewer at first; 0: no average is kept"
    )
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="bf16 is rounded stochastically")


class SampleConfig(Section):
    """A grid of pictures of fixed prompts and seeds, every `every_steps` steps; task.kind flow.

    Texts are not encoded here: their embeddings come from `embeddings`, or from the caches.
    """

    every_steps: int = Field(default=0, ge=0, description="0: none")
    prompts: tuple[str, ...] | None = Field(
        default=None, description="captions that `embeddings` or the caches hold; default: all of the former, or held-out ones"
    )
    num_prompts: int = Field(default=4, ge=1, description="of the held-out captions, the first")
    embeddings: str | None = Field(default=None, description="file of encoded prompts, as `fluxray sample --embed` writes it")
    pipeline: str | None = Field(
        default=None, description="path:DIR or hf:NAME, whose VAE and scheduler are used; default: that of model.weights"
    )
    seeds: tuple[int, ...] = Field(default=(0, 1), min_length=1, description="of the noise; each prompt has a picture of each")
    steps: int = Field(default=28, ge=1, description="denoising steps")
    height: int | None = Field(default=None, ge=16, description="in pixels; default: that of most images in data.cache")
    width: int | None = Field(default=None, ge=16, description="in pixels; default: that of most images in data.cache")
    guidance: float | None = Field(
        default=None, ge=0, description="default: the pipeline's own; 1 where captions were never dropped in training"
    )
    weights: Literal["trained", "ema"] | None = Field(default=None, description="default: ema where one is kept")
