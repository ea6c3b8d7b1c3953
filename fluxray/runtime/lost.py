"""Parts of Ray that are lost, and with them what a process of ours could still do: it ends by itself. What counts lies on disk.

A driver whose head is gone says how to go on, before Ray ends it without a word: until then every call of Ray's waits. Where
another head comes up at the address of the old one, Ray ends the driver at once, too soon for more than the first word on it.
What runs on a node without its raylet would be in the way of whoever goes on. Ray mostly ends such processes, but not then.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from fluxray.runtime.outcome import FAILURE, ending

POLL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
PARENT_POLL_S = 0.5
PARENT_THREAD = "fluxray-parent"

RAY_VARIABLE, RAY_PATIENCE_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""How long a process of Ray's waits for a head that has gone before it ends itself."""

EARLIER_S = 10.0
"""How much sooner than Ray this gives up."""

MIN_PATIENCE_S = 2.0


@contextmanager
def watched_head(address: str, again: Callable[[], str]) -> Iterator[None]:
    """End this process with code 1 if the head at `address` (host:port) does not answer for almost as long as Ray waits for it.

    That it does not answer is said at once. `again` returns what goes on with the work; it is asked then, from another thread.
    """
    over = threading.Event()

    def watch() -> None:
        silent_s = _await_silence(address, over, again)
        if silent_s is not None:
            end(f"Ray's head at {address} has not answered for {silent_s:.0f} s; once there is one, {again()}")

    thread = threading.Thread(target=watch, name="fluxray-head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def end_with_parent() -> None:
    """Have this process, one that the raylet of its node has started, end as soon as that is gone. To be called once or more."""
    if any(thread.name == PARENT_THREAD for thread in threading.enumerate()):
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(FAILURE)

    threading.Thread(target=watch, name=PARENT_THREAD, daemon=True).start()


def patience_s() -> float:
    """Return for how long a head may be silent, a little less than Ray's own time."""
    with suppress(ValueError):
        return max(MIN_PATIENCE_S, float(os.environ.get(RAY_VARIABLE, RAY_PATIENCE_S)) - EARLIER_S)
    return RAY_PATIENCE_S - EARLIER_S


def end(told: str) -> NoReturn:
    """End this process at once as one that has failed, whatever its other threads wait for."""
    print(ending("failed", told), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(FAILURE)


def _await_silence(address: str, over: threading.Event, again: Callable[[], str]) -> float | None:
    """Return for how many seconds the head has been silent as soon as that is too long; None once `over` is set."""
    heard, told = time.monotonic(), False
    while not over.wait(POLL_S):
        now, answers = time.monotonic(), _answers(address)
        if answers == told:
            told = not answers
            ahead = f"unless it comes back, this ends, and {again()}" if told else "all goes on"
            print(
                f"Ray's head at {address} {'does not answer' if told else 'answers again'}: {ahead}", file=sys.stderr, flush=True
            )
        if answers:
            heard = now
        elif now - heard >= patience_s():
            return now - heard
    return None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        return True
    return False
