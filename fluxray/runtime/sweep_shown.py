"""A sweep in words: what its trials are given, how far they have come, how they ended."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fluxray.runtime.sweep_table import DONE, Status, Table, Trial, finite

ENDS: Mapping[Status, str] = {"ended": "ended", "stopped": "stopped early", "failed": "failed"}


def word(value: Any) -> str:
    """Return a value as a word of the command line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def keys_words(keys: Mapping[str, Any]) -> str:
    """Return varied keys as words of the command line."""
    return " ".join(f"{key}={word(value)}" for key, value in keys.items()) or "as the base"


def progress_line(table: Table, trial: Trial) -> str:
    """Return one line on a trial that is over."""
    value = "no value" if trial.value is None else f"{table.head.metric} {trial.value:.6g}"
    what = trial.reason if trial.status == "failed" else f"{value} at step {trial.history[-1].step if trial.history else 0}"
    num_done = len(table.with_status(*DONE))
    return f"trial {trial.trial} {ENDS.get(trial.status, trial.status)}: {what} ({num_done} of {len(table.trials)} are over)"


def ranked(table: Table) -> list[Trial]:
    """Return the trials, the best first, those that failed last."""
    sign = 1 if table.head.mode == "min" else -1
    ranks = {status: rank for rank, status in enumerate(("ended", "stopped", "running", "waiting", "failed"))}

    def rank(trial: Trial) -> tuple[int, float, int]:
        value = sign * float(trial.value or 0) if finite(trial.value) else math.inf
        return ranks[trial.status], value, trial.trial

    return sorted(table.trials, key=rank)


def counts_words(table: Table) -> str:
    """Return how many trials ended, stopped early, failed, and are not over."""
    counts = [(len(table.with_status(status)), words) for status, words in ENDS.items()]
    rest = len(table.with_status("waiting", "running"))
    return ", ".join(f"{number} {words}" for number, words in [*counts, (rest, "not over")] if number)


def table_lines(table: Table) -> list[str]:
    """Return the table, the best trials first."""
    rows = [["trial", *table.head.keys, "status", "step", table.head.metric]]
    for trial in ranked(table):
        keys = [word(trial.keys[key]) if key in trial.keys else "" for key in table.head.keys]
        last = trial.history[-1] if trial.history else None
        step, value = (f"{last.step}/{trial.num_steps}", f"{last.value:.6g}") if last else (f"0/{trial.num_steps}", "")
        rows.append([str(trial.trial), *keys, trial.status, step, value])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def ending_lines(table: Table) -> list[str]:
    """Return the last lines of a sweep: how many trials ended, stopped early, failed and why, and which is best."""
    lines = [f"trial {trial.trial} failed: {trial.reason}" for trial in table.with_status("failed")]
    lines.append(f"sweep {table.head.name}: {len(table.trials)} trials: {counts_words(table)}")
    winner = table.winner
    if winner is not None:
        lines.append(f"best: trial {winner.trial}, {keys_words(winner.keys)}: {table.head.metric} {winner.value:.6g}")
    return lines
