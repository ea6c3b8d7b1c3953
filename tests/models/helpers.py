"""Tiny models of every family, and batches of documents of stated lengths."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fluxray.config.schema import ModelConfig
from fluxray.data.batching import collate_text
from fluxray.data.rows import TextRow
from fluxray.models import attention
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm
from fluxray.protocols import IGNORE_INDEX, TextBatch

CPU = torch.device("cpu")
VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
MIXED = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt_neox sequential": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 0.5, "attention_bias": False},
    "gpt_neox dropout": {"model_type": "gpt_neox", "attention_dropout": 0.1, "hidden_dropout": 0.2},
    "llama": {"model_type": "llama"},
    "llama grouped": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama dropout": {"model_type": "llama", "num_key_value_heads": 1, "attention_dropout": 0.1},
    "llama long": {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 5e5},
    "qwen3": QWEN3,
    "qwen3 tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3 mixed": {**QWEN3, **MIXED, "attention_dropout": 0.1},
    "gemma3": GEMMA3,
    "gemma3 untied": {
        **GEMMA3,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_theta": 5e4,
        "rope_local_base_freq": 500.0,
    },
}


def model_config(case: str, **keys: Any) -> ModelConfig:
    """Return the configuration of a tiny model; `keys` lie over those of the case."""
    return ModelConfig(config={**SIZES, **CASES[case], **keys})


def build(case: str, seed: int = 0, **keys: Any) -> CausalLMStack:
    """Return a stack with its first values."""
    return materialised(build_causal_lm(model_config(case, **keys), seed))


def materialised(stack: CausalLMStack) -> CausalLMStack:
    """Give every tensor of a stack memory and values, and return it."""
    for block in (*stack.blocks, None):
        stack.materialise(CPU, block)
    return stack


def shaken(stack: CausalLMStack) -> CausalLMStack:
    """Move every parameter off its first value, so that biases and gains count."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return stack


def batch_of(*rows: tuple[int, ...], seed: int = 0) -> TextBatch:
    """Return a micro-batch of rows that hold documents of the given lengths."""
    random = np.random.default_rng(seed)
    return collate_text([_row(lengths, random) for lengths in rows], None, pad_id=0)


def logits_of(stack: CausalLMStack, batch: TextBatch) -> torch.Tensor:
    """Return the stack's logits [B, S, V]."""
    return stack(batch, lambda output, _: output)


def stand_in_for_varlen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let plain attention, document by document, stand for the kernel that GPUs alone have; return the places it was given."""
    calls: list[tuple[int, ...]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, longest: int, *rest: Any, **options: Any):
        assert torch.equal(bounds, bounds_k) and bounds.dtype == torch.int32 and rest[1:] == (0.0, True, False)
        places = tuple(bounds.tolist())
        calls.append(places)
        left = options["window_size_left"]
        window = None if left is None else left + 1
        parts = []
        for begin, end in pairwise(places):
            if begin < end:
                assert end - begin <= longest
                distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
                mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
                q_HSD, k_HSD, v_HSD = (tensor[begin:end].transpose(0, 1) for tensor in (q, k, v))
                found = F.scaled_dot_product_attention(
                    q_HSD[None], k_HSD[None], v_HSD[None], mask, scale=options["scale"], enable_gqa=True
                )
                parts.append(found[0].transpose(0, 1))
        return (torch.cat(parts),)

    class Operators:
        _flash_attention_forward = staticmethod(kernel)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.ops.aten, name)

    monkeypatch.setattr(attention, "_aten", Operators())
    return calls


def _row(lengths: tuple[int, ...], random: np.random.Generator) -> TextRow:
    tokens = random.integers(0, VOCABULARY, sum(lengths))
    documents = np.repeat(np.arange(len(lengths)), lengths)
    is_last = np.append(documents[1:] != documents[:-1], True)
    targets = np.where(is_last, IGNORE_INDEX, np.roll(tokens, -1))
    return TextRow(tokens, targets, documents, np.concatenate([np.arange(n) for n in lengths]))
