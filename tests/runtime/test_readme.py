"""Every command of the README that does not say what it needs, in its order and in one home; runs are small and short."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import commands_without_needs

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMMANDS = commands_without_needs(ROOT / "README.md")
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
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, with what the README calls corpus.txt."""
    folder = tmp_path_factory.mktemp("shell")
    shutil.copyfile(ROOT / "tests" / "golden" / "corpus.txt", folder / "corpus.txt")
    return folder


def start(shell: Path, command: str) -> "subprocess.Popen[str]":
    """Start a command with a hundredth of its steps."""
    words = shlex.split(re.sub(r"(train\.num_steps=|--step )(\d+)00\b", r"\1\2", command))[1:]
    environment = {**os.environ, "FLUXRAY_HOME": str(shell / "home"), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-c", "from fluxray.cli import main; main()", *words, *(SMALL if words[0] == "train" else ())],
        cwd=shell,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("fluxray ui")])
def test_a_command_of_the_readme_does_what_it_says(shell: Path, command: str) -> None:
    process = start(shell, command)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0 or (command.startswith("fluxray doctor") and process.returncode == 1), err[-3000:]
    assert SAYS[" ".join(command.split()[:2])] in out
    assert "Traceback" not in err


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
