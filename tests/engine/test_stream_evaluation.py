"""Evaluation of the stream engine: a group of batches goes through a block while that is on the device."""

from dataclasses import replace

import pytest
import torch

from fluxray.engine.stream_store import StreamSettings
from fluxray.engine.stream_transfers import SynchronousTransfers
from tests.engine.helpers import OPTIM, cut
from tests.engine.stream_helpers import CLIP_MODES, CLIPPED, FORMATS, stream_engine

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(SynchronousTransfers):
    """Counts the copies to the device."""

    def __init__(self):
        super().__init__()
        self.num_fetches = 0

    def fetch(self, device, host, after):
        self.num_fetches += 1
        super().fetch(device, host, after)


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_group_equals_its_batches_one_by_one_bit_for_bit(name, mode):
    engine = stream_engine(replace(FORMATS[name], clip=mode, max_norm=CLIPPED))
    engine.train_step(cut(2, 0), OPTIM.lr)
    together = engine.eval_steps(cut(4, 1))
    for output, batch in zip(together, cut(4, 1), strict=True):
        (alone,) = engine.eval_steps([batch])
        assert torch.equal(output.sum, alone.sum) and torch.equal(output.num_valid, alone.num_valid)


def test_a_block_is_fetched_once_for_a_group():
    transfers = Counting()
    engine = stream_engine(FORMATS["fp32"], StreamSettings(weight_slots=2), transfers)
    engine.eval_steps(cut(4, 0))
    transfers.num_fetches = 0
    engine.eval_steps(cut(4, 0))
    assert transfers.num_fetches == len(engine._stack.blocks)
