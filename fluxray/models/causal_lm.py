"""Causal language models of transformers as block stacks: GPT-NeoX, Llama, Qwen3.

Shapes: B micro-batch, S sequence, D hidden size, V vocabulary.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fluxray.config.schema import Kernel, ModelConfig
from fluxray.errors import ConfigError, one_line
from fluxray.models import attention
from fluxray.models.blocks import find_block_lists, materialise
from fluxray.models.values import check_values
from fluxray.models.weights import PretrainedWeights, location
from fluxray.protocols import Block, BlockStack, State, TextBatch
from fluxray.seeding import derive_seed

FAMILIES = ("gpt_neox", "llama", "qwen3")

REPORT_KEYS = {"attention_probs_dropout_prob": "attention_dropout", "hidden_dropout_prob": "hidden_dropout"}
"""Keys of a BERT-style config.json that GPTNeoXConfig would accept and ignore, and their names there."""

NOT_OF_THE_SHAPE = ("use_gradient_checkpointing", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a config.json that other parts of the configuration decide, or nothing does."""

ROPE_KEYS = {
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "llama": {"rope_theta": "rope_theta"},
    "qwen3": {"rope_theta": "rope_theta"},
}
"""Keys that each family's configuration reads into its `rope_parameters`, and their names there. It would ignore another's."""

EMBEDDING_INDEX = -1
"""Stands for the block index in the dropout key of the embedding."""


@dataclass(frozen=True)
class _Parts:
    """The library's submodules outside the blocks, under one name for all families."""

    embed: nn.Module
    embed_dropout: nn.Module | None
    rotary: nn.Module
    norm: nn.Module
    head: nn.Module
    layers_path: str


def library_config(model: ModelConfig, vocab_size: int | None = None) -> PretrainedConfig:
    """Return transformers' configuration of the model; `vocab_size` is used where the configuration leaves it open.

    Raises ConfigError for a family without a block list, for keys that the family's configuration does not have, and for keys
    that contradict those of the published `model.weights`.
    """
    if model.weights is not None:
        config = _published_config(model.weights)
        _check_family(config.model_type)
        _check_agrees(config, model)
        return config
    keys = dict(model.config)
    model_type = keys.get("model_type")
    if model_type is None:
        raise ConfigError("model.config.model_type: is missing; name a family, or choose a preset with --model")
    _check_family(model_type)
    wanted = _renamed(keys)
    known = _known_keys(model_type)
    for key in wanted:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean model.config.{close[0]}?" if close else "drop it"
            raise ConfigError(f"model.config.{key}: is no key of {model_type}; {hint}")
    check_values(model_type, wanted)
    if "vocab_size" not in wanted and vocab_size is not None:
        wanted["vocab_size"] = -(-vocab_size // 128) * 128
    wanted["use_cache"] = False
    try:
        return AutoConfig.for_model(model_type, **wanted)
    except Exception as error:  # noqa: BLE001 - the libraries' own validation raises what it likes
        raise ConfigError(f"model.config: transformers refuses it ({one_line(error)}); mend that key") from None


def build_causal_lm(
    model: ModelConfig, seed: int, vocab_size: int | None = None, kernel: Kernel | None = None
) -> "CausalLMStack":
    """Return the block stack of a model on the meta device; `CausalLMStack.materialise` gives its tensors memory and values.

    `kernel` computes attention; without one it is the library's own call of torch's SDPA, which chooses for itself.
    """
    config = library_config(model, vocab_size)
    weights = PretrainedWeights(model.weights) if model.weights is not None else None
    return CausalLMStack(meta_model(config, kernel), seed, weights, kernel)


def has_dropout(config: PretrainedConfig) -> bool:
    """Return whether a model of the families drops anything in training."""
    return any(getattr(config, key, 0.0) > 0 for key in ("hidden_dropout", "attention_dropout"))


def meta_model(config: PretrainedConfig, kernel: Kernel | None = None) -> PreTrainedModel:
    """Return the library's model, fp32, on the meta device, in training mode."""
    attention.register()
    own = "sdpa" if kernel is None else attention.NAME
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=own)
    except Exception as error:  # noqa: BLE001 - sizes that contradict each other show here
        raise ConfigError(f"model.config: transformers refuses it ({one_line(error)}); mend that key") from None
    return model.train()


@dataclass(frozen=True)
class CausalLMBlock:
    """One decoder layer of the library and how it is called."""

    name: str
    module: nn.Module
    index: int
    kind: str
    kernel: Kernel | None = None

    def __call__(self, state: State) -> State:
        """Return the state behind this layer."""
        (hidden_BSD,) = state.carry
        shared = state.shared
        keyed: dict[str, Any] = {} if self.kernel is None else {"kernel": self.kernel}
        keyed |= {name: shared[f"{name}.{self.kind}"] for name in attention.input_names(self.kernel)}
        if state.dropout_seed is not None:
            keyed["dropout_seed"] = derive_seed(state.dropout_seed, self.index)
        hidden_BSD = self.module(
            hidden_BSD,
            attention_mask=shared[f"mask.{self.kind}"],
            position_embeddings=(shared["cos"], shared["sin"]),
            **keyed,
        )
        return state._replace(carry=(hidden_BSD,))


class CausalLMStack(BlockStack):
    """A causal language model as prologue, blocks and epilogue (see `protocols.BlockStack`).

    `model` is the library's, which starts on the meta device. `weights` are published ones, or None for random initialisation by
    the library's own rule under `seed`. `kernel` computes attention (None: the library's own function).
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, seed: int, weights: PretrainedWeights | None = None, kernel: Kernel | None = None):
        super().__init__()
        self.model = model
        self._seed = seed
        self._weights = weights
        self._kernel: Kernel | None = kernel
        self._parts = _parts_of(model)
        self._windows = _windows(model.config)
        kinds: Sequence[str] = getattr(model.config, "layer_types", None) or ["full_attention"] * len(_layers(model))
        path = self._parts.layers_path
        self.blocks = tuple(
            CausalLMBlock(f"{path}.{i}", layer, i, kind, kernel)
            for i, (layer, kind) in enumerate(zip(_layers(model), kinds, strict=True))
        )
        self.has_dropout = has_dropout(model.config)
        embed_dropout = () if self._parts.embed_dropout is None else (self._parts.embed_dropout,)
        self.dropout_modules = (*embed_dropout, *(block.module for block in self.blocks))

    def prologue(self, batch: TextBatch) -> State:
        """Embed the tokens; compute rotary embeddings and what attention reads of the batch, which all blocks share."""
        parts = self._parts
        seed = batch.key.stream("dropout") if self.has_dropout and self.training and batch.key is not None else None
        hidden_BSD = parts.embed(batch.input_ids)
        if parts.embed_dropout is not None:
            keyed = {} if seed is None else {"dropout_seed": derive_seed(seed, EMBEDDING_INDEX)}
            hidden_BSD = parts.embed_dropout(hidden_BSD, **keyed)
        cos, sin = parts.rotary(hidden_BSD, position_ids=batch.position_ids)
        inputs = attention.attention_inputs(self._kernel, batch, self._windows)
        return State((hidden_BSD,), {"cos": cos, "sin": sin, **inputs}, seed)

    def epilogue(self, state: State, batch: TextBatch, loss_fn: Callable[[Tensor, Any], Any]) -> Any:
        """Apply the final norm and the head, then `loss_fn` to the logits [B, S, V]."""
        (hidden_BSD,) = state.carry
        return loss_fn(self._parts.head(self._parts.norm(hidden_BSD)), batch)

    def epilogue_pieces(self, state: State, batch: TextBatch, num_tokens: int) -> Sequence[tuple[State, TextBatch]]:
        """Return whole rows, as many as have `num_tokens` tokens, or parts of one row. Only carry and targets are cut."""
        (hidden_BSD,) = state.carry
        num_rows, length = batch.targets.shape
        rows, columns = max(num_tokens // length, 1), min(num_tokens, length)
        return [
            (
                state._replace(carry=(hidden_BSD[r : r + rows, c : c + columns],)),
                replace(batch, targets=batch.targets[r : r + rows, c : c + columns]),
            )
            for r in range(0, num_rows, rows)
            for c in range(0, length, columns)
        ]

    def materialise(self, device: torch.device, block: Block | None) -> None:
        """Give the tensors of one block (None: of all outside the blocks) memory on `device` and their first values."""
        inside = tuple(f"{b.name}." for b in self.blocks)
        every = [path for path, _ in self.model.named_modules()]
        if block is not None:
            paths = [path for path in every if path == block.name or path.startswith(f"{block.name}.")]
        else:
            paths = [path for path in every if not f"{path}.".startswith(inside)]
        materialise(self.model, paths, device, self._seed, self.model._init_weights)
        if block is None:
            self.model.tie_weights()
        if self._weights is not None:
            self._weights.copy_into(self.model, paths)


def _check_family(model_type: str) -> None:
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model.config.model_type: {model_type!r} has no block list in fluxray; families are {', '.join(FAMILIES)}"
        )


def _published_config(reference: str) -> PretrainedConfig:
    name = location(reference)
    try:
        return AutoConfig.from_pretrained(name, use_cache=False)
    except Exception as error:  # noqa: BLE001 - whatever the library and its file readers raise
        remedy = "check the name and the network" if reference.startswith("hf:") else "name the folder of a published model"
        raise ConfigError(f"model.weights: {reference!r} has no readable config.json ({one_line(error)}); {remedy}") from None


def _check_agrees(config: PretrainedConfig, model: ModelConfig) -> None:
    for key, value in {**model.config, **_renamed(model.config)}.items():
        if key in NOT_OF_THE_SHAPE or key in REPORT_KEYS:
            continue
        published = _published_value(config, key)
        if published != value:
            raise ConfigError(
                f"model.config.{key}: {value!r}, but {model.weights} has {published!r}; drop the key or the weights"
            )


def _published_value(config: PretrainedConfig, key: str) -> Any:
    in_rope = ROPE_KEYS[config.model_type].get(key)
    return getattr(config, key, None) if in_rope is None else config.rope_parameters[in_rope]


def _renamed(keys: dict[str, Any]) -> dict[str, Any]:
    dropped = (*NOT_OF_THE_SHAPE, "model_type")
    return {REPORT_KEYS.get(key, key): value for key, value in keys.items() if key not in dropped}


def _known_keys(model_type: str) -> list[str]:
    config_class = CONFIG_MAPPING[model_type]
    return sorted({*config_class().to_dict(), *config_class.attribute_map, *ROPE_KEYS[model_type], "rope_scaling"})


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    lists = find_block_lists(model)
    if len(lists) != 1:
        raise ConfigError(f"model.config.model_type: {model.config.model_type!r} has {len(lists)} block lists; one is wanted")
    return lists[0][1]


def _parts_of(model: PreTrainedModel) -> _Parts:
    base: Any = model.base_model
    path = f"{model.base_model_prefix}.layers"
    head: Any = model.get_output_embeddings()
    if model.config.model_type == "gpt_neox":
        return _Parts(base.embed_in, base.emb_dropout, base.rotary_emb, base.final_layer_norm, head, path)
    return _Parts(base.embed_tokens, None, base.rotary_emb, base.norm, head, path)


def _windows(config: PretrainedConfig) -> dict[str, int | None]:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"model.config.layer_types: {sorted(unknown)[0]!r} is not supported; use full_attention or sliding_attention"
        )
    return {kind: config.sliding_window if kind == "sliding_attention" else None for kind in sorted(kinds)}
