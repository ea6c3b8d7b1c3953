"""Which keys of a sweep decide about its metric.

A forest of random trees learns the metric from the keys; a key is as important as the forest's error becomes when the key's
values are shuffled among the trials (permutation importance, Breiman 2001).
"""

from collections.abc import Sequence
from typing import NamedTuple

from fluxray.runtime.sweep_axes import Axis
from fluxray.runtime.sweep_table import Table, Trial, finite

MIN_TRIALS = 4
"""Of fewer trials nothing is said."""

NUM_TREES, NUM_SHUFFLES = 50, 10


class Importance(NamedTuple):
    """The share of each key, which add up to 1; from how many trials; at which share of their budget they were compared."""

    shares: dict[str, float]
    num_trials: int
    progress: float


def importance(table: Table, axes: Sequence[Axis]) -> Importance | None:
    """Return the importance of the keys; None where too few trials have a result, or all the same.

    Trials that were stopped early are compared with the others where the first of them was stopped.
    """
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.inspection import permutation_importance

    trials, progress = _compared(table)
    values = [value for trial in trials if (value := _value_at(trial, progress)) is not None]
    if len(values) < MIN_TRIALS or len(set(values)) == 1 or not axes:
        return None
    order = sorted(set(values))  # by rank: one loss that has exploded must not outweigh all others
    ranks = [order.index(value) for value in values]
    rows = [[axis.place(trial) for axis in axes] for trial in trials]
    forest = ExtraTreesRegressor(NUM_TREES, random_state=0).fit(rows, ranks)
    found = permutation_importance(forest, rows, ranks, n_repeats=NUM_SHUFFLES, random_state=0)
    drops = [max(float(drop), 0.0) for drop in found["importances_mean"]]
    if sum(drops) <= 0:
        return None
    shares = {axis.key: drop / sum(drops) for axis, drop in zip(axes, drops, strict=True)}
    return Importance(dict(sorted(shares.items(), key=lambda one: -one[1])), len(values), progress)


def _compared(table: Table) -> tuple[list[Trial], float]:
    """Return the trials with a result and the share of their budget to which all of them have come."""
    progress = min(
        (trial.history[-1].step / trial.num_steps for trial in table.with_status("stopped") if trial.history), default=1.0
    )
    trials = table.with_status("ended", "stopped")
    return [trial for trial in trials if _value_at(trial, progress) is not None], progress


def _value_at(trial: Trial, progress: float) -> float | None:
    """Return the metric where the trial had spent that share of its budget, None if there was none that is finite."""
    until = progress * trial.num_steps + 0.5  # steps are whole
    value = next((point.value for point in reversed(trial.history) if point.step <= until), None)
    return value if finite(value) else None
