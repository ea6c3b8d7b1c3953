"""What Ray Tune is told of a space: which trial comes next, and which one is to end early.

A scheduler's time is `progress`, the share of its own budget that a trial has spent, in percent: with a budget of tokens or
samples, trials of different batches take different numbers of steps. What ended before a resume is shown to it first.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from fluxray.config.space import LISTED, Domain, Space
from fluxray.config.text import Tree
from fluxray.config.trials import Keys, assign, quantised
from fluxray.errors import ConfigError
from fluxray.runtime.sweep_table import DONE, Point, Trial

TIME, VALUE = "progress", "value"

NEVER = 101.0
"""A share of the budget that no trial reaches: Ray's own end of a trial would come before its last checkpoint."""

MAX_TRIES = 50
"""How often Optuna is asked again for what is no repetition."""


def result_of(point: Point, num_steps: int) -> dict[str, Any]:
    """Return a point as Tune sees it."""
    return {TIME: 100.0 * point.step / max(num_steps, 1), VALUE: point.value, "point": list(point)}


class _Earlier:
    """Stands for a trial that ended before this start."""

    def __init__(self, trial_id: str):
        self.trial_id = trial_id
        self.status = TuneTrial.TERMINATED


class _Median(MedianStoppingRule):
    """Is not confused by trials that end without a single point, and never pauses one to wait for others."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if VALUE in result:
            super().on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        return


class Gentle(FIFOScheduler):
    """Asks trials to stop that another scheduler would have Ray Tune kill.

    A killed trial leaves its workers to themselves, which have kept their resources from the next one for minutes; one that is
    asked saves, ends its record, and gives back what it has. `ask` is called once for a trial, with Tune's id of it and its step.
    """

    def __init__(self, decides: TrialScheduler, ask: Callable[[str, int], None]):
        super().__init__()
        self._decides = decides
        self._ask = ask
        self._asked: set[str] = set()

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Pass it on."""
        self._decides.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Ask the trial to stop if that is decided; Tune is always told to go on."""
        if trial.trial_id not in self._asked:
            decision = self._decides.on_trial_result(tune_controller, trial, result)
            if decision == TrialScheduler.STOP:
                self._asked.add(trial.trial_id)
                self._ask(trial.trial_id, result["point"][0])
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Pass it on, unless the trial was stopped."""
        if trial.trial_id not in self._asked:
            self._decides.on_trial_complete(tune_controller, trial, result)

    def __getstate__(self) -> dict[str, Any]:
        """Leave nothing to Ray."""
        return {}


def build_scheduler(space: Space, earlier: Iterable[Trial]) -> TrialScheduler:
    """Return what decides which trials end early, which has seen those that ended before."""
    kind, mode = space.scheduler, space.mode
    match kind.kind:
        case "asha":
            scheduler = ASHAScheduler(
                time_attr=TIME,
                metric=VALUE,
                mode=mode,
                max_t=NEVER,  # pyright: ignore[reportArgumentType]
                grace_period=100 * kind.grace,  # pyright: ignore[reportArgumentType]
                reduction_factor=kind.reduction,
            )
        case "median":
            scheduler = _Median(
                time_attr=TIME,
                metric=VALUE,
                mode=mode,
                grace_period=100 * kind.grace,
                min_samples_required=kind.min_trials,
                min_time_slice=math.inf,  # pyright: ignore[reportArgumentType]
            )
        case _:
            return FIFOScheduler()
    for trial in earlier:
        if trial.status in DONE and trial.history:
            _show(scheduler, trial)
    return scheduler


def _show(scheduler: TrialScheduler, trial: Trial) -> None:
    stands: Any = _Earlier(trial.run)
    nobody: Any = None
    scheduler.on_trial_add(nobody, stands)
    results = [result_of(point, trial.num_steps) for point in trial.history]
    for result in results:
        scheduler.on_trial_result(nobody, stands, result)
    if trial.status == "ended":
        scheduler.on_trial_complete(nobody, stands, results[-1])


class OptunaDraws:
    """Draws a space's trials by Optuna's tree-structured Parzen estimator, from what is known of those before."""

    def __init__(self, space: Space, base: Tree):
        try:
            import optuna
        except ImportError:
            raise ConfigError("search: optuna is not installed; pip install 'fluxray[sweep]', or set search: random") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=space.seed)
        direction = "minimize" if space.mode == "min" else "maximize"
        self._study = optuna.create_study(direction=direction, sampler=sampler)
        self._failed = optuna.trial.TrialState.FAIL
        self._space, self._base = space, base
        self._asked: dict[int, Any] = {}

    def remember(self, number: int, keys: Keys) -> None:
        """Take in a trial that was drawn before this start."""
        given: dict[str, Any] = {}

        def draw(key: str, case: int, domain: Domain) -> Any:
            given[f"{key}/{case}"] = domain.values.index(keys[key]) if domain.kind in LISTED else keys[key]
            return keys[key]

        next(assign(self._space, self._base, draw))
        self._study.enqueue_trial(given)
        self._asked[number] = self._ask()[0]

    def draw(self, number: int, known: Sequence[Keys]) -> Keys | None:
        """Return the keys of trial `number`; None if Optuna comes up with nothing but what is `known`."""
        for _ in range(MAX_TRIES):
            asked, keys = self._ask()
            if keys not in known:
                self._asked[number] = asked
                return keys
            self._study.tell(asked, state=self._failed)
        return None

    def tell(self, number: int, value: float | None) -> None:
        """Take in how a trial ended: its value, None if it has none."""
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._study.tell(asked, value, state=self._failed if value is None else None)

    def _ask(self) -> tuple[Any, Keys]:
        asked = self._study.ask()

        def draw(key: str, case: int, domain: Domain) -> Any:
            return _suggest(asked, f"{key}/{case}", domain)

        return asked, next(assign(self._space, self._base, draw))


def _suggest(asked: Any, name: str, domain: Domain) -> Any:
    if domain.kind in LISTED:
        return domain.values[asked.suggest_categorical(name, list(range(len(domain.values))))]
    low, high, *step = getattr(domain, domain.kind)
    if domain.kind == "randint":
        return asked.suggest_int(name, low, high)
    value = asked.suggest_float(name, low, high, log="log" in domain.kind)
    return quantised(value, low, high, step[0]) if step else value
