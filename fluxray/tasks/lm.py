"""Causal language modelling.

Shapes: B micro-batch, S sequence, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fluxray.data.batching import collate_text
from fluxray.data.rows import TextRow
from fluxray.protocols import IGNORE_INDEX, Batch, BatchKey, LossOutput, TextBatch


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the cross-entropy in nats, in fp32, summed over the positions whose target is not IGNORE_INDEX (scalar)."""
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def perplexity(loss: float) -> float:
    """Return e to the mean loss in nats; infinity where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


def text_metrics(pairs: Iterable[tuple[Batch, LossOutput]]) -> dict[str, float]:
    """Return the held-out metrics of batches and their outputs over all ranks: the mean loss of a token, and its perplexity."""
    outputs = [output for _, output in pairs]
    loss = sum(float(output.sum) for output in outputs) / sum(float(output.num_valid) for output in outputs)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss)}


class LmTask:
    """Next-token prediction within documents. With `compiled` the loss is one fused kernel that never holds fp32 logits."""

    def __init__(self, pad_id: int, compiled: bool = False):
        self._pad_id = pad_id
        self._loss = torch.compile(next_token_loss) if compiled else next_token_loss

    def prepare(self, raw: Sequence[TextRow], key: BatchKey | None) -> TextBatch:
        """Collate rows into one micro-batch, padded to the longest."""
        return collate_text(raw, key, self._pad_id)

    def loss_fn(self, output: Tensor, batch: TextBatch) -> LossOutput:
        """Return the summed loss of logits [B, S, V] and the number of predicted tokens."""
        return LossOutput(self._loss(output, batch.targets), batch.num_valid)
