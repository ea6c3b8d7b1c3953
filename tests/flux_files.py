"""Tiny FLUX transformers and pipelines as diffusers makes and saves them, and runs that hold a checkpoint of one."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2TokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from fluxray.checkpoint import save
from fluxray.config.load import resolve, to_yaml
from fluxray.models.bfl import CONFIG_KEY, bfl_layout
from fluxray.protocols import RunState, Schedule, StateItem

SIZES = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}
FLUX1 = {"_class_name": "FluxTransformer2DModel", **SIZES, "pooled_projection_dim": 24, "axes_dims_rope": [4, 6, 6]}
FLUX2 = {"_class_name": "Flux2Transformer2DModel", **SIZES, "axes_dims_rope": [4, 4, 4, 4]}
CASES: dict[str, dict[str, Any]] = {
    "flux1": {**FLUX1, "guidance_embeds": True},
    "flux1 unguided": {**FLUX1, "guidance_embeds": False},
    "flux2": {**FLUX2, "guidance_embeds": True},
    "flux2 unguided": {**FLUX2, "guidance_embeds": False, "mlp_ratio": 2.5, "rope_theta": 500, "timestep_guidance_channels": 64},
}
FAMILIES = ("flux1", "flux2")


def transformer(case: str, seed: int = 0, **keys: Any) -> Any:
    """Return a transformer in which every parameter counts."""
    config = {**CASES[case], **keys}
    cls = getattr(diffusers, config["_class_name"])
    torch.manual_seed(seed)
    model = cls(**{key: value for key, value in config.items() if not key.startswith("_")}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@torch.no_grad()
def output(model: Any) -> Tensor:
    """Return a transformer's output for two noised images of 2 x 3 tokens with texts of 5."""
    generator, config = torch.Generator().manual_seed(3), model.config
    dtype = next(model.parameters()).dtype
    second = type(model).__name__ == FLUX2["_class_name"]

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    image_ids = torch.zeros(6, 4 if second else 3)
    image_ids[:, 1], image_ids[:, 2] = torch.arange(6) // 3, torch.arange(6) % 3
    inputs = {
        "hidden_states": noise(2, 6, config.in_channels),
        "encoder_hidden_states": noise(2, 5, config.joint_attention_dim),
        "timestep": torch.tensor([0.2, 0.7], dtype=dtype),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(5, 4 if second else 3),
        "guidance": torch.full((2,), 3.5) if config.guidance_embeds else None,
    }
    if not second:
        inputs["pooled_projections"] = noise(2, config.pooled_projection_dim)
    return model(**inputs, return_dict=False)[0]


def bfl_tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors as the single file has them."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layout = bfl_layout(type(model).__name__, {name: tensor.shape for name, tensor in parameters.items()})
    return {
        key: torch.cat([parameters[part.name][part.first : part.first + part.num_rows] for part in parts])
        for key, parts in layout.items()
    }


def write_single(model: Any, file: Path, prefix: str = "", **extra: Tensor) -> Path:
    """Write a single file as ComfyUI does, with what its shapes do not tell."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{prefix}{key}": tensor for key, tensor in bfl_tensors_of(model).items()} | extra
    save_file(tensors, file, {CONFIG_KEY: json.dumps({"axes_dims_rope": model.config.axes_dims_rope, **_rotary(model)})})
    return file


def _rotary(model: Any) -> dict[str, Any]:
    return {"rope_theta": model.config.rope_theta} if hasattr(model.config, "rope_theta") else {}


def pipeline(case: str, folder: Path, is_distilled: bool = False) -> Path:
    """Save a whole pipeline of tiny models, and return its folder."""
    scratch = folder.with_name(f"{folder.name} vocabularies")
    scratch.mkdir(parents=True)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    vae = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 16,
    }
    torch.manual_seed(1)
    if case.startswith("flux1"):
        clip = CLIPTextConfig(
            vocab_size=64, hidden_size=24, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, projection_dim=24
        )
        t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        made: Any = diffusers.FluxPipeline(
            scheduler,
            diffusers.AutoencoderKL(**vae, scaling_factor=0.3611, shift_factor=0.1159),
            CLIPTextModel(clip),
            _clip_tokenizer(scratch),
            T5EncoderModel(t5),
            T5TokenizerFast(vocab=[(token, -1.0) for token in ("<pad>", "</s>", "<unk>", "▁", *"abcdefghrt")], extra_ids=0),
            transformer(case),
        )
    else:
        qwen3 = Qwen3Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
        made = diffusers.Flux2KleinPipeline(
            scheduler,
            diffusers.AutoencoderKLFlux2(**vae),
            Qwen3ForCausalLM(qwen3),
            Qwen2TokenizerFast(tokenizer_object=_words()),
            transformer(case),
            is_distilled=is_distilled,
        )
    made.save_pretrained(folder)
    return folder


def _words() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", "a", "red", "cat", "on", "the", "roof"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return tokenizer


def _clip_tokenizer(folder: Path) -> CLIPTokenizer:
    tokens = ["<|startoftext|>", "<|endoftext|>", *(f"{letter}{end}" for letter in "abcdefgh" for end in ("", "</w>"))]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def run_of(model: Any, folder: Path, weights: str | None = None, **parts: Tensor) -> Path:
    """Return the folder of a run whose one checkpoint holds the model's parameters."""
    model.save_config(folder / "model")
    config = resolve("cpu", "flux1-tiny", () if weights is None else {"model.weights": weights})
    (folder / "config.yaml").write_text(to_yaml(config))
    items = [StateItem("weights", name, p.shape, None, p.detach()) for name, p in model.named_parameters()]
    save(folder, RunState(0, Schedule("constant", 1e-3, 0, 0, 0.0)), items)
    return folder
