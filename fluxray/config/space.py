"""What a sweep searches: the schema of `tune_spaces/*.yaml`, with the same one-line faults as a configuration.

keys:                                       # what differs between trials
  batch.micro_size: {grid: [4, 8, 16]}
  optim.lr:                                 # the first case that applies; none: the key stays as it is
    - {grid: [2.5e-5, 5.0e-5], when: {precision: fp32}}
    - {grid: [2.5e-5, 5.0e-5], times: [1, 2, 4], when: {precision: [amp-fp16, amp-bf16]}}
fixed: {optim.warmup_steps: 10}             # what all trials have in common
budget: {tokens: 1000000}
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationError, field_validator

from fluxray.config import text
from fluxray.config.explain import conform
from fluxray.config.keys import is_free, nested, schema_fields
from fluxray.config.section import Section
from fluxray.config.text import Tree
from fluxray.errors import ConfigError

METRICS = (
    *("eval/loss", "eval/perplexity", "eval/loss_mlperf", *(f"eval/loss_t{i / 8:g}" for i in range(1, 8))),
    *("train/loss", "train/grad_norm", "perf/tokens_per_s", "perf/mfu", "perf/of_floor"),
    *("perf/wait_fetch_s", "perf/wait_write_s", "memory/host_gib", "memory/allocated_gib", "memory/reserved_gib"),
)
"""What trials can be judged by."""

LISTED = ("grid", "choice")
DRAWN = ("choice", "uniform", "loguniform", "quniform", "qloguniform", "randint")
COMMON = ("name", "storage", "tracking.", "resources.label_selector", "resources.accelerator", "resources.wait_s")
"""Keys that are the same for all trials; the first two belong to the sweep."""

WANTED = {
    "grid": "a list of values",
    "choice": "a list of values",
    "uniform": "[LOW, HIGH]",
    "loguniform": "[LOW, HIGH] above 0",
    "quniform": "[LOW, HIGH, STEP]",
    "qloguniform": "[LOW, HIGH, STEP] above 0",
    "randint": "[LOW, HIGH], whole numbers, both included",
    "times": "a list of factors above 0",
    "when": "a mapping from keys to a value or a list of values",
    "keys": "a mapping from configuration keys to domains, such as optim.lr: {grid: [1e-4, 3e-4]}",
    "fixed": "a mapping from configuration keys to values",
    "search": "one of grid, random, optuna",
    "samples": "a whole number of at least 1",
    "seed": "a whole number of at least 0",
    "metric": "text",
    "mode": "one of min, max",
    "keep": "one of best, all",
    "kind": "one of none, asha, median",
    "grace": "a share of the budget above 0 and below 1",
    "reduction": "a number above 1",
    "min_trials": "a whole number of at least 1",
    "evaluations": "a whole number of at least 1",
    "warmup": "a share of the steps from 0 to below 1",
    "tokens": "a whole number of at least 1",
    "steps": "a whole number of at least 1",
    "seconds": "a number above 0",
    "budget": "a section; set a key of it, such as budget.steps",
    "scheduler": "a section; set a key of it, such as scheduler.kind",
}
"""What each key takes, in words."""


class Domain(Section):
    """The values of one key: exactly one of the first seven fields is set.

    `grid` is gone through value by value; the others are drawn from. Quantised values are multiples of their step. Values of a
    list may be multiplied by each of `times`. With `when`, the domain applies where these keys have these values.
    """

    grid: tuple[Any, ...] | None = None
    choice: tuple[Any, ...] | None = None
    uniform: tuple[float, float] | None = None
    loguniform: tuple[float, float] | None = None
    quniform: tuple[float, float, float] | None = None
    qloguniform: tuple[float, float, float] | None = None
    randint: tuple[int, int] | None = None
    times: tuple[float, ...] | None = None
    when: dict[str, Any] = Field(default={})

    @property
    def kinds(self) -> list[str]:
        """Which of the first seven fields are set."""
        return [name for name in ("grid", *DRAWN) if getattr(self, name) is not None]

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return self.kinds[0]

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of a list, each times each factor, without repetition."""
        listed = getattr(self, self.kind)
        if self.times is None:
            return listed
        products = (float(f"{value * factor:.12g}") for value in listed for factor in self.times)
        return tuple(dict.fromkeys(products))


class SchedulerConfig(Section):
    """What ends trials before their budget is spent, at one of their evaluations.

    `asha` (arXiv:1810.05934) first looks after the share `grace` of the budget and lets 1 of `reduction` go on each time;
    `median` ends a trial whose best value is worse than the median of the others' averages, once there are `min_trials` of them.
    """

    kind: Literal["none", "asha", "median"] = "none"
    grace: float = Field(default=0.125, gt=0, lt=1)
    reduction: float = Field(default=3.0, gt=1)
    min_trials: int = Field(default=3, ge=1)


class BudgetConfig(Section):
    """What every trial may spend: at most one of the first four; without, its train.num_steps.

    Tokens and samples become steps by the size of the trial's global batch, rounded down. Trials evaluate `evaluations` times,
    evenly, the last time at their end. `warmup` is the share of the steps in which the learning rate rises.
    """

    tokens: int | None = Field(default=None, ge=1)
    samples: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)
    evaluations: int = Field(default=4, ge=1)
    warmup: float | None = Field(default=None, ge=0, lt=1)

    @property
    def unit(self) -> str | None:
        """What is counted."""
        return next((name for name in ("tokens", "samples", "steps", "seconds") if getattr(self, name) is not None), None)

    @property
    def words(self) -> str:
        """The budget for people."""
        return "train.num_steps" if self.unit is None else f"{getattr(self, self.unit):,} {self.unit} a trial"


class Space(Section):
    """A whole file. `samples` counts the draws; `keep` says whose checkpoints stay: the best trial's so far, or all."""

    keys: dict[str, tuple[Domain, ...]]
    fixed: dict[str, Any] = Field(default={})
    search: Literal["grid", "random", "optuna"] = "grid"
    samples: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    metric: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    scheduler: SchedulerConfig = SchedulerConfig()
    budget: BudgetConfig = BudgetConfig()
    keep: Literal["best", "all"] = "best"

    @field_validator("keys", mode="before")
    @classmethod
    def _cases(cls, value: Any) -> Any:
        """Take one domain for a list of one case."""
        if not isinstance(value, dict):
            return value
        cases: dict[str, Any] = {}
        for key, domain in cast(Tree, value).items():
            cases[key] = domain if isinstance(domain, list) else [domain]
        return cases


def read_space(path: Path) -> Space:
    """Return the space in a YAML or JSON file. Raises ConfigError with one line."""
    return build_space(text.read_file(path, f"SPACE: {path}"))


def build_space(tree: Mapping[str, Any]) -> Space:
    """Return the space of a tree of values. Raises ConfigError with one line."""
    try:
        space = Space.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    _check(space)
    return space


def order(keys: Mapping[str, Sequence[Domain]]) -> list[str]:
    """Return the keys such that those come first on whose values others depend. Raises ConfigError for a circle."""
    done: list[str] = []

    def visit(key: str, path: tuple[str, ...]) -> None:
        if key in path:
            circle = " -> ".join((*path[path.index(key) :], key))
            raise ConfigError(f"keys.{key}: `when` goes round in a circle: {circle}; drop one of them")
        if key in done:
            return
        for domain in keys[key]:
            for other in domain.when:
                if other in keys:
                    visit(other, (*path, key))
        done.append(key)

    for key in keys:
        visit(key, ())
    return done


def check_key(key: str) -> None:
    """Raise ConfigError, with a suggestion, for a key that no configuration has."""
    fields = schema_fields()
    free = any(is_free(field) and key.startswith(f"{name}.") for name, field in fields.items())
    if key not in fields and not free:
        conform(nested(key, None))
        raise ConfigError(f"{key}: is a section; name a key of it")


def _check(space: Space) -> None:
    if not space.keys:
        raise ConfigError("keys: {} leaves nothing to vary; name a key with its values, such as optim.lr: {grid: [1e-4, 3e-4]}")
    for key in (*space.keys, *space.fixed):
        check_key(key)
    for key, domains in space.keys.items():
        _check_varied(space, key)
        for domain in domains:
            _check_domain(space, key, domain)
    order(space.keys)
    if space.metric not in METRICS:
        close = difflib.get_close_matches(space.metric, METRICS, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}? There are" if close else "there are"
        raise ConfigError(f"metric: {space.metric!r} is reported by no run; {hint} {', '.join(METRICS)}")
    _check_together(space)


def _check_together(space: Space) -> None:
    if space.search == "grid" and space.samples is not None:
        raise ConfigError(f"samples: {space.samples} has no effect with search grid; drop it, or set search: random")
    if space.search != "grid" and space.samples is None:
        raise ConfigError(f"samples: null, but search {space.search} must know how many trials to draw; set samples: 16")
    given = [name for name in ("tokens", "samples", "steps", "seconds") if getattr(space.budget, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"budget.{given[1]}: set beside budget.{given[0]}; set one of them")
    unset = SchedulerConfig(kind=space.scheduler.kind)
    owners = {"grace": ("asha", "median"), "reduction": ("asha",), "min_trials": ("median",)}
    for name, kinds in owners.items():
        if space.scheduler.kind not in kinds and getattr(space.scheduler, name) != getattr(unset, name):
            raise ConfigError(
                f"scheduler.{name}: has no effect with scheduler.kind {space.scheduler.kind}; drop it, or set "
                f"scheduler.kind: {kinds[0]}"
            )


def _check_varied(space: Space, key: str) -> None:
    if key in space.fixed:
        raise ConfigError(f"fixed.{key}: the space varies this key; drop it here or there")
    if any(key == name or (name[-1] == "." and key.startswith(name)) for name in COMMON):
        raise ConfigError(f"keys.{key}: is the same for all trials of a sweep; set it on the command line")
    if key == "train.num_steps" and space.budget.unit is not None:
        raise ConfigError(f"keys.{key}: follows from budget.{space.budget.unit}; drop one of them")


def _check_domain(space: Space, key: str, domain: Domain) -> None:
    if len(domain.kinds) != 1:
        raise ConfigError(
            f"keys.{key}: {' and '.join(domain.kinds) or 'no values'}; give one of {', '.join(('grid', *DRAWN))}, such as "
            "{grid: [1, 2]}"
        )
    kind, given = domain.kind, getattr(domain, domain.kind)
    if kind in LISTED and not given:
        raise ConfigError(f"keys.{key}.{kind}: [] holds no value; name some, or drop the key")
    if kind not in LISTED and given[0] >= given[1] and not (kind == "randint" and given[0] == given[1]):
        raise ConfigError(f"keys.{key}.{kind}: {list(given)} has its low end at or above its high end; swap them")
    if "log" in kind and given[0] <= 0:
        raise ConfigError(f"keys.{key}.{kind}: {list(given)} begins at or below 0, where there is no logarithm; raise it")
    if kind in ("quniform", "qloguniform") and not 0 < given[2] <= given[1]:
        raise ConfigError(f"keys.{key}.{kind}: the step {given[2]:g} is not from above 0 to {given[1]:g}; change it")
    if domain.times is not None:
        numbers = kind in LISTED and all(isinstance(value, int | float) and not isinstance(value, bool) for value in given)
        if not numbers or not domain.times or min(domain.times) <= 0:
            raise ConfigError(f"keys.{key}.times: multiplies a list of numbers by factors above 0; change it, or drop it")
    if space.search == "grid" and kind != "grid":
        raise ConfigError(f"keys.{key}.{kind}: is drawn from, and search is grid; set search: random, or list values in grid")
    if space.search == "optuna" and kind == "grid":
        raise ConfigError(f"keys.{key}.grid: goes through all values, and search is optuna; write choice, or set search: random")
    for other in domain.when:
        check_key(other)


def _explain(error: ValidationError) -> str:
    """Return one line for the first fault that pydantic found."""
    fault = error.errors()[0]
    loc = [str(part) for part in fault["loc"] if not isinstance(part, int)]
    dotted, name = ".".join(loc), loc[-1]
    if fault["type"] == "extra_forbidden":
        section: type[Section] = Space
        if loc[0] == "keys" and len(loc) > 1:
            section = Domain
        elif len(loc) > 1:
            section = {"scheduler": SchedulerConfig, "budget": BudgetConfig}[loc[0]]
        names = list(section.model_fields)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        return f"{dotted}: unknown key; " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}")
    if fault["type"] == "missing" and dotted == "keys":
        return f"{dotted}: missing; name the keys to vary, such as optim.lr: {{grid: [1e-4, 3e-4]}}"
    shown = repr(fault["input"])[:80]
    if len(loc) == 2 and loc[0] == "keys":
        return f"{dotted}: {shown} is not a domain; give its values, such as {{grid: [1, 2]}}"
    return f"{dotted}: {shown} is not {WANTED.get(name, 'what this key takes')}"
