"""A sweep on a real Ray: 2 x 2 trials of 20 steps, two at a time; its driver is killed and starts again.

One trial diverges, one runs out of memory, and a fifth could never have started.
"""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from fluxray.config.space import read_space
from fluxray.config.trials import base_tree, plan_trials
from fluxray.errors import NonFiniteLossError
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.paths import committed_checkpoints
from fluxray.runtime.points import read_points
from fluxray.runtime.sweep_table import read_table
from fluxray.runtime.sweeps import read_outcome
from tests.runtime.forked import load, start
from tests.runtime.heads import answers, running, until
from tests.runtime.short import SHORT_AT, run_short

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SPACE = """
keys:
  batch.micro_size: {grid: [4, 2]}
  batch.accumulation_steps:
    - {grid: [1], when: {batch.micro_size: 4}}
    - {grid: [2]}
  optim.lr:
    - {grid: [1.0e-3, 1.0e+30], when: {batch.micro_size: 4}}
    - {grid: [1.0e-3, 2.0e-3, -1.0]}
  engine.kind: {grid: [stream], when: {optim.lr: 2.0e-3}}  # has a plan, on a CPU too
  activation_checkpoint: {grid: [full], when: {engine.kind: stream}}
fixed:
  model.config.hidden_size: 64
  model.config.num_hidden_layers: 1
  model.config.intermediate_size: 64
  model.config.vocab_size: 512
  data.max_slice: 32
  evaluation.max_rows: 4
  hardware.tflops: 1
  tracking.system_metrics_s: 0
  train.log_every: 1
budget: {steps: 20, evaluations: 4}
"""
NAMES = ["grid-000", "grid-001", "grid-002", "grid-003", "grid-004"]
STATUS = ["ended", "failed", "ended", "failed", "failed"]


def reference(folder, number):
    """Return the held-out losses of a trial that runs alone, in this process and undisturbed."""
    space = read_space(folder / "grid.yaml")
    config = plan_trials(space, base_tree(space, "cpu", "lm-tiny", source(folder))).trials[number].config
    assert config is not None
    from fluxray.runtime.worker import run_worker

    found: dict[int, dict[str, float]] = {}

    def report(one):
        found.setdefault(one.step, {}).update(one.metrics)

    place = folder / f"alone-{number}"
    context = WorkerContext(0, 1, 0, place, folder / "cache", report, lambda _: False, [], lambda _: None)
    with contextlib.suppress(NonFiniteLossError):
        run_worker(config, context)
    return found


def source(folder):
    return [f"data.source=path:{ROOT / 'tests' / 'golden' / 'corpus.txt'}", f"storage={folder / 'home'}"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep whose driver was killed once, and what each of its two drivers said."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "grid.yaml").write_text(SPACE)
    words = ["tune", "grid.yaml", "--profile", "cpu", "--model", "lm-tiny", "name=grid", *source(folder)]
    sweep_dir, run_dir = folder / "home" / "sweeps" / "grid", folder / "home" / "runs" / "grid-000"
    load()
    with running("disabled") as head:
        until(lambda: answers(head.address), "head")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLUXRAY_"))}
        environment = {**kept, "RAY_ADDRESS": head.address, "RAY_AUTH_MODE": head.mode, "PYTHONPATH": str(ROOT)}
        environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # a process of each trial that takes a second of a core
        first = start(words, folder, environment, folder / "first", run_short)
        until(lambda: first.exitcode is not None or (read_points(run_dir) and read_outcome(sweep_dir, 1)), "points", 600)
        assert first.exitcode is None, (folder / "first" / "err").read_text()[-3000:]
        os.kill(first.pid or 0, signal.SIGKILL)
        first.join()
        points = len(read_points(run_dir))
        ended = {number for number in range(4) if read_outcome(sweep_dir, number)}
        resumed = ["tune", "--resume", "grid", f"storage={folder / 'home'}", "--strict"]
        second = start(resumed, folder, environment, folder / "second", run_short)
        second.join(600)
        logs = "".join(path.read_text(errors="replace") for path in (head.folder / "ray").glob("session_2*/logs/worker*.out"))
    said = [(folder / name / "out").read_text() for name in ("first", "second")]
    return folder, [first.exitcode, second.exitcode], said, (points, ended, logs), (folder / "second" / "err").read_text()


def test_the_first_driver_was_killed_in_the_midst(swept):
    _, codes, said, (points, ended, _), err = swept
    assert codes == [-signal.SIGKILL, 1], err[-3000:]
    assert "sweep grid starts: 4 trials, 2 at a time" in said[0]
    assert points >= 1
    assert 1 in ended and 3 not in ended
    assert "Traceback" not in err


def test_no_trial_that_had_ended_runs_again_and_others_go_on(swept):
    _, _, said, (points, ended, logs), _ = swept
    begun = [
        int(line.split()[1].rstrip(":")) for line in said[1].splitlines() if line.startswith("trial ") and ": batch." in line
    ]
    assert len(set(begun)) == len(begun)
    assert not set(begun) & ended
    assert 3 in begun
    if points in (1, 2, 3):
        assert "resumed at step" in logs


def test_the_table_is_that_of_undisturbed_trials(swept, one_thread):
    folder = swept[0]
    table = read_table(folder / "home" / "sweeps" / "grid")
    assert [(trial.run, trial.status) for trial in table.trials] == list(zip(NAMES, STATUS, strict=True))
    for number, steps in ((0, [5, 10, 15, 20]), (2, [5, 10, 15, 20]), (3, [5, 10])):
        alone = reference(folder, number)
        history = table.trials[number].history
        assert [point.step for point in history] == steps
        assert [point.value for point in history] == pytest.approx([alone[step]["eval/loss"] for step in steps], rel=1e-6)
        assert [point.tokens for point in history] == [alone[step]["train/tokens"] for step in steps]
        assert [point.seconds for point in history] == sorted(point.seconds for point in history)
    assert table.winner is not None and table.winner.trial in (0, 2)


def test_a_trial_that_fails_is_listed_with_its_reason_and_strict_is_code_1(swept):
    folder, _, said, _, err = swept
    plan = folder / "home" / "runs" / "grid-003" / "plan.txt"
    assert plan.exists()
    lines = said[1].splitlines()
    assert any(line.startswith("trial 1 failed: optim.lr: 1e+") for line in lines)
    assert any(line.startswith("trial 4 failed: optim.lr: -1") for line in lines)
    hint = "train.on_oom=ladder would go on with batch.micro_size=1 batch.accumulation_steps=4"
    assert f"trial 3 failed: run grid-003: out of memory in step {SHORT_AT} (rank 0); {hint}; its plan: {plan}" in lines
    assert "sweep grid: 5 trials: 2 ended, 3 failed" in lines
    assert err.splitlines()[-1] == "fluxray: failed: sweep grid: 3 of 5 trials failed, and --strict is set"


@pytest.fixture(scope="module")
def recorded(swept):
    """MLflow's runs by name, and a client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{swept[0] / 'home' / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("fluxray").experiment_id])
    assert sorted(run.info.run_name for run in found) == ["grid", *NAMES[:4]], "no run twice, none of what never started"
    return {run.info.run_name: run for run in found}, client


def test_mlflow_has_a_parent_and_each_trial_once_with_each_point_once(swept, recorded):
    runs, client = recorded
    parent = runs["grid"].info.run_id
    table = read_table(swept[0] / "home" / "sweeps" / "grid")
    assert table.head.mlflow == parent
    for trial in table.trials[:4]:
        run = runs[trial.run]
        assert trial.mlflow == run.info.run_id
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.tags["sweep.optim.lr"] == json.dumps(trial.keys["optim.lr"])
        assert run.data.tags["fluxray.status"] == trial.status
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "eval/loss")]
        assert steps == [point.step for point in trial.history]
        losses = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
        assert trial.status == "failed" or losses == list(range(1, 21))
    best = [name for name, run in runs.items() if run.data.tags.get("fluxray.best") == "true"]
    assert best == [table.winner and table.winner.run]
    assert runs["grid"].info.status == "FINISHED"
    assert {"space.yaml", "environment.json", "trials.jsonl", "report.html", "pictures"} <= {
        file.path for file in client.list_artifacts(parent)
    }


def test_equal_products_of_micro_batch_and_accumulation_have_equal_first_losses(recorded):
    runs, client = recorded
    first = [client.get_metric_history(runs[name].info.run_id, "train/loss")[0] for name in ("grid-000", "grid-002")]
    assert [metric.step for metric in first] == [1, 1]
    assert first[0].value == pytest.approx(first[1].value, rel=1e-6)


def test_only_the_best_keeps_its_checkpoint(swept):
    table = read_table(swept[0] / "home" / "sweeps" / "grid")
    kept = [name for name in NAMES if committed_checkpoints(swept[0] / "home" / "runs" / name)]
    assert kept == [table.winner and table.winner.run]
