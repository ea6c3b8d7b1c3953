"""What the families of language models differ in: keys, names of submodules, rotary embeddings, windows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from fluxray.errors import ConfigError

FAMILIES = ("gpt_neox", "llama", "qwen3", "gemma3_text")

REPORT_KEYS = {"attention_probs_dropout_prob": "attention_dropout", "hidden_dropout_prob": "hidden_dropout"}
"""Keys of a BERT-style config.json that GPTNeoXConfig would accept and ignore, and their names there."""

ROPE_KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt_neox": {"rotary_emb_base": ("rope_theta",), "rotary_pct": ("partial_rotary_factor",)},
    "llama": {"rope_theta": ("rope_theta",)},
    "qwen3": {"rope_theta": ("rope_theta",)},
    "gemma3_text": {
        "rope_theta": ("full_attention", "rope_theta"),
        "rope_local_base_freq": ("sliding_attention", "rope_theta"),
    },
}
"""Keys that each family's configuration reads into its `rope_parameters`, and their places there. It would ignore another's."""

OTHER_KEYS: Mapping[str, Mapping[str, str]] = {"gemma3_text": {"sliding_window_pattern": "_sliding_window_pattern"}}
"""Keys of older files that a family's configuration still reads, and where it keeps them."""

NOT_COMPUTED: Mapping[str, Mapping[str, str]] = {
    "gemma3_text": {
        "final_logit_softcapping": "the block stack does not cap logits",
        "attn_logit_softcapping": "the library itself ignores it",
        "use_bidirectional_attention": "language modelling is causal",
    }
}
"""Keys that must be unset, since nothing here computes what they ask for, and why."""


@dataclass(frozen=True)
class Parts:
    """The library's submodules outside the blocks, under one name for all families."""

    embed: nn.Module
    embed_dropout: nn.Module | None
    rotary: nn.Module
    norm: nn.Module
    head: nn.Module
    layers_path: str


def parts_of(model: PreTrainedModel) -> Parts:
    """Return a model's parts."""
    base: Any = model.base_model
    path = f"{model.base_model_prefix}.layers"
    head: Any = model.get_output_embeddings()
    if model.config.model_type == "gpt_neox":
        return Parts(base.embed_in, base.emb_dropout, base.rotary_emb, base.final_layer_norm, head, path)
    return Parts(base.embed_tokens, None, base.rotary_emb, base.norm, head, path)


def rotary_embeddings(
    model: PreTrainedModel, rotary: nn.Module, hidden_BSD: Tensor, position_ids: Tensor, kinds: Collection[str]
) -> dict[str, Tensor]:
    """Return `cos.KIND` and `sin.KIND` for each kind of layer, in the dtype of `hidden_BSD`.

    Gemma3 has other frequencies in sliding layers, the other families one set for all.
    """
    own = model.config.model_type == "gemma3_text"
    same = None if own else rotary(hidden_BSD, position_ids=position_ids)
    found: dict[str, Tensor] = {}
    for kind in kinds:
        cos, sin = rotary(hidden_BSD, position_ids, kind) if same is None else same
        found |= {f"cos.{kind}": cos, f"sin.{kind}": sin}
    return found


def windows_of(config: PretrainedConfig) -> dict[str, int | None]:
    """Return the sliding window of each kind of layer that the model has, None for full attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"model.config.layer_types: {sorted(unknown)[0]!r} is not supported; use full_attention or sliding_attention"
        )
    return {kind: config.sliding_window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def check_family(model_type: str) -> None:
    """Raise ConfigError for a family that is not among FAMILIES."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model.config.model_type: {model_type!r} has no block list in fluxray; families are {', '.join(FAMILIES)}"
        )


def check_computed(config: PretrainedConfig) -> None:
    """Raise ConfigError for what a model's configuration asks for and nothing here computes."""
    for key, reason in NOT_COMPUTED.get(config.model_type, {}).items():
        value = getattr(config, key, None)
        if value:
            raise ConfigError(f"model.config.{key}: {value!r}, but {reason}; set it to null")


def known_keys(model_type: str) -> list[str]:
    """Return the keys that a family's configuration has or reads."""
    family = CONFIG_MAPPING[model_type]
    own = {*family().to_dict(), *family.attribute_map, *ROPE_KEYS[model_type], *OTHER_KEYS.get(model_type, {}), "rope_scaling"}
    return sorted(key for key in own if not key.startswith("_"))


def value_of(config: PretrainedConfig, key: str) -> Any:
    """Return what a configuration holds for a key, wherever it keeps it."""
    place = ROPE_KEYS[config.model_type].get(key)
    if place is None:
        return getattr(config, OTHER_KEYS.get(config.model_type, {}).get(key, key), None)
    value: Any = config.rope_parameters
    for name in place:
        value = value[name]
    return value
