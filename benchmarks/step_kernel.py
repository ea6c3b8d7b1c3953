"""The fused optimizer step on one GPU, against the card's own device-to-device copy.

    python benchmarks/step_kernel.py [--quick] [--tiles] [--out DIR]

One block of neox-20b (453M elements) with 8-bit moments and an fp32 gradient, for each way to keep the master weights. Every
byte of the state is counted once read and once written, that of the gradient once. Before a row is timed, its kernel must give
the bits of the plain step on the same values. `--tiles` also measures other sizes of a program than the fixed one.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import torch

from fluxray.optim import adam8bit_kernel
from fluxray.optim.adam8bit import AdamConfig, FlatState, adam_step, adam_step_plain, bias_corrections
from fluxray.optim.formats import quantise, split
from fluxray.optim.states import Master, state_format

NUMEL = 453_064_704
CHECKED = 2**20
CONFIG = AdamConfig(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
LR = 1e-5
MASTERS: tuple[Master, ...] = ("split24", "stochastic", "fp32")
TILES = ((4, 4), (8, 8), (16, 16), (16, 8), (8, 4), (2, 2))
"""Quantisation blocks and warps of a program."""


def milliseconds(work: Callable[[int], object], repeats: int) -> float:
    """Return the median time of `work`, which gets the number of its run, over `repeats` runs after three more."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for run in range(3):
        work(run)
    for run, mark in enumerate(marks):
        mark.record()
        if run < repeats:
            work(3 + run)
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in pairwise(marks))
    return times[len(times) // 2]


def copy_gb_per_s(repeats: int) -> float:
    """Return what a copy of 2 GiB moves, read and written bytes together."""
    source, target = (torch.empty(2**31, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.numel() / milliseconds(lambda _: target.copy_(source), repeats) / 1e6


def make_state(master: Master, numel: int) -> tuple[FlatState, torch.Tensor]:
    """Return a state in the middle of a run and a gradient; the values repeat after CHECKED elements."""
    torch.manual_seed(0)
    weights, gradient = (torch.randn(CHECKED, device="cuda") for _ in range(2))
    moments = quantise(0.1 * gradient, signed=True), quantise(0.01 * gradient.square(), signed=False)
    weight, correction = split(0.02 * weights, state_format((NUMEL // 256, 256), True, master, torch.bfloat16), noise=None)
    parts = (weight, correction, moments[0][0], moments[1][0], moments[0][1], moments[1][1])
    repeated = (None if part is None else _repeat(part, part.numel() * numel // CHECKED) for part in parts)
    return FlatState(*repeated), _repeat(gradient, numel)  # type: ignore[arg-type]


def _repeat(part: torch.Tensor, numel: int) -> torch.Tensor:
    return part.repeat(-(-numel // part.numel()))[:numel]


def check(state: FlatState, gradient: torch.Tensor, control: torch.Tensor) -> None:
    """Raise RuntimeError unless kernel and plain step give the same bits."""
    fused, plain = (FlatState(*(None if t is None else t.clone() for t in state.slice(0, CHECKED))) for _ in range(2))  # type: ignore[arg-type]
    adam_step(fused, gradient[:CHECKED], CONFIG, LR, control, noise=1)
    adam_step_plain(plain, gradient[:CHECKED], CONFIG, LR, control, noise=1)
    for name, a, b in zip(FlatState._fields, fused, plain, strict=True):
        if a is not None and b is not None and not torch.equal(a, b):
            raise RuntimeError(f"{name}: {int((a != b).sum())} of {a.numel()} elements differ from the plain step's")


def measure(master: Master, numel: int, repeats: int, copy_rate: float) -> dict[str, Any]:
    """Return the row of one way to keep the master weights."""
    state, gradient = make_state(master, numel)
    control = torch.stack(
        [torch.ones(2, device="cuda"), torch.stack(bias_corrections(torch.tensor(100.0, device="cuda"), CONFIG))]
    )
    control = control.flatten()
    check(state, gradient, control)
    state_bytes = sum(part.numel() * part.itemsize for part in state if part is not None)
    num_bytes = 2 * state_bytes + gradient.numel() * gradient.itemsize
    ms = milliseconds(lambda run: adam_step(state, gradient, CONFIG, LR, control, noise=run), repeats)
    return {
        "optim": "adam8bit", "master": master, "num_gpus": 1, "elements": numel, "ms": round(ms, 3),
        "bytes_per_element": round(num_bytes / numel, 2), "gb_per_s": round(num_bytes / ms / 1e6),
        "copy_gb_per_s": round(copy_rate), "ratio": round(num_bytes / ms / 1e6 / copy_rate, 3),
        "program_blocks": adam8bit_kernel.NUM_ROWS, "num_warps": adam8bit_kernel.OPTIONS["num_warps"],
        "note": "ratio: share of the rate of a device-to-device copy",
    }  # fmt: skip


def main() -> None:
    """Measure every row and write benchmarks/results/step_kernel.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64M elements, few repeats")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    given = parser.parse_args()
    numel, repeats = (2**26, 5) if given.quick else (NUMEL, 30)
    copy_rate = copy_gb_per_s(repeats)
    rows: list[dict[str, Any]] = []
    for num_rows, num_warps in TILES if given.tiles else TILES[:1]:
        adam8bit_kernel.NUM_ROWS, adam8bit_kernel.OPTIONS["num_warps"] = num_rows, num_warps
        for master in MASTERS:
            try:
                rows.append(measure(master, numel, repeats, copy_rate))
            except RuntimeError as error:  # a row that failed is a row too
                reason = str(error).splitlines()[0]
                rows.append({"master": master, "program_blocks": num_rows, "num_warps": num_warps, "note": f"failed: {reason}"})
            torch.cuda.empty_cache()
    common.write("step_kernel", rows, given.out)


if __name__ == "__main__":
    main()
