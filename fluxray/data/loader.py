"""Feeds one rank: micro-batches prepared ahead in a thread for training, a fixed order for evaluation."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from fluxray.config.schema import BatchConfig
from fluxray.data.batching import cut_rounds, global_batches, padding_share, rank_micro_batches, without_targets
from fluxray.data.rows import TextRow, TextRows
from fluxray.errors import DataError
from fluxray.protocols import Batch, BatchKey, MicroBatches, RunState, SampleId

PREFETCHED_STEPS = 2

T = TypeVar("T")
Prepare = Callable[[Sequence[TextRow], BatchKey | None], Batch]


@dataclass(frozen=True)
class Loader:
    """The batches of one rank out of `num_ranks`; all ranks draw the same global batches and keep their share.

    `grouped`: rows of similar length share a global batch. `micro_rows` returns for a step, counted from 0, how many rows of full
    length a micro-batch has; of shorter rows it has as many as make so many tokens. It is asked PREFETCHED_STEPS ahead at most.
    """

    rows: TextRows
    prepare: Prepare
    batch: BatchConfig
    rank: int
    num_ranks: int
    grouped: bool = False
    micro_rows: Callable[[int], int] | None = None

    def train_batches(self, state: RunState) -> Generator[MicroBatches, None, None]:
        """Yield global batches without end from where `state` stands, prepared ahead by a thread that ends with the generator.

        Epoch and position are those after the yielded batch, however many more are prepared. A fault in the thread is raised by
        the generator. Raises DataError if there are no rows, or not as many as `state.position` tells.
        """
        if not len(self.rows):
            raise DataError("data.source: has no row to train on; use more text")
        return prefetch(self._steps(state), PREFETCHED_STEPS)

    def eval_groups(self, rows: Sequence[TextRow], max_rows: int) -> Iterator[list[Batch]]:
        """Yield what `eval_batches` does in groups of as many as a step has micro-batches; the last may be smaller."""
        batches = self.eval_batches(rows, max_rows)
        while group := list(islice(batches, self.batch.accumulation_steps)):
            yield group

    def eval_batches(self, rows: Sequence[TextRow], max_rows: int) -> Iterator[Batch]:
        """Yield batches of the first `max_rows` of `rows`, equally many of `micro_size` rows on every rank.

        Over all ranks each row counts exactly once; where a rank lacks rows, zero-weight ones fill its batch.
        """
        used = range(min(max_rows, len(rows)))
        for share in rank_micro_batches(used, self.batch.micro_size, self.rank, self.num_ranks):
            real = [rows[index] for index in share]
            missing = self.batch.micro_size - len(real)
            yield self.prepare(real + [without_targets(real[0] if real else rows[0])] * missing, None)

    def _steps(self, state: RunState) -> Iterator[MicroBatches]:
        global_size = self.batch.micro_size * self.batch.accumulation_steps * self.num_ranks
        all_lengths = self.rows.row_lengths
        grouping = all_lengths if self.grouped else None
        draws = global_batches(len(self.rows), global_size, state.seed, state.epoch, state.position, grouping)
        for step, (samples, epoch, position) in enumerate(draws, start=state.step):
            lengths: list[int] = all_lengths[[sample.index for sample in samples]].tolist()
            rounds, metrics = self._cut(step, lengths)
            batches = [self._micro_batch(samples, of_ranks, (state.seed, step)) for of_ranks in rounds]
            metrics["batch/padding_share"] = padding_share(lengths, rounds)
            yield MicroBatches(batches, epoch, position, metrics)

    def _cut(self, step: int, lengths: Sequence[int]) -> tuple[list[list[range]], dict[str, float]]:
        """Return the global batch cut into micro-batches, and what is to be said of that."""
        if self.micro_rows is None:
            return cut_rounds(lengths, self.num_ranks, self.batch.micro_size), {}
        size = self.micro_rows(step)
        rounds = cut_rounds(lengths, self.num_ranks, self.batch.max_micro_size, size * self.rows.max_slice)
        return rounds, {"batch/micro_size": float(size)}

    def _micro_batch(self, samples: Sequence[SampleId], of_ranks: Sequence[range], key: tuple[int, int]) -> Batch:
        """Return this rank's micro-batch of a round; a zero-weight row stands in where it has none. `key` is seed and step."""
        share = tuple(samples[index] for index in of_ranks[self.rank])
        rows = [self.rows[sample.index] for sample in share]
        stand_in = [] if rows else [without_targets(self.rows[samples[of_ranks[0].start].index])]
        return self.prepare(rows + stand_in, BatchKey(*key, share))


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
