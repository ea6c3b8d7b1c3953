"""Documents from a source string: `builtin:topics`, `path:FILE|GLOB|DIR` or `hf:NAME[:CONFIG[:SPLIT]]`.

A source streams: no more than one document, or one batch of rows, is in memory at a time. Every fault of its text is a DataError
of one line that names the key, the file and the place in it.
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fluxray.errors import DataError, one_line

FORMS = "builtin:topics, path:FILE-OR-GLOB or hf:NAME[:CONFIG[:SPLIT]]"
BOM = b"\xef\xbb\xbf"
ROWS_AT_ONCE = 1000


class Source(Protocol):
    """Some documents, always in the same order."""

    def documents(self) -> Iterator[str]:
        """Yield the documents; raises DataError."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the content, wherever it lies; raises DataError."""
        ...


def open_sources(references: str | Sequence[str], text_key: str, config_key: str) -> tuple[Source, ...]:
    """Return a source for each reference, a file at a time for `path:`.

    `text_key` is the field that holds the text of a row, `config_key` (`data.source`) the key that errors name. Raises DataError
    for another form, for a file that is missing or empty, and for a data set that cannot be had.
    """
    found: list[Source] = []
    for reference in _as_tuple(references):
        kind, rest = _split_reference(reference, config_key)
        if kind == "builtin":
            found.append(Topics())
        elif kind == "path":
            found.extend(TextFile(path, text_key, config_key) for path in _matching_files(rest, config_key))
        else:
            found.append(HubDataset(rest, text_key, config_key))
    return tuple(found)


def read_documents(sources: Sequence[Source]) -> Iterator[str]:
    """Yield the documents of all sources in order, without those that hold only white space."""
    return (text for source in sources for text in source.documents() if text and not text.isspace())


def absolute_sources(references: str | Sequence[str], config_key: str = "data.source") -> tuple[str, ...]:
    """Return the references with the paths made absolute, for workers that run in another folder; DataError for a wrong form."""
    for reference in _as_tuple(references):
        _split_reference(reference, config_key)
    return tuple(absolute_reference(reference) for reference in _as_tuple(references))


def absolute_reference(reference: str) -> str:
    """Return a `path:` reference (of a source, tokenizer or model) with its path made absolute, any other unchanged."""
    kind, _, path = reference.partition(":")
    return f"path:{os.path.abspath(os.path.expanduser(path))}" if kind == "path" and path else reference


@dataclass(frozen=True)
class Topics:
    """The English help texts that come with Python, a topic a document."""

    def documents(self) -> Iterator[str]:
        """Yield the topics in the order of their names."""
        from pydoc_data.topics import topics

        return (topics[name] for name in sorted(topics))

    def fingerprint(self) -> str:
        """Return a hash of all topics; it differs between versions of Python."""
        digest = hashlib.blake2b(digest_size=16)
        for text in self.documents():
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class TextFile:
    """One file: a document a line (.jsonl) or a row (.parquet), otherwise the whole of it, as UTF-8, is one document."""

    path: Path
    text_key: str
    config_key: str

    def documents(self) -> Iterator[str]:
        """Yield the documents; a byte order mark is dropped, and CRLF in a whole-file document becomes LF."""
        match self.path.suffix.lower():
            case ".jsonl":
                return self._lines()
            case ".parquet":
                return self._rows()
            case _:
                return self._whole()

    def fingerprint(self) -> str:
        """Return a hash of the file's bytes and of how they are read, not of its name."""
        try:
            with self.path.open("rb") as file:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror}); check its permissions") from None
        suffix = self.path.suffix.lower()
        return f"{suffix}:{self.text_key}:{content}" if suffix in (".jsonl", ".parquet") else content

    def _whole(self) -> Iterator[str]:
        yield self._decode(self.path.read_bytes(), 0).replace("\r\n", "\n")

    def _lines(self) -> Iterator[str]:
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = self._decode(line, offset)
                offset += len(line)
                if text.strip():
                    yield self._field(text, f"line {number}")

    def _field(self, line: str, place: str) -> str:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._error(f"is not JSON ({error.msg}, column {error.colno}); write one object a line", place) from None
        except (ValueError, RecursionError) as error:
            raise self._error(f"is not JSON that can be read ({one_line(error)}); write one object a line", place) from None
        if not isinstance(row, dict) or self.text_key not in row:
            there = ", ".join(row) if isinstance(row, dict) else f"no object but {type(row).__name__}"
            raise self._error(f"has no field {self.text_key!r} but: {there}; set data.text_key", place)
        return _text_of(row[self.text_key], self.text_key, f"{self.config_key}: {self.path}: {place}")

    def _rows(self) -> Iterator[str]:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self.path) as file:
                if self.text_key not in file.schema_arrow.names:
                    columns = ", ".join(file.schema_arrow.names)
                    raise self._error(f"has no column {self.text_key!r} but: {columns}; set data.text_key")
                number = 0
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=[self.text_key]):
                    for value in batch.column(0).to_pylist():
                        yield _text_of(value, self.text_key, f"{self.config_key}: {self.path}: row {number}")
                        number += 1
        except (ArrowException, OSError) as error:
            raise self._error(f"is not a readable parquet file ({one_line(error)}); write it anew") from None

    def _decode(self, data: bytes, offset: int) -> str:
        """Return the text of `data`, which lies `offset` bytes into the file."""
        if b"\0" in data:
            at = offset + data.index(b"\0")
            raise self._error(f"is a binary file (NUL at byte {at}); convert it to UTF-8 text or leave it out")
        skipped = len(BOM) if offset == 0 and data.startswith(BOM) else 0
        try:
            return data[skipped:].decode()
        except UnicodeDecodeError as error:
            at = offset + skipped + error.start
            raise self._error(f"is not UTF-8 at byte {at} (0x{data[skipped + error.start]:02x}); convert it to UTF-8") from None

    def _error(self, fault: str, place: str | None = None) -> DataError:
        return DataError(": ".join([self.config_key, str(self.path), *([place] if place else [])]) + f": {fault}")


@dataclass(frozen=True)
class HubDataset:
    """A data set of the Hugging Face hub, a row a document. `reference` is NAME[:CONFIG[:SPLIT]]; the split defaults to train."""

    reference: str
    text_key: str
    config_key: str

    def documents(self) -> Iterator[str]:
        """Yield the rows' texts."""
        number = 0
        for batch in self._dataset.select_columns(self.text_key).iter(ROWS_AT_ONCE):
            for value in batch[self.text_key]:
                yield _text_of(value, self.text_key, f"{self.config_key}: hf:{self.reference}: row {number}")
                number += 1

    def fingerprint(self) -> str:
        """Return a hash that the library gives the data set and its version."""
        return f"hf:{self.reference}:{self.text_key}:{self._dataset._fingerprint}"

    @cached_property
    def _dataset(self) -> Any:
        dataset = hub_dataset(self.reference, self.config_key, files="path:...")
        if self.text_key not in dataset.column_names:
            fault = f"has no column {self.text_key!r} but: {', '.join(dataset.column_names)}; set data.text_key"
            raise DataError(f"{self.config_key}: hf:{self.reference}: {fault}")
        return dataset


def hub_dataset(reference: str, config_key: str, files: str = "parquet:...") -> Any:
    """Return a split of a data set of the hub, or of its cache; `reference` is NAME[:CONFIG[:SPLIT]].

    `files` is the form that errors advise for files. Raises DataError.
    """
    begin = f"{config_key}: hf:{reference}:"
    name, config, split = (*reference.split(":", 2), "", "")[:3]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError(f"{begin} is not a hub name; write hf:NAME[:CONFIG[:SPLIT]], or {files} for files")
    try:
        return _load_from_hub(name, config or None, split or "train")
    except ConnectionError:
        raise DataError(f"{begin} is not in the hub's cache, and the hub is out of reach; load it once or set HF_HOME") from None
    except FileNotFoundError as error:
        raise DataError(f"{begin} cannot be found or accessed ({one_line(error)}); check the name") from None
    except Exception as error:  # noqa: BLE001 - the library raises whatever its parsers do
        raise DataError(f"{begin} cannot be loaded ({one_line(error)}); check NAME[:CONFIG[:SPLIT]]") from None


def _load_from_hub(name: str, config: str | None, split: str) -> Any:
    """Load a split; without the hub, from what `datasets` prepared earlier, else from the files in the hub's cache."""
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return datasets.load_dataset(name, config, split=split)
    except ConnectionError as unreachable:
        try:
            snapshot = snapshot_download(name, repo_type="dataset", local_files_only=True)
        except LocalEntryNotFoundError:
            raise unreachable from None
    return datasets.load_dataset(snapshot, config, split=split)


def _split_reference(reference: str, config_key: str) -> tuple[str, str]:
    kind, _, rest = reference.partition(":")
    if reference == "builtin:topics" or (kind in ("path", "hf") and rest):
        return kind, rest
    remedy = f"write path:{reference}" if _looks_like_path(reference) else f"use {FORMS}"
    raise DataError(f"{config_key}: {reference!r} is no source; {remedy}")


def _looks_like_path(reference: str) -> bool:
    return bool(reference) and (":" not in reference or Path(reference).exists())


def _matching_files(pattern: str, config_key: str) -> list[Path]:
    """Return the files that are `pattern`, lie under it, or match it, sorted; hidden ones only if it names them."""
    path = Path(os.path.abspath(os.path.expanduser(pattern)))
    if path.is_dir():
        files = sorted(file for file in map(Path, glob.glob(f"{glob.escape(str(path))}/**/*", recursive=True)) if file.is_file())
    elif path.is_file():
        files = [path]
    else:
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
    if not files:
        fault = "holds no files" if path.is_dir() else "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise DataError(f"{config_key}: path:{path}: {fault}; check the path")
    for file in files:
        if file.stat().st_size == 0:
            raise DataError(f"{config_key}: {file}: is empty; put text into it or leave it out")
    return files


def _text_of(value: Any, text_key: str, place: str) -> str:
    """Return `value` if it is text that UTF-8 can hold."""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"{place}: field {text_key!r} holds {kind}, not a string; mend the row or set data.text_key")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: field {text_key!r} holds a lone surrogate at character {error.start}; mend the row") from None
    return value


def _as_tuple(references: str | Sequence[str]) -> tuple[str, ...]:
    return (references,) if isinstance(references, str) else tuple(references)
