"""What Ray Tune is told: early ends, also after a resume; Optuna's draws."""

import sys
from types import SimpleNamespace

import pytest

from fluxray.config.space import build_space
from fluxray.config.trials import base_tree
from fluxray.errors import ConfigError
from fluxray.runtime.sweep_table import Point, Trial
from fluxray.runtime.tune_search import Gentle, OptunaDraws, build_scheduler, result_of

STEPS = 90
LRS = {"optim.lr": {"loguniform": [1e-5, 1e-1]}, "optim.beta2": {"choice": [0.9, 0.99]}, "seed": {"randint": [0, 9]}}


def space_of(**more):
    return build_space({"keys": {"optim.lr": {"grid": [1]}}, **more})


def trial_of(number, values, status="ended", num_steps=STEPS):
    every = num_steps // 9
    history = tuple(Point(every * (index + 1), 0, 0.0, value) for index, value in enumerate(values))
    return Trial(number, f"s-{number}", {}, num_steps, status, history=history)


class Stand:
    """A trial of Tune's, as far as schedulers look at it."""

    def __init__(self, trial_id):
        self.trial_id = trial_id


def ended_after(scheduler, trials):
    """Feed the histories one after the other; return after how many points each was told to stop."""
    controller, found = SimpleNamespace(get_live_trials=list), []
    for trial in trials:
        stand: object = Stand(trial.run)
        scheduler.on_trial_add(controller, stand)
        seen = 0
        for point in trial.history:
            seen += 1
            if scheduler.on_trial_result(controller, stand, result_of(point, trial.num_steps)) != "CONTINUE":
                break
        else:
            scheduler.on_trial_complete(controller, stand, result_of(trial.history[-1], trial.num_steps))
        found.append(seen)
    return found


FALLING = [trial_of(number, [5 - number % 4 - step / 10 for step in range(9)]) for number in range(8)]


def test_without_a_scheduler_all_come_to_their_end():
    assert ended_after(build_scheduler(space_of(), ()), FALLING) == [9] * 8


@pytest.mark.parametrize("mode", ["min", "max"])
def test_asha_ends_those_that_fall_behind_and_never_one_at_its_end(mode):
    sign = 1 if mode == "min" else -1
    trials = [
        trial_of(trial.trial, [sign * point.value for point in trial.history], num_steps=trial.num_steps) for trial in FALLING
    ]
    space = space_of(mode=mode, scheduler={"kind": "asha", "grace": 0.111, "reduction": 3})
    ends = ended_after(build_scheduler(space, ()), trials)
    assert ends[:4] == [9] * 4, "each is better than those before it"
    assert ends[4:6] == [1, 1], "below the best third of those before"
    assert ends[7] == 9


def test_asha_compares_at_equal_shares_of_the_budget_not_at_equal_steps():
    space = space_of(scheduler={"kind": "asha", "grace": 0.111, "reduction": 3})
    trials = [trial_of(0, [1.0] * 9, num_steps=900), trial_of(1, [2.0] * 9, num_steps=9)]
    assert ended_after(build_scheduler(space, ()), trials) == [9, 1]


def test_what_ended_before_counts_after_a_resume():
    space = space_of(scheduler={"kind": "asha", "grace": 0.111, "reduction": 3})
    whole = ended_after(build_scheduler(space, ()), FALLING)
    assert ended_after(build_scheduler(space, FALLING[:4]), FALLING[4:]) == whole[4:]
    waiting = [trial_of(9, [0.0], status="running")]
    assert ended_after(build_scheduler(space, waiting), FALLING) == whole, "what goes on reports its history itself"


def test_the_median_ends_those_below_it_once_there_are_enough():
    space = space_of(scheduler={"kind": "median", "grace": 0.3, "min_trials": 3})
    trials = [*FALLING[:4], trial_of(4, [9.0] * 9)]
    assert ended_after(build_scheduler(space, ()), trials) == [9, 9, 9, 9, 3]
    assert ended_after(build_scheduler(space, trials[:4]), trials[4:]) == [3]
    assert ended_after(build_scheduler(space, ()), [*trials[:2], trials[4]]) == [9, 9, 9]


def test_a_trial_that_falls_behind_is_asked_once_and_tune_kills_none():
    asked: list[tuple[str, int]] = []
    space = space_of(scheduler={"kind": "asha", "grace": 0.111, "reduction": 3})
    gentle = Gentle(build_scheduler(space, ()), lambda run, step: asked.append((run, step)))
    assert ended_after(gentle, FALLING) == [9] * 8, "until they stop by themselves"
    told = ended_after(build_scheduler(space, ()), FALLING)
    assert asked == [(f"s-{number}", 10 * told[number]) for number in range(8) if told[number] < 9]


def test_the_median_is_not_confused_by_a_trial_without_points():
    scheduler = build_scheduler(space_of(scheduler={"kind": "median", "grace": 0.3}), ())
    scheduler.on_trial_complete(None, Stand("failed"), {})  # type: ignore[arg-type]
    assert ended_after(scheduler, FALLING[:1]) == [9]


class TestOptuna:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("optuna", reason="optuna is not installed")

    def draws(self):
        space = build_space({"keys": LRS, "search": "optuna", "samples": 9})
        return OptunaDraws(space, base_tree(space, "cpu", "lm-tiny", ()))

    def run(self, draws, numbers, known):
        for number in numbers:
            keys = draws.draw(number, known)
            known.append(keys)
            draws.tell(number, abs(keys["optim.lr"] - 0.01))
        return known

    def test_draws_are_repeatable_and_lie_in_their_domains(self):
        found = self.run(self.draws(), range(12), [])
        assert found == self.run(self.draws(), range(12), [])
        assert all(1e-5 <= keys["optim.lr"] <= 1e-1 and keys["seed"] in range(10) for keys in found)

    def test_it_learns_from_what_it_is_told(self):
        found = self.run(self.draws(), range(60), [])
        late = sorted(abs(keys["optim.lr"] - 0.01) for keys in found[40:])
        early = sorted(abs(keys["optim.lr"] - 0.01) for keys in found[:20])
        assert late[10] < early[10]

    def test_what_was_drawn_before_a_resume_is_remembered(self):
        found = self.run(self.draws(), range(30), [])
        resumed = self.draws()
        for number, keys in enumerate(found[:25]):
            resumed.remember(number, keys)
            resumed.tell(number, abs(keys["optim.lr"] - 0.01))
        values = [trial.value for trial in resumed._study.trials]
        assert values == [abs(keys["optim.lr"] - 0.01) for keys in found[:25]]
        assert resumed._study.trials[0].params["optim.lr/0"] == found[0]["optim.lr"]

    def test_a_space_that_is_used_up_gives_nothing_more(self):
        space = build_space({"keys": {"seed": {"choice": [1, 2]}}, "search": "optuna", "samples": 9})
        draws = OptunaDraws(space, base_tree(space, "cpu", "lm-tiny", ()))
        known = [draws.draw(0, [])]
        known.append(draws.draw(1, known))
        assert sorted(keys["seed"] for keys in known) == [1, 2]
        assert draws.draw(2, known) is None


def test_a_missing_optuna_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    space = build_space({"keys": LRS, "search": "optuna", "samples": 9})
    with pytest.raises(ConfigError, match=r"^search: optuna is not installed; pip install 'fluxray\[sweep\]'"):
        OptunaDraws(space, {})
