import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
from fluxray.models.causal_lm import build_causal_lm, library_config
from fluxray.models.verify import check_stack
from tests.models.helpers import CASES, SIZES, batch_of, build, model_config

REPORT_A = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.3,
    "max_position_embeddings": 128,
    "use_gradient_checkpointing": True,
}


def refusal(model: ModelConfig) -> str:
    """Return the one line with which a model is refused, as soon as it is described or when it is checked."""
    with pytest.raises(ConfigError) as failure:
        check_stack(library_config(model))
    message = str(failure.value)
    assert "\n" not in message and len(message) < 400 and message.startswith("model.")
    return message


def test_report_a_keys_mean_what_they_say() -> None:
    stack = build_causal_lm(ModelConfig(config={"model_type": "gpt_neox", "vocab_size": 128, **REPORT_A}), seed=0)
    config = stack.model.config
    assert (config.attention_dropout, config.hidden_dropout) == (0.1, 0.3)
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (64, 2, 128)
    assert not hasattr(config, "attention_probs_dropout_prob") and not hasattr(config, "use_gradient_checkpointing")
    dropouts = {name: module.p for name, module in stack.model.named_modules() if isinstance(module, nn.Dropout)}
    assert len(dropouts) == 5 and set(dropouts.values()) == {0.3}  # the embedding's, and two a block
    attentions: list[Any] = [block.module.get_submodule("attention") for block in stack.blocks]
    assert all(attention.attention_dropout == 0.1 for attention in attentions)
    assert stack.has_dropout


def test_dropout_really_drops() -> None:
    stack = build("gpt_neox", hidden_dropout_prob=0.5).train()
    dropped = stack.blocks[0].module.get_submodule("post_mlp_dropout")(torch.ones(1, 100, 32))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    quiet = build("gpt_neox", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    assert not quiet.has_dropout


@pytest.mark.parametrize(("entries", "rounded"), [(1, 128), (128, 128), (129, 256), (50257, 50304), (50304, 50304)])
def test_open_vocabulary_is_rounded_up_to_128(entries: int, rounded: int) -> None:
    model = ModelConfig(config={key: value for key, value in {**SIZES, **CASES["llama"]}.items() if key != "vocab_size"})
    assert library_config(model, entries).vocab_size == rounded


def test_stated_vocabulary_is_kept() -> None:
    assert library_config(model_config("llama", vocab_size=77), 500).vocab_size == 77


@pytest.mark.parametrize(
    ("case", "keys", "base"),
    [
        ("gpt_neox", {"rotary_emb_base": 5e5}, 5e5),
        ("llama", {"rope_theta": 5e5}, 5e5),
        ("qwen3", {"rope_theta": 5e5}, 5e5),
        ("llama", {}, 1e4),
    ],
)
def test_rotary_keys_reach_the_frequencies(case: str, keys: dict[str, Any], base: float) -> None:
    buffers = dict(build(case, **keys).model.named_buffers())
    (inverse,) = (buffer for name, buffer in buffers.items() if name.endswith(".inv_freq"))
    size = 2 * len(inverse)
    assert torch.allclose(inverse, base ** -(torch.arange(0, size, 2) / size))


def test_gemma3_has_two_sets_of_frequencies() -> None:
    keys = {"rope_theta": 5e5, "rope_local_base_freq": 2e3}
    stack = build("gemma3", **keys)
    buffers = dict(stack.model.named_buffers())
    for kind, base in (("full", 5e5), ("sliding", 2e3)):
        (inverse,) = (buffer for name, buffer in buffers.items() if name.endswith(f".{kind}_attention_inv_freq"))
        assert torch.allclose(inverse, base ** -(torch.arange(0, 16, 2) / 16))
    state = stack.prologue(batch_of((12,)))
    cos = {kind: state.shared[f"cos.{kind}_attention"] for kind in ("full", "sliding")}
    assert cos["full"] is not None and cos["sliding"] is not None and not torch.equal(cos["full"], cos["sliding"])


def test_gemma3_scales_its_embedding_and_trains_every_row() -> None:
    stack = build("gemma3")
    batch = batch_of((12,))
    (hidden,) = stack.prologue(batch).carry
    weight: Any = stack.model.get_input_embeddings().weight
    assert torch.equal(hidden, weight[batch.input_ids] * torch.tensor(32**0.5))
    assert weight[0].any() and library_config(model_config("gemma3")).pad_token_id is None  # no row is set aside for padding


def test_gemma3_reads_the_pattern_of_older_files() -> None:
    keys = {key: value for key, value in model_config("gemma3").config.items() if key != "layer_types"}
    config = library_config(ModelConfig(config={**keys, "num_hidden_layers": 4, "sliding_window_pattern": 2}))
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2


def test_rotary_share_of_neox() -> None:
    for share, size in ((0.25, 2), (0.5, 4), (1.0, 8)):
        buffers = dict(build("gpt_neox", rotary_pct=share).model.named_buffers())
        assert [len(buffer) for name, buffer in buffers.items() if name.endswith(".inv_freq")] == [size // 2]


@pytest.mark.parametrize(
    ("case", "keys", "parts"),
    [
        ("gpt_neox", {"num_hidden_layer": 2}, ["num_hidden_layer:", "did you mean model.config.num_hidden_layers?"]),
        ("gpt_neox", {"zzz": 1}, ["model.config.zzz:", "drop it"]),
        ("gpt_neox", {"num_key_value_heads": 2}, ["num_key_value_heads: is no key of gpt_neox"]),
        ("gpt_neox", {"rope_theta": 1e5}, ["rope_theta: is no key of gpt_neox"]),
        ("llama", {"rotary_pct": 0.5}, ["rotary_pct: is no key of llama"]),
        ("llama", {"hidden_dropout_prob": 0.1}, ["is no key of llama"]),
        ("llama", {"sliding_window": 4}, ["sliding_window: is no key of llama"]),
        ("qwen3", {"rotary_emb_base": 1e5}, ["rotary_emb_base: is no key of qwen3"]),
        ("gpt_neox", {"hidden_size": 33}, ["hidden_size: 33", "num_attention_heads 4", "change"]),
        ("llama", {"hidden_size": 33}, ["hidden_size: 33", "num_attention_heads 4", "change"]),
        ("llama", {"num_attention_heads": 3}, ["hidden_size: 32", "num_attention_heads 3", "change"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads: 3", "num_attention_heads 4", "change"]),
        ("qwen3", {"num_key_value_heads": 8}, ["num_key_value_heads: 8", "num_attention_heads 4", "change"]),
        ("llama", {"head_dim": 7}, ["head_dim", "7", "mend"]),
        ("gpt_neox", {"hidden_act": "gelo"}, ["hidden_act: 'gelo'", "use gelu"]),
        ("llama", {"rope_scaling": {"rope_type": "foo"}}, ["'foo'", "mend"]),
        ("llama", {"rope_theta": -1.0}, ["no finite numbers", "mend"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "mend"]),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, ["layer_types: 'chunked_attention'", "use full_attention"]),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, ["sliding_window", "mend"]),
        ("llama", {"model_type": "gpt2"}, ["model_type: 'gpt2'", "gpt_neox, llama, qwen3"]),
        ("llama", {"model_type": "no such family"}, ["model_type: 'no such family'", "gpt_neox, llama, qwen3"]),
        ("llama", {"model_type": 3}, ["model_type: 3", "gpt_neox, llama, qwen3"]),
        ("llama", {"model_type": None}, ["model_type: is missing", "--model"]),
        ("gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping: 30.0, but", "set it to null"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping: 50.0, but the library itself ignores it"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention: True, but", "causal"]),
        ("gemma3", {"hidden_activation": "gelo"}, ["hidden_activation: 'gelo'", "use gelu"]),
        ("gemma3", {"hidden_act": "gelu"}, ["hidden_act: is no key of gemma3_text", "hidden_activation"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(case: str, keys: dict[str, Any], parts: list[str]) -> None:
    message = refusal(model_config(case, **keys))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("case", ["gpt_neox", "llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("value", [0, -32, "32", 32.5, True, None, [32]])
def test_sizes_are_whole_numbers_above_0(case: str, key: str, value: object) -> None:
    assert refusal(model_config(case, **{key: value})) == f"model.config.{key}: {value!r} is no whole number above 0; give one"


@pytest.mark.parametrize("value", [1, 1.5, -0.1, "0.1", None, float("nan")])
def test_dropout_is_a_probability(value: object) -> None:
    for case, key in (("gpt_neox", "hidden_dropout"), ("gpt_neox", "attention_dropout"), ("llama", "attention_dropout")):
        assert refusal(model_config(case, **{key: value})).startswith(f"model.config.{key}: {value!r} is no probability; use")


def test_without_a_family_there_is_no_model() -> None:
    assert refusal(ModelConfig()).startswith("model.config.model_type: is missing")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    build("qwen3 mixed", rope_theta=5e5).model.save_pretrained(folder)
    return folder


def test_published_config_is_the_models(published: Path) -> None:
    config = library_config(ModelConfig(weights=f"path:{published}"), vocab_size=5)
    assert config.model_type == "qwen3" and config.vocab_size == SIZES["vocab_size"] and config.use_cache is False
    assert config.layer_types == CASES["qwen3 mixed"]["layer_types"]
    check_stack(config)


def test_published_config_repeated_is_no_contradiction(published: Path) -> None:
    repeated = json.loads((published / "config.json").read_text())
    assert repeated["use_cache"] in (True, False) and repeated["dtype"] == "float32"
    for keys in (repeated, {**SIZES, **CASES["qwen3 mixed"], "rope_theta": 5e5, "use_cache": True, "torch_dtype": "bfloat16"}):
        assert library_config(ModelConfig(weights=f"path:{published}", config=keys)).model_type == "qwen3"


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"hidden_size": 64}, ["hidden_size: 64", "32"]),
        ({"model_type": "llama"}, ["model_type: 'llama'", "'qwen3'"]),
        ({"rope_theta": 1e4}, ["rope_theta: 10000.0", "500000.0"]),
        ({"attention_probs_dropout_prob": 0.3}, ["attention_dropout: 0.3", "0.1"]),
        ({"zzz": 1}, ["zzz: 1", "None"]),
    ],
)
def test_contradiction_of_the_published_config_is_refused(published: Path, keys: dict[str, Any], parts: list[str]) -> None:
    message = refusal(ModelConfig(weights=f"path:{published}", config=keys))
    assert message.startswith("model.config.") and "drop the key or the weights" in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "has no readable config.json"),
        ("{", "has no readable config.json"),
        ("{}", "has no readable config.json"),
        ('{"model_type": "no such family"}', "has no readable config.json"),
        ('{"model_type": "gpt2"}', "'gpt2' has no block list in fluxray; families are gpt_neox, llama, qwen3"),
    ],
)
def test_folder_without_a_usable_config_is_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert expected in refusal(ModelConfig(weights=f"path:{tmp_path}"))


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("path:/no/such/folder", "model.weights: 'path:/no/such/folder' is no folder; name one that"),
        ("path:", "model.weights: 'path:' is neither path:DIR nor hf:NAME"),
        ("hf:", "model.weights: 'hf:' is neither path:DIR nor hf:NAME"),
        ("gpt2", "model.weights: 'gpt2' is neither path:DIR nor hf:NAME"),
        ("s3:bucket", "model.weights: 's3:bucket' is neither path:DIR nor hf:NAME"),
    ],
)
def test_reference_that_names_nothing_is_refused(reference: str, expected: str) -> None:
    assert refusal(ModelConfig(weights=reference)).startswith(expected)
