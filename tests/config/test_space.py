"""Spaces: what is read, and one line for each thing that is wrong."""

from pathlib import Path

import pytest

from fluxray.config.space import METRICS, build_space, order, read_space
from fluxray.errors import ConfigError

ROOT = Path(__file__).parents[2]
LR = {"optim.lr": {"grid": [1e-4, 2e-4]}}


@pytest.mark.parametrize("path", sorted((ROOT / "tune_spaces").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_spaces_are_read(path):
    assert read_space(path).keys


FAULTS = {
    "keys: missing": {},
    "keys: {} leaves nothing to vary": {"keys": {}},
    "keyz: unknown key; did you mean keys?": {"keys": LR, "keyz": 1},
    "optim.lrr: unknown key; did you mean optim.lr?": {"keys": {"optim.lrr": {"grid": [1]}}},
    "optim: ": {"keys": {"optim": {"grid": [1]}}},
    "fixed.optim.lr: the space varies this key": {"keys": LR, "fixed": {"optim.lr": 1}},
    "optim.lrx: unknown key": {"keys": LR, "fixed": {"optim.lrx": 1}},
    "keys.optim.lr.grid: [] holds no value": {"keys": {"optim.lr": {"grid": []}}},
    "keys.optim.lr.choice: [] holds no value": {"keys": {"optim.lr": {"choice": []}}, "search": "random", "samples": 2},
    "keys.optim.lr: no values; give one of grid": {"keys": {"optim.lr": {"when": {"seed": 1}}}},
    "keys.optim.lr: grid and choice; give one": {"keys": {"optim.lr": {"grid": [1], "choice": [1]}}},
    "keys.optim.lr: 3 is not a domain": {"keys": {"optim.lr": 3}},
    "keys.optim.lr.grit: unknown key; did you mean grid?": {"keys": {"optim.lr": {"grit": [1]}}},
    "keys.optim.lr.uniform: [2.0, 1.0] has its low end": {"keys": {"optim.lr": {"uniform": [2, 1]}}, "search": "random"},
    "keys.optim.lr.uniform: [1] is not [LOW, HIGH]": {"keys": {"optim.lr": {"uniform": [1]}}, "search": "random"},
    "keys.optim.lr.loguniform: [0.0, 1.0] begins at or below 0": {"keys": {"optim.lr": {"loguniform": [0, 1]}}},
    "keys.optim.lr.quniform: the step 5 is not": {"keys": {"optim.lr": {"quniform": [1, 2, 5]}}},
    "keys.optim.lr.times: multiplies a list of numbers": {"keys": {"optim.lr": {"grid": [1], "times": [0]}}},
    "keys.optim.lr.uniform: is drawn from, and search is grid": {"keys": {"optim.lr": {"uniform": [1, 2]}}},
    "keys.optim.lr.grid: goes through all values": {"keys": LR, "search": "optuna", "samples": 2},
    "samples: 3 has no effect with search grid": {"keys": LR, "samples": 3},
    "samples: null, but search random must know": {"keys": LR, "search": "random"},
    "samples: 0 is not a whole number of at least 1": {"keys": LR, "search": "random", "samples": 0},
    "search: 'gird' is not one of grid, random, optuna": {"keys": LR, "search": "gird"},
    "metric: 'eval/los' is reported by no run; did you mean eval/loss? There are eval/loss": {"keys": LR, "metric": "eval/los"},
    "budget.steps: set beside budget.tokens": {"keys": LR, "budget": {"tokens": 9, "steps": 9}},
    "budget.token: unknown key; did you mean tokens?": {"keys": LR, "budget": {"token": 9}},
    "budget.steps: 'many' is not a whole number": {"keys": LR, "budget": {"steps": "many"}},
    "budget: 5 is not a section": {"keys": LR, "budget": 5},
    "scheduler.grace: has no effect with scheduler.kind none": {"keys": LR, "scheduler": {"grace": 0.5}},
    "scheduler.reduction: has no effect with scheduler.kind median": {
        "keys": LR,
        "scheduler": {"kind": "median", "reduction": 2.0},
    },
    "scheduler.grace: 1.5 is not a share of the budget": {"keys": LR, "scheduler": {"kind": "asha", "grace": 1.5}},
    "keys.storage: is the same for all trials": {"keys": {"storage": {"grid": ["/a"]}}},
    "keys.tracking.uri: is the same for all trials": {"keys": {"tracking.uri": {"grid": ["/a"]}}},
    "keys.train.num_steps: follows from budget.steps": {"keys": {"train.num_steps": {"grid": [1]}}, "budget": {"steps": 4}},
    "seedd: unknown key; did you mean seed?": {"keys": {"optim.lr": {"grid": [1], "when": {"seedd": 1}}}},
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_wrong_is_said_in_one_line(message):
    with pytest.raises(ConfigError) as fault:
        build_space(FAULTS[message])
    assert str(fault.value).startswith(message)
    assert "\n" not in str(fault.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^SPACE: .*none.yaml: cannot be read"):
        read_space(tmp_path / "none.yaml")


def test_a_circle_of_conditions_is_shown():
    keys = {
        "optim.lr": {"grid": [1.0], "when": {"seed": 1}},
        "seed": {"grid": [1], "when": {"optim.kind": "adamw"}},
        "optim.kind": {"grid": ["adamw"], "when": {"optim.lr": 1.0}},
    }
    with pytest.raises(ConfigError, match=r"optim\.lr -> seed -> optim\.kind -> optim\.lr"):
        build_space({"keys": keys})


def test_what_others_depend_on_comes_first():
    keys = {"optim.lr": {"grid": [1], "when": {"precision": "fp32"}}, "precision": {"grid": ["fp32"]}, "seed": {"grid": [1]}}
    assert order(build_space({"keys": keys}).keys) == ["precision", "optim.lr", "seed"]


def test_free_keys_of_the_model_can_be_varied():
    assert build_space({"keys": {"model.config.num_hidden_layers": {"grid": [1, 2]}}}).keys


def test_metrics_of_a_real_run_are_among_those_that_can_be_chosen():
    assert {"eval/loss", "perf/tokens_per_s", "eval/loss_t0.125"} <= set(METRICS)
