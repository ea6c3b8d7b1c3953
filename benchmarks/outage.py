"""What an MLflow server that dies, hangs or dawdles costs training, in one run with a real server:

    python benchmarks/outage.py [--steps 1000] [--out DIR]

A step is a fixed amount of matrix products, after which the run's own writer logs three metrics, as rank 0 of a training does.
The phases follow each other in the same run, undisturbed ones between them; at the end the server must have every step once.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mlflow import MlflowClient

sys.path.insert(0, str(Path(__file__).parents[1]))

from fluxray.config.load import resolve, to_yaml
from fluxray.runtime import delivery
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.tracking import MetricWriter, Target, finish_run, start_run
from tests.runtime.servers import Proxy, Server

TIMEOUT_S = 120
DELAY_S = 5.0


@contextmanager
def killed(server: Server, _: Proxy) -> Iterator[None]:
    """Kill the server, and start it again."""
    server.kill()
    try:
        yield
    finally:
        server.start()
        server.wait()


@contextmanager
def hung(server: Server, _: Proxy) -> Iterator[None]:
    """Stop the server with SIGSTOP, and let it go on."""
    with server.hung():
        yield


@contextmanager
def slow(_: Server, proxy: Proxy) -> Iterator[None]:
    """Keep every answer back."""
    proxy.delay = DELAY_S
    try:
        yield
    finally:
        proxy.delay = 0.0


PHASES = {"killed (SIGKILL)": killed, "hung (SIGSTOP)": hung, f"slow by {DELAY_S:g} s": slow}


class Loop:
    """Steps of the same work, each logged."""

    def __init__(self, writer: MetricWriter):
        self._writer = writer
        self._left, self._right = torch.randn(2, 384, 384)
        self.step = 0

    def run(self, num_steps: int) -> list[float]:
        """Return the seconds of each step."""
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            for _ in range(12):
                torch.mm(self._left, self._right)
            self.step += 1
            self._writer.log(self.step, {"train/loss": 1 / self.step, "train/lr": 0.1, "perf/tokens_per_s": 1.0})
            seconds.append(time.perf_counter() - start)
        return seconds


def begin(folder: Path, uri: str) -> Target:
    """Start a run that is recorded at `uri`."""
    where = Home(folder)
    keys = {"name": "run", "storage": str(folder), "tracking.uri": uri, "tracking.system_metrics_s": 0}
    config = resolve("cpu", "lm-tiny", keys)
    run_dir = where.runs / "run"
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    return start_run(config, where, run_dir, None)


def measure(num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return one row a phase."""
    server = Server(folder)
    rows: list[dict[str, Any]] = []
    try:
        server.wait()
        proxy = Proxy(server)
        target = begin(folder / "home", proxy.uri)
        writer = MetricWriter(target, print)
        loop = Loop(writer)
        loop.run(num_steps)
        for name, phase in PHASES.items():
            before = loop.run(num_steps)
            with phase(server, proxy):
                during = loop.run(num_steps)
            rows.append(row(f"MLflow {name}", during, [*before, *loop.run(num_steps)]))
        deadline = time.monotonic() + TIMEOUT_S
        while delivery.describe_left(target.folder) and time.monotonic() < deadline:
            time.sleep(0.2)
        writer.close()
        assert finish_run(target, "FINISHED", target.run_dir) is None
        client = MlflowClient(server.uri)
        experiment = client.get_experiment_by_name(target.experiment)
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        steps = sorted(point.step for point in client.get_metric_history(run.info.run_id, "train/loss"))
        assert steps == list(range(1, loop.step + 1)), "a point is missing or there twice"
        rows.append({"note": "all phases: every point there once", "num_steps": loop.step})
    finally:
        server.kill()
    return rows


def row(note: str, during: list[float], undisturbed: list[float]) -> dict[str, Any]:
    """Compare the steps of a phase with the undisturbed ones before and after it."""
    step_s, baseline_s = statistics.median(during), statistics.median(undisturbed)
    return {
        "note": note,
        "num_steps": len(during),
        "step_ms": round(1000 * step_s, 2),
        "undisturbed_step_ms": round(1000 * baseline_s, 2),
        "ratio": round(step_s / baseline_s, 3),
        "slowest_ms": round(1000 * max(during), 1),
        "undisturbed_slowest_ms": round(1000 * max(undisturbed), 1),
    }


def main() -> None:
    """Measure and write benchmarks/results/outage.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import common

    torch.set_num_threads(1)
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "15"
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(arguments.steps, Path(scratch))
    common.write("outage", rows, arguments.out or common.RESULTS)


if __name__ == "__main__":
    main()
