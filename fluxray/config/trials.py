"""From a space to its trials: pure functions from values to values.

A trial's configuration is the base (model preset, profile, `fixed`, words of the command line), over it the varied keys, over
these what follows from the budget. What the base itself sets of the rhythm of evaluations and checkpoints stands.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from fluxray.config.keys import leaf_items, nested
from fluxray.config.load import build, flatten, merge, named_layers, with_implied
from fluxray.config.schema import TrainConfig
from fluxray.config.space import LISTED, Domain, Space, order
from fluxray.config.text import Tree
from fluxray.errors import ConfigError

MAX_TRIALS = 10_000
"""More must be asked for twice."""

Keys = Mapping[str, Any]
Draw = Callable[[str, int, Domain], Any]
"""Returns a value of the domain that is case number n of a key."""


class Planned(NamedTuple):
    """A trial before it starts: its varied keys and its configuration, or the fault for which it cannot have one."""

    keys: Keys
    config: TrainConfig | None
    fault: str | None = None


class Plan(NamedTuple):
    """The trials of a space, and the keys of those that were dropped, each with the number of the trial that it equals."""

    trials: list[Planned]
    duplicates: list[tuple[Keys, int]]


def base_tree(space: Space, profile: str | None, model: str | None, words: Iterable[str]) -> Tree:
    """Return what trials have in common, as a tree of the keys that are set. Raises ConfigError."""
    given = list(words)
    layers = [named_layers(profile, model, ()), named_layers(None, None, dict(space.fixed)), named_layers(None, None, given)]
    found = with_implied(list(chain.from_iterable(layers)))
    for _, layer in found[-1:] if given else ():
        both = [key for key, _ in leaf_items(layer) if key in space.keys]
        if both:
            raise ConfigError(f"{both[0]}: the space varies this key; drop it from the command line, or from the space")
    tree: Tree = {}
    for _, layer in found:
        tree = merge(tree, layer)
    build(tree)
    return tree


def plan_trials(space: Space, base: Tree, allow_many: bool = False) -> Plan:
    """Return the trials of search grid or random, in their order. Raises ConfigError.

    A combination that contradicts itself is a trial with a fault, unless all do: then its ConfigError is raised.
    """
    assignments = list(islice(assign_all(space, base), None if allow_many else MAX_TRIALS + 1))
    if len(assignments) > MAX_TRIALS and not allow_many:
        raise ConfigError(f"keys: they make more than {MAX_TRIALS:,} trials; take values away, or say --yes")
    trials: list[Planned] = []
    duplicates: list[tuple[Keys, int]] = []
    numbers: dict[str, int] = {}
    for keys in assignments:
        planned = plan_trial(space, base, keys)
        number = numbers.setdefault(signature(planned), len(trials))
        if number < len(trials):
            duplicates.append((keys, number))
        else:
            trials.append(planned)
    if all(trial.fault for trial in trials):
        raise ConfigError(str(trials[0].fault))
    return Plan(trials, duplicates)


def assign_all(space: Space, base: Tree) -> Iterator[Keys]:
    """Yield the varied keys of each trial of search grid or random, one after the other, in the same order each time."""
    if space.search == "grid":
        yield from assign(space, base, _no_draw)
        return
    for sample in range(space.samples or 0):
        yield from assign(space, base, draw_of(space.seed, sample))


def assign(space: Space, base: Tree, draw: Draw) -> Iterator[Keys]:
    """Yield the assignments of one draw: one for each combination of the grids in it, keys in the order of the space."""
    common = flatten(build(base))
    sequence = order(space.keys)

    def extend(rest: list[str], sofar: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not rest:
            yield sofar
            return
        key = rest[0]
        number = next((n for n, domain in enumerate(space.keys[key]) if _applies(domain, sofar, common)), None)
        if number is None:
            yield from extend(rest[1:], sofar)
            return
        domain = space.keys[key][number]
        for value in domain.values if domain.kind == "grid" else (draw(key, number, domain),):
            yield from extend(rest[1:], {**sofar, key: value})

    for keys in extend(sequence, {}):
        yield {key: keys[key] for key in space.keys if key in keys}


def plan_trial(space: Space, base: Tree, keys: Keys) -> Planned:
    """Return the trial of these keys."""
    try:
        return Planned(keys, trial_config(space, base, keys))
    except ConfigError as error:
        return Planned(keys, None, str(error))


def trial_config(space: Space, base: Tree, keys: Keys) -> TrainConfig:
    """Return the configuration of the trial of these keys. Raises ConfigError."""
    tree = _with(base, keys)
    given = dict(leaf_items(tree))
    budget = space.budget
    num_steps = steps_of(space, build(_with(tree, {"optim.warmup_steps": 0})))
    changes: dict[str, Any] = {"train.num_steps": num_steps}
    if budget.warmup is not None:
        changes["optim.warmup_steps"] = math.floor(budget.warmup * num_steps)
    every = max(1, math.ceil(num_steps / budget.evaluations))
    rhythm = {"evaluation.every_steps": every, "checkpoint.every_steps": every, "checkpoint.keep": 1, "train.on_oom": "stop"}
    if not space.metric.startswith("eval/"):
        rhythm["train.log_every"] = every
    changes |= {key: value for key, value in rhythm.items() if key not in given}
    return build(_with(tree, changes))


def steps_of(space: Space, config: TrainConfig) -> int:
    """Return how many steps the budget pays for: as many global batches as fit it whole. Raises ConfigError if none does."""
    budget = space.budget
    match budget.unit:
        case None:
            return config.train.num_steps
        case "seconds":
            if config.optim.schedule != "constant":
                raise ConfigError(
                    f"budget.seconds: the last step is not known before, and optim.schedule {config.optim.schedule} ends there; "
                    f"set optim.schedule=constant, or count tokens, samples or steps"
                )
            return config.train.num_steps
        case "steps":
            return int(budget.steps or 0)
        case unit:
            if unit == "tokens" and config.task.kind != "lm":
                raise ConfigError("budget.tokens: task.kind flow trains on images; count samples")
            amount = int(getattr(budget, unit))
            each = config.global_batch_size * (config.data.max_slice if unit == "tokens" else 1)
            if amount < each:
                raise ConfigError(f"budget.{unit}: {amount:,} is less than one step of {each:,}; raise it, or lower batch.*")
            return amount // each


def signature(planned: Planned) -> str:
    """Return what two trials have in common that would do the same."""
    if planned.config is None:
        return json.dumps(["fault", planned.keys], sort_keys=True, default=str)
    return json.dumps(planned.config.model_dump(mode="json"), sort_keys=True)


def draw_of(seed: int, sample: int) -> Draw:
    """Return the draw number `sample`; each key has a random stream of its own, so that it does not depend on the others."""

    def draw(key: str, number: int, domain: Domain) -> Any:
        return draw_value(domain, random.Random(f"{seed}/{sample}/{key}/{number}"))

    return draw


def draw_value(domain: Domain, stream: random.Random) -> Any:
    """Return a random value of a domain."""
    if domain.kind in LISTED:
        return stream.choice(domain.values)
    low, high, *step = getattr(domain, domain.kind)
    if domain.kind == "randint":
        return stream.randint(low, high)
    log = "log" in domain.kind
    value = math.exp(stream.uniform(math.log(low), math.log(high))) if log else stream.uniform(low, high)
    return quantised(min(max(value, low), high), low, high, step[0]) if step else min(max(value, low), high)


def quantised(value: float, low: float, high: float, step: float) -> float | int:
    """Return the multiple of `step` next to `value` that lies between the bounds; a whole number where `step` is one."""
    slack = 1e-9
    first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    count = min(max(round(value / step), first), max(first, last))
    return count * int(step) if float(step).is_integer() else float(f"{count * step:.12g}")


def _no_draw(key: str, number: int, domain: Domain) -> Any:
    raise AssertionError(f"{key}: a grid has nothing to draw from, not {domain.kind} of case {number}")


def _applies(domain: Domain, sofar: Keys, common: Mapping[str, Any]) -> bool:
    for key, wanted in domain.when.items():
        found = sofar[key] if key in sofar else _look_up(common, key)
        if found not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def _look_up(common: Mapping[str, Any], key: str) -> Any:
    """Return a value of a flat configuration, also of its mappings of free keys."""
    if key in common:
        return common[key]
    parent = next((name for name, value in common.items() if isinstance(value, dict) and key.startswith(f"{name}.")), None)
    return None if parent is None else common[parent].get(key.removeprefix(f"{parent}."))


def _with(tree: Tree, changes: Keys) -> Tree:
    for key, value in changes.items():
        tree = merge(tree, nested(key, value))
    return tree
