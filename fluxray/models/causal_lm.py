"""Causal language models of transformers as block stacks: GPT-NeoX, Llama, Qwen3, Gemma3.

Shapes: B micro-batch, S sequence, D hidden size, V vocabulary.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fluxray.config.adapter import AdapterConfig
from fluxray.config.schema import Kernel, ModelConfig
from fluxray.errors import ConfigError, one_line
from fluxray.models import attention, fused, lora
from fluxray.models.blocks import find_block_lists, first_value, materialise
from fluxray.models.families import (
    REPORT_KEYS,
    check_computed,
    check_family,
    known_keys,
    parts_of,
    rotary_embeddings,
    value_of,
    windows_of,
)
from fluxray.models.values import check_values
from fluxray.models.weights import PretrainedWeights, location
from fluxray.protocols import Block, BlockStack, State, TextBatch
from fluxray.seeding import derive_seed

NOT_OF_THE_SHAPE = (
    "use_gradient_checkpointing",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_sliding_window_pattern",
)
"""Keys of a config.json that other parts of the configuration decide (the last one: layer_types beside it), or nothing does."""

EMBEDDING_INDEX = -1
"""Stands for the block index in the dropout key of the embedding."""


def library_config(model: ModelConfig, vocab_size: int | None = None) -> PretrainedConfig:
    """Return transformers' configuration of the model; `vocab_size` is used where the configuration leaves it open.

    Raises ConfigError for a family without a block list, for keys that the family's configuration does not have, and for keys
    that contradict those of the published `model.weights`.
    """
    if model.weights is not None:
        config = _published_config(model.weights)
        check_family(config.model_type)
        _check_agrees(config, model)
        check_computed(config)
        return config
    keys = dict(model.config)
    model_type = keys.get("model_type")
    if model_type is None:
        raise ConfigError("model.config.model_type: is missing; name a family, or choose a preset with --model")
    check_family(model_type)
    wanted = _renamed(keys)
    known = known_keys(model_type)
    for key in wanted:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean model.config.{close[0]}?" if close else "drop it"
            raise ConfigError(f"model.config.{key}: is no key of {model_type}; {hint}")
    check_values(model_type, wanted)
    if "vocab_size" not in wanted and vocab_size is not None:
        wanted["vocab_size"] = -(-vocab_size // 128) * 128
    wanted["use_cache"] = False
    wanted.setdefault("pad_token_id", None)  # a family's own is of another tokenizer, and its embedding is not trained
    try:
        config = AutoConfig.for_model(model_type, **wanted)
    except Exception as error:  # noqa: BLE001 - the libraries' own validation raises what it likes
        raise ConfigError(f"model.config: transformers refuses it ({one_line(error)}); mend that key") from None
    check_computed(config)
    return config


def build_causal_lm(
    model: ModelConfig,
    seed: int,
    vocab_size: int | None = None,
    kernel: Kernel | None = None,
    adapter: AdapterConfig | None = None,
) -> "CausalLMStack":
    """Return the block stack of a model on the meta device; `CausalLMStack.materialise` gives its tensors memory and values.

    `kernel` computes attention; without one it is the library's own call of torch's SDPA, which chooses for itself. With an
    `adapter` that is all that is trained.
    """
    config = library_config(model, vocab_size)
    weights = PretrainedWeights(model.weights) if model.weights is not None else None
    library = meta_model(config, kernel)
    if model.fused_qkv:
        fused.fuse_projections(library, config.model_type)
    if adapter is not None:
        path = f"{library.base_model_prefix}.layers"
        lora.add_adapter(library, adapter, [f"{path}.{i}" for i in range(len(_layers(library)))])
    return CausalLMStack(library, seed, weights, kernel)


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
            position_embeddings=(shared[f"cos.{self.kind}"], shared[f"sin.{self.kind}"]),
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
        self.fused = fused.rows_of(model)
        self._parts = parts_of(model)
        self._windows = windows_of(model.config)
        kinds: Sequence[str] = getattr(model.config, "layer_types", None) or ["full_attention"] * len(_layers(model))
        path = self._parts.layers_path
        self.blocks = tuple(
            CausalLMBlock(f"{path}.{i}", layer, i, kind, kernel)
            for i, (layer, kind) in enumerate(zip(_layers(model), kinds, strict=True))
        )
        self.adapts = lora.is_adapted(model)
        self.has_dropout = has_dropout(model.config) or lora.drops_inputs(model)
        embed_dropout = () if self._parts.embed_dropout is None else (self._parts.embed_dropout,)
        self.dropout_modules = (*embed_dropout, *(block.module for block in self.blocks))

    @property
    def is_whole_again(self) -> bool:
        """Also with FlexAttention, whose gradients are wrong inside a compiled checkpoint (torch 2.11, on a GPU)."""
        return self.has_dropout or self._kernel == "flex"

    def prologue(self, batch: TextBatch) -> State:
        """Embed the tokens; compute rotary embeddings and what attention reads of the batch, which all blocks share."""
        parts = self._parts
        seed = batch.key.stream("dropout") if self.has_dropout and self.training and batch.key is not None else None
        hidden_BSD = parts.embed(batch.input_ids)
        if parts.embed_dropout is not None:
            keyed = {} if seed is None else {"dropout_seed": derive_seed(seed, EMBEDDING_INDEX)}
            hidden_BSD = parts.embed_dropout(hidden_BSD, **keyed)
        rotary = rotary_embeddings(self.model, parts.rotary, hidden_BSD, batch.position_ids, self._windows)
        inputs = attention.attention_inputs(self._kernel, batch, self._windows)
        return State((hidden_BSD,), {**rotary, **inputs}, seed)

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

    def first_value(self, name: str) -> Tensor:
        """Return a parameter's first random value."""
        return first_value(self.model, name, self._seed, self.model._init_weights)

    def materialise(self, device: torch.device, block: Block | None) -> None:
        """Give the tensors of one block (None: of all outside the blocks) memory on `device` and their first values."""
        inside = tuple(f"{b.name}." for b in self.blocks)
        every = [path for path, _ in self.model.named_modules()]
        if block is not None:
            paths = [path for path in every if path == block.name or path.startswith(f"{block.name}.")]
        else:
            paths = [path for path in every if not f"{path}.".startswith(inside)]
        materialise(self.model, paths, device, self._seed, self.model._init_weights)
        for path in paths:
            module = self.model.get_submodule(path)
            if isinstance(module, fused.FusedLinear):
                fused.initialise_parts(path, module, self._seed, self.model._init_weights)
        if block is None:
            self.model.tie_weights()
        if self._weights is not None:
            self._weights.copy_into(self.model, paths)
        if block is None and self.adapts:
            self.base = lora.base_of(self._weights, self._seed, lora.kept_of(self.model))


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
        published = value_of(config, key)
        if published != value:
            raise ConfigError(
                f"model.config.{key}: {value!r}, but {model.weights} has {published!r}; drop the key or the weights"
            )


def _renamed(keys: dict[str, Any]) -> dict[str, Any]:
    dropped = (*NOT_OF_THE_SHAPE, "model_type")
    return {REPORT_KEYS.get(key, key): value for key, value in keys.items() if key not in dropped}


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    lists = find_block_lists(model)
    if len(lists) != 1:
        raise ConfigError(f"model.config.model_type: {model.config.model_type!r} has {len(lists)} block lists; one is wanted")
    return lists[0][1]
