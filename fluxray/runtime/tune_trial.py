"""One trial: a run like any other, started from inside Ray Tune, whose points it reports.

Ray's own way from Train to Tune, TuneReportCallback, passes on what Ray Train is told, and that is checkpoints alone: metrics go
their own way to MLflow, and a report to Ray Train waits for its controller. So rank 0 keeps the history of the metric in the
run's folder (`fluxray/runtime/points.py`), from where the trial takes it, from the first point on after every restart: then
schedulers see the same after a fault as without one.
"""

import json
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.exceptions import RayError

from fluxray.config.trials import trial_config
from fluxray.errors import FluxrayError
from fluxray.runtime.identity import Part, param
from fluxray.runtime.launch import Trial, carry_out
from fluxray.runtime.lost import end_with_parent
from fluxray.runtime.outcome import FailedError, LostError, StoppedError
from fluxray.runtime.paths import write_text
from fluxray.runtime.points import read_points
from fluxray.runtime.prepare import again, prepare
from fluxray.runtime.sweep_table import Point
from fluxray.runtime.sweeps import OUTCOMES, STOP_FILE, Outcome, Sweep, stop_step, write_outcome
from fluxray.runtime.tune_search import result_of

POLL_S = 0.5
SWEEP_TAG, TRIAL_TAG = "fluxray.sweep", "fluxray.trial"


@dataclass(frozen=True)
class Work:
    """What all trials are handed: the sweep, and the pickled function that workers run."""

    sweep: Sweep
    run: bytes


def run_trial(settings: Mapping[str, Any], work: Work) -> None:
    """Run the trial of `settings` (`trial`, `keys`) to its end and put down how it ended. For a Tune function trainable.

    Raises LostError or RayError where a part of Ray was lost: not an end, and whether it is tried again is Tune's to say.
    """
    end_with_parent()
    sweep, number = work.sweep, int(settings["trial"])
    keys = json.loads(settings["keys"])
    config = sweep.named(trial_config(sweep.space, sweep.base, keys), number)
    run = prepare(config, sweep.name)
    limit = sweep.space.budget.seconds
    spent = threading.Event()
    tags = {SWEEP_TAG: sweep.name, TRIAL_TAG: str(number), **{f"sweep.{key}": param(value) for key, value in keys.items()}}

    def should_stop() -> bool:
        return spent.is_set() or (sweep.folder / STOP_FILE).exists() or stop_step(sweep.folder, number) is not None

    trial = Trial(Part(sweep.folder, tags), sweep.space.metric, should_stop)
    ends: list[Outcome | Exception] = []

    def train() -> None:
        found: Outcome | Exception | None
        try:
            found = _train(sweep.folder, number, run.run_dir, lambda: carry_out(run, work.run, None, trial))
        except (LostError, RayError) as error:
            found = error
        if found is None and stop_step(sweep.folder, number) is not None:
            found = Outcome("stopped")
        if found is None and spent.is_set():
            found = Outcome("ended")
        if found is not None:
            ends.append(found)

    thread = threading.Thread(target=train, name="fluxray-trial", daemon=True)
    thread.start()
    seen = 0
    while True:
        alive = thread.is_alive()
        points = read_points(run.run_dir)
        for point in points[seen:]:
            _report(point, config.train.num_steps)
            if limit is not None and point.seconds >= limit:
                spent.set()
        seen = len(points)
        if not alive:
            break
        thread.join(POLL_S)
    for found in ends:
        if isinstance(found, Exception):
            raise found
        write_outcome(sweep.folder, number, _judged(found, seen, sweep.space.metric))


def _report(point: Point, num_steps: int) -> None:
    tune.report(result_of(point, num_steps))


def _judged(outcome: Outcome, num_points: int, metric: str) -> Outcome:
    if outcome.status == "ended" and num_points == 0:
        return Outcome("failed", f"metric: {metric!r} was not reported once; choose another metric")
    return outcome


def _its_plan(run_dir: Path, reason: str) -> str:
    """Return where the plan lies of a trial that had not the memory."""
    if "out of memory" not in reason:
        return ""
    from fluxray.runtime.planned import PLAN_FILE  # seconds of imports, which other trials do not need

    plan = run_dir / PLAN_FILE
    return f"; its plan: {plan}" if plan.exists() else ""


def _train(folder: Path, number: int, run_dir: Path, carry: Callable[[], object]) -> Outcome | None:
    """Return how a training ended; None if it was stopped and is to go on. Raises LostError, RayError."""
    try:
        carry()
    except StoppedError:
        return None
    except (LostError, RayError):
        raise
    except (FluxrayError, FailedError) as error:
        reason = str(error).removesuffix(f"; {again(run_dir)}")  # true of a run alone: a sweep does not repeat what has failed
        return Outcome("failed", reason + _its_plan(run_dir, reason))
    except Exception as error:  # noqa: BLE001 - a fault of fluxray itself must not end the other trials either
        write_text(folder / OUTCOMES / f"{number:05}.txt", traceback.format_exc())
        return Outcome("failed", f"{type(error).__name__}: {error}; the whole story is in {OUTCOMES}/{number:05}.txt")
    return Outcome("ended")
