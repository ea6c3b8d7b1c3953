"""Commands of ours in processes of their own, forked from one that has imported what they need: seconds less for each."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

LOADED = [
    "fluxray.runtime.tune",
    "fluxray.runtime.worker",
    "fluxray.runtime.checkpoints",
    "fluxray.export",
    "mlflow.tracking",
    __name__,
]
LIMIT_S = 200

CONTEXT = multiprocessing.get_context("forkserver")


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int | None
    out: str
    err: str


def fluxray(words: Sequence[str], cwd: Path, environment: dict[str, str], said: Path) -> Done:
    """Run a command to its end; what it says goes to files under `said`."""
    process = start(words, cwd, environment, said)
    try:
        process.join(LIMIT_S)
        return Done(process.exitcode, (said / "out").read_text(), (said / "err").read_text())
    finally:
        process.kill()
        process.join()


def start(
    words: Sequence[str], cwd: Path, environment: dict[str, str], said: Path, before: Callable[[], None] | None = None
) -> ForkServerProcess:
    """Start a command, in its process after `before`; what it says goes to files under `said`."""
    said.mkdir()
    return fork(_run, list(words), cwd, environment, said, before)


def fork(target: Callable[..., Any], *arguments: object, preload: Sequence[str] = ()) -> ForkServerProcess:
    """Start a process that runs `target`; the first call starts the one that it is forked from."""
    load(preload)
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def load(more: Sequence[str] = ()) -> None:
    """Start the process that others are forked from, if there is none yet; do not wait for its imports, which take seconds."""
    CONTEXT.set_forkserver_preload([*LOADED, *more])
    of_ray = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RAY_")}
    try:
        forkserver.ensure_running()  # Ray reads RAY_AUTH_MODE once, at its import, and a Ray of this process has left its own
    finally:
        os.environ.update(of_ray)


def _run(words: list[str], cwd: Path, environment: dict[str, str], said: Path, before: Callable[[], None] | None) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    from fluxray.cli import main

    if before is not None:
        before()
    main(words)
