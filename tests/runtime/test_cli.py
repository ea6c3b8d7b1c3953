import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fluxray import cli

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "mlflow", "transformers", "pydantic", "rich", "numpy")


def run(*words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code


def test_help_is_fast_and_imports_nothing_heavy():
    code = "import sys; sys.argv = ['fluxray', '--help']; from fluxray.cli import main; main()"
    command = [sys.executable, "-X", "importtime", "-c", code]
    took = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        took.append(time.perf_counter() - start)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not imported & set(HEAVY)
    assert "train" in done.stdout
    assert min(took) < 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--profile", "cpu", "--model", "lm-tiny", "optim.lrr=1"], "optim.lrr: unknown key; did you mean optim.lr?"),
        (["train", "--profile", "gpu"], "--profile"),
        (["train", "--prfile", "cpu"], "--profile"),
        (
            ["train", "--profile", "a6000", "--model", "neox-20b", "precision=amp-fp16", "optim.master=fp32"],
            "precision: 'amp-fp16'",
        ),
        (["train", "--profile", "cpu", "--model", "flux2-dev"], "data.cache: null"),
        (["plan", "--profile", "a6000"], "model.config.model_type: is missing"),
        (["trian"], "train"),
        (["evaluate", "nothing"], "there is no run yet"),
        (["export", "nothing", "out"], "there is no run yet"),
        (["export", "nothing"], "DIR"),
        (["checkpoints", "nothing"], "there is no run yet"),
        (["checkpoints", "nothing", "--step", "3"], "--step: has no effect without --copy"),
        (["sync", "nothing"], "there is no run yet"),
        (["ui"], "holds no tracked run yet"),
        (["ui", "--port", "x"], "--port"),
    ],
)
def test_a_fault_of_the_user_is_one_line_and_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXRAY_HOME", str(tmp_path / "home"))
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fluxray: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not (tmp_path / "home").exists()


def test_a_plan_that_does_not_fit_is_refused_before_data_or_ray(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXRAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster that nobody has reached when this ends
    assert run("train", "--profile", "a6000", "--model", "neox-20b", "hardware.host_memory=64GiB") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fluxray: error: plan: host memory lacks ") and captured.err.count("\n") == 1
    assert captured.err.endswith("no single change or two of them would fit\n") or "; fits with " in captured.err
    assert not (tmp_path / "home").exists()


def test_config_marks_what_is_not_the_default_and_says_where_it_comes_from(capsys):
    assert run("config", "--profile", "cpu", "--model", "lm-tiny", "optim.lr=3e-4") == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line[2:].split()[0]: line for line in lines}
    assert found["optim.lr"].startswith("* ")
    assert found["optim.lr"].endswith("0.0003  (override)")
    assert found["resources.cpu"].endswith("0.9  (profile cpu)")
    assert found["data.max_slice"].endswith("128  (model lm-tiny)")
    assert found["optim.beta1"].startswith("  ")
    assert found["optim.beta1"].endswith("0.9")


def test_config_marks_no_default_of_a_kind_that_was_chosen(capsys):
    assert run("config", "--profile", "a6000", "--model", "flux1-tiny", "task.timestep_std=2") == 0
    found = {line[2:].split()[0]: line[0] for line in capsys.readouterr().out.splitlines()}
    assert (found["task.kind"], found["task.timestep_std"], found["task.first_loss"]) == ("*", "*", " ")
    assert (found["engine.kind"], found["engine.weight_slots"]) == ("*", " ")


def test_config_as_yaml_holds_every_key(capsys):
    assert run("config", "--profile", "fsdp8", "--model", "flux2-seed", "--yaml") == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["resources"]["num_workers"] == 8
    assert tree["optim"]["eps"] == 1e-6


@pytest.mark.parametrize("words", [(), ("--yaml",)])
def test_config_shows_no_password(words, capsys):
    assert run("config", "--profile", "cpu", "tracking.uri=postgresql://me:hidden@db/mlflow", *words) == 0
    out = capsys.readouterr().out
    assert "hidden" not in out and "postgresql://***@db/mlflow" in out


def test_no_words_at_all_is_help(capsys):
    assert run() == 0
    assert "Commands:" in capsys.readouterr().out


def test_the_job_script_works_from_anywhere_without_an_installed_fluxray(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"""
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.argv = ["train.py", "--profile", "cpu", "--model", "lm-tiny", "optim.lrr=1"]
runpy.run_path({str(ROOT / "jobs" / "train.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 2
    assert done.stderr == "fluxray: error: optim.lrr: unknown key; did you mean optim.lr?\n"


def test_the_command_that_opens_the_pages_is_one_that_the_shell_finds(tmp_path, monkeypatch):
    beside = tmp_path / ".venv" / "bin" / "fluxray"
    beside.parent.mkdir(parents=True)
    beside.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    monkeypatch.setenv("PATH", str(beside.parent))
    assert cli._ui_hint(None) == "fluxray ui"
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli._ui_hint("/data") == f"{beside} ui --storage /data"
    monkeypatch.chdir(tmp_path)
    assert cli._ui_hint(None) == ".venv/bin/fluxray ui"


def test_sigterm_before_there_is_a_step_to_finish_is_a_stop(tmp_path):
    command = [sys.executable, "-u", "-c", "from fluxray.cli import main; main()", "train", "--profile=cpu", "--model=lm-tiny"]
    environment = {**os.environ, "FLUXRAY_HOME": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and "preparing" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "fluxray: stopped: nothing is running any more\n")
    assert not (tmp_path / "runs").exists()
