"""What a sweep loses with a node of its cluster, or with the head, on Ray nodes of this machine:

    python benchmarks/sweep_faults.py [--tokens 30720] [--out DIR]

Trains lm-tiny on the English that Python ships: 4 trials, two at a time, on two nodes that hold one each. Once undisturbed; once
with the second node killed for good while a trial runs on it; twice with the head killed, whose driver must then say how to go on
and end, and a new head, on which `--resume` goes on. All must end with the same table, no trial that had ended may run again, the
others must go on from their last checkpoints, and MLflow must have every run and every point once.
"""

import argparse
import json
import re
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import sweep
from ray.cluster_utils import Cluster

from fluxray.errors import CheckpointError
from fluxray.runtime.paths import Home, registered_checkpoints
from fluxray.runtime.sweep_table import Table, read_table
from fluxray.runtime.sweeps import read_outcome

CPUS, WORKER_CPUS = 2, 1.5
"""Of a node, and of a trial's worker: a node has room for one, and for drivers beside it."""

NUM_TRIALS = 4
TIMEOUT_S = 1200
EVERY_START = "ladder.json"
"""The file of a run that is written whenever it starts or goes on."""


@dataclass
class Nodes:
    """A head and a second node, each a set of processes of its own; `logs` are those of all nodes that there have been."""

    head: Any = None
    second: Any = None
    address: str = ""
    logs: set[Path] = field(default_factory=set)
    _cluster: Cluster = field(default_factory=Cluster)

    def start_head(self, at: str = "") -> None:
        """Start a head, at an address that there was before."""
        where = {"gcs_server_port": int(at.rpartition(":")[2])} if at else {}
        self.head = self._cluster.add_node(num_cpus=CPUS, **where)
        self.address = str(self._cluster.address)
        self.logs.add(Path(self.head.get_session_dir_path()) / "logs")

    def start_second(self) -> None:
        """Start the other node."""
        self.second = self._cluster.add_node(num_cpus=CPUS)

    def kill(self, node: Any) -> None:
        """Kill all processes of a node with SIGKILL."""
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """End what is left of both."""
        for node in self._cluster.list_all_nodes()[::-1]:
            self.kill(node)

    def resumed_at(self) -> list[int]:
        """Return the steps at which trials went on, as their processes have said."""
        said = "".join(path.read_text(errors="replace") for folder in self.logs for path in folder.glob("worker*.out"))
        return [int(step) for step in re.findall(r"^resumed at step (\d+)", said, re.MULTILINE)]


@dataclass
class Sweep:
    """A sweep and its drivers."""

    place: Path
    name: str
    nodes: Nodes
    driver: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What its drivers have said."""
        return self.place / f"{self.name}.log"

    def run_dir(self, trial: int) -> Path:
        """The folder of a trial's run."""
        return Home(self.place).runs / f"{self.name}-{trial:03}"

    def start(self, *words: str) -> None:
        """Start a driver."""
        environment = {**sweep.environment(self.place), "RAY_ADDRESS": self.nodes.address}
        with self.log.open("a") as log:
            self.driver = subprocess.Popen(sweep.command(*words), env=environment, stdout=log, stderr=log)

    def begin(self) -> None:
        """Start its first driver."""
        space = self.place / "space.json"
        self.start(str(space), *sweep.BASE, f"resources.cpu={WORKER_CPUS}", f"name={self.name}")

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Return the code of the driver's end; None if the condition holds before."""
        assert self.driver is not None
        deadline = time.monotonic() + TIMEOUT_S
        while self.driver.poll() is None and not until():
            assert time.monotonic() < deadline, f"too slow: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return self.driver.poll()

    def ended(self) -> set[int]:
        """Return the trials that have ended."""
        folder = Home(self.place).sweeps / self.name
        return {trial for trial in range(NUM_TRIALS) if read_outcome(folder, trial)}

    def saved(self) -> dict[int, int]:
        """Return the step of the newest checkpoint that counts, by trial, of those that run."""
        steps = {}
        for trial in set(range(NUM_TRIALS)) - self.ended():
            with suppress(CheckpointError):  # the list is just being written
                names = [path.name for path in registered_checkpoints(self.run_dir(trial))]
                steps |= {trial: int(names[0][-8:])} if names else {}
        return steps

    def in_the_midst(self) -> bool:
        """Return whether two trials have ended, and the two that run have each saved a checkpoint."""
        return len(self.ended()) == len(self.saved()) == 2

    def points(self, metric: str) -> dict[str, list[int]]:
        """Return the steps of a metric that MLflow has, by run: a list for each MLflow run of that name."""
        query = (
            "select t.run_uuid, t.value, m.step from tags t join metrics m on m.run_uuid = t.run_uuid "
            "where t.key = 'fluxray.run' and t.value like ? and m.key = ?"
        )
        with closing(sqlite3.connect(f"file:{self.place / 'mlflow.db'}?mode=ro", uri=True)) as database:
            found = database.execute(query, (f"{self.name}-%", metric)).fetchall()
        names = {uuid: name for uuid, name, _ in found}
        assert len(set(names.values())) == len(names) == NUM_TRIALS, f"a run is missing in MLflow or there twice: {names}"
        return {name: sorted(step for one, _, step in found if one == uuid) for uuid, name in names.items()}

    def table(self) -> Table:
        """Return its table, once MLflow has been found to have each point of it once."""
        table = read_table(Home(self.place).sweeps / self.name)
        held_out, learned = self.points("eval/loss"), self.points("train/loss")
        for trial in table.trials:
            assert held_out[trial.run] == [point.step for point in trial.history], f"{trial.run}: {held_out[trial.run]}"
            assert len(learned[trial.run]) == len(set(learned[trial.run])), f"{trial.run}: {learned[trial.run]}"
        return table


@contextmanager
def started(place: Path, name: str) -> Iterator[Sweep]:
    """Start nodes and a sweep on them; end whatever is left of them."""
    one = Sweep(place, name, Nodes())
    try:
        one.nodes.start_head()
        one.nodes.start_second()
        one.begin()
        yield one
    finally:
        if one.driver is not None:
            one.driver.kill()
            one.driver.wait()
        one.nodes.stop()


def undisturbed(place: Path) -> Table:
    """Run the sweep to its end."""
    with started(place, "undisturbed") as one:
        assert one.wait() == 0, one.log.read_text()[-3000:]
        return one.table()


def disturbed(place: Path, name: str, expected: Table, disturb: Callable[[Sweep], dict[str, Any]]) -> dict[str, Any]:
    """Disturb the sweep when two of its trials have ended and two have saved, and let it end; return the row."""
    with started(place, name) as one:
        assert one.wait(one.in_the_midst) is None, one.log.read_text()[-3000:]
        ended, saved, killed_at = one.ended(), one.saved(), time.time()
        found = disturb(one)
        seconds = time.time() - killed_at
        again = {trial for trial in range(NUM_TRIALS) if (one.run_dir(trial) / EVERY_START).stat().st_mtime > killed_at}
        assert not again & ended, f"{again & ended} had ended and ran again"
        went_on = sorted(one.nodes.resumed_at())
        assert went_on and all(step >= min(saved.values()) for step in went_on), f"{went_on} of {saved}"
        return {
            "model": "lm-tiny",
            "precision": "fp32",
            **found,
            "seconds": round(seconds),
            "num_trials": NUM_TRIALS,
            "num_ended_before": len(ended),
            "num_resumed": len(went_on),
            "equal": sweep.same(expected, one.table()),
        }


def lose_node(one: Sweep) -> dict[str, Any]:
    """Kill the second node, which stays away."""
    one.nodes.kill(one.nodes.second)
    assert one.wait() == 0, one.log.read_text()[-3000:]
    return {"note": "second node killed for good"}


def lose_head(one: Sweep, at_once: bool) -> dict[str, Any]:
    """Kill the head; start another when the driver has ended by itself, or at once and at the same address, whereupon Ray ends
    the driver; then resume."""
    killed_at = time.monotonic()
    one.nodes.kill(one.nodes.head)
    if at_once:
        one.nodes.start_head(at=one.nodes.address)
    code = one.wait()
    ended_s = time.monotonic() - killed_at
    said = one.log.read_text().splitlines()
    told = [line for line in said if line.endswith(f"fluxray tune --resume {one.name} goes on")]
    assert code == 1 and told and (at_once or told[-1] == said[-1]), (code, told, said[-30:])
    one.nodes.kill(one.nodes.second)
    if not at_once:
        one.nodes.start_head()
    one.nodes.start_second()
    one.start("--resume", one.name)
    assert one.wait() == 0, one.log.read_text()[-3000:]
    note = "head killed, another at once at its address, --resume" if at_once else "head killed, --resume on another"
    return {"note": note, "driver_ended_s": round(ended_s)}


FAULTS: dict[str, Callable[[Sweep], dict[str, Any]]] = {
    "replaced": partial(lose_head, at_once=True),
    "head": partial(lose_head, at_once=False),
    "node": lose_node,
}


def measure(tokens: int) -> list[dict[str, Any]]:
    """Run all of it; return the rows."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "space.json").write_text(json.dumps(sweep.space(tokens, sweep.LRS[1:], sweep.MICRO[1:2])))
        expected = undisturbed(place)
        return [disturbed(place, name, expected, fault) for name, fault in FAULTS.items()]


def main() -> None:
    """Run it, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30720)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    arguments = parser.parse_args()
    common.write("sweep-faults", measure(arguments.tokens), arguments.out)


if __name__ == "__main__":
    main()
