"""Pictures in rows: parquet files, and data sets of the Hugging Face hub."""

import glob
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

import pyarrow
from pyarrow.parquet import ParquetFile

from fluxray.data.captions import CAPTION_KEYS, Caption, caption_field, caption_of_value
from fluxray.data.decode import Quarantined
from fluxray.data.pictures import Loaded, PictureRef, Place, file_stamp, loaded, read_file, unique_key
from fluxray.data.sources import hub_dataset
from fluxray.errors import DataError, one_line

_NAME_KEYS = ("file_name", "__key__")
"""Columns that name a row's picture where the picture itself has no path."""


@dataclass(frozen=True)
class ParquetPictures:
    """The rows of the parquet files that `pattern`, an absolute path, names; a folder stands for the files in it.

    Pictures are binary, or structs of `bytes` and `path`, as `datasets` writes them. A row's key is its path, else the file's
    name and the row's number.
    """

    pattern: str
    config_key: str
    caption_key: str | None
    image_key: str | None

    @property
    def name(self) -> str:
        """The reference."""
        return f"parquet:{self.pattern}"

    def refs(self) -> Iterator[PictureRef]:
        """Yield the rows of each file in their order; no picture is read."""
        taken: set[str] = set()
        for path in self._files:
            stem = PurePath(path).stem
            try:
                with ParquetFile(path) as file:
                    columns = _Columns.of(file.schema_arrow, self.caption_key, self.image_key, f"{self.config_key}: {path}")
                    number = 0
                    for batch in file.iter_batches(columns=columns.light):
                        for caption, name in columns.listed(batch):
                            yield _ref(name, stem, number, caption, Place(path, number), taken)
                            number += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise self._unreadable(path, error) from None

    def load(self, place: Place) -> bytes:
        """Return the picture's bytes; the row group that it lies in is kept for the next. Raises Quarantined."""
        try:
            with self._lock:
                first, column = self._group_of(place.path, place.start or 0)
            return _bytes_of(column[(place.start or 0) - first].as_py(), os.path.dirname(place.path))
        except FileNotFoundError:
            raise Quarantined("missing", "the file is not there") from None
        except (pyarrow.ArrowException, OSError, IndexError, KeyError) as error:
            raise Quarantined("unreadable", one_line(error)) from None

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes."""
        return ((ref, loaded(self.load, ref.place)) for ref in self.refs())

    def stamp(self, place: Place) -> list[int]:
        """Return size and time of the file, if it is one."""
        return file_stamp(place)

    def ignored(self) -> Mapping[str, int]:
        """Return nothing: a row is a picture."""
        return {}

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @cached_property
    def _kept(self) -> dict[str, Any]:
        return {}

    def _group_of(self, path: str, row: int) -> tuple[int, Any]:
        """Return the number of the first row of the row group that holds `row`, and its pictures."""
        kept = self._kept.get("group")
        if kept is not None and kept[0] == path and kept[1] <= row < kept[1] + len(kept[2]):
            return kept[1], kept[2]
        with ParquetFile(path) as file:
            columns = _Columns.of(file.schema_arrow, self.caption_key, self.image_key, f"{self.config_key}: {path}")
            first = 0
            for group in range(file.num_row_groups):
                if row < first + file.metadata.row_group(group).num_rows:
                    column = file.read_row_group(group, columns=[columns.image]).column(0)
                    self._kept["group"] = (path, first, column)
                    return first, column
                first += file.metadata.row_group(group).num_rows
        raise IndexError(f"row {row} of {first}")

    @property
    def _files(self) -> list[str]:
        pattern = os.path.join(glob.escape(self.pattern), "**", "*.parquet") if os.path.isdir(self.pattern) else self.pattern
        found = [self.pattern] if os.path.isfile(self.pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"{self.config_key}: {self.name}: matches no file; check the path")
        return found

    def _unreadable(self, path: str, error: Exception) -> DataError:
        return DataError(f"{self.config_key}: {path}: is not a readable parquet file ({one_line(error)}); write it anew")

    def __reduce__(self) -> tuple:
        return ParquetPictures, (self.pattern, self.config_key, self.caption_key, self.image_key)


@dataclass(frozen=True)
class HubPictures:
    """The rows of a data set of the hub; `reference` is NAME[:CONFIG[:SPLIT]], the split defaults to train."""

    reference: str
    config_key: str
    caption_key: str | None
    image_key: str | None

    @property
    def name(self) -> str:
        """The reference."""
        return f"hf:{self.reference}"

    def refs(self) -> Iterator[PictureRef]:
        """Yield the rows in their order; no picture is read."""
        taken: set[str] = set()
        stem = PurePath(self.reference.partition(":")[0]).name
        number = 0
        for batch in self._table.select(self._columns.whole).to_batches():
            for caption, name in self._columns.listed(batch):
                yield _ref(name, stem, number, caption, Place(self.reference, number), taken)
                number += 1

    def load(self, place: Place) -> bytes:
        """Return the picture's bytes; raises Quarantined."""
        try:
            return _bytes_of(self._table.column(self._columns.image)[place.start or 0].as_py(), "")
        except (pyarrow.ArrowException, OSError, IndexError) as error:
            raise Quarantined("unreadable", one_line(error)) from None

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes."""
        return ((ref, loaded(self.load, ref.place)) for ref in self.refs())

    def stamp(self, place: Place) -> list[int]:
        """Return size and time of the file, if it is one."""
        return file_stamp(place)

    def ignored(self) -> Mapping[str, int]:
        """Return nothing: a row is a picture."""
        return {}

    @cached_property
    def _table(self) -> Any:
        return hub_dataset(self.reference, self.config_key).data.table

    @cached_property
    def _columns(self) -> "_Columns":
        return _Columns.of(self._table.schema, self.caption_key, self.image_key, f"{self.config_key}: {self.name}")

    def __reduce__(self) -> tuple:
        return HubPictures, (self.reference, self.config_key, self.caption_key, self.image_key)


@dataclass(frozen=True)
class _Columns:
    """Which columns of a table hold what. `path` tells that the picture is a struct with one; `name` is another column's."""

    image: str
    caption: str
    path: bool
    name: str | None

    @classmethod
    def of(cls, schema: pyarrow.Schema, caption_key: str | None, image_key: str | None, begin: str) -> "_Columns":
        """Find them in a table's schema; `begin` is what the DataError begins with where one is not there."""
        there = ", ".join(schema.names)
        holding = [field.name for field in schema if _holds_bytes(field.type)]
        image = image_key or (holding[0] if len(holding) == 1 else "image" if "image" in holding else None)
        if image is None or image not in holding:
            which = f"{image_key!r} that holds" if image_key else "that alone holds"
            raise DataError(f"{begin}: has no column {which} pictures but: {there}; set encode.image_key")
        caption = caption_field(schema.names, caption_key)
        if caption is None:
            wanted = " or ".join(map(repr, CAPTION_KEYS if caption_key is None else (caption_key,)))
            raise DataError(f"{begin}: has no column {wanted} but: {there}; set encode.caption_key")
        kind = schema.field(image).type
        path = pyarrow.types.is_struct(kind) and kind.get_field_index("path") >= 0
        return cls(image, caption, path, next((name for name in _NAME_KEYS if name in schema.names), None))

    @property
    def light(self) -> list[str]:
        """What a listing reads of a parquet file."""
        return [self.caption, *([f"{self.image}.path"] if self.path else []), *([self.name] if self.name else [])]

    @property
    def whole(self) -> list[str]:
        """What a listing reads of a table that is mapped into memory."""
        return [self.caption, *([self.image] if self.path else []), *([self.name] if self.name else [])]

    def listed(self, batch: Any) -> Iterator[tuple[Caption, str | None]]:
        """Yield caption and name of each row of a batch."""
        captions = batch.column(self.caption).to_pylist()
        none = [None] * len(captions)
        paths = batch.column(self.image).field("path").to_pylist() if self.path else none
        names = batch.column(self.name).to_pylist() if self.name else none
        for caption, path, name in zip(captions, paths, names, strict=True):
            given = name or path
            yield caption_of_value(caption), str(given) if given else None


def _holds_bytes(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    if types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _holds_bytes(kind.field(index).type)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _ref(name: str | None, stem: str, number: int, caption: Caption, place: Place, taken: set[str]) -> PictureRef:
    key = unique_key(name.lstrip("/") if name else f"{stem}-{number:07d}", taken, stem)
    taken.add(key)
    return PictureRef(key, caption.text, place, None, caption.notes, caption.fault)


def _bytes_of(value: Any, folder: str) -> bytes:
    """Return the bytes of a picture's value: bytes, or a struct that has them or the path of a file beside the table."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if data is None and isinstance(value, dict) and value.get("path"):
        return read_file(os.path.join(folder, value["path"]))
    if data is None:
        raise Quarantined("missing", "the row holds no picture")
    return data
