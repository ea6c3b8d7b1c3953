import json
import re

import pytest

from fluxray.config.schema import TrainConfig
from fluxray.errors import CheckpointError, ConfigError
from fluxray.runtime.paths import (
    REGISTRY_COPY,
    REGISTRY_FILE,
    Home,
    RegistryKeeper,
    committed_checkpoints,
    find_run,
    forget_missing_checkpoints,
    home,
    mend_registry,
    new_run_name,
    registered_checkpoints,
    write_text,
)


@pytest.fixture
def where(tmp_path):
    for name in ("lm-tiny-1", "lm-tiny-2", "other"):
        write_text(tmp_path / "runs" / name / "config.yaml", "")
    return Home(tmp_path)


def register(run_dir, steps, exist=None):
    run_dir.mkdir(parents=True, exist_ok=True)
    results = [{"checkpoint_dir_name": f"step_{step:08d}", "metrics": {"step": step}} for step in steps]
    for step in steps if exist is None else exist:
        (run_dir / f"step_{step:08d}").mkdir(exist_ok=True)
    registry = {
        "ray_version": "2.60.0",
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(steps))),
        "latest_checkpoint_result": results[-1],
        "current_report_index": len(steps),
    }
    (run_dir / REGISTRY_FILE).write_text(json.dumps(registry))


def test_storage_goes_before_the_environment_which_goes_before_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("FLUXRAY_HOME", raising=False)
    assert home().root == tmp_path / "user" / ".fluxray"
    monkeypatch.setenv("FLUXRAY_HOME", "relative")
    monkeypatch.chdir(tmp_path)
    assert home().root == tmp_path / "relative"
    assert home("/elsewhere").runs.as_posix() == "/elsewhere/runs"


@pytest.mark.parametrize(
    ("label", "stem"),
    [
        ("lm-tiny", "lm-tiny"),
        ("hf:EleutherAI/pythia-70m", "pythia-70m"),
        ("path:/a/my model/", "my-model"),
        ("path:..", "run"),
        ("x" * 300, "x" * 60),
    ],
)
def test_run_names_are_new_and_valid(tmp_path, label, stem):
    names = {new_run_name(label, tmp_path) for _ in range(20)}
    assert len(names) > 1
    for name in names:
        assert re.fullmatch(re.escape(stem) + r"-\d{8}-\d{6}-[0-9a-f]{4}", name)
        assert TrainConfig(name=name).name == name


def test_a_run_is_found_by_name_and_by_folder(where, monkeypatch):
    run_dir = where.runs / "other"
    assert find_run("other", where) == find_run(str(run_dir), where) == run_dir
    monkeypatch.chdir(where.runs)
    assert find_run("./other", Home(where.root / "elsewhere")) == run_dir


def test_an_unknown_run_is_refused_with_the_nearest_names(where, tmp_path):
    with pytest.raises(ConfigError, match=r"'lm-tiny' is neither .*did you mean lm-tiny-\d or lm-tiny-\d\?"):
        find_run("lm-tiny", where)
    with pytest.raises(ConfigError, match="there is no run yet"):
        find_run("x", Home(tmp_path / "empty"))


def test_only_what_ray_registered_is_committed(tmp_path):
    assert committed_checkpoints(tmp_path) == []
    register(tmp_path, [200, 400])
    (tmp_path / "step_00000600").mkdir()
    assert [path.name for path in committed_checkpoints(tmp_path)] == ["step_00000400", "step_00000200"]


def test_without_a_registry_every_complete_checkpoint_counts(tmp_path):
    for name in ("step_00000200", "step_00000400", "step_00000600.partial"):
        (tmp_path / name).mkdir()
    assert [path.name for path in committed_checkpoints(tmp_path)] == ["step_00000400", "step_00000200"]
    assert registered_checkpoints(tmp_path) == []


def test_a_vanished_checkpoint_leaves_the_registry(tmp_path):
    register(tmp_path, [200, 400, 600], exist=[200, 400])
    assert forget_missing_checkpoints(tmp_path) == ["step_00000600"]
    registry = json.loads((tmp_path / REGISTRY_FILE).read_text())
    assert registry["latest_checkpoint_result"]["checkpoint_dir_name"] == "step_00000400"
    assert registry["checkpoint_report_indices"] == [0, 1]
    assert forget_missing_checkpoints(tmp_path) == []


def test_a_registry_without_any_checkpoint_left_is_dropped(tmp_path):
    register(tmp_path, [200], exist=[])
    assert forget_missing_checkpoints(tmp_path) == ["step_00000200"]
    assert not (tmp_path / REGISTRY_FILE).exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"checkpoint_results": [{"checkpoint_dir_name": "../other"}]}'])
def test_a_damaged_registry_is_refused(tmp_path, text):
    (tmp_path / REGISTRY_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=REGISTRY_FILE):
        committed_checkpoints(tmp_path)


def test_a_registry_cut_off_in_its_writing_is_what_it_was_before(tmp_path):
    keeper = RegistryKeeper(tmp_path)
    keeper.keep()
    register(tmp_path, [200, 400])
    keeper.keep()
    before = json.loads((tmp_path / REGISTRY_FILE).read_text())
    register(tmp_path, [200, 400, 600])
    whole = (tmp_path / REGISTRY_FILE).read_text()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / REGISTRY_FILE).write_text(whole[:length])
        keeper.keep()
        assert [path.name for path in committed_checkpoints(tmp_path)] == ["step_00000400", "step_00000200"]
        assert mend_registry(tmp_path)
        assert json.loads((tmp_path / REGISTRY_FILE).read_text()) == before
        assert not mend_registry(tmp_path)


def test_a_registry_is_copied_when_it_has_changed(tmp_path):
    keeper = RegistryKeeper(tmp_path)
    register(tmp_path, [200])
    keeper.keep()
    (tmp_path / REGISTRY_COPY).unlink()
    keeper.keep()
    assert not (tmp_path / REGISTRY_COPY).exists()
    register(tmp_path, [200, 400])
    keeper.keep()
    assert (tmp_path / REGISTRY_COPY).read_text() == (tmp_path / REGISTRY_FILE).read_text()
