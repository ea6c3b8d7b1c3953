"""Exponential moving averages of master weights (EMA): what samples and exports may be made of.

After optimizer step t, counted from 0, an average a moves towards its master w: a += (1 - d) (w - a) with d = min(decay,
(1 + t) / (10 + t)), so that the first values of a run are soon forgotten; diffusers' EMAModel begins in the same way. A bf16
average is rounded stochastically, by random numbers that seed, step, parameter and place name: to the nearest, its small
movements would vanish.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fluxray.optim.formats import join, split
from fluxray.optim.states import StateFormat
from fluxray.seeding import derive_seed

CHUNK = 2**22
"""Elements that are moved at a time where they pass through fp32, which bounds the temporaries."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By `ema.dtype`."""

ROUNDED = StateFormat(torch.bfloat16, None, quantised=False, decays=False)
"""How a bf16 average is rounded."""


def rate_at(decay: float, step: int) -> float:
    """Return the share of the way to its master that an average goes after step number `step`, counted from 0."""
    return 1 - min(decay, (1 + step) / (10 + step))


def noise_of(seed: int, name: str) -> int:
    """Return what names the random numbers of a parameter's rounding in the step that `seed` names."""
    return derive_seed(seed, "average", name)


@torch.no_grad()
def move(average: Tensor, weight: Tensor, correction: Tensor | None, rate: float, noise: int, first: int = 0) -> None:
    """Move an average, flat like the master that `weight` and `correction` are; `first` is the place of its first element."""
    if average.dtype == torch.float32 and correction is None and weight.dtype == torch.float32:
        average.lerp_(weight, rate)
        return
    for part in _chunks(average.numel()):
        master = join(weight[part], None if correction is None else correction[part])
        if average.dtype == torch.float32:
            average[part].lerp_(master, rate)
            continue
        moved = average[part].float().lerp_(master, rate)
        average[part].copy_(split(moved, ROUNDED, noise, first + part.start)[0])


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(begin, min(begin + CHUNK, numel)) for begin in range(0, numel, CHUNK))
