"""`ray job submit`, `ray job stop` and their outcomes on heads that `ray start` made, with and without authentication."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlflow
import psutil
import pytest

from fluxray import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MARK = "FLUXRAY_TEST_HEAD"
"""A variable that every process of a head inherits, whoever its parent is by then."""

NUM_STEPS = 60
PORTS = (
    "--port",
    "--ray-client-server-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
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
PRELOADED = "import sys; from ray.scripts.scripts import main; sys.stdin.readline(); main()"
"""The `ray` command, loaded and waiting for a line: a stop that takes seconds to load would find a short run at its end."""


@dataclass
class Head:
    """A Ray head of one node, and a client of it in a folder of its own."""

    mode: str
    folder: Path
    address: str
    client: dict[str, str]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def ray(self, *words: str, **changes: str) -> "subprocess.Popen[str]":
        """Start a command of Ray's, as a user of this head would from elsewhere."""
        return self._start([str(BIN / "ray"), *words], changes)

    def preloaded(self, *words: str) -> "subprocess.Popen[str]":
        return self._start([sys.executable, "-c", PRELOADED, *words], {})

    def submit(self, job: str, *words: str, **changes: str) -> "subprocess.Popen[str]":
        job_words = ("job", "submit", "--working-dir", str(ROOT), "--submission-id", job)
        return self.ray(*job_words, "--", "python", "jobs/train.py", *words, f"storage={self.home}", **changes)

    def job(self, job: str) -> dict[str, object]:
        """Return what the job server knows of a job."""
        from ray.dashboard.modules.job.sdk import JobSubmissionClient

        headers = {"Authorization": f"Bearer {self.client['RAY_AUTH_TOKEN']}"} if self.mode == "token" else None
        info = JobSubmissionClient(self.address, headers=headers).get_job_info(job)
        return {"status": str(info.status.value), "exit": info.driver_exit_code}

    def steps(self, name: str) -> int:
        """Return the newest step of a run that is going on."""
        texts = [path.read_text() for path in (self.home / "runs" / name / "tracking").glob("*.jsonl")]
        return max((int(step) for text in texts for step in re.findall(r'"step": ?(\d+)', text)), default=0)

    def losses(self, name: str) -> dict[int, float]:
        """Return the run's loss by step, each of which MLflow has once."""
        client = mlflow.MlflowClient(f"sqlite:///{self.home / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("fluxray")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id], f"tags.`fluxray.run` = '{name}'")
        assert run.info.status == "FINISHED"
        points = client.get_metric_history(run.info.run_id, "train/loss")
        assert sorted(point.step for point in points) == list(range(1, NUM_STEPS + 1))
        return {point.step: point.value for point in points}

    def _start(self, command: Sequence[str], changes: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.client, **changes},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.1)


def output(command: "subprocess.Popen[str]") -> str:
    return command.communicate(timeout=200)[0]


def answers(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), 1).close()
        return True
    return False


@contextlib.contextmanager
def running(mode: str) -> Iterator[Head]:
    """Start a head on free loopback ports; end every process that came of it, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="fluxray-", dir="/tmp"))  # Ray's sockets lie below it, and their paths must be short
    dashboard, *ports = free_ports(1 + len(PORTS))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLUXRAY_"))}
    environment |= {"HOME": str(folder), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": mode}
    if mode == "token":
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    address = f"http://127.0.0.1:{dashboard}"
    head = Head(mode, folder, address, {**environment, "RAY_API_SERVER_ADDRESS": address})
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--temp-dir={folder / 'ray'}", *(f"{option}={port}" for option, port in zip(PORTS, ports, strict=True))]
    settings = {"RAY_JOB_STOP_WAIT_TIME_S": "100", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", MARK: str(folder)}
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**environment, **settings}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield head
    finally:
        while left := marked(folder):  # again, for what was being started meanwhile
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            process.poll()
            time.sleep(0.1)
        process.wait(10)
        until(lambda: not remaining(folder), "end of the head's files", 20)


def remaining(folder: Path) -> bool:
    """Delete the folder; return whether a process that was just ending has written into it meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder.exists()


def marked(folder: Path) -> list[int]:
    """Return the ids of the processes that came of the head in `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.fixture(scope="module")
def heads() -> Iterator[dict[str, Head]]:
    with running("token") as token, running("disabled") as disabled:
        for head in (token, disabled):
            until(lambda head=head: answers(head.address), f"head with RAY_AUTH_MODE={head.mode}")
        yield {"token": token, "disabled": disabled}


@pytest.fixture(scope="module")
def undisturbed(heads: dict[str, Head]) -> "subprocess.Popen[str]":
    """A run that is let alone, on the head without authentication, while the others go on."""
    return heads["disabled"].submit("undisturbed", *TRAINING, "name=undisturbed")


@pytest.mark.usefixtures("undisturbed")
def test_a_stopped_job_saves_and_the_same_command_goes_on(heads: dict[str, Head]) -> None:
    head = heads["token"]
    submitted = head.submit("first", *TRAINING, "name=stopped")
    stop = head.preloaded("job", "stop", "first")
    until(lambda: head.steps("stopped") >= 2, "step of the job")
    out, _ = stop.communicate("\n", timeout=120)
    assert stop.returncode == 0 and "was stopped" in out, out
    log = output(submitted)
    found = re.search(r"fluxray: stopped: run stopped was stopped at step (\d+) and saved; the same command with name=sto", log)
    assert found is not None, log[-3000:]
    assert 2 <= int(found[1]) < NUM_STEPS
    assert checkpoint.committed(head.home / "runs" / "stopped") == [head.home / "runs" / "stopped" / f"step_{int(found[1]):08d}"]
    assert head.job("first")["status"] == "STOPPED"

    resumed = head.submit("second", *TRAINING, "name=stopped")
    log = output(resumed)
    assert resumed.returncode == 0, log[-3000:]
    assert f"resumed at step {found[1]}" in log and f"run         stopped, finished at step {NUM_STEPS}" in log
    assert head.job("second") == {"status": "SUCCEEDED", "exit": 0}


def test_an_undisturbed_job_has_the_same_losses_to_the_bit(heads: dict[str, Head], undisturbed: "subprocess.Popen[str]") -> None:
    log = output(undisturbed)
    assert undisturbed.returncode == 0, log[-3000:]
    assert heads["disabled"].job("undisturbed") == {"status": "SUCCEEDED", "exit": 0}
    assert heads["token"].losses("stopped") == heads["disabled"].losses("undisturbed")


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_wrong_key_fails_the_job_with_exit_code_2_and_one_line(heads: dict[str, Head], mode: str) -> None:
    submitted = heads[mode].submit("wrong", *TRAINING, "optim.lrr=1")
    log = output(submitted)
    assert submitted.returncode == 1
    assert "\nfluxray: error: optim.lrr: unknown key; did you mean optim.lr?" in log and "Traceback" not in log, log
    assert heads[mode].job("wrong") == {"status": "FAILED", "exit": 2}


def test_a_client_without_the_token_is_refused_before_anything_is_uploaded(heads: dict[str, Head]) -> None:
    submitted = heads["token"].submit("anyone", *TRAINING, RAY_AUTH_MODE="disabled")
    assert "uthentication" in output(submitted)
    assert submitted.returncode == 1
    listed = heads["token"].ray("job", "list")
    assert "anyone" not in output(listed)
    assert json.loads("0") == listed.returncode
