"""`ray job submit`, `ray job stop` and their outcomes on heads that `ray start` made, with and without authentication."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlflow
import pytest
from ray.job_submission import JobSubmissionClient

from fluxray import checkpoint
from tests.runtime.heads import BIN, Head, answers, running, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 60
TRAINING = [
    "--profile=cpu",
    "--model=lm-tiny",
    f"data.source=path:{ROOT / 'tests' / 'golden' / 'corpus.txt'}",
    "data.max_slice=128",
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128",
    "batch.micro_size=4",
    "batch.accumulation_steps=2",
    "optim.warmup_steps=5",
    f"train.num_steps={NUM_STEPS}",
    "train.log_every=1",
    "evaluation.max_rows=8",
    "hardware.tflops=1",
]
RAY = (str(BIN / "ray"),)
PRELOADED = (sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.stdin.readline(); main()")
"""The `ray` command, and the same loaded and waiting for a line: a stop that first had to load would find a short run ended."""


def submit(head: Head, job: str, *words: str, ray: Sequence[str] = RAY, **changes: str) -> "subprocess.Popen[str]":
    command = [*ray, "job", "submit", "--working-dir", str(ROOT), "--submission-id", job]
    return head.start([*command, "--", "python", "jobs/train.py", *words, f"storage={head.home}"], **changes)


def output(command: "subprocess.Popen[str]", line: str | None = None) -> str:
    return command.communicate(line, timeout=200)[0]


def job_server(head: Head) -> JobSubmissionClient:
    headers = {"Authorization": f"Bearer {head.client['RAY_AUTH_TOKEN']}"} if head.mode == "token" else None
    return JobSubmissionClient(head.jobs, headers=headers)


def outcome(head: Head, job: str) -> dict[str, object]:
    """Return what the job server knows of a job's end."""
    info = job_server(head).get_job_info(job)
    return {"status": str(info.status.value), "exit": info.driver_exit_code}


def newest_step(head: Head, name: str) -> int:
    """Return the newest step of a run that is going on."""
    texts = [path.read_text() for path in (head.home / "runs" / name / "tracking").glob("*.jsonl")]
    return max((int(step) for text in texts for step in re.findall(r'"step": ?(\d+)', text)), default=0)


def losses(head: Head, name: str) -> dict[int, float]:
    """Return the run's loss by step, each of which MLflow has once."""
    client = mlflow.MlflowClient(f"sqlite:///{head.home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fluxray")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`fluxray.run` = '{name}'")
    assert run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in points) == list(range(1, NUM_STEPS + 1))
    return {point.step: point.value for point in points}


@pytest.fixture(scope="module")
def heads() -> Iterator[dict[str, Head]]:
    with running("token") as token, running("disabled") as disabled:
        for head in (token, disabled):
            until(lambda head=head: answers(head.jobs), f"head with RAY_AUTH_MODE={head.mode}")
        yield {"token": token, "disabled": disabled}


@pytest.fixture(scope="module")
def undisturbed(heads: dict[str, Head]) -> "subprocess.Popen[str]":
    """A run that is let alone, on the head without authentication, while the others go on."""
    return submit(heads["disabled"], "undisturbed", *TRAINING, "name=undisturbed")


@pytest.fixture(scope="module")
def wrong(heads: dict[str, Head]) -> "dict[str, subprocess.Popen[str]]":
    """A job with a wrong key on either head, beside the others."""
    return {mode: submit(head, "wrong", *TRAINING, "optim.lrr=1") for mode, head in heads.items()}


@pytest.mark.usefixtures("undisturbed")
def test_a_stopped_job_saves_and_the_same_command_goes_on(heads: dict[str, Head], request: pytest.FixtureRequest) -> None:
    head = heads["token"]
    submitted = submit(head, "first", *TRAINING, "name=stopped")
    stop = head.start([*PRELOADED, "job", "stop", "first"])
    resumed = submit(head, "second", *TRAINING, "name=stopped", ray=PRELOADED)
    until(lambda: newest_step(head, "stopped") >= 2, "step of the job")
    out = output(stop, "\n")
    assert stop.returncode == 0 and "was stopped" in out, out
    saved = checkpoint.committed(head.home / "runs" / "stopped")
    assert resumed.stdin is not None
    resumed.stdin.write("\n")
    resumed.stdin.flush()
    request.getfixturevalue("wrong")  # jobs that have their turn beside it
    log = output(submitted)
    found = re.search(r"fluxray: stopped: run stopped was stopped at step (\d+) and saved; the same command with name=sto", log)
    assert found is not None, log[-3000:]
    assert 2 <= int(found[1]) < NUM_STEPS
    assert saved == [head.home / "runs" / "stopped" / f"step_{int(found[1]):08d}"]
    assert outcome(head, "first")["status"] == "STOPPED"

    log = output(resumed)
    assert resumed.returncode == 0, log[-3000:]
    assert f"resumed at step {found[1]}" in log and f"run         stopped, finished at step {NUM_STEPS}" in log
    assert outcome(head, "second") == {"status": "SUCCEEDED", "exit": 0}


def test_an_undisturbed_job_has_the_same_losses_to_the_bit(heads: dict[str, Head], undisturbed: "subprocess.Popen[str]") -> None:
    log = output(undisturbed)
    assert undisturbed.returncode == 0, log[-3000:]
    assert outcome(heads["disabled"], "undisturbed") == {"status": "SUCCEEDED", "exit": 0}
    assert losses(heads["token"], "stopped") == losses(heads["disabled"], "undisturbed")


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_wrong_key_fails_the_job_with_exit_code_2_and_one_line(
    heads: dict[str, Head], wrong: "dict[str, subprocess.Popen[str]]", mode: str
) -> None:
    log = output(wrong[mode])
    assert wrong[mode].returncode == 1
    assert "\nfluxray: error: optim.lrr: unknown key; did you mean optim.lr?" in log and "Traceback" not in log, log
    assert outcome(heads[mode], "wrong") == {"status": "FAILED", "exit": 2}


def test_a_client_without_the_token_is_refused_before_anything_is_uploaded(heads: dict[str, Head]) -> None:
    head = heads["token"]
    submitted = submit(head, "anyone", *TRAINING, RAY_AUTH_MODE="disabled")
    assert "uthentication" in output(submitted)
    assert submitted.returncode == 1
    listed = [job.submission_id for job in job_server(head).list_jobs()]
    assert "first" in listed and "anyone" not in listed
