import subprocess
import sys

import pytest

from fluxray.config.load import build, flatten, from_yaml, layers, merge, origins, preset_names, resolve, to_yaml
from fluxray.config.schema import StreamEngineConfig, TrainConfig
from fluxray.errors import ConfigError

REPORT_A = (
    '{"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 8192,\n'
    '\t"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "max_position_embeddings": 2048,\n'
    '\t"layer_norm_eps": 1e-05, "use_gradient_checkpointing": true}'
)


def test_without_names_everything_is_the_schemas_default():
    assert resolve() == TrainConfig()


def test_the_lm_tasks_defaults_are_the_seed_reports():
    config = resolve()
    assert (config.batch.micro_size, config.batch.accumulation_steps) == (8, 4)
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (5e-5, 1e-6, 0.01)
    assert (config.clip.max_norm, config.data.max_slice, config.checkpoint.every_steps) == (1.0, 512, 200)


def test_a_preset_outranks_defaults_a_profile_outranks_both_and_overrides_outrank_all():
    assert resolve().activation_checkpoint == "none"
    assert resolve(model="neox-20b").activation_checkpoint == "full"
    assert resolve("fsdp8", "lm-tiny").resources.num_workers == 8
    assert resolve("fsdp8", "lm-tiny", ["resources.num_workers=2", "activation_checkpoint=full"]).resources.num_workers == 2


def test_what_streams_computes_its_blocks_again_unless_a_layer_says_otherwise():
    assert resolve("a6000", "lm-tiny").activation_checkpoint == "full"
    assert resolve("a6000", "flux1-dev").activation_checkpoint == "selective"
    assert resolve("a6000", "lm-tiny", ["engine.kind=sharded"]).activation_checkpoint == "none"
    assert resolve("cpu", "lm-tiny", ["engine.kind=stream"]).activation_checkpoint == "full"
    spared = "model.config.use_gradient_checkpointing=false"
    assert resolve("a6000", "flux2-seed", [spared]).activation_checkpoint == "full"
    assert origins("a6000", "lm-tiny", ())["activation_checkpoint"] == "engine.kind"


def test_a_profile_outranks_a_preset():
    found = layers("cpu", "lm-tiny", ["seed=1"])
    assert [name for name, _ in found] == ["model lm-tiny", "profile cpu", "override"]
    assert merge({"optim": {"lr": 1, "eps": 2}}, {"optim": {"lr": 3}}) == {"optim": {"lr": 3, "eps": 2}}


def test_the_last_of_two_overrides_counts():
    assert resolve(overrides=["seed=1", "seed=2"]).seed == 2


def test_words_and_a_mapping_say_the_same():
    words = [
        "optim.lr=3e-4",
        "data.source=[path:a.txt, path:b.txt]",
        "engine.kind=sharded",
        "resources.label_selector={gpu: a6000}",
    ]
    mapping = {
        "optim.lr": 3e-4,
        "data.source": ("path:a.txt", "path:b.txt"),
        "engine.kind": "sharded",
        "resources.label_selector": {"gpu": "a6000"},
    }
    assert resolve("cpu", "lm-tiny", words) == resolve("cpu", "lm-tiny", mapping)


def test_a_section_of_another_kind_starts_anew():
    config = resolve("a6000", None, ["engine.kind=sharded"])
    assert config.engine == TrainConfig().engine
    low = {"engine": {"kind": "sharded", "reshard_after_forward": False}}
    assert merge(low, {"engine": {"kind": "stream"}}) == {"engine": {"kind": "stream"}}


def test_the_engines_kind_need_not_be_given():
    assert resolve(overrides=["engine.reshard_after_forward=false"]).engine.model_dump() == {
        "kind": "sharded",
        "reshard_after_forward": False,
        "cpu_offload": False,
    }
    assert isinstance(resolve("a6000").engine, StreamEngineConfig)


def test_models_of_another_type_do_not_mix():
    config = resolve(model="lm-tiny", overrides={"model.config": {"model_type": "llama", "vocab_size": 300}})
    assert config.model.config == {"model_type": "llama", "vocab_size": 300}
    narrower = resolve(model="lm-tiny", overrides=["model.config.num_hidden_layers=2"])
    assert narrower.model.config == {**resolve(model="lm-tiny").model.config, "num_hidden_layers": 2}


def test_models_of_other_libraries_do_not_mix(tmp_path):
    keys = {"_class_name": "FluxTransformer2DModel", "num_layers": 2}
    words = {"task.kind": "flow", "model.config": keys, "data.cache": "a"}
    assert resolve(model="flux2-seed", overrides=words).model.config == keys


@pytest.mark.parametrize("name", ["path:/models/pythia", "hf:EleutherAI/pythia-14m"])
def test_a_published_model_is_named_by_where_it_is(name):
    assert resolve(model=name).model.weights == name


@pytest.mark.parametrize("profile", preset_names("profiles"))
@pytest.mark.parametrize("model", preset_names("models"))
def test_every_preset_resolves_under_every_profile(profile, model):
    config = resolve(profile, model)
    image_model = model.startswith(("flux1-", "flux2-")) and model != "flux2-seed"
    assert config.model.config["_class_name" if image_model else "model_type"]
    assert config.task.kind == ("flow" if image_model else "lm")


def test_presets_are_listed():
    assert preset_names("profiles") == ["a6000", "cpu", "fsdp8"]
    assert {"flux2-seed", "lm-tiny", "neox-20b"} <= set(preset_names("models"))


class TestReportAConfigJson:
    def test_its_preset_holds_its_keys_as_they_are(self):
        config = resolve(model="flux2-seed")
        assert config.model.config["attention_probs_dropout_prob"] == 0.1
        assert config.model.config["hidden_dropout_prob"] == 0.1
        assert config.model.config["use_gradient_checkpointing"] is True

    def test_its_key_for_checkpointing_sets_ours(self):
        assert resolve(model="flux2-seed").activation_checkpoint == "full"
        assert (
            resolve(model="flux2-seed", overrides=["model.config.use_gradient_checkpointing=false"]).activation_checkpoint
            == "none"
        )

    def test_ours_outranks_it(self):
        assert resolve(model="flux2-seed", overrides=["activation_checkpoint=none"]).activation_checkpoint == "none"

    @pytest.mark.parametrize("prefix", ["", "path:"])
    def test_the_file_is_read_as_it_is(self, tmp_path, prefix):
        path = tmp_path / "config.json"
        path.write_text(REPORT_A)
        words = [f"model.config={prefix}{path}", "model.config.vocab_size=300", "model.config.model_type=gpt_neox"]
        config = resolve(overrides=words)
        assert config.activation_checkpoint == "full"
        assert config.model.config["layer_norm_eps"] == 1e-5
        assert config.model.config["hidden_size"] == 2048
        assert config.model.config["vocab_size"] == 300

    def test_its_origin_is_named(self):
        assert origins(None, "flux2-seed", ())["activation_checkpoint"] == "model.config"
        assert origins(None, "flux2-seed", ["activation_checkpoint=none"])["activation_checkpoint"] == "override"


def test_origins_name_the_layer_with_the_last_word():
    found = origins("cpu", "lm-tiny", ["optim.lr=1", "resources.cpu=0.2"])
    assert found["optim.lr"] == found["resources.cpu"] == "override"
    assert found["resources.gpu"] == "profile cpu"
    assert found["train.num_steps"] == found["model.config"] == "model lm-tiny"
    assert "optim.eps" not in found


def test_flatten_opens_sections_and_keeps_free_keys_whole():
    flat = flatten(resolve("cpu", "lm-tiny"))
    assert flat["optim.lr"] == 1e-3
    assert flat["engine.kind"] == "sharded"
    assert flat["model.config"]["vocab_size"] == 4096
    assert flat["resources.label_selector"] == {}
    assert next(iter(flat)) == "name"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.source=[path:a.txt, 'path:b #1.txt']", "resources.label_selector={zone: no, rack: '1e5'}"],
        ["name=2026-01-31", "optim.lr=5e-05", "hardware.tflops=1e3", "data.text_key='null'"],
        ["data.eval_source=path:held-out.txt", "batch.global_size=8"],
        {"name": "1e5", "data.text_key": "true", "storage": "/data/ü: {x}"},
    ],
)
def test_yaml_gives_the_same_configuration_back(tmp_path, overrides):
    config = resolve("cpu", "lm-tiny", overrides)
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(tmp_path / "config.yaml") == config


def test_a_damaged_configuration_file_is_named(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=f"^{path}: cannot be read \\(No such file or directory\\); name another file$"):
        from_yaml(path)
    path.write_text("optim: {lr: 1")
    with pytest.raises(ConfigError, match=f"^{path}: is not a YAML or JSON file; name one that is$"):
        from_yaml(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"^{path}: is not a YAML or JSON file; name one that is$"):
        from_yaml(path)
    path.write_text("just words")
    with pytest.raises(ConfigError, match=f"^{path}: holds no keys$"):
        from_yaml(path)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        resolve().optim.lr = 1.0  # type: ignore[misc]


def test_build_refuses_what_resolve_refuses():
    with pytest.raises(ConfigError, match=r"^optim\.lrr: unknown key"):
        build({"optim": {"lrr": 1}})


def test_configuration_works_without_torch():
    code = (
        "import sys; from fluxray.config.load import resolve; resolve('cpu', 'lm-tiny');"
        "print(sorted({'torch', 'numpy', 'ray', 'mlflow', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
