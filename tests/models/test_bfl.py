"""The single-file format against diffusers' own converters."""

import json
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from torch import Tensor

from fluxray.config.load import resolve
from fluxray.errors import ConfigError
from fluxray.models.bfl import PREFIX, bfl_config, bfl_layout, shape_of
from fluxray.models.flux import meta_transformer
from fluxray.models.pipeline import find_flux, flux_config, holds_flux
from fluxray.models.stored import Stored
from fluxray.models.weights import PretrainedWeights
from tests.flux_files import CASES, bfl_tensors_of, output, transformer, write_single

PUBLISHED_WIDTH = 3072
"""The width of FLUX.1, which diffusers' converter takes for granted."""


def librarys_converter(case: str, width: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return diffusers' own function from a single file's tensors to its names, for a model of another width."""
    if case.startswith("flux2"):
        return single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers
    convert = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    constants = tuple(width if value == PUBLISHED_WIDTH else value for value in convert.__code__.co_consts)
    assert constants != convert.__code__.co_consts
    return FunctionType(convert.__code__.replace(co_consts=constants), convert.__globals__)


def loaded(case: str, reference: str) -> Any:
    """Return a transformer with the weights that are read from `reference`."""
    model = transformer(case, seed=9)
    PretrainedWeights(reference).copy_into(model, [path for path, _ in model.named_modules()])
    return model


def equal(model: Any, other: Any) -> bool:
    parameters = dict(other.named_parameters())
    return all(torch.equal(parameters.pop(name), tensor) for name, tensor in model.named_parameters()) and not parameters


@pytest.mark.parametrize("case", CASES)
def test_librarys_converter_makes_the_model_of_the_file(case: str) -> None:
    model = transformer(case)
    found = librarys_converter(case, model.inner_dim)(bfl_tensors_of(model))
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", PREFIX], ids=["plain", "prefixed"])
def test_file_is_read_as_it_was_written(case: str, prefix: str, tmp_path: Path) -> None:
    model = transformer(case)
    extra = {"vae.decoder.conv_in.weight": torch.ones(2, dtype=torch.int64)} if prefix else {}
    file = write_single(model, tmp_path / "model.safetensors", prefix, **extra)
    for place in (file, tmp_path):
        other = loaded(case, f"path:{place}")
        assert equal(model, other) and torch.equal(output(other), output(model))
    config = flux_config(f"path:{file}")
    own = {key: value for key, value in model.config.items() if not key.startswith("_") and value is not None}
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}.items() <= config.items()
    assert config["_class_name"] == type(model).__name__


def test_norms_may_be_called_weights(tmp_path: Path) -> None:
    model = transformer("flux2")
    renamed = {key.replace("_norm.scale", "_norm.weight"): tensor for key, tensor in bfl_tensors_of(model).items()}
    assert sum(key.endswith("_norm.weight") for key in renamed) == 2 * 4 + 3 * 2
    save_file(renamed, tmp_path / "a.safetensors", {"transformer_config": json.dumps({"axes_dims_rope": [4, 4, 4, 4]})})
    assert equal(model, loaded("flux2", f"path:{tmp_path / 'a.safetensors'}"))


@pytest.mark.parametrize(("preset", "num_tensors"), [("flux1-dev", 780), ("flux2-dev", None), ("flux2-klein-4b", None)])
def test_published_shapes_give_the_published_configuration(preset: str, num_tensors: int | None) -> None:
    config = resolve("cpu", preset, ()).model
    shapes = {name: parameter.shape for name, parameter in meta_transformer(config).named_parameters()}
    layout = bfl_layout(config.config["_class_name"], shapes)
    assert num_tensors is None or len(layout) == num_tensors
    stored = {key: Stored("", key, torch.Size(shape_of(parts, shapes)), "BF16") for key, parts in layout.items()}
    found = bfl_config(stored, {})
    assert config.config.items() <= found.items()
    other = meta_transformer(config.model_copy(update={"config": found}))
    assert {name: parameter.shape for name, parameter in other.named_parameters()} == shapes
    expected: Any = meta_transformer(config)
    for key in ("axes_dims_rope", "rope_theta", "eps", "mlp_ratio"):
        if hasattr(expected.config, key):
            told = getattr(expected.config, key)
            assert found[key] == (list(told) if isinstance(told, tuple) else told)


def test_queries_keys_and_values_lie_one_below_the_other() -> None:
    model = transformer("flux1")
    tensors = bfl_tensors_of(model)
    attention, single = model.transformer_blocks[1].attn, model.single_transformer_blocks[2]
    assert torch.equal(tensors["double_blocks.1.txt_attn.qkv.bias"][32:64], attention.add_k_proj.bias)
    assert torch.equal(tensors["single_blocks.2.linear1.weight"][96:], single.proj_mlp.weight)
    assert torch.equal(tensors["final_layer.adaLN_modulation.1.bias"].roll(32), model.norm_out.linear.bias)


def test_parameter_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--format: bfl has no place for another\.weight of FluxTransformer2DModel; use lib"):
        bfl_layout("FluxTransformer2DModel", {"x_embedder.weight": (4, 4), "another.weight": (4, 4)})


def refusal(place: Path) -> str:
    with pytest.raises(ConfigError) as failure:
        loaded("flux1", f"path:{place}")
    message = str(failure.value)
    assert message.startswith(f"model.weights: 'path:{place}' ") and "\n" not in message and len(message) < 500
    return message


def rewritten(tmp_path: Path, metadata: dict[str, str] | None = None, **changes: Tensor | None) -> Path:
    """Write a single file of FLUX.1 that differs from a whole one; dots are written as double underscores."""
    tensors = bfl_tensors_of(transformer("flux1"))
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    told = {"transformer_config": json.dumps({"axes_dims_rope": [4, 6, 6]})} if metadata is None else metadata
    save_file(tensors, tmp_path / "model.safetensors", told)
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    file = rewritten(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    assert "cannot be loaded" in refusal(file) and "check that its files are complete" in refusal(file)
    assert not holds_flux(f"path:{file}")


def test_other_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.ones(2)}, foreign)
    assert refusal(foreign).endswith("is no single file of a FLUX transformer; name one, or a model's folder")
    assert "holds no FLUX model; name a pipeline" in refusal(tmp_path)
    rewritten(tmp_path)
    assert find_flux(f"path:{tmp_path}").file == str(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "another.safetensors")
    rewritten(tmp_path)
    assert refusal(tmp_path).endswith("holds another.safetensors and model.safetensors; name one of these files with path:")
    (tmp_path / "pickled.bin").write_bytes(b"x")
    assert "is no folder and no .safetensors file" in refusal(tmp_path / "pickled.bin")
    assert "is no folder and no .safetensors file" in refusal(tmp_path / "missing.safetensors")


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    told = refusal(rewritten(tmp_path, single_blocks__1__linear2__bias=None))
    assert told.endswith("lacks single_blocks.1.linear2.bias; it is of another model")
    assert "lacks txt_in.weight; it is of another model" in refusal(rewritten(tmp_path, txt_in__weight=None))
    told = refusal(rewritten(tmp_path, distilled_guidance_layer__weight=torch.ones(2)))
    assert told.endswith("has, beyond its configuration, distilled_guidance_layer.weight; it is of another model")
    told = refusal(rewritten(tmp_path, img_in__bias=torch.ones(31)))
    assert "cannot be loaded (img_in.bias is [31] in its files, [32] by its configuration); take both" in told
    told = refusal(rewritten(tmp_path, img_in__bias=torch.ones(32).to(torch.float8_e4m3fn)))
    assert told.endswith("has img_in.bias as F8_E4M3; name the model in bf16 or fp32")
    told = refusal(rewritten(tmp_path, img_in__weight=torch.ones(32)))
    assert "cannot be loaded" in told


@pytest.mark.parametrize("metadata", [{}, {"transformer_config": "{"}, {"transformer_config": "[]"}])
def test_unknown_rotary_embedding_is_refused(metadata: dict[str, str], tmp_path: Path) -> None:
    told = refusal(rewritten(tmp_path, metadata))
    assert "cannot be loaded" in told
    assert metadata or "its heads have 16 channels, and no rotary embedding is known for them" in told
