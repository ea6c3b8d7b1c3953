"""The main job as a user runs it: through a real Ray, on real text, tracked in a real MLflow database."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fluxray import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "--profile=cpu",
    "--model=lm-tiny",
    f"data.source=path:{ROOT / 'tests' / 'golden' / 'corpus.txt'}",
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128",
    "optim.warmup_steps=5",
    "train.num_steps=20",
    "evaluation.max_rows=16",
    "hardware.tflops=1",
]
CLI = ["-c", "from fluxray.cli import main; main()"]
EIGHT_WORKERS = ["resources.num_workers=8", "resources.cpu=0.2", "batch.micro_size=1"]


def fluxray(home: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours with its own home, from another folder, as a job does."""
    environment = {**os.environ, "FLUXRAY_HOME": str(home), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def history(home: Path, name: str, key: str) -> dict[int, float]:
    """Return one metric of a run by step, as MLflow has it."""
    client = mlflow.MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fluxray")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`fluxray.run` = '{name}'")
    assert run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, key)
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def one_worker(home: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = fluxray(home, elsewhere, str(ROOT / "jobs" / "train.py"), *SETTINGS, "name=one")
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_job_ends_by_naming_what_it_made(home: Path, one_worker: subprocess.CompletedProcess[str]) -> None:
    run_dir = home / "runs" / "one"
    assert f"checkpoint  {run_dir / 'step_00000020'}" in one_worker.stdout
    assert re.search(r"^run +one, finished at step 20$", one_worker.stdout, re.MULTILINE)
    assert re.search(r"^held-out +loss \d\.\d+, perplexity \d+\.\d+$", one_worker.stdout, re.MULTILINE)
    assert "fluxray ui" in one_worker.stdout
    assert re.search(r"step \d+/20 +loss \d\.\d+", one_worker.stdout)
    assert checkpoint.committed(run_dir) == [run_dir / "step_00000020"]


@pytest.mark.usefixtures("one_worker")
def test_every_step_is_in_mlflow(home: Path) -> None:
    for key in ("train/loss", "train/lr", "train/grad_norm"):
        assert sorted(history(home, "one", key)) == list(range(1, 21))
    for key in ("perf/tokens_per_s", "perf/mfu", "memory/host_gib", "eval/loss", "eval/perplexity"):
        assert 20 in history(home, "one", key)
    losses = history(home, "one", "train/loss")
    assert losses[20] < losses[1] - 0.5


@pytest.mark.usefixtures("one_worker")
def test_evaluate_and_export_take_the_run_by_name(home: Path, tmp_path: Path) -> None:
    evaluated = fluxray(home, tmp_path, *CLI, "evaluate", "one")
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    loss = history(home, "one", "eval/loss")[20]
    assert evaluated.stdout.startswith("evaluating one: starting\nloading data, model and checkpoint\n")
    assert f"{loss:.4f}" in evaluated.stdout

    exported = fluxray(home, tmp_path, *CLI, "export", "one", "model")
    assert exported.returncode == 0, exported.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("The import statement", return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() < 8.4


@pytest.mark.usefixtures("one_worker")
def test_eight_sharded_workers_train_to_the_same_losses(home: Path, tmp_path: Path) -> None:
    done = fluxray(home, tmp_path, str(ROOT / "jobs" / "train.py"), *SETTINGS, *EIGHT_WORKERS, "name=eight")
    assert done.returncode == 0, done.stderr[-3000:]
    single, sharded = history(home, "one", "train/loss"), history(home, "eight", "train/loss")
    assert [sharded[step] for step in range(1, 21)] == pytest.approx([single[step] for step in range(1, 21)], rel=1e-4)
    assert len(list((home / "runs" / "eight" / "step_00000020").glob("weights-*-of-00008.safetensors"))) == 8
