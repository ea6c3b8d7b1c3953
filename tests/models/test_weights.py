import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
from fluxray.models import names, weights
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm
from tests.models.helpers import CASES, batch_of, build, logits_of, materialised, shaken


def loaded(folder: Path) -> CausalLMStack:
    return materialised(build_causal_lm(ModelConfig(weights=f"path:{folder}"), seed=3))


def published(folder: Path, case: str = "llama", **options) -> CausalLMStack:
    stack = shaken(build(case))
    stack.model.save_pretrained(folder, **options)
    return stack


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as failure:
        loaded(folder)
    message = str(failure.value)
    assert message.startswith(f"model.weights: 'path:{folder}' ") and "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_the_library_saves_is_loaded_exactly(case: str, tmp_path: Path) -> None:
    stack = published(tmp_path, case)
    other = loaded(tmp_path)
    expected = dict(stack.model.named_parameters())
    actual = dict(other.model.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    batch = batch_of((5, 7))
    assert torch.equal(logits_of(other.eval(), batch), logits_of(stack.eval(), batch))


def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library refuse to load a whole model."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model is loaded")

    monkeypatch.setattr(weights.AutoModelForCausalLM, "from_pretrained", refuse)


class CountingFile:
    """Stands for `safe_open`, and counts the tensors that are read and those that are alive."""

    num_read = num_alive = most_alive = 0

    def __init__(self, file: str, framework: str):
        self._opened = safe_open(file, framework)

    def __enter__(self) -> "CountingFile":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, key: str) -> torch.Tensor:
        tensor = self._opened.get_tensor(key)
        kind = type(self)
        kind.num_read += 1
        kind.num_alive += 1
        kind.most_alive = max(kind.most_alive, kind.num_alive)
        weakref.finalize(tensor, self._let_go)
        return tensor

    @classmethod
    def _let_go(cls) -> None:
        cls.num_alive -= 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "10KB"}], ids=["one file", "shards"])
def test_one_stored_tensor_is_alive_at_a_time(
    case: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(CountingFile): ...

    stack = published(tmp_path, case, **options)
    no_library(monkeypatch)
    monkeypatch.setattr("fluxray.models.stored.safe_open", Counting)
    other = build_causal_lm(ModelConfig(weights=f"path:{tmp_path}"), seed=0)
    other.materialise(torch.device("cpu"), other.blocks[0])
    assert Counting.num_read == len(list(other.blocks[0].module.parameters())), "only what was asked for is read"
    materialised(other)
    assert Counting.most_alive == 1 and Counting.num_alive == 0
    assert all(torch.equal(other.model.get_parameter(name), tensor) for name, tensor in stack.model.named_parameters())


def test_sharded_files_are_loaded(tmp_path: Path) -> None:
    stack = published(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    other = loaded(tmp_path)
    assert all(torch.equal(other.model.get_parameter(name), tensor) for name, tensor in stack.model.named_parameters())


def test_bf16_files_become_fp32_parameters_of_equal_value(tmp_path: Path) -> None:
    stack = shaken(build("llama"))
    stack.to(torch.bfloat16)
    stack.model.save_pretrained(tmp_path)
    other = loaded(tmp_path)
    for name, tensor in stack.model.named_parameters():
        parameter = other.model.get_parameter(name)
        assert parameter.dtype == torch.float32 and torch.equal(parameter, tensor.float()), name


@pytest.mark.parametrize("case", ["llama grouped", "qwen3 tied"])
def test_tied_head_stays_tied(case: str, tmp_path: Path) -> None:
    published(tmp_path, case)
    assert not any("lm_head.weight" in load_file(file) for file in tmp_path.glob("*.safetensors"))
    model: Any = loaded(tmp_path).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_blocks_may_be_filled_in_any_order(tmp_path: Path) -> None:
    stack = published(tmp_path)
    other = build_causal_lm(ModelConfig(weights=f"path:{tmp_path}"), seed=0)
    for block in (None, *reversed(other.blocks)):
        other.materialise(torch.device("cpu"), block)
    assert all(torch.equal(other.model.get_parameter(name), tensor) for name, tensor in stack.model.named_parameters())


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Store these tensors in place of those of the only file."""
    (file,) = folder.glob("*.safetensors")
    save_file(tensors, file, metadata={"format": "pt"})


def stored(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("case", ["gpt_neox", "llama"])
def test_buffers_of_old_files_are_ignored(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = published(tmp_path, case)
    layer = {"gpt_neox": "gpt_neox.layers.0.attention", "llama": "model.layers.0.self_attn"}[case]
    extra = {
        "rotary_emb.inv_freq": torch.ones(4),
        "bias": torch.ones(1, 1, 9, 9, dtype=torch.bool),
        "masked_bias": torch.ones(()),
    }
    rewritten(tmp_path, stored(tmp_path) | {f"{layer}.{name}": tensor for name, tensor in extra.items()})
    no_library(monkeypatch)
    other = loaded(tmp_path)
    assert all(torch.equal(other.model.get_parameter(name), tensor) for name, tensor in stack.model.named_parameters())


def test_files_of_the_model_without_its_head_are_loaded_where_the_head_is_tied(tmp_path: Path) -> None:
    stack = shaken(build("qwen3 tied"))
    stack.model.base_model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in stored(tmp_path)
    other = loaded(tmp_path)
    assert all(torch.equal(other.model.get_parameter(name), tensor) for name, tensor in stack.model.named_parameters())


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tied_weight_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    stack = published(tmp_path, "qwen3 tied")
    tensors = stored(tmp_path)
    rewritten(tmp_path, {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()})
    assert torch.equal(loaded(tmp_path).model.get_parameter(EMBEDDING), stack.model.get_parameter(EMBEDDING))
    rewritten(tmp_path, tensors | {HEAD: tensors[EMBEDDING].clone()})
    assert torch.equal(loaded(tmp_path).model.get_parameter(EMBEDDING), stack.model.get_parameter(EMBEDDING))
    rewritten(tmp_path, tensors | {HEAD: tensors[EMBEDDING] + 1})
    assert "ties lm_head.weight to model.embed_tokens.weight but stores other values of it; set tie_word" in refusal(tmp_path)


def unknown_rules(model: Any, keys: Any, known: Any) -> None:
    """Stands for a model with tensors to be converted, or a version of the library with other rules."""


@pytest.mark.parametrize("why", ["converted", "no safetensors", "other version"])
def test_the_library_loads_what_is_not_only_renamed(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = published(tmp_path)
    match why:
        case "converted":
            monkeypatch.setattr(weights, "names_in_memory", unknown_rules)
        case "no safetensors":
            torch.save(stored(tmp_path), tmp_path / "pytorch_model.bin")
            (tmp_path / "model.safetensors").unlink()
        case "other version":
            monkeypatch.setattr(names, "RENAME_PARAMETERS", {"key"})
    other = loaded(tmp_path)
    assert all(torch.equal(other.model.get_parameter(name), tensor) for name, tensor in stack.model.named_parameters())
    with monkeypatch.context() as context:
        no_library(context)
        assert "the whole model is loaded" in refusal(tmp_path)


def test_file_that_goes_away_while_it_is_read_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    stack = build_causal_lm(ModelConfig(weights=f"path:{tmp_path}"), seed=0)
    stack.materialise(torch.device("cpu"), stack.blocks[0])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"^model\.weights: 'path:.*' cannot be loaded \(.*\); check that its files are complete$"
    ):
        stack.materialise(torch.device("cpu"), stack.blocks[1])


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    assert refusal(tmp_path).endswith("lacks model.layers.1.mlp.down_proj.weight and 1 more; it is another model")


def test_tensors_of_other_sizes_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    sizes = r"is \[32, 48\] in its files, \[32, 64\] by its config.json"
    assert re.search(rf"cannot be loaded \(model.layers.0.mlp.down_proj.weight {sizes}\); take both", refusal(tmp_path))


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    published(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    assert "cannot be loaded" in refusal(tmp_path) and "check that its files are complete" in refusal(tmp_path)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    published(tmp_path, max_shard_size="10KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    assert "cannot be loaded" in refusal(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.unlink()
    assert "cannot be loaded" in refusal(tmp_path)


def test_folder_that_goes_away_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    published(folder)
    stack = build_causal_lm(ModelConfig(weights=f"path:{folder}"), seed=0)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"^model\.weights: 'path:.*' is no folder; name one"):
        materialised(stack)


HUB_SCRIPT = """
import torch
from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
from fluxray.models import names, weights
from fluxray.models.causal_lm import build_causal_lm
from fluxray.models.verify import check_stack

stack = build_causal_lm(ModelConfig(weights="hf:org/tiny"), seed=0)
check_stack(stack.model.config)
sharded = build_causal_lm(ModelConfig(weights="hf:org/sharded"), seed=0)
for block in (*stack.blocks, None):
    stack.materialise(torch.device("cpu"), block)
for block in (*sharded.blocks, None):
    sharded.materialise(torch.device("cpu"), block)
torch.save([s.model.get_input_embeddings().weight.detach() for s in (stack, sharded)], "embeddings.pt")
try:
    build_causal_lm(ModelConfig(weights="hf:org/none"), seed=0)
except ConfigError as error:
    print(error)
"""


def in_hub_cache(home: Path, name: str, **options: Any) -> CausalLMStack:
    """Store a model as the hub's client would keep `org/name`."""
    repository = home / "hub" / f"models--org--{name}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    stack = published(repository / "snapshots" / revision, **options)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return stack


def test_hub_names_are_read_from_the_hub_cache_without_the_hub(tmp_path: Path) -> None:
    stacks = in_hub_cache(tmp_path, "tiny"), in_hub_cache(tmp_path, "sharded", max_shard_size="10KB")
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_CACHE"} | hub
    command = [sys.executable, "-c", HUB_SCRIPT]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for stack, embedding in zip(stacks, torch.load(tmp_path / "embeddings.pt"), strict=True):
        assert torch.equal(embedding, stack.model.get_parameter("model.embed_tokens.weight"))
    (refused,) = done.stdout.splitlines()
    assert refused.startswith("model.weights: 'hf:org/none' ")
