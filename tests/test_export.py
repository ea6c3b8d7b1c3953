import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fluxray.checkpoint import CheckpointReader, committed
from fluxray.config.load import resolve
from fluxray.config.schema import ModelConfig
from fluxray.errors import CheckpointError, ConfigError, FluxrayError
from fluxray.export import export_run
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm
from fluxray.runtime.worker import WorkerContext, run_worker
from tests.models.helpers import batch_of, logits_of, materialised

SIZES = (
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128",
    "model.config.vocab_size=512",
    "data.max_slice=32",
    "batch.micro_size=2",
    "optim.warmup_steps=1",
    "train.num_steps=3",
    "evaluation.max_rows=2",
    "checkpoint.every_steps=2",
    "hardware.tflops=1",
)
FAMILIES = {
    "gpt_neox": (),
    "llama": ("model.config.model_type=llama", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2"),
    "qwen3": (
        "model.config.model_type=qwen3",
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
        "model.config.head_dim=16",
        "model.config.tie_word_embeddings=true",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    sentences = [
        f"The {thing} of number {i} stands by the {thing}.\n\n" for i in range(60) for thing in ("house", "river", "tree")
    ]
    (folder / "text.txt").write_text("".join(sentences))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def run_dir(request: pytest.FixtureRequest, shared: Path) -> Path:
    return trained(request.param, shared)


@pytest.fixture(scope="module")
def neox(shared: Path) -> Path:
    return trained("gpt_neox", shared)


def trained(family: str, shared: Path) -> Path:
    """Return the folder of a run of three steps; it is made once."""
    folder = shared / family
    if not folder.exists():
        config = resolve("cpu", "lm-tiny", [f"data.source=path:{shared / 'text.txt'}", *SIZES, *FAMILIES[family]])
        context = WorkerContext(0, 1, 0, folder, shared / "cache", lambda _: None, lambda _: False, [], lambda _: None)
        run_worker(config, context)
    return folder


def trained_stack(run_dir: Path) -> CausalLMStack:
    """Return the stack with the weights of the newest checkpoint, read without any engine."""
    keys = json.loads((run_dir / "model" / "config.json").read_text())
    stack = materialised(build_causal_lm(ModelConfig(config=keys), seed=99))
    reader = CheckpointReader(committed(run_dir)[0])
    with torch.no_grad():
        for name, parameter in stack.model.named_parameters():
            parameter.copy_(reader.read("weights", name))
    return stack.eval()


def logits(model: Any, batch: Any) -> torch.Tensor:
    return model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits


@torch.no_grad()
def test_exported_model_gives_the_stacks_logits(run_dir: Path, tmp_path: Path) -> None:
    assert export_run(run_dir, tmp_path / "out") == tmp_path / "out"
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert model.dtype == torch.float32 and model.config.use_cache is True
    stack = trained_stack(run_dir)
    for batch in (batch_of((20,)), batch_of((5, 7), (12,))):
        assert torch.equal(logits(model.eval(), batch), logits_of(stack, batch))


def test_names_on_disk_are_the_librarys(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, tmp_path / "out")
    AutoModelForCausalLM.from_config(trained_stack(run_dir).model.config).save_pretrained(tmp_path / "library")
    (exported,) = (tmp_path / "out").glob("*.safetensors")
    expected, actual = load_file(tmp_path / "library" / "model.safetensors"), load_file(exported)
    assert exported.name == "model.safetensors"
    assert {name: (t.shape, t.dtype) for name, t in actual.items()} == {name: (t.shape, t.dtype) for name, t in expected.items()}
    head = {"gpt_neox": {"embed_out.weight"}, "llama": {"lm_head.weight"}, "qwen3": set()}[run_dir.name]
    assert {name for name in actual if name in ("embed_out.weight", "lm_head.weight")} == head
    with safe_open(exported, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@torch.no_grad()
def test_bf16_rounds_to_nearest(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, tmp_path / "bf16", "bf16")
    (exported,) = (tmp_path / "bf16").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(exported).values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert model.dtype == torch.bfloat16
    for name, parameter in trained_stack(run_dir).model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.to(torch.bfloat16)), name


def test_tokenizer_comes_along(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The river stands by the house."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer(text)["input_ids"]) < 512
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id is not None
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.bos_token_id == tokenizer.bos_token_id


def test_end_tokens_that_hold_the_tokenizers_are_kept(neox: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(neox, tmp_path / "run"))
    tokenizer: Any = AutoTokenizer.from_pretrained(neox / "tokenizer")
    config = copied / "model" / "config.json"
    ends = [7, tokenizer.eos_token_id]
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": ends, "bos_token_id": 9}))
    export_run(copied, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["eos_token_id"], exported["bos_token_id"]) == (ends, 9)


def test_weights_are_the_trained_ones_of_the_newest_checkpoint(neox: Path, tmp_path: Path) -> None:
    assert [path.name for path in committed(neox)] == ["step_00000003", "step_00000002"]
    export_run(neox, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")["embed_out.weight"]
    newest, before = (CheckpointReader(path) for path in committed(neox))
    (name,) = (name for name in newest.names() if name in ("embed_out.weight", "lm_head.weight"))
    assert torch.equal(exported, newest.read("weights", name)) and not torch.equal(exported, before.read("weights", name))


def refuse(run_dir: Path, out_dir: Path, kind: type[FluxrayError], message: str) -> None:
    with pytest.raises(kind, match=message) as failure:
        export_run(run_dir, out_dir)
    assert "\n" not in str(failure.value)


def test_target_that_is_in_the_way_is_refused_and_kept(neox: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep me")
    refuse(neox, tmp_path / "full", ConfigError, "DIR: .*full exists and is not empty; name another folder")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious.txt"]
    refuse(neox, tmp_path / "full" / "precious.txt", ConfigError, "precious.txt exists and is not empty")
    refuse(neox, tmp_path / "full" / "precious.txt" / "out", ConfigError, "cannot be made, .*precious.txt is a file;")
    (tmp_path / "empty").mkdir()
    assert export_run(neox, tmp_path / "empty") == tmp_path / "empty"
    assert export_run(neox, tmp_path / "a" / "b" / "c").is_dir()


def test_run_without_a_checkpoint_is_refused(neox: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(neox, tmp_path / "run", ignore=shutil.ignore_patterns("step_*")))
    refuse(copied, tmp_path / "out", CheckpointError, "RUN: run has no checkpoint yet; train it first")
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoint_gives_way_to_the_one_before(neox: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(neox, tmp_path / "run"))
    (copied / "step_00000003" / "checkpoint.json").unlink()
    said: list[str] = []
    export_run(copied, tmp_path / "out", notify=said.append)
    assert len(said) == 1 and "using step_00000002 instead" in said[0]
    (copied / "step_00000002" / "weights-00000-of-00001.safetensors").unlink()
    refuse(copied, tmp_path / "other", CheckpointError, "no earlier one is complete either")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("keys", [{"hidden_size": 32}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"vocab_size": 1024}])
def test_checkpoint_of_another_model_is_refused(neox: Path, tmp_path: Path, keys: dict[str, int]) -> None:
    copied = Path(shutil.copytree(neox, tmp_path / "run"))
    config = copied / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    refuse(copied, tmp_path / "out", CheckpointError, "it is of another model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_folder_that_lacks_a_part_is_refused(neox: Path, tmp_path: Path, part: str) -> None:
    copied = Path(shutil.copytree(neox, tmp_path / "run"))
    shutil.rmtree(copied / part)
    refuse(copied, tmp_path / "out", CheckpointError, f"lacks its folder {part}; name the folder of a run")
    assert not (tmp_path / "out").exists()
