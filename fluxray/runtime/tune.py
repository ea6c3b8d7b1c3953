"""A sweep from the driver's side: its checks, its trials under Ray Tune, its table, a truthful end.

Nothing is written and nothing started before the checks have passed. A start after a crash needs nothing of Ray's: what trials
there are, how they ended, and what they have reported, lies in the sweep's folder and in those of their runs.
"""

import logging
import os
import shutil
import threading
import time

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.error import TuneError

from fluxray.config.checks import check_available
from fluxray.config.schema import ResourcesConfig, TrainConfig
from fluxray.config.trials import Plan, plan_trials
from fluxray.errors import FluxrayError, one_line
from fluxray.runtime import cluster
from fluxray.runtime.board import pack
from fluxray.runtime.concurrency import DRIVER_CPU, largest, max_concurrent
from fluxray.runtime.launch import Steps, training
from fluxray.runtime.lost import end
from fluxray.runtime.outcome import StoppedError
from fluxray.runtime.stopping import in_thread, on_stop_signal
from fluxray.runtime.sweep_table import Table, read_table
from fluxray.runtime.sweep_tracking import SweepRecord
from fluxray.runtime.sweeps import RAY, STOP_FILE, Sweep, save_sweep
from fluxray.runtime.tune_search import Gentle, build_scheduler
from fluxray.runtime.tune_trial import Work, run_trial
from fluxray.runtime.tune_trials import Follower, Trials

TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Tune's own files and words are of no use here."""


def run_sweep(
    sweep: Sweep, limit: int | None = None, allow_many: bool = False, verbose: bool = False, steps: Steps | None = None
) -> Table:
    """Run the trials of a sweep that have not ended, at most `limit` at a time, and return its table.

    Raises FluxrayError for the user's faults and StoppedError where the sweep was stopped and can go on.
    """
    steps = steps or training()
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
    if not verbose:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # tracebacks of what it tries again
    with cluster.session(verbose, lambda: _goes_on(sweep)):
        cluster.check_resources(needs)
        at_once = _at_once(needs, max(1, min(limit or trials.num_left, trials.num_left)))
        save_sweep(sweep, [node.resources for node in cluster.alive_nodes()])
        (sweep.folder / STOP_FILE).unlink(missing_ok=True)
        record = SweepRecord(sweep)
        trials.open(record)
        begun = "goes on" if sweep.resumed else "starts"
        print(f"sweep {sweep.name} {begun}: {trials.num_left} trials, {at_once} at a time, in {sweep.folder}", flush=True)
        try:
            if trials.num_left:
                _fit(sweep, trials, at_once, steps)
        finally:
            table = trials.close()
    return table


def planned(sweep: Sweep, allow_many: bool = False) -> Plan:
    """Return the trials that are known before any has run. Raises ConfigError."""
    if sweep.space.search == "optuna":
        return Plan([], [])
    return plan_trials(sweep.space, sweep.base, allow_many or sweep.resumed)


def _preflight(sweep: Sweep, trials: Trials, steps: Steps) -> None:
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
    shares = {"CPU": DRIVER_CPU + needs.num_workers * needs.cpu, "GPU": needs.num_workers * needs.gpu}
    deadline = time.monotonic() + cluster.FREE_TIMEOUT_S
    while True:
        free = ray.available_resources()
        found = min(int((free.get(name, 0.0) + cluster.GRAIN) / share) for name, share in shares.items() if share > 0)
        if found >= number or time.monotonic() >= deadline:
            return max(1, min(number, found))
        time.sleep(0.5)


def _fit(sweep: Sweep, trials: Trials, at_once: int, steps: Steps) -> None:
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
            scheduler=Gentle(build_scheduler(sweep.space, trials.earlier), trials.ask_to_stop),
            num_samples=trials.num_left,
            max_concurrent_trials=at_once,
            reuse_actors=True,  # its imports take seconds
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
    except (RayError, TuneError) as error:  # without Ray nothing could be ended in order
        end(f"sweep {sweep.name}: Ray failed: {type(error).__name__}: {one_line(error)[:150]}; {_goes_on(sweep)}")
    except (KeyboardInterrupt, SystemExit):
        raise StoppedError(f"sweep {sweep.name} was stopped; {_goes_on(sweep)}") from None
    finally:
        shutil.rmtree(sweep.folder / RAY, ignore_errors=True)
    if stops.is_set() and trials.num_open:
        raise StoppedError(f"sweep {sweep.name} was stopped and its trials saved; {_goes_on(sweep)}")


def _goes_on(sweep: Sweep) -> str:
    return f"fluxray tune --resume {sweep.name} goes on"
