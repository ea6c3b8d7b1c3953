"""The trainings that are running now, as MLflow has them: one line each, anew every two seconds in a terminal.

One search a refresh brings the newest value of every metric, so it costs the same for a server far away and for long histories. A
run that was killed with its driver stays RUNNING in MLflow; what has been silent for long is named apart.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from fluxray.config.load import from_yaml
from fluxray.errors import ConfigError, FluxrayError
from fluxray.runtime.identity import RUN_TAG, masked
from fluxray.runtime.imports import quick_imports
from fluxray.runtime.outcome import FailedError
from fluxray.runtime.paths import CONFIG_FILE, Home, list_runs
from fluxray.runtime.progress import MEMORY_KEYS, Progress, Snapshot, clock
from fluxray.runtime.sender import connect, short
from fluxray.runtime.tracking import tracking_uri

REFRESH_S = 2.0
TIMEOUT_S = 5
"""How long one answer of a server is waited for, unless MLFLOW_HTTP_REQUEST_TIMEOUT says otherwise."""

SILENT_S = 900.0
"""A run of which nothing has been recorded for longer does not count as running."""

NEWEST = 50
"""Run folders that are asked for the address of their tracking server."""

MAX_RUNS = 200
HEADINGS = ("run", "step", "loss", "tokens/s", "memory", "GPU", "left", "heard")
ROW_KEYS = ("batch.micro_size", "batch.accumulation_steps", "resources.num_workers")
"""Their product are the rows of a step."""

NOTHING = "nothing is running; `fluxray train --profile cpu --model lm-tiny` starts a training"


@dataclass(frozen=True)
class Running:
    """A run that MLflow says is running: newest step (-1: none yet) and metrics; times in seconds since the epoch.

    `stepped` is when the newest step was recorded, `heard` when anything was. `step_tokens` are the positions of a full step,
    `step_images` its images; None where that is not known.
    """

    name: str
    step: int
    num_steps: int
    metrics: Mapping[str, float]
    stepped: float
    heard: float
    step_tokens: int | None
    step_images: int | None = None


@dataclass
class Watch:
    """What is running at `uris`, and how fast since the watch began."""

    uris: Sequence[str]
    _clients: dict[str, Any] = field(default_factory=dict, init=False)
    _progress: dict[str, Progress] = field(default_factory=dict, init=False)

    def look(self, now: float) -> tuple[list[Sequence[str]], list[str]]:
        """Return a row for each run, and lines to be told besides: what does not answer, what is silent. Raises nothing."""
        rows: list[Sequence[str]] = []
        silent: list[str] = []
        notes: list[str] = []
        for uri in self.uris:
            try:
                found = list(read_running(self._client(uri)))
            except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the next look may succeed
                notes.append(f"MLflow at {masked(uri)} does not answer ({short(error)})")
                continue
            silent += [run.name for run in found if now - run.heard > SILENT_S]
            rows += [self._row(uri, run, now) for run in found if now - run.heard <= SILENT_S]
        if silent:
            names = ", ".join(silent)
            notes.append(f"silent for over {clock(SILENT_S)}, though MLflow says that they run: {names}")
        return rows, notes

    def _client(self, uri: str) -> Any:
        if uri not in self._clients:
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(TIMEOUT_S))
            self._clients[uri] = connect(uri)
        return self._clients[uri]

    def _row(self, uri: str, run: Running, now: float) -> Sequence[str]:
        progress = self._progress.setdefault(f"{uri} {run.name}", Progress(run.num_steps))
        progress.num_steps = run.num_steps
        progress.update(Snapshot(run.step, run.metrics, ()), run.stepped)
        left = progress.seconds_left()
        return row(run, seconds_left(run) if left is None else left, now)


def show(where: Home, tracking: str | None, once: bool, to: TextIO | None = None) -> None:
    """Show what is running until Ctrl-C; once if asked so, if `to` (stdout) is no terminal or if nothing is running.

    `tracking` is a server's address; without it, those of the runs in `where` are asked. Raises FailedError if none answers.
    """
    out = to or sys.stdout
    with quick_imports():
        import mlflow.tracking  # noqa: F401 - takes seconds
    watch = Watch(places(where, tracking))
    rows, notes = watch.look(time.time())
    if not rows or once or not out.isatty():
        if not rows and watch.uris and len(notes) == len(watch.uris) and all("does not answer" in note for note in notes):
            raise FailedError("; ".join(notes))
        print("\n".join([*(aligned(rows) if rows else [NOTHING]), *notes]), file=out, flush=True)
        return
    try:
        _show_live(watch, rows, notes, out)
    except KeyboardInterrupt:
        return


def places(where: Home, tracking: str | None) -> list[str]:
    """Return the addresses to ask: `tracking`, else those of the newest runs in `where`; no database file that is not there."""
    if tracking is not None:
        if tracking.startswith("sqlite:") and not _exists(tracking):
            raise ConfigError(
                f"--tracking: {masked(tracking)} is not there; write sqlite:////absolute/path, or a server's address"
            )
        return [tracking]
    newest = sorted(list_runs(where), key=lambda run_dir: (run_dir / CONFIG_FILE).stat().st_mtime, reverse=True)
    found = dict.fromkeys([*_addresses(where, newest[:NEWEST]), f"sqlite:///{where.database}"])
    return [uri for uri in found if not uri.startswith("sqlite:") or _exists(uri)]


def read_running(client: Any) -> Iterator[Running]:
    """Yield the runs of fluxray that a tracking server says are running, oldest first."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=MAX_RUNS) if experiments else []
    for run in sorted(found, key=lambda run: run.info.start_time):
        if RUN_TAG in run.data.tags:
            yield _running(run)


def row(run: Running, left: float | None, now: float) -> Sequence[str]:
    """Return the cells of a run under HEADINGS; `left` in seconds."""
    metrics = run.metrics
    memory = next((metrics[key] for key in MEMORY_KEYS if metrics.get(key)), None)
    load = [value for key, value in metrics.items() if key.startswith("system/gpu") and key.endswith("_percent")]

    def shown(key: str, form: Callable[[float], str]) -> str:
        return form(metrics[key]) if key in metrics else "-"

    return (
        run.name,
        f"{run.step}/{run.num_steps}" if run.step >= 0 else "starting",
        shown("train/loss", lambda loss: f"{loss:.4f}"),
        shown("perf/tokens_per_s", lambda speed: f"{speed:,.0f}"),
        "-" if memory is None else f"{memory:.1f} GiB",
        f"{fmean(load):.0f}%" if load else "-",
        "-" if left is None else clock(left),
        f"{clock(max(0.0, now - run.heard))} ago",
    )


def seconds_left(run: Running) -> float | None:
    """Return the time that the remaining steps take at the speed that was recorded last; None while it is unknown."""
    known = (("perf/tokens_per_s", run.step_tokens), ("perf/images_per_s", run.step_images))
    for key, per_step in known:
        if per_step is not None and run.metrics.get(key):
            return (run.num_steps - run.step) * per_step / run.metrics[key]
    return None


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return HEADINGS and rows as lines, names to the left and numbers to the right."""
    table = [HEADINGS, *rows]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(HEADINGS))]
    return [
        "  ".join([cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])
        for cells in table
    ]


def _show_live(watch: Watch, rows: list[Sequence[str]], notes: list[str], out: TextIO) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def drawn(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for index, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if index else "left", no_wrap=True)
        for cells in rows:
            table.add_row(*map(Text, cells))
        return Group(table if rows else Text(NOTHING), *map(Text, notes), Text(f"{time.strftime('%H:%M:%S')}, Ctrl-C ends this"))

    with Live(drawn(rows, notes), console=Console(file=out), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(drawn(*watch.look(time.time())), refresh=True)


def _running(run: Any) -> Running:
    points = {point.key: point for point in run.to_proto().data.metrics}
    tags, params = run.data.tags, run.data.params
    loss = points.get("train/lr")  # every step has one, also where the loss is not finite
    started = run.info.start_time / 1000
    stepped = started if loss is None else loss.timestamp / 1000
    steps = tags.get("resumed.train.num_steps") or params.get("train.num_steps", "0")
    return Running(
        name=tags[RUN_TAG],
        step=-1 if loss is None else loss.step,
        num_steps=int(steps),
        metrics={key: point.value for key, point in points.items()},
        stepped=stepped,
        heard=max([started, *(point.timestamp / 1000 for point in points.values())]),
        step_tokens=_step_tokens(params),
        step_images=_step_images(params),
    )


def _step_tokens(params: Mapping[str, str]) -> int | None:
    """Return the positions of a step of packed rows, which are all full."""
    packed = params.get("task.kind", "lm") == "lm" and params.get("data.packing") == "true"
    return _product(params, *ROW_KEYS, "data.max_slice") if packed else None


def _step_images(params: Mapping[str, str]) -> int | None:
    return _product(params, *ROW_KEYS) if params.get("task.kind") == "flow" else None


def _product(params: Mapping[str, str], *keys: str) -> int | None:
    try:
        return prod(int(params[key]) for key in keys)
    except (KeyError, ValueError):
        return None


def _addresses(where: Home, run_dirs: Sequence[Path]) -> Iterator[str]:
    for run_dir in run_dirs:
        try:
            yield tracking_uri(from_yaml(run_dir / CONFIG_FILE), where)
        except FluxrayError:
            continue


def _exists(uri: str) -> bool:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).is_file()
