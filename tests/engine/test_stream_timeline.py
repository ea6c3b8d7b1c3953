"""What is said of the device's memory during a step of the stream engine is what tensors take."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fluxray.engine.stream_store import StreamSettings
from fluxray.engine.stream_timeline import Timeline
from tests.engine.helpers import OPTIM, cut
from tests.engine.stream_helpers import CLIP_MODES, CLIPPED, CPU, FORMATS, expect_same, run_steps, state_of, stream_engine

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = FORMATS["fp32"]
NUM_BLOCKS = 4


def watched_step(engine, step: int, num_micro_batches: int = 2) -> Timeline:
    timeline = Timeline(engine.held_bytes(), engine.held_tensors(), CPU)
    engine.watch(timeline)
    engine.train_step(cut(num_micro_batches, step), OPTIM.lr)
    return timeline


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_watching_a_step_changes_no_bit(name, mode):
    case = replace(FORMATS[name], clip=mode, max_norm=CLIPPED)
    engine, other = stream_engine(case), stream_engine(case)
    run_steps(engine, 1)
    watched_step(engine, 1)
    run_steps(engine, 1, start=2)
    run_steps(other, 3)
    expect_same(state_of(engine), state_of(other))


def test_the_phases_come_in_order_and_of_one_step():
    engine = stream_engine(CASE)
    timeline = watched_step(engine, 0)
    run_steps(engine, 1, start=1)
    last = NUM_BLOCKS - 1
    forward = [("forward", i, k) for i in range(last) for k in range(2)]
    turn = [(phase, last, k) for k in range(2) for phase in ("forward", "backward")]
    backward = [("backward", i, k) for i in range(last - 1, -1, -1) for k in (0, 1, -1)]
    expected = [("begin", -1, -1), ("prologue", -1, -1), *forward, *turn, ("step", last, -1)]
    expected += [(phase if k >= 0 else "step", i, k) for phase, i, k in backward]
    expected += [("prologue again", -1, 0), ("prologue again", -1, 1), ("end", -1, -1)]
    assert [point[:3] for point in timeline.points] == expected
    assert timeline.is_complete


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_each_forward_keeps_its_input_and_each_backward_frees_it(num_micro_batches):
    engine = stream_engine(CASE)
    run_steps(engine, 1)
    timeline = watched_step(engine, 1, num_micro_batches)
    config = engine._stack.model.config
    rows, length = cut(num_micro_batches, 1)[0].input_ids.shape
    carry = rows * length * config.hidden_size * 4
    held = {point[:3]: point.held for point in timeline.points}
    order = [(i, k) for i in range(NUM_BLOCKS - 1) for k in range(num_micro_batches)]
    for before, after in pairwise(order):
        assert held["forward", *after] - held["forward", *before] == carry
    kept = [held["step", i, -1] for i in range(NUM_BLOCKS - 2, -1, -1)]
    for before, after in pairwise(kept):
        assert 0 <= num_micro_batches * carry - (before - after) < 64  # a norm, and whether it was finite
    assert all(point.peak >= point.held >= 0 for point in timeline.points)
    assert max(point.peak - point.held for point in timeline.points) > 4 * carry  # activations of a block


@pytest.mark.parametrize("mode", ["exact", "previous"])
def test_what_is_held_for_good_is_what_the_layouts_say(mode):
    engine = stream_engine(replace(CASE, clip=mode), StreamSettings(weight_slots=2, state_slots=3, resident_blocks=1))
    unit, outside = engine._units[0].layout, engine._outside.layout
    back = 4 * unit.num_gradients if mode == "exact" else 0
    held = engine.held_bytes()
    assert held.host_blocks == (NUM_BLOCKS - 1) * (unit.weight_bytes + unit.state_bytes + back)
    assert (held.outside_weights, held.outside_states) == (outside.weight_bytes, outside.state_bytes)
    assert (held.resident_weights, held.resident_states) == (unit.weight_bytes, unit.state_bytes)
    assert held.slots == 2 * unit.weight_bytes + 3 * unit.state_bytes + 2 * back
    assert held.gradients == 4 * (unit.num_gradients + outside.num_gradients) + back
    assert held.device == sum(held[1:])
