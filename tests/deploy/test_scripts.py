"""The image and the Slurm script: linted by their own linters, and the script run against stand-ins for srun and ray."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLURM, DOCKERFILE = ROOT / "deploy" / "slurm.sh", ROOT / "deploy" / "Dockerfile"

SRUN = """#!/bin/bash
shift
exec "$@"
"""
RAY = """#!/bin/bash
echo "$RAY_AUTH_MODE $RAY_memory_usage_threshold $RAY_AUTH_TOKEN" > "$RECORD/environment"
printf '%s\\n' "$@" > "$RECORD/arguments"
test ! -f "$RECORD/broken" || exit 0
while [ "$1" != -- ]; do shift; done
shift
"$@"
"""
PYTHON = """#!/bin/bash
printf '%s\\n' "$RAY_ADDRESS" "$@" > "$RECORD/job"
trap 'echo saved > "$RECORD/saved"; exit 130' TERM
touch "$RECORD/running"
while [ -f "$RECORD/wait" ]; do sleep 0.05; done
exit "$(cat "$RECORD/code")"
"""


def linter(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed; pip install -e '.[dev]' brings it")
    return path


def test_the_linters_have_nothing_to_say() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    for command in ([linter("shellcheck"), str(SLURM)], [linter("hadolint"), "--no-color", str(DOCKERFILE)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_unprivileged_small_and_wants_the_token() -> None:
    text = DOCKERFILE.read_text()
    assert re.search(r"^USER 1000$", text, flags=re.MULTILINE)
    assert "RAY_AUTH_MODE=token" in text and "--no-cache-dir" in text and "EXPOSE" not in text
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE) for word in line.split()}
    assert copied == kept and all((ROOT / name).exists() for name in kept)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the folder that the stand-ins write to; the script's environment is a folder with them in its bin."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("ray", RAY), ("python", PYTHON), ("activate", f'PATH={tmp_path}/bin:"$PATH"\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "code").write_text("0")
    return tmp_path


def start(record: Path) -> subprocess.Popen[str]:
    given = {"RECORD": record, "FLUXRAY_ENV": record, "FLUXRAY_HOME": record / "home", "TMPDIR": record}
    slurm = {"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 4711, "SLURM_JOB_NUM_NODES": 2, "SLURM_GPUS_ON_NODE": 8}
    env = {**os.environ, **{name: str(value) for name, value in (given | slurm).items()}}
    words = ["--profile", "fsdp8", "resources.label_selector={fluxray.io/pool: group}"]
    return subprocess.Popen(["bash", str(SLURM), *words], env=env, text=True, stderr=subprocess.PIPE)


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_slurm_runs_the_job_on_a_cluster_of_its_nodes_and_ends_as_it_ended(record: Path, code: int) -> None:
    (record / "code").write_text(str(code))
    assert start(record).wait(20) == code
    arguments = (record / "arguments").read_text().splitlines()
    options = arguments[1 : arguments.index("--")]
    given = dict(zip(options[::2], options[1::2], strict=False))
    assert arguments[0] == "symmetric-run"
    assert re.fullmatch(r"[\d.]+:24711", given["--address"])
    assert (given["--min-nodes"], given["--num-gpus"], given["--object-store-memory"]) == ("2", "8", "2000000000")
    job = (record / "job").read_text().splitlines()
    assert job == [given["--address"], "jobs/train.py", "--profile", "fsdp8", "resources.label_selector={fluxray.io/pool: group}"]
    mode, threshold, token = (record / "environment").read_text().split()
    assert (mode, threshold) == ("token", "0.98") and re.fullmatch(r"[0-9a-f]{64}", token)
    assert token not in (record / "arguments").read_text()
    assert not list(record.glob("tmp.*"))


def test_slurm_lets_the_run_save_when_its_time_is_over(record: Path) -> None:
    (record / "wait").touch()
    job = start(record)
    deadline = time.monotonic() + 20
    while not (record / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130
    assert (record / "saved").exists()


def test_nodes_that_do_not_become_a_cluster_are_a_failure(record: Path) -> None:
    (record / "broken").touch()
    job = start(record)
    assert job.wait(20) == 1
    assert job.stderr is not None and "did not become a Ray cluster" in job.stderr.read()
