"""Models of neox-20b's blocks on one GPU of at most 45 GB, streamed from host memory.

    python benchmarks/stream.py [--steps 6] [--out DIR] [--only ROW ...] [--cap-gb 45]

Every row is a process of its own, under a cap of device memory as nvidia-smi counts it. Text is real, tokenised to 8,192 words of
a vocabulary of 50,432. Rates are of the median step after the first two. Ratios are of rows of one command.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SEQUENCE, WARM_UP = 2048, 2
EIGHT = ("model.config.num_hidden_layers=8",)

ROWS: dict[str, tuple[str, ...]] = {
    "neox-20b, 16,384 tokens": ("batch.micro_size=8", "batch.accumulation_steps=1"),
    "neox-20b, 32,768 tokens": ("batch.micro_size=8", "batch.accumulation_steps=2"),
    "8 blocks, streamed": (*EIGHT, "batch.micro_size=8", "batch.accumulation_steps=1"),
    "8 blocks, all resident": (*EIGHT, "batch.micro_size=8", "batch.accumulation_steps=1", "engine.resident_blocks=8"),
    "8 blocks, streamed, eager": (*EIGHT, "batch.micro_size=8", "batch.accumulation_steps=1", "compile=false"),
    "neox-20b, 16,384 tokens, stochastic": ("batch.micro_size=8", "batch.accumulation_steps=1", "optim.master=stochastic"),
    "neox-20b, 16,384 tokens, 6 blocks resident": (
        "batch.micro_size=8", "batch.accumulation_steps=1", "engine.resident_blocks=6",
    ),
    "tiny": (
        "model.config.num_hidden_layers=4", "model.config.hidden_size=512", "model.config.num_attention_heads=8",
        "model.config.intermediate_size=2048", "batch.micro_size=8", "batch.accumulation_steps=2",
    ),
}  # fmt: skip
"""Each row's name and its overrides of profile a6000 and model neox-20b."""


def measure(row: str, num_steps: int, cap_gb: float, extra: list[str]) -> dict[str, Any]:
    """Train for WARM_UP + `num_steps` steps of the row's configuration and return the figures of the latter."""
    began = time.perf_counter()
    import common
    import psutil
    import torch

    from fluxray.config.load import resolve
    from fluxray.data.loader import Loader
    from fluxray.models.causal_lm import build_causal_lm
    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState
    from fluxray.runtime.engines import build_stream_engine
    from fluxray.runtime.worker import load_data
    from fluxray.tasks.lm import LmTask

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((cap_gb * 1e9 - (total - free)) / total)
        matrix_tflops = common.card_matrix_tflops()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "one.txt").write_text("\n".join(topics.values()) * 12)
        config = resolve("a6000", "neox-20b", [
            f"data.source=path:{folder / 'one.txt'}", f"data.max_slice={SEQUENCE}", "data.vocab_size=8192",
            "optim.warmup_steps=10", "optim.lr=1e-4", *ROWS[row], *extra,
        ])  # fmt: skip
        data = load_data(config, folder / "cache")
        task = LmTask(data.pad_id, config.compile)
        stack = build_causal_lm(config.model, config.seed, data.num_tokenizer_entries)
        num_parameters = sum(p.numel() for p in stack.model.parameters())
        built = time.perf_counter()
        engine = build_stream_engine(config, stack, task.loss_fn, device)
        build_s = time.perf_counter() - built
        loader = Loader(data.train, task.prepare, config.batch, 0, 1)
        state = RunState(config.seed, build_schedule(config.optim, 1000))
        source = loader.train_batches(state)
        outputs, ends = [], []
        for step in range(WARM_UP + num_steps):
            outputs.append(engine.train_step(next(source).batches, lr_at(state.schedule, step)))
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
        source.close()
    steps = [end - begin for begin, end in itertools.pairwise(ends)][WARM_UP - 1 :]
    seconds = statistics.median(steps)
    model = config.model.config
    layers, hidden = model["num_hidden_layers"], model["hidden_size"]
    embedding = model["vocab_size"] * hidden
    per_token = 6 * (num_parameters - embedding) + 3 * 2 * layers * hidden * SEQUENCE  # attention: half of the square
    tokens = config.global_batch_size * SEQUENCE
    found = {
        "model": "neox-20b" if layers == 44 else f"neox-20b, {layers} blocks", "engine": "stream",
        "precision": config.precision, "optim": config.optim.kind, "master": config.optim.master, "clip": config.clip.mode,
        "resident_blocks": getattr(config.engine, "resident_blocks", None) or 0, "num_gpus": 1, "sequence_length": SEQUENCE,
        "tokens_per_step": tokens, "tokens_per_s": round(tokens / seconds), "step_s": round(seconds, 3),
        "slowest_step_s": round(max(steps), 3),
        "model_tflops": round(per_token * tokens / seconds / 1e12, 1),
        "parameters": num_parameters, "build_s": round(build_s, 1), "first_step_s": round(ends[0] - began, 1),
        "wait_s": [round(s, 3) for s in engine.read_waits()],
        "host_gib": round(psutil.Process().memory_info().rss / 2**30, 1),
        "losses": [round(output.loss.item(), 3) for output in outputs], "note": row,
    }  # fmt: skip
    if on_gpu:
        matrix_tflops = max(matrix_tflops, common.card_matrix_tflops())
        found |= {
            "memory_cap_gb": cap_gb, "card_matrix_tflops": round(matrix_tflops, 1), "device_gb": round(common.device_gb(), 1),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
            "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }  # fmt: skip
    return found


def main() -> None:
    """Run each row in its own process and write benchmarks/results/stream.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cap-gb", type=float, default=45)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[row for row in ROWS if row != "tiny"])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], help="more words of the configuration, for every row")
    arguments = parser.parse_args()
    if arguments.row:
        print("ROW " + json.dumps(measure(arguments.row, arguments.steps, arguments.cap_gb, arguments.set)), flush=True)
        return
    import common

    rows: list[dict[str, Any]] = []
    for row in arguments.only:
        command = [sys.executable, __file__, "--row", row, "--steps", str(arguments.steps), "--cap-gb", str(arguments.cap_gb)]
        done = subprocess.run([*command, "--set", *arguments.set], capture_output=True, text=True, check=False)
        found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
        reason = "\n".join(done.stderr.strip().splitlines()[-12:] or ["no output"])
        rows.append(json.loads(found[0]) if found else {"note": f"{row}: failed: {reason}"})
        print(rows[-1], flush=True)
    common.write("stream", rows, arguments.out or common.RESULTS)


if __name__ == "__main__":
    main()
