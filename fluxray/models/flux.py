"""FLUX transformers of diffusers on the meta device: what the memory plan needs of them."""

import difflib
import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError, one_line

CLASSES = ("FluxTransformer2DModel", "Flux2Transformer2DModel")
"""`_class_name` of the config.json files that diffusers writes."""

RESOLUTION, TEXT_TOKENS = 1024, 512
"""What a row is while a plan is made: an image of 1024 x 1024 pixels and the text length of the published pipelines."""

PIXELS_PER_TOKEN = 16
"""Along one side: the VAE takes 8 x 8 pixels, and 2 x 2 of its positions make a token."""


def is_flux(model: ModelConfig) -> bool:
    """Return whether the configuration names a class of diffusers."""
    return "_class_name" in model.config


def meta_transformer(model: ModelConfig) -> nn.Module:
    """Return diffusers' transformer, fp32, on the meta device, in training mode; ConfigError for what diffusers does not know."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # what it lacks is for inference in 4 bits
    import diffusers

    keys = {key: value for key, value in model.config.items() if not key.startswith("_")}
    name = model.config["_class_name"]
    if name not in CLASSES:
        raise ConfigError(f"model.config._class_name: {name!r} is no FLUX transformer; use one of {', '.join(CLASSES)}")
    cls: Any = getattr(diffusers, name)
    known = [key for key in inspect.signature(cls.__init__).parameters if key != "self"]
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean model.config.{close[0]}?" if close else "drop it"
            raise ConfigError(f"model.config.{key}: is no key of {name}; {hint}")
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
    second = type(model).__name__ == CLASSES[1]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = {
        "hidden_states": empty(num_rows, image, config.in_channels),
        "encoder_hidden_states": empty(num_rows, TEXT_TOKENS, config.joint_attention_dim),
        "timestep": empty(num_rows),
        "img_ids": empty(image, 4 if second else 3),
        "txt_ids": empty(TEXT_TOKENS, 4 if second else 3),
        "guidance": empty(num_rows, dtype=torch.float32) if config.guidance_embeds else None,
    }
    if not second:
        inputs["pooled_projections"] = empty(num_rows, config.pooled_projection_dim)
    return model(**inputs, return_dict=False)[0]
