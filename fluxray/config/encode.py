"""How pictures become samples of a cache: which sizes they take, what is left out, and what their captions are."""

from typing import Annotated, Literal

from pydantic import Field

from fluxray.config.quantities import SIZE
from fluxray.config.section import Section

PIXELS_PER_TOKEN = 16
"""Along one side, of every FLUX: its VAE takes 8 x 8 pixels, and 2 x 2 of its positions make a token."""

PICTURE_FORMS = ("folder", "parquet", "tars", "hf")
"""The forms of `data.source` that hold pictures."""


class EncodeConfig(Section):
    """Pictures of `data.source`, cut to the sizes of buckets. What is left out is named with its reason in the report."""

    resolution: int | tuple[int, ...] = Field(
        default=1024,
        description="square root of a bucket's area in pixels; of a list a picture takes the largest that it is large enough for",
    )
    buckets: Literal["aspect", "square"] = Field(
        default="aspect", description="sizes of equal area for every shape of picture, or squares cut out of the middle"
    )
    bucket_step: int = Field(
        default=64,
        ge=PIXELS_PER_TOKEN,
        multiple_of=PIXELS_PER_TOKEN,
        description="pixels between neighbouring sides of buckets",
    )
    small_buckets: Literal["keep", "merge", "repeat"] = Field(
        default="keep",
        description="a bucket that does not fill a global batch: shares batches with others, joins the bucket of the nearest "
        "shape, or repeats its pictures",
    )
    max_aspect: float = Field(default=3.0, ge=1, description="longer over shorter side; beyond it a picture is left out")
    max_upscale: float = Field(default=1.5, ge=1, description="enlargement; a picture that wants more is left out")
    min_side: int = Field(default=64, ge=1, description="pixels of the shorter side; below it a picture is left out")
    max_pixels: int = Field(default=128_000_000, ge=1, description="of a picture as it lies on disk; beyond it is not decoded")
    caption_key: str | None = Field(
        default=None, description="field of a row, or of a tar's json, that holds the caption; default: text, else caption"
    )
    image_key: str | None = Field(
        default=None, description="column of parquet and hf rows that holds the picture; default: the only one that does"
    )
    no_caption: Literal["quarantine", "empty"] = Field(
        default="quarantine", description="pictures whose caption is missing or blank: left out, or used with the empty caption"
    )
    mask: Literal["none", "file", "alpha"] = Field(
        default="none", description="what weights the loss within a picture: nothing, NAME.mask.png, or its alpha channel"
    )
    report: bool = Field(
        default=True,
        description="decode all pictures once before any is encoded, and write what was found into data.cache/report",
    )

    text_tokens: int | None = Field(
        default=None, ge=1, le=512, description="tokens of a text; default: 512, for FLUX.1 without guidance (schnell) 256"
    )
    text_layers: tuple[int, ...] | None = Field(
        default=None, min_length=1, description="FLUX.2: hidden states that are stacked; default: those of the pipeline's class"
    )
    batch_captions: int = Field(default=16, ge=1, description="captions that the text encoders take at once")
    batch_pixels: int = Field(
        default=1 << 20, ge=1, description="pixels that the VAE takes at once; pictures that have more are taken one by one"
    )
    shard_bytes: Annotated[int, SIZE] = Field(default=256 << 20, gt=0, description="size of a shard, about")

    @property
    def resolutions(self) -> tuple[int, ...]:
        """All of `resolution`, falling."""
        given = self.resolution if isinstance(self.resolution, tuple) else (self.resolution,)
        return tuple(sorted(set(given), reverse=True))


def holds_pictures(source: str | tuple[str, ...]) -> bool:
    """Return whether each reference has a form that holds pictures."""
    references = (source,) if isinstance(source, str) else source
    return bool(references) and all(":" in text and text.partition(":")[0] in PICTURE_FORMS for text in references)
