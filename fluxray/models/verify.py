"""The check at start that a block stack computes the library's own forward, bit for bit."""

from copy import deepcopy

import torch
from transformers import PretrainedConfig

from fluxray.errors import ConfigError, one_line
from fluxray.models.causal_lm import CausalLMStack, meta_model
from fluxray.models.fused import fuse_projections
from fluxray.protocols import IGNORE_INDEX, TextBatch

VOCABULARY = 512


FUSED_TOLERANCE = 1e-4
"""How far logits may be off behind a fused projection, as a share of the largest: its product sums in another order."""


def check_stack(config: PretrainedConfig, seed: int = 0, fused_qkv: bool = False) -> None:
    """Raise unless prologue, one block of each kind and epilogue give the library's own logits, packed or not.

    Runs on the host on a copy cut to one block of each kind and to a small vocabulary, hidden sizes kept. ConfigError if the
    library's own forward fails on such a model or overflows; RuntimeError if the two differ: in any bit, or with fused
    projections by more than FUSED_TOLERANCE.
    """
    cut = _cut(config)
    stack = _materialised(cut, seed)
    fused = _materialised(cut, seed, fused_qkv=True) if fused_qkv else None
    for batch in (_batch((12,), cut.vocab_size, seed), _batch((5, 7), cut.vocab_size, seed)):
        with torch.no_grad():
            try:
                inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
                expected = stack.model(**inputs, use_cache=False).logits
            except Exception as error:  # noqa: BLE001 - sizes that contradict each other show first here
                raise ConfigError(f"model.config: the library's own forward fails ({one_line(error)}); mend its values") from None
            if not expected.isfinite().all():
                raise ConfigError("model.config: the library's own forward gives no finite numbers; mend its values")
            logits = stack(batch, lambda output, _: output)
        if not torch.equal(logits, expected):
            difference = (logits - expected).abs().max().item()
            raise RuntimeError(f"the block stack of {config.model_type} differs from the library's forward by {difference}")
        if fused is not None:
            with torch.no_grad():
                difference = (fused(batch, lambda output, _: output) - expected).abs().max() / expected.abs().max()
            if not difference <= FUSED_TOLERANCE:
                raise RuntimeError(
                    f"fused projections of {config.model_type} differ from the library's forward by {difference:.2g}"
                )


def _materialised(config: PretrainedConfig, seed: int, fused_qkv: bool = False) -> CausalLMStack:
    model = meta_model(config)
    if fused_qkv:
        fuse_projections(model, config.model_type)
    stack = CausalLMStack(model, seed)
    for block in (*stack.blocks, None):
        stack.materialise(torch.device("cpu"), block)
    return stack.eval()


def _cut(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy with one block of each kind."""
    cut = deepcopy(config)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"]))
    cut.num_hidden_layers = len(kinds)
    if getattr(config, "layer_types", None):
        cut.layer_types = kinds
    cut.vocab_size = min(VOCABULARY, config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(cut, name, None)
    return cut


def _batch(documents: tuple[int, ...], vocab_size: int, seed: int) -> TextBatch:
    """Return one row that holds documents of the given lengths."""
    length = sum(documents)
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, vocab_size, (1, length), generator=generator)
    position_ids = torch.cat([torch.arange(n) for n in documents])[None]
    document_ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
    targets = torch.full((1, length), IGNORE_INDEX)
    return TextBatch(input_ids, position_ids, document_ids, targets, len(documents) == 1, 0)
