import pytest

from fluxray.config.load import from_yaml, resolve
from fluxray.errors import ConfigError
from fluxray.runtime.prepare import changed_keys, prepare, save_config


def config(tmp_path, **overrides):
    return resolve("cpu", "lm-tiny", {"name": "r", "storage": str(tmp_path), **overrides})


def test_a_new_run_has_name_storage_and_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLUXRAY_HOME", str(tmp_path / "home"))
    run = prepare(resolve("cpu", "lm-tiny", {"data.source": "path:a.txt", "data.tokenizer": "path:tok"}), "lm-tiny")
    assert run.resumed is None
    assert run.run_dir == tmp_path / "home" / "runs" / str(run.config.name)
    assert run.config.storage == str(tmp_path / "home")
    assert run.config.data.source == (f"path:{tmp_path}/a.txt",)
    assert run.config.data.tokenizer == f"path:{tmp_path}/tok"
    assert not (tmp_path / "home").exists(), "nothing is written before the checks have passed"


def test_caches_and_published_image_models_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {
        "data.cache": "photos",
        "data.eval_cache": "path:held/out",
        "model.weights": "path:FLUX.1-dev",
        "data.source": "folder:raw",
        "storage": str(tmp_path),
    }
    run = prepare(resolve("cpu", "flux1-tiny", words), "x")
    save_config(run)
    found = from_yaml(run.run_dir / "config.yaml")
    assert found == run.config and prepare(found, "x").resumed == {}
    assert (found.data.cache, found.data.eval_cache) == (f"{tmp_path}/photos", f"{tmp_path}/held/out")
    assert found.data.source == (f"folder:{tmp_path}/raw",)
    assert found.model.weights == f"path:{tmp_path}/FLUX.1-dev"
    with pytest.raises(ConfigError, match=r"^data\.cache: 'hf:photos' is no folder; name one, such as data\.cache=FOLDER$"):
        prepare(resolve("cpu", "flux1-tiny", {**words, "data.cache": "hf:photos"}), "x")


def test_the_saved_configuration_reads_back_the_same(tmp_path):
    run = prepare(config(tmp_path), "lm-tiny")
    save_config(run)
    assert from_yaml(run.run_dir / "config.yaml") == run.config
    assert prepare(config(tmp_path), "lm-tiny").resumed == {}


def test_what_a_resume_may_change(tmp_path):
    save_config(prepare(config(tmp_path), "r"))
    free = {"train.num_steps": 300, "checkpoint.keep": 5, "resources.max_failures": 1, "train.log_every": 5}
    assert prepare(config(tmp_path, **free), "r").resumed == free


def test_what_a_resume_may_not_change_is_named_with_both_values(tmp_path):
    save_config(prepare(config(tmp_path), "r"))
    with pytest.raises(ConfigError, match=r"^optim\.lr: 0\.5, but run r was started with 0\.001; .*another name$"):
        prepare(config(tmp_path, **{"optim.lr": 0.5, "train.num_steps": 300}), "r")


def test_the_global_batch_may_be_cut_anew_but_not_resized(tmp_path):
    old = config(tmp_path)
    assert set(changed_keys(old, config(tmp_path, **{"batch.micro_size": 4, "resources.num_workers": 2}))) == {
        "batch.micro_size",
        "resources.num_workers",
    }
    assert set(changed_keys(old, config(tmp_path, **{"batch.dynamic": True}))) == {"batch.dynamic"}
    assert set(changed_keys(old, config(tmp_path, **{"model.fused_qkv": True}))) == {"model.fused_qkv"}
    with pytest.raises(ConfigError, match="global batch of 16 rows on 2 workers, but run r was started with 8"):
        changed_keys(old, config(tmp_path, **{"resources.num_workers": 2}))


def test_a_run_is_not_resumed_to_a_step_before_its_newest_checkpoint(tmp_path, monkeypatch):
    run = prepare(config(tmp_path), "r")
    save_config(run)
    monkeypatch.setattr("fluxray.runtime.prepare.committed_checkpoints", lambda _: [run.run_dir / "step_00000200"])
    assert prepare(config(tmp_path, **{"train.num_steps": 200}), "r").resumed == {}
    with pytest.raises(
        ConfigError, match=r"^train\.num_steps: 100, but step_00000200 is further; raise it, or set another name$"
    ):
        prepare(config(tmp_path, **{"train.num_steps": 100}), "r")


def test_values_are_named_as_they_are_written_on_the_command_line(tmp_path):
    save_config(prepare(config(tmp_path), "r"))
    with pytest.raises(ConfigError, match=r"^data\.source: 'path:/a', but run r was started with 'builtin:topics'; "):
        prepare(config(tmp_path, **{"data.source": "path:/a"}), "r")
