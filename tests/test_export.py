import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fluxray.checkpoint import CheckpointReader, committed, save
from fluxray.config.schema import ModelConfig
from fluxray.errors import CheckpointError, ConfigError, DamagedCheckpointError, FluxrayError
from fluxray.export import causal_lm, export_run, files
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm
from fluxray.optim.formats import join, split
from fluxray.optim.states import StateFormat
from fluxray.protocols import StateItem
from tests.models.helpers import batch_of, logits_of, materialised
from tests.runs import FAMILIES, trained, write_text

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    write_text(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def run_dir(request: pytest.FixtureRequest, shared: Path) -> Path:
    return trained(request.param, shared)


@pytest.fixture(scope="module")
def neox(shared: Path) -> Path:
    return trained("gpt_neox", shared)


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
    head = {"gpt_neox": {"embed_out.weight"}, "llama": {"lm_head.weight"}, "qwen3": set(), "gemma3": set()}[run_dir.name]
    assert {name for name in actual if name in ("embed_out.weight", "lm_head.weight")} == head
    with safe_open(exported, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("engine", ["sharded", "stream"])
def test_fused_projections_are_exported_as_three(engine: str, shared: Path, tmp_path: Path) -> None:
    run_dir = trained("llama", shared, "model.fused_qkv=true", f"engine.kind={engine}", "activation_checkpoint=full")
    found = exported(run_dir, tmp_path / "out")
    stack = trained_stack(run_dir)
    assert any(name.endswith("k_proj.weight") for name in found)
    assert all(torch.equal(found[name], parameter) for name, parameter in stack.model.named_parameters())
    separate = trained_stack(trained("llama", shared))
    assert all(
        torch.allclose(parameter, separate.model.get_parameter(name), atol=1e-5)
        for name, parameter in stack.model.named_parameters()
    )


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


def masters_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of the newest checkpoint."""
    reader = CheckpointReader(committed(run_dir)[0])
    corrected = {name: "correction" in reader.sections(name) for name in reader.names()}
    return {
        name: join(reader.read("weights", name), reader.read("correction", name) if corrected[name] else None)
        for name in reader.names()
    }


def exported(run_dir: Path, folder: Path, dtype: Any = "fp32") -> dict[str, torch.Tensor]:
    """Export, and return what transformers loads of it, in its names."""
    model: Any = AutoModelForCausalLM.from_pretrained(export_run(run_dir, folder, dtype), dtype="auto")
    return dict(model.named_parameters())


def expect_masters_and_weights(run_dir: Path, folder: Path) -> None:
    """Assert that fp32 is exported as the joined masters, bf16 as the saved weights, bit for bit."""
    reader = CheckpointReader(committed(run_dir)[0])
    whole, halves = exported(run_dir, folder / "fp32"), exported(run_dir, folder / "bf16", "bf16")
    for name, master in masters_of(run_dir).items():
        assert whole[name].dtype == torch.float32 and torch.equal(whole[name], master), name
        assert halves[name].dtype == torch.bfloat16 and torch.equal(halves[name], reader.read("weights", name)), name


@torch.no_grad()
@pytest.mark.parametrize("correction", [torch.int16, torch.int8, None])
def test_weights_in_two_parts_are_joined(run_dir: Path, tmp_path: Path, correction: torch.dtype | None) -> None:
    copied = Path(shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("step_*")))
    masters, items = masters_of(run_dir), []
    for name, master in masters.items():
        weight, rest = split(master, StateFormat(torch.bfloat16, correction, False, True), noise=5)
        items.append(StateItem("weights", name, weight.shape, None, weight))
        if rest is not None:
            items.append(StateItem("correction", name, rest.shape, None, rest))
    save(copied, CheckpointReader(committed(run_dir)[0]).state, items)
    expect_masters_and_weights(copied, tmp_path)
    exact = all(torch.equal(master, masters[name]) for name, master in masters_of(copied).items())
    assert exact == (correction == torch.int16)


@pytest.mark.parametrize("master", ["fp32", "split24", "stochastic"])
def test_run_of_the_stream_engine_is_exported(shared: Path, tmp_path: Path, master: str) -> None:
    run_dir = trained(
        "gpt_neox", shared, "engine.kind=stream", "activation_checkpoint=full", "precision=mixed-bf16", f"optim.master={master}"
    )
    reader = CheckpointReader(committed(run_dir)[0])
    found = {reader.read("correction", name).dtype for name in reader.names() if "correction" in reader.sections(name)}
    assert found == {"fp32": {torch.int16}, "split24": {torch.int8, torch.int16}, "stochastic": {torch.int16}}[master]
    expect_masters_and_weights(run_dir, tmp_path)


@torch.no_grad()
def test_files_are_as_large_as_they_may_be_and_one_is_in_memory(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = [0], [0]
    whole, read, limit = exported(run_dir, tmp_path / "whole"), files.Kept.weight, 70_000

    def let_go(num_bytes: int) -> None:
        alive[0] -= num_bytes

    def counted(*arguments: Any) -> torch.Tensor:
        tensor = read(*arguments)
        alive[0] += tensor.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(tensor, let_go, tensor.nbytes)
        return tensor

    monkeypatch.setattr(files, "FILE_BYTES", limit)
    monkeypatch.setattr(files.Kept, "weight", counted)
    parts = exported(run_dir, tmp_path / "parts")
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    held = [load_file(file) for file in sorted((tmp_path / "parts").glob("model-*-of-*.safetensors"))]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in held]
    assert len(held) > 3 and all(size <= limit or len(file) == 1 for size, file in zip(sizes, held, strict=True))
    assert most[0] == max(sizes) and alive[0] == 0
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": sum(t.numel() for t in whole.values()), "total_size": sum(sizes)}
    assert index["weight_map"].keys() == {key for file in held for key in file}


def test_files_are_those_that_the_library_writes_of_the_whole_model(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(run_dir, tmp_path / "own")
    monkeypatch.setattr(causal_lm, "names_on_disk", lambda _: None)
    export_run(run_dir, tmp_path / "library")
    own, other = ({file.name: file for file in (tmp_path / name).iterdir()} for name in ("own", "library"))
    assert own.keys() == other.keys()
    for name in own.keys() - {"model.safetensors"}:
        assert own[name].read_bytes() == other[name].read_bytes(), name
    expected, actual = load_file(other["model.safetensors"]), load_file(own["model.safetensors"])
    assert actual.keys() == expected.keys() and all(torch.equal(actual[key], tensor) for key, tensor in expected.items())


def test_failure_leaves_nothing_behind(neox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Path(shutil.copytree(neox, tmp_path / "run"))
    weights = copied / "step_00000003" / "weights-00000-of-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refuse(copied, tmp_path / "out", DamagedCheckpointError, "is not what was written")
    assert not list((tmp_path / "out").iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    refuse(neox, tmp_path / "out", ConfigError, r"DIR: .*out cannot be written \(.*No space left.*\); free space there or name")
    assert not list((tmp_path / "out").iterdir())


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


def test_single_file_of_a_language_model_is_refused(neox: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--format: bfl is a format of FLUX models, gpt_neox is a language model; drop it$"):
        export_run(neox, tmp_path / "out", form="bfl")
    assert not (tmp_path / "out").exists()


def test_averages_are_exported_in_place_of_the_weights(shared: Path, tmp_path: Path) -> None:
    run_dir = trained("gpt_neox", shared, "ema.decay=0.9")
    export_run(run_dir, tmp_path / "averages", averaged=True)
    weights, reader = load_file(tmp_path / "averages" / "model.safetensors"), CheckpointReader(committed(run_dir)[0])
    for name in reader.names():
        saved = weights[name.replace("lm_head", "embed_out")]
        assert torch.equal(saved, reader.read("ema", name)) and not torch.equal(saved, reader.read("weights", name))


def test_a_run_without_averages_has_none_to_export(neox: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^--ema: \S+ keeps no average of its weights; drop it, or train with ema.decay"):
        export_run(neox, tmp_path / "out", averaged=True)
    assert not (tmp_path / "out").exists()
