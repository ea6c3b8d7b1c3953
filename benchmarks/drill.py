"""Faults at random steps of one training, and what they cost: `make drill`, or

    python benchmarks/drill.py [--faults 100] [--seed 0] [--workers 2] [--steps-between 12] [--out DIR]

Trains a small model with FSDP2 over gloo on two Ray nodes of this machine, kills one of worker, driver, controller and second
node at a time with SIGKILL, at seeded random steps, and lets the run go on. Then it must have ended as an undisturbed run of
the same shape: every step's loss and every byte of weights and optimizer states equal, every step once in MLflow, nothing left
running, every resource given back. Writes `drill.json`, for other than 2 workers `drill-N-workers.json`.
"""

import argparse
import os
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 5
TIMEOUT_S = 300
END_S = 1800
KINDS = ("worker", "worker", "driver", "controller", "node")
"""What is killed, workers twice as often as the rest."""

MODEL = [
    "--profile=cpu",
    "--model=lm-tiny",
    "model.config.hidden_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128",
    "model.config.hidden_dropout=0.1",
    f"checkpoint.every_steps={SAVE_EVERY}",
    "train.log_every=1",
    "evaluation.max_rows=16",
    "hardware.tflops=1",
    "resources.max_failures=1000",
    "resources.collective_timeout_s=60",
]


@dataclass
class Fault:
    """One kill: after which step, what had been committed by then, where the run went on, and after how long."""

    kind: str
    at_step: int
    committed: int
    resumed: int = -1
    seconds: float = 0.0


@dataclass
class Drill:
    """A run under fire: its driver process, the cluster beneath it, and what has been seen."""

    home: Path
    name: str
    words: list[str]
    cluster: Cluster
    second: Any
    cpus: float
    model: Sequence[str] = tuple(MODEL)
    driver: subprocess.Popen[str] | None = None
    log: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start the driver; the same command each time."""
        environment = {
            **os.environ,
            "RAY_ADDRESS": self.cluster.address,
            "FLUXRAY_HOME": str(self.home),
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        }
        command = [sys.executable, str(ROOT / "jobs" / "train.py"), *self.model, *self.words, f"name={self.name}"]
        output = (self.home / f"{self.name}.log").open("a")
        self.driver = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)

    def points(self) -> list[tuple[int, float, float]]:
        """Return step, loss and time (seconds since the epoch) of every point that MLflow has."""
        query = (
            "select t.run_uuid, m.step, m.value, m.timestamp from tags t join metrics m on m.run_uuid = t.run_uuid "
            "where t.key = 'fluxray.run' and t.value = ? and m.key = 'train/loss'"
        )
        try:  # read only: the driver alone may make the tables
            with closing(sqlite3.connect(f"file:{self.home / 'mlflow.db'}?mode=ro", uri=True)) as database:
                found = database.execute(query, (self.name,)).fetchall()
        except sqlite3.OperationalError:
            return []
        assert len({run for run, *_ in found}) <= 1, f"several MLflow runs of {self.name}"
        return [(step, value, milliseconds / 1000) for _, step, value, milliseconds in found]

    def newest(self) -> int:
        """Return the newest step that MLflow has."""
        return max((step for step, _, _ in self.points()), default=0)

    def committed(self) -> int:
        """Return the newest checkpoint that Ray has registered."""
        from fluxray.runtime.paths import registered_checkpoints

        return max((int(path.name[-8:]) for path in registered_checkpoints(self.home / "runs" / self.name)), default=0)

    def resumes(self) -> list[int]:
        """Return the steps at which the run went on, in order."""
        text = (self.home / f"{self.name}.log").read_text()
        return [int(step) for step in re.findall(r"^resumed at step (\d+)", text, re.MULTILINE)]

    def kill(self, kind: str) -> None:
        """Kill one part with SIGKILL."""
        assert self.driver is not None
        if kind == "driver":
            self.driver.kill()
            self.driver.wait()
            self.start()
        elif kind == "node":
            self.cluster.remove_node(self.second, allow_graceful=False)
            self.second = self.cluster.add_node(num_cpus=self.cpus)
        else:
            os.kill(random.choice(self.processes(kind)), signal.SIGKILL)

    def processes(self, kind: str) -> list[int]:
        """Return the ids of the workers' or controllers' processes of this cluster, whose parents may be gone."""
        title = {"worker": "ray::RayTrainWorker", "controller": "ray::TrainController"}[kind]
        return processes(title, self.cluster.head_node.get_session_dir_path())


def processes(title: str, session_dir: str) -> list[int]:
    """Return the ids of the processes whose command line begins with `title` and which write into this Ray session's logs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            titled = (path / "cmdline").read_bytes().decode(errors="replace").startswith(title)
            if titled and os.readlink(path / "fd" / "1").startswith(session_dir):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def wait_until(
    condition: Callable[[], bool], what: str, driver: subprocess.Popen[str] | None = None, timeout_s: float = TIMEOUT_S
) -> None:
    """Return once the condition holds; fail after `timeout_s`, or if the driver has failed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline or (driver is not None and driver.poll() not in (None, 0)):
            raise AssertionError(f"{what} did not happen (driver: {driver.poll() if driver else None})")
        time.sleep(0.25)


def disturb(drill: Drill, fault_at: list[tuple[int, str]]) -> list[Fault]:
    """Run to the end, killing at the given steps; return the faults with what they cost."""
    faults: list[Fault] = []
    drill.start()
    for step, kind in fault_at:
        wait_until(lambda step=step: drill.newest() >= step, f"step {step}", drill.driver)
        wait_until(lambda kind=kind: kind not in ("worker", "controller") or bool(drill.processes(kind)), kind)
        num_resumes = len(drill.resumes())
        fault = Fault(kind, drill.newest(), drill.committed())
        killed_at = time.time()
        drill.kill(kind)
        wait_until(lambda seen=num_resumes: len(drill.resumes()) > seen, f"a resume after {kind}", drill.driver)
        fault.resumed = drill.resumes()[-1]
        wait_until(lambda since=killed_at, at=fault.at_step: drill.newest() > at and _later(drill, since), "the next step")
        fault.seconds = min(at for _, _, at in drill.points() if at > killed_at + 1) - killed_at
        faults.append(fault)
        print(f"{len(faults)}: {fault}", flush=True)
    wait_until(lambda: drill.driver is not None and drill.driver.poll() is not None, "the end of the run", timeout_s=END_S)
    assert drill.driver is not None and drill.driver.returncode == 0, (drill.home / f"{drill.name}.log").read_text()[-3000:]
    return faults


def _later(drill: Drill, since: float) -> bool:
    return any(at > since + 1 for _, _, at in drill.points())


def check(drill: Drill, reference: Drill, num_steps: int, faults: list[Fault]) -> None:
    """Raise AssertionError unless the disturbed run ended as the undisturbed one and left nothing behind."""
    from fluxray.checkpoint import CheckpointReader, directory_name

    losses, expected = drill.points(), reference.points()
    assert sorted(step for step, _, _ in losses) == list(range(1, num_steps + 1)), "a step is missing or there twice in MLflow"
    assert {s: v for s, v, _ in losses} == {s: v for s, v, _ in expected}, "losses differ"
    readers = [CheckpointReader(d.home / "runs" / d.name / directory_name(num_steps)) for d in (drill, reference)]
    for name in readers[1].names():
        for section in readers[1].sections(name):
            assert torch.equal(*(reader.read(section, name) for reader in readers)), f"{section} of {name} differs"
    for fault in faults:
        assert fault.resumed >= fault.committed, f"went back behind the last commit: {fault}"
    wait_until(lambda: not drill.processes("worker") and not drill.processes("controller"), "the end of all workers")
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"), "all CPUs given back")


def plan(num_faults: int, seed: int, steps_between: int) -> list[tuple[int, str]]:
    """Return at which step what is killed; each fault has its own stretch of `steps_between` steps."""
    random.seed(seed)
    steps = [SAVE_EVERY + steps_between * index + random.randrange(steps_between // 2) for index in range(num_faults)]
    return [(step, random.choice(KINDS)) for step in steps]


def run(fault_at: list[tuple[int, str]], num_steps: int, num_workers: int) -> tuple[list[Fault], float, float]:
    """Train undisturbed, then under fire; return the faults and the seconds that the two took."""
    cpus = 1.0
    words = [f"resources.num_workers={num_workers}", f"resources.cpu={1.8 * cpus / num_workers}"]
    words += [f"train.num_steps={num_steps}", f"batch.micro_size={8 // num_workers}"]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
    second = cluster.add_node(num_cpus=cpus)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    drills: list[Drill] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            seconds, faults = [], []
            for name, kills in (("undisturbed", []), ("disturbed", fault_at)):
                drills.append(Drill(Path(scratch), name, words, cluster, second, cpus))
                start = time.monotonic()
                faults = disturb(drills[-1], kills)
                seconds.append(time.monotonic() - start)
            check(drills[1], drills[0], num_steps, faults)
    finally:
        for drill in drills:
            if drill.driver is not None:
                drill.driver.kill()
        ray.shutdown()
        cluster.shutdown()
    return faults, seconds[0], seconds[1]


def main() -> None:
    """Run the drill and write what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps-between", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import common

    fault_at = plan(arguments.faults, arguments.seed, arguments.steps_between)
    num_steps = fault_at[-1][0] + 3 * arguments.steps_between  # so that there is a step after the last kill, too
    faults, undisturbed_s, disturbed_s = run(fault_at, num_steps, arguments.workers)
    rows: list[dict[str, Any]] = []
    for kind in sorted(set(KINDS)):
        of_kind = [fault for fault in faults if fault.kind == kind]
        if of_kind:
            seconds = [fault.seconds for fault in of_kind]
            again = max(fault.at_step - fault.resumed for fault in of_kind)
            row = {"note": f"{kind} killed", "num_faults": len(of_kind), "num_workers": arguments.workers}
            rows.append({**row, "median_s": statistics.median(seconds), "worst_s": max(seconds), "most_steps_again": again})
    row = {"note": "whole run, equal to the undisturbed one", "num_faults": len(faults), "num_workers": arguments.workers}
    rows.append({**row, "num_steps": num_steps, "seconds": disturbed_s, "undisturbed_s": undisturbed_s})
    rounded = [{key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    name = "drill" if arguments.workers == 2 else f"drill-{arguments.workers}-workers"
    common.write(name, rounded, arguments.out or common.RESULTS)


if __name__ == "__main__":
    main()
