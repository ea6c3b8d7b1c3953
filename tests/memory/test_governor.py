from dataclasses import replace
from itertools import pairwise

import pytest

from fluxray.memory.governor import GROW_BELOW, PATIENCE, SHRINK_ABOVE, Governor
from fluxray.memory.plan import fitting_sizes
from fluxray.protocols import MicroSize
from tests.memory.helpers import GIB, planned

DELAY = 2
PLANNED = {4: 40, 8: 60, 16: 100}


def governor(budget: int = 200, sizes: tuple[int, ...] = (4, 8, 16)) -> Governor:
    return Governor({size: PLANNED[size] for size in sizes}, budget, DELAY)


def ran(one: Governor, used, num_steps: int, state: MicroSize | None = None, start: int = 0) -> list[MicroSize]:
    """Return the states after each step; `used(size, step)` is what a step of that size takes."""
    state = state or one.begin(8)
    states = []
    for step in range(start, start + num_steps):
        state = one.after_step(state, step + 1, used(state.at(step), step))
        states.append(state)
    return states


def sizes_of(states: list[MicroSize]) -> list[int]:
    """Return by what size each step was cut, as a loader that asks as early as it may would learn it."""
    first = states[0]
    seen = [first.rows] * (DELAY + 1)
    return (seen + [state.at(step) for step, state in enumerate(states, start=DELAY + 1)])[: len(states)]


def as_planned(size: int, step: int) -> int:
    return PLANNED[size]


def test_it_grows_one_size_at_a_time_while_there_is_room_and_no_further():
    states = ran(governor(), as_planned, 40, governor().begin(4))
    sizes = sizes_of(states)
    first = PATIENCE + DELAY
    assert sizes == [4] * first + [8] * first + [16] * (40 - 2 * first)
    assert {state.next_rows for state in states[2 * first :]} == {16}


def test_it_stays_where_the_next_size_is_foreseen_above_the_mark():
    limit = PLANNED[16] / GROW_BELOW
    assert set(sizes_of(ran(governor(int(limit) - 1), as_planned, 60))) == {8}
    assert sizes_of(ran(governor(int(limit) + 1), as_planned, 60))[-1] == 16
    larger = lambda size, step: PLANNED[size] + 20  # noqa: E731 - measured above the plan, so is the next size
    assert set(sizes_of(ran(governor(int(limit) + 1), larger, 60))) == {8}


def test_one_step_with_too_little_room_is_remembered_at_that_size():
    budget = int(PLANNED[16] / GROW_BELOW) + 1
    spike = lambda size, step: PLANNED[size] + (10 if step == 3 else 0)  # noqa: E731
    assert set(sizes_of(ran(governor(budget), spike, 60))) == {8}


def test_it_shrinks_at_the_high_water_mark_down_to_the_smallest():
    full = lambda size, step: 200  # noqa: E731
    states = ran(governor(), full, 30, MicroSize(16, 16, 0, 0, PATIENCE))
    assert sizes_of(states) == [16] * (1 + DELAY) + [8] * (1 + DELAY) + [4] * (30 - 2 * (1 + DELAY))
    just_below = lambda size, step: int(SHRINK_ABOVE * 200)  # noqa: E731
    assert set(sizes_of(ran(governor(), just_below, 30))) == {8}


def test_between_the_marks_nothing_changes_and_each_shrinking_doubles_the_wait():
    """The plan foresees less than 16 rows take: it would swing for ever."""
    wrong = lambda size, step: 100 if size < 16 else 199  # noqa: E731
    states = ran(governor(), wrong, 1000)
    grown = [step for step, (a, b) in enumerate(pairwise(states)) if b.next_rows == 16 != a.next_rows]
    waits = [b - a for a, b in pairwise(grown)]
    assert len(grown) == 6 and waits[0] > 2 * PATIENCE
    assert all(later > 1.6 * earlier for earlier, later in pairwise(waits))


def test_steps_that_were_cut_before_a_decision_decide_nothing():
    one = governor()
    state = one.after_step(MicroSize(16, 16, 0, 0, PATIENCE), 1, 200)
    assert (state.rows, state.next_rows, state.since, state.peak) == (16, 8, 1 + DELAY, 0)
    for num_steps in (2, 1 + DELAY):
        assert one.after_step(state, num_steps, 200) == state
    assert one.after_step(state, 2 + DELAY, 100) == replace(state, peak=100)


@pytest.mark.parametrize("resumed_at", range(1, 40, 3))
def test_a_saved_state_goes_on_as_it_would_have(resumed_at):
    used = lambda size, step: PLANNED[size] + (90 if step in (17, 30) else 0)  # noqa: E731
    whole = ran(governor(), used, 45)
    assert len(set(sizes_of(whole))) > 1
    saved = MicroSize(**vars(whole[resumed_at - 1]))
    one = governor()
    assert ran(one, used, 45 - resumed_at, one.begin(8, saved), resumed_at) == whole[resumed_at:]


def test_what_was_saved_is_brought_within_what_fits_now():
    small = governor(sizes=(4, 8))
    assert small.begin(8, MicroSize(16, 16, 5, 7, 32)) == MicroSize(8, 8, 5, 7, 32)
    assert governor(sizes=(8, 16)).begin(4).at(0) == 8


def test_the_sizes_are_those_that_the_plan_has_room_for():
    found = planned("neox-20b", "batch.dynamic=true")
    sizes = (4, 8, 16)
    fitting = fitting_sizes(found, sizes)
    assert tuple(fitting) == sizes and fitting[4] == found.device_bytes  # the preset's own size
    kind = next(iter(found.demand.spec.kinds.values()))
    one_carry = found.demand.spec.blocks[-1].carry_bytes  # of a row: a gradient beside the one that it is made from
    assert fitting[16] - fitting[8] == kind.peak(16) - kind.peak(8) + 8 * one_carry
    less = replace(found, hardware=replace(found.hardware, device_bytes=39 * GIB))
    assert tuple(fitting_sizes(less, sizes)) == (4, 8)
    none = replace(found, hardware=replace(found.hardware, device_bytes=20 * GIB))
    assert fitting_sizes(none, sizes) == {} and tuple(fitting_sizes(none, sizes[:1], misfits=True)) == (4,)
