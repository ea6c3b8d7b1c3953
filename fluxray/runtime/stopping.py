"""SIGINT and SIGTERM on the driver: the first lets the run save and stop, the second ends it at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.2


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as SIGINT does, as long as there is no step to finish. For the main thread alone."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def on_stop_signal(request: Callable[[], None]) -> Iterator[None]:
    """Call `request` at the first SIGINT or SIGTERM inside the context, raise KeyboardInterrupt at the second.

    Outside the main thread, as in a Tune trial, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals = 0

    def handle(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            raise KeyboardInterrupt
        request()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns, or raise what it raises; meanwhile this thread is free for signal handlers.

    Ray Train installs a SIGINT handler of its own when it runs in the main thread, and waits where no other handler gets its
    turn.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome["error"] = error

    thread = threading.Thread(target=run, name="fluxray-fit", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
