"""What the service costs on one GPU: Trainer, Ray and MLflow against the bare engine loop; and what a save costs.

    python benchmarks/service.py [--steps 60] [--out DIR]

flux2-seed (1.41B), sequence 2,048, mixed-bf16, compiled, dropout 0.1, one document a row. Each part is a process of its own. The
bare loop takes micro-batches from the same loader and calls the engine, nothing else. The disk's own rate is that of one large
file, written and synced.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

WARM_UP = 10
LOG_EVERY = 10


def configure(folder: Path, num_steps: int, *overrides: str) -> Any:
    """Return the configuration that all parts share."""
    from fluxray.config.load import resolve

    text = folder / "one.txt"
    text.write_text("\n".join(topics.values()))
    words = ["resources.num_workers=1", f"data.source=path:{text}", "data.max_slice=2048", "data.vocab_size=8192"]
    words += ["activation_checkpoint=none", "hardware.tflops=1", "evaluation.max_rows=8", "optim.warmup_steps=10"]
    words += [f"train.num_steps={num_steps}", f"train.log_every={LOG_EVERY}", f"storage={folder}", "name=service"]
    return resolve("fsdp8", "flux2-seed", [*words, *overrides])


def bare(folder: Path, num_steps: int) -> dict[str, float]:
    """Return tokens per second of the engine's own loop."""
    import torch

    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState
    from fluxray.runtime.context import WorkerContext
    from fluxray.runtime.worker import build_parts

    config = configure(folder, num_steps)
    parts = build_parts(config, WorkerContext(0, 1, 0, folder, folder / "cache", print, lambda _: False, (), print))
    state = RunState(config.seed, build_schedule(config.optim, num_steps))
    batches, start = parts.learned.loader.train_batches(state), 0.0
    for step in range(num_steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        parts.engine.train_step(next(batches).batches, lr_at(state.schedule, step))
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (num_steps - WARM_UP)
    batches.close()
    return {"tokens_per_s": config.global_batch_size * 2048 / seconds}


def service(folder: Path, num_steps: int, *overrides: str) -> dict[str, float]:
    """Return the figures that MLflow recorded of the same training through `fluxray train`."""
    import mlflow

    from fluxray.runtime.launch import train

    done = train(configure(folder, num_steps, *overrides))
    client = mlflow.MlflowClient(done.tracking_uri)
    experiment = client.get_experiment_by_name("fluxray")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])

    def history(key: str) -> list[float]:
        return [point.value for point in client.get_metric_history(run.info.run_id, key)]

    found = {"tokens_per_s": statistics.median(history("perf/tokens_per_s")[WARM_UP // LOG_EVERY :])}
    blocked = history("checkpoint/blocked_s")
    found |= {"first_blocked_s": blocked[0], "blocked_s": blocked[-1], "durable_s": history("checkpoint/durable_s")[-1]}
    saved = Path(str(done.summary.checkpoint))
    found["checkpoint_gb"] = sum(path.stat().st_size for path in saved.iterdir()) / 1e9
    return found


def disk(folder: Path) -> dict[str, float]:
    """Return the rate in GB/s at which one file of 8 GB is written and synced."""
    block = os.urandom(64 << 20)
    start = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(8_000_000_000 // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"gb_per_s": 8 / (time.perf_counter() - start)}


PARTS = {
    "bare": bare,
    "asynchronous": lambda folder, steps: service(folder, steps, f"checkpoint.every_steps={steps // 2}"),
    "synchronous": lambda folder, steps: service(folder, 20, "checkpoint.every_steps=10", "checkpoint.asynchronous=false"),
    "disk": lambda folder, steps: disk(folder),
}
"""What is measured; the first two give the cost of the service, saves in the background included."""


def main() -> None:
    """Measure the parts one after the other and write benchmarks/results/service.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        with tempfile.TemporaryDirectory() as scratch:
            found = PARTS[arguments.part](Path(scratch), arguments.steps)
        print("PART " + json.dumps(found), flush=True)
        return
    import common

    found: dict[str, dict[str, float]] = {}
    for part in PARTS:
        command = [sys.executable, __file__, "--part", part, "--steps", str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("PART ")]
        if not lines:
            raise SystemExit(f"{part} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        found[part] = json.loads(lines[0])
        print(part, found[part], flush=True)
    shared = {"model": "flux2-seed", "engine": "sharded", "precision": "mixed-bf16", "num_gpus": 1, "sequence_length": 2048}
    rows: list[dict[str, Any]] = [{**shared, "note": "bare engine loop", "baseline": "bare", **found["bare"]}]
    speed = found["asynchronous"]["tokens_per_s"]
    note = "Trainer, Ray and MLflow, a save in the background"
    rows.append({**shared, "note": note, "tokens_per_s": speed, "ratio": speed / found["bare"]["tokens_per_s"]})
    for part in ("asynchronous", "synchronous"):
        rate = found[part]["checkpoint_gb"] / found[part]["durable_s"]
        row = {
            "note": f"{part} save",
            "gb_per_s": rate,
            "ratio": rate / found["disk"]["gb_per_s"],
            "baseline": "the disk's own rate",
        }
        rows.append(
            {**shared, **row, **{k: found[part][k] for k in ("first_blocked_s", "blocked_s", "durable_s", "checkpoint_gb")}}
        )
    rows.append({"note": "one file of 8 GB, written and synced", **found["disk"]})
    common.write(
        "service",
        [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
        arguments.out or common.RESULTS,
    )


if __name__ == "__main__":
    main()
