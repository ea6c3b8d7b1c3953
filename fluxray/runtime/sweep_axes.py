"""The keys of a sweep as axes of pictures: where a trial's value lies, and how it is written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fluxray.runtime.sweep_shown import word
from fluxray.runtime.sweep_table import Table, Trial

MAX_LISTED = 8
"""Numbers of more distinct values than that are a scale."""

NUM_CELLS = 6
"""Into so many cells a heat map cuts a scale."""

UNSET = "not set"
"""Said of a key that does not apply to a trial."""


@dataclass(frozen=True)
class Axis:
    """The values of one key. `labels` are its distinct values where they are listed; else it runs from `low` to `high`.

    `has_unset`: some trials do not have the key; they come first on the axis.
    """

    key: str
    labels: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    has_unset: bool = False

    def place(self, trial: Trial) -> float:
        """Return where the trial lies, between 0 and 1."""
        if self.labels:
            return self.cell(trial) / (self.num_cells - 1) if self.num_cells > 1 else 0.5
        if self.key not in trial.keys:
            return 0.0
        start = 0.2 if self.has_unset else 0.0
        return start + (1 - start) * self._share(float(trial.keys[self.key]))

    def ticks(self) -> list[tuple[float, str]]:
        """Return places between 0 and 1, and what is written there."""
        if self.labels:
            return [(i / (self.num_cells - 1) if self.num_cells > 1 else 0.5, label) for i, label in enumerate(self.cell_labels)]
        start = 0.2 if self.has_unset else 0.0
        marks = [(start + (1 - start) * i / 4, f"{self._at(i / 4):.3g}") for i in range(5)]
        return [(0.0, UNSET), *marks] if self.has_unset else marks

    @property
    def num_cells(self) -> int:
        """How many cells a heat map has along the axis."""
        return (len(self.labels) or NUM_CELLS) + self.has_unset

    @property
    def cell_labels(self) -> list[str]:
        """What is written at the cells."""
        edges = [f"{self._at(i / NUM_CELLS):.2g}" for i in range(NUM_CELLS + 1)]
        found = self.labels or [f"{low}\nto {high}" for low, high in pairwise(edges)]
        return [UNSET, *found] if self.has_unset else list(found)

    def cell(self, trial: Trial) -> int:
        """Return the trial's cell."""
        if self.key not in trial.keys:
            return 0
        value = trial.keys[self.key]
        if self.labels:
            return self.has_unset + self.labels.index(word(value))
        return self.has_unset + min(int(self._share(float(value)) * NUM_CELLS), NUM_CELLS - 1)

    def _share(self, value: float) -> float:
        scale = math.log if self.log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))

    def _at(self, share: float) -> float:
        if self.log:
            return self.low * (self.high / self.low) ** share
        return self.low + share * (self.high - self.low)


def axes_of(table: Table) -> list[Axis]:
    """Return the axes of the keys that differ between the trials, in their order."""
    found = [_axis(key, table.trials) for key in table.head.keys]
    return [axis for axis in found if len(axis.labels) != 1 or axis.has_unset]


def _axis(key: str, trials: Sequence[Trial]) -> Axis:
    values = [trial.keys[key] for trial in trials if key in trial.keys]
    has_unset = len(values) < len(trials)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    labels = dict.fromkeys(word(value) for value in (sorted(values) if numbers else values))
    if not numbers or len(labels) <= MAX_LISTED:
        return Axis(key, tuple(labels), has_unset=has_unset)
    low, high = float(min(values)), float(max(values))
    return Axis(key, (), low, high, low > 0 and high / low >= 10, has_unset)
