"""A sweep before it starts: its trials, what they take of memory, how long they would take."""

import os
from collections.abc import Callable
from typing import Any

from fluxray.config.checks import check_available
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError, PlanError
from fluxray.memory.plan import MemoryPlan
from fluxray.memory.table import reason
from fluxray.runtime.cluster import machine_alone
from fluxray.runtime.concurrency import largest, max_concurrent
from fluxray.runtime.planning import plan_run, require_fit
from fluxray.runtime.progress import clock
from fluxray.runtime.sweep_shown import columns, keys_words, word
from fluxray.runtime.sweeps import Sweep
from fluxray.runtime.tune import planned

MAX_SHOWN = 100
"""Trials that are printed; the others are counted."""

START_S = 30.0
"""About what the start of a trial's processes takes."""


def describe(sweep: Sweep, limit: int | None, allow_many: bool, say: Callable[[str], Any]) -> None:
    """Print trials, duplicates, the memory plan of each distinct shape, and the time where it is known.

    Raises PlanError if a trial does not fit the machine or its memory, ConfigError if the space cannot be honoured.
    """
    space = sweep.space
    if space.search == "optuna":
        raise ConfigError("--dry-run: search optuna draws a trial when it knows the results of others; nothing to show")
    found = planned(sweep, allow_many)
    rows = [["trial", *space.keys, "global batch", "steps", "plan"]]
    plans: dict[str, tuple[str, MemoryPlan, TrainConfig]] = {}
    seconds = 0.0
    for number, trial in enumerate(found.trials):
        if trial.config is None:
            rows.append([str(number), *_cells(space.keys, trial.keys), "", "", f"refused: {trial.fault}"])
            continue
        check_available(trial.config)
        shape = _shape(trial.config)
        if shape not in plans:
            plans[shape] = (f"plan {len(plans)}", plan_run(trial.config), trial.config)
        name, plan, _ = plans[shape]
        steps = trial.config.train.num_steps
        seconds += steps * plan.speed.seconds + START_S
        rows.append([str(number), *_cells(space.keys, trial.keys), f"{trial.config.global_batch_size}", f"{steps}", name])
    lines = columns(rows)
    say("\n".join(lines[: MAX_SHOWN + 1]))
    if len(lines) > MAX_SHOWN + 1:
        say(f"... and {len(lines) - MAX_SHOWN - 1} more")
    for keys, number in found.duplicates:
        say(f"left out: {keys_words(keys)} equals trial {number}")
    say("\n".join(columns([_plan_cells(*entry) for entry in plans.values()])))
    _say_time(sweep, found.trials, seconds, limit, say)
    for name, plan, config in plans.values():
        if plan.shortfalls and config.engine.kind == "stream":
            try:
                require_fit(config, plan)
            except PlanError as error:
                raise PlanError(f"{name}: {error}") from None


def _say_time(sweep: Sweep, trials: Any, seconds: float, limit: int | None, say: Callable[[str], Any]) -> None:
    configs = [trial.config for trial in trials if trial.config is not None]
    say(f"sweep {sweep.name}: {len(configs)} trials, {sweep.space.budget.words}")
    here = machine_alone()
    if here is None:
        say(f"at a time: what {os.environ.get('RAY_ADDRESS', 'Ray')} holds; one after the other about {clock(seconds)}")
        return
    needs = largest([config.resources for config in configs]).model_copy(update={"label_selector": {}, "accelerator": None})
    at_once = max_concurrent([here], needs, min(limit or len(configs), len(configs)))
    say(f"at a time: {at_once} on this machine; about {clock(seconds / at_once)} by the plan, evaluations and saves not counted")


def _plan_cells(name: str, plan: MemoryPlan, config: TrainConfig) -> list[str]:
    fits = f"does not fit: {reason(plan)}" if plan.shortfalls else "fits"
    return [
        name,
        f"micro-batch {word(config.batch.micro_size)} x {config.batch.accumulation_steps}",
        f"device {plan.device_bytes / 1e9:.1f} GB",
        f"host {plan.host_bytes / 1e9:.1f} GB",
        f"{plan.speed.seconds:.2f} s a step",
        fits,
    ]


def _cells(names: Any, keys: Any) -> list[str]:
    return [word(keys[key]) if key in keys else "" for key in names]


def _shape(config: TrainConfig) -> str:
    """Return what decides about the memory and the speed of a run."""
    learns = {"name", "seed", "train", "evaluation", "checkpoint", "tracking", "profile", "data"}
    optim = {"lr", "beta1", "beta2", "eps", "weight_decay", "schedule", "warmup_steps", "min_lr_ratio"}
    shape = config.model_dump(mode="json", exclude={**dict.fromkeys(learns, True), "optim": dict.fromkeys(optim, True)})
    return str((shape, config.data.max_slice, config.data.packing))
