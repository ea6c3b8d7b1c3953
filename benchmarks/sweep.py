"""What sweeps find and what they cost, on any machine with two cores:

    python benchmarks/sweep.py [--tokens 61440] [--out DIR]
    python benchmarks/sweep.py --record NAME [--storage DIR]       # adds a sweep that has run elsewhere, such as seed_grid

Trains lm-tiny on the English that Python ships: a grid of 3 learning rates, 3 micro-batches and 2 accumulations; the same under
ASHA; and 4 of these trials under a driver that is killed with SIGKILL and resumed, which must end with the table of trials that
nobody has disturbed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fluxray.runtime.paths import Home, home  # noqa: E402
from fluxray.runtime.points import read_points  # noqa: E402
from fluxray.runtime.sweep_table import DONE, Table, Trial, read_table  # noqa: E402

TIMEOUT_S = 3600
LRS, MICRO, ACCUMULATION = (3e-4, 3e-3, 3e-2), (4, 8, 16), (1, 2)
BASE = ["--profile", "cpu", "--model", "lm-tiny", "hardware.tflops=1", "evaluation.max_rows=64", "tracking.system_metrics_s=0"]
REPORT = {"batch.micro_size": 8, "optim.lr": 5e-5, "batch.accumulation_steps": 4}
"""What the "Flux 2" report found best."""


def space(tokens: int, lrs: Sequence[float], micro: Sequence[int], **more: Any) -> dict[str, Any]:
    keys = {"optim.lr": lrs, "batch.micro_size": micro, "batch.accumulation_steps": ACCUMULATION}
    budget = {"tokens": tokens, "evaluations": 9, "warmup": 0.1}
    return {"keys": {key: {"grid": list(values)} for key, values in keys.items()}, "budget": budget, **more}


def command(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / "tune.py"), *words]


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "FLUXRAY_HOME": str(place), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "PYTHONPATH": str(ROOT)}


def sweep(place: Path, name: str, content: dict[str, Any]) -> tuple[Table, float]:
    """Run a sweep to its end; return its table and its seconds."""
    file = place / f"{name}.json"
    file.write_text(json.dumps(content))
    start = time.monotonic()
    subprocess.run(command(str(file), *BASE, f"name={name}"), env=environment(place), check=True, timeout=TIMEOUT_S)
    return read_table(Home(place).sweeps / name), time.monotonic() - start


def killed_and_resumed(place: Path, name: str, content: dict[str, Any]) -> tuple[Table, int]:
    """Kill the driver in the midst of its third trial, and resume; return the table, and how many trials had ended before."""
    file = place / f"{name}.json"
    file.write_text(json.dumps(content))
    where, folder = Home(place), Home(place).sweeps / name
    driver = subprocess.Popen(command(str(file), *BASE, f"name={name}"), env=environment(place))
    deadline = time.monotonic() + TIMEOUT_S
    while not _ended(folder) or not read_points(where.runs / f"{name}-002"):
        assert driver.poll() is None and time.monotonic() < deadline, "the driver ended before it could be killed"
        time.sleep(0.1)
    num_ended = len(_ended(folder))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    subprocess.run(command("--resume", name), env=environment(place), check=True, timeout=TIMEOUT_S)
    return read_table(folder), num_ended


def _ended(folder: Path) -> list[Trial]:
    return read_table(folder).with_status(*DONE) if (folder / "trials.jsonl").exists() else []


def spent(table: Table) -> int:
    """Return the tokens that all trials have learned from."""
    return sum(trial.history[-1].tokens for trial in table.trials if trial.history)


def final(trial: Trial | None) -> float:
    assert trial is not None and trial.value is not None
    return trial.value


def best_by(table: Table, key: str) -> dict[float, float]:
    """Return for each value of a key the best result of its trials."""
    found: dict[float, float] = {}
    for trial in table.with_status("ended"):
        value = float(trial.keys[key])
        found[value] = min(found.get(value, float("inf")), final(trial))
    return found


def same(table: Table, other: Table) -> bool:
    """Return whether two tables have the same trials with the same histories, times apart."""
    plain = [
        [(trial.keys, trial.status, [(point.step, point.tokens, point.value) for point in trial.history]) for trial in one.trials]
        for one in (table, other)
    ]
    return plain[0] == plain[1]


def measure(tokens: int) -> list[dict[str, Any]]:
    """Run all of it; return the rows."""
    shared = {"model": "lm-tiny", "precision": "fp32"}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        grid, seconds = sweep(place, "grid", space(tokens, LRS, MICRO))
        by_lr = best_by(grid, "optim.lr")
        assert grid.winner is not None
        rows = [
            {**shared, "note": "3 x 3 x 2 grid", "num_trials": len(grid.trials), "seconds": round(seconds), "tokens": spent(grid)}
            | {"best_lr": grid.winner.keys["optim.lr"], "last_loss": round(final(grid.winner), 4)}
        ]
        rows += [
            {**shared, "note": "its best at one learning rate", "best_lr": lr, "last_loss": round(loss, 4)}
            for lr, loss in sorted(by_lr.items())
        ]
        scheduler = {"kind": "asha", "grace": 0.111, "reduction": 3}
        asha, seconds = sweep(place, "asha", space(tokens, LRS, MICRO, scheduler=scheduler))
        assert asha.winner is not None
        rows.append(
            {**shared, "note": "the same under ASHA", "num_trials": len(asha.trials), "seconds": round(seconds)}
            | {"tokens": spent(asha), "ratio": round(spent(asha) / spent(grid), 4), "last_loss": round(final(asha.winner), 4)}
            | {"best_lr": asha.winner.keys["optim.lr"], "num_stopped": len(asha.with_status("stopped"))}
        )
        small = space(tokens, LRS[1:], MICRO[1:2])
        undisturbed, _ = sweep(place, "undisturbed", small)
        resumed, num_ended = killed_and_resumed(place, "resumed", small)
        rows.append(
            {**shared, "note": "driver killed, then --resume", "num_trials": len(resumed.trials), "num_ended_before": num_ended}
            | {"equal": same(undisturbed, resumed)}
        )
    return rows


def recorded(name: str, storage: str | None) -> list[dict[str, Any]]:
    """Return rows of a sweep that has run: its best trials, and that of the report's values."""
    table = read_table(home(storage).sweeps / name)
    ended = sorted(table.with_status("ended"), key=final)
    report = [trial for trial in ended if all(trial.keys.get(key) == value for key, value in REPORT.items())]
    rows = []
    for note, trials in ((f"{name}: best", ended[:3]), (f"{name}: the report's best", report[:1])):
        for trial in trials:
            keys = {key.rpartition(".")[2]: value for key, value in trial.keys.items()}
            rows.append({"note": note, **keys, "num_trials": len(table.trials), "last_loss": round(final(trial), 4)})
    return rows


def main() -> None:
    """Run the sweeps, or read one that has run, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=61440)
    parser.add_argument("--record")
    parser.add_argument("--storage")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    arguments = parser.parse_args()
    if arguments.record is None:
        common.write("sweep", measure(arguments.tokens), arguments.out)
        return
    common.write("sweep-card", recorded(arguments.record, arguments.storage), arguments.out)


if __name__ == "__main__":
    main()
