"""Scaling of whole units against the definition, on gradients that are set by hand."""

import math

import pytest
import torch
from torch import nn

from fluxray.engine.clip import DECAY, EPSILON, Clip, ClipMode
from fluxray.engine.gradients import Gradients
from fluxray.engine.scaler import LossScaler

UNITS = {"blocks.0.weight": "blocks.0", "head": "head", "blocks.0.bias": "blocks.0", "blocks.1.weight": "blocks.1"}
SHAPES = {"blocks.0.weight": (3, 4), "head": (5, 2), "blocks.0.bias": (3,), "blocks.1.weight": (2, 2)}
SIZES = {"blocks.0": 3.0, "head": 0.2, "blocks.1": 1.5}
"""Norm of each unit's gradient."""
TOTAL = math.sqrt(sum(size**2 for size in SIZES.values()))
MAX_NORM = 1.0


def set_gradients(parameters: dict[str, nn.Parameter], factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Give each unit a gradient of its size times `factor`; return copies."""
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(parameter.shape, generator=generator) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        norm = math.sqrt(sum(g.square().sum().item() for other, g in drawn.items() if UNITS[other] == UNITS[name]))
        parameter.grad = drawn[name] * (factor * SIZES[UNITS[name]] / norm)
    return {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}


def make(mode: ClipMode, max_norm: float = MAX_NORM) -> tuple[dict[str, nn.Parameter], Clip, Gradients]:
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    clip = Clip(mode, max_norm, torch.device("cpu"))
    return parameters, clip, Gradients(parameters, UNITS, clip, LossScaler(False, clip.average.device), lambda value: value)


def expect_scaled(parameters: dict[str, nn.Parameter], before: dict[str, torch.Tensor], scales: dict[str, float]) -> None:
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, before[name] * scales[UNITS[name]], rtol=1e-5, atol=0)


def scale(norm: float) -> float:
    return min(1.0, MAX_NORM / (norm + EPSILON))


@pytest.mark.parametrize("mode", ["exact", "previous", "block"])
def test_the_norm_is_the_whole_gradients_before_scaling(mode: ClipMode) -> None:
    parameters, _, gradients = make(mode)
    set_gradients(parameters)
    assert gradients.clip().item() == pytest.approx(TOTAL, rel=1e-6)


def test_exact_scales_every_unit_alike() -> None:
    parameters, _, gradients = make("exact")
    before = set_gradients(parameters)
    gradients.clip()
    expect_scaled(parameters, before, dict.fromkeys(SIZES, scale(TOTAL)))


def test_block_scales_each_unit_by_its_own_norm() -> None:
    parameters, _, gradients = make("block")
    before = set_gradients(parameters)
    gradients.clip()
    expect_scaled(parameters, before, {unit: scale(size) for unit, size in SIZES.items()})


def test_previous_scales_by_the_average_and_no_unit_stays_above_the_limit() -> None:
    parameters, clip, gradients = make("previous")
    average = 0.0
    for factor in (1.0, 2.0, 0.1, 8.0):
        before = set_gradients(parameters, factor)
        clip.finish(gradients.clip())
        by_average = scale(average) if average else 1.0
        expect_scaled(parameters, before, {unit: min(by_average, scale(factor * size)) for unit, size in SIZES.items()})
        average = DECAY * average + (1 - DECAY) * factor * TOTAL if average else factor * TOTAL
        assert clip.average.item() == pytest.approx(average, rel=1e-5)


@pytest.mark.parametrize("mode", ["exact", "previous", "block"])
def test_below_the_limit_nothing_changes(mode: ClipMode) -> None:
    parameters, clip, gradients = make(mode, max_norm=10.0)
    for _ in range(2):
        before = set_gradients(parameters)
        clip.finish(gradients.clip())
        assert all(torch.equal(parameter.grad, before[name]) for name, parameter in parameters.items())


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    parameters, _, gradients = make("block")
    before = set_gradients(parameters)
    parameters["head"].grad = None
    assert gradients.clip().item() == pytest.approx(math.sqrt(3.0**2 + 1.5**2), rel=1e-6)
    del parameters["head"]
    expect_scaled(parameters, before, {unit: scale(size) for unit, size in SIZES.items()})
