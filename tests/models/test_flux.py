import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Pipeline, FluxPipeline
from torch import nn

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
from fluxray.models import flux_stack, flux_verify
from fluxray.models.flux_facts import flux_facts
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.models.flux_verify import check_flux_stack
from fluxray.protocols import FlowBatch
from tests.models.flux_helpers import CASES, CPU, FAMILIES, FLUX2, built, draw_for, flux_config, output_of

SHAPES = {"wide": (2, 3, 4), "high": (5, 1, 1), "one token": (1, 1, 3)}


def library_output(model: Any, batch: FlowBatch, dtype: torch.dtype) -> torch.Tensor:
    """Return the output of diffusers' forward, called as its pipelines call it."""
    inputs: dict[str, Any] = {}
    if batch.pooled is None:
        latents = torch.empty(len(batch.noised), 1, batch.height, batch.width)
        inputs["img_ids"] = Flux2Pipeline._prepare_latent_ids(latents)
        inputs["txt_ids"] = Flux2Pipeline._prepare_text_ids(batch.text)
    else:
        inputs["img_ids"] = FluxPipeline._prepare_latent_image_ids(1, batch.height, batch.width, CPU, dtype)
        inputs["txt_ids"] = torch.zeros(batch.text.shape[1], 3, dtype=dtype)
        inputs["pooled_projections"] = batch.pooled.to(dtype)
    return model(
        hidden_states=batch.noised.to(dtype),
        encoder_hidden_states=batch.text.to(dtype),
        timestep=batch.sigma,
        guidance=batch.guidance,
        return_dict=False,
        **inputs,
    )[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_the_librarys_bit_for_bit(case: str, precision: str) -> None:
    stack = built(flux_config(case))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    stack.to(dtype)
    for height, width, num_text in SHAPES.values():
        batch = draw_for(flux_config(case), 3, height=height, width=width, num_text=num_text)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
            actual, expected = output_of(stack, batch), library_output(stack.model, batch, dtype)
        assert torch.equal(actual, expected)
        gradients = []
        for output in (actual, expected):
            stack.zero_grad()
            output.float().square().mean().backward()
            gradients.append({name: p.grad for name, p in stack.model.named_parameters()})
        for name, gradient in gradients[1].items():
            assert gradient is not None and torch.equal(gradients[0][name], gradient), name


def test_noise_level_and_guidance_are_rounded_as_the_library_rounds_them() -> None:
    for case in ("flux1 dev", "flux2 dev"):
        stack = built(flux_config(case)).to(torch.bfloat16)
        seen: list[torch.Tensor] = []
        for module in stack.model.modules():
            if type(module).__name__ == "Timesteps":
                module.register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0]))
        output_of(stack, draw_for(flux_config(case)))
        sigma, guidance = seen
        batch = draw_for(flux_config(case))
        assert batch.guidance is not None
        assert torch.equal(sigma, batch.sigma.bfloat16() * 1000) and torch.equal(guidance, batch.guidance.bfloat16() * 1000)


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_device_or_is_made_elsewhere(case: str) -> None:
    """A meta tensor has no value that the host could read, and does not mix with the host's."""
    stack = build_flux(flux_config(case), 0)
    output = output_of(stack, draw_for(flux_config(case)).to(torch.device("meta")))
    assert output.device.type == "meta" and output.shape == (2, 6, 8)


@pytest.mark.parametrize("case", FAMILIES)
def test_carry_and_shared_tensors(case: str) -> None:
    stack = built(flux_config(case))
    state = stack.prologue(draw_for(flux_config(case)))
    given = [tensor.clone() for tensor in state.shared.values() if tensor is not None]
    wanted = [name for name, tensor in state.shared.items() if tensor is not None and tensor.requires_grad]
    assert wanted == (["temb"] if case == "flux1 dev" else ["temb", "mod_image", "mod_text", "mod_single"])
    sizes = [[tuple(tensor.shape[1:]) for tensor in state.carry]]
    for block in stack.blocks:
        state = block(state)
        sizes.append([tuple(tensor.shape[1:]) for tensor in state.carry])
    apart, joined = [(6, 16), (4, 16)], [(10, 16)]
    assert sizes == ([apart] * 5 if case == "flux1 dev" else [apart] * 3 + [joined] * 3)
    assert all(torch.equal(tensor, old) for tensor, old in zip(state.shared.values(), given, strict=True))


@pytest.mark.parametrize("case", ["flux1 dev", "flux2 klein"])
@pytest.mark.parametrize("key", ["num_layers", "num_single_layers"])
def test_one_kind_of_blocks_alone(case: str, key: str) -> None:
    model = flux_config(case, **{key: 0})
    check_flux_stack(model)
    assert len(built(model).blocks) in (2, 3)


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("case", FAMILIES)
def test_first_values_are_keyed_by_seed_and_path(case: str, fused_qkv: bool) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model = flux_config(case, fused_qkv)
    first, other = built(model), built(model, seed=1)
    backwards = build_flux(model, 0)
    for block in (None, *backwards.blocks[::-1]):
        backwards.materialise(CPU, block)
    assert torch.equal(torch.rand(3), expected)
    others = dict(other.model.named_parameters())
    drawn = 0
    for (name, one), (_, two) in zip(first.model.named_parameters(), backwards.model.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        is_gain = one.ndim == 1 and name.endswith("weight")
        assert torch.equal(one, torch.ones_like(one)) if is_gain else not torch.equal(one, others[name]), name
        drawn += not is_gain
    assert drawn > 20
    weights = [module.weight for module in first.model.modules() if isinstance(module, nn.Linear)]
    assert all(0.2 < weight.abs().max() * weight.shape[1] ** 0.5 <= 1 for weight in weights)  # torch's own rule


def test_published_weights_are_asked_for_by_path() -> None:
    class Weights:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def copy_into(self, model: nn.Module, paths) -> None:
            for path in paths:
                self.asked.append(path)
                for parameter in model.get_submodule(path).parameters(recurse=False):
                    nn.init.constant_(parameter, 2.0)

    weights = Weights()
    stack = build_flux(flux_config("flux1 dev"), 0, weights=weights)
    stack.materialise(CPU, stack.blocks[1])
    assert weights.asked[0] == "transformer_blocks.1" and "transformer_blocks.1.attn.to_q" in weights.asked
    stack.materialise(CPU, None)
    assert "" in weights.asked and not any(path.startswith("single") and "." in path for path in weights.asked)
    assert all((p == 2).all() for p in stack.model.x_embedder.parameters())


@pytest.mark.parametrize(
    ("case", "told", "expected"),
    [
        ("flux1 dev", None, ("flux1", 8, 12, 10, True, False, 2, 8)),
        ("flux1 schnell", None, ("flux1", 8, 12, 10, False, True, 2, 8)),
        ("flux2 dev", None, ("flux2", 8, 12, None, True, False, 2, 8)),
        ("flux2 klein", None, ("flux2", 8, 12, None, False, None, 2, 8)),
        ("flux2 klein", True, ("flux2", 8, 12, None, False, True, 2, 8)),
    ],
)
def test_facts_come_from_the_configuration(case: str, told: bool | None, expected: tuple[Any, ...]) -> None:
    facts = flux_facts(flux_config(case), told)
    assert tuple(getattr(facts, name) for name in facts.__dataclass_fields__) == expected


def test_facts_know_the_librarys_defaults() -> None:
    first, second = (flux_facts(ModelConfig(config={"_class_name": case["_class_name"]})) for case in (CASES["flux1 dev"], FLUX2))
    assert (first.in_channels, first.text_width, first.pooled_width, first.num_heads) == (64, 4096, 768, 24)
    assert (second.in_channels, second.text_width, second.embeds_guidance, second.num_heads) == (128, 15360, True, 48)


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_check_at_start_passes(case: str, fused_qkv: bool) -> None:
    check_flux_stack(flux_config(case, fused_qkv, num_layers=9, num_single_layers=9))


@pytest.mark.parametrize("fault", ["ids", "carry", "noise level"])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_check_at_start_refuses_another_function(case: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "ids":
        intact = FluxStack._position_ids
        monkeypatch.setattr(FluxStack, "_position_ids", lambda stack, batch: intact(stack, batch).flip(1))
    elif fault == "noise level":
        prologue = FluxStack.prologue
        monkeypatch.setattr(FluxStack, "prologue", lambda stack, batch: prologue(stack, _louder(batch)))
    else:
        block = flux_stack.FluxBlock.__call__
        monkeypatch.setattr(flux_stack.FluxBlock, "__call__", lambda self, state: _shifted(block(self, state)))
    family = case.split(maxsplit=1)[0]
    with pytest.raises(RuntimeError, match=f"^the block stack of {family} differs from the library's forward by"):
        check_flux_stack(flux_config(case))


def _louder(batch: FlowBatch) -> FlowBatch:
    return FlowBatch(**{**batch.__dict__, "sigma": batch.sigma * 1.01})


def _shifted(state: Any) -> Any:
    return state._replace(carry=tuple(tensor * 1.0001 for tensor in state.carry))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"_class_name": "Flux3Transformer2DModel"},
            "model.config._class_name: 'Flux3Transformer2DModel' is no FLUX transformer",
        ),
        ({"num_layer": 3}, "model.config.num_layer: is no key of Flux2Transformer2DModel; did you mean model.config.num_layers?"),
        ({"out_channels": 4}, "model.config.out_channels: 4, but a transformer of latents has 8; drop it"),
        ({"patch_size": 2}, "model.config.patch_size: 2, but a transformer of latents has 1; drop it"),
        ({"num_layers": 0, "num_single_layers": 0}, "model.config._class_name: Flux2Transformer2DModel has block kinds []"),
        ({"axes_dims_rope": [2, 2, 2, 4]}, "model.config: the library's own forward fails"),
        ({"attention_head_dim": "wide"}, "model.config: diffusers refuses it"),
    ],
)
def test_what_is_no_flux_transformer_is_refused_in_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_flux_stack(ModelConfig(config={**FLUX2, **keys}))
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_unknown_kinds_of_blocks_are_refused_in_one_line() -> None:
    class StrangeBlock(nn.Module):
        pass

    model: Any = build_flux(flux_config("flux1 dev"), 0).model
    model._repeated_blocks = [*model._repeated_blocks, "StrangeBlock"]
    model.single_transformer_blocks[1] = StrangeBlock()
    with pytest.raises(ConfigError, match="FluxTransformer2DModel has blocks of kind 'StrangeBlock'; known are FluxTransformerB"):
        FluxStack(model, 0)
    model.single_transformer_blocks, model.transformer_blocks = model.transformer_blocks, nn.ModuleList([StrangeBlock()])
    with pytest.raises(ConfigError, match="has blocks of kind 'StrangeBlock'"):
        FluxStack(model, 0)


def test_a_forward_of_the_library_that_overflows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = flux_verify.library_output
    monkeypatch.setattr(flux_verify, "library_output", lambda *args: intact(*args) * torch.inf)
    with pytest.raises(ConfigError, match="gives no finite numbers"):
        check_flux_stack(flux_config("flux1 dev"))


@torch.no_grad()
def test_published_weights_bring_their_configuration(tmp_path: Path) -> None:
    published = built(flux_config("flux2 klein"), seed=5).eval()
    published.model.save_pretrained(tmp_path)
    model = ModelConfig(weights=f"path:{tmp_path}", config={"num_layers": 2, "axes_dims_rope": (2, 2, 2, 2)})
    batch = draw_for(model)
    assert torch.equal(output_of(built(model).eval(), batch), output_of(published, batch))
    assert flux_facts(model) == flux_facts(flux_config("flux2 klein"))
    check_flux_stack(model)
    for key, value in (("num_layers", 3), ("_class_name", "FluxTransformer2DModel")):
        with pytest.raises(ConfigError, match=rf"^model\.config\.{key}: .*, but path:.* has .*; drop the key or the weights$"):
            build_flux(model.model_copy(update={"config": {key: value}}), 0)


@pytest.mark.parametrize("is_distilled", [True, False])
def test_a_pipeline_tells_whether_it_is_distilled(is_distilled: bool, tmp_path: Path) -> None:
    build_flux(flux_config("flux2 klein"), 0).model.save_config(tmp_path / "transformer")
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": is_distilled}
    index["transformer"] = ["diffusers", "Flux2Transformer2DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name, config in (("vae", {"latent_channels": 2, "batch_norm_eps": 1e-4}), ("scheduler", {})):
        (tmp_path / name).mkdir()
        file = "config.json" if name == "vae" else "scheduler_config.json"
        (tmp_path / name / file).write_text(json.dumps(config))
    assert flux_facts(ModelConfig(weights=f"path:{tmp_path}")).is_distilled is is_distilled
