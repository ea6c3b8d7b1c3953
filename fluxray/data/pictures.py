"""Captioned pictures from a source string, listed without decoding any.

    folder:DIR                      pictures of DIR and its sub-folders; captions of same-named .txt files, or of metadata.jsonl
    parquet:FILE-OR-GLOB            a picture a row, as encoded bytes, beside its caption
    hf:NAME[:CONFIG[:SPLIT]]        the same of the Hugging Face hub
    tars:GLOB                       WebDataset: jpg, png, webp, ... with txt, json or cls of the same name; {0000..0099} counts;
                                    also s3://BUCKET/GLOB, gs://BUCKET/GLOB, and https://HOST/FILES without * and ?

A fault of a source as a whole is a DataError of one line. A fault of one picture is told by `PictureRef.fault`, or as Quarantined
when it is loaded, so that it costs this picture alone.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from fluxray.config.encode import PICTURE_FORMS, EncodeConfig
from fluxray.data.decode import Quarantined
from fluxray.data.folders import check_remote, is_remote
from fluxray.errors import DataError

FORMS = "folder:DIR, parquet:FILE-OR-GLOB, tars:GLOB or hf:NAME[:CONFIG[:SPLIT]]"
SUFFIXES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "heic", "heif")
"""Names that end so are pictures, in folders and tars. Those of them that cannot be read are quarantined, not overlooked."""
MASK_SUFFIX = ".mask.png"


class Place(NamedTuple):
    """Where bytes lie: in a whole file; with `size`, from byte `start` of a tar; otherwise in row `start` of a table."""

    path: str
    start: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class PictureRef:
    """A picture that is listed: small, picklable.

    `key` is unique among those listed together, and the same each time: the path within its folder, tar or row. `caption` is None
    where there is none; `fault` says why it, or the picture, cannot be read; `notes` what was unusual about reading it. `mask` is
    the place of `NAME.mask.png`, with `encode.mask` file. `bucket` (height, width) is what it is cut to, where that has been
    decided (`fluxray.data.survey`).
    """

    key: str
    caption: str | None
    place: Place
    mask: Place | None = None
    notes: tuple[str, ...] = ()
    fault: str | None = None
    bucket: tuple[int, int] | None = None


Loaded = bytes | Quarantined


class PictureSource(Protocol):
    """Some captioned pictures, always in the same order. It can be pickled; loading is safe from several threads."""

    @property
    def name(self) -> str:
        """The reference that it was opened by, as errors name it."""
        ...

    def refs(self) -> Iterator[PictureRef]:
        """Yield what there is; raises DataError."""
        ...

    def load(self, place: Place) -> bytes:
        """Return the bytes of a picture or mask; raises Quarantined."""
        ...

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes, or why there are none, read from the first to the last; raises DataError."""
        ...

    def ignored(self) -> Mapping[str, int]:
        """Return how many files there are that are neither pictures nor captions of one, by kind."""
        ...

    def stamp(self, place: Place) -> Sequence[int | str]:
        """Return what tells the file of a place from another one under its name, without reading it; empty if nothing does."""
        ...


@dataclass(frozen=True)
class Pictures:
    """The pictures of one source or several, by unique keys: one that is taken gets the name of its source before it."""

    parts: tuple[PictureSource, ...]
    config_key: str

    def refs(self) -> list[PictureRef]:
        """Return all pictures. Raises DataError where there are none."""
        found, taken = [], set()
        for number, part in enumerate(self.parts):
            for ref in part.refs():
                found.append(_numbered(ref, number, part.name, taken))
        if not found:
            names = ", ".join(part.name for part in self.parts)
            raise DataError(f"{self.config_key}: {names}: holds no pictures; they end in {', '.join(SUFFIXES[:8])}, ...")
        return found

    def load(self, ref: PictureRef) -> bytes:
        """Return the bytes of a picture of `refs`; raises Quarantined."""
        part, place = self._part_of(ref.place)
        return part.load(place)

    def stamp(self, place: Place) -> Sequence[int | str]:
        """Return what tells the file of a place from another one under its name, without reading it; empty if nothing does."""
        part, place = self._part_of(place)
        return part.stamp(place)

    def load_mask(self, ref: PictureRef) -> bytes:
        """Return the bytes of the mask that `ref.mask` tells of; raises Quarantined."""
        if ref.mask is None:
            raise Quarantined("no mask", f"there is no {Path(ref.key).stem}{MASK_SUFFIX}")
        part, place = self._part_of(ref.mask)
        return part.load(place)

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes, or why there are none; tars are read once, from the first byte to the last."""
        taken: set[str] = set()
        for number, part in enumerate(self.parts):
            for ref, data in part.stream():
                yield _numbered(ref, number, part.name, taken), data

    def ignored(self) -> dict[str, int]:
        """Return how many files there are that are neither pictures nor captions of one, by kind."""
        counts: dict[str, int] = {}
        for part in self.parts:
            for kind, count in part.ignored().items():
                counts[kind] = counts.get(kind, 0) + count
        return counts

    def _part_of(self, place: Place) -> tuple[PictureSource, Place]:
        number, _, path = place.path.partition(":")
        return self.parts[int(number)], place._replace(path=path)


def open_pictures(source: str | Sequence[str], config_key: str = "data.source", config: EncodeConfig | None = None) -> Pictures:
    """Return the pictures of `source`, one reference or several. `config` says which fields hold what, and if there are masks.

    `config_key` is what errors name. Raises DataError for another form, for what is missing, and for rows without the fields.
    """
    from fluxray.data.picture_files import FolderPictures
    from fluxray.data.picture_rows import HubPictures, ParquetPictures
    from fluxray.data.picture_tars import TarPictures
    from fluxray.data.remote_tars import RemoteTars

    config = config or EncodeConfig()
    parts: list[PictureSource] = []
    for reference in absolute_pictures(source, config_key):
        kind, _, rest = reference.partition(":")
        match kind:
            case "folder":
                parts.append(FolderPictures(rest, config_key, config.caption_key, config.mask == "file"))
            case "parquet":
                parts.append(ParquetPictures(rest, config_key, config.caption_key, config.image_key))
            case "tars" if is_remote(rest):
                parts.append(RemoteTars(rest, config_key, config.caption_key, config.mask == "file"))
            case "tars":
                parts.append(TarPictures(rest, config_key, config.caption_key, config.mask == "file"))
            case _:
                parts.append(HubPictures(rest, config_key, config.caption_key, config.image_key))
    return Pictures(tuple(parts), config_key)


def absolute_pictures(source: str | Sequence[str], config_key: str = "data.source") -> tuple[str, ...]:
    """Return the references with absolute paths, for workers that run in another folder; DataError for a wrong form."""
    references = (source,) if isinstance(source, str) else tuple(source)
    found = []
    for reference in references:
        kind, _, rest = reference.partition(":")
        if kind not in PICTURE_FORMS or not rest:
            remedy = f"write folder:{reference}" if Path(reference).is_dir() else f"use {FORMS}"
            raise DataError(f"{config_key}: {reference!r} is no source of pictures; {remedy}")
        if is_remote(rest):
            if kind != "tars":
                raise DataError(
                    f"{config_key}: {reference!r}: what is far away is read from tars alone; use tars:..., or copy it here"
                )
            check_remote(rest, config_key)
        found.append(reference if kind == "hf" or is_remote(rest) else f"{kind}:{os.path.abspath(os.path.expanduser(rest))}")
    return tuple(found)


def read_file(path: str, size: int | None = None, start: int = 0) -> bytes:
    """Return `size` bytes of a file from `start`, by default all; raises Quarantined."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read() if size is None else file.read(size)
    except FileNotFoundError:
        raise Quarantined("missing", "the file is not there") from None
    except OSError as error:
        raise Quarantined("unreadable", error.strerror or "") from None
    if size is not None and len(data) != size:
        raise Quarantined("truncated", f"{len(data)} of {size} bytes are there")
    return data


def file_stamp(place: Place) -> list[int]:
    """Return size and time of a place's file; nothing if there is none."""
    try:
        found = os.stat(place.path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def loaded(load: Callable[[Place], bytes], place: Place) -> Loaded:
    """Return what `load` returns or raises."""
    try:
        return load(place)
    except Quarantined as fault:
        return fault


def is_picture(name: str) -> bool:
    """Return whether a file of that name is taken for a picture."""
    return name.rpartition(".")[2].lower() in SUFFIXES and "." in name


def unique_key(key: str, taken: Collection[str], prefix: str) -> str:
    """Return `key`, or where it is taken `prefix`/`key`, or that with a number."""
    if key not in taken:
        return key
    longer = f"{prefix}/{key}"
    number = 2
    while (candidate := longer if number == 2 else f"{longer}#{number - 1}") in taken:
        number += 1
    return candidate


def _numbered(ref: PictureRef, number: int, name: str, taken: set[str]) -> PictureRef:
    """Return a reference under a key of its own, whose places say which source they are of."""
    key = unique_key(ref.key, taken, Path(name.partition(":")[2]).stem)
    taken.add(key)
    place, mask = ref.place, ref.mask
    place = place._replace(path=f"{number}:{place.path}")
    return replace(ref, key=key, place=place, mask=mask if mask is None else mask._replace(path=f"{number}:{mask.path}"))
