"""States in every format, for the plain step and its kernel."""

import torch
from torch import Tensor

from fluxray.optim.adam8bit import AdamConfig, FlatState, bias_corrections
from fluxray.optim.formats import quantise, split
from fluxray.optim.states import StateFormat

CONFIG = AdamConfig(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
FORMATS = {
    f"{name} {'8-bit' if quantised else 'fp32'} moments": StateFormat(weight, correction, quantised, decays=True)
    for name, weight, correction in [
        ("fp32 weight", torch.float32, None),
        ("fp32 master", torch.bfloat16, torch.int16),
        ("split24", torch.bfloat16, torch.int8),
        ("stochastic", torch.bfloat16, None),
    ]
    for quantised in (False, True)
}


def state_of(weights: Tensor, fmt: StateFormat, exp_avg: Tensor | None = None, exp_avg_sq: Tensor | None = None) -> FlatState:
    """Return a state that holds copies; moments default to zero."""
    weight, correction = split(weights.clone(), fmt, noise=None)
    m, v = (torch.zeros_like(weights) if moment is None else moment.clone() for moment in (exp_avg, exp_avg_sq))
    if not fmt.quantised:
        return FlatState(weight, correction, m, v, None, None)
    (m, absmax1), (v, absmax2) = quantise(m, signed=True), quantise(v, signed=False)
    return FlatState(weight, correction, m, v, absmax1, absmax2)


def random_state(fmt: StateFormat, numel: int, seed: int = 0) -> tuple[FlatState, Tensor]:
    """Return a state in the middle of a run, whose moments span many decades, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(numel, generator=generator) for _ in range(5)]
    exp_avg = 1e-3 * normal[0] * torch.exp(3 * normal[1])
    exp_avg_sq = exp_avg.square() * torch.exp(normal[2])
    return state_of(0.02 * normal[3], fmt, exp_avg, exp_avg_sq), 1e-3 * normal[4]


def control_of(step: int, scale: float = 1.0, flag: float = 1.0, config: AdamConfig = CONFIG) -> Tensor:
    return torch.stack([torch.tensor(scale), torch.tensor(flag), *bias_corrections(torch.tensor(float(step)), config)])


def copy_of(state: FlatState, device: str = "cpu") -> FlatState:
    return FlatState(*(None if t is None else t.to(device, copy=True) for t in state))  # type: ignore[arg-type]


def num_different(actual: FlatState, expected: FlatState) -> dict[str, int]:
    """Return for each tensor how many elements differ in any bit."""
    found = {}
    for name, a, b in zip(FlatState._fields, actual, expected, strict=True):
        if a is not None and b is not None:
            x, y = (t.cpu().view(torch.uint8).view(t.numel(), t.itemsize) for t in (a, b))
            found[name] = int((x != y).any(-1).sum())
    return found
