"""Checks of configuration values that the library makes late, without naming the key, or not at all."""

import difflib
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from fluxray.errors import ConfigError

COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
PROBABILITIES = ("attention_dropout", "hidden_dropout")


def check_values(model_type: str, keys: Mapping[str, Any]) -> None:
    """Raise ConfigError for sizes that no model of the family has, for dropout outside [0, 1) and for an unknown activation.

    What `keys` leave open has the family's own default.
    """
    family = CONFIG_MAPPING[model_type]
    activation = "hidden_activation" if hasattr(family, "hidden_activation") else "hidden_act"
    values = {key: keys.get(key, getattr(family, key, None)) for key in (*COUNTS, *PROBABILITIES, activation)}
    for key in COUNTS:
        may_be_open = values[key] is None and getattr(family, key, None) is None
        if not may_be_open and (type(values[key]) is not int or values[key] < 1):
            raise ConfigError(f"model.config.{key}: {values[key]!r} is no whole number above 0; give one")
    for key in PROBABILITIES:
        value = keys.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ConfigError(f"model.config.{key}: {value!r} is no probability; use 0 or more and less than 1")
    _check_heads(values)
    if values[activation] not in ACT2FN:
        close = difflib.get_close_matches(str(values[activation]), ACT2FN, n=1)
        raise ConfigError(
            f"model.config.{activation}: {values[activation]!r} is unknown; use {close[0] if close else 'gelu or silu'}"
        )


def _check_heads(values: Mapping[str, Any]) -> None:
    hidden, heads, shared = values["hidden_size"], values["num_attention_heads"], values["num_key_value_heads"]
    if values["head_dim"] is None and hidden % heads:
        raise ConfigError(
            f"model.config.hidden_size: {hidden} is not a multiple of num_attention_heads {heads}; change one of them"
        )
    if shared is not None and heads % shared:
        raise ConfigError(
            f"model.config.num_key_value_heads: {shared} does not divide num_attention_heads {heads}; change one of them"
        )
