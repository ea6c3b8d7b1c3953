"""Checkpoints: safetensors shards with an index, one layout for every engine and any number of ranks. No pickle.

    step_00000200/
        checkpoint.json                  format version, run state, number of ranks, size of every other file; written last
        weights-00000-of-00008.safetensors, exp_avg-..., exp_avg_sq-..., step-...        one file a section and rank
        index-00000-of-00008.json        what this rank's files hold: section -> name -> [whole shape, first row]

A tensor is named as the library names its parameter. A piece is a range of rows (dimension 0) of it. All ranks write into
`step_00000200.partial`; once all are done rank 0 writes `checkpoint.json` and renames the directory, which is what commits it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxray.errors import CheckpointError
from fluxray.protocols import RunState, StateItem
from fluxray.ranks import ALONE, Ranks

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


def open_newest(candidates: Sequence[Path], notify: Callable[[str], None]) -> "CheckpointReader | None":
    """Return a reader of the first complete checkpoint of `candidates` (newest first), or None if there are no candidates.

    A damaged one is passed over, and `notify` is told. Raises CheckpointError if all are damaged.
    """
    faults: list[str] = []
    for directory in candidates:
        try:
            reader = CheckpointReader(directory)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            notify(f"{fault}; using {directory.name} instead")
        return reader
    if faults:
        raise CheckpointError(f"{faults[0]}; no earlier one is complete either")
    return None


class CheckpointReader:
    """One committed checkpoint, checked to be complete: format, index and the size of every file."""

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self._open()
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(f"checkpoint {directory}: its index is damaged") from None

    def _open(self) -> None:
        head = self._json("checkpoint.json")
        if head.get("format") != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {self.directory}: has format {head.get('format')}, this version reads {FORMAT_VERSION}; "
                f"use the fluxray that wrote it"
            )
        for name, size in head["files"].items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(f"checkpoint {self.directory}: {name} is {'truncated' if path.is_file() else 'missing'}")
        self.state = RunState.from_json(head["state"])
        self._num_ranks = int(head["num_ranks"])
        self._pieces = self._read_indices()

    def names(self) -> list[str]:
        """Return the names of the saved parameters."""
        return sorted({name for section, name in self._pieces if section == "weights"})

    def sections(self, name: str, /) -> Sequence[str]:
        """Return the sections saved for the parameter `name`."""
        return [section for section, other in self._pieces if other == name]

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._find(section, name)[0][0])

    def read(self, section: str, name: str, offset: int = 0, num_rows: int | None = None, /) -> Tensor:
        """Return rows [offset, offset + num_rows) of a saved tensor, on the host; all rows from `offset` on for None."""
        pieces = sorted(self._find(section, name), key=lambda piece: piece[1])
        shape = pieces[0][0]
        if not shape:
            return self._tensor(pieces[0][2], name, None)
        end = shape[0] if num_rows is None else offset + num_rows
        if end > shape[0]:
            raise CheckpointError(
                f"checkpoint {self.directory}: {name} has {shape[0]} rows, {end} are wanted; it is of another model"
            )
        stops = [first for _, first, _ in pieces[1:]] + [shape[0]]
        wanted = [(first, file) for (_, first, file), stop in zip(pieces, stops, strict=True) if first < end and stop > offset]
        parts = [self._tensor(file, name, (max(offset - first, 0), end - first)) for first, file in wanted or [(0, pieces[0][2])]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert whole.shape[0] == end - offset, f"{name}: pieces overlap or leave a gap"
        return whole

    def _find(self, section: str, name: str) -> list[tuple[list[int], int, str]]:
        try:
            return self._pieces[section, name]
        except KeyError:
            raise CheckpointError(f"checkpoint {self.directory}: holds no {section} of {name}; it is of another model") from None

    def _tensor(self, file: str, name: str, rows: tuple[int, int] | None) -> Tensor:
        try:
            with safe_open(self.directory / file, framework="pt") as opened:
                if rows is None:
                    return opened.get_tensor(name)
                piece = opened.get_slice(name)
                num_rows = piece.get_shape()[0]
                first, last = min(max(rows[0], 0), num_rows), min(max(rows[1], 0), num_rows)
                return piece[first : max(first, last)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint {self.directory}: {file} cannot be read ({error})") from None

    def _read_indices(self) -> dict[tuple[str, str], list[tuple[list[int], int, str]]]:
        pieces: dict[tuple[str, str], list[tuple[list[int], int, str]]] = {}
        for rank in range(self._num_ranks):
            suffix = _suffix(rank, self._num_ranks)
            for section, entries in self._json(f"index{suffix}.json").items():
                for name, (shape, first) in entries.items():
                    pieces.setdefault((section, name), []).append((shape, first, f"{section}{suffix}.safetensors"))
        return pieces

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.directory / name).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {self.directory}: {name} is missing") from None
        except (OSError, ValueError):
            raise CheckpointError(f"checkpoint {self.directory}: {name} is damaged") from None


def _writing(final: Path, action: Callable[[], None]) -> None:
    """Run `action`, a file system's refusal turned into a CheckpointError."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"storage: {final} cannot be written ({reason}); free space there or name another storage"
        ) from None


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_pieces(folder: Path, items: Iterable[StateItem], ranks: Ranks) -> None:
    sections: dict[str, dict[str, Tensor]] = {}
    index: dict[str, dict[str, tuple[Sequence[int], int]]] = {}
    for item in items:
        whole = item.offset is None
        if (whole and ranks.rank != 0) or item.tensor.numel() == 0:
            continue
        sections.setdefault(item.section, {})[item.name] = item.tensor.detach().cpu().contiguous()
        index.setdefault(item.section, {})[item.name] = (item.shape, 0 if whole else item.offset or 0)
    suffix = _suffix(ranks.rank, ranks.num_ranks)
    for section, tensors in sections.items():
        path = folder / f"{section}{suffix}.safetensors"
        save_file(tensors, path)
        _sync(path)
    _write_json(folder / f"index{suffix}.json", index)


def _commit(partial: Path, final: Path, state: RunState, num_ranks: int) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    head = {"format": FORMAT_VERSION, "state": state.to_json(), "num_ranks": num_ranks, "files": files}
    _write_json(partial / "checkpoint.json", head)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync(final.parent)


def _suffix(rank: int, num_ranks: int) -> str:
    return f"-{rank:05d}-of-{num_ranks:05d}"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
    _sync(path)


def _sync(path: Path) -> None:
    """Make a file, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
