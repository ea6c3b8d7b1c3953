"""Texts of many lengths must not be compiled one by one: torch makes a length that has changed once a variable. Images are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fluxray.engine.parallelize import Techniques, prepare_stream
from fluxray.protocols import BatchKey, TextBatch
from tests.engine.helpers import OPTIM, SEED, VOCABULARY, EngineCase, model_config, sharded_engine
from tests.models.flux_helpers import FAMILIES, built, draw_for, flux_config, output_of


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


@pytest.mark.parametrize("case", FAMILIES[:1])
def test_images_of_each_size_have_compiled_code_of_their_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    symbolic: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        symbolic.append(any(isinstance(size, torch.SymInt) for item in inputs for size in getattr(item, "shape", [item])))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch._dynamo.config, limit, 2)  # in place of torch's 8 and 256
    model = flux_config(case)
    stack, plain = built(model), built(model)
    prepare_stream(stack, compiles=True, kept_blocks=1)
    sizes = [(2, 2), (2, 3), (3, 2), (3, 3)]
    for height, width in sizes:
        batch = draw_for(model, height=height, width=width)
        assert torch.equal(output_of(stack, batch), output_of(plain, batch))
    shapes = {height * width for height, width in sizes}
    assert len(symbolic) == 3 * len(shapes) and not any(symbolic)  # of two kinds computed again, and of a block that keeps all
    torch._dynamo.reset()
