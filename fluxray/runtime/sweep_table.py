"""The table of a sweep: written by its driver, and all that a report reads.

    sweeps/NAME/
      sweep.json      what the sweep is: `Head`, and what it is resumed with
      trials.jsonl    what became of its trials, one JSON object a line, in the order in which it happened
      config.yaml     the configuration that trials begin with; space.yaml, environment.json, tracking/ lie beside it

A line of `trials.jsonl` holds the `trial` it is about and some of its fields; later lines outrank earlier ones. A line with
`point` adds to the trial's history instead; of two points of the same step the first counts, since a step that is done again
after a fault gives the same. A line that a crash tore is passed over.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

HEAD_FILE, TRIALS_FILE = "sweep.json", "trials.jsonl"

Mode = Literal["min", "max"]
Status = Literal["waiting", "running", "ended", "stopped", "failed"]
"""`ended`: spent its whole budget. `stopped`: by the scheduler, before that. `failed`: see its reason."""

DONE: tuple[Status, ...] = ("ended", "stopped", "failed")
FIELDS = ("run", "keys", "num_steps", "status", "reason", "mlflow")


class Point(NamedTuple):
    """The metric after `step` steps, `tokens` valid terms of the loss (images for flow matching) and `seconds` of its workers."""

    step: int
    tokens: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Head:
    """What a sweep is about: `metric` is best at its `mode`, `keys` are those that differ between trials, in their order.

    `budget` says in words what every trial may spend. `mlflow` is the id of the parent run, None while MLflow has not got it.
    """

    name: str
    metric: str
    mode: Mode
    keys: tuple[str, ...]
    budget: str
    mlflow: str | None = None


@dataclass(frozen=True)
class Trial:
    """One trial: `run` is the name of its run, `keys` what it was given, `num_steps` how many steps it is to take.

    A key that does not apply to the trial is not in `keys`. `mlflow` is the id of its run there, None while that is not known.
    """

    trial: int
    run: str
    keys: Mapping[str, Any]
    num_steps: int
    status: Status = "waiting"
    reason: str | None = None
    mlflow: str | None = None
    history: tuple[Point, ...] = ()

    @property
    def value(self) -> float | None:
        """The metric where the trial came to; None if it was never reported."""
        return self.history[-1].value if self.history else None

    def best(self, mode: Mode) -> float | None:
        """Return the best value of the history."""
        values = [point.value for point in self.history]
        return (min if mode == "min" else max)(values) if values else None


def finite(value: float | None) -> bool:
    """Return whether a trial's value can be compared with others."""
    return value is not None and math.isfinite(value)


@dataclass(frozen=True)
class Table:
    """A sweep as far as it has come."""

    head: Head
    trials: tuple[Trial, ...] = field(default=())

    @property
    def winner(self) -> Trial | None:
        """The trial whose metric is best at the end of its budget; None while none has ended."""
        ended = [
            trial for trial in self.trials if trial.status == "ended" and trial.value is not None and math.isfinite(trial.value)
        ]
        sign = 1 if self.head.mode == "min" else -1
        return min(ended, key=lambda trial: (sign * float(trial.value or 0), trial.trial), default=None)

    def with_status(self, *statuses: Status) -> list[Trial]:
        """Return the trials of these statuses."""
        return [trial for trial in self.trials if trial.status in statuses]


class TableWriter:
    """Appends to the table. For one process at a time, which may do so from several threads: a line is one write."""

    def __init__(self, sweep_dir: Path):
        sweep_dir.mkdir(parents=True, exist_ok=True)
        self._file = os.open(sweep_dir / TRIALS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # a crash tore the last line

    def put(self, trial: int, **fields: Any) -> None:
        """Set some of `FIELDS` of a trial, durably."""
        assert fields.keys() <= set(FIELDS), fields
        self._append({"trial": trial, **fields})
        os.fsync(self._file)

    def point(self, trial: int, point: Point) -> None:
        """Add to a trial's history."""
        self._append({"trial": trial, "point": list(point)})

    def close(self) -> None:
        """End writing."""
        os.close(self._file)

    def _append(self, record: Mapping[str, Any]) -> None:
        os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")


def read_head(sweep_dir: Path) -> Head:
    """Return what the sweep in `sweep_dir` is about. Raises OSError, or KeyError and ValueError for a damaged file."""
    found = json.loads((sweep_dir / HEAD_FILE).read_text(encoding="utf-8"))
    head = {key: found[key] for key in ("name", "metric", "mode", "budget", "mlflow")}
    return Head(keys=tuple(found["keys"]), **head)


def read_table(sweep_dir: Path) -> Table:
    """Return the table of the sweep in `sweep_dir`, trials by number. Raises like `read_head`."""
    fields: dict[int, dict[str, Any]] = {}
    points: dict[int, dict[int, Point]] = {}
    for record in _records(sweep_dir / TRIALS_FILE):
        number = record["trial"]
        if "point" in record:
            point = Point(*record["point"])
            points.setdefault(number, {}).setdefault(point.step, point)
        else:
            fields.setdefault(number, {}).update({key: record[key] for key in FIELDS if key in record})
    trials = [
        Trial(number, **fields[number], history=tuple(point for _, point in sorted(points.get(number, {}).items())))
        for number in sorted(fields)
    ]
    return Table(read_head(sweep_dir), tuple(trials))


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("trial"), int):
            yield record
