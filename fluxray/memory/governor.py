"""How many rows a micro-batch may have, decided from what the steps before took of the device.

A thermostat. The size grows to the next larger one once it has been in force for some steps, if the most that was measured at it,
and what the plan says the larger one takes more, stay below one mark; it shrinks as soon as a step rises above another, higher
mark. Each shrinking doubles the steps that the next growth waits for, so it cannot swing for long.

Decisions are values: a function of the state and of the measurement, which is the maximum over the ranks, so all ranks decide
alike and a saved state goes on as it would have. A decision holds from a later step on, since micro-batches are cut ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fluxray.protocols import MicroSize

GROW_BELOW = 0.90
"""Share of the device that a larger size may take as it is foreseen."""

SHRINK_ABOVE = 0.95
"""Share of the device above which a step's peak makes the size smaller; what is left is for what an allocator loses in gaps."""

PATIENCE = 8
"""Steps at a size before a larger one is tried, at first."""

LONGEST_PATIENCE = 4096


@dataclass(frozen=True)
class Governor:
    """What it may choose and by what it decides.

    `planned` maps each size (rows) that may be taken to the bytes of one device that the plan gives it, sizes rising. `budget`
    are the bytes that a step's peak is compared with. A decision made after a step leaves the `delay` steps behind it as they
    are: they may be cut already.
    """

    planned: Mapping[int, int]
    budget: int
    delay: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, rising."""
        return tuple(self.planned)

    def begin(self, rows: int, saved: MicroSize | None = None) -> MicroSize:
        """Return the state of a run that begins with micro-batches of `rows`, or goes on with `saved`; both within the sizes."""
        if saved is None:
            rows = self._allowed(rows)
            return MicroSize(rows, rows, since=0, peak=0, patience=PATIENCE)
        return replace(saved, rows=self._allowed(saved.rows), next_rows=self._allowed(saved.next_rows))

    def after_step(self, now: MicroSize, num_steps: int, used: int) -> MicroSize:
        """Return the state after the `num_steps`-th step, whose peak was `used` bytes on the rank where it was highest."""
        if num_steps <= now.since:
            return now  # that step was cut before the last decision
        rows, peak = now.next_rows, max(now.peak, used)
        index = self.sizes.index(rows)
        if used > SHRINK_ABOVE * self.budget and index > 0:
            patience = min(2 * now.patience, LONGEST_PATIENCE)
            return MicroSize(rows, self.sizes[index - 1], num_steps + self.delay, 0, patience)
        waited = num_steps - now.since >= now.patience
        if waited and index + 1 < len(self.sizes) and self._foreseen(peak, rows, self.sizes[index + 1]):
            return MicroSize(rows, self.sizes[index + 1], num_steps + self.delay, 0, now.patience)
        return replace(now, peak=peak)

    def _foreseen(self, peak: int, rows: int, more: int) -> bool:
        return peak + max(0, self.planned[more] - self.planned[rows]) <= GROW_BELOW * self.budget

    def _allowed(self, rows: int) -> int:
        return max((size for size in self.sizes if size <= rows), default=self.sizes[0])
