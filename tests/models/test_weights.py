import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
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
    assert "cannot be loaded" in refusal(tmp_path)


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
from fluxray.models.causal_lm import build_causal_lm
from fluxray.models.verify import check_stack

stack = build_causal_lm(ModelConfig(weights="hf:org/tiny"), seed=0)
check_stack(stack.model.config)
for block in (*stack.blocks, None):
    stack.materialise(torch.device("cpu"), block)
torch.save(stack.model.get_input_embeddings().weight.detach(), "embedding.pt")
try:
    build_causal_lm(ModelConfig(weights="hf:org/none"), seed=0)
except ConfigError as error:
    print(error)
"""


def test_hub_names_are_read_from_the_hub_cache_without_the_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    stack = published(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_CACHE"} | hub
    command = [sys.executable, "-c", HUB_SCRIPT]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "embedding.pt"), stack.model.get_parameter("model.embed_tokens.weight"))
    (refused,) = done.stdout.splitlines()
    assert refused.startswith("model.weights: 'hf:org/none' ")
