"""What MLflow knows a run by: name, folder, first start; and what is recorded once: versions, git revision, parameters."""

import json
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fluxray
from fluxray.config.load import flatten
from fluxray.config.schema import TrainConfig
from fluxray.runtime.paths import write_text

FOLDER = "tracking"
"""In the run's folder: identity and spool."""

FILE = "run.json"
MAX_PARAM_LENGTH = 6000
VERSIONED = ("torch", "transformers", "ray", "mlflow")
RUN_TAG, DIR_TAG = "fluxray.run", "fluxray.run_dir"


@dataclass(frozen=True)
class Identity:
    """A run of that name, in that folder, first started then (milliseconds): the same three are the same MLflow run.

    `parent` is the folder of the sweep that the run is a trial of, whose MLflow run is its parent.
    """

    name: str
    run_dir: str
    started: int
    tags: Mapping[str, str]
    params: Mapping[str, str]
    parent: str | None = None


@dataclass(frozen=True)
class Part:
    """What a trial is part of: the folder of its sweep, and the tags that tell it from the other trials."""

    sweep_dir: Path
    tags: Mapping[str, str]


def read_identity(run_dir: Path) -> Identity | None:
    """Return the identity that an earlier start gave the run."""
    try:
        return Identity(**json.loads((run_dir / FOLDER / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_identity(config: TrainConfig, run_dir: Path, part: Part | None = None) -> Identity:
    """Give the run of `config` an identity that begins now."""
    tags = {RUN_TAG: str(config.name), DIR_TAG: str(run_dir), **origin_tags(), **(part.tags if part else {})}
    parent = str(part.sweep_dir) if part else None
    identity = Identity(str(config.name), str(run_dir), int(time.time() * 1000), tags, _params(config), parent)
    write_text(run_dir / FOLDER / FILE, json.dumps(asdict(identity)))
    return identity


def masked(text: str) -> str:
    """Return `text` without the user and password of the addresses in it."""
    return re.sub(r"(://)[^/\s]*@", r"\1***@", text)


def param(value: object) -> str:
    """Return a configuration value as MLflow shows it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return masked(text)[:MAX_PARAM_LENGTH]


def _params(config: TrainConfig) -> dict[str, str]:
    flat: dict[str, Any] = {}
    for key, value in flatten(config).items():
        flat.update({f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value})
    return {key: param(value) for key, value in flat.items()}


def origin_tags() -> dict[str, str]:
    """Return the versions of what computes, and the git revision where fluxray is run from a checkout."""
    tags = {"version.fluxray": fluxray.__version__}
    for package in VERSIONED:
        try:
            tags[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    folder = Path(fluxray.__file__).resolve().parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py"):
        tags["mlflow.source.git.commit"] = _git(folder, "rev-parse", "HEAD")
        tags["fluxray.git_dirty"] = str(bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "."))).lower()
    return tags


def _git(folder: Path, *words: str) -> str:
    """Return git's answer, or nothing where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
