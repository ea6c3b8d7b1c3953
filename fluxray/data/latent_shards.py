"""A cache of encoded pictures on disk, and how it is written.

    cache.json                    format version, facts, and the shards with their sizes; written last
    empty.safetensors             the embedding of no caption: `text.L` [L, E] for each text length L, and `pooled` [P]
    shard-00000.safetensors       `KEY.latents` [T, C], `KEY.text` [L, E], `KEY.pooled` [P], `KEY.mask` [T] of each sample; or
    shard-00000.tar               WebDataset: `KEY.safetensors` (`latents`, `text`, ...) and `KEY.json` of each sample
    shard-00000.index.json        key, caption and size of each sample, where its tensors begin in the shard, and their CRC-32

A sample is read at its offsets, so no shard is ever loaded, and both layouts are read alike. A shard counts once its index is
there, a cache once `cache.json` is: what a writer that died left is never seen. Shards may be written by any number of processes.
`cache.json` and the indexes end in a CRC-32 of their own text.
"""

import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from fluxray.data.folders import Folder, LocalFolder
from fluxray.data.latent_facts import LatentFacts
from fluxray.errors import DataError

CACHE_FILE, EMPTY_FILE = "cache.json", "empty.safetensors"
CACHE_FORMAT = 1
SHARD_BYTES = 256 << 20
TENSORS = ("latents", "text", "pooled", "mask")
"""Of a sample, in this order; the pooled text is FLUX.1's, and not every sample has a mask."""

Layout = Literal["safetensors", "webdataset"]
_SUFFIXES: Mapping[Layout, str] = {"safetensors": ".safetensors", "webdataset": ".tar"}
_CRC_KEY = ', "crc32": '
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")


class TextEmbedding(NamedTuple):
    """An encoded caption: text [L, E] and, for FLUX.1, pooled [P]."""

    text: Tensor
    pooled: Tensor | None


class LatentSample(NamedTuple):
    """An encoded picture. `key` is unique in its cache: letters, digits, `_` and `-`.

    `latents` [T, C] are packed row by row and normalised as `LatentFacts` says, T = height/p x width/p with p pixels per token;
    `height` and `width` are in pixels. Tensors of any floating dtype; they are stored in that of the facts. `mask` [T] in [0, 1]
    says how much each token's error counts (`fluxray.data.masks`), None where all do alike; it is stored in fp32.
    """

    key: str
    caption: str
    height: int
    width: int
    latents: Tensor
    text: Tensor
    pooled: Tensor | None
    mask: Tensor | None = None


def write_cache(
    folder: Path,
    facts: LatentFacts,
    empty: Sequence[TextEmbedding],
    samples: Iterable[LatentSample],
    layout: Layout = "safetensors",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a whole cache, in shards of about `shard_bytes`; `empty` holds the embedding of no caption at each text length.

    Raises DataError for samples that do not agree with the facts, and where there is a finished cache already.
    """
    if (folder / CACHE_FILE).exists():
        raise DataError(f"data.cache: {folder} holds a cache already; remove it or name another folder")
    names = [
        write_shard(folder, f"shard-{number:05d}", facts, part, layout)
        for number, part in enumerate(_parts(samples, shard_bytes))
    ]
    finish_cache(folder, facts, empty, names)


def write_shard(folder: Path, stem: str, facts: LatentFacts, samples: Sequence[LatentSample], layout: Layout) -> str:
    """Write one shard and its index, and return its file's name. It appears whole or not at all; one of that name is replaced.

    Raises DataError for samples that do not agree with the facts.
    """
    tensors = {sample.key: _stored(facts, sample) for sample in samples}
    if len(tensors) != len(samples):
        raise DataError(f"data.cache: {stem} gets two samples of one key; give each its own")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{stem}{_SUFFIXES[layout]}"
    index_path(folder, name).unlink(missing_ok=True)
    partial = folder / f"{name}.{os.getpid()}.partial"
    try:
        if layout == "safetensors":
            save_file({f"{key}.{part}": t for key, of in tensors.items() for part, t in of.items()}, partial)
        else:
            _write_tar(partial, samples, tensors)
        places = _find_tensors(partial, layout)
        entries = [_entry(sample, tensors[sample.key], places) for sample in samples]
        num_bytes = partial.stat().st_size
        commit(partial, folder / name)
    finally:
        partial.unlink(missing_ok=True)
    write_json(index_path(folder, name), {"file": name, "bytes": num_bytes, "samples": entries})
    return name


def finish_cache(folder: Path, facts: LatentFacts, empty: Sequence[TextEmbedding], names: Sequence[str]) -> None:
    """Make a cache of the shards of these file names; DataError if one is not there, or no `empty` fits a text length."""
    shards, keys, lengths, resolutions, masks = [], set(), set(), set(), False
    for name in names:
        index = read_json(index_path(folder, name), f"data.cache: {folder / name}")
        entries = index["samples"]
        shards.append({"file": name, "bytes": index["bytes"], "num_samples": len(entries)})
        lengths |= {entry["text"][1][0] for entry in entries}
        resolutions |= {(entry["height"], entry["width"]) for entry in entries}
        masks |= any("mask" in entry for entry in entries)
        if twice := keys & {entry["key"] for entry in entries}:
            raise DataError(f"data.cache: {name} repeats the sample {min(twice)} of another shard; give each its own key")
        keys |= {entry["key"] for entry in entries}
    if not keys:
        raise DataError(f"data.cache: {folder} gets no sample; encode at least one picture")
    whole = replace(facts, text_lengths=tuple(sorted(lengths)), resolutions=tuple(sorted(resolutions)), masks=masks)
    _write_empty(folder, whole, empty)
    write_json(
        folder / CACHE_FILE,
        {"format": CACHE_FORMAT, "num_samples": len(keys), "facts": whole.to_json(), "shards": shards},
    )


def index_path(folder: Path, name: str) -> Path:
    """Return the index of the shard of that file name."""
    return folder / index_name(name)


def index_name(name: str) -> str:
    """Return the file name of the index of the shard of that file name."""
    return f"{name.partition('.')[0]}.index.json"


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file that appears whole or not at all; its last key is the CRC-32 of the text without it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    text = json.dumps(values)
    partial.write_text(f"{text[:-1]}{_CRC_KEY}{zlib.crc32(text.encode())}}}")
    commit(partial, path)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return what `write_json` wrote; DataError, whose text begins with `what`, if the file is missing or damaged."""
    return read_signed(LocalFolder(path.parent), path.name, what)


def read_signed(folder: Folder, name: str, what: str) -> dict[str, Any]:
    """Return what `write_json` wrote into a folder, as `read_json`."""
    damage = DataError(f"{what}: {name} is damaged; copy or encode it again")
    try:
        text, _, crc = folder.read(name).decode().rpartition(_CRC_KEY)
        text += "}"
        if crc != f"{zlib.crc32(text.encode())}}}":
            raise damage
        return json.loads(text)
    except FileNotFoundError:
        raise DataError(f"{what} has no {name}; encode to the end, or copy it again") from None
    except (OSError, ValueError):
        raise damage from None


def crc_of(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes, one after the other."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def _parts(samples: Iterable[LatentSample], shard_bytes: int) -> Iterator[list[LatentSample]]:
    part: list[LatentSample] = []
    size = 0
    for sample in samples:
        part.append(sample)
        size += sum(tensor.nbytes for name in TENSORS if (tensor := getattr(sample, name)) is not None)
        if size >= shard_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _stored(facts: LatentFacts, sample: LatentSample) -> dict[str, Tensor]:
    """Return the tensors of a sample as they are stored; DataError where they do not agree with the facts."""
    begin = f"data.cache: sample {sample.key!r}"
    if not _KEY.fullmatch(sample.key):
        raise DataError(f"{begin}: a key has 1 to 80 letters, digits, _ and -; rename it")
    if fault := size_fault(facts, sample.height, sample.width):
        raise DataError(f"{begin} {fault}")
    num_tokens = sample.height * sample.width // facts.pixels_per_token**2
    text_length = len(sample.text)
    wanted: dict[str, tuple[int, ...]] = {"latents": (num_tokens, facts.channels), "text": (text_length, facts.text_width)}
    if facts.pooled_width is not None:
        wanted["pooled"] = (facts.pooled_width,)
    if sample.mask is not None:
        wanted["mask"] = (num_tokens,)
    for name in TENSORS:
        tensor = getattr(sample, name)
        has = None if tensor is None else tuple(tensor.shape)
        if has != wanted.get(name):
            raise DataError(f"{begin}: {name} of shape {has}, the cache's is {wanted.get(name)}; encode all with one model")
        if tensor is not None and not tensor.isfinite().all():
            raise DataError(f"{begin}: {name} has values that are not finite; encode in fp32 or bf16, or leave the picture out")
    if sample.mask is not None and not (sample.mask.min() >= 0 and sample.mask.max() <= 1 and sample.mask.any()):
        raise DataError(f"{begin}: its mask is zero everywhere, or not within 0 and 1; mend the mask, or leave the picture out")
    dtypes = {"latents": facts.latent_dtype, "text": facts.text_dtype, "pooled": facts.text_dtype, "mask": "float32"}
    return {name: _copied(getattr(sample, name), dtypes[name]) for name in wanted}


def _copied(tensor: Tensor, dtype: str) -> Tensor:
    """Return a copy for a file of safetensors, which refuses tensors that share memory, as equal captions may."""
    return tensor.detach().to("cpu", dtype_of(dtype), copy=True).contiguous()


def size_fault(facts: LatentFacts, height: int, width: int) -> str | None:
    """Return what is wrong with a size in pixels, and the remedy; None if nothing is."""
    if height < 1 or width < 1 or height % facts.pixels_per_token or width % facts.pixels_per_token:
        return f"has {height}x{width} pixels, no multiples of {facts.pixels_per_token}; resize or crop it first"
    return None


def dtype_of(name: str) -> torch.dtype:
    """Return the storage type of that name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _write_tar(path: Path, samples: Sequence[LatentSample], tensors: Mapping[str, dict[str, Tensor]]) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for sample in samples:
            told = {"key": sample.key, "caption": sample.caption, "height": sample.height, "width": sample.width}
            for suffix, content in (("safetensors", save(tensors[sample.key])), ("json", json.dumps(told).encode())):
                member = tarfile.TarInfo(f"{sample.key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _find_tensors(path: Path, layout: Layout) -> dict[str, int]:
    """Return where each tensor's bytes begin in a shard, by `KEY.latents` and so on."""
    if layout == "safetensors":
        with path.open("rb") as file:
            return _safetensors_offsets(file, 0)
    with tarfile.open(path, "r:") as tar, path.open("rb") as file:
        members = {m.name.removesuffix(".safetensors"): m.offset_data for m in tar if m.name.endswith(".safetensors")}
        return {
            f"{key}.{name}": place for key, begin in members.items() for name, place in _safetensors_offsets(file, begin).items()
        }


def _safetensors_offsets(file: io.BufferedReader, begin: int) -> dict[str, int]:
    """Return where the tensors of the safetensors file at `begin` stand: 8 bytes say how long its JSON header is."""
    file.seek(begin)
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return {name: begin + 8 + length + of["data_offsets"][0] for name, of in header.items() if name != "__metadata__"}


def _entry(sample: LatentSample, tensors: Mapping[str, Tensor], places: Mapping[str, int]) -> dict[str, Any]:
    """Return a sample's entry in the index: of each tensor its offset and shape."""
    found = {name: [places[f"{sample.key}.{name}"], list(tensor.shape)] for name, tensor in tensors.items()}
    told = {"key": sample.key, "caption": sample.caption, "height": sample.height, "width": sample.width}
    return {**told, **found, "crc32": crc_of(tensors[name] for name in TENSORS if name in tensors)}


def _write_empty(folder: Path, facts: LatentFacts, empty: Sequence[TextEmbedding]) -> None:
    tensors: dict[str, Tensor] = {}
    for text, pooled in empty:
        tensors[f"text.{len(text)}"] = _copied(text, facts.text_dtype)
        if pooled is not None:
            tensors["pooled"] = _copied(pooled, facts.text_dtype)
    for length in facts.text_lengths:
        if f"text.{length}" not in tensors:
            raise DataError(f"data.cache: no embedding of an empty caption of {length} tokens; encode '' at each text length")
    partial = folder / f"{EMPTY_FILE}.{os.getpid()}.partial"
    save_file(tensors, partial)
    commit(partial, folder / EMPTY_FILE)


def commit(partial: Path, path: Path) -> None:
    """Let a file appear under its name once its bytes are on disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)
