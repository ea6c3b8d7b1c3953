import math

import pytest

from fluxray.config.schema import OptimConfig
from fluxray.optim.schedule import build_schedule, lr_at
from fluxray.protocols import Schedule

PEAK = 0.5
KINDS = ["constant", "linear", "cosine"]


def rates(kind: str, warmup: int, total: int, min_ratio: float = 0.0) -> list[float]:
    schedule = Schedule(kind, PEAK, warmup, total, min_ratio)
    return [lr_at(schedule, step) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_linearly_and_ends_at_the_peak(kind: str) -> None:
    assert rates(kind, 4, 10, 0.1)[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates(kind, 1, 10)[0] == PEAK
    assert rates(kind, 0, 10)[0] == PEAK


def test_constant_stays() -> None:
    assert rates("constant", 2, 6, 0.3) == [0.25, *[0.5] * 5]


def test_linear_falls_in_equal_steps_to_the_floor_after_the_last_step() -> None:
    assert rates("linear", 2, 6) == [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]
    assert rates("linear", 0, 4, 0.2) == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert lr_at(Schedule("linear", PEAK, 2, 6, 0.2), 6) == pytest.approx(0.1)


def test_cosine_is_half_way_in_the_middle_and_flat_at_both_ends() -> None:
    values = rates("cosine", 10, 110, 0.1)
    assert values[10] == PEAK
    assert values[60] == pytest.approx(PEAK * 0.55)
    for step, value in enumerate(values[10:]):
        assert value == pytest.approx(PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 100))))
    assert values[10] - values[11] < values[60] - values[61] > values[108] - values[109]
    assert lr_at(Schedule("cosine", PEAK, 10, 110, 0.1), 110) == pytest.approx(0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (5, 5), (5, 4), (10, 3), (0, 2), (3, 4)])
def test_every_step_of_any_run_has_a_rate_above_zero(kind: str, warmup: int, total: int) -> None:
    values = rates(kind, warmup, total)
    assert len(values) == total and all(0 < value <= PEAK for value in values)


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_end_it_stays_at_the_floor(kind: str) -> None:
    floor = PEAK if kind == "constant" else 0.05
    assert [lr_at(Schedule(kind, PEAK, 2, 6, 0.1), step) for step in (6, 7, 1000)] == [pytest.approx(floor)] * 3


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_floor_of_one_is_constant(kind: str) -> None:
    assert rates(kind, 1, 5, 1.0) == pytest.approx([PEAK] * 5)


def test_schedule_is_built_from_the_configuration() -> None:
    config = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=7, min_lr_ratio=0.25)
    assert build_schedule(config, 50) == Schedule("cosine", 1e-3, 7, 50, 0.25)
