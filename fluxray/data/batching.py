"""Which samples make up which micro-batch of which rank, and rows to tensors.

A global batch has K micro-batches x N ranks x m rows. Its sample g belongs to micro-batch g // (N m) of rank (g // m) % N, so it
is the same global batch, in the same order, for all K, N and m of equal product.

Rows of different length are padded to the longest of their micro-batch. Where they are grouped by length, a global batch holds
rows of similar length in ascending order, so that neighbours, which share a micro-batch, differ little.

Regularisation pictures (prior preservation) make up the second half of each global batch, in an order of their own.

Pictures are not padded: rows of one bucket, a resolution and a text length, stand together in a global batch, and a micro-batch
ends where a bucket does.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fluxray.data.latents import FlowRow
from fluxray.data.rows import TextRow
from fluxray.errors import DataError
from fluxray.protocols import IGNORE_INDEX, BatchKey, RunState, SampleId, TextBatch
from fluxray.seeding import derive_seed, generator

T = TypeVar("T")

WINDOW = 50
"""Global batches within which rows of similar length are brought together."""

GlobalBatch = tuple[tuple[SampleId, ...], int, int]
"""The samples of one optimizer step, in order, and epoch and position once they are consumed."""


def sample_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which pass number `epoch` goes through the rows: a permutation, int64 [num_rows]."""
    return generator(seed, "order", epoch).permutation(num_rows)


def grouped_order(lengths: np.ndarray, global_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return an order in which global batches hold rows of similar length: a permutation, int64 [num_rows].

    Rows are shuffled; each WINDOW global batches of them are sorted by length and cut into batches, and these are shuffled. Two
    epochs may share a batch: to it each gives the shortest rows of its last or first window, which cost the least padding.
    """
    random = generator(seed, "order", epoch)
    shuffled = random.permutation(len(lengths))
    lead = min(-epoch * len(lengths) % global_size, len(lengths))  # rows that complete the last batch of the epoch before
    parts: list[np.ndarray] = []
    begin, end = 0, lead + WINDOW * global_size
    while begin < len(lengths):
        window = shuffled[begin:end]
        window = window[np.argsort(lengths[window], kind="stable")]
        num_whole = (len(window) - lead) // global_size
        first_whole = len(window) - num_whole * global_size
        batches = window[first_whole:].reshape(num_whole, global_size)
        parts += [window[:lead], random.permutation(batches).reshape(-1), window[lead:first_whole]]
        begin, end, lead = end, end + WINDOW * global_size, 0
    return np.concatenate(parts)


def bucketed_order(buckets: np.ndarray, global_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return an order in which global batches hold rows of one bucket as far as they go: a permutation, int64 [num_rows].

    `buckets` int64 [num_rows] are numbered from 0. Rows are shuffled, and those of each bucket cut into batches. What is left of
    the buckets, one after the other, makes up mixed batches; all are shuffled together. A batch that two epochs share gets rows
    that were left over from both.
    """
    random = generator(seed, "order", epoch)
    shuffled = random.permutation(len(buckets))
    lead = min(-epoch * len(buckets) % global_size, len(buckets))  # rows that complete the last batch of the epoch before
    tail = (len(buckets) - lead) % global_size
    whole, rest = [], []
    for bucket in range(int(buckets.max()) + 1):
        rows = shuffled[buckets[shuffled] == bucket]
        cut = len(rows) - len(rows) % global_size
        whole.append(rows[:cut])
        rest.append(rows[cut:])
    batches = random.permutation(np.concatenate(whole).reshape(-1, global_size))
    if sum(map(len, rest)) < lead + tail:  # by a whole batch then: both counts are the same modulo global_size
        rest.append(batches[-1])
        batches = batches[:-1]
    left = np.concatenate(rest)
    left = left[np.argsort(buckets[left], kind="stable")]
    mixed = left[lead + tail :].reshape(-1, global_size)
    ordered = random.permutation(np.concatenate([batches, mixed])).reshape(-1)
    return np.concatenate([left[:lead], ordered, left[lead : lead + tail]])


def global_batches(
    num_rows: int, global_size: int, seed: int, epoch: int = 0, position: int = 0, lengths: np.ndarray | None = None
) -> Iterator[GlobalBatch]:
    """Yield global batches of exactly `global_size` samples without end, from `position` in the order of `epoch` on.

    The order is `sample_order`, or `grouped_order` of the rows' `lengths` where they are given.
    A batch that reaches the end of an epoch goes on in the next one, so nothing is dropped. A position is below `num_rows`;
    DataError if the given one is not, for then the data has changed since it was saved.
    """
    if position >= num_rows:
        raise DataError(
            f"data.source: {num_rows} rows in an epoch, but the run stands at row {position}; resume it on the data it began with"
        )

    def order_of(epoch: int) -> np.ndarray:
        return sample_order(num_rows, seed, epoch) if lengths is None else grouped_order(lengths, global_size, seed, epoch)

    return _draw(order_of, global_size, epoch, position)


def bucketed_batches(
    buckets: np.ndarray, global_size: int, seed: int, epoch: int = 0, position: int = 0
) -> Iterator[GlobalBatch]:
    """Yield what `global_batches` does of rows of these buckets, in their `bucketed_order`."""
    if position >= len(buckets):
        raise DataError(
            f"data.cache: {len(buckets)} samples in an epoch, but the run stands at sample {position}; "
            f"resume it on the cache it began with"
        )
    return _draw(lambda epoch: bucketed_order(buckets, global_size, seed, epoch), global_size, epoch, position)


def with_prior(buckets: np.ndarray, num_prior: int, global_size: int, state: RunState) -> Iterator[GlobalBatch]:
    """Yield what `bucketed_batches` does from where `state` stands, one half of each batch from the last `num_prior` rows.

    Epoch and position are those of the other rows. The `num_prior` go round and round at their own pace: as each step takes
    equally many of them, the number of the step tells where they stand. With `num_prior` 0 there are no such rows.
    """
    num_own = len(buckets) - num_prior
    if num_prior == 0:
        yield from bucketed_batches(buckets, global_size, state.seed, state.epoch, state.position)
        return
    half = global_size // 2
    epoch, position = divmod(state.step * half, num_prior)
    own = bucketed_batches(buckets[:num_own], global_size - half, state.seed, state.epoch, state.position)
    prior = bucketed_batches(buckets[num_own:], half, derive_seed(state.seed, "prior"), epoch, position)
    for (samples, epoch, position), (drawn, _, _) in zip(own, prior, strict=True):
        yield (*samples, *(SampleId(one.epoch, num_own + one.index) for one in drawn)), epoch, position


def _draw(order_of: Callable[[int], np.ndarray], global_size: int, epoch: int, position: int) -> Iterator[GlobalBatch]:
    order = order_of(epoch)
    while True:
        samples: list[SampleId] = []
        while len(samples) < global_size:
            taken = order[position : position + global_size - len(samples)]
            samples.extend(SampleId(epoch, index) for index in taken.tolist())
            position += len(taken)
            if position == len(order):
                epoch, position = epoch + 1, 0
                order = order_of(epoch)
        yield tuple(samples), epoch, position


def rank_micro_batches(samples: Sequence[T], micro_size: int, rank: int, num_ranks: int) -> Iterator[tuple[T, ...]]:
    """Yield the micro-batches of `rank` in a global batch; the last is short or empty if the batch is no multiple of N m."""
    stride = num_ranks * micro_size
    for begin in range(rank * micro_size, rank * micro_size + len(samples), stride):
        yield tuple(samples[begin : begin + micro_size])


def cut_rounds(lengths: Sequence[int], num_ranks: int, max_rows: int, max_tokens: int | None = None) -> list[list[range]]:
    """Return which samples of a global batch each rank has in each of its micro-batches: [round][rank] ranges of positions.

    `lengths` are those of the samples, in order. A micro-batch has up to `max_rows` neighbouring samples, and at least one; the
    longest one of the round times their number is at most `max_tokens`. What is left for the last round is shared out evenly, so
    a rank may get nothing there. With equal lengths that fit, it is the cut of `rank_micro_batches`.
    """
    rounds: list[list[range]] = []
    begin = 0
    while begin < len(lengths):
        num_rows, longest = 0, 0
        while num_rows < max_rows and begin + num_rows * num_ranks < len(lengths):
            one_more = begin + num_rows * num_ranks
            longest = max(longest, *lengths[one_more : one_more + num_ranks])
            if num_rows and max_tokens is not None and (num_rows + 1) * longest > max_tokens:
                break
            num_rows += 1
        taken = min(num_rows * num_ranks, len(lengths) - begin)
        bounds = [begin + taken * rank // num_ranks for rank in range(num_ranks + 1)]
        rounds.append([range(*pair) for pair in pairwise(bounds)])
        begin += taken
    return rounds


def cut_buckets(
    lengths: Sequence[int], buckets: Sequence[int], num_ranks: int, max_rows: int, max_tokens: int | None = None
) -> list[list[range]]:
    """Return what `cut_rounds` does of each run of neighbours of one bucket, so that no round has rows of two."""
    rounds: list[list[range]] = []
    begin = 0
    for _, run in groupby(buckets):
        end = begin + len(list(run))
        for of_ranks in cut_rounds(lengths[begin:end], num_ranks, max_rows, max_tokens):
            rounds.append([range(begin + share.start, begin + share.stop) for share in of_ranks])
        begin = end
    return rounds


def padding_share(lengths: Sequence[int], rounds: Sequence[Sequence[range]]) -> float:
    """Return which share of the positions of all micro-batches is padding, rows that stand in for missing ones included."""
    positions = sum(
        max(lengths[share.start : share.stop]) * len(share) if share else lengths[of_ranks[0].start]
        for of_ranks in rounds
        for share in of_ranks
    )
    return 1 - sum(lengths) / positions


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
        single_document=not any(last_documents),
        num_valid=int(sum(np.count_nonzero(row.targets != IGNORE_INDEX) for row in rows)),
        key=key,
        num_documents=sum(last + 1 + (gap > 0) for last, gap in zip(last_documents, gaps, strict=True)),
    )


def without_targets(row: TextRow) -> TextRow:
    """Return the row with zero weight in the loss, for a rank that has run out of rows."""
    return row._replace(targets=np.full_like(row.targets, IGNORE_INDEX))


def without_weight(row: TextRow | FlowRow) -> TextRow | FlowRow:
    """Return the row so that it does not count in the loss, for a rank that has run out of rows."""
    return row._replace(weight=0.0) if isinstance(row, FlowRow) else without_targets(row)


def _stack(rows: Sequence[TextRow], field: str, tails: Sequence[np.ndarray]) -> Tensor:
    """Return one field of all rows, each followed by its tail: int64 [B, S]."""
    padded = [np.concatenate([getattr(row, field), tail]) for row, tail in zip(rows, tails, strict=True)]
    return torch.from_numpy(np.stack(padded))
