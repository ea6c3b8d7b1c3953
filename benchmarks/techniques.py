"""What each technique costs and saves: flux2-seed (1.41B parameters) on one GPU, real text, and what the "Flux 2" report claims.

    python benchmarks/techniques.py [--steps 8] [--out DIR] [--only ROW ...] [--set KEY=VALUE ...]

Every row is a process of its own: a training step of the whole worker with one thing changed from its baseline, which runs in the
same command. `ratio` is the row's rate over its baseline's. Rows with a loss in place of a rate train a small model from the same
text: 500 steps in each precision and with each optimizer, beside other seeds of the plain one, and a sweep of learning rates.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

SEQUENCE, WARM_UP = 2048, 3
PLAIN = "plain: eager, amp-bf16"
ONE_BATCH = "plain, one micro-batch a step"
ONE_ROW = "plain, one row a step, no dropout"
PACKED = "packed documents, masked"
PADDED = "rows as long as their documents"
FULL = "activation_checkpoint=full"

EAGER = ("compile=false", "precision=amp-bf16", "attention=flash")
DROPLESS = ("model.config.attention_probs_dropout_prob=0", "model.config.hidden_dropout_prob=0")
SINGLE = (*EAGER, "batch.micro_size=8", "batch.accumulation_steps=1", "clip.mode=previous")
TINY_STEP = (*EAGER, *DROPLESS, "batch.micro_size=1", "batch.accumulation_steps=1")
MASKED = (*EAGER, *DROPLESS, "attention=efficient", "data.packing=true")
UNEVEN = (*EAGER, *DROPLESS, "attention=efficient", "data.packing=false", "data.max_slice=512", "batch.micro_size=8")


class Case(NamedTuple):
    """A row: its overrides, the row that it is compared with, what is claimed of it, the steps if not as asked, and its text."""

    words: tuple[str, ...]
    baseline: str = PLAIN
    claim: str = ""
    steps: int | None = None
    text: str = "one"


ROWS: dict[str, Case] = {
    PLAIN: Case(EAGER),
    "precision=fp32": Case((*EAGER, "precision=fp32", "attention=efficient"), steps=2),
    "precision=amp-fp16": Case((*EAGER, "precision=amp-fp16"), "precision=fp32", "40% less memory than fp32"),
    "precision=amp-bf16": Case(EAGER, "precision=fp32", "40% less memory than fp32"),
    "precision=mixed-bf16": Case((*EAGER, "precision=mixed-bf16")),
    "compile=true": Case((*EAGER, "compile=true")),
    FULL: Case((*EAGER, "activation_checkpoint=full"), claim="12 GB less on 24 layers"),
    "activation_checkpoint=sqrt": Case((*EAGER, "activation_checkpoint=sqrt")),
    "activation_checkpoint=every_n, 2": Case((*EAGER, "activation_checkpoint=every_n", "activation_checkpoint_every=2")),
    "activation_checkpoint=selective, 16 GB": Case(
        (*EAGER, "activation_checkpoint=selective", "activation_checkpoint_budget=16GB")
    ),
    "activation_checkpoint=offload": Case((*EAGER, "activation_checkpoint=offload"), FULL),
    "attention=efficient": Case((*EAGER, "attention=efficient")),
    "attention=math": Case((*EAGER, "attention=math", "batch.micro_size=2", "batch.accumulation_steps=16"), steps=2),
    "attention=cudnn": Case((*EAGER, "attention=cudnn"), claim="20% faster"),
    PACKED: Case(MASKED, "", text="packed"),
    "attention=varlen": Case((*MASKED, "attention=varlen"), PACKED, "20% faster", text="packed"),
    "attention=flex": Case((*MASKED, "attention=flex", "compile=true"), PACKED, "20% faster", text="packed"),
    "optim.kind=adam8bit": Case((*EAGER, "optim.kind=adam8bit"), claim="75% less optimizer memory"),
    "optim.kind=paged_adam8bit": Case((*EAGER, "optim.kind=paged_adam8bit"), claim="75% less optimizer memory"),
    "loss.chunk_tokens=2048": Case((*EAGER, "loss.chunk_tokens=2048")),
    ONE_BATCH: Case(SINGLE, ""),
    "optim.in_backward=true": Case((*SINGLE, "optim.in_backward=true"), ONE_BATCH),
    ONE_ROW: Case(TINY_STEP, "", steps=1000),
    "cuda_graph=true": Case((*TINY_STEP, "cuda_graph=true"), ONE_ROW, "18% faster after 1,000 iterations", steps=1000),
    PADDED: Case(UNEVEN, "", text="packed"),
    "allocator=expandable": Case((*UNEVEN, "allocator=expandable"), PADDED, "less fragmentation", text="packed"),
    "allocator=async": Case((*UNEVEN, "allocator=async"), PADDED, "less fragmentation", text="packed"),
    "data.length_grouping=true": Case((*UNEVEN, "data.length_grouping=true"), PADDED, text="packed"),
    "batch.dynamic=true": Case(
        (*UNEVEN, "data.length_grouping=true", "batch.dynamic=true"), PADDED, "fuller card, no OOM", text="packed"
    ),
    "all together": Case((
        "compile=true", "precision=mixed-bf16", "attention=auto", "optim.kind=adam8bit", "loss.chunk_tokens=4096",
        "allocator=expandable",
    )),
}  # fmt: skip
"""Each row's name and what it is."""

NOISE = {
    "fp32": (), "fp32, seed 1": ("seed=1",), "fp32, seed 2": ("seed=2",), "amp-fp16": ("precision=amp-fp16",),
    "amp-bf16": ("precision=amp-bf16",), "mixed-bf16": ("precision=mixed-bf16",), "adam8bit": ("optim.kind=adam8bit",),
}  # fmt: skip
"""Trainings of lm-tiny whose last losses are compared."""

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
SWEPT = ("fp32", "amp-bf16", "amp-fp16")
LOSSES, SWEEP = "loss after 500 steps", "best learning rate"


def parts_of(profile: str, model: str, words: list[str], folder: Path) -> tuple[Any, Any]:
    """Return the configuration and the worker's parts for it."""
    from fluxray.config.load import resolve
    from fluxray.runtime.worker import WorkerContext, build_parts

    config = resolve(profile, model, words)
    return config, build_parts(config, WorkerContext(0, 1, 0, folder, folder / "cache", print, lambda _: False, (), print))


def measure(row: str, num_steps: int, more: list[str]) -> dict[str, Any]:
    """Train for WARM_UP + `num_steps` steps of the row's configuration and return the figures of the latter."""
    import torch

    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState

    case = ROWS[row]
    num_steps = case.steps if case.steps is not None and not more else num_steps
    folder = Path(tempfile.gettempdir()) / "fluxray-techniques"
    folder.mkdir(exist_ok=True)
    (folder / "one.txt").write_text("\n".join(topics.values()) * 4)
    source = f"path:{folder / 'one.txt'}" if case.text == "one" else "builtin:topics"
    config, parts = parts_of("fsdp8", "flux2-seed", [
        "resources.num_workers=1", f"data.source={source}", f"data.max_slice={SEQUENCE}", "data.vocab_size=8192",
        "data.packing=false", "optim.warmup_steps=10", "hardware.tflops=1", *case.words, *more,
    ], folder)  # fmt: skip
    on_gpu = torch.cuda.is_available()
    state = RunState(config.seed, build_schedule(config.optim, WARM_UP + num_steps))
    source_of_batches = parts.learned.loader.train_batches(state)
    outputs: list[Any] = []
    tokens = positions = 0
    start = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            _synchronize(on_gpu)
            start, tokens, positions = time.perf_counter(), 0, 0
        batches = next(source_of_batches).batches
        outputs.append(parts.engine.train_step(batches, lr_at(state.schedule, step)).loss)
        tokens += sum(batch.num_valid for batch in batches)
        positions += sum(batch.num_tokens for batch in batches)
    _synchronize(on_gpu)
    seconds = time.perf_counter() - start
    source_of_batches.close()
    found = {
        "note": row, "model": "flux2-seed", "engine": "sharded", "precision": config.precision, "optim": config.optim.kind,
        "num_gpus": 1, "sequence_length": config.data.max_slice, "tokens_per_step": round(positions / num_steps),
        "tokens_per_s": round(tokens / seconds), "step_s": round(seconds / num_steps, 4), "num_steps": num_steps,
        "padding_share": round(1 - tokens / positions, 3), "first_loss": round(outputs[0].item(), 3),
        "last_loss": round(outputs[-1].item(), 3), "claim": case.claim, "baseline": case.baseline,
    }  # fmt: skip
    return found | (_memory() if on_gpu else {})


def _memory() -> dict[str, float]:
    import common
    import torch

    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {
        "device_gb": round(common.device_gb(), 1), "peak_allocated_gb": round(allocated / 1e9, 1),
        "reserved_over_allocated": round(reserved / allocated, 3), "card_matrix_tflops": round(common.card_matrix_tflops(), 1),
    }  # fmt: skip


def _synchronize(on_gpu: bool) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()


def last_loss(words: list[str], num_steps: int) -> float:
    """Train lm-tiny and return the mean loss of its last 50 steps."""
    import torch

    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState

    folder = Path(tempfile.gettempdir()) / "fluxray-techniques"
    folder.mkdir(exist_ok=True)
    profile = ["resources.gpu=1", "hardware.tflops=1"] if torch.cuda.is_available() else []
    config, parts = parts_of("cpu", "lm-tiny", [*profile, f"train.num_steps={num_steps}", *words], folder)
    state = RunState(config.seed, build_schedule(config.optim, num_steps))
    source = parts.learned.loader.train_batches(state)
    losses = [
        parts.engine.train_step(next(source).batches, lr_at(state.schedule, step)).loss.detach() for step in range(num_steps)
    ]
    source.close()
    return torch.stack(losses)[-50:].mean().item()


def measure_losses(num_steps: int) -> list[dict[str, Any]]:
    """Return a row for each training of NOISE: its last loss, its distance from the plain one, and how far seeds are apart."""
    found = {name: last_loss(list(words), num_steps) for name, words in NOISE.items()}
    seeds = [loss for name, loss in found.items() if name.startswith("fp32")]
    spread = max(seeds) - min(seeds)
    return [
        {
            "note": f"{LOSSES}: {name}", "model": "lm-tiny", "num_steps": num_steps, "last_loss": round(loss, 4),
            "off_by_loss": round(loss - found["fp32"], 4), "range_of_seeds": round(spread, 4),
        }
        for name, loss in found.items()
    ]  # fmt: skip


def measure_rates(num_steps: int) -> list[dict[str, Any]]:
    """Return a row for each precision: the learning rate of the lowest last loss, and that over fp32's."""
    rows: list[dict[str, Any]] = []
    for precision in SWEPT:
        losses = {rate: last_loss([f"precision={precision}", f"optim.lr={rate}"], num_steps) for rate in RATES}
        finite = {rate: loss for rate, loss in losses.items() if loss == loss}
        best = min(finite, key=lambda rate: finite[rate])
        rows.append({
            "note": f"{SWEEP}: {precision}", "model": "lm-tiny", "num_steps": num_steps, "best_lr": best,
            "last_loss": round(finite[best], 4), "losses": {f"{rate:g}": round(loss, 4) for rate, loss in losses.items()},
            "claim": "" if precision == "fp32" else "2 to 4 times fp32's",
            "ratio": round(best / rows[0]["best_lr"], 2) if rows else 1.0,
        })  # fmt: skip
    return rows


SETS = {LOSSES: (measure_losses, 500), SWEEP: (measure_rates, 200)}
"""Rows that come together, and the steps of each training in them."""


def run(row: str, steps: int, more: list[str]) -> list[dict[str, Any]]:
    """Measure a row in a process of its own; one that fails says why."""
    command = [sys.executable, __file__, "--row", row, "--steps", str(steps), "--set", *more]
    environment = dict(os.environ)
    for word in (*(ROWS[row].words if row in ROWS else ()), *more):
        if word.startswith("allocator="):
            environment["PYTORCH_CUDA_ALLOC_CONF"] = _allocator_setting(word.removeprefix("allocator="))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    reason = [line for line in done.stderr.strip().splitlines() if line.strip()][-4:] or ["no output"]
    return found or [{"note": f"{row}: failed: {' / '.join(reason)[-400:]}"}]


def _allocator_setting(kind: str) -> str:
    return {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}.get(kind, "")


def compare(rows: list[dict[str, Any]]) -> None:
    """Add each row's rate and memory over its baseline's."""
    by_note = {row["note"]: row for row in rows}
    for row in rows:
        other = by_note.get(row.get("baseline") or "")
        if other is not None and other is not row and "tokens_per_s" in other:
            row["ratio"] = round(row["tokens_per_s"] / other["tokens_per_s"], 3)
            if "device_gb" in row and "device_gb" in other:
                row["saved_gb"] = round(other["device_gb"] - row["device_gb"], 1)


def main() -> None:
    """Run each row in its own process and write benchmarks/results/techniques.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[*ROWS, *SETS])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], help="more words of the configuration, for every row with a rate")
    given = parser.parse_args()
    if given.row:
        if given.row in SETS:
            work, steps = SETS[given.row]
            found = work(min(steps, given.steps) if given.set else steps)
        else:
            found = [measure(given.row, given.steps, given.set)]
        for row in found:
            print("ROW " + json.dumps(row), flush=True)
        return
    import common

    rows: list[dict[str, Any]] = []
    for row in given.only:
        rows.extend(run(row, given.steps, given.set))
        print(rows[-1], flush=True)
        compare(rows)
        common.write("techniques", rows, given.out or common.RESULTS, prints=False)


if __name__ == "__main__":
    main()
