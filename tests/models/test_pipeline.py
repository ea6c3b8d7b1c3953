"""Published FLUX models as diffusers saves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from fluxray.errors import ConfigError
from fluxray.models.pipeline import PipelineFacts, flux_config, holds_flux, pipeline_facts, pipeline_folder
from fluxray.models.weights import PretrainedWeights
from tests.flux_files import CASES, FAMILIES, output, pipeline, transformer


def loaded(case: str, reference: str) -> Any:
    """Return a transformer with the weights that are read from `reference`."""
    model = transformer(case, seed=9)
    PretrainedWeights(reference).copy_into(model, [path for path, _ in model.named_modules()])
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {case: pipeline(case, root / case, is_distilled=True) for case in FAMILIES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40KB"}], ids=["one file", "shards"])
def test_what_the_library_saves_is_loaded_exactly(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = transformer(case)
    model.save_pretrained(tmp_path / "transformer", **options)
    assert (len(list(tmp_path.glob("transformer/*.safetensors"))) > 3) == bool(options)
    for place in (tmp_path, tmp_path / "transformer"):
        other = loaded(case, f"path:{place}")
        assert all(torch.equal(other.get_parameter(name), tensor) for name, tensor in model.named_parameters())
        assert torch.equal(output(other), output(model))
        config = flux_config(f"path:{place}")
        assert config.items() >= CASES[case].items()
        assert pipeline_facts(f"path:{place}") is None and pipeline_folder(f"path:{place}") is None


def test_16_bit_files_become_fp32_parameters_of_equal_value(tmp_path: Path) -> None:
    model = transformer("flux1").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    other = loaded("flux1", f"path:{tmp_path}")
    assert all(
        other.get_parameter(name).dtype == torch.float32 and torch.equal(other.get_parameter(name), tensor.float())
        for name, tensor in model.named_parameters()
    )


def test_whole_pipelines_tell_their_facts(folders: dict[str, Path]) -> None:
    first, second = (pipeline_facts(f"path:{folders[case]}") for case in FAMILIES)
    assert isinstance(first, PipelineFacts) and isinstance(second, PipelineFacts)
    assert (first.pipeline, first.is_distilled, first.latent_channels) == ("FluxPipeline", None, 4)
    assert (first.latent_scale, first.latent_shift, first.batch_norm, first.batch_norm_eps) == (0.3611, 0.1159, None, None)
    assert first.text_encoders == {"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"}
    assert first.scheduler["use_dynamic_shifting"] is True and set(first.tokenizers) == {"tokenizer", "tokenizer_2"}
    assert (second.pipeline, second.is_distilled, second.latent_channels) == ("Flux2KleinPipeline", True, 4)
    assert (second.latent_scale, second.latent_shift, second.batch_norm_eps) == (None, None, 1e-4)
    assert second.batch_norm == ("bn.running_mean", "bn.running_var")
    assert second.text_encoders == {"text_encoder": "Qwen3ForCausalLM"}
    assert second.vae["_class_name"] == "AutoencoderKLFlux2"
    with pytest.raises(AttributeError):
        second.pipeline = "another"  # type: ignore[misc]


@pytest.mark.parametrize("case", FAMILIES)
def test_whole_pipelines_are_loaded_and_found_again(case: str, folders: dict[str, Path]) -> None:
    reference = f"path:{folders[case]}"
    assert torch.equal(output(loaded(case, reference)), output(transformer(case)))
    assert holds_flux(reference) and pipeline_folder(reference) == folders[case]
    assert pipeline_facts(f"{reference}/transformer") is None


def refusal(place: Path) -> str:
    with pytest.raises(ConfigError) as failure:
        loaded("flux1", f"path:{place}")
    message = str(failure.value)
    assert message.startswith(f"model.weights: 'path:{place}' ") and "\n" not in message and len(message) < 500
    return message


def edited(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    transformer("flux1").save_pretrained(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"has, beyond its configuration, single_transformer_blocks\.2\..* and 13 more; it is"):
        PretrainedWeights(f"path:{tmp_path}").copy_into(transformer("flux1", num_single_layers=2), [""])
    with pytest.raises(ConfigError, match=r"lacks transformer_blocks\.2\..* and \d+ more; it is of another model"):
        PretrainedWeights(f"path:{tmp_path}").copy_into(transformer("flux1", num_layers=3), [""])
    with pytest.raises(ConfigError, match=r"context_embedder.weight is \[32, 32\] in its files, \[32, 48\] by its configuration"):
        PretrainedWeights(f"path:{tmp_path}").copy_into(transformer("flux1", joint_attention_dim=48), [""])
    with pytest.raises(ConfigError, match=r"lacks .* it is of another model"):
        PretrainedWeights(f"path:{tmp_path}").copy_into(transformer("flux2"), [""])
    edited(tmp_path / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    assert refusal(tmp_path).endswith("is quantised; name the model in bf16 or fp32")
    edited(tmp_path / "config.json", quantization_config=None, _class_name="SD3Transformer2DModel")
    assert "holds no FLUX model; name a pipeline, its transformer" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be loaded" in refusal(tmp_path)
    assert not holds_flux(f"path:{tmp_path}") and file.exists()


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    transformer("flux1").save_pretrained(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    assert "cannot be loaded" in refusal(tmp_path) and "check that its files are complete" in refusal(tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    transformer("flux1").save_pretrained(tmp_path / "a", max_shard_size="40KB")
    sorted((tmp_path / "a").glob("*.safetensors"))[1].unlink()
    assert "cannot be loaded" in refusal(tmp_path / "a")
    (tmp_path / "a" / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    assert "cannot be loaded" in refusal(tmp_path / "a")
    (tmp_path / "a" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    (tmp_path / "a" / "diffusion_pytorch_model.bin").write_bytes(b"")
    assert "(diffusion_pytorch_model.safetensors is missing)" in refusal(tmp_path / "a")


def test_pipelines_of_other_models_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    index = json.loads((folders["flux1"] / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert refusal(tmp_path).endswith("lacks transformer/config.json of a FLUX model; check that it is complete")
    edited(tmp_path / "model_index.json", transformer=["diffusers", "SD3Transformer2DModel"], _class_name="SD3Pipeline")
    assert refusal(tmp_path).endswith("is a SD3Pipeline without a FLUX transformer; name another one")
    edited(tmp_path / "model_index.json", transformer=index["transformer"])
    transformer("flux1").save_config(tmp_path / "transformer")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(vae/config.json is missing\); check that its files are complete"):
        pipeline_facts(f"path:{tmp_path}")


@pytest.mark.parametrize("reference", ["flux", "path:", "hf:", "s3://a/b"])
def test_other_references_are_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither path:PLACE nor hf:NAME$"):
        flux_config(reference)


def test_hub_names_are_read_from_the_hub_cache_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    revision = "0123456789abcdef0123456789abcdef01234567"
    for name in ("whole", "sharded"):
        repository = tmp_path / f"models--org--{name}"
        snapshot = repository / "snapshots" / revision
        if name == "whole":
            pipeline("flux2", snapshot, is_distilled=True)
        else:
            transformer("flux2").save_pretrained(snapshot / "transformer", max_shard_size="40KB")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision)
        assert torch.equal(output(loaded("flux2", f"hf:org/{name}")), output(transformer("flux2")))
        assert flux_config(f"hf:org/{name}").items() >= CASES["flux2"].items()
    facts, folder = pipeline_facts("hf:org/whole"), pipeline_folder("hf:org/whole")
    assert facts is not None and facts.is_distilled and folder is not None and (folder / "vae" / "config.json").is_file()
    assert pipeline_facts("hf:org/sharded") is None and pipeline_folder("hf:org/sharded") is None
    with pytest.raises(ConfigError, match=r"^model\.weights: 'hf:org/none' holds no FLUX model; check the name, the network"):
        flux_config("hf:org/none")
    shutil.rmtree(folder / "text_encoder")
    with pytest.raises(ConfigError, match=r"^model\.weights: 'hf:org/whole' lacks its folder text_encoder; complete the"):
        pipeline_folder("hf:org/whole")
