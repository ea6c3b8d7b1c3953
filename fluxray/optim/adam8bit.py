"""One Adam step over a flat run of parameters: fp32 arithmetic on masters in two parts and 8-bit moments, rounded once.

Decoupled decay (AdamW, Loshchilov and Hutter, arXiv:1711.05101) comes before the update. With 8-bit moments (Dettmers et al.,
arXiv:2110.02861) the update uses the new moments as they are before they are quantised.

The update is exp_avg times the reciprocal of the denominator, both rounded, which a GPU does in fewer steps than a division.
Everything is written without fused multiply-add, so that the kernel of `adam8bit_kernel` and the plain twin here give the same
bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fluxray.optim.formats import SMALLEST_SQUARE, dequantise, join, quantise, split
from fluxray.optim.states import QUANT_BLOCK, StateFormat

CHUNK = 2**20
"""Elements that the plain step takes at a time; a multiple of QUANT_BLOCK. Bounds its temporaries to some 40 MB."""


class FlatState(NamedTuple):
    """State of a run of n elements, which may be several parameters; all flat, contiguous and on one device, stepped in place.

    weight bf16 or fp32 [n]; correction int8 or int16 [n], None for an fp32 weight and for stochastic rounding; exp_avg and
    exp_avg_sq uint8 [n] with fp32 absmax [n / 256] each, or fp32 [n] with None.
    """

    weight: Tensor
    correction: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_absmax: Tensor | None
    exp_avg_sq_absmax: Tensor | None

    @property
    def format(self) -> StateFormat:
        """How it is kept; `decays` is not known here and is False."""
        correction = None if self.correction is None else self.correction.dtype
        return StateFormat(self.weight.dtype, correction, self.exp_avg_absmax is not None, decays=False)

    def slice(self, start: int, stop: int) -> "FlatState":
        """Return views of elements [start, stop), multiples of 256 where the moments are quantised."""
        fields = (self.weight, self.correction, self.exp_avg, self.exp_avg_sq)
        scales = (self.exp_avg_absmax, self.exp_avg_sq_absmax)
        return FlatState(
            *(None if t is None else t[start:stop] for t in fields),  # type: ignore[arg-type]
            *(None if t is None else t[start // QUANT_BLOCK : stop // QUANT_BLOCK] for t in scales),
        )


@dataclass(frozen=True)
class AdamConfig:
    """Constants of the step. `weight_decay` is 0 for a run of parameters that are not decayed."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def bias_corrections(step: Tensor, config: AdamConfig) -> tuple[Tensor, Tensor]:
    """Return 1 - beta1^t and sqrt(1 - beta2^t), fp32 scalars on the device of `step`, the number t >= 1 of this step."""
    count = step.double()
    bias1 = 1.0 - torch.pow(config.beta1, count)
    bias2 = 1.0 - torch.pow(config.beta2, count)
    return bias1.float(), bias2.sqrt().float()


def adam_step(  # noqa: PLR0913, PLR0917 - state and constants are grouped, the rest are the values of one step
    state: FlatState, gradient: Tensor, config: AdamConfig, lr: float, control: Tensor, noise: int, offset: int = 0
) -> None:
    """Step `state` in place with `gradient` (fp32 or bf16 [n]); nothing waits for a GPU.

    `control` (fp32 [4], on the same device) holds what the gradient is multiplied by, a flag, 1 - beta1^t and sqrt(1 - beta2^t).
    Where the flag is 0 nothing at all changes; where it is 1 the gradient must be finite, which nothing here checks. `noise`
    keys the stochastic rounding (64 bits), which counts elements from `offset`; so stepping slices, each at its offset, equals
    stepping the whole.
    """
    assert gradient.numel() == state.weight.numel() and all(t.is_contiguous() for t in (gradient, *state) if t is not None)
    if state.weight.is_cuda:
        from fluxray.optim.adam8bit_kernel import launch

        launch(state, gradient, config, lr, control, noise, offset)
    else:
        adam_step_plain(state, gradient, config, lr, control, noise, offset)


@torch.no_grad()
def adam_step_plain(  # noqa: PLR0913, PLR0917
    state: FlatState, gradient: Tensor, config: AdamConfig, lr: float, control: Tensor, noise: int, offset: int = 0
) -> None:
    """Define `adam_step` in plain torch, on any device. Waits for a GPU, so there it is only what the kernel is compared with."""
    if not bool(control[1]):
        return
    for start in range(0, gradient.numel(), CHUNK):
        stop = min(start + CHUNK, gradient.numel())
        scaled = gradient[start:stop].float() * control[0]
        _step_chunk(state.slice(start, stop), scaled, config, lr, control, (noise, offset + start))


def _step_chunk(
    state: FlatState, gradient: Tensor, config: AdamConfig, lr: float, control: Tensor, noise: tuple[int, int]
) -> None:
    exp_avg, exp_avg_sq = state.exp_avg, state.exp_avg_sq
    if state.exp_avg_absmax is not None and state.exp_avg_sq_absmax is not None:
        exp_avg = dequantise(exp_avg, state.exp_avg_absmax * config.beta1, signed=True)
        exp_avg_sq = dequantise(exp_avg_sq, state.exp_avg_sq_absmax * config.beta2, signed=False)
    else:
        exp_avg.mul_(config.beta1)
        exp_avg_sq.mul_(config.beta2)
    exp_avg.add_(gradient * (1.0 - config.beta1))
    exp_avg_sq.add_((gradient * (1.0 - config.beta2)).mul_(gradient))

    root = exp_avg_sq.clamp(min=SMALLEST_SQUARE).double().sqrt_().float()  # torch's fp32 root on a CPU is not rounded right
    denominator = root.mul_(control[3].reciprocal()).add_(config.eps)
    update = denominator.reciprocal_().mul_(exp_avg).mul_(control[2].reciprocal() * lr)
    master = join(state.weight, state.correction).mul_(1.0 - lr * config.weight_decay).sub_(update)

    if state.exp_avg_absmax is not None and state.exp_avg_sq_absmax is not None:
        _store(quantise(exp_avg, signed=True), (state.exp_avg, state.exp_avg_absmax))
        _store(quantise(exp_avg_sq, signed=False), (state.exp_avg_sq, state.exp_avg_sq_absmax))
    weight, correction = split(master, state.format, *noise)
    state.weight.copy_(weight)
    if state.correction is not None and correction is not None:
        state.correction.copy_(correction)


def _store(values: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value)
