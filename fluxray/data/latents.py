"""Rows of encoded pictures, read from a cache (`fluxray.data.latent_shards`) when they are asked for."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fluxray.data.folders import Folder, LocalFolder, open_folder
from fluxray.data.latent_facts import CacheNeeds, LatentFacts, check_cache
from fluxray.data.latent_shards import (
    CACHE_FILE,
    CACHE_FORMAT,
    EMPTY_FILE,
    TENSORS,
    TextEmbedding,
    crc_of,
    dtype_of,
    index_name,
    read_signed,
    size_fault,
)
from fluxray.errors import DataError
from fluxray.seeding import derive_seed

_ENTRY = np.dtype(
    [("shard", "i4"), ("height", "i4"), ("width", "i4"), ("length", "i4"), ("crc", "u4"), ("order", "i8")]
    + [(name, "i8") for name in TENSORS]
)
"""What is held of each sample: size and text length in tokens, offsets of its tensors, and its place in the held-out order."""


class FlowRow(NamedTuple):
    """An encoded picture with its caption.

    `latents` fp32 [T, C] are packed and normalised, T = `height` x `width` tokens. `text` [L, E] and `pooled` [P], FLUX.1's, have
    the cache's dtype. `weight` of its loss: 0 in a row that stands in for none. `key` is the sample's name in its cache. `mask`
    fp32 [T] in [0, 1], not all 0: how much each token's error counts; None where all do alike.
    """

    latents: Tensor
    height: int
    width: int
    text: Tensor
    pooled: Tensor | None
    weight: float = 1.0
    key: str = ""
    mask: Tensor | None = None


class LatentCache(Sequence[FlowRow]):
    """A finished cache; pickles as its folder, or its address. `facts` are its own, `empty` the embedding of no caption by text
    length.

    A row's bytes are read from its shard when it is asked for, and checked; from several threads if one likes. `config_key` is
    what errors name. Raises DataError for a folder that is missing, unfinished, damaged or of another format, and for samples
    that do not agree with the facts.
    """

    facts: LatentFacts
    empty: Mapping[int, TextEmbedding]

    def __init__(self, folder: Path | str, config_key: str = "data.cache") -> None:
        self._reference, self._config_key = folder, config_key
        self.folder = open_folder(folder, config_key)
        told = _read_cache_file(self.folder, config_key)
        self.facts = told["facts"]
        self._shards: list[str] = [shard["file"] for shard in told["shards"]]
        self.empty = _read_empty(self.folder, self.facts, config_key)
        parts = self.folder.each(self._open_shard, enumerate(told["shards"]))
        self._entries = np.concatenate([entries for entries, _ in parts])
        self._keys = np.array([key for _, keys in parts for key in keys])

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> FlowRow:  # type: ignore[override]  # rows have no slices
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        entry = self._entries[index]
        facts, height, width = self.facts, int(entry["height"]), int(entry["width"])
        shapes: dict[str, tuple[int, ...]] = {
            "latents": (height * width, facts.channels),
            "text": (int(entry["length"]), facts.text_width),
        }
        if facts.pooled_width is not None:
            shapes["pooled"] = (facts.pooled_width,)
        if entry["mask"] >= 0:
            shapes["mask"] = (height * width,)
        shard = self._shards[entry["shard"]]
        path = f"{self.folder.name}/{shard}"
        wanted = [(int(entry[name]), math.prod(shape) * self._dtype(name).itemsize) for name, shape in shapes.items()]
        try:
            contents = self.folder.parts(shard, wanted)
        except OSError as error:
            raise DataError(f"{self._config_key}: {path} cannot be read ({error.strerror}); copy or encode it again") from None
        tensors = {
            name: torch.frombuffer(content, dtype=self._dtype(name)).reshape(shape)
            for (name, shape), content in zip(shapes.items(), contents, strict=True)
        }
        if crc_of(tensors.values()) != entry["crc"]:
            raise DataError(f"{self._config_key}: {path} is damaged at sample {self.key(index)}; copy or encode it again")
        row = FlowRow(tensors["latents"].float(), height, width, tensors["text"], tensors.get("pooled"), key=self.key(index))
        return row._replace(mask=tensors.get("mask"))

    def key(self, index: int) -> str:
        """Return the name of a sample."""
        return self._keys[index].decode()

    def size(self, index: int) -> tuple[int, int, int]:
        """Return height, width and text length of a sample, in tokens."""
        entry = self._entries[index]
        return int(entry["height"]), int(entry["width"]), int(entry["length"])

    def caption(self, index: int) -> str:
        """Return the caption of a sample, read from its shard's index."""
        shard = int(self._entries["shard"][index])
        first = int(np.searchsorted(self._entries["shard"], shard))
        return self._samples_of(self._shards[shard])[index - first]["caption"]

    @cached_property
    def bucket_of(self) -> np.ndarray:
        """The bucket of each sample, numbered from 0: int64 [samples]. One bucket is one resolution and one text length."""
        return np.unique(self.sizes, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """Height, width and text length of each sample, in tokens: int32 [samples, 3]."""
        return np.stack([self._entries[name] for name in ("height", "width", "length")], axis=1)

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Positions of each sample, those of picture and text: int64 [samples]."""
        entries = self._entries
        return entries["height"].astype(np.int64) * entries["width"] + entries["length"]

    @property
    def held_out_order(self) -> np.ndarray:
        """The samples in the order in which they are held out, which only their keys decide: int64 [samples]."""
        return np.argsort(self._entries["order"], kind="stable")

    def __reduce__(self) -> tuple:
        return LatentCache, (self._reference, self._config_key)

    def _dtype(self, name: str) -> torch.dtype:
        return dtype_of({"latents": self.facts.latent_dtype, "mask": "float32"}.get(name, self.facts.text_dtype))

    def _open_shard(self, numbered: tuple[int, Mapping[str, Any]]) -> tuple[np.ndarray, list[bytes]]:
        number, shard = numbered
        path = f"{self.folder.name}/{shard['file']}"
        try:
            size = self.folder.size(shard["file"])
        except OSError:
            raise DataError(f"{self._config_key}: {path} is missing; copy or encode it again") from None
        if size != shard["bytes"]:
            raise DataError(f"{self._config_key}: {path} has {size} bytes instead of {shard['bytes']}; copy or encode it again")
        samples = self._samples_of(shard["file"])
        entries = np.zeros(len(samples), _ENTRY)
        for index, sample in enumerate(samples):
            if fault := _fault(self.facts, sample):
                raise DataError(f"{self._config_key}: {path}, sample {sample['key']} {fault}")
            tokens = self.facts.pixels_per_token
            size_and_length = (sample["height"] // tokens, sample["width"] // tokens, sample["text"][1][0])
            offsets = [sample[name][0] if name in sample else -1 for name in TENSORS]
            order = derive_seed("held-out", sample["key"])
            entries[index] = (number, *size_and_length, sample["crc32"], order, *offsets)
        return entries, [sample["key"].encode() for sample in samples]

    def _samples_of(self, name: str) -> list[dict[str, Any]]:
        """Return what the index of a shard says of its samples."""
        return read_signed(self.folder, index_name(name), f"{self._config_key}: {self.folder.name}/{name}")["samples"]


class LatentRows(Sequence[FlowRow]):
    """Some samples of a cache, for training or held out; `indexes` int64 [rows] says which."""

    def __init__(self, cache: LatentCache, indexes: np.ndarray) -> None:
        self.cache, self.indexes = cache, indexes

    def __len__(self) -> int:
        return len(self.indexes)

    def __getitem__(self, index: int) -> FlowRow:  # type: ignore[override]  # rows have no slices
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.cache[int(self.indexes[index])]

    @property
    def buckets(self) -> np.ndarray:
        """The bucket of each row: int64 [rows]. Only rows of one bucket, a resolution and a text length, share a micro-batch."""
        return self.cache.bucket_of[self.indexes]

    @property
    def row_lengths(self) -> np.ndarray:
        """Number of positions of each row, those of picture and text: int64 [rows]."""
        return self.cache.row_lengths[self.indexes]

    @property
    def max_slice(self) -> int:
        """Positions of the longest row."""
        return int(self.row_lengths.max())


class LatentData(NamedTuple):
    """What a run learns from and is judged by, and the regularisation set, if there is one (`fluxray.data.prior`)."""

    train: LatentRows
    evaluation: LatentRows
    prior: LatentRows | None = None

    @property
    def empty(self) -> Mapping[int, TextEmbedding]:
        """The embedding of no caption at each text length to train on."""
        return {**(self.prior.cache.empty if self.prior else {}), **self.train.cache.empty}

    def summary(self) -> str:
        """Return one line for the log."""
        facts = self.train.cache.facts
        sizes = ", ".join(f"{height}x{width}" for height, width in facts.resolutions[:4])
        more = ", ..." if len(facts.resolutions) > 4 else ""
        texts = ", ".join(map(str, facts.text_lengths))
        prior = "" if self.prior is None else f", regularisation {len(self.prior):,}"
        masks = " with masks" if facts.masks else ""
        return (
            f"training {len(self.train):,} pictures{masks}, held out {len(self.evaluation):,}{prior}; {facts.family} latents of "
            f"{sizes}{more} pixels, texts of {texts} tokens"
        )


def load_latents(
    cache: Path | str,
    eval_cache: Path | str | None,
    eval_fraction: float,
    needs: CacheNeeds,
    prior_cache: Path | str | None = None,
) -> LatentData:
    """Open `data.cache` and return its training and held-out rows, the latter all of `data.eval_cache` where there is one.

    Otherwise the share `eval_fraction` of the samples, at least one, is held out: those that come first in an order by a hash of
    their keys, so that all runs over one cache share it, and most of it stays when samples are added. Raises DataError for a
    cache that cannot be read or split and ConfigError for one that is not of the model that `needs` describes.
    """
    trained = LatentCache(cache)
    check_cache(trained.facts, needs)
    everything = np.arange(len(trained))
    prior = None if prior_cache is None else _whole(prior_cache, trained, "data.prior_cache")
    if eval_cache is not None:
        return LatentData(LatentRows(trained, everything), _whole(eval_cache, trained, "data.eval_cache"), prior)
    number = max(round(eval_fraction * len(trained)), 1)
    if number >= len(trained):
        raise DataError(f"data.eval_fraction: {eval_fraction} of {len(trained)} samples leaves none to train on; use more")
    chosen = trained.held_out_order[:number]
    return LatentData(LatentRows(trained, np.setdiff1d(everything, chosen)), LatentRows(trained, np.sort(chosen)), prior)


def _whole(folder: Path | str, beside: LatentCache, config_key: str) -> LatentRows:
    """Return all rows of a cache that must be of the same model as the one `beside` it."""
    cache = LatentCache(folder, config_key)
    check_cache(cache.facts, CacheNeeds.of_cache(beside.facts), config_key)
    return LatentRows(cache, np.arange(len(cache)))


def _read_cache_file(files: Folder, config_key: str) -> dict[str, Any]:
    """Return `cache.json`, its facts as LatentFacts."""
    folder = files.name
    if isinstance(files, LocalFolder) and not files.folder.is_dir():
        raise DataError(f"{config_key}: {folder}: no such folder; check the path, or encode pictures first")
    told = read_signed(files, CACHE_FILE, f"{config_key}: {folder}")
    version = told.get("format")
    if version != CACHE_FORMAT:
        raise DataError(f"{config_key}: {folder} has format {version}, this fluxray reads {CACHE_FORMAT}; use the other version")
    try:
        facts = LatentFacts.from_json(told["facts"])
        names = [shard["file"] for shard in told["shards"]]
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{config_key}: {folder}: {CACHE_FILE} is none of a cache; encode it again") from None
    if not names or any(Path(name).name != name for name in names):
        raise DataError(f"{config_key}: {folder}: {CACHE_FILE} names no shards of its folder; encode it again")
    return {"facts": facts, "shards": told["shards"]}


def _read_empty(folder: Folder, facts: LatentFacts, config_key: str) -> dict[int, TextEmbedding]:
    path = f"{folder.name}/{EMPTY_FILE}"
    try:
        tensors = load(folder.read(EMPTY_FILE))
        found = {length: TextEmbedding(tensors[f"text.{length}"], tensors.get("pooled")) for length in facts.text_lengths}
    except (OSError, SafetensorError, KeyError):
        raise DataError(f"{config_key}: {path} is missing or damaged; copy or encode the cache again") from None
    for length, (text, pooled) in found.items():
        shapes = tuple(text.shape), None if pooled is None else tuple(pooled.shape)
        if shapes != ((length, facts.text_width), None if facts.pooled_width is None else (facts.pooled_width,)):
            raise DataError(f"{config_key}: {path} is of another model than {CACHE_FILE}; encode the cache again")
    return found


def _fault(facts: LatentFacts, sample: Mapping[str, Any]) -> str | None:
    """Return what does not agree with the facts in a sample's entry in an index, and the remedy."""
    if fault := size_fault(facts, sample["height"], sample["width"]):
        return fault
    num_tokens = sample["height"] * sample["width"] // facts.pixels_per_token**2
    widths = {"latents": facts.channels, "text": facts.text_width, "pooled": facts.pooled_width}
    for name, width in widths.items():
        shape = sample[name][1] if name in sample else [None]
        if shape[-1] != width:
            return f"has {name} of width {shape[-1]}, the cache's is {width}; encode all samples with one model"
    for name in ("latents", "mask"):
        if name in sample and sample[name][1][0] != num_tokens:
            return f"has {name} of {sample[name][1][0]} tokens instead of {num_tokens}; encode it again"
    return None
