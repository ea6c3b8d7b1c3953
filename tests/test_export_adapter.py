"""Adapters on their way to diffusers and peft, and merged into the model that they belong to."""

import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fluxray.checkpoint import save
from fluxray.cli import main
from fluxray.config.adapter import LoraConfig
from fluxray.config.load import resolve, to_yaml
from fluxray.config.schema import ModelConfig
from fluxray.data.tokenizer import train_tokenizer
from fluxray.engine.state import base_items
from fluxray.errors import CheckpointError, ConfigError
from fluxray.export import export_run
from fluxray.models.causal_lm import build_causal_lm
from fluxray.models.flux_stack import build_flux
from fluxray.protocols import BlockStack, RunState, Schedule, StateItem
from tests.engine.lora_cases import materialised
from tests.flux_files import CASES, FAMILIES, bfl_tensors_of, output, pipeline
from tests.models.helpers import batch_of, logits_of, model_config

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = LoraConfig(rank=3, alpha=7.5)
FILE = "pytorch_lora_weights.safetensors"


def quiet(told: str) -> None:
    """Nobody listens."""


def run_of(stack: BlockStack, model: ModelConfig, folder: Path, adapter: LoraConfig = LORA) -> Path:
    """Move the adapters of a stack off their first values, save it as a run, and return the run's folder."""
    materialised(stack)
    generator = torch.Generator().manual_seed(5)
    trained = {name: p for name, p in stack.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    library: Any = stack.model
    (library.save_config if hasattr(library, "save_config") else library.config.save_pretrained)(folder / "model")
    keys: dict[str, Any] = {"adapter": adapter.model_dump(), "model.weights": model.weights}
    preset = "flux1-tiny" if "_class_name" in library.config else "lm-tiny"
    (folder / "config.yaml").write_text(to_yaml(resolve("cpu", preset, keys)))
    items = [StateItem("weights", name, p.shape, None, p.detach()) for name, p in trained.items()]
    save(folder, RunState(0, Schedule("constant", 1e-3, 0, 0, 0.0)), [*items, *base_items(stack)])
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {case: pipeline(case, root / case) for case in FAMILIES}


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def loaded(folder: Path, weights: Path) -> Any:
    """Return the transformer of a published pipeline with the adapters that diffusers has loaded into it."""
    made = diffusers.DiffusionPipeline.from_pretrained(weights)
    made.load_lora_weights(folder)
    return made.transformer.eval()


@pytest.mark.parametrize("targets", [None, ("to_q", "ff.net.2", "to_qkv_mlp_proj", "proj_mlp")], ids=["default", "named"])
@pytest.mark.parametrize("case", FAMILIES)
def test_diffusers_loads_what_was_trained(case: str, targets: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    model = ModelConfig(config={"_class_name": CASES[case]["_class_name"]}, weights=f"path:{folders[case]}")
    adapter = LORA.model_copy(update={"targets": _of_family(case, targets)})
    stack = build_flux(model, 1, adapter=adapter)
    run_dir = run_of(stack, model, tmp_path / "run", adapter)
    assert stack.base.keys() == {"weights"}
    expected, plain = output(stack.model.eval()), output(loaded_without(folders[case]))
    assert not close(expected, plain, 1e-2)

    out = export_run(run_dir, tmp_path / "out", notify=quiet)
    assert [path.name for path in out.iterdir()] == [FILE]
    assert close(output(loaded(out, folders[case])), expected)

    merged = export_run(run_dir, tmp_path / "merged", merge=True, notify=quiet)
    whole = diffusers.DiffusionPipeline.from_pretrained(merged).transformer.eval()
    assert close(output(whole), expected)
    half = export_run(run_dir, tmp_path / "half", "bf16", notify=quiet)
    with safe_open(half / FILE, "pt") as opened:
        assert {opened.get_tensor(key).dtype for key in opened.keys()} == {torch.bfloat16}  # noqa: SIM118
    single = export_run(run_dir, tmp_path / "single", form="bfl", merge=True, notify=quiet)
    expected_tensors = bfl_tensors_of(whole)
    assert all(torch.equal(tensor, expected_tensors[key]) for key, tensor in load_file(single).items())


def _of_family(case: str, targets: Any) -> Any:
    foreign = {"flux1": {"to_qkv_mlp_proj"}, "flux2": {"ff.net.2", "proj_mlp"}}[case]
    return None if targets is None else tuple(target for target in targets if target not in foreign)


def loaded_without(weights: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(weights).transformer.eval()


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_random_bases_are_drawn_again_to_be_merged(base: str, tmp_path: Path) -> None:
    model, adapter = ModelConfig(config=CASES["flux1"]), LORA.model_copy(update={"base": base})
    stack = build_flux(model, 11, adapter=adapter)
    run_dir = run_of(stack, model, tmp_path / "run", adapter)
    merged = export_run(run_dir, tmp_path / "merged", merge=True, notify=quiet)
    whole = diffusers.FluxTransformer2DModel.from_pretrained(merged / "transformer").eval()
    assert close(output(whole), output(stack.model.eval()))


@pytest.mark.parametrize("case", FAMILIES)
def test_a_base_of_4_bits_is_merged_as_it_was_trained_on_and_its_adapters_fit_the_published_one(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = ModelConfig(config={"_class_name": CASES[case]["_class_name"]}, weights=f"path:{folders[case]}")
    adapter = LORA.model_copy(update={"base": "nf4"})
    stack = build_flux(model, 1, adapter=adapter)
    run_dir = run_of(stack, model, tmp_path / "run", adapter)
    assert stack.base.keys() == {"weights", "kept"}
    expected = output(stack.model.eval())
    merged = export_run(run_dir, tmp_path / "merged", merge=True, notify=quiet)
    assert close(output(diffusers.DiffusionPipeline.from_pretrained(merged).transformer.eval()), expected)
    out = export_run(run_dir, tmp_path / "out", notify=quiet)
    found = output(loaded(out, folders[case]))
    assert close(found, expected, 0.2) and not close(found, expected)  # the base differs in what 4 bits round off


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "random"])
def test_peft_loads_what_was_trained(family: str, published: bool, tmp_path: Path) -> None:
    model = model_config(family, tie_word_embeddings=family == "qwen3")
    base = materialised(build_causal_lm(model, 4))
    if published:
        base.model.save_pretrained(tmp_path / "base")
        model = ModelConfig(weights=f"path:{tmp_path / 'base'}")
    stack = build_causal_lm(model, 4, adapter=LORA)
    run_dir = run_of(stack, model, tmp_path / "run")
    train_tokenizer([f"{i} of {i}" for i in range(99)], 300).save_pretrained(run_dir / "tokenizer")
    batch = batch_of((20,))
    expected = logits_of(stack.eval(), batch)

    out = export_run(run_dir, tmp_path / "out", notify=quiet)
    base.model.save_pretrained(tmp_path / "same")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "same"), out).eval()
    found = adapted(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert close(found, expected) and not close(logits_of(base.eval(), batch), expected, 1e-2)
    assert adapted.peft_config["default"].base_model_name_or_path == (str(tmp_path / "base") if published else None)
    assert (out / "tokenizer.json").exists()

    merged = export_run(run_dir, tmp_path / "merged", merge=True, notify=quiet)
    whole = AutoModelForCausalLM.from_pretrained(merged).eval()
    found = whole(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert close(found, expected)


def test_what_cannot_be_exported_is_refused(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = ModelConfig(config={"_class_name": CASES["flux1"]["_class_name"]}, weights=f"path:{folders['flux1']}")
    shutil.copytree(folders["flux1"], tmp_path / "base")
    moved = model.model_copy(update={"weights": f"path:{tmp_path / 'base'}"})
    run_dir = run_of(build_flux(moved, 1, adapter=LORA), moved, tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        export_run(run_dir, tmp_path / "out", form="bfl")
    assert str(refused.value) == "--format: bfl is a format of whole models, and run trained an adapter; add --merge"
    other = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "base" / "transformer")
    with torch.no_grad():
        other.x_embedder.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "base" / "transformer")
    with pytest.raises(
        CheckpointError, match=r"^model: the checkpoint's adapters are of weights with the hash [0-9a-f]{16}, the"
    ):
        export_run(run_dir, tmp_path / "out", merge=True)
    with pytest.raises(SystemExit) as end:
        main(["export", str(run_dir), str(tmp_path / "cli"), "--merge"])
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    (run_dir / "config.yaml").write_text(to_yaml(resolve("cpu", "flux1-tiny", {"adapter": {"kind": "lora", "rank": 5}})))
    with pytest.raises(CheckpointError, match=r"it is of another model$"):
        export_run(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
