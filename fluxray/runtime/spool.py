"""Records of a run on their way to a tracking server: JSON lines on disk, read in order, forgotten once acknowledged.

A folder holds segments `00000001.jsonl`, ... and the position up to which they are acknowledged. Every writer begins a segment of
its own, so a line that a crash tore ends its segment and joins no other line; order is that of segments, then of lines. A process
that is killed loses no record; a machine that fails loses those after the last `sync`.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fluxray.runtime.paths import write_text

POSITION_FILE = "acknowledged.json"
SEGMENT_BYTES = 16 * 2**20
"""A segment that has grown to this size is followed by another, and deleted once acknowledged."""

Record = Mapping[str, Any]


class Position(NamedTuple):
    """A place between two records: `offset` bytes into a segment."""

    segment: int
    offset: int


class Entry(NamedTuple):
    """A record, and the position after it."""

    record: Record
    end: Position


class Appender:
    """Appends records to a folder, which it makes. Not for several threads at once; any number may append each on its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._size = 0

    def append(self, record: Record) -> None:
        """Write one record to the operating system. Raises OSError with nothing written, and may then be called again."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self._file < 0 or self._size >= SEGMENT_BYTES:
            self.close()
            self._file, self._size = _new_segment(self._folder), 0
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._cut()
            raise
        self._size += len(line)

    def sync(self) -> None:
        """Return once the disk has what was appended. Raises OSError."""
        if self._file >= 0:
            os.fsync(self._file)

    def close(self) -> None:
        """End the segment; the next record begins another. Raises OSError."""
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _cut(self) -> None:
        """Take back what was written of a line; a disk that refuses even that has its segment ended there."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            file, self._file = self._file, -1
            os.close(file)


def entries(folder: Path, start: Position) -> Iterator[Entry]:
    """Yield the records after `start` that are complete now. A line that is no JSON object is passed over."""
    for number, path in _segments(folder):
        if number < start.segment:
            continue
        offset = start.offset if number == start.segment else 0
        try:
            file = path.open("rb")
        except FileNotFoundError:  # acknowledged meanwhile by another process
            continue
        with file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                record = _parsed(line)
                if record is not None:
                    yield Entry(record, Position(number, offset))


def acknowledged(folder: Path) -> Position:
    """Return where the first record starts that is not acknowledged."""
    try:
        return Position(*map(int, json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return Position(0, 0)


def acknowledge(folder: Path, position: Position) -> None:
    """Forget the records before `position`; segments that lie before it are deleted."""
    write_text(folder / POSITION_FILE, json.dumps(position))
    for number, path in _segments(folder):
        if number < position.segment:
            path.unlink(missing_ok=True)


def left(folder: Path) -> Iterator[Record]:
    """Yield the records that are not acknowledged."""
    return (entry.record for entry in entries(folder, acknowledged(folder)))


def _segments(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.stem), path) for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _new_segment(folder: Path) -> int:
    """Return the descriptor of a segment after all others."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max([acknowledged(folder).segment, *(number for number, _ in _segments(folder))])
    while True:
        number += 1
        try:
            return os.open(folder / f"{number:08}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
