"""The arithmetic of trials: how many there are, what each is given, what its budget pays for."""

import math
import random

import pytest

from fluxray.config.space import Domain, Space, build_space
from fluxray.config.trials import (
    MAX_TRIALS,
    assign_all,
    base_tree,
    draw_value,
    plan_trials,
    quantised,
    steps_of,
    trial_config,
)
from fluxray.errors import ConfigError


def space_of(keys, **more) -> Space:
    return build_space({"keys": keys, **more})


def base_of(space, *words):
    return base_tree(space, "cpu", "lm-tiny", words)


def keys_of(space, *words):
    return [dict(trial.keys) for trial in plan_trials(space, base_of(space, *words)).trials]


def test_a_grid_is_the_product_of_its_lists_in_order():
    space = space_of({"batch.micro_size": {"grid": [4, 8]}, "optim.lr": {"grid": [1e-4, 2e-4, 3e-4]}})
    assert [(keys["batch.micro_size"], keys["optim.lr"]) for keys in keys_of(space)] == [
        (size, lr) for size in (4, 8) for lr in (1e-4, 2e-4, 3e-4)
    ]


def test_the_first_case_that_applies_counts_and_none_leaves_the_key():
    space = space_of(
        {
            "optim.lr": [
                {"grid": [1e-4, 2e-4], "times": [1, 2, 4], "when": {"precision": ["amp-bf16", "amp-fp16"]}},
                {"grid": [5e-5], "when": {"precision": "mixed-bf16"}},
            ],
            "precision": {"grid": ["fp32", "mixed-bf16", "amp-bf16"]},
        }
    )
    assert keys_of(space) == [
        {"precision": "fp32"},
        {"precision": "mixed-bf16", "optim.lr": 5e-5},
        *({"precision": "amp-bf16", "optim.lr": lr} for lr in (1e-4, 2e-4, 4e-4, 8e-4)),
    ]
    assert list(keys_of(space)[-1]) == ["optim.lr", "precision"], "in the order of the space"


def test_a_condition_on_what_is_not_varied_asks_the_base():
    space = space_of({"seed": {"grid": [1, 2], "when": {"model.config.hidden_size": 256}}, "optim.lr": {"grid": [1e-3]}})
    assert len(keys_of(space)) == 2
    assert keys_of(space, "model.config.hidden_size=64") == [{"optim.lr": 1e-3}]


def test_equal_trials_run_once_and_are_told():
    space = space_of({"optim.lr": {"grid": [1e-3, 0.001, 2e-3]}, "seed": {"grid": [0, 1]}}, fixed={"precision": "fp32"})
    plan = plan_trials(space, base_of(space))
    assert len(plan.trials) == 4
    assert plan.duplicates == [({"optim.lr": 1e-3, "seed": 0}, 0), ({"optim.lr": 1e-3, "seed": 1}, 1)]


def test_a_combination_that_contradicts_itself_is_a_trial_with_a_fault():
    space = space_of({"optim.master": {"grid": ["fp32", "split24"]}})
    trials = plan_trials(space, base_of(space)).trials
    assert trials[0].fault is None
    assert trials[1].config is None
    assert str(trials[1].fault).startswith("optim.master: 'split24' is for bf16 weights")


def test_a_space_of_which_nothing_works_is_refused():
    with pytest.raises(ConfigError, match=r"^optim.lr: -1 is not a number above 0"):
        keys_of(space_of({"optim.lr": {"grid": [-1, "a"]}}))


def test_too_many_trials_must_be_asked_for():
    space = space_of({"seed": {"grid": list(range(101))}, "optim.lr": {"grid": [1e-3 * (i + 1) for i in range(100)]}})
    with pytest.raises(ConfigError, match=r"more than 10,000 trials; .*--yes"):
        keys_of(space)
    assert sum(1 for _ in assign_all(space, base_of(space))) == 10_100 > MAX_TRIALS


def test_a_key_of_the_space_is_not_for_the_command_line():
    with pytest.raises(ConfigError, match=r"^optim\.lr: the space varies this key"):
        base_of(space_of({"optim.lr": {"grid": [1]}}), "optim.lr=3")


def test_words_outrank_what_is_fixed():
    space = space_of({"optim.lr": {"grid": [1e-3]}}, fixed={"data.max_slice": 64})
    assert base_of(space)["data"]["max_slice"] == 64
    assert base_of(space, "data.max_slice=32")["data"]["max_slice"] == 32


def test_a_draw_depends_on_nothing_but_seed_number_and_key():
    keys = {"optim.lr": {"loguniform": [1e-5, 1e-1]}, "optim.beta2": {"uniform": [0.9, 0.99]}}
    few, many = (space_of(keys, search="random", samples=n) for n in (3, 9))
    assert keys_of(many)[:3] == keys_of(few)
    swapped = space_of(dict(reversed(keys.items())), search="random", samples=3)
    assert keys_of(swapped) == keys_of(few)
    assert keys_of(space_of(keys, search="random", samples=3, seed=1)) != keys_of(few)


def test_a_grid_within_draws_is_gone_through_for_each():
    space = space_of({"optim.lr": {"loguniform": [1e-5, 1e-1]}, "seed": {"grid": [1, 2]}}, search="random", samples=3)
    found = keys_of(space)
    assert [keys["seed"] for keys in found] == [1, 2] * 3
    assert found[0]["optim.lr"] == found[1]["optim.lr"] != found[2]["optim.lr"]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_values_lie_in_their_domains(seed):
    stream = random.Random(seed)
    low = 10 ** stream.uniform(-6, 2)
    high = low * 10 ** stream.uniform(0.01, 4)
    step = (high - low) / stream.uniform(1.01, 50)
    for kind in ("uniform", "loguniform"):
        assert low <= draw_value(Domain(**{kind: (low, high)}), stream) <= high
    for kind in ("quniform", "qloguniform"):
        value = draw_value(Domain(**{kind: (low, high, step)}), stream)
        assert low * (1 - 1e-6) <= value <= high * (1 + 1e-6)
        assert math.isclose(value / step, round(value / step), rel_tol=1e-6)
    ends = sorted((stream.randint(-50, 50), stream.randint(-50, 50)))
    assert draw_value(Domain(randint=(ends[0], ends[1])), stream) in range(ends[0], ends[1] + 1)


def test_both_ends_are_drawn():
    stream = random.Random(0)
    assert {draw_value(Domain(randint=(1, 3)), stream) for _ in range(100)} == {1, 2, 3}
    assert {draw_value(Domain(quniform=(1, 3, 1)), stream) for _ in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("value", "step", "found"), [(0.26, 0.1, 0.3), (0.31, 0.1, 0.3), (5.0, 2.0, 4), (1e-5, 1e-6, 1e-5), (0.04, 0.1, 0.1)]
)
def test_quantised_values_are_exact(value, step, found):
    assert quantised(value, 1e-6 if step < 1e-5 else 0.1, 100, step) == found


@pytest.mark.parametrize("seed", range(60))
def test_a_budget_pays_for_as_many_whole_steps_as_fit_it(seed):
    stream = random.Random(seed)
    micro, steps, length = stream.randint(1, 32), stream.randint(1, 8), stream.choice([16, 100, 128])
    words = (f"batch.micro_size={micro}", f"batch.accumulation_steps={steps}", f"data.max_slice={length}")
    each = {"tokens": micro * steps * length, "samples": micro * steps, "steps": 1}
    unit = stream.choice(list(each))
    amount = stream.randint(each[unit], 1000 * each[unit])
    space = space_of({"optim.lr": {"grid": [1e-3]}}, budget={unit: amount})
    config = trial_config(space, base_of(space, *words), {"optim.lr": 1e-3})
    num_steps = config.train.num_steps
    assert num_steps * each[unit] <= amount < (num_steps + 1) * each[unit]
    evaluations = [step for step in range(1, num_steps + 1) if step % config.evaluation.every_steps == 0 or step == num_steps]
    assert len(evaluations) <= 4
    assert all(step / num_steps >= (index + 1) / 4 for index, step in enumerate(evaluations)), "as much of the budget, or more"


def test_trials_of_equal_tokens_spend_equal_tokens():
    space = space_of(
        {"batch.micro_size": {"grid": [4, 8, 16]}, "batch.accumulation_steps": {"grid": [1, 2, 4, 8]}},
        budget={"tokens": 4 * 2**20, "warmup": 0.1},
    )
    trials = plan_trials(space, base_of(space)).trials
    spent = {trial.config.global_batch_size * 128 * trial.config.train.num_steps for trial in trials if trial.config}
    assert spent == {4 * 2**20}
    warm = {trial.config.optim.warmup_steps / trial.config.train.num_steps for trial in trials if trial.config}
    assert all(0.09 < share <= 0.1 for share in warm)


def test_a_budget_below_one_step_is_refused():
    space = space_of({"optim.lr": {"grid": [1e-3]}}, budget={"tokens": 100})
    with pytest.raises(ConfigError, match=r"^budget\.tokens: 100 is less than one step of 1,024"):
        keys_of(space)


def test_seconds_leave_the_steps_open():
    space = space_of({"optim.lr": {"grid": [1e-3]}}, budget={"seconds": 10})
    base = base_of(space, "train.num_steps=77")
    assert trial_config(space, base, {}).train.num_steps == 77
    with pytest.raises(ConfigError, match=r"^budget\.seconds: .* optim\.schedule cosine"):
        trial_config(space, base_of(space, "optim.schedule=cosine"), {})


def test_tokens_are_not_for_images():
    space = space_of({"optim.lr": {"grid": [1e-3]}}, budget={"tokens": 10_000_000})
    with pytest.raises(ConfigError, match=r"^budget\.tokens: task\.kind flow"):
        steps_of(
            space,
            trial_config(space_of({"optim.lr": {"grid": [1]}}), base_tree(space, "cpu", "flux2-tiny", ["data.cache=/c"]), {}),
        )


def test_what_the_base_says_of_evaluations_stands():
    space = space_of({"optim.lr": {"grid": [1e-3]}}, budget={"steps": 40})
    config = trial_config(space, base_of(space), {})
    assert (config.evaluation.every_steps, config.checkpoint.every_steps, config.train.on_oom) == (10, 10, "stop")
    words = ("evaluation.every_steps=7", "checkpoint.every_steps=9", "train.on_oom=ladder")
    config = trial_config(space, base_of(space, *words), {})
    assert (config.evaluation.every_steps, config.checkpoint.every_steps, config.train.on_oom) == (7, 9, "ladder")


def test_a_rate_is_read_as_often_as_a_loss():
    space = space_of({"optim.lr": {"grid": [1e-3]}}, budget={"steps": 40}, metric="perf/tokens_per_s", mode="max")
    assert trial_config(space, base_of(space), {}).train.log_every == 10
