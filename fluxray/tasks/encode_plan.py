"""What an encoding is made of: shards decided from the sorted pictures, and hashes by which what has been encoded is known again.

A shard's name holds a hash of everything that decides its content, so the same encoding finds its finished shards by their names,
and one that has changed leaves the old ones alone until the new cache is whole. Beside each shard `NAME.samples.json` says of
every sample from what it was encoded, and which pictures of the shard were left out.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluxray.config.encode import EncodeConfig
from fluxray.data.identity import TEXT_ENCODERS, weights_identity
from fluxray.data.latent_facts import LatentFacts
from fluxray.data.latent_shards import CACHE_FILE, TENSORS, Layout, crc_of, dtype_of, index_path, read_json
from fluxray.data.pictures import PictureRef, Pictures
from fluxray.errors import DataError
from fluxray.models.encoders import EncoderFacts

Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]

LAYOUT: Layout = "webdataset"
SUFFIX = ".tar"
WORK_FOLDER = ".encoding"
"""Within the cache: what is encoded and not yet in a shard."""

SAMPLES_SUFFIX = ".samples.json"
SLUG_LENGTH = 60


@dataclass(frozen=True)
class EncodeJob:
    """What every process of an encoding knows. `dtype` is that of the encoders' weights, `device` where they compute.

    `picture_identity` is a hash of what makes latents of pixels, `text_identity` of what makes embeddings of captions: weights,
    tokenizers and templates, layers, length.
    """

    cache: Path
    pictures: Pictures
    settings: EncodeConfig
    encoders: EncoderFacts
    facts: LatentFacts
    dtype: Dtype
    device: Device
    picture_identity: str
    text_identity: str

    @property
    def work_folder(self) -> Path:
        """Where encoded latents wait for their texts."""
        return self.cache / WORK_FOLDER

    def picture_hash(self, key: str, pixels: np.ndarray) -> str:
        """Return what decides the latents of a sample: pixels (uint8 [H, W, 3]), encoder, the key of its draw."""
        return _hash([self.picture_identity, key, list(pixels.shape)], np.ascontiguousarray(pixels).data)

    def text_hash(self, caption: str) -> str:
        """Return what decides the embedding of a caption."""
        return _hash([self.text_identity, caption])

    @property
    def samples_per_shard(self) -> int:
        """Pictures of a shard, so that they and their pixels have no more than `encode.shard_bytes`; in whole batches."""
        facts, settings = self.facts, self.settings
        pixels = settings.resolutions[0] ** 2
        latents = pixels // facts.pixels_per_token**2 * facts.channels * dtype_of(facts.latent_dtype).itemsize
        width = self.encoders.text_tokens * facts.text_width + (facts.pooled_width or 0)
        largest = max(3 * pixels, latents + width * dtype_of(facts.text_dtype).itemsize)
        number = max(settings.shard_bytes // largest, 1)
        return number - number % settings.batch_captions or number


class Known(NamedTuple):
    """A sample of a finished shard: the shard's file, hashes of what its latents and its text were encoded from, tokens cut."""

    file: str
    picture: str
    text: str
    tokens_cut: int


@dataclass(frozen=True)
class Shard:
    """Some pictures that are encoded together. `keys` are their names in the cache, `known` what there is of these already."""

    stem: str
    refs: tuple[PictureRef, ...]
    keys: tuple[str, ...]
    known: Mapping[str, tuple[Known, ...]]


def make_job(
    cache: Path, pictures: Pictures, settings: EncodeConfig, encoders: EncoderFacts, dtype: Dtype, device: Device
) -> EncodeJob:
    """Return the job of encoding `pictures` into the folder `cache`. Raises DataError where weights cannot be read."""
    names = [name for name in TEXT_ENCODERS if (encoders.folder / name).is_dir()]
    facts = LatentFacts(
        family=encoders.family,
        channels=encoders.channels,
        text_width=encoders.text_width,
        pooled_width=encoders.pooled_width,
        pixels_per_token=encoders.pixels_per_token,
        vae=weights_identity(encoders.folder / "vae", "model.weights"),
        text_encoders={name: weights_identity(encoders.folder / name, "model.weights") for name in names},
        latent_statistics=encoders.statistics,
        text_layers=encoders.text_layers,
    )
    statistics = {name: list(of) for name, of in facts.latent_statistics.items()}
    picture_identity = _hash([facts.family, facts.vae, statistics, dtype])
    text_identity = _hash([
        encoders.pipeline, dict(facts.text_encoders), _tokenizer_hash(encoders.folder), list(encoders.text_layers),
        encoders.text_tokens, dtype,
    ])  # fmt: skip
    return EncodeJob(cache, pictures, settings, encoders, facts, dtype, device, picture_identity, text_identity)


def plan_shards(job: EncodeJob, refs: Iterable[PictureRef]) -> list[Shard]:
    """Return the shards of an encoding: the pictures sorted by their keys, cut every `samples_per_shard`."""
    ordered = sorted(refs, key=lambda ref: ref.key)
    size, known = job.samples_per_shard, _read_known(job.cache)
    rules = [
        job.picture_identity,
        job.text_identity,
        job.settings.model_dump(mode="json", exclude={"report"}),
        job.facts.to_json(),
        LAYOUT,
    ]
    shards = []
    for number, start in enumerate(range(0, len(ordered), size)):
        part = tuple(ordered[start : start + size])
        keys = tuple(cache_key(ref.key) for ref in part)
        digest = _hash([rules, [_trace(ref, job.pictures) for ref in part]])
        found = {key: known[key] for key in keys if key in known}
        shards.append(Shard(f"shard-{number:05d}-{digest[:12]}", part, keys, found))
    return shards


def cache_key(key: str) -> str:
    """Return the name of a picture in the cache: what is readable of its path, and a hash of the whole."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.splitext(key)[0]).strip("-")[-SLUG_LENGTH:]
    return f"{readable}-{_hash([key])[:12]}".lstrip("-")


def shard_file(shard: Shard) -> str:
    """Return the file name of a shard."""
    return f"{shard.stem}{SUFFIX}"


def samples_file(folder: Path, stem: str) -> Path:
    """Return the file that says of what a shard's samples were made."""
    return folder / f"{stem}{SAMPLES_SUFFIX}"


def is_done(job: EncodeJob, shard: Shard) -> bool:
    """Return whether a shard is in the cache, or known to hold no sample."""
    told = read_samples(job.cache, shard.stem)
    return told is not None and (not told["samples"] or index_path(job.cache, shard_file(shard)).exists())


def read_samples(folder: Path, stem: str) -> dict[str, Any] | None:
    """Return `samples` (by key: hashes, crop, tokens cut) and `left_out` of a shard; None where that is missing or damaged."""
    try:
        return read_json(samples_file(folder, stem), "data.cache")
    except DataError:
        return None


def check_folder(cache: Path) -> None:
    """Raise DataError for a cache that was not encoded here, which would be overwritten."""
    if not (cache / CACHE_FILE).exists():
        return
    for shard in read_json(cache / CACHE_FILE, f"data.cache: {cache}").get("shards", ()):
        if not samples_file(cache, shard["file"].partition(".")[0]).exists():
            raise DataError(f"data.cache: {cache} holds a cache that `fluxray encode` has not made; name another folder")


def read_tensors(job: EncodeJob, known: Known, key: str, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Return tensors of a sample of a finished shard; None where they cannot be read as they were written."""
    path = job.cache / known.file
    try:
        entry = _index(path)[key]
        with path.open("rb") as file:
            found = {name: _read(file, entry[name], _dtype(job, name)) for name in TENSORS if name in entry}
    except (OSError, KeyError, ValueError, RuntimeError, DataError):
        return None
    return {name: found[name] for name in names if name in found} if crc_of(found.values()) == entry["crc32"] else None


def _read(file: Any, place: tuple[int, Sequence[int]], dtype: torch.dtype) -> Tensor:
    offset, shape = place
    file.seek(offset)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.frombuffer(bytearray(file.read(size)), dtype=dtype).reshape(tuple(shape))


def _dtype(job: EncodeJob, name: str) -> torch.dtype:
    return dtype_of({"latents": job.facts.latent_dtype, "mask": "float32"}.get(name, job.facts.text_dtype))


@lru_cache(maxsize=8)
def _index(path: Path) -> dict[str, Any]:
    index = read_json(index_path(path.parent, path.name), f"data.cache: {path}")
    return {entry["key"]: entry for entry in index["samples"]}


def _read_known(cache: Path) -> dict[str, tuple[Known, ...]]:
    """Return all samples of finished shards by key, whatever encoding they are of."""
    known: dict[str, tuple[Known, ...]] = {}
    for path in sorted(cache.glob(f"*{SAMPLES_SUFFIX}")):
        stem = path.name.removesuffix(SAMPLES_SUFFIX)
        file = f"{stem}{SUFFIX}"
        told = read_samples(cache, stem) if index_path(cache, file).exists() else None
        for key, of in told["samples"].items() if told else ():
            known[key] = (*known.get(key, ()), Known(file, of["picture"], of["text"], of["tokens_cut"]))
    return known


def _trace(ref: PictureRef, pictures: Pictures) -> list[Any]:
    """Return what tells a picture from another one in its place, as far as that is known without reading it."""
    place = ref.place
    mask = [] if ref.mask is None else [[ref.mask.start, ref.mask.size, pictures.stamp(ref.mask)]]
    return [ref.key, ref.caption, ref.fault, place.start, place.size, pictures.stamp(place), ref.bucket, *mask]


def _tokenizer_hash(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("tokenizer*/*")):
        digest.update(f"{path.parent.name}/{path.name}".encode() + path.read_bytes())
    return digest.hexdigest()


def _hash(values: Any, data: Any = b"") -> str:
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=16)
    digest.update(data)
    return digest.hexdigest()
