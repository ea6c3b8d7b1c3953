"""A run's checkpoints as a user sees them: listed, verified, pruned, copied."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fluxray.checkpoint import MODEL_DIR, TOKENIZER_DIR, CheckpointReader, committed, directory_name
from fluxray.errors import CheckpointError, ConfigError, DamagedCheckpointError, one_line
from fluxray.runtime.paths import CONFIG_FILE, committed_checkpoints, forget_missing_checkpoints, write_text

BESIDE = (MODEL_DIR, TOKENIZER_DIR)
"""Folders of a run that evaluation and export need beside a checkpoint; an image model has no tokenizer."""

UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Entry:
    """One checkpoint. `fault` says in one line why it cannot be used, None if it is complete; a damaged one may hide its ranks.

    `committed` tells whether a resume would use it: whether Ray has registered it, always for a run without Ray.
    """

    path: Path
    num_bytes: int
    saved_at: float
    num_ranks: int | None
    fault: str | None
    committed: bool

    @property
    def usable(self) -> bool:
        """Whether a resume can start from it."""
        return self.fault is None and self.committed

    @property
    def state(self) -> str:
        """Complete or damaged, committed or not, in words."""
        if self.fault is not None:
            return f"damaged: {self.fault}"
        return "complete" if self.committed else "complete, but not committed: a resume passes it over"


def list_checkpoints(run_dir: Path, verify: bool = False) -> list[Entry]:
    """Return the checkpoints of a run, newest first; with `verify` every tensor is read and compared with its checksum."""
    counting = {path.name for path in committed_checkpoints(run_dir)}
    return [_examine(path, verify, path.name in counting) for path in committed(run_dir)]


class Listed(Protocol):
    """What a row of the table shows."""

    @property
    def path(self) -> Path:
        """Its folder; the name tells the step."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        ...

    @property
    def saved_at(self) -> float:
        """Seconds since the epoch."""
        ...

    @property
    def num_ranks(self) -> int | None:
        """How many wrote it, if that is known."""
        ...

    @property
    def state(self) -> str:
        """Whether it can be used, in words."""
        ...


def table(entries: Sequence[Listed]) -> list[str]:
    """Return the lines that show `entries`, with a heading."""
    rows = [("step", "size", "saved", "ranks", "state")]
    for entry in entries:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.saved_at))
        ranks = "?" if entry.num_ranks is None else str(entry.num_ranks)
        rows.append((str(int(entry.path.name.rpartition("_")[2])), _size(entry.num_bytes), saved, ranks, entry.state))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [f"{a:>{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}  {e}" for a, b, c, d, e in rows]


def prune(run_dir: Path, keep: int, verify: bool = False) -> list[Path]:
    """Delete all but the newest `keep` usable checkpoints, damaged and uncommitted ones too; return what is deleted.

    The run must not be training. Raises CheckpointError, and deletes nothing, if there is no usable one.
    """
    entries = list_checkpoints(run_dir, verify)
    kept = [entry.path for entry in entries if entry.usable][: max(keep, 1)]
    if not kept:
        raise CheckpointError(f"--prune: {run_dir.name} has no complete checkpoint; nothing is deleted")
    doomed = [entry.path for entry in entries if entry.path not in kept]
    for path in doomed:
        leaving = path.with_name(f"{path.name}.partial")  # no reader takes it for a checkpoint any more
        shutil.rmtree(leaving, ignore_errors=True)
        path.rename(leaving)
        shutil.rmtree(leaving)
    forget_missing_checkpoints(run_dir)
    return doomed


def copy(run_dir: Path, target: Path, step: int | None = None) -> Path:
    """Copy a checkpoint, with all that evaluation and export need, to the new folder `target`; return the checkpoint's there.

    Takes the newest usable one unless `step` names another. The copy is verified before it gets its name. Raises ConfigError for
    a folder that is not empty or a step that is not there, CheckpointError if the checkpoint is damaged.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--copy: {target} exists and is not empty; name another folder")
    name = _chosen(run_dir, step).name
    making = target.with_name(f".{target.name}.partial")
    shutil.rmtree(making, ignore_errors=True)
    try:
        shutil.copytree(run_dir / name, making / name)
        for part in BESIDE:
            if part == MODEL_DIR or (run_dir / part).exists():
                shutil.copytree(run_dir / part, making / part)
        write_text(making / CONFIG_FILE, (run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        CheckpointReader(making / name).verify()
        if target.exists():
            target.rmdir()
        making.rename(target)
    except DamagedCheckpointError as error:
        fault = str(error).replace(str(making), str(run_dir))
        raise CheckpointError(f"--copy: {fault}; choose another with --step") from None
    except OSError as error:
        raise CheckpointError(f"--copy: {target} cannot be written ({one_line(error)}); name another folder") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target / name


def _chosen(run_dir: Path, step: int | None) -> Path:
    entries = list_checkpoints(run_dir)
    if step is not None:
        found = [entry for entry in entries if entry.path.name == directory_name(step)]
        if not found:
            steps = ", ".join(str(int(entry.path.name.rpartition("_")[2])) for entry in entries) or "none"
            raise ConfigError(f"--step: {step} is no checkpoint of {run_dir.name}; there are {steps}")
    else:
        found = [entry for entry in entries if entry.usable]
        if not found:
            raise CheckpointError(f"RUN: {run_dir.name} has no complete checkpoint yet")
    if found[0].fault is not None:
        raise CheckpointError(f"--step: {step} is damaged ({found[0].fault}); choose another")
    return found[0].path


def _examine(path: Path, verify: bool, is_committed: bool) -> Entry:
    files = [file.stat() for file in path.iterdir() if file.is_file()]
    saved_at = max((file.st_mtime for file in files), default=path.stat().st_mtime)
    num_ranks, fault = None, None
    try:
        reader = CheckpointReader(path)
        num_ranks = reader.num_ranks
        if verify:
            reader.verify()
    except CheckpointError as error:
        fault = str(error).removeprefix(f"checkpoint {path}: ")
    return Entry(path, sum(file.st_size for file in files), saved_at, num_ranks, fault, is_committed)


def _size(num_bytes: float) -> str:
    power = 0
    while num_bytes >= 1000 and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.0f} {UNITS[power]}" if power == 0 else f"{num_bytes:.1f} {UNITS[power]}"
