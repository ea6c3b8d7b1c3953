"""`make train-images`: pictures, a VAE trained on them, their encoding, a FLUX.2 trained on that, samples. A CPU, no download.

Everything lies in `train-images` of fluxray's home but the run itself, which is called train-images like any other. What is there
is not made again, and a run that was stopped goes on.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.data.decode import Quarantined
from fluxray.data.pictures import open_pictures
from fluxray.data.prepared import prepare_picture
from fluxray.data.shipped import CAPTIONS, write_shipped
from fluxray.data.tokenizer import train_tokenizer
from fluxray.errors import ConfigError, DataError
from fluxray.models.encoders import quiet
from fluxray.models.flux_facts import flux_facts, library_config
from fluxray.models.small_encoders import TEXT_LAYERS, fit_statistics, small_pipeline, small_vae
from fluxray.runtime import cluster
from fluxray.runtime.encode import encode_ahead
from fluxray.runtime.launch import FinishedRun, train
from fluxray.runtime.paths import home
from fluxray.runtime.pictures import FOLDER
from fluxray.runtime.progress import LOG_INTERVAL_S, clock
from fluxray.tasks.autoencode import reconstructed, train_vae
from fluxray.tasks.grid import save_png

NAME = "train-images"
MODEL = "flux2-tiny"
VAE_STEPS = 1600
VOCAB = 512
SHOWN = ("astronaut", "cat", "coffee", "rocket", "china.jpg", "flower.jpg")
"""The pictures whose captions are sampled."""

SETTINGS = {
    "name": NAME,
    "encode.resolution": 128,
    "encode.buckets": "square",
    "encode.bucket_step": 16,
    "encode.text_tokens": 32,
    "encode.text_layers": list(TEXT_LAYERS),
    "data.eval_fraction": 0.05,
    "train.num_steps": 800,
    "optim.lr": 2e-3,
    "optim.schedule": "cosine",
    "evaluation.max_rows": 8,
    "sample.every_steps": 400,
    "sample.seeds": [0, 1, 2],
    "sample.prompts": [CAPTIONS[name] for name in SHOWN],
    "sample.steps": 20,
}
"""Over the preset's; words of the command line lie over these."""


def train_images(words: Sequence[str] = (), vae_steps: int = VAE_STEPS, show: Callable[[str], Any] = print) -> FinishedRun:
    """Do all of it; `words` are keys of the configuration, `key=value`. Raises FluxrayError, FailedError, StoppedError."""
    config = configured(words)
    cluster.check_machine(config.resources)
    folder = folder_of(config)
    photos, pipeline = folder / "photos", folder / "pipeline"
    if not photos.exists():
        show(f"writing {len(CAPTIONS)} pictures of scikit-image and scikit-learn into {photos}")
        write_shipped(photos)
    given = config.model_copy(update={"data": config.data.model_copy(update={"source": f"folder:{photos}"})})
    if not pipeline.exists():
        make_pipeline(given, pipeline, folder / "reconstructions.png", vae_steps, show)
    encoders = config.model.model_copy(update={"weights": f"path:{pipeline}"})
    show(encode_ahead(given.model_copy(update={"model": encoders})).summary())
    done = train(config, label=NAME)
    grids = sorted((done.run_dir / FOLDER).glob("*.png"))
    show(f"run              {done.name}, finished at step {done.summary.step}; {done.summary.held_out}")
    show(f"reconstructions  {folder / 'reconstructions.png'}")
    show(f"samples          {grids[-1] if grids else 'none'}")
    return done


def configured(words: Sequence[str]) -> TrainConfig:
    """Return the configuration of the run. Raises ConfigError."""
    folder = folder_of(resolve("cpu", MODEL, [word for word in words if word.startswith("storage=")]))
    places = {
        "data.cache": str(folder / "cache"),
        "sample.pipeline": f"path:{folder / 'pipeline'}",
    }
    own = [f"{key}={json.dumps(value)}" for key, value in {**SETTINGS, **places}.items()]
    if given := [word for word in words if word.startswith("data.source=")]:
        raise ConfigError(f"{given[-1]}: these pictures are their own; drop it, or use `fluxray encode` and `fluxray train`")
    return resolve("cpu", MODEL, [*own, *words])


def folder_of(config: TrainConfig) -> Path:
    """Return where pictures, encoders and cache lie."""
    return home(config.storage).root / NAME


def make_pipeline(config: TrainConfig, folder: Path, picture: Path, vae_steps: int, show: Callable[[str], Any]) -> None:
    """Train a VAE on the pictures of `data.source` and write the pipeline of small encoders, which appears whole.

    What the VAE gives back is drawn into `picture`, under what it was given.
    """
    pixels = pixels_of(config)
    with quiet():
        vae = small_vae(config.seed)
    show(f"training a VAE on {len(pixels)} pictures, {vae_steps:,} steps")
    train_vae(vae, pixels, vae_steps, config.seed, _VaeProgress(vae_steps, show))
    fit_statistics(vae, pixels)
    draw_pairs(pixels, reconstructed(vae, pixels), picture)
    show(f"reconstructions  {picture}")
    facts = flux_facts(config.model)
    made = small_pipeline(vae, train_tokenizer(CAPTIONS.values(), VOCAB), facts.text_width, config.seed)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with quiet():
        made.save_pretrained(partial)
    keys = library_config(config.model)
    (partial / "transformer").mkdir()
    (partial / "transformer" / "config.json").write_text(json.dumps(dict(keys)))
    index = json.loads((partial / "model_index.json").read_text())
    index["transformer"] = ["diffusers", keys["_class_name"]]
    (partial / "model_index.json").write_text(json.dumps(index))
    partial.rename(folder)


def pixels_of(config: TrainConfig) -> Tensor:
    """Return the pictures of `data.source` as they are encoded: fp32 in [-1, 1], [B, 3, H, W]. Raises DataError."""
    pictures = open_pictures(config.data.source, config=config.encode)
    try:
        made = [prepare_picture(pictures, ref, config.encode).pixels for ref in pictures.refs()]
    except Quarantined as fault:
        raise DataError(f"data.source: a picture cannot be used ({fault}); remove the folder, and it is written again") from None
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_pairs(given: Tensor, returned: Tensor, path: Path, columns: int = 10) -> None:
    """Draw pictures in [-1, 1], [B, 3, H, W], in rows, and under each row what became of it."""
    rows = [torch.cat(list(part), 2) for start in range(0, len(given), columns) for part in _at(start, columns, given, returned)]
    width = max(row.shape[2] for row in rows)
    sheet = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[2]), value=1.0) for row in rows], 1)
    image = Image.fromarray(((sheet + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
    save_png(image, path, {"rows": "pictures, and under them what the VAE gives back"})


def _at(start: int, columns: int, *tensors: Tensor) -> list[Tensor]:
    return [tensor[start : start + columns] for tensor in tensors]


class _VaeProgress:
    """Says now and then how far the VAE is."""

    def __init__(self, num_steps: int, show: Callable[[str], Any]) -> None:
        self._num_steps, self._show = num_steps, show
        self._began = self._shown_at = time.monotonic()

    def __call__(self, step: int, error: float) -> None:
        now = time.monotonic()
        if now - self._shown_at >= LOG_INTERVAL_S or step == self._num_steps:
            self._shown_at = now
            left = clock((now - self._began) / step * (self._num_steps - step))
            self._show(f"VAE step {step:,}/{self._num_steps:,}  error {error:.1%}  {left} left")
