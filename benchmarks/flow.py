"""FLUX transformers on one GPU, streamed: images a second, and their FLOPs against the card's own matrix rate.

    python benchmarks/flow.py [--steps 4] [--out DIR] [--only ROW ...] [--set KEY=VALUE ...]

Every row is a process of its own, held to its share of device memory as nvidia-smi counts it. Weights, latents and texts are
random; a row trains on one and the same global batch, whose losses must fall. FLOPs are three times those that FlopCounterMode
counts of the forward. The rate is of the median step after the first two; the compilers' caches are empty at the start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP = 2
TEXT_TOKENS = 512
REHEARSED = 8
"""By what the sides of pictures are divided where there is no GPU."""

MEASURED = tuple(f"hardware.{key}=null" for key in ("link", "memory_bandwidth", "tflops"))


class Case(NamedTuple):
    """A row: its model, gigabytes of device memory, overrides of profile a6000, and heights and widths of its pictures."""

    model: str
    device_gb: float
    words: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...] = ((512, 512),)


def images(micro_size: int, accumulation_steps: int) -> tuple[str, str]:
    """Return the words of a step of so many micro-batches of so many images."""
    return f"batch.micro_size={micro_size}", f"batch.accumulation_steps={accumulation_steps}"


EIGHTY = "hardware.host_memory=80GiB"
SIXTY_FOUR = "hardware.host_memory=64GiB"
STOCHASTIC = ("optim.master=stochastic", "hardware.host_memory=123GiB", "engine.state_slots=2", "engine.resident_blocks=3")
"""Of 123 GiB of host memory 95% may be taken: 116.8. Three blocks without a host copy leave buffers of 112.4 GiB."""

ROWS: dict[str, Case] = {
    "FLUX.1-dev, 512 px": Case("flux1-dev", 45, (*images(24, 1), EIGHTY)),
    "FLUX.1-dev, 512 px, everything computed again": Case(
        "flux1-dev", 45, (*images(24, 1), EIGHTY, "activation_checkpoint=full", "engine.kept_blocks=0")
    ),
    "FLUX.1-dev, 1024 px": Case("flux1-dev", 45, (*images(8, 1), EIGHTY), ((1024, 1024),)),
    "FLUX.1-dev, 512 px, two buckets in turn": Case("flux1-dev", 45, (*images(8, 2), EIGHTY), ((512, 512), (640, 384))),
    "FLUX.1-dev, 512 px, 24 GB, host of 64 GiB": Case("flux1-dev", 24, (*images(8, 2), SIXTY_FOUR)),
    "FLUX.2-dev, 512 px, stochastic": Case("flux2-dev", 45, (*images(4, 3), *STOCHASTIC)),
    "FLUX.2 klein-4B, 512 px, 16 GB": Case("flux2-klein-4b", 16, (*images(4, 4), SIXTY_FOUR)),
}
"""Each row by what it is."""


def write_random_cache(folder: Path, config: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    """Write a cache with as many random samples of each size as a step takes."""
    import torch

    from fluxray.data.latent_facts import LatentFacts
    from fluxray.data.latent_shards import LatentSample, TextEmbedding, write_cache

    model = config.model.config
    second = model["_class_name"].startswith("Flux2")
    channels, width, pooled_width = model["in_channels"], model["joint_attention_dim"], model.get("pooled_projection_dim")
    facts = LatentFacts(
        family="flux2" if second else "flux1",
        channels=channels,
        text_width=width,
        pooled_width=pooled_width,
        pixels_per_token=16,
        vae="noise",
        text_encoders={},
        latent_statistics={},
    )
    random = torch.Generator().manual_seed(0)

    def text() -> TextEmbedding:
        pooled = None if pooled_width is None else torch.randn(pooled_width, generator=random)
        return TextEmbedding(torch.randn(TEXT_TOKENS, width, generator=random), pooled)

    def samples() -> Iterator[LatentSample]:
        for height, width in sizes:
            for number in range(config.global_batch_size):
                latents = torch.randn(height * width // 256, channels, generator=random)
                yield LatentSample(f"{height}x{width}-{number:03d}", "noise", height, width, latents, *text())

    write_cache(folder, facts, [text()], samples())


def resolved(case: Case, folder: Path, more: list[str]) -> Any:
    """Return a row's configuration; without a GPU, of a tiny model of the family on the CPU: a rehearsal."""
    import torch

    from fluxray.config.load import resolve

    words = (f"data.cache={folder / 'cache'}", "task.first_loss=off", "optim.warmup_steps=0")
    if torch.cuda.is_available():
        memory = (f"hardware.device_memory={case.device_gb:g}GB", *MEASURED)
        return resolve("a6000", case.model, [*words, "optim.lr=1e-4", *memory, *case.words, *more])
    tiny = f"{case.model.partition('-')[0]}-tiny"
    small = ("engine.kind=stream", "hardware.tflops=1", "hardware.link=1GB/s", "hardware.memory_bandwidth=1GB/s")
    return resolve("cpu", tiny, [*words, *small, *images(2, 2), *more])


def measure(row: str, num_steps: int, more: list[str]) -> dict[str, Any]:
    """Train for WARM_UP + `num_steps` steps of the row's configuration and return the figures of the latter."""
    import psutil
    import torch

    from fluxray.memory.checkpointing import again_share
    from fluxray.optim.schedule import build_schedule, lr_at
    from fluxray.protocols import RunState
    from fluxray.runtime.context import WorkerContext
    from fluxray.runtime.worker import build_parts

    case = ROWS[row]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = resolved(case, folder, more)
        side = 1 if torch.cuda.is_available() else REHEARSED
        write_random_cache(folder / "cache", config, tuple((height // side, width // side) for height, width in case.sizes))
        began = time.perf_counter()
        parts = build_parts(config, WorkerContext(0, 1, 0, folder, folder / "other", print, lambda _: False, (), print))
        state = RunState(config.seed, build_schedule(config.optim, WARM_UP + num_steps))
        source = parts.learned.loader.train_batches(state)
        steps = [next(source).batches for _ in case.sizes]
        source.close()
        outputs: list[float] = []
        ends: list[float] = []
        for step in range(WARM_UP + num_steps):
            output = parts.engine.train_step(steps[step % len(steps)], lr_at(state.schedule, step))
            outputs.append(output.loss.item())
            ends.append(time.perf_counter())
    lasted = [later - earlier for earlier, later in pairwise(ends)][WARM_UP - 1 :]
    seconds = statistics.median(lasted)
    tflops = statistics.mean(sum(map(parts.learned.flops_of, batches)) for batches in steps) / seconds / 1e12
    plan = parts.plan
    assert plan is not None
    found = {
        "model": case.model, "note": row, "engine": config.engine.kind, "precision": config.precision,
        "master": config.optim.master, "clip": config.clip.mode, "num_gpus": 1, "optim": config.optim.kind,
        "resident_blocks": plan.policy.resident_blocks, "kept_blocks": plan.policy.kept_blocks,
        "activation_checkpoint": config.activation_checkpoint, "recomputed": round(again_share(plan.demand, plan.policy), 3),
        "images_per_step": config.global_batch_size, "images_per_s": round(config.global_batch_size / seconds, 3),
        "step_s": round(seconds, 3), "slowest_step_s": round(max(lasted), 3), "planned_step_s": round(plan.speed.seconds, 3),
        "planned_device_gb": round(plan.device_bytes / 1e9, 1), "planned_host_gib": round(plan.host_bytes / 2**30, 1),
        "parameters": plan.demand.spec.num_parameters, "hardware": dict(plan.hardware.sources),
        "model_tflops": round(tflops, 3), "first_step_s": round(ends[0] - began, 1), "compile_s": round(_compile_s(), 1),
        "host_gib": round(psutil.Process().memory_info().rss / 2**30, 1), "losses": [round(loss, 4) for loss in outputs],
    }  # fmt: skip
    return found | (_on_the_card(case, tflops) if torch.cuda.is_available() else {})


def _compile_s() -> float:
    """Return how long this process has compiled, forwards and backwards, as torch has timed it."""
    from torch._dynamo.utils import compilation_time_metrics

    named = ("_compile.compile_inner", "backward._backward_impl")
    return sum(sum(compilation_time_metrics.get(name, ())) for name in named)


def _on_the_card(case: Case, tflops: float) -> dict[str, float]:
    """Return what a GPU adds to a row; its matrix rate is measured in a process that trains no more."""
    import common
    import torch

    memory = {
        "memory_cap_gb": case.device_gb, "device_gb": round(common.device_gb(), 1),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }  # fmt: skip
    rate = common.card_matrix_tflops()
    return {**memory, "card_matrix_tflops": round(rate, 1), "share_of_matrix_rate": round(tflops / rate, 3)}


def run(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in a process of its own, whose compilers begin with nothing; a row that fails says why."""
    command = [sys.executable, __file__, "--row", row, "--steps", str(arguments.steps), "--set", *arguments.set]
    with tempfile.TemporaryDirectory() as caches:
        fresh = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        environment = {**os.environ, **fresh, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # as profile a6000 has it
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    reason = [line for line in done.stderr.strip().splitlines() if line.strip()][-4:] or ["no output"]
    return json.loads(found[0]) if found else {"note": f"{row}: failed: {' / '.join(reason)[-600:]}"}


def main() -> None:
    """Run each row and write benchmarks/results/flow.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], help="more words of the configuration, for every row")
    arguments = parser.parse_args()
    if arguments.row:
        print("ROW " + json.dumps(measure(arguments.row, arguments.steps, arguments.set)), flush=True)
        return
    import common

    rows: list[dict[str, Any]] = []
    for row in arguments.only:
        rows.append(run(row, arguments))
        print(rows[-1], flush=True)
        common.write("flow", rows, arguments.out or common.RESULTS, prints=False)


if __name__ == "__main__":
    main()
