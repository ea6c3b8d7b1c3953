"""Which samples make up which micro-batch of which rank, and rows to tensors.

A global batch has K micro-batches x N ranks x m rows. Its sample g belongs to micro-batch g // (N m) of rank (g // m) % N, so it
is the same global batch, in the same order, for all K, N and m of equal product.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fluxray.data.rows import TextRow
from fluxray.errors import DataError
from fluxray.protocols import IGNORE_INDEX, BatchKey, SampleId, TextBatch
from fluxray.seeding import generator

T = TypeVar("T")

GlobalBatch = tuple[tuple[SampleId, ...], int, int]
"""The samples of one optimizer step, in order, and epoch and position once they are consumed."""


def sample_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which pass number `epoch` goes through the rows: a permutation, int64 [num_rows]."""
    return generator(seed, "order", epoch).permutation(num_rows)


def global_batches(num_rows: int, global_size: int, seed: int, epoch: int = 0, position: int = 0) -> Iterator[GlobalBatch]:
    """Yield global batches of exactly `global_size` samples without end, from `position` in the order of `epoch` on.

    A batch that reaches the end of an epoch goes on in the next one, so nothing is dropped. A position is below `num_rows`;
    DataError if the given one is not, for then the data has changed since it was saved.
    """
    if position >= num_rows:
        raise DataError(
            f"data.source: {num_rows} rows in an epoch, but the run stands at row {position}; resume it on the data it began with"
        )
    order = sample_order(num_rows, seed, epoch)
    while True:
        samples: list[SampleId] = []
        while len(samples) < global_size:
            taken = order[position : position + global_size - len(samples)]
            samples.extend(SampleId(epoch, index) for index in taken.tolist())
            position += len(taken)
            if position == num_rows:
                epoch, position = epoch + 1, 0
                order = sample_order(num_rows, seed, epoch)
        yield tuple(samples), epoch, position


def rank_micro_batches(samples: Sequence[T], micro_size: int, rank: int, num_ranks: int) -> Iterator[tuple[T, ...]]:
    """Yield the micro-batches of `rank` in a global batch; the last is short or empty if the batch is no multiple of N m."""
    stride = num_ranks * micro_size
    for begin in range(rank * micro_size, rank * micro_size + len(samples), stride):
        yield tuple(samples[begin : begin + micro_size])


def collate_text(rows: Sequence[TextRow], key: BatchKey | None, pad_id: int) -> TextBatch:
    """Return the rows as one micro-batch on the host, padded to the longest of them.

    The padding of a row is a document of its own, after the others, without targets.
    """
    width = max(len(row.input_ids) for row in rows)
    gaps = [width - len(row.input_ids) for row in rows]
    last_documents = [int(row.document_ids[-1]) for row in rows]
    return TextBatch(
        input_ids=_stack(rows, "input_ids", [np.full(gap, pad_id) for gap in gaps]),
        position_ids=_stack(rows, "position_ids", [np.arange(gap) for gap in gaps]),
        document_ids=_stack(rows, "document_ids", list(map(np.full, gaps, [last + 1 for last in last_documents]))),
        targets=_stack(rows, "targets", [np.full(gap, IGNORE_INDEX) for gap in gaps]),
        single_document=not any(gaps) and not any(last_documents),
        num_valid=int(sum(np.count_nonzero(row.targets != IGNORE_INDEX) for row in rows)),
        key=key,
    )


def without_targets(row: TextRow) -> TextRow:
    """Return the row with zero weight in the loss, for a rank that has run out of rows."""
    return row._replace(targets=np.full_like(row.targets, IGNORE_INDEX))


def _stack(rows: Sequence[TextRow], field: str, tails: Sequence[np.ndarray]) -> Tensor:
    """Return one field of all rows, each followed by its tail: int64 [B, S]."""
    padded = [np.concatenate([getattr(row, field), tail]) for row, tail in zip(rows, tails, strict=True)]
    return torch.from_numpy(np.stack(padded))
