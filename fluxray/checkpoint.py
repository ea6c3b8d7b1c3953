"""Checkpoints: safetensors shards with an index, one layout for every engine and any number of ranks. No pickle.

    step_00000200/
        checkpoint.json                  format version, run state, number of ranks, size of every other file; written last
        weights-00000-of-00008.safetensors, exp_avg-..., exp_avg_sq-..., step-...        one file a section and rank
        index-00000-of-00008.json        what this rank's files hold: section -> name -> [whole shape, first row, CRC-32]

A tensor is named as the library names its parameter. A piece is a range of rows (dimension 0) of it. All ranks write into
`step_00000200.partial`; once all are done rank 0 writes `checkpoint.json` and renames the directory, which is what commits it.

A piece's CRC-32 is taken of the tensor in memory, so writing reads nothing back (4 GB/s a core; sha256 is ten times as slow and
no better against accidents). It is checked whenever a piece is read whole: always where a run goes on in the same shape, never
for a range of rows. Both kinds of JSON file carry their own.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxray.errors import CheckpointError, DamagedCheckpointError
from fluxray.protocols import RunState, StateItem
from fluxray.ranks import ALONE, Ranks

MODEL_DIR = "model"
"""Folder of a run that holds the library's config.json."""

TOKENIZER_DIR = "tokenizer"
"""Folder of the run of a language model that holds its tokenizer."""

FORMAT_VERSION = 1
PREFIX = "step_"


def directory_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"{PREFIX}{step:08d}"


def save(run_dir: Path, state: RunState, items: Iterable[StateItem], ranks: Ranks = ALONE) -> Path:
    """Write a checkpoint and return its directory, committed. Collective: every rank passes its own items.

    Of a tensor that every rank holds whole, only rank 0's piece is written. Raises CheckpointError on every rank if one cannot
    write (no space, no permission); what was committed before stays.
    """
    final = run_dir / directory_name(state.step)
    partial = final.with_name(f"{final.name}.partial")
    first = ranks.rank == 0
    ranks.together(lambda: _writing(final, lambda: _make_empty(partial) if first else None))
    ranks.together(lambda: _writing(final, lambda: _write_pieces(partial, items, ranks)))
    ranks.together(lambda: _writing(final, lambda: _commit(partial, final, state, ranks.num_ranks) if first else None))
    return final


def committed(run_dir: Path) -> list[Path]:
    """Return the committed checkpoints of a run, newest first."""
    return sorted((d for d in run_dir.glob(f"{PREFIX}*") if d.suffix != ".partial" and d.is_dir()), reverse=True)


def open_newest(
    candidates: Sequence[Path], notify: Callable[[str], None], load: "Callable[[Path], CheckpointReader] | None" = None
) -> "CheckpointReader | None":
    """Return a reader of the first complete checkpoint of `candidates` (newest first), or None if there are no candidates.

    `load` opens one and may read it into an engine; every rank must meet the same faults in it. A damaged one is passed over, and
    `notify` is told. Raises DamagedCheckpointError if all are damaged.
    """
    faults: list[str] = []
    for directory in candidates:
        try:
            reader = (load or CheckpointReader)(directory)
        except DamagedCheckpointError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            notify(f"{fault}; using {directory.name} instead")
        return reader
    if faults:
        raise DamagedCheckpointError(f"{faults[0]}; no earlier one is complete either")
    return None


class Piece(NamedTuple):
    """Rows of a tensor in one file, from `first` of the `shape` of the whole one; `crc` is of dtype, shape and bytes."""

    shape: list[int]
    first: int
    crc: int
    file: str


class CheckpointReader:
    """One committed checkpoint, checked to be complete: format, index and the size of every file.

    What is damaged raises DamagedCheckpointError, here or when it is read.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self._open()
        except (AttributeError, KeyError, TypeError, ValueError):
            raise DamagedCheckpointError(f"checkpoint {directory}: its index is damaged") from None

    def _open(self) -> None:
        head = self._json("checkpoint.json")
        if head.get("format") != FORMAT_VERSION:
            raise DamagedCheckpointError(
                f"checkpoint {self.directory}: has format {head.get('format')}, this version reads {FORMAT_VERSION}; "
                f"use the fluxray that wrote it"
            )
        self._check("checkpoint.json", head)
        for name, size in head["files"].items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != size:
                state = "truncated" if path.is_file() else "missing"
                raise DamagedCheckpointError(f"checkpoint {self.directory}: {name} is {state}")
        self.state = RunState.from_json(head["state"])
        self.num_ranks = int(head["num_ranks"])
        self._pieces = self._read_indices()

    def names(self) -> list[str]:
        """Return the names of the saved parameters."""
        return sorted({name for section, name in self._pieces if section == "weights"})

    def sections(self, name: str, /) -> Sequence[str]:
        """Return the sections saved for the parameter `name`."""
        return [section for section, other in self._pieces if other == name]

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._find(section, name)[0].shape)

    def read(self, section: str, name: str, offset: int = 0, num_rows: int | None = None, /) -> Tensor:
        """Return rows [offset, offset + num_rows) of a saved tensor, on the host; all rows from `offset` on for None."""
        pieces = sorted(self._find(section, name), key=lambda piece: piece.first)
        shape = pieces[0].shape
        if not shape:
            return self._tensor(pieces[0], name, None)
        end = shape[0] if num_rows is None else offset + num_rows
        if end > shape[0]:
            raise CheckpointError(
                f"checkpoint {self.directory}: {name} has {shape[0]} rows, {end} are wanted; it is of another model"
            )
        stops = [piece.first for piece in pieces[1:]] + [shape[0]]
        wanted = [piece for piece, stop in zip(pieces, stops, strict=True) if piece.first < end and stop > offset]
        parts = [self._tensor(p, name, (max(offset - p.first, 0), max(end - p.first, 0))) for p in wanted or pieces[:1]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert whole.shape[0] == end - offset, f"{name}: pieces overlap or leave a gap"
        return whole

    def verify(self) -> None:
        """Read every tensor, and compare it with the checksum that was written."""
        for (_, name), pieces in self._pieces.items():
            for piece in pieces:
                self._tensor(piece, name, None)

    def _find(self, section: str, name: str) -> list[Piece]:
        try:
            return self._pieces[section, name]
        except KeyError:
            raise CheckpointError(f"checkpoint {self.directory}: holds no {section} of {name}; it is of another model") from None

    def _tensor(self, piece: Piece, name: str, rows: tuple[int, int] | None) -> Tensor:
        try:
            with safe_open(self.directory / piece.file, framework="pt") as opened:
                part = opened.get_slice(name)
                shape = part.get_shape()
                if rows is not None and shape and (rows[0] > 0 or rows[1] < shape[0]):
                    return part[min(rows[0], shape[0]) : min(rows[1], shape[0])]
                tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpointError(f"checkpoint {self.directory}: {piece.file} cannot be read ({error})") from None
        if _crc(tensor) != piece.crc:
            raise DamagedCheckpointError(f"checkpoint {self.directory}: {piece.file}: {name} is not what was written")
        return tensor

    def _read_indices(self) -> dict[tuple[str, str], list[Piece]]:
        pieces: dict[tuple[str, str], list[Piece]] = {}
        for rank in range(self.num_ranks):
            suffix = _suffix(rank, self.num_ranks)
            index = self._json(f"index{suffix}.json")
            self._check(f"index{suffix}.json", index)
            for section, entries in index.items():
                for name, (shape, first, crc) in entries.items():
                    pieces.setdefault((section, name), []).append(Piece(shape, first, crc, f"{section}{suffix}.safetensors"))
        return pieces

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.directory / name).read_text())
        except FileNotFoundError:
            raise DamagedCheckpointError(f"checkpoint {self.directory}: {name} is missing") from None
        except (OSError, ValueError):
            raise DamagedCheckpointError(f"checkpoint {self.directory}: {name} is damaged") from None

    def _check(self, name: str, values: dict[str, Any]) -> None:
        """Take the checksum out of `values` and compare it."""
        if values.pop("crc32") != zlib.crc32(json.dumps(values).encode()):
            raise DamagedCheckpointError(f"checkpoint {self.directory}: {name} is damaged")


def _writing(final: Path, action: Callable[[], None]) -> None:
    """Run `action`, a file system's refusal turned into a CheckpointError."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        told = getattr(error, "strerror", None) or str(error).removeprefix("Error while serializing: I/O error: ")
        reason = told.partition(" (os error")[0]
        raise CheckpointError(
            f"storage: {final} cannot be written ({reason}); free space there or name another storage"
        ) from None


def _make_empty(folder: Path) -> None:
    """Make the folder anew; what interrupted saves have left goes first, since it may be what fills the disk."""
    for left in folder.parent.glob(f"{PREFIX}*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_pieces(folder: Path, items: Iterable[StateItem], ranks: Ranks) -> None:
    sections: dict[str, dict[str, Tensor]] = {}
    index: dict[str, dict[str, tuple[Sequence[int], int, int]]] = {}
    for item in items:
        whole = item.offset is None
        if (whole and ranks.rank != 0) or item.tensor.numel() == 0:
            continue
        tensor = item.tensor.detach().cpu().contiguous()
        sections.setdefault(item.section, {})[item.name] = tensor
        index.setdefault(item.section, {})[item.name] = (item.shape, 0 if whole else item.offset or 0, _crc(tensor))
    suffix = _suffix(ranks.rank, ranks.num_ranks)
    for section, tensors in sections.items():
        path = folder / f"{section}{suffix}.safetensors"
        save_file(tensors, path)
        _sync(path)
    write_json(folder / f"index{suffix}.json", index)


def _commit(partial: Path, final: Path, state: RunState, num_ranks: int) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    head = {"format": FORMAT_VERSION, "state": state.to_json(), "num_ranks": num_ranks, "files": files}
    write_json(partial / "checkpoint.json", head)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync(final.parent)


def _suffix(rank: int, num_ranks: int) -> str:
    return f"-{rank:05d}-of-{num_ranks:05d}"


def _crc(tensor: Tensor) -> int:
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(kind))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write one of a checkpoint's JSON files, its checksum included."""
    path.write_text(json.dumps({**values, "crc32": zlib.crc32(json.dumps(values).encode())}))
    _sync(path)


def _sync(path: Path) -> None:
    """Make a file, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
