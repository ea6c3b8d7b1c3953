"""Micro-batches of many sizes must not be compiled one by one: torch makes a size that has changed once a variable."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fluxray.engine.parallelize import Techniques
from fluxray.protocols import BatchKey, TextBatch
from tests.engine.helpers import OPTIM, SEED, VOCABULARY, EngineCase, model_config, sharded_engine


def batch(num_rows: int, length: int) -> TextBatch:
    ids = torch.randint(0, VOCABULARY, (num_rows, length))
    documents = (torch.arange(length) >= length // 2).long().expand(num_rows, -1).clone()
    positions = torch.arange(length).expand(num_rows, -1).clone()
    return TextBatch(ids, positions, documents, ids, False, ids.numel(), BatchKey(SEED, 0, ()))


def test_any_number_of_rows_takes_two_compilations_and_any_length_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    engine = sharded_engine(EngineCase(model_config("gpt_neox"), Techniques("fp32", compile=True)))

    def frames(*shapes: tuple[int, int]) -> int:
        for shape in shapes:
            engine.train_step([batch(*shape)], OPTIM.lr)
        return counter.frame_count

    first = frames((8, 16))  # block and loss
    assert frames((16, 16), (4, 16), (12, 16), (6, 16), (2, 16)) == 2 * first
    assert frames((8, 24), (4, 17), (16, 33), (3, 48)) == 3 * first
    torch._dynamo.reset()
