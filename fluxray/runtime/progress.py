"""What the user sees while a run is going on: one line that moves in a terminal, a line now and then in a log."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

LOG_INTERVAL_S = 5.0
"""Least time between two progress lines of a log."""

POLL_S = 0.5
WINDOW = 20
"""Reports over which the speed is measured for the time left."""

MEMORY_KEYS = ("memory/reserved_gib", "memory/allocated_gib", "memory/host_gib")


class Snapshot(NamedTuple):
    """What the board knows: the newest report's step and metrics (step -1: none yet), and notices not yet seen."""

    step: int
    metrics: Mapping[str, float]
    notices: Sequence[str]


class Progress:
    """Step, loss, tokens/s or images/s, memory and time left of a run, as text."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step = -1
        self._metrics: dict[str, float] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def update(self, snapshot: Snapshot, now: float) -> bool:
        """Take in a snapshot seen at `now` (seconds); returns whether it brought a new step."""
        self._metrics.update(snapshot.metrics)
        if snapshot.step == self.step:
            return False
        if snapshot.step < self.step:
            self._times.clear()
        self.step = snapshot.step
        self._times.append((self.step, now))
        return True

    def line(self) -> str:
        """Return one line without its end."""
        if self.step < 0:
            return "starting workers"
        parts = [f"step {self.step}/{self.num_steps}"]
        if (loss := self._metrics.get("train/loss")) is not None:
            parts.append(f"loss {loss:.4f}")
        if (speed := self._metrics.get("perf/images_per_s")) is not None:
            parts.append(f"{speed:,.4g} images/s")
        elif (speed := self._metrics.get("perf/tokens_per_s")) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        memory = next((self._metrics[key] for key in MEMORY_KEYS if self._metrics.get(key)), None)
        if memory is not None:
            parts.append(f"{memory:.1f} GiB")
        if (left := self.seconds_left()) is not None:
            parts.append(f"{clock(left)} left")
        return "  ".join(parts)

    def seconds_left(self) -> float | None:
        """Return the time that the remaining steps take at the present speed; None while it is unknown."""
        if len(self._times) < 2:
            return None
        (first, start), (last, end) = self._times[0], self._times[-1]
        return (self.num_steps - last) * (end - start) / (last - first)


class Display:
    """Shows progress from a thread of its own while the context lasts. `read(num_seen)` gives a Snapshot or None."""

    def __init__(self, read: Callable[[int], Snapshot | None], num_steps: int, out: TextIO | None = None) -> None:
        self._read = read
        self._out = out or sys.stdout
        self._progress = Progress(num_steps)
        self._num_seen = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fluxray-progress", daemon=True)

    def __enter__(self) -> "Display":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        show = self._show_live if self._out.isatty() else self._show_log
        show()

    def _poll(self) -> tuple[bool, Sequence[str]]:
        """Return whether there is a new step, and new notices."""
        snapshot = self._read(self._num_seen)
        if snapshot is None:
            return False, ()
        self._num_seen += len(snapshot.notices)
        return self._progress.update(snapshot, time.monotonic()), snapshot.notices

    def _show_log(self) -> None:
        shown_at, pending = float("-inf"), False
        while True:
            last = self._stop.wait(POLL_S)
            new, notices = self._poll()
            for notice in notices:
                print(notice, file=self._out, flush=True)
            pending = pending or new
            if pending and (last or time.monotonic() - shown_at >= LOG_INTERVAL_S):
                print(self._progress.line(), file=self._out, flush=True)
                shown_at, pending = time.monotonic(), False
            if last:
                return

    def _show_live(self) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(file=self._out)
        columns = (progress.SpinnerColumn(), progress.BarColumn(12), progress.TextColumn("{task.description}", markup=False))
        with progress.Progress(*columns, console=console) as bar:
            task = bar.add_task(self._progress.line(), total=max(self._progress.num_steps, 1))
            while True:
                last = self._stop.wait(POLL_S)
                _, notices = self._poll()
                for notice in notices:
                    console.print(notice, markup=False, highlight=False, soft_wrap=True)
                bar.update(task, completed=max(self._progress.step, 0), description=self._progress.line())
                if last:
                    return


def clock(seconds: float) -> str:
    """Return a time as M:SS or H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
