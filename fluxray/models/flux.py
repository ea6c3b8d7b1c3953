"""FLUX transformers of diffusers on the meta device, and what the memory plan needs of them."""

from typing import Any

import torch
from torch import Tensor, nn

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError, one_line
from fluxray.models.flux_facts import library_config, transformer_class

RESOLUTION, TEXT_TOKENS = 1024, 512
"""What a row is while a plan is made: an image of 1024 x 1024 pixels and the text length of the published pipelines."""

PIXELS_PER_TOKEN = 16
"""Along one side: the VAE takes 8 x 8 pixels, and 2 x 2 of its positions make a token."""


def is_flux(model: ModelConfig) -> bool:
    """Return whether the configuration names a class of diffusers."""
    return "_class_name" in model.config


def meta_transformer(model: ModelConfig) -> nn.Module:
    """Return diffusers' transformer, fp32, on the meta device, in training mode; ConfigError for what diffusers does not know."""
    config = library_config(model)
    cls = transformer_class(config["_class_name"])
    keys = {key: value for key, value in config.items() if not key.startswith("_")}
    try:
        with torch.device("meta"):
            return cls(**keys).train()
    except Exception as error:  # noqa: BLE001 - the library's own constructors raise what they like
        raise ConfigError(f"model.config: diffusers refuses it ({one_line(error)}); mend that key") from None


def row_tokens() -> int:
    """Return the tokens of one row: those of the image and those of its text."""
    return (RESOLUTION // PIXELS_PER_TOKEN) ** 2 + TEXT_TOKENS


def run_transformer(model: Any, num_rows: int) -> Tensor:
    """Return the output [rows, image tokens, channels] of a meta transformer for so many images with text."""
    config = model.config
    dtype = next(model.parameters()).dtype
    image = (RESOLUTION // PIXELS_PER_TOKEN) ** 2
    pooled_width = getattr(config, "pooled_projection_dim", None)
    num_axes = 4 if pooled_width is None else 3

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = {
        "hidden_states": empty(num_rows, image, config.in_channels),
        "encoder_hidden_states": empty(num_rows, TEXT_TOKENS, config.joint_attention_dim),
        "timestep": empty(num_rows),
        "img_ids": empty(image, num_axes),
        "txt_ids": empty(TEXT_TOKENS, num_axes),
        "guidance": empty(num_rows, dtype=torch.float32) if config.guidance_embeds else None,
    }
    if pooled_width is not None:
        inputs["pooled_projections"] = empty(num_rows, pooled_width)
    return model(**inputs, return_dict=False)[0]
