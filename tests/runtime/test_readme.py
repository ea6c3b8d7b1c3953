"""Every command of the README that does not say what it needs, in its order and in one home; runs are small and short.

One training starts a Ray of its own, while the others join one by RAY_ADDRESS.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readme import commands_without_needs
from tests.runtime.forked import Done, fluxray
from tests.runtime.heads import Head, answers, running, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMMANDS = commands_without_needs(ROOT / "README.md")
ALONE = next(command for command in COMMANDS if command.startswith("fluxray train"))
OTHERS = [command for command in COMMANDS if command != ALONE and not command.startswith("fluxray ui")]
SMALL = [
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128",
    "data.max_slice=64",
    "optim.warmup_steps=2",
    "checkpoint.every_steps=2",
    "evaluation.max_rows=8",
    "hardware.tflops=1",
]
SAYS = {
    "fluxray train": "checkpoint  ",
    "fluxray evaluate": "first at step 8: loss ",
    "fluxray export": "exported first to ",
    "fluxray checkpoints": "step",
    "fluxray plan": "bound by",
    "fluxray sync": "MLflow has everything",
    "fluxray doctor": "Python",
    "fluxray top": "run",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, with what the README calls corpus.txt."""
    folder = tmp_path_factory.mktemp("shell")
    shutil.copyfile(ROOT / "tests" / "golden" / "corpus.txt", folder / "corpus.txt")
    return folder


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with running("disabled") as head:
        until(lambda: answers(head.address), "head")
        yield head


@pytest.fixture(scope="module")
def alone(shell: Path) -> Iterator["subprocess.Popen[str]"]:
    """The training with a Ray of its own, beside the commands before it is looked at."""
    process = start(shell, ALONE)
    yield process
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=60)


def shortened(command: str) -> list[str]:
    """Return the words of a command, with a hundredth of its steps."""
    words = shlex.split(re.sub(r"(train\.num_steps=|--step )(\d+)00\b", r"\1\2", command))[1:]
    return [*words, *(SMALL if words[0] == "train" else ())]


def environment_of(shell: Path, **joining: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLUXRAY_"))}
    own = {"FLUXRAY_HOME": str(shell / "home"), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "PYTHONPATH": str(ROOT)}
    return {**kept, **own, **joining}


def start(shell: Path, command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "from fluxray.cli import main; main()", *shortened(command)],
        cwd=shell,
        env={**environment_of(shell), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def joined(head: Head, shell: Path, command: str) -> Done:
    words = shortened(command)
    joining = {"RAY_ADDRESS": head.address, "RAY_AUTH_MODE": head.mode} if words[0] in ("train", "evaluate") else {}
    return fluxray(words, shell, environment_of(shell, **joining), shell / f"said-{OTHERS.index(command)}")


def check(command: str, done: Done) -> None:
    assert done.code == 0 or (command.startswith("fluxray doctor") and done.code == 1), done.err[-3000:]
    assert SAYS[" ".join(command.split()[:2])] in done.out
    assert "Traceback" not in done.err


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("command", [command for command in OTHERS if not command.startswith("fluxray sync")])
def test_a_command_of_the_readme_does_what_it_says(head: Head, shell: Path, command: str) -> None:
    check(command, joined(head, shell, command))


def test_a_training_of_the_readme_starts_a_ray_of_its_own(alone: "subprocess.Popen[str]") -> None:
    out, err = alone.communicate(timeout=280)
    check(ALONE, Done(alone.returncode, out, err))


@pytest.mark.parametrize("command", [command for command in OTHERS if command.startswith("fluxray sync")])
def test_mlflow_has_all_of_it(head: Head, shell: Path, command: str) -> None:
    check(command, joined(head, shell, command))


def test_the_pages_open(shell: Path) -> None:
    assert "fluxray ui" in COMMANDS
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = start(shell, f"fluxray ui --port {port}")
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}" in process.stdout.readline()
    finally:
        process.send_signal(signal.SIGTERM)  # a SIGINT is ignored by what a shell runs in the background
        process.communicate(timeout=30)
    assert process.returncode == 0
