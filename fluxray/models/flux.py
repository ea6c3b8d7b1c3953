"""FLUX transformers of diffusers on the meta device."""

import torch
from torch import nn

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError, one_line
from fluxray.models.flux_facts import library_config, transformer_class


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
