"""Two trainings at once on one card, half of it each, against the same two one after the other.

    python benchmarks/sharing.py [--steps 40] [--out DIR] [--set KEY=VALUE ...]

Each training is a process of its own that is held to its share as a run of `resources.gpu=0.5` is; where NVIDIA's MPS serves the
card, it gets the limits that such a run gets. Both are warmed up before either is timed, and both are timed over the same while:
`ratio` is the sum of their speeds over the speed of one alone. On a machine without a GPU both compute on its CPU, a rehearsal.
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
from typing import Any

SHARE, WARM_UP, SEQUENCE = 0.5, 5, 512
MODEL = ("model.config.hidden_size=512", "model.config.num_hidden_layers=8", "model.config.intermediate_size=2048")
READY, ROW = "READY", "ROW "


def train(num_steps: int, words: list[str]) -> dict[str, Any]:
    """Train in this process: warm up, say READY, wait for a line on stdin, and return the speed of `num_steps` steps."""
    import torch

    from fluxray.config.load import resolve
    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState
    from fluxray.runtime.context import WorkerContext
    from fluxray.runtime.worker import build_parts

    on_gpu = torch.cuda.is_available()
    card = [f"resources.gpu={SHARE}", "precision=mixed-bf16"] if on_gpu else []
    given = [*MODEL, f"data.max_slice={SEQUENCE}", "optim.warmup_steps=1", "hardware.tflops=1", *card, *words]
    config = resolve("cpu", "lm-tiny", given)
    folder = Path(tempfile.gettempdir()) / "fluxray-sharing"
    parts = build_parts(config, WorkerContext(0, 1, 0, folder, folder / "cache", print, lambda _: False, (), lambda _: None))
    state = RunState(config.seed, build_schedule(config.optim, config.train.num_steps))
    batches = parts.learned.loader.train_batches(state)

    def steps(first: int, number: int) -> int:
        tokens = 0
        for step in range(first, first + number):
            taken = next(batches).batches
            parts.engine.train_step(taken, lr_at(state.schedule, step))
            tokens += sum(batch.num_tokens for batch in taken)
        if on_gpu:
            torch.cuda.synchronize()
        return tokens

    steps(0, WARM_UP)
    print(READY, flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    tokens = steps(WARM_UP, num_steps)
    seconds = time.perf_counter() - start
    batches.close()
    found = {"tokens_per_s": round(tokens / seconds), "seconds": round(seconds, 2)}
    if on_gpu:
        found["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return found


def at_once(number: int, num_steps: int, words: list[str]) -> list[dict[str, Any]]:
    """Return the figures of `number` trainings that are timed at the same time."""
    command = [sys.executable, __file__, "--train", "--steps", str(num_steps), "--set", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **limits()}
    running = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            if not any(line.strip() == READY for line in iter(process.stdout.readline, "")):
                raise SystemExit("a training ended before it was warm; its own words are above")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [json.loads(line.removeprefix(ROW)) for out in outputs for line in out.splitlines() if line.startswith(ROW)]


def limits() -> dict[str, str]:
    """Return the variables that hold a process to its share where MPS serves the card; nothing where none does."""
    import torch

    from fluxray.runtime.sharing import mps_limits, served_card

    memory = served_card() if torch.cuda.is_available() else None
    return {} if memory is None else mps_limits(SHARE, memory)


def measure(num_steps: int, words: list[str]) -> list[dict[str, Any]]:
    """Return two rows: one training alone in its half, and two at once; `ratio` compares their speeds in sum."""
    alone = at_once(1, num_steps, words)[0]
    both = at_once(2, num_steps, words)
    assert len(both) == 2, "one of the two did not come to its end"
    total = sum(found["tokens_per_s"] for found in both)
    lasted = [found["seconds"] for found in both]
    shared = {"model": "lm-tiny, 8 blocks of 512", "engine": "sharded", "sequence_length": SEQUENCE, "num_steps": num_steps}
    how = "MPS" if limits() else "taking turns"
    after = f"one after the other, each in {SHARE:g} of the card"
    return [
        {**shared, "note": after, "baseline": after, **alone},
        {
            **shared, "note": f"two at once, each in {SHARE:g} of the card, {how}", "baseline": after, "tokens_per_s": total,
            "ratio": round(total / alone["tokens_per_s"], 3), "overlap": round(min(lasted) / max(lasted), 3),
            "seconds": statistics.mean(lasted), "claim": "two mid-size models trained at once on one card",
        },
    ]  # fmt: skip


def main() -> None:
    """Measure and write benchmarks/results/sharing.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], help="more words of the configuration, for every training")
    given = parser.parse_args()
    if given.train:
        print(ROW + json.dumps(train(given.steps, given.set)), flush=True)
        return
    import common

    common.write("sharing", measure(given.steps, given.set), given.out or common.RESULTS)


if __name__ == "__main__":
    main()
