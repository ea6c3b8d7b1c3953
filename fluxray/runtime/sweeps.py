"""A sweep's folder: what it is started with, what it is resumed with, how its trials ended.

    sweeps/NAME/
      sweep.json            `Head`, the space and the base that trials begin with
      config.yaml           the base, resolved; space.yaml, environment.json: what MLflow keeps
      trials.jsonl          the table (`fluxray/runtime/sweep_table.py`)
      report.html           what became of it, for people; pictures/ holds its pictures
      outcomes/00003.json   how trial 3 ended
      outcomes/00003.stop   the scheduler has decided to stop it
      stop                  while it is there, trials save and stop

An outcome is written by the trial itself, so it counts even if the driver was gone.
"""

import json
import platform
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fluxray.config.keys import leaf_items
from fluxray.config.load import build, to_yaml
from fluxray.config.schema import TrainConfig
from fluxray.config.space import Space, build_space
from fluxray.config.text import Tree, dump
from fluxray.errors import CheckpointError, ConfigError
from fluxray.runtime.identity import masked, origin_tags
from fluxray.runtime.paths import CONFIG_FILE, Home, find_sweep, home, new_run_name, write_text
from fluxray.runtime.sweep_table import HEAD_FILE, Head, Status, read_head

SPACE_FILE, ENVIRONMENT_FILE, STOP_FILE = "space.yaml", "environment.json", "stop"
REPORT_FILE, PICTURES = "report.html", "pictures"
OUTCOMES, RAY = "outcomes", ".ray"


@dataclass(frozen=True)
class Sweep:
    """A sweep: its name, where it lies, what it searches, what its trials have in common. `resumed`: begun before."""

    name: str
    home: Home
    space: Space
    base: Tree
    resumed: bool

    @property
    def folder(self) -> Path:
        """The sweep's folder."""
        return self.home.sweeps / self.name

    def run_name(self, trial: int) -> str:
        """The name of a trial's run."""
        return f"{self.name}-{trial:03}"

    def run_dir(self, trial: int) -> Path:
        """The folder of a trial's run."""
        return self.home.runs / self.run_name(trial)

    def named(self, config: TrainConfig, trial: int) -> TrainConfig:
        """Return a trial's configuration with its run's name."""
        return config.model_copy(update={"name": self.run_name(trial), "storage": str(self.home.root)})

    @property
    def best_command(self) -> str:
        """What shows its best trial."""
        elsewhere = "" if self.home == home(None) else f" --storage {shlex.quote(str(self.home.root))}"
        return f"fluxray best {self.name}{elsewhere}"

    @property
    def head(self) -> Head:
        """What the table says of the sweep."""
        space = self.space
        return Head(self.name, space.metric, space.mode, tuple(space.keys), space.budget.words)


class Outcome(NamedTuple):
    """How a trial ended, and why if it has failed."""

    status: Status
    reason: str | None = None


def new_sweep(space: Space, base: Tree, label: str) -> Sweep:
    """Return a sweep that is about to start; writes nothing. `name` and `storage` of the base are the sweep's."""
    common = dict(base)
    given, storage = common.pop("name", None), common.pop("storage", None)
    where = home(storage)
    name = given or new_run_name(label, where.sweeps)
    if (where.sweeps / name).exists():
        raise ConfigError(f"name: {name!r} is a sweep already; go on with it by --resume {name}, or set another name")
    trials = re.compile(rf"{re.escape(name)}-\d{{3,5}}")
    if taken := sorted(path.name for path in where.runs.glob(f"{name}-*") if trials.fullmatch(path.name)):
        raise ConfigError(f"name: {name!r} would name its trials like the run {taken[0]}; set another name")
    return Sweep(name, where, space, common, resumed=False)


def open_sweep(name: str, where: Home) -> Sweep:
    """Return a sweep that was begun before. Raises ConfigError."""
    folder = find_sweep(name, where)
    try:
        found = json.loads((folder / HEAD_FILE).read_text(encoding="utf-8"))
        return Sweep(folder.name, where, build_space(found["space"]), found["base"], resumed=True)
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"NAME: {folder / HEAD_FILE} is missing or damaged; start the sweep anew under another name") from None


def refuse_changes(begun: Sweep, now: Sweep) -> None:
    """Raise ConfigError, with the difference, where `now` is not the sweep that was begun."""
    pairs = ((_plain(begun.space), _plain(now.space)), (dict(leaf_items(begun.base)), dict(leaf_items(now.base))))
    changed = [
        f"{key}: was {_shown(old.get(key))}, is {_shown(new.get(key))}"
        for old, new in pairs
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise ConfigError(
            f"--resume: {begun.name} was begun otherwise ({'; '.join(changed)}); leave the space and the keys away to go on with "
            f"it, or start another"
        )


def save_sweep(sweep: Sweep, nodes: Sequence[Mapping[str, float]], parent: str | None = None) -> None:
    """Write what the sweep is, and the environment it runs in; `parent` is the id of its MLflow run, None if it is not news."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    if parent is None and (sweep.folder / HEAD_FILE).exists():
        parent = read_head(sweep.folder).mlflow
    head = {**asdict(sweep.head), "mlflow": parent}
    write_text(sweep.folder / HEAD_FILE, json.dumps({**head, "space": _dumped(sweep.space), "base": sweep.base}, indent=1))
    write_text(sweep.folder / SPACE_FILE, dump(_dumped(sweep.space)))
    found = {"python": platform.python_version(), **origin_tags(), "nodes": [dict(node) for node in nodes]}
    write_text(sweep.folder / ENVIRONMENT_FILE, json.dumps(found, indent=1))
    write_text(sweep.folder / CONFIG_FILE, to_yaml(common_config(sweep)))


def common_config(sweep: Sweep) -> TrainConfig:
    """Return the configuration that trials begin with, under the sweep's name."""
    return build({**sweep.base, "name": sweep.name, "storage": str(sweep.home.root)})


def write_outcome(folder: Path, trial: int, outcome: Outcome) -> None:
    """Put down how a trial ended; the first word on it counts."""
    path = _outcome_path(folder, trial)
    if not path.exists():
        write_text(path, json.dumps(outcome._asdict()))


def read_outcome(folder: Path, trial: int) -> Outcome | None:
    """Return how a trial ended, None while it has not; `stopped` as soon as that is decided."""
    try:
        return Outcome(**json.loads(_outcome_path(folder, trial).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Outcome("stopped") if stop_step(folder, trial) is not None else None


def ask_to_stop(folder: Path, trial: int, step: int) -> None:
    """Put down that a trial is to stop, having come to `step`; what it still does until then does not count."""
    write_text(_outcome_path(folder, trial).with_suffix(".stop"), str(step))


def stop_step(folder: Path, trial: int) -> int | None:
    """Return the step after which a trial was asked to stop; None while it was not."""
    try:
        return int(_outcome_path(folder, trial).with_suffix(".stop").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def drop_checkpoints(run_dir: Path) -> None:
    """Delete the checkpoints of a run that has ended; its configuration, history and record stay."""
    from fluxray.runtime.paths import forget_missing_checkpoints

    for path in run_dir.glob("step_*"):
        shutil.rmtree(path, ignore_errors=True)
    try:
        forget_missing_checkpoints(run_dir)
    except CheckpointError:
        return


def _outcome_path(folder: Path, trial: int) -> Path:
    return folder / OUTCOMES / f"{trial:05}.json"


def _dumped(space: Space) -> Tree:
    return space.model_dump(mode="json", exclude_defaults=True)


def _plain(space: Space) -> dict[str, Any]:
    """Return a space as dotted keys, those of the configuration among them as they stand."""
    flat: dict[str, Any] = {}
    for key, value in space.model_dump(mode="json").items():
        flat |= {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _shown(value: object) -> str:
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = [{name: part for name, part in case.items() if part not in (None, {})} for case in value]
    text = masked(json.dumps(value))
    return text if len(text) <= 100 else f"{text[:97]}..."
