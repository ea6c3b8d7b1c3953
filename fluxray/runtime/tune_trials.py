"""The trials of a sweep as Ray Tune meets them: a searcher that hands them out, a callback that hears of them.

Both live in the driver. Whatever they learn goes to the sweep's table at once.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from fluxray.config.schema import TrainConfig
from fluxray.config.trials import Keys, Plan, Planned, plan_trial
from fluxray.errors import one_line
from fluxray.runtime import cluster
from fluxray.runtime.outcome import LostError
from fluxray.runtime.points import read_points
from fluxray.runtime.sweep_report import write_report
from fluxray.runtime.sweep_shown import keys_words, progress_line
from fluxray.runtime.sweep_table import DONE, Point, Status, Table, TableWriter, Trial, read_table
from fluxray.runtime.sweep_tracking import SweepRecord
from fluxray.runtime.sweeps import (
    REPORT_FILE,
    STOP_FILE,
    Outcome,
    Sweep,
    ask_to_stop,
    drop_checkpoints,
    read_outcome,
    save_sweep,
    stop_step,
)
from fluxray.runtime.tune_search import OptunaDraws


class Trials(Searcher):
    """The trials of a sweep: which have ended, which comes next. Ray Tune asks and tells it, all from one thread."""

    def __init__(self, sweep: Sweep, plan: Plan):
        super().__init__()
        self._sweep = sweep
        self._planned: dict[int, Planned] = dict(enumerate(plan.trials))
        self.earlier = read_table(sweep.folder).trials if sweep.resumed else ()
        for trial in self.earlier:
            if trial.trial not in self._planned:
                self._planned[trial.trial] = plan_trial(sweep.space, sweep.base, trial.keys)
        ended = {trial.trial for trial in self.earlier if trial.status in DONE or read_outcome(sweep.folder, trial.trial)}
        self._queue = deque(number for number, trial in sorted(self._planned.items()) if number not in ended and trial.config)
        self._draws = self._optuna()
        self._running: dict[str, int] = {}
        self._rows = {trial.trial: trial for trial in self.earlier}
        winner = self._table().winner
        self._best = None if winner is None else winner.trial
        self._record: SweepRecord | None = None
        self._writer: TableWriter | None = None

    def _optuna(self) -> OptunaDraws | None:
        if self._sweep.space.search != "optuna":
            return None
        draws = OptunaDraws(self._sweep.space, self._sweep.base)
        for trial in self.earlier:
            draws.remember(trial.trial, trial.keys)
            if trial.status in DONE:
                draws.tell(trial.trial, trial.value)
        return draws

    def __getstate__(self) -> dict[str, Any]:
        """Leave nothing to Ray, which would keep a copy of it: what counts lies in the sweep's folder."""
        return {}

    @property
    def num_left(self) -> int:
        """How many trials are still to be run, those included that are yet to be drawn."""
        return len(self._queue) + self._num_undrawn

    @property
    def num_open(self) -> int:
        """How many trials have not ended."""
        return self._num_undrawn + len(self._table().with_status("waiting", "running"))

    @property
    def has_more(self) -> bool:
        """Whether there is anything to do: to run, or to write down."""
        written = self._sweep.resumed and (self._sweep.folder / REPORT_FILE).exists()
        return self.num_left > 0 or not written or any(trial.status not in DONE for trial in self.earlier)

    @property
    def _num_undrawn(self) -> int:
        return max(0, int(self._sweep.space.samples or 0) - len(self._planned)) if self._draws else 0

    @property
    def max_failures(self) -> int:
        """How often a trial is started again whose process or node was lost."""
        return max(config.resources.max_failures for config in self.known_configs())

    def left(self) -> list[tuple[int | None, TrainConfig]]:
        """Return number and configuration of the known trials that have not ended; else of some draw, without a number."""
        known: list[tuple[int | None, TrainConfig]] = [(number, self._config(number)) for number in self._queue]
        return known or [(None, config) for config in self.known_configs()[:1]]

    def refuse(self, number: int, reason: str) -> None:
        """Let a trial fail before it starts."""
        self._queue.remove(number)
        self._planned[number] = Planned(self._planned[number].keys, None, reason)

    def known_configs(self) -> list[TrainConfig]:
        """Return the configurations of all known trials; before the first is drawn, that of some draw."""
        found = [trial.config for trial in self._planned.values() if trial.config is not None]
        return found or [_any_config(self._sweep)]

    def open(self, record: SweepRecord) -> None:
        """Begin to write: the trials that are waiting, those that cannot start, and how those ended whose driver was lost."""
        self._record = record
        self._writer = TableWriter(self._sweep.folder)
        known = {trial.trial: trial for trial in self.earlier}
        for number, trial in sorted(self._planned.items()):
            if number not in known:
                self._put_new(number, trial)
            elif known[number].status not in DONE:
                self._catch_up(number)
            elif trial.config is not None:  # whose driver may have been lost before it had sent this
                record.trial_ended(self._config(number), known[number].status, known[number].reason, killed=False)

    def close(self) -> Table:
        """End the record, and return the table with MLflow's ids."""
        assert self._writer is not None and self._record is not None
        for number in set(self._running.values()):
            self._catch_up(number)
        table = self._table()
        configs = {number: self._config(number) for number, trial in self._planned.items() if trial.config}
        complete = not table.with_status("waiting", "running")
        write_report(self._sweep)
        ids = self._record.finish(table, configs, "FINISHED" if complete else "KILLED")
        for trial in table.trials:
            if trial.run in ids and trial.mlflow is None:
                self._writer.put(trial.trial, mlflow=ids[trial.run])
        self._writer.close()
        save_sweep(self._sweep, [node.resources for node in cluster.alive_nodes()], ids.get(self._sweep.name))
        for trial in table.with_status("stopped", "failed"):  # what their workers have written since
            self._keep_best(trial.trial)
        return read_table(self._sweep.folder)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial; Tune's word for none where there is none left or the sweep is to stop."""
        number = None if (self._sweep.folder / STOP_FILE).exists() else self._next()
        if number is None:
            return Searcher.FINISHED
        self._running[trial_id] = number
        self._put(number, status="running")
        keys = self._planned[number].keys
        print(f"trial {number}: {keys_words(keys)}", flush=True)
        return {"trial": number, "keys": json.dumps(dict(keys))}

    def _next(self) -> int | None:
        if self._queue:
            return self._queue.popleft()
        if self._draws is None:
            return None
        while self._num_undrawn > 0:
            number = max(self._planned, default=-1) + 1
            keys = self._draws.draw(number, [trial.keys for trial in self._planned.values()])
            if keys is None:
                return None
            self._planned[number] = plan_trial(self._sweep.space, self._sweep.base, keys)
            self._put_new(number, self._planned[number])
            if self._planned[number].config is not None:
                return number
            self._draws.tell(number, None)
        return None

    def reported(self, trial_id: str, point: Point) -> None:
        """Take in a point."""
        self._add_point(self._running[trial_id], point)

    def ask_to_stop(self, trial_id: str, step: int) -> None:
        """Have a trial stop that has fallen behind by `step`."""
        ask_to_stop(self._sweep.folder, self._running[trial_id], step)

    def lost(self, trial_id: str, reason: str) -> None:
        """Take in that a trial's process is lost for good, and why."""
        number = self._running.pop(trial_id)
        found = read_outcome(self._sweep.folder, number) or Outcome("failed", reason)
        self._ended(number, found.status, found.reason, killed=True)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take in that a trial's function has returned; of one that is lost the callback hears more."""
        if error:
            return
        number = self._running.pop(trial_id)
        outcome = read_outcome(self._sweep.folder, number)
        if outcome is not None:
            self._ended(number, outcome.status, outcome.reason, killed=False)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: see `__getstate__`."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: see `__getstate__`."""

    def _ended(self, number: int, status: Status, reason: str | None, killed: bool) -> None:
        self._put(number, status=status, reason=reason)
        trial = self._rows[number]
        if self._draws is not None:
            self._draws.tell(number, trial.value if status != "failed" else None)
        print(progress_line(self._table(), trial), flush=True)
        if self._record is not None:
            self._record.trial_ended(self._config(number), status, reason, killed)
        self._keep_best(number)

    def _catch_up(self, number: int) -> None:
        """Take over what the folder of a trial's run knows and the table does not."""
        outcome = read_outcome(self._sweep.folder, number)
        for point in read_points(self._sweep.run_dir(number)):
            self._add_point(number, point)
        if outcome is not None:
            self._ended(number, outcome.status, outcome.reason, killed=outcome.status == "stopped")

    def _put_new(self, number: int, trial: Planned) -> None:
        num_steps = trial.config.train.num_steps if trial.config else 0
        self._put(number, run=self._sweep.run_name(number), keys=dict(trial.keys), num_steps=num_steps, status="waiting")
        if trial.fault is not None:
            self._put(number, status="failed", reason=trial.fault)

    def _put(self, number: int, **fields: Any) -> None:
        assert self._writer is not None
        self._writer.put(number, **fields)
        known = self._rows.get(number)
        self._rows[number] = Trial(number, **fields) if known is None else replace(known, **fields)

    def _add_point(self, number: int, point: Point) -> None:
        assert self._writer is not None
        known, last = self._rows[number], stop_step(self._sweep.folder, number)
        if last is not None and point.step > last:
            return
        if all(point.step != before.step for before in known.history):
            self._writer.point(number, point)
            self._rows[number] = replace(known, history=tuple(sorted((*known.history, point))))

    def _config(self, number: int) -> TrainConfig:
        config = self._planned[number].config
        assert config is not None
        return self._sweep.named(config, number)

    def _table(self) -> Table:
        return Table(self._sweep.head, tuple(self._rows[number] for number in sorted(self._rows)))

    def _keep_best(self, ended: int) -> None:
        """Delete the checkpoints of a trial that has ended, or of the one that was the best so far."""
        winner = self._table().winner
        best = None if winner is None else winner.trial
        for loser in {ended, self._best} - {best, None}:
            if self._sweep.space.keep == "best":
                drop_checkpoints(self._sweep.run_dir(loser))
        self._best = best


class Follower(TrialProgressCallback):
    """Passes on what the trials report to Ray Tune, in the place of Tune's own words about them."""

    def __init__(self, trials: Trials):
        super().__init__()
        self._trials = trials

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_result(self, iteration: int, trials: Sequence[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        """Take in a point."""
        if "point" in result:
            self._trials.reported(trial.trial_id, Point(*result["point"]))

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        """Take in why a trial's process was lost."""
        error = trial.get_error()
        cause = getattr(error, "cause", error)
        reason = f": {type(error).__name__}: {one_line(error)}" if error else ""
        self._trials.lost(trial.trial_id, str(cause) if isinstance(cause, LostError) else f"its driver was lost{reason}")

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        """Nothing: the searcher has heard of it."""


def _any_config(sweep: Sweep) -> TrainConfig:
    """Return the configuration of some draw, which stands for the others before they are drawn."""
    draws = OptunaDraws(sweep.space, sweep.base)
    known: list[Keys] = []
    while True:
        keys = draws.draw(len(known), known)
        found = plan_trial(sweep.space, sweep.base, keys or {})
        if found.config is not None or keys is None:
            assert found.config is not None, found.fault
            return found.config
        known.append(keys)
