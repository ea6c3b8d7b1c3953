"""Captioned pictures that scikit-image and scikit-learn bring along: something to train on without a download."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from fluxray.errors import DataError

CAPTIONS: Mapping[str, str] = {
    "astronaut": "an astronaut in an orange suit, smiling before a flag",
    "brick": "a wall of bricks",
    "camera": "a man in a dark coat with a camera on a tripod",
    "cat": "the face of a ginger cat",
    "cell": "a living cell under the microscope",
    "clock": "a wall clock, blurred by motion",
    "coffee": "a cup of coffee on a wooden table",
    "coins": "rows of old coins on a dark ground",
    "grass": "blades of grass",
    "gravel": "gravel, seen from above",
    "horse": "the black silhouette of a horse",
    "hubble_deep_field": "galaxies in deep space",
    "immunohistochemistry": "stained tissue in blue and brown",
    "moon": "craters on the moon",
    "page": "a printed page in uneven light",
    "retina": "the retina of an eye, orange with dark vessels",
    "rocket": "a rocket on its launch pad at night",
    "stereo_motorcycle": "a motorcycle in a garage",
    "china.jpg": "a Chinese temple with a curved roof, seen through trees",
    "flower.jpg": "an orange dahlia before dark leaves",
}
"""Functions of `skimage.data` and sample images of scikit-learn, with what they show."""

LONGEST_SIDE = 512
"""Pixels; larger pictures are scaled down."""


def write_shipped(folder: Path) -> None:
    """Write the pictures as NAME.png into a new folder, each with its caption in NAME.txt; the folder appears whole.

    Raises DataError where scikit-image or scikit-learn is not installed.
    """
    try:
        from skimage import data
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise DataError(f"data.source: the first pictures need {error.name}; pip install 'fluxray[pictures]'") from None
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name, caption in CAPTIONS.items():
        found = load_sample_image(name) if name.endswith(".jpg") else getattr(data, name)()
        pixels = found[0] if isinstance(found, tuple) else found
        image = Image.fromarray(pixels if pixels.dtype == np.uint8 else np.uint8(255) * pixels).convert("RGB")
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
        stem = name.removesuffix(".jpg")
        image.save(partial / f"{stem}.png")
        (partial / f"{stem}.txt").write_text(caption, encoding="utf-8")
    partial.rename(folder)
