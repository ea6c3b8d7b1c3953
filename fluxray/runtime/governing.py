"""The governor of a run at work (`batch.dynamic`): it reads memory after each step, on all ranks, and tells what it decides."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

from fluxray.config.schema import TrainConfig
from fluxray.data.loader import PREFETCHED_STEPS, Loader
from fluxray.memory.estimate import CONTEXT_BYTES, GIB
from fluxray.memory.governor import Governor
from fluxray.memory.plan import MemoryPlan, fitting_sizes
from fluxray.metrics import StepMemory
from fluxray.protocols import BatchSource, MicroBatches, RunState
from fluxray.ranks import Ranks


def governor_of(config: TrainConfig, plan: MemoryPlan) -> Governor:
    """Return the governor of a run with that plan: of the sizes that fit it, or of the smallest alone if none does."""
    sizes = config.batch.dynamic_sizes
    planned = fitting_sizes(plan, sizes) or fitting_sizes(plan, sizes[:1], misfits=True)
    device = plan.hardware.device_bytes
    assert device is not None, "planning reads what is not given"
    return Governor(planned, device - (CONTEXT_BYTES if plan.demand.on_gpu else 0), PREFETCHED_STEPS)


class Governing:
    """Between governor, loader and trainer of one rank. Its state is in RunState; here is a copy for the loader's thread."""

    def __init__(self, governor: Governor, memory: StepMemory, ranks: Ranks, notify: Callable[[str], None]):
        self._governor = governor
        self.memory = memory
        self._ranks = ranks
        self._notify = notify

    def begin(self, state: RunState, rows: int) -> RunState:
        """Return the state with micro-batches of `rows` rows, or as it was saved; a size that does not fit becomes smaller."""
        self._now = self._governor.begin(rows, state.micro_size)
        sizes = ", ".join(map(str, self._governor.sizes))
        self._notify(f"batch.dynamic: {self._now.at(state.step)} rows a micro-batch, of {sizes}, which fit")
        return replace(state, micro_size=self._now)

    def batches(self, loader: Loader) -> BatchSource:
        """Return the loader's batches, cut as is decided here.

        Taking one begins the step of which the memory is read, so that an evaluation between two steps does not count.
        """
        cut = replace(loader, micro_rows=self._micro_rows)

        def source(state: RunState) -> Generator[MicroBatches, None, None]:
            with closing(cut.train_batches(state)) as batches:
                for item in batches:
                    self.memory.begin()
                    yield item

        return source

    def _micro_rows(self, step: int) -> int:
        return self._now.at(step)

    def after_step(self, state: RunState) -> RunState:
        """Return the state with what is decided after a step, of which the host has queued everything. Collective."""
        assert state.micro_size is not None, "a governed run has begun"
        used = int(self._ranks.highest(self.memory.read()))
        before, self._now = self._now, self._governor.after_step(self._now, state.step, used)
        if self._now.since != before.since:
            self._notify(
                f"step {state.step}: {self._now.next_rows} rows a micro-batch from step {self._now.since + 1} on, after "
                f"{self._now.rows}; a step took {max(used, before.peak) / GIB:.2f} of {self._governor.budget / GIB:.2f} GiB"
            )
        return replace(state, micro_size=self._now)
