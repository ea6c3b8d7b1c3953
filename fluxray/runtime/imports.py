"""Starting and ending processes quickly, although they import large libraries: torch, transformers, Ray, MLflow."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pause Python's garbage collection: what is imported stays, and a quarter of the time would go into looking through it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def end_quickly() -> None:
    """Let the end of this process leave out the collection of what was imported, which would take a second or more."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
