"""Runs of FLUX models on their way to diffusers and to ComfyUI."""

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fluxray.checkpoint import CheckpointReader, committed, save
from fluxray.cli import main
from fluxray.config.schema import ModelConfig
from fluxray.engine.parallelize import Techniques
from fluxray.errors import CheckpointError, ConfigError, DamagedCheckpointError, FluxrayError
from fluxray.export import export_run, files
from fluxray.models.bfl import CONFIG_KEY
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.models.pipeline import flux_config
from fluxray.models.weights import PretrainedWeights
from fluxray.optim.formats import join, split
from fluxray.optim.states import StateFormat
from fluxray.protocols import LossOutput, StateItem
from tests.engine.helpers import OPTIM, EngineCase
from tests.engine.stream_helpers import sharded_of, stream_of
from tests.flux_files import CASES, FAMILIES, bfl_tensors_of, output, pipeline, run_of, transformer
from tests.models.flux_helpers import draw_for

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {case: pipeline(case, root / case, is_distilled=True) for case in FAMILIES}


def silent(told: str) -> None:
    raise AssertionError(told)


def in_diffusers(folder: Path) -> Any:
    cls = getattr(diffusers, json.loads((folder / "transformer" / "config.json").read_text())["_class_name"])
    model, report = cls.from_pretrained(folder, subfolder="transformer", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


@pytest.mark.parametrize("case", CASES)
def test_exported_transformer_is_the_trained_one(case: str, tmp_path: Path) -> None:
    model, said = transformer(case, seed=4), []
    assert export_run(run_of(model, tmp_path / "run"), tmp_path / "out", notify=said.append) == tmp_path / "out"
    assert said == ["only transformer/ is written, no pipeline around it: the run began from none"]
    assert torch.equal(output(in_diffusers(tmp_path / "out")), output(model))
    model.save_pretrained(tmp_path / "library")
    own, other = ({f.name: f for f in folder.iterdir()} for folder in (tmp_path / "out" / "transformer", tmp_path / "library"))
    assert own.keys() == other.keys() == {"config.json", WEIGHTS}
    assert all(own[name].read_bytes() == other[name].read_bytes() for name in own)


@pytest.mark.parametrize("case", FAMILIES)
def test_pipeline_that_a_run_began_from_comes_along(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = transformer(case, seed=4)
    (folders[case] / "LICENSE.md").write_text("as it is")
    run_dir = run_of(model, tmp_path / "run", weights=f"path:{folders[case]}")
    export_run(run_dir, tmp_path / "out", notify=silent)
    cls = diffusers.FluxPipeline if case == "flux1" else diffusers.Flux2KleinPipeline
    loaded: Any = cls.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == json.loads((folders[case] / "model_index.json").read_text())["_class_name"]
    assert torch.equal(output(loaded.transformer), output(model))
    assert loaded.vae is not None and loaded.text_encoder is not None and loaded.tokenizer("a red cat")["input_ids"]
    assert case == "flux1" or loaded.config.is_distilled
    before, after = ({p.relative_to(r) for r in (root,) for p in r.rglob("*")} for root in (folders[case], tmp_path / "out"))
    assert before == after
    same = [p for p in after if p.parts[0] != "transformer" and (tmp_path / "out" / p).is_file()]
    assert all((tmp_path / "out" / p).read_bytes() == (folders[case] / p).read_bytes() for p in same)


@torch.no_grad()
def test_exported_pipeline_makes_the_image_of_the_trained_model(folders: dict[str, Path], tmp_path: Path) -> None:
    model = transformer("flux1", seed=4)
    export_run(run_of(model, tmp_path / "run", weights=f"path:{folders['flux1']}"), tmp_path / "out")
    images = []
    for place, own in ((tmp_path / "out", None), (folders["flux1"], model)):
        loaded: Any = diffusers.FluxPipeline.from_pretrained(place, **({} if own is None else {"transformer": own}))
        loaded.set_progress_bar_config(disable=True)
        made = loaded("a red cat", height=8, width=8, num_inference_steps=2, output_type="pt", max_sequence_length=8,
                      generator=torch.Generator().manual_seed(0))  # fmt: skip
        images.append(made.images)
    assert torch.equal(*images) and torch.isfinite(images[0]).all()


def test_transformer_alone_is_exported_as_one(folders: dict[str, Path], tmp_path: Path) -> None:
    model, said = transformer("flux2"), []
    alone, gone = f"path:{folders['flux2']}/transformer", f"path:{tmp_path}/gone"
    export_run(run_of(model, tmp_path / "a", weights=alone), tmp_path / "out", notify=said.append)
    export_run(run_of(model, tmp_path / "b", weights=gone), tmp_path / "other", notify=said.append)
    broken = Path(shutil.copytree(folders["flux2"], tmp_path / "broken"))
    shutil.rmtree(broken / "vae")
    export_run(run_of(model, tmp_path / "c", weights=f"path:{broken}"), tmp_path / "third", notify=said.append)
    first, second, third = (line.removeprefix("only transformer/ is written, no pipeline around it: ") for line in said)
    assert first == f"{alone} is a transformer alone"
    assert second.startswith(f"model.weights: '{gone}' is no folder")
    assert third.endswith("lacks its folder vae; complete the pipeline")
    for name in ("out", "other", "third"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["transformer"]
        assert flux_config(f"path:{tmp_path / name}")["num_single_layers"] == 3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_single_file_goes_out_and_in(case: str, dtype: Any, tmp_path: Path) -> None:
    model = transformer(case, seed=4)
    file = export_run(run_of(model, tmp_path / "run"), tmp_path / "out", dtype, form="bfl", notify=silent)
    assert file == tmp_path / "out" / "run.safetensors" and list((tmp_path / "out").iterdir()) == [file]
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    found, expected = load_file(file), bfl_tensors_of(model)
    assert found.keys() == expected.keys()
    assert all(found[key].dtype == tensor.dtype and torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert {"img_in.weight", "double_blocks.0.img_attn.norm.key_norm.scale", "single_blocks.2.linear2.weight"} <= found.keys()
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt" and json.loads(opened.metadata()[CONFIG_KEY])["num_layers"] == 2
    with file.open("rb") as raw:
        assert int.from_bytes(raw.read(8), "little") % 8 == 0
    config = {key: value for key, value in flux_config(f"path:{file}").items() if not key.startswith("_")}
    other = type(model)(**config).eval().to(model.dtype)
    PretrainedWeights(f"path:{tmp_path / 'out'}").copy_into(other, [path for path, _ in other.named_modules()])
    assert torch.equal(output(other), output(model))


@pytest.mark.parametrize("form", ["library", "bfl"])
@pytest.mark.parametrize("correction", [torch.int16, torch.int8, None])
def test_weights_in_two_parts_are_joined(form: Any, correction: torch.dtype | None, tmp_path: Path) -> None:
    model, items = transformer("flux1", seed=4), []
    run_dir = run_of(model, tmp_path / "run")
    for name, master in model.named_parameters():
        kept, rest = split(master.detach(), StateFormat(torch.bfloat16, correction, False, True), noise=5)
        items.append(StateItem("weights", name, kept.shape, None, kept))
        if rest is not None:
            items.append(StateItem("correction", name, rest.shape, None, rest))
    save(run_dir, CheckpointReader(committed(run_dir)[0]).state, items)
    out = export_run(run_dir, tmp_path / "out", form=form, notify=lambda _: None)
    found = load_file(out if form == "bfl" else out / "transformer" / WEIGHTS)
    expected = dict(model.named_parameters()) if form == "library" else bfl_tensors_of(model)
    tolerance = {torch.int16: 0.0, torch.int8: 2.0**-15, None: 2.0**-7}[correction]
    assert all(torch.allclose(found[key], tensor, rtol=tolerance, atol=0) for key, tensor in expected.items())


def squared_error(output_BTC: torch.Tensor, batch: Any) -> LossOutput:
    error_B = (output_BTC.float() - batch.target).square().mean((1, 2))
    return LossOutput((batch.weight * error_B).sum(), batch.num_valid)


def loaded_stack(model: ModelConfig, place: Path) -> FluxStack:
    stack = build_flux(model, seed=6, weights=PretrainedWeights(f"path:{place}"))
    for block in (*stack.blocks, None):
        stack.materialise(torch.device("cpu"), block)
    return stack


ENGINES: dict[str, Any] = {
    "sharded": (sharded_of, "fp32", OPTIM),
    "stream": (stream_of, "fp32", OPTIM),
    "stream split24": (stream_of, "mixed-bf16", OPTIM.model_copy(update={"master": "split24"})),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("fused_qkv", [False, True], ids=["three", "fused"])
def test_what_an_engine_trained_is_exported(
    case: str, engine: str, fused_qkv: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = ModelConfig(config=CASES[case], fused_qkv=fused_qkv)
    make, precision, optim = ENGINES[engine]
    stack = build_flux(model, seed=5, weights=PretrainedWeights(f"path:{folders[case]}"))
    built = make(stack, squared_error, EngineCase(model, Techniques(precision), optim=optim))
    for step in range(2):
        built.train_step([draw_for(model, seed=step, step=step)], 1e-2)
    built.flush()
    run_dir = run_of(transformer(case), tmp_path / "run", weights=f"path:{folders[case]}")
    state = CheckpointReader(committed(run_dir)[0]).state
    reader = CheckpointReader(save(run_dir, replace(state, step=2), built.state_items()))
    out = export_run(run_dir, tmp_path / "out", notify=silent)
    file = export_run(run_dir, tmp_path / "single", form="bfl", notify=silent)
    trained, begun = in_diffusers(out), transformer(case)
    for name, parameter in trained.named_parameters():
        correction = reader.read("correction", name) if "correction" in reader.sections(name) else None
        assert torch.equal(parameter, join(reader.read("weights", name), correction)), name
        assert not torch.equal(parameter, begun.get_parameter(name)), name
    batch = draw_for(model, seed=9)
    with torch.no_grad():
        whole, single = (loaded_stack(model, place)(batch, lambda found, _: found) for place in (out, file))
    assert torch.equal(whole, single)
    assert precision != "fp32" or torch.equal(whole, built.forward(batch))


@pytest.mark.parametrize("form", ["library", "bfl"])
def test_one_file_of_weights_is_in_memory(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = [0], [0]
    model, read, limit = transformer("flux1", seed=4), files.Kept.weight, 40_000

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
    out = export_run(run_of(model, tmp_path / "run"), tmp_path / "out", form=form, notify=lambda _: None)
    assert alive[0] == 0
    if form == "bfl":
        assert most[0] == max(tensor.nbytes for tensor in load_file(out).values())
        return
    held = [load_file(file) for file in sorted((out / "transformer").glob("diffusion_pytorch_model-*-of-*.safetensors"))]
    assert len(held) > 3 and most[0] == max(sum(tensor.nbytes for tensor in file.values()) for file in held)
    index = json.loads((out / "transformer" / f"{WEIGHTS}.index.json").read_text())
    assert index["weight_map"].keys() == {key for file in held for key in file}
    assert torch.equal(output(in_diffusers(out)), output(model))


def refuse(run_dir: Path, out_dir: Path, kind: type[FluxrayError], message: str, **options: Any) -> None:
    with pytest.raises(kind, match=message) as failure:
        export_run(run_dir, out_dir, **options)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("form", ["library", "bfl"])
def test_failure_leaves_nothing_behind(form: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    run_dir = run_of(transformer("flux1"), tmp_path / "run", weights=f"path:{folders['flux1']}")
    weights = next(run_dir.glob("step_*/weights-*"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refuse(run_dir, tmp_path / "out", DamagedCheckpointError, "is not what was written", form=form)
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep me")
    refuse(run_dir, tmp_path / "full", ConfigError, "full exists and is not empty; name another folder", form=form)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious.txt"]


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_of(transformer("flux1"), tmp_path / "run")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Kept, "weight", full)
    refuse(run_dir, tmp_path / "out", ConfigError, r"DIR: .*out cannot be written \(.*No space left.*\); free space", form="bfl")
    assert not list((tmp_path / "out").iterdir())


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_dir = run_of(transformer("flux1"), tmp_path / "run")
    config = run_dir / "model" / "config.json"
    keys = json.loads(config.read_text())
    config.write_text(json.dumps({**keys, "num_layers": 1}))
    refuse(run_dir, tmp_path / "out", CheckpointError, "is not in the model; it is of another model")
    config.write_text(json.dumps({**keys, "pooled_projection_dim": 40}))
    refuse(run_dir, tmp_path / "out", CheckpointError, "it is of another model")
    config.write_text("[")
    refuse(run_dir, tmp_path / "out", CheckpointError, "has no readable config.json; name the folder of a run")
    (run_dir / "config.yaml").unlink()
    config.write_text(json.dumps(keys))
    refuse(run_dir, tmp_path / "out", CheckpointError, "lacks its file config.yaml; name the folder of a run as it was trained")
    assert not (tmp_path / "out").exists()


def test_command_writes_a_single_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = run_of(transformer("flux2"), tmp_path / "run")
    cases = (("out", ["--format", "bfl", "--dtype", "bf16"], 0), ("out", ["--format", "gguf"], 2), ("averages", ["--ema"], 2))
    for folder, options, code in cases:
        with pytest.raises(SystemExit) as ended:
            main(["export", str(run_dir), str(tmp_path / folder), *options])
        assert ended.value.code == code
    said = capsys.readouterr()
    assert said.out == f"exported run to {tmp_path / 'out' / 'run.safetensors'}\n"
    refused, without_average = said.err.splitlines()
    assert "'gguf' is not one of 'library', 'bfl'" in refused
    assert "--ema: run keeps no average of its weights" in without_average
