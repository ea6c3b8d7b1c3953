"""Where everything lies under fluxray's home: runs/NAME, sweeps/NAME, cache, mlflow.db, mlartifacts."""

import difflib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxray.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.yaml"
MAX_STEM = 60
REGISTRY_FILE = "checkpoint_manager_snapshot.json"
"""Ray Train's list of committed checkpoints, in the run's folder."""

REGISTRY_COPY = ".committed.json"
"""The last whole one."""


@dataclass(frozen=True)
class Home:
    """The folder of all runs. Workers run in other folders and on other nodes, so `root` is absolute and on shared storage."""

    root: Path

    @property
    def runs(self) -> Path:
        """Parent of the runs' folders."""
        return self.root / "runs"

    @property
    def sweeps(self) -> Path:
        """Parent of the sweeps' folders."""
        return self.root / "sweeps"

    @property
    def cache(self) -> Path:
        """Tokenised data and trained tokenizers."""
        return self.root / "cache"

    @property
    def database(self) -> Path:
        """The embedded MLflow database."""
        return self.root / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        """MLflow's artifacts beside the embedded database."""
        return self.root / "mlartifacts"


def home(storage: str | None = None) -> Home:
    """Return the home: `storage`, else $FLUXRAY_HOME, else ~/.fluxray."""
    return Home(Path(storage or os.environ.get("FLUXRAY_HOME") or "~/.fluxray").expanduser().absolute())


def new_run_name(label: str, runs: Path) -> str:
    """Return a name `LABEL-YYYYmmdd-HHMMSS-xxxx` that no run in `runs` has; `label` may be a hub name or a path."""
    last = label.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:MAX_STEM] or "run"
    while True:
        name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if not (runs / name).exists():
            return name


def list_runs(where: Home) -> list[Path]:
    """Return the folders of all runs, by name."""
    return sorted(path.parent for path in where.runs.glob(f"*/{CONFIG_FILE}"))


def find_run(name_or_path: str, where: Home) -> Path:
    """Return the folder of a run, given its name or its path; raises ConfigError with close matches."""
    for candidate in (where.runs / name_or_path, Path(name_or_path).expanduser().absolute()):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    names = [run.name for run in list_runs(where)]
    close = difflib.get_close_matches(name_or_path, names, n=3, cutoff=0.4)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"there are {', '.join(names[-5:])}" if names else "there is no run yet; `fluxray train` makes one"
    raise ConfigError(f"RUN: {name_or_path!r} is neither a run in {where.runs} nor the folder of one; {hint}")


def list_sweeps(where: Home) -> list[Path]:
    """Return the folders of all sweeps, by name."""
    return sorted(path.parent for path in where.sweeps.glob(f"*/{CONFIG_FILE}"))


def find_sweep(name: str, where: Home) -> Path:
    """Return the folder of a sweep; raises ConfigError with close matches."""
    if (where.sweeps / name / CONFIG_FILE).is_file() and Path(name).name == name:
        return where.sweeps / name
    names = [sweep.name for sweep in list_sweeps(where)]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names[-5:])}"
    raise ConfigError(f"NAME: {name!r} is no sweep in {where.sweeps}; {hint if names else 'there is none yet'}")


def registered_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints that Ray has registered and that exist, newest first.

    Raises CheckpointError if the registry is damaged.
    """
    registered = [run_dir / entry["checkpoint_dir_name"] for entry in _read_registry(run_dir).get("checkpoint_results", [])]
    return sorted((path for path in registered if path.is_dir()), key=lambda path: path.name, reverse=True)


def committed_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints to resume from, newest first: those that Ray has registered; all complete ones of a run without Ray.

    Raises CheckpointError if the registry is damaged.
    """
    if (run_dir / REGISTRY_FILE).exists():
        return registered_checkpoints(run_dir)
    from fluxray.checkpoint import committed

    return committed(run_dir)


def forget_missing_checkpoints(run_dir: Path) -> list[str]:
    """Take checkpoints that no longer exist out of Ray's registry, which would not start with them; return their names."""
    registry = _read_registry(run_dir)
    results: list[dict[str, Any]] = registry.get("checkpoint_results", [])
    kept = [index for index, entry in enumerate(results) if (run_dir / entry["checkpoint_dir_name"]).is_dir()]
    if kept and len(kept) == len(results):
        return []
    if not kept:
        (run_dir / REGISTRY_FILE).unlink(missing_ok=True)
        (run_dir / REGISTRY_COPY).unlink(missing_ok=True)
    else:
        indices = registry["checkpoint_report_indices"]
        registry = {
            **registry,
            "checkpoint_results": [results[index] for index in kept],
            "checkpoint_report_indices": [indices[index] for index in kept],
            "latest_checkpoint_result": results[kept[-1]],
        }
        write_text(run_dir / REGISTRY_FILE, json.dumps(registry))
    return [entry["checkpoint_dir_name"] for index, entry in enumerate(results) if index not in kept]


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


class RegistryKeeper:
    """Keeps a copy of Ray's registry. Ray writes it in place: a controller that dies in the midst of that leaves half of it."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._seen: tuple[int, int] | None = None

    def keep(self) -> None:
        """Copy the registry if it has changed and is whole. Costs one look at the file otherwise."""
        try:
            found = (self._run_dir / REGISTRY_FILE).stat()
            if (found.st_mtime_ns, found.st_size) == self._seen:
                return
            text = (self._run_dir / REGISTRY_FILE).read_text(encoding="utf-8")
            _parse_registry(text)
            write_text(self._run_dir / REGISTRY_COPY, text)
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._seen = (found.st_mtime_ns, found.st_size)


def mend_registry(run_dir: Path) -> bool:
    """Put the copy in the place of a registry that was not written to its end, before Ray reads it; returns whether it was so.

    The checkpoint whose registration was cut off is not committed. Raises CheckpointError if there is no whole copy.
    """
    path = run_dir / REGISTRY_FILE
    if not path.exists() or _whole_registry(path) is not None:
        return False
    write_text(path, json.dumps(_read_registry(run_dir)))
    return True


def _read_registry(run_dir: Path) -> Mapping[str, Any]:
    """Return the registry, from its copy if it is not whole: it may be just being written."""
    path = run_dir / REGISTRY_FILE
    if not path.exists():
        return {}
    registry = _whole_registry(path) or _whole_registry(run_dir / REGISTRY_COPY)
    if registry is None:
        raise CheckpointError(f"{path}: the list of committed checkpoints is damaged; start again with another name")
    names = [entry["checkpoint_dir_name"] for entry in registry["checkpoint_results"]]
    if any(Path(name).name != name or name in ("", "..") for name in names):
        raise CheckpointError(f"{path}: names a checkpoint outside of its run; start again with another name")
    return registry


def _whole_registry(path: Path) -> Mapping[str, Any] | None:
    try:
        return _parse_registry(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse_registry(text: str) -> Mapping[str, Any]:
    """Return the registry of `text`; ValueError, KeyError or TypeError if it is none."""
    registry = json.loads(text)
    if not all(isinstance(entry["checkpoint_dir_name"], str) for entry in registry["checkpoint_results"]):
        raise TypeError("checkpoint_dir_name")
    return registry
