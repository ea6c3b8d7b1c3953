"""How a parameter's master weight and its Adam moments are kept between steps, in either engine and in a checkpoint.

A master weight is what the model computes with plus a correction: the fp32 value, read as an integer, is `weight << 16` plus the
signed correction, so that the bf16 part is the nearest one. 16 bits of correction make a whole fp32 value, 8 bits a 24-bit one.

Beside them a moving average of the master weights may be kept, in fp32 or in bf16 (`fluxray/optim/average.py`).

Moments are fp32, or 8-bit codes with one fp32 absmax per block of 256 elements (Dettmers et al., arXiv:2110.02861). A block holds
consecutive elements of one row of one parameter, so that states cross shapes exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

QUANT_BLOCK = 256
"""Elements that share one absmax."""

SMALLEST_QUANTISED = 4096
"""Elements; a smaller parameter keeps fp32 moments."""

AVERAGE = "ema"
"""Section of the moving average."""

Master = Literal["fp32", "split24", "stochastic"]


class Section(NamedTuple):
    """One array of a parameter's (or several parameters') state: its name in a checkpoint, its dtype and number of elements."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StateFormat:
    """How one parameter is kept.

    `weight` is the dtype that the model computes with (of frozen codes: their own), `correction` that of the rest of the master
    weight (None: nothing is kept, and the weight is rounded stochastically), `quantised` tells 8-bit moments from fp32 ones,
    `decays` whether weight decay applies, `trained` is False for a frozen parameter, which has its weight alone. `average` is the
    dtype of the moving average of the master weight, None where none is kept.
    """

    weight: torch.dtype
    correction: torch.dtype | None
    quantised: bool
    decays: bool
    trained: bool = True
    average: torch.dtype | None = None

    def weight_section(self, numel: int) -> Section:
        """Return what the forward pass needs of `numel` elements."""
        return Section("weights", self.weight, numel)

    def state_sections(self, numel: int) -> list[Section]:
        """Return what only the step needs of `numel` elements, a multiple of QUANT_BLOCK where the moments are quantised."""
        if not self.trained:
            return []
        found = [] if self.correction is None else [Section("correction", self.correction, numel)]
        average = [] if self.average is None else [Section(AVERAGE, self.average, numel)]
        if not self.quantised:
            return [*found, Section("exp_avg", torch.float32, numel), Section("exp_avg_sq", torch.float32, numel), *average]
        assert numel % QUANT_BLOCK == 0
        moments = [Section(name, torch.uint8, numel) for name in ("exp_avg", "exp_avg_sq")]
        scales = [Section(f"{name}_absmax", torch.float32, numel // QUANT_BLOCK) for name in ("exp_avg", "exp_avg_sq")]
        return [*found, *moments, *scales, *average]


def state_format(
    shape: Sequence[int],
    eight_bit: bool,
    master: Master,
    weight: torch.dtype,
    trained: bool = True,
    average: torch.dtype | None = None,
) -> StateFormat:
    """Return how a parameter of `shape` is kept. `weight` is bf16, or fp32, which is a master weight by itself.

    A parameter of one dimension (gain, bias) is not decayed and always has an fp32 master.
    """
    if not trained:
        return StateFormat(weight, None, False, False, False)
    row = prod(shape[1:])
    quantised = eight_bit and len(shape) > 1 and prod(shape) >= SMALLEST_QUANTISED and row % QUANT_BLOCK == 0
    if weight == torch.float32:
        assert master == "fp32"
        correction = None
    elif master == "fp32" or len(shape) <= 1:
        correction = torch.int16
    else:
        correction = torch.int8 if master == "split24" else None
    return StateFormat(weight, correction, quantised, decays=len(shape) > 1, average=average)
