"""Sending a spool from the driver in bounded time, whatever the server does."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fluxray.runtime import spool
from fluxray.runtime.imports import quick_imports
from fluxray.runtime.sender import BusyError, Sender, Target

PATIENCE_S = 5.0
"""How long a server may let no record through."""

LOCAL_PATIENCE_S = 120.0
"""The same for an embedded database, which may have to be created."""

POLL_S = 0.05


def deliver(target: Target, longest_s: float, notify: Callable[[str], None]) -> Exception | None:
    """Send what the spool holds, for at most the patience without progress and about `longest_s` in all.

    Returns what stood in the way; None if the spool is empty, or emptying when the time was over.
    """
    with quick_imports():
        import mlflow.tracking  # noqa: F401 - takes seconds that are not the server's

    patience = LOCAL_PATIENCE_S if target.home else PATIENCE_S
    attempt = _Attempt(target, notify)
    deadline = time.monotonic() + max(longest_s, patience)
    while attempt.is_alive() and time.monotonic() < deadline:
        if time.monotonic() >= attempt.moved_at + patience:
            attempt.problem = attempt.problem or TimeoutError(f"no answer in {patience:g} s")
            break
        attempt.join(POLL_S)
    attempt.stop.set()
    return attempt.problem


def describe_left(folder: Path) -> str:
    """Return in words what a spool still holds; nothing for an empty one."""
    num_points = num_others = 0
    for record in spool.left(folder):
        num_points += len(record.get("metrics", ()))
        num_others += "metrics" not in record
    parts = [(num_points, "point"), (num_others, "other record" if num_points else "record")]
    return " and ".join(f"{number:,} {word}{'' if number == 1 else 's'}" for number, word in parts if number)


class _Attempt(threading.Thread):
    """Sends until the spool is empty, MLflow fails, or it is told to stop, which a call that hangs does not heed."""

    def __init__(self, target: Target, notify: Callable[[str], None]) -> None:
        super().__init__(name="fluxray-deliver", daemon=True)
        self.stop = threading.Event()
        self.problem: Exception | None = None
        self.moved_at = time.monotonic()
        self._sender = Sender(target, notify)
        self.start()

    def run(self) -> None:
        try:
            while not self.stop.is_set() and self._send():
                pass
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self.problem = error
        finally:
            self._sender.close()

    def _send(self) -> bool:
        try:
            num_sent = self._sender.send()
        except BusyError as error:  # the worker that was sending may be about to end
            self.problem = error
            return not self.stop.wait(POLL_S)
        self.problem, self.moved_at = None, time.monotonic()
        return num_sent > 0
