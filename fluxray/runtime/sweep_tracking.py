"""MLflow's side of a sweep: a parent run, the trials' runs below it, what is known of them in the end.

Everything goes through the runs' spools, so a server that is down stops nothing; `fluxray sync` sends the rest.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fluxray.config.schema import TrainConfig
from fluxray.runtime import tracking
from fluxray.runtime.identity import FOLDER, RUN_TAG, read_identity
from fluxray.runtime.sender import connect
from fluxray.runtime.sweep_table import TRIALS_FILE, Status, Table, Trial
from fluxray.runtime.sweeps import ENVIRONMENT_FILE, PICTURES, REPORT_FILE, SPACE_FILE, Sweep, common_config
from fluxray.runtime.tune_trial import SWEEP_TAG

LOOK_UP_S = 15.0
BEST_TAG, STATUS_TAG, REASON_TAG = "fluxray.best", "fluxray.status", "fluxray.reason"
FILES = (TRIALS_FILE, SPACE_FILE, ENVIRONMENT_FILE, REPORT_FILE, PICTURES)
LEFT_BY_WORKER: dict[Status, tracking.Status] = {"stopped": "KILLED", "failed": "FAILED"}
"""How a run's record ends whose trial was ended from outside."""


class SweepRecord:
    """The record of a sweep; what it sends, it sends from a thread of its own, and never raises."""

    def __init__(self, sweep: Sweep):
        self._sweep = sweep
        config = common_config(sweep)
        self._target = tracking.start_run(config, sweep.home, sweep.folder, {} if sweep.resumed else None)
        self._down = self._target.is_down
        tags = {SWEEP_TAG: sweep.name, "sweep.metric": f"{sweep.space.metric} {sweep.space.mode}"}
        tracking.note(self._target, {**tags, "sweep.budget": sweep.space.budget.words})
        tracking.keep(self._target, (SPACE_FILE, ENVIRONMENT_FILE))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fluxray-sweep")
        self._pending: list[Future[None]] = []

    def trial_ended(self, config: TrainConfig, status: Status, reason: str | None, killed: bool) -> None:
        """Tag the run of a trial; end its record if the trial was `killed` and could not."""
        run_dir = self._sweep.home.runs / str(config.name)
        if read_identity(run_dir) is None:
            return
        tags = {STATUS_TAG: status, **({REASON_TAG: reason} if reason else {})}
        self._pending.append(self._pool.submit(self._tell, config, run_dir, tags, LEFT_BY_WORKER.get(status) if killed else None))

    def finish(self, table: Table, configs: dict[int, TrainConfig], status: tracking.Status) -> dict[str, str]:
        """Mark the best trial, keep the table, end the parent; return the ids of the runs that MLflow has, by name."""
        for future in self._pending:
            future.result()
        winner = table.winner
        if winner is not None:
            for trial in table.with_status("ended"):
                if trial is winner or self._was_marked(trial):
                    run_dir = self._sweep.run_dir(trial.trial)
                    self._tell(configs[trial.trial], run_dir, {BEST_TAG: str(trial is winner).lower()}, None)
            shown = {f"best.{key}": str(value) for key, value in winner.keys.items()}
            tracking.note(self._target, {"best.run": winner.run, f"best.{table.head.metric}": f"{winner.value:.6g}", **shown})
            self._mark(winner)
        found = [name for name in FILES if (self._sweep.folder / name).exists()]
        tracking.keep(self._target, found)
        problem = tracking.finish_run(self._target, status, self._sweep.folder)
        if problem:
            print(problem, flush=True)
            return {}
        return self._look_up()

    def _tell(self, config: TrainConfig, run_dir: Path, tags: dict[str, str], ends: tracking.Status | None) -> None:
        target = tracking.target_of(config, self._sweep.home, run_dir)
        tracking.note(target, tags)
        if ends is not None:
            tracking.end(target, ends)
        if not self._down:
            self._down = tracking.send(target) is not None

    def _was_marked(self, trial: Trial) -> bool:
        return (self._sweep.folder / FOLDER / f"best-{trial.trial}").exists()

    def _mark(self, trial: Trial) -> None:
        (self._sweep.folder / FOLDER / f"best-{trial.trial}").touch()

    def _look_up(self) -> dict[str, str]:
        """Return MLflow's ids by name of run, the sweep's among them; nothing if it takes long."""
        found: dict[str, str] = {}

        def ask() -> None:
            client: Any = connect(self._target.uri)
            experiment = client.get_experiment_by_name(self._target.experiment)
            wanted, token = f"tags.`{SWEEP_TAG}` = '{self._sweep.name}'", None
            while True:
                page = client.search_runs([experiment.experiment_id], wanted, max_results=1000, page_token=token)
                found.update({run.data.tags[RUN_TAG]: run.info.run_id for run in page})
                token = page.token
                if not token:
                    return

        thread = threading.Thread(target=ask, name="fluxray-look-up", daemon=True)
        thread.start()
        thread.join(LOOK_UP_S)
        return dict(found)
