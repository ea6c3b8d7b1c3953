"""A sweep from the driver's side: its checks, its trials under Ray Tune, its table, a truthful end.

Nothing is written and nothing started before the checks have passed. A start after a crash needs nothing of Ray's: what trials
there are, how they ended, and what they have reported, lies in the sweep's folder and in those of their runs.
"""

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from fluxray.config.checks import check_available
from fluxray.config.schema import ResourcesConfig, TrainConfig
from fluxray.config.trials import Keys, Plan, Planned, plan_trial, plan_trials
from fluxray.errors import FluxrayError, one_line
from fluxray.runtime import cluster
from fluxray.runtime.board import pack
from fluxray.runtime.concurrency import DRIVER_CPU, largest, max_concurrent
from fluxray.runtime.launch import TRAINING, Steps
from fluxray.runtime.outcome import StoppedError
from fluxray.runtime.points import read_points
from fluxray.runtime.stopping import in_thread, on_stop_signal
from fluxray.runtime.sweep_shown import keys_words, progress_line
from fluxray.runtime.sweep_table import DONE, Point, Status, Table, TableWriter, Trial, read_table
from fluxray.runtime.sweep_tracking import SweepRecord
from fluxray.runtime.sweeps import RAY, STOP_FILE, Outcome, Sweep, drop_checkpoints, read_outcome, save_sweep
from fluxray.runtime.tune_search import OptunaDraws, build_scheduler
from fluxray.runtime.tune_trial import Work, run_trial

TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune's own files and words are of no use here."""


def run_sweep(
    sweep: Sweep, limit: int | None = None, allow_many: bool = False, verbose: bool = False, steps: Steps = TRAINING
) -> Table:
    """Run the trials of a sweep that have not ended, at most `limit` at a time, and return its table.

    Raises FluxrayError for the user's faults and StoppedError where the sweep was stopped and can go on.
    """
    trials = Trials(sweep, planned(sweep, allow_many))
    if not trials.has_more:
        print(f"sweep {sweep.name}: all trials have ended before", flush=True)
        return read_table(sweep.folder)
    needs = largest([config.resources for config in trials.known_configs()])
    here = cluster.machine_alone()
    if here is not None:
        alone = needs.model_copy(update={"label_selector": {}, "accelerator": None})
        max_concurrent([here], alone, 1)
    print("preparing data, tokenizer and model", flush=True)
    _preflight(sweep, trials, steps)
    os.environ.update({name: value for name, value in TUNE_ENVIRONMENT.items() if name not in os.environ})
    with cluster.session(verbose):
        cluster.check_resources(needs)
        at_once = _at_once(needs, min(limit or trials.num_left, trials.num_left))
        save_sweep(sweep, [node.resources for node in cluster.alive_nodes()])
        (sweep.folder / STOP_FILE).unlink(missing_ok=True)
        record = SweepRecord(sweep)
        trials.open(record)
        begun = "goes on" if sweep.resumed else "starts"
        print(f"sweep {sweep.name} {begun}: {trials.num_left} trials, {at_once} at a time, in {sweep.folder}", flush=True)
        try:
            _fit(sweep, trials, at_once, steps)
        finally:
            table = trials.close()
    return table


def planned(sweep: Sweep, allow_many: bool = False) -> Plan:
    """Return the trials that are known before any has run. Raises ConfigError."""
    if sweep.space.search == "optuna":
        return Plan([], [])
    return plan_trials(sweep.space, sweep.base, allow_many or sweep.resumed)


def _preflight(sweep: Sweep, trials: "Trials", steps: Steps) -> None:
    """Tokenise, and look at the model, once for each kind of trial; those fail of whose kind something is found wrong.

    Where nothing is left then, that is raised.
    """
    faults: dict[str, FluxrayError | None] = {}
    left = trials.left()
    for number, config in left:
        kind = _kind(config)
        if kind not in faults:
            faults[kind] = None
            try:
                check_available(config)
                steps.preflight(config, sweep.home.cache)
            except FluxrayError as error:
                faults[kind] = error
        if faults[kind] is not None and number is not None:
            trials.refuse(number, str(faults[kind]))
    fault = faults[_kind(left[0][1])]
    if fault is not None and all(faults.values()):
        raise fault


def _kind(config: TrainConfig) -> str:
    """Return what decides about data and model of a run, and not how it learns."""
    learns = {"name", "seed", "optim", "train", "evaluation", "checkpoint", "batch", "clip", "tracking", "profile"}
    return config.model_dump_json(exclude=learns)


def _at_once(needs: ResourcesConfig, wanted: int) -> int:
    """Return how many trials run at a time: what the nodes hold, and of that what is free now."""
    number = max_concurrent(cluster.alive_nodes(), needs, wanted)
    free = ray.available_resources()
    shares = {"CPU": DRIVER_CPU + needs.num_workers * needs.cpu, "GPU": needs.num_workers * needs.gpu}
    free_for = [int((free.get(name, 0.0) + cluster.GRAIN) / share) for name, share in shares.items() if share > 0]
    return max(1, min(number, *free_for))


def _fit(sweep: Sweep, trials: "Trials", at_once: int, steps: Steps) -> None:
    stop = sweep.folder / STOP_FILE
    stops = threading.Event()

    def request_stop() -> None:
        stops.set()
        stop.touch()
        print("stopping: the running trials finish their step and save it; once more stops at once, without saving", flush=True)

    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, work=Work(sweep, pack(steps.run))), {"cpu": DRIVER_CPU}),
        tune_config=tune.TuneConfig(
            search_alg=trials,
            scheduler=build_scheduler(sweep.space, trials.earlier),
            num_samples=trials.num_left,
            max_concurrent_trials=at_once,
            reuse_actors=sweep.space.scheduler.kind == "none",
            trial_dirname_creator=lambda trial: str(trial.trial_id),
        ),
        run_config=tune.RunConfig(
            name=time.strftime("%Y%m%d-%H%M%S"),
            storage_path=str(sweep.folder / RAY),
            failure_config=tune.FailureConfig(max_failures=trials.max_failures),
            callbacks=[Follower(trials)],
            verbose=0,
        ),
    )
    try:
        with on_stop_signal(request_stop):
            in_thread(tuner.fit)
    except (KeyboardInterrupt, SystemExit):
        raise StoppedError(f"sweep {sweep.name} was stopped; fluxray tune --resume {sweep.name} goes on") from None
    finally:
        shutil.rmtree(sweep.folder / RAY, ignore_errors=True)
    if stops.is_set() and trials.num_open:
        raise StoppedError(f"sweep {sweep.name} was stopped and its trials saved; fluxray tune --resume {sweep.name} goes on")


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
        self._started = time.monotonic()

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
        """Whether there is anything to do; a sweep of which nothing is written yet always has."""
        return self.num_left > 0 or not self._sweep.resumed

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

    def close(self) -> Table:
        """End the record, and return the table with MLflow's ids."""
        assert self._writer is not None and self._record is not None
        for number in set(self._running.values()):
            self._catch_up(number)
        table = self._table()
        configs = {number: self._config(number) for number, trial in self._planned.items() if trial.config}
        complete = not table.with_status("waiting", "running")
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
        """Take in a point; one that is known from before is passed over when the table is read."""
        self._add_point(self._running[trial_id], point)

    def lost(self, trial_id: str, reason: str) -> None:
        """Take in that a trial's process is lost for good, and why."""
        number = self._running.pop(trial_id)
        found = read_outcome(self._sweep.folder, number) or Outcome("failed", reason)
        self._ended(number, found.status, found.reason, killed=True)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take in that a trial is over, by itself or by the scheduler; of one that is lost the callback hears more."""
        if error:
            return
        number = self._running.pop(trial_id)
        outcome = read_outcome(self._sweep.folder, number)
        if outcome is not None:
            self._ended(number, outcome.status, outcome.reason, killed=False)
        elif not (self._sweep.folder / STOP_FILE).exists():
            self._ended(number, "stopped", None, killed=True)

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
        for point in read_points(self._sweep.run_dir(number)):
            self._add_point(number, point)
        outcome = read_outcome(self._sweep.folder, number)
        if outcome is not None:
            self._ended(number, outcome.status, outcome.reason, killed=False)

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
        known = self._rows[number]
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
        reason = f": {type(error).__name__}: {one_line(error)}" if error else ""
        self._trials.lost(trial.trial_id, f"its driver was lost{reason}")

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
