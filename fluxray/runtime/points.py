"""The history of a trial's metric, kept in the folder of its run by rank 0: a trial that goes on has it from the beginning."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from fluxray.runtime.sweep_table import Point

FILE = "points.jsonl"
TERMS = ("train/tokens", "train/images")


def read_points(run_dir: Path) -> list[Point]:
    """Return the points of a run by step; one that was written again, or torn, counts once or not at all."""
    found: dict[int, Point] = {}
    try:
        lines = (run_dir / FILE).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            point = Point(*json.loads(line))
        except (ValueError, TypeError):
            continue
        found.setdefault(point.step, point)
    return [found[step] for step in sorted(found)]


class PointWriter:
    """Picks the points of one metric out of reports. Seconds are those of this worker and of the run's earlier ones."""

    def __init__(self, run_dir: Path, metric: str):
        earlier = read_points(run_dir)
        self._metric = metric
        self._step = earlier[-1].step if earlier else -1
        self._tokens = 0
        self._start = time.monotonic() - (earlier[-1].seconds if earlier else 0.0)
        self._file = os.open(run_dir / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a report. A value that is not finite is left out, and so is a step that is done again."""
        self._tokens = next((int(metrics[key]) for key in TERMS if key in metrics), self._tokens)
        value = metrics.get(self._metric)
        if value is None or not math.isfinite(value) or step <= self._step:
            return
        self._step = step
        point = Point(step, self._tokens, round(time.monotonic() - self._start, 3), float(value))
        os.write(self._file, b"\n" + json.dumps(point).encode() + b"\n")  # the first line end closes a torn line

    def sync(self) -> None:
        """Return once the disk has all points: a run that goes on from a checkpoint does not repeat those before it."""
        os.fsync(self._file)

    def close(self) -> None:
        """End writing."""
        os.close(self._file)
