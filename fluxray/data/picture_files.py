"""Pictures in a folder and its sub-folders, with captions in .txt files or in a metadata.jsonl, as imagefolder has it."""

import json
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fluxray.data.captions import Caption, caption_field, caption_of_bytes, caption_of_value
from fluxray.data.decode import Quarantined
from fluxray.data.pictures import MASK_SUFFIX, Loaded, PictureRef, Place, file_stamp, is_picture, loaded, read_file
from fluxray.data.sources import BOM
from fluxray.errors import DataError, one_line

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class FolderPictures:
    """The pictures under `folder`, which is absolute; hidden files and folders do not count, links are followed.

    A picture that a metadata.jsonl of its folder, or of one above, names has the caption there (named twice, it comes twice); any
    other that of NAME.txt.
    """

    folder: str
    config_key: str
    caption_key: str | None
    masks: bool

    @property
    def name(self) -> str:
        """The reference."""
        return f"folder:{self.folder}"

    def refs(self) -> Iterator[PictureRef]:
        """Yield the pictures in the order of their paths, with those that a metadata.jsonl names and that are not there."""
        named = self._named
        pictures = {name for name in self._names if is_picture(name) and not self._is_mask(name)}
        for key in sorted(pictures | set(named)):
            for number, caption in enumerate(named.get(key) or [self._text_beside(key)]):
                mask = self._place(_stem(key) + MASK_SUFFIX) if self.masks and _stem(key) + MASK_SUFFIX in self._names else None
                unique = key if number == 0 else f"{key}#{number + 1}"
                yield PictureRef(unique, caption.text, self._place(key), mask, caption.notes, caption.fault)

    def load(self, place: Place) -> bytes:
        """Return a file's bytes; raises Quarantined."""
        return read_file(place.path)

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes."""
        return ((ref, loaded(self.load, ref.place)) for ref in self.refs())

    def stamp(self, place: Place) -> list[int]:
        """Return size and time of the file, if it is one."""
        return file_stamp(place)

    def ignored(self) -> Mapping[str, int]:
        """Return how many other files there are, by the end of their name."""
        used = {METADATA, *(f"{_stem(name)}.txt" for name in self._names if is_picture(name))}
        counts: Counter[str] = Counter()
        for name in self._names:
            if self._is_mask(name):
                counts["masks, with encode.mask none"] += not self.masks
            elif not is_picture(name) and name not in used and posixpath.basename(name) not in used:
                suffix = posixpath.splitext(name)[1].lower()
                counts["captions without a picture" if suffix == ".txt" else suffix or "no suffix"] += 1
        return +counts

    @cached_property
    def _names(self) -> frozenset[str]:
        """All files, as paths within the folder."""
        if not os.path.isdir(self.folder):
            fault = "is a file; name its folder" if os.path.exists(self.folder) else "does not exist; check the path"
            raise DataError(f"{self.config_key}: {self.name}: {fault}")
        found, seen = set(), set()
        for parent, folders, files in os.walk(self.folder, followlinks=True):
            real = os.path.realpath(parent)
            folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
            if real not in seen:
                within = os.path.relpath(parent, self.folder)
                found |= {posixpath.normpath(posixpath.join(within, name)) for name in files if not name.startswith(".")}
            seen.add(real)
        return frozenset(found)

    @cached_property
    def _named(self) -> Mapping[str, list[Caption]]:
        """The captions of each picture that a metadata.jsonl names."""
        named: dict[str, list[Caption]] = {}
        for path in sorted(name for name in self._names if posixpath.basename(name) == METADATA):
            rows = [(number, self._row(path, number, line)) for number, line in enumerate(self._lines(path), 1) if line.strip()]
            if rows and not any(caption_field(row, self.caption_key) for _, row in rows):
                wanted = repr(self.caption_key) if self.caption_key else "'text' or 'caption'"
                raise self._error(path, f"has no field {wanted} but: {', '.join(rows[0][1])}; set encode.caption_key")
            for _, row in rows:
                key = posixpath.normpath(posixpath.join(posixpath.dirname(path), row["file_name"]))
                field = caption_field(row, self.caption_key)
                caption = Caption(None) if field is None else caption_of_value(row[field])
                if key.startswith(("../", "/")):
                    caption = Caption(None, "its path leads out of the folder")
                named.setdefault(key, []).append(caption)
        return named

    def _lines(self, path: str) -> list[str]:
        try:
            return read_file(self._place(path).path).removeprefix(BOM).decode().splitlines()
        except Quarantined as fault:
            raise self._error(path, f"cannot be read ({fault}); check its permissions") from None
        except UnicodeDecodeError as error:
            raise self._error(path, f"is not UTF-8 at byte {error.start}; convert it to UTF-8") from None

    def _row(self, path: str, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(path, f"line {number}: is not JSON ({one_line(error)}); write one object a line") from None
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise self._error(path, f"line {number}: has no file_name; write the picture's path from this folder there")
        return row

    def _text_beside(self, key: str) -> Caption:
        path = f"{_stem(key)}.txt"
        if path not in self._names:
            return Caption(None)
        try:
            return caption_of_bytes(read_file(self._place(path).path))
        except Quarantined as fault:
            return Caption(None, str(fault))

    def _is_mask(self, name: str) -> bool:
        stem = name.removesuffix(MASK_SUFFIX)
        return stem != name and stem in self._stems

    @cached_property
    def _stems(self) -> frozenset[str]:
        return frozenset(_stem(name) for name in self._names if is_picture(name))

    def _place(self, name: str) -> Place:
        return Place(os.path.join(self.folder, name))

    def _error(self, path: str, fault: str) -> DataError:
        return DataError(f"{self.config_key}: {self._place(path).path}: {fault}")

    def __reduce__(self) -> tuple:
        return FolderPictures, (self.folder, self.config_key, self.caption_key, self.masks)


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
