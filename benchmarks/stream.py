"""Models of neox-20b's blocks on one GPU of at most 45 GB, streamed from host memory, and what else could train them.

    python benchmarks/stream.py [--steps 6] [--out DIR] [--only ROW ...] [--cap-gb 45]

Every row is a process of its own, under a cap of device memory as nvidia-smi counts it. Text is real, tokenised to 8,192 words of
a vocabulary of 50,432. Rates are of the median step after the first two. Ratios are of rows of one command. Each row is planned
with the link, the matrix rate and the block measured in its own process, and says what was planned beside what came.
"""

import argparse
import itertools
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

import peers

SEQUENCE, WARM_UP = 2048, 2
EIGHT = ("model.config.num_hidden_layers=8",)
ONE, TWO = ("batch.micro_size=8", "batch.accumulation_steps=1"), ("batch.micro_size=8", "batch.accumulation_steps=2")

MEASURED = tuple(f"hardware.{key}=null" for key in ("host_memory", "link", "memory_bandwidth", "tflops"))
STREAMED = "engine.resident_blocks=0"
SAME = (*EIGHT, *ONE, "engine.kept_blocks=0")

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "neox-20b, 16,384 tokens": ("neox-20b", (*ONE, STREAMED)),
    "neox-20b, 32,768 tokens": ("neox-20b", (*TWO, STREAMED)),
    "8 blocks, streamed": ("neox-20b", (*SAME, STREAMED)),
    "8 blocks, all resident": ("neox-20b", (*SAME, "engine.resident_blocks=8")),
    "8 blocks, streamed, eager": ("neox-20b", (*SAME, STREAMED, "compile=false")),
    "neox-20b, 16,384 tokens, stochastic": ("neox-20b", (*ONE, STREAMED, "optim.master=stochastic")),
    "neox-20b, 16,384 tokens, 4 blocks resident": ("neox-20b", (*ONE, "engine.resident_blocks=4")),
    "qwen3-8b, 32,768 tokens": ("qwen3-8b", ("batch.micro_size=4", "batch.accumulation_steps=4", STREAMED)),
}
"""Each row's name, its model, and its overrides of profile a6000."""

BASELINES = {"8 blocks, streamed": "8 blocks, all resident"}
"""Rows whose ratio is to another one; a peer's is to `8 blocks, streamed`."""


def resolved(row: str, folder: Path, cap_gb: float, extra: list[str]) -> Any:
    """Return the configuration of a row, on a text in `folder`."""
    from fluxray.config.load import resolve

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.txt").write_text("\n".join(topics.values()) * 12)
    model, words = ROWS[row]
    return resolve("a6000", model, [
        f"data.source=path:{folder / 'one.txt'}", f"data.max_slice={SEQUENCE}", "data.vocab_size=8192", "data.packing=false",
        "optim.warmup_steps=20", "optim.lr=2e-5", f"hardware.device_memory={cap_gb:g}GB", *MEASURED, *words, *extra,
    ])  # fmt: skip


def train(config: Any, engine: Any, loader: Any, num_steps: int) -> tuple[list[Any], list[float], float]:
    """Run WARM_UP + `num_steps` steps, one behind the other as the trainer queues them.

    Returns their outputs, the seconds between the ends of what they compute, and when the first one had ended. What the last
    one copies to the host goes on beside the first computing of the next.
    """
    import torch

    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState

    state = RunState(config.seed, build_schedule(config.optim, 1000))
    source = loader.train_batches(state)
    on_gpu = torch.cuda.is_available()
    outputs: list[Any] = []
    ends: list[Any] = []
    first_ended = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            engine.read_waits()
        outputs.append(engine.train_step(next(source).batches, lr_at(state.schedule, step)))
        ends.append(torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter())
        if on_gpu:
            ends[-1].record()
        if step == 0:
            outputs[0].loss.item()
            first_ended = time.perf_counter()
    source.close()
    if on_gpu:
        torch.cuda.synchronize()
    pairs = itertools.pairwise(ends)
    return outputs, [a.elapsed_time(b) / 1000 if on_gpu else b - a for a, b in pairs], first_ended


def cap(cap_gb: float) -> Any:
    """Limit this process's device memory as nvidia-smi counts it; return the device."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((cap_gb * 1e9 - (total - free)) / total)
    return device


def model_flops(config: Any, num_parameters: int) -> float:
    """Return the FLOPs of forward and backward of a token: matrix products, and attention as half of the square."""
    model = config.model.config
    layers, hidden, heads = model["num_hidden_layers"], model["hidden_size"], model["num_attention_heads"]
    width = heads * model.get("head_dim", hidden // heads)
    return 6 * (num_parameters - model["vocab_size"] * hidden) + 3 * 2 * layers * width * SEQUENCE


def measure(row: str, num_steps: int, cap_gb: float, extra: list[str]) -> dict[str, Any]:
    """Train for WARM_UP + `num_steps` steps of the row's configuration and return the figures of the latter."""
    began = time.perf_counter()
    import common
    import psutil
    import torch

    from fluxray.data.loader import Loader
    from fluxray.models.causal_lm import build_causal_lm, library_config
    from fluxray.runtime.attention import choose_kernel
    from fluxray.runtime.engines import build_stream_engine
    from fluxray.runtime.learn_text import load_data
    from fluxray.runtime.planning import model_spec, plan_run, require_fit
    from fluxray.tasks.lm import LmTask

    device = cap(cap_gb)
    folder = Path(tempfile.gettempdir()) / "fluxray-benchmark"
    config = resolved(row, folder, cap_gb, extra)
    data = load_data(config, folder / "cache")
    task = LmTask(data.pad_id, config.compile)
    plan = plan_run(config, model_spec(config, data.num_tokenizer_entries))
    require_fit(config, plan)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kernel = choose_kernel(config, library_config(config.model, data.num_tokenizer_entries), device, None)
    stack = build_causal_lm(config.model, config.seed, data.num_tokenizer_entries, kernel)
    num_parameters = sum(p.numel() for p in stack.model.parameters())
    built = time.perf_counter()
    engine = build_stream_engine(config, stack, task.loss_fn, device, plan.policy)
    build_s = time.perf_counter() - built
    outputs, steps, first_ended = train(config, engine, Loader(data.train, task.prepare, config.batch, 0, 1), num_steps)
    fetch_s, _ = engine.read_waits()
    steps = steps[WARM_UP - 1 :]
    seconds, tokens, layers = statistics.median(steps), config.global_batch_size * SEQUENCE, len(stack.blocks)
    found = {
        "model": ROWS[row][0] if layers != 8 else f"{ROWS[row][0]}, {layers} blocks", "engine": "stream",
        "precision": config.precision, "optim": config.optim.kind, "master": config.optim.master, "clip": config.clip.mode,
        "resident_blocks": plan.policy.resident_blocks, "kept_blocks": plan.policy.kept_blocks, "num_gpus": 1,
        "sequence_length": SEQUENCE, "planned_step_s": round(plan.speed.seconds, 3),
        "planned_device_gb": round(plan.device_bytes / 1e9, 1), "planned_host_gib": round(plan.host_bytes / 2**30, 1),
        "floor_s": round(plan.speed.floor, 3), "hardware": dict(plan.hardware.sources),
        "tokens_per_step": tokens, "tokens_per_s": round(tokens / seconds), "step_s": round(seconds, 3),
        "slowest_step_s": round(max(steps), 3), "wait_fetch_s": round(fetch_s / num_steps, 3),
        "model_tflops": round(model_flops(config, num_parameters) * tokens / seconds / 1e12, 1), "parameters": num_parameters,
        "build_s": round(build_s, 1), "first_step_s": round(first_ended - began, 1),
        "host_gib": round(psutil.Process().memory_info().rss / 2**30, 1),
        "losses": [round(output.loss.item(), 3) for output in outputs], "note": row,
    }  # fmt: skip
    if device.type == "cuda":
        found |= {
            "memory_cap_gb": cap_gb, "device_gb": round(common.device_gb(), 1),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
            "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "card_matrix_tflops": round(common.card_matrix_tflops(), 1),
        }  # fmt: skip
    return found


def run(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a process of its own; a row that fails says why."""
    options = ["--steps", str(arguments.steps), "--cap-gb", str(arguments.cap_gb)]
    if row in peers.PEERS:
        command = [sys.executable, str(Path(__file__).with_name("peers.py")), row, *options]
    else:
        command = [sys.executable, __file__, "--row", row, *options, "--set", *arguments.set]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # as profile a6000 has it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if found:
        return json.loads(found[0])
    reason = [line for line in done.stderr.strip().splitlines() if line.strip()][-8:] or ["no output"]
    return {"note": f"{row}: failed: {' / '.join(reason)[-600:]}"}


def compare(rows: list[dict[str, Any]]) -> None:
    """Add the ratios to rows of the same command."""
    rates = {row["note"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    for row in rows:
        other = BASELINES.get(row["note"], "8 blocks, streamed" if row["note"] in peers.PEERS else "")
        if row["note"] in rates and other in rates:
            row |= {"baseline": other, "ratio": round(rates[row["note"]] / rates[other], 3)}


def main() -> None:
    """Run each row in its own process and write benchmarks/results/stream.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cap-gb", type=float, default=45)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[*ROWS, *peers.PEERS])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], help="more words of the configuration, for every row of ours")
    arguments = parser.parse_args()
    if arguments.row:
        print("ROW " + json.dumps(measure(arguments.row, arguments.steps, arguments.cap_gb, arguments.set)), flush=True)
        return
    import common

    rows: list[dict[str, Any]] = []
    for row in arguments.only:
        rows.append(run(row, arguments))
        print(rows[-1], flush=True)
        compare(rows)
        common.write("stream", rows, arguments.out or common.RESULTS, prints=False)


if __name__ == "__main__":
    main()
