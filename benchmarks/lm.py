"""flux2-seed (1.41B parameters) on one GPU, through the whole worker: loader, engine, optimizer, metrics.

    python benchmarks/lm.py [--steps 12] [--out DIR] [--only ROW ...]

Every row is a process of its own, so that peaks are its own. Rates leave out three steps of warm-up and compilation.
Model FLOPs are three times the forward's, with causal attention counted as half of the square: less than FlopCounterMode counts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SEQUENCE = 2048
WARM_UP = 3
NO_DROPOUT = ("model.config.attention_probs_dropout_prob=0", "model.config.hidden_dropout_prob=0")
WITHOUT_CHECKPOINT = ("activation_checkpoint=none",)

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compiled, dropout 0.1, one document a row": ("one", WITHOUT_CHECKPOINT),
    "compiled, dropout 0, one document a row": ("one", (*WITHOUT_CHECKPOINT, *NO_DROPOUT)),
    "compiled, dropout 0.1, packed documents": ("packed", WITHOUT_CHECKPOINT),
    "compiled, dropout 0, packed documents": ("packed", (*WITHOUT_CHECKPOINT, *NO_DROPOUT)),
    "compiled, dropout 0.1, one document a row, full checkpointing": ("one", ()),
    "eager, dropout 0.1, one document a row": ("one", (*WITHOUT_CHECKPOINT, "compile=false")),
    "eager, dropout 0.1, packed documents, amp-bf16, full checkpointing": ("packed", ("compile=false", "precision=amp-bf16")),
}
"""Each row's name, whether its text is one long document or many packed ones, and its overrides of the preset."""


def measure(row: str, num_steps: int) -> dict[str, Any]:
    """Train for WARM_UP + `num_steps` steps of the row's configuration and return the figures of the latter."""
    import common
    import torch

    from fluxray.config.load import resolve
    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState
    from fluxray.runtime.context import WorkerContext
    from fluxray.runtime.worker import build_parts

    text, overrides = ROWS[row]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "one.txt").write_text("\n".join(topics.values()))
        source = f"path:{folder / 'one.txt'}" if text == "one" else "builtin:topics"
        config = resolve("fsdp8", "flux2-seed", [
            "resources.num_workers=1", f"data.source={source}", f"data.max_slice={SEQUENCE}", "data.vocab_size=8192",
            "optim.warmup_steps=10", "hardware.tflops=1", *overrides,
        ])  # fmt: skip
        matrix_tflops = common.card_matrix_tflops()
        context = WorkerContext(0, 1, 0, folder, folder / "cache", print, lambda _: False, (), print)
        parts = build_parts(config, context)
        state = RunState(config.seed, build_schedule(config.optim, WARM_UP + num_steps))
        losses: list[torch.Tensor] = []
        source_of_batches = parts.learned.loader.train_batches(state)
        marks: list[float] = []
        for step in range(WARM_UP + num_steps):
            if step in (0, 1, WARM_UP):
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
            batches = next(source_of_batches).batches
            losses.append(parts.engine.train_step(batches, lr_at(state.schedule, step)).loss)
        torch.cuda.synchronize()
        first_step_s, seconds = marks[1] - marks[0], (time.perf_counter() - marks[2]) / num_steps
        source_of_batches.close()
    model = config.model.config
    attention = 3 * 4 * model["num_hidden_layers"] * model["hidden_size"] * SEQUENCE
    tokens = config.global_batch_size * SEQUENCE
    flops_per_token = parts.learned.flops_of(batches[0]) / batches[0].num_tokens
    model_tflops = (flops_per_token - attention / 2) * tokens / seconds / 1e12
    matrix_tflops = max(matrix_tflops, common.card_matrix_tflops())
    return {
        "model": "flux2-seed", "engine": "sharded", "precision": config.precision, "optim": "adamw", "master": "fp32",
        "clip": "exact", "num_gpus": 1, "sequence_length": SEQUENCE, "tokens_per_step": tokens,
        "tokens_per_s": round(tokens / seconds), "model_tflops": round(model_tflops, 1),
        "card_matrix_tflops": round(matrix_tflops, 1), "share_of_matrix_rate": round(model_tflops / matrix_tflops, 3),
        "device_gb": round(common.device_gb(), 1), "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "first_step_s": round(first_step_s, 1), "first_loss": round(losses[0].item(), 3),
        "last_loss": round(losses[-1].item(), 3), "note": row,
    }  # fmt: skip


def main() -> None:
    """Run each row in its own process and write benchmarks/results/lm.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print("ROW " + json.dumps(measure(arguments.row, arguments.steps)), flush=True)
        return
    import common

    rows: list[dict[str, Any]] = []
    for row in arguments.only:
        command = [sys.executable, __file__, "--row", row, "--steps", str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        rows.append(json.loads(found[0]) if found else {"note": f"{row}: failed: {reason}"})
        print(rows[-1], flush=True)
    common.write("lm", rows, arguments.out or common.RESULTS)


if __name__ == "__main__":
    main()
