"""Pipelines of tiny encoders as `encode` takes them, folders of captioned pictures, and an encoding without Ray."""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluxray.config.encode import EncodeConfig
from fluxray.config.load import resolve
from fluxray.data import latent_shards
from fluxray.data.latent_facts import Family
from fluxray.data.pictures import open_pictures
from fluxray.models.encoders import encoder_facts
from fluxray.tasks import encode_pictures
from fluxray.tasks.encode import Encoded, Pass, encode
from fluxray.tasks.encode_pictures import Row
from fluxray.tasks.encode_plan import EncodeJob, make_job
from tests.flow_pictures import TEXT_LAYERS, Encoders, pictures, tiny_encoders

SETTINGS: dict[str, Any] = {
    "resolution": 64,
    "bucket_step": 16,
    "min_side": 16,
    "text_tokens": 32,
    "batch_captions": 2,
    "shard_bytes": 4 * 3 * 64 * 64,
}
"""Shards of four pictures."""


def tiny_pipeline(family: Family, folder: Path, text_tokens: int = 32) -> Encoders:
    """Make tiny encoders and save them with the transformer's config.json of the family's tiny preset."""
    encoders = tiny_encoders(family, folder, text_tokens)
    config = resolve("cpu", f"{family}-tiny").model.config
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", config["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    return encoders


def write_photos(folder: Path, number: int = 15) -> Path:
    """Write a folder of real pictures of two shapes, no side above 160 pixels, with their captions in .txt files."""
    folder.mkdir(parents=True)
    for count, picture in enumerate(pictures()[:number]):
        image = picture.image.convert("RGB")
        if count % 3 == 0:
            image = image.crop((0, 0, image.height, image.height))
        image.thumbnail((160, 160))
        image.save(folder / f"{picture.key}.png")
        (folder / f"{picture.key}.txt").write_text(picture.caption)
    return folder


def job_of(encoders: Encoders, photos: Path, cache: Path, **settings: Any) -> EncodeJob:
    """Return the job of encoding a folder of pictures on the CPU."""
    layers = {"flux1": {}, "flux2": {"text_layers": TEXT_LAYERS}}[encoders.family]
    config = EncodeConfig(**{**SETTINGS, **layers, **settings})
    facts = encoder_facts(f"path:{encoders.folder}", config.text_tokens, config.text_layers)
    return make_job(cache, open_pictures(f"folder:{photos}", config=config), config, facts, "float32", "cpu")


def run_here(job: EncodeJob, wave: Pass) -> Iterator[Row]:
    """Run a pass in this process, row by row."""
    before, encoder, after = (stage(job) for stage in (wave.before, wave.encoder, wave.after))
    return (after(encoder(before(row))) for row in wave.rows)


def encode_here(job: EncodeJob, run: Any = run_here) -> Encoded:
    """Encode in this process."""
    return encode(job, job.pictures.refs(), run, lambda *_: None)


def encode_until_killed(job: EncodeJob, number: int) -> None:
    """Encode in a process that gets SIGKILL when its file number `number` is written and not yet in its place."""
    process = multiprocessing.get_context("fork").Process(target=_encode_and_die, args=(job, number))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _encode_and_die(job: EncodeJob, number: int) -> None:
    left, commit = [number], latent_shards.commit

    def dying(partial: Path, path: Path) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        commit(partial, path)

    for module in (latent_shards, encode_pictures):
        module.commit = dying
    encode_here(job)
