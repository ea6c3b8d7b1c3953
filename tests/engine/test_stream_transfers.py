"""Copies that come late, into slots that are poisoned before: every wait that is missing shows."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from fluxray.engine.clip import ClipMode
from fluxray.engine.stream_store import StreamSettings
from fluxray.engine.stream_transfers import Transfers, take_ended
from tests.engine.helpers import OPTIM, EngineCase, make_batch, model_config
from tests.engine.stream_helpers import (
    CLIPPED,
    FORMATS,
    LateTransfers,
    Sections,
    expect_same,
    run_steps,
    state_of,
    stream_engine,
    stream_of,
)
from tests.engine.two_kinds import TwoKindsStack, square_loss, two_kinds_batches

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = EngineCase(model_config("gpt_neox", num_hidden_layers=6), max_norm=CLIPPED)
LANES = {"both late": (0.002, 0.002), "late writes": (0.0, 0.006), "late fetches": (0.003, 0.0)}
SLOTS = {
    (1, 1, 0): "late writes",
    (2, 2, 1): "both late",
    (3, 3, 0): "late writes",
    (4, 4, 3): "both late",
    (1, 3, 0): "late fetches",
    (3, 1, 2): "late writes",
    (2, 4, 5): "late fetches",
}
"""Weight slots, state slots, blocks that keep their activations -> which copies come late."""


@cache
def _resident(mode: ClipMode) -> tuple[list[float], Sections]:
    return _outcome(replace(DEEP, clip=mode), StreamSettings(resident_blocks=6), None)


def _outcome(
    case: EngineCase, settings: StreamSettings, transfers: Transfers | None, kept_blocks: int = 0
) -> tuple[list[float], Sections]:
    """Train, evaluate between two steps, and return all losses and the last state."""
    engine = stream_engine(case, settings, transfers, kept_blocks)
    losses = [output[0] for output in run_steps(engine, 3)]
    losses.append(engine.eval_steps([make_batch([0, 1])])[0].sum.item())
    losses += [output[0] for output in run_steps(engine, 1, 3)]
    return losses, state_of(engine)


@pytest.mark.parametrize("mode", ["exact", "previous"])
@pytest.mark.parametrize("slots", SLOTS)
def test_copies_that_come_late_change_no_bit(slots: tuple[int, int, int], mode: ClipMode) -> None:
    late = LateTransfers(*LANES[SLOTS[slots]])
    losses, state = _outcome(replace(DEEP, clip=mode), StreamSettings(*slots[:2]), late, slots[2])
    expected_losses, expected = _resident(mode)
    assert losses == expected_losses
    expect_same(state, expected)
    assert min(late.num_copies.values()) > 0


def test_late_copies_of_8_bit_states_change_no_bit() -> None:
    case = replace(FORMATS["split24"], clip="previous", max_norm=CLIPPED)
    losses, state = _outcome(case, StreamSettings(2, 2, resident_blocks=1), LateTransfers())
    expected_losses, expected = _outcome(case, StreamSettings(), None)
    assert losses == expected_losses
    expect_same(state, expected)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_blocks_of_different_sizes_share_late_slots(slots: int) -> None:
    case = EngineCase(model_config("gpt_neox"), clip="previous", max_norm=CLIPPED)
    states = []
    for transfers in (None, LateTransfers(0.001, 0.004)):
        engine = stream_of(TwoKindsStack(), square_loss, case, StreamSettings(slots, slots), transfers)
        for step in range(3):
            output = engine.train_step(two_kinds_batches(step, 2), OPTIM.lr)
            assert torch.isfinite(output.loss)
        states.append(state_of(engine))
    expect_same(states[1], states[0])


@dataclass
class FakeEvent:
    """A timed event of a GPU: when it came, in milliseconds, and whether it has."""

    at: float
    is_over: bool = True

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_a_wait_counts_once_it_is_over_and_only_once() -> None:
    waits: Any = [(FakeEvent(0), FakeEvent(5)), (FakeEvent(5), FakeEvent(15)), (FakeEvent(20), FakeEvent(29, is_over=False))]
    assert take_ended(waits) == 0.015
    waits[0][1].is_over = True
    assert take_ended(waits) == 0.009
    assert take_ended(waits) == 0 and waits == []
