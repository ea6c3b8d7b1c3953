import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray._private.runtime_env import packaging

from fluxray.runtime import upload
from fluxray.runtime.upload import MIB, Upload, measure, refuse_too_large

ROOT = Path(__file__).parents[2]


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)  # takes no room on the disk


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with something for every rule by which Ray leaves files out."""
    folder = tmp_path / "checkout"
    for name in ("jobs/train.py", "fluxray/cli.py", "data/corpus.jsonl", "data/deep/own.bin"):
        write(folder / name, 1000)
    for name in (".git/objects/x", ".venv/lib/x", "fluxray/__pycache__/x", "runs/x", "weights.pt", "data/deep/x.tmp"):
        write(folder / name, 200 * MIB)
    (folder / ".gitignore").write_text("runs/\n")
    (folder / ".rayignore").write_text("*.pt\n")
    (folder / "data" / "deep" / ".rayignore").write_text("*.tmp\n")
    return folder


def test_the_files_that_ray_packs_are_counted(checkout: Path, tmp_path: Path) -> None:
    found = measure(checkout)
    package = tmp_path / "package.zip"
    packaging.create_package(str(checkout), package, True, excludes=ray_constants.get_runtime_env_default_excludes())
    with zipfile.ZipFile(package) as packed:
        assert found.size == sum(file.file_size for file in packed.infolist())
    assert found.size < package.stat().st_size < found.size + 5000, "Ray does not compress"
    assert (found.largest, found.complete, found.is_too_large) == ("data", True, False)


def test_what_is_too_large_is_named_and_refused_on_one_line(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(checkout / "data" / "more.bin", 100 * MIB)
    assert measure(checkout).is_too_large
    monkeypatch.chdir(checkout)
    with pytest.raises(SystemExit) as end:
        refuse_too_large(working_dir=".", address=None, entrypoint=("python", "jobs/train.py"))
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"fluxray: error: --working-dir: {checkout} is 100.0 MiB (most in data: 100.0), and Ray's job server takes"
    )
    assert ".rayignore" in told and told.count("\n") == 1


@pytest.mark.parametrize("working_dir", [None, "s3://bucket/code.zip", "/no/such/folder", str(ROOT)])
def test_everything_else_is_left_to_ray(working_dir: str | None) -> None:
    refuse_too_large(working_dir=working_dir)


def test_a_folder_of_millions_of_files_is_counted_for_some_seconds_only(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "WALK_S", -1.0)
    found = measure(checkout)
    assert not found.complete and str(found).startswith("more than ")


def test_the_size_is_said_in_words() -> None:
    assert str(Upload(3 * MIB, "data", 2 * MIB)) == "3.0 MiB (most in data: 2.0)"
    assert str(Upload(0, "", 0)) == "0.0 MiB"


def test_ray_calls_the_check_before_it_looks_for_a_server(checkout: Path) -> None:
    write(checkout / "data" / "more.bin", 100 * MIB)
    environment = {**os.environ, "RAY_JOB_SUBMIT_HOOK": "fluxray.runtime.upload.refuse_too_large"}
    environment["RAY_API_SERVER_ADDRESS"] = "http://127.0.0.1:9"
    command = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--working-dir", ".", "--", "python", "jobs/train.py"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fluxray: error: --working-dir: ") and "Traceback" not in done.stderr


def test_this_checkout_is_far_from_the_limit() -> None:
    assert measure(ROOT).size < 10 * MIB
