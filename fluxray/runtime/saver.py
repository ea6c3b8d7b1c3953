"""Saving while training goes on: a snapshot on the host, written by a thread that has a process group of its own.

Cost: training stands still for the copy to host memory, which is held there until it is durable (12 bytes a parameter, divided by
the ranks), and for the checkpoint before if that is not durable yet.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from fluxray import checkpoint
from fluxray.protocols import RunState, SavedCheckpoint, StateItem
from fluxray.ranks import Ranks


class Saver:
    """Writes a run's checkpoints, one at a time. `ranks` must not be used by anything else: its calls come from a thread."""

    def __init__(self, run_dir: Path, ranks: Ranks, asynchronous: bool):
        self._run_dir = run_dir
        self._ranks = ranks
        self._asynchronous = asynchronous

    def save(self, state: RunState, items: Iterable[StateItem]) -> SavedCheckpoint:
        """Start to save the run as it stands, and return as soon as it may change; durable already without `asynchronous`.

        The checkpoint before must have been waited for.
        """
        start = time.perf_counter()
        durable_s: Future[float] = Future()

        def write(snapshot: list[StateItem]) -> None:
            try:
                checkpoint.save(self._run_dir, state, snapshot, self._ranks)
                durable_s.set_result(time.perf_counter() - start)
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                durable_s.set_exception(error)

        if self._asynchronous:
            snapshot = [item._replace(tensor=item.tensor.detach().to("cpu", copy=True)) for item in items]
            Thread(target=write, args=(snapshot,), name="fluxray-save", daemon=True).start()
        else:
            write(list(items))
        return SavedCheckpoint(self._run_dir / checkpoint.directory_name(state.step), durable_s.result)
