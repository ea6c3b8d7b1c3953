"""From words to a sweep, and back: names, resumes, what has changed, the winner as a profile, a look before the start."""

import json
import re

import pytest

from fluxray import cli
from fluxray.config.load import resolve
from fluxray.config.space import build_space
from fluxray.config.trials import base_tree, trial_config
from fluxray.errors import ConfigError, PlanError
from fluxray.runtime.paths import Home
from fluxray.runtime.sweep_plan import describe
from fluxray.runtime.sweep_shown import ending_lines, table_lines
from fluxray.runtime.sweep_start import begin, best_profile
from fluxray.runtime.sweep_table import Point, TableWriter, read_table
from fluxray.runtime.sweeps import Outcome, Sweep, read_outcome, save_sweep, write_outcome

SPACE = """
keys:
  optim.lr: {grid: [1.0e-3, 2.0e-3, 0.002]}
  batch.micro_size: {grid: [4, 8]}
budget: {tokens: 20480, warmup: 0.1}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return str(path)


@pytest.fixture
def sweep(file, tmp_path):
    found = begin([file, "name=first", f"storage={tmp_path}", "seed=3"], "cpu", "lm-tiny", None, None)
    save_sweep(found, [{"CPU": 2.0}])
    writer = TableWriter(found.folder)
    for number, value in enumerate((4.0, 3.0, 2.0)):
        keys = {"optim.lr": 1e-3 * (number + 1), "batch.micro_size": 4}
        writer.put(number, run=found.run_name(number), keys=keys, num_steps=40, status="running")
        writer.point(number, Point(40, 100, 1.0, value))
        writer.put(number, status="failed" if number == 2 else "ended", reason="out of memory" if number == 2 else None)
    return found


def again(sweep, *words, samples=None, **names):
    return begin([*words, f"storage={sweep.home.root}"], names.get("profile"), names.get("model"), samples, sweep.name)


def test_a_sweep_is_named_by_the_words_or_by_its_file(sweep, file, tmp_path):
    assert sweep.folder == tmp_path / "sweeps" / "first"
    assert sweep.run_dir(7) == tmp_path / "runs" / "first-007"
    other = begin([file, f"storage={tmp_path}"], "cpu", "lm-tiny", None, None)
    assert re.fullmatch(r"space-\d{8}-\d{6}-[0-9a-f]{4}", other.name)


def test_a_name_is_taken_once(sweep, file, tmp_path):
    with pytest.raises(ConfigError, match=r"^name: 'first' is a sweep already; go on with it by --resume first"):
        begin([file, "name=first", f"storage={tmp_path}"], "cpu", "lm-tiny", None, None)
    (tmp_path / "runs" / "second-20261130-082445-74fa").mkdir(parents=True)
    assert begin([file, "name=second", f"storage={tmp_path}"], "cpu", "lm-tiny", None, None).name == "second"
    (tmp_path / "runs" / "second-007").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^name: 'second' would name its trials like the run second-007"):
        begin([file, "name=second", f"storage={tmp_path}"], "cpu", "lm-tiny", None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"^SPACE: missing"),
        (["a.yaml", "b.yaml"], r"^SPACE: 'b.yaml' is a second file"),
        (["none.yaml"], r"^SPACE: none.yaml: cannot be read"),
    ],
)
def test_what_is_no_space_is_said(words, message):
    with pytest.raises(ConfigError, match=message):
        begin(words, None, None, None, None)


def test_samples_are_for_draws(file):
    with pytest.raises(ConfigError, match=r"^--samples: 3 has no effect with search grid"):
        begin([file], "cpu", "lm-tiny", 3, None)


def test_a_resume_goes_on_with_what_was_begun(sweep, file):
    whole = again(sweep, file, "seed=3", profile="cpu", model="lm-tiny")
    for found in (again(sweep), again(sweep, file), again(sweep, "seed=3"), whole):
        assert (found.name, found.space, found.base, found.resumed) == ("first", sweep.space, sweep.base, True)


def test_a_changed_space_is_refused_with_the_difference(sweep, file, tmp_path):
    (tmp_path / "space.yaml").write_text(SPACE.replace("[4, 8]", "[4, 8, 16]").replace("20480", "40960"))
    with pytest.raises(ConfigError) as fault:
        again(sweep, file)
    assert str(fault.value) == (
        '--resume: first was begun otherwise (keys.batch.micro_size: was [{"grid": [4, 8]}], is [{"grid": [4, 8, 16]}]; '
        "budget.tokens: was 20480, is 40960); leave the space and the keys away to go on with it, or start another"
    )
    with pytest.raises(ConfigError, match=r"\(seed: was 3, is 4\)"):
        again(sweep, "seed=4")
    with pytest.raises(ConfigError, match=r"^NAME: 'frist' is no sweep in .*; did you mean first\?"):
        begin([f"storage={tmp_path}"], None, None, None, "frist")


def test_the_winner_is_a_profile_that_train_takes(sweep, tmp_path, capsys):
    text = best_profile("first", Home(tmp_path))
    assert text.startswith("# The best of 3 trials of sweep first: trial 1, run first-001.\n# eval/loss 3 after 40 steps; ")
    path = tmp_path / "best.yaml"
    path.write_text(text)
    wanted = trial_config(sweep.space, sweep.base, {"optim.lr": 2e-3, "batch.micro_size": 4})
    found = resolve(str(path), None, ())
    assert found.optim == wanted.optim
    assert (found.batch, found.model, found.data, found.seed) == (wanted.batch, wanted.model, wanted.data, 3)
    assert found.train.num_steps == wanted.train.num_steps == 40
    assert resolve(str(path), "lm-tiny", ["train.num_steps=9"]).train.num_steps == 9
    with pytest.raises(SystemExit) as end:
        cli.main(["best", "first", "--storage", str(tmp_path), "--out", str(tmp_path / "out.yaml")])
    assert end.value.code == 0
    assert (tmp_path / "out.yaml").read_text() == text
    assert "fluxray train --profile" in capsys.readouterr().out


def test_a_profile_that_is_not_there_is_said():
    with pytest.raises(ConfigError, match=r"^--profile: none\.yaml: cannot be read"):
        resolve("none.yaml", None, ())


def test_a_sweep_without_a_result_has_no_winner(file, tmp_path):
    found = begin([file, "name=empty", f"storage={tmp_path}"], "cpu", "lm-tiny", None, None)
    save_sweep(found, [])
    with pytest.raises(ConfigError, match=r"^NAME: no trial of empty has ended"):
        best_profile("empty", Home(tmp_path))


def test_the_first_word_on_how_a_trial_ended_counts(tmp_path):
    assert read_outcome(tmp_path, 3) is None
    write_outcome(tmp_path, 3, Outcome("failed", "out of memory"))
    write_outcome(tmp_path, 3, Outcome("ended"))
    assert read_outcome(tmp_path, 3) == Outcome("failed", "out of memory")


def test_the_last_lines_say_how_many_ended_and_why_others_failed(sweep):
    table = read_table(sweep.folder)
    assert table_lines(table)[1:3] == [
        "1      0.002     4                 ended   40/40  3",
        "0      0.001     4                 ended   40/40  4",
    ]
    assert ending_lines(table) == [
        "trial 2 failed: out of memory",
        "sweep first: 3 trials: 2 ended, 1 failed",
        "best: trial 1, optim.lr=0.002 batch.micro_size=4: eval/loss 3",
    ]


def test_secrets_are_not_in_what_is_saved_for_mlflow(file, tmp_path):
    found = begin([file, f"storage={tmp_path}", "tracking.uri=http://me:secret@host"], "cpu", "lm-tiny", None, None)
    save_sweep(found, [])
    assert "secret" not in (found.folder / "space.yaml").read_text() + (found.folder / "environment.json").read_text()
    assert json.loads((found.folder / "environment.json").read_text())["version.ray"]


@pytest.mark.usefixtures("one_thread")
class TestDryRun:
    def said(self, sweep, **more):
        lines: list[str] = []
        describe(sweep, more.get("limit"), False, lambda text: lines.extend(text.splitlines()))
        return lines

    def test_trials_repetitions_plans_and_time_are_shown(self, sweep):
        lines = self.said(sweep)
        assert lines[0].split() == ["trial", "optim.lr", "batch.micro_size", "global", "batch", "steps", "plan"]
        assert [line.split()[3:] for line in lines[1:5]] == [["4", "40", "plan", "0"], ["8", "20", "plan", "1"]] * 2
        assert lines[5] == "left out: optim.lr=0.002 batch.micro_size=4 equals trial 2"
        assert sum(line.startswith("plan ") for line in lines) == 2, "the learning rate changes no plan"
        assert lines[-2] == "sweep first: 4 trials, 20,480 tokens a trial"
        assert lines[-1].startswith("at a time: ")

    def test_what_cannot_fit_is_refused_with_the_nearest_that_does(self, tmp_path):
        space = build_space({"keys": {"batch.micro_size": {"grid": [1, 4096]}}, "budget": {"steps": 4}})
        words = ["hardware.device_memory=3GB", "hardware.host_memory=4900MB", "hardware.link=25GB/s", "hardware.tflops=1"]
        words += ["hardware.memory_bandwidth=10GB/s", "engine.kind=stream", "activation_checkpoint=full"]
        tight = Sweep("tight", Home(tmp_path), space, base_tree(space, "cpu", "lm-tiny", words), resumed=False)
        with pytest.raises(PlanError, match=r"^plan 1: plan: .*; fits with "):
            self.said(tight)

    def test_a_trial_larger_than_the_machine_is_refused(self, tmp_path):
        space = build_space({"keys": {"optim.lr": {"grid": [1e-3]}}, "budget": {"steps": 4}})
        large = Sweep("large", Home(tmp_path), space, base_tree(space, "cpu", "lm-tiny", ["resources.cpu=500"]), resumed=False)
        with pytest.raises(PlanError, match=r"^resources\.cpu: 1 worker of 500 CPU"):
            self.said(large)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune"], "SPACE: missing"),
        (["tune", "none.yaml"], "SPACE: none.yaml: cannot be read"),
        (["tune", "--resume", "none"], "NAME: 'none' is no sweep"),
        (["best", "none"], "NAME: 'none' is no sweep"),
    ],
)
def test_wrong_words_are_code_2_and_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLUXRAY_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fluxray: error: {message}") and err.count("\n") == 1
