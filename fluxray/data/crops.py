"""Buckets: the few sizes to which pictures are cut, all of about one area, so that they can share batches.

A picture goes where the least of it is lost. It is scaled until it covers the bucket and cut out of the middle.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fluxray.config.encode import EncodeConfig
from fluxray.data.decode import Quarantined


class Bucket(NamedTuple):
    """A size in pixels, multiples of `encode.bucket_step`."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True)
class Crop:
    """How a picture becomes one of `height` x `width` pixels.

    `box` (left, top, right, bottom) is cut out of the upright picture, in its pixels; `scale` is the enlargement, below 1 where
    the picture shrinks.
    """

    box: tuple[float, float, float, float]
    scale: float
    height: int
    width: int

    @property
    def bucket(self) -> Bucket:
        """The size."""
        return Bucket(self.height, self.width)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {**asdict(self), "box": list(self.box)}


def bucket_sizes(resolution: int, config: EncodeConfig) -> list[Bucket]:
    """Return the buckets of one resolution, wide ones last.

    No bucket has more pixels than a square of `resolution`; sides are multiples of `encode.bucket_step`, at least one step, and
    the longer is at most `encode.max_aspect` times the shorter.
    """
    step = config.bucket_step
    middle = resolution // step * step
    found = {Bucket(middle, middle)}
    for short in range(step, middle + 1, step) if config.buckets == "aspect" else ():
        long = resolution**2 // (short * step) * step
        if short < long <= config.max_aspect * short:
            found |= {Bucket(short, long), Bucket(long, short)}
    return sorted(found, key=lambda bucket: (bucket.width / bucket.height, bucket.width))


def fit(size: tuple[int, int], bucket: Bucket) -> Crop:
    """Return how an upright picture of `size` (width, height) is cut to a bucket: scaled until it covers it, from the middle."""
    width, height = size
    if width * bucket.height >= height * bucket.width:  # wider than the bucket: the sides go
        scale = bucket.height / height
        cut = (bucket.width / scale, float(height))
    else:
        scale = bucket.width / width
        cut = (float(width), bucket.height / scale)
    left, top = max((width - cut[0]) / 2, 0.0), max((height - cut[1]) / 2, 0.0)
    if scale == 1:  # whole pixels are copied
        left, top = float(int(left)), float(int(top))
    return Crop((left, top, min(left + cut[0], width), min(top + cut[1], height)), scale, bucket.height, bucket.width)


def choose_crop(size: tuple[int, int], config: EncodeConfig) -> Crop:
    """Return the crop of an upright picture of `size` (width, height).

    It is to the largest resolution that enlarges the picture by no more than `encode.max_upscale`, and there to the bucket that
    keeps most of it. Raises Quarantined where every resolution wants more.
    """
    for resolution in config.resolutions:
        crop = fit(size, _nearest(size[0] / size[1], bucket_sizes(resolution, config)))
        if crop.scale <= config.max_upscale:
            return crop
    raise Quarantined(
        "too small",
        f"{size[0]} x {size[1]} would be enlarged {crop.scale:.2f} times, encode.max_upscale is {config.max_upscale:g}",
    )


def cut(image: Image.Image, crop: Crop) -> np.ndarray:
    """Return a picture's pixels after scaling and cropping: uint8 [H, W, 3] of RGB, by a Lanczos filter.

    Of a mask (L) uint8 [H, W], by a triangle filter, which never overshoots. Pixels that are not scaled are copied.
    """
    resampling = Image.Resampling.BILINEAR if image.mode == "L" else Image.Resampling.LANCZOS
    return np.asarray(image.resize((crop.width, crop.height), resampling, box=crop.box)).copy()


def _nearest(aspect: float, buckets: Sequence[Bucket]) -> Bucket:
    """Return the bucket that keeps most of a picture of width over height `aspect`; of equals the one with more pixels."""

    def kept(bucket: Bucket) -> tuple[float, int]:
        ratio = aspect * bucket.height / bucket.width
        return min(ratio, 1 / ratio), bucket.height * bucket.width

    return max(buckets, key=kept)
