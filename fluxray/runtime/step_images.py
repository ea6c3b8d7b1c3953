"""Pictures of a training step under the names by which MLflow shows them beside the metrics, with a slider for the step."""

import re
import uuid
from pathlib import Path

from PIL import Image

FOLDER = "images"
"""Among a run's artifacts."""

TAG = "mlflow.loggedImages"
"""Set where a run has such pictures."""

PREVIEW_SIDE = 1024
"""Pixels of the longer side of what the page loads first."""

_NAME = re.compile(r"(\w+)/step_(\d+)\.png")


def is_of_step(name: str) -> bool:
    """Return whether an artifact of that name, KEY/step_NUMBER.png, is a picture of a step."""
    return _NAME.fullmatch(name) is not None


def write_step_image(path: Path, name: str, folder: Path) -> None:
    """Write the picture at `path`, whose artifact is called `name`, into an empty folder as MLflow's `log_image` would.

    The same picture gets the same names each time, so that one that is sent again does not come twice.
    """
    found = _NAME.fullmatch(name)
    assert found is not None, "asked for pictures of steps alone"
    key, step = found[1], int(found[2])
    stem = f"{key}+step+{step}+timestamp+{path.stat().st_mtime_ns // 1_000_000}+{uuid.uuid5(uuid.NAMESPACE_URL, name)}"
    with Image.open(path) as picture:
        picture.load()
        (folder / f"{stem}.png").write_bytes(path.read_bytes())
        preview = picture.convert("RGB")
    preview.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    preview.save(folder / f"{stem}+compressed.webp", quality=85)
