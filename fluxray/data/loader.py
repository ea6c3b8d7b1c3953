"""Feeds one rank: micro-batches prepared ahead in a thread for training, a fixed order for evaluation."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from fluxray.config.schema import BatchConfig
from fluxray.data.batching import (
    GlobalBatch,
    cut_buckets,
    cut_rounds,
    global_batches,
    padding_share,
    rank_micro_batches,
    with_prior,
    without_weight,
)
from fluxray.errors import DataError
from fluxray.protocols import Batch, BatchKey, MicroBatches, RunState, SampleId

PREFETCHED_STEPS = 2

T = TypeVar("T")
Prepare = Callable[[Sequence[Any], BatchKey | None], Batch]


class Rows(Protocol):
    """What is learned: `TextRows` or `LatentRows`.

    `buckets` int64 [rows] number the buckets of which only rows of one share a micro-batch, from 0; None where any do.
    """

    @property
    def buckets(self) -> np.ndarray | None:
        """The bucket of each row."""
        ...

    @property
    def row_lengths(self) -> np.ndarray:
        """Number of positions of each row: int64 [rows]."""
        ...

    @property
    def max_slice(self) -> int:
        """Most positions that a row may have."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Loader:
    """The batches of one rank out of `num_ranks`; all ranks draw the same global batches and keep their share.

    `grouped`: rows of similar length share a global batch; rows in buckets stand together anyway. The last `num_prior` of the
    rows, which are in buckets, make up half of each global batch: its second half. `micro_rows` returns for a
    step, counted from 0, how many rows of full length a micro-batch has; of shorter rows it has as many as make so many tokens.
    It is asked PREFETCHED_STEPS ahead at most. `num_readers` threads read the rows of a micro-batch, where reading is waiting.
    """

    rows: Rows
    prepare: Prepare
    batch: BatchConfig
    rank: int
    num_ranks: int
    grouped: bool = False
    num_prior: int = 0
    micro_rows: Callable[[int], int] | None = None
    num_readers: int = 1

    def train_batches(self, state: RunState) -> Generator[MicroBatches, None, None]:
        """Yield global batches without end from where `state` stands, prepared ahead by a thread that ends with the generator.

        Epoch and position are those after the yielded batch, however many more are prepared. A fault in the thread is raised by
        the generator. Raises DataError if there are no rows, or not as many as `state.position` tells.
        """
        if not len(self.rows):
            raise DataError("data.source: has no row to train on; use more text")
        return prefetch(self._steps(state), PREFETCHED_STEPS)

    def eval_groups(self, rows: Rows, max_rows: int) -> Iterator[list[Batch]]:
        """Yield what `eval_batches` does in groups of as many as a step has micro-batches; the last may be smaller."""
        batches = self.eval_batches(rows, max_rows)
        while group := list(islice(batches, self.batch.accumulation_steps)):
            yield group

    def eval_batches(self, rows: Rows, max_rows: int) -> Iterator[Batch]:
        """Yield batches of the rows of `eval_shares`."""
        for _, filled in self.eval_shares(rows, max_rows):
            yield self.prepare(filled, None)

    def eval_shares(self, rows: Rows, max_rows: int) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield what makes up each batch of the first `max_rows` of `rows`: the places of this rank's rows, and the rows.

        There are equally many batches of `micro_size` rows on every rank, and over all ranks each row counts exactly once; where
        a rank lacks rows, zero-weight ones without a place fill its batch. Buckets come one after the other.
        """
        num_rows = min(max_rows, len(rows))
        buckets = np.zeros(num_rows, np.int64) if rows.buckets is None else rows.buckets[:num_rows]
        for bucket in np.unique(buckets):
            used: list[int] = np.flatnonzero(buckets == bucket).tolist()
            for share in rank_micro_batches(used, self.batch.micro_size, self.rank, self.num_ranks):
                real = self._read(rows, share)
                missing = self.batch.micro_size - len(real)
                yield list(share), real + [without_weight(real[0] if real else rows[used[0]])] * missing

    def _steps(self, state: RunState) -> Iterator[MicroBatches]:
        all_lengths, all_buckets = self.rows.row_lengths, self.rows.buckets
        for step, (samples, epoch, position) in enumerate(self._draws(state), start=state.step):
            drawn = [sample.index for sample in samples]
            lengths: list[int] = all_lengths[drawn].tolist()
            rounds, metrics = self._cut(step, lengths, None if all_buckets is None else all_buckets[drawn].tolist())
            batches = [self._micro_batch(samples, of_ranks, (state.seed, step)) for of_ranks in rounds]
            metrics["batch/padding_share"] = padding_share(lengths, rounds)
            yield MicroBatches(batches, epoch, position, metrics)

    def _draws(self, state: RunState) -> Iterator[GlobalBatch]:
        global_size = self.batch.micro_size * self.batch.accumulation_steps * self.num_ranks
        if self.rows.buckets is not None:
            return with_prior(self.rows.buckets, self.num_prior, global_size, state)
        grouping = self.rows.row_lengths if self.grouped else None
        return global_batches(len(self.rows), global_size, state.seed, state.epoch, state.position, grouping)

    def _cut(
        self, step: int, lengths: Sequence[int], buckets: Sequence[int] | None
    ) -> tuple[list[list[range]], dict[str, float]]:
        """Return the global batch cut into micro-batches, and what is to be said of that."""
        if self.micro_rows is None:
            bounds, metrics = (self.num_ranks, self.batch.micro_size, None), {}
        else:
            size = self.micro_rows(step)
            bounds = (self.num_ranks, self.batch.max_micro_size, size * self.rows.max_slice)
            metrics = {"batch/micro_size": float(size)}
        return cut_rounds(lengths, *bounds) if buckets is None else cut_buckets(lengths, buckets, *bounds), metrics

    def _micro_batch(self, samples: Sequence[SampleId], of_ranks: Sequence[range], key: tuple[int, int]) -> Batch:
        """Return this rank's micro-batch of a round; a zero-weight row stands in where it has none. `key` is seed and step."""
        share = tuple(samples[index] for index in of_ranks[self.rank])
        rows = self._read(self.rows, [sample.index for sample in share])
        stand_in = [] if rows else [without_weight(self.rows[samples[of_ranks[0].start].index])]
        return self.prepare(rows + stand_in, BatchKey(*key, share))

    def _read(self, rows: Rows, indexes: Sequence[int]) -> list[Any]:
        if self.num_readers == 1 or len(indexes) < 2:
            return [rows[index] for index in indexes]
        with ThreadPoolExecutor(min(self.num_readers, len(indexes))) as pool:
            return list(pool.map(rows.__getitem__, indexes))


def prefetch(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield `items`, computed by a thread that is at most `depth` items ahead and ends when this generator ends or is closed."""
    free = threading.Semaphore(depth)
    closed = threading.Event()
    ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while free.acquire() and not closed.is_set():
            try:
                ready.put((next(items), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the consumer
                ready.put((None, error))
                return

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            free.release()
            yield item
    finally:
        closed.set()
        free.release()
        thread.join()
