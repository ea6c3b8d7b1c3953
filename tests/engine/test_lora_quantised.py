"""Adapters beside a base of 4 bits, on both engines."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxray.engine.parallelize import Techniques
from fluxray.engine.stream_store import StreamSettings
from fluxray.errors import CheckpointError
from fluxray.models import lora
from fluxray.models.quantised import Nf4Linear
from tests.engine.helpers import EIGHT_BIT, expect_close_values, section
from tests.engine.lora_cases import LORA, NF4, WIDE_CASES, Adapted, expect_resumed, frozen_of, materialised
from tests.engine.stream_helpers import LateTransfers, masters_of, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED: dict[str, Any] = {"techniques": Techniques("mixed-bf16"), "optim": EIGHT_BIT, "clip": "previous"}
LLAMA = Adapted("llama wide", NF4)


@pytest.mark.parametrize("family", WIDE_CASES)
def test_both_engines_equal_a_plain_loop_over_the_rounded_base(family: str) -> None:
    adapted = Adapted(family, NF4)
    losses, expected = adapted.plain()
    engines = (adapted.sharded(), adapted.streamed(), adapted.streamed(StreamSettings(2, 1, resident_blocks=1), clip="block"))
    for engine in engines:
        outputs = adapted.train(engine)
        assert [loss for loss, _ in outputs] == pytest.approx(losses, rel=1e-6)
        weights = section(engine, "weights")
        assert weights.keys() == expected.keys() == section(replace(adapted, adapter=LORA).sharded(), "weights").keys()
        for name, value in expected.items():
            expect_close_values(weights[name], value, 1e-4, name)


@pytest.mark.parametrize("family", WIDE_CASES)
def test_every_linear_layer_of_the_blocks_is_quantised_and_no_other(family: str) -> None:
    stack = Adapted(family, NF4).stack()
    inside = tuple(f"{block.name}." for block in stack.blocks)
    for path, module in stack.model.named_modules():
        if isinstance(module, torch.nn.Linear) and lora.layer_of(path) is None:
            assert isinstance(module, Nf4Linear) == (path.startswith(inside) and module.in_features % 64 == 0), path


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
GPU = {**MIXED, "device": torch.device("cuda")}


@pytest.mark.parametrize(
    "differing",
    [MIXED, {"techniques": Techniques("amp-bf16")}, pytest.param(GPU, marks=ON_GPU)],
    ids=["mixed-bf16", "amp-bf16", "on a GPU"],
)
def test_the_base_stays_bit_for_bit_and_engines_agree(differing: dict[str, Any]) -> None:
    adapted = Adapted("flux2 wide", NF4)
    sharded, streamed = adapted.sharded(**differing), adapted.streamed(**differing)
    first = frozen_of(sharded._stack.model)
    on_host = _codes_on_host(streamed)
    losses = [[loss for loss, _ in adapted.train(engine)] for engine in (sharded, streamed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert all(torch.equal(value, first[name]) for name, value in frozen_of(sharded._stack.model).items())
    codes = {name: value.cpu() for name, value in first.items() if value.dtype == torch.uint8}
    assert codes.keys() == on_host.keys() and len(codes) > 20
    assert all(torch.equal(value, codes[name]) for name, value in _codes_on_host(streamed).items())
    masters = [masters_of(state_of(engine)) for engine in (sharded, streamed)]
    for name, value in masters[0].items():  # where a gradient is about 0, its first step may go either way
        assert (masters[1][name] - value).norm() <= 5e-2 * value.norm() + 1e-3, name


def _codes_on_host(engine: Any) -> dict[str, torch.Tensor]:
    engine.flush()
    return {
        (unit.prefix + name).replace(".base_layer.", "."): sections["weights"].clone()
        for unit in engine._units
        for name, fmt, sections in unit.layout.sections(*unit.memory)
        if fmt.weight == torch.uint8
    }


def test_fewer_bytes_are_fetched() -> None:
    fetched: dict[str, list[int]] = {"full": [], "nf4": []}

    class Counting(LateTransfers):
        def fetch(self, device: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
            fetched[kept].append(host.numel())
            return super().fetch(device, host, after)

    for kept in fetched:
        adapted = Adapted("flux2 wide", LORA.model_copy(update={"rank": 1, "base": kept}))
        adapted.train(adapted.streamed(transfers=Counting(0.0, 0.0), clip="block", techniques=Techniques("mixed-bf16")), 1)
    assert len(fetched["full"]) == len(fetched["nf4"])
    assert sum(fetched["nf4"]) < 0.45 * sum(fetched["full"])  # 9/32 of what is no adapter


@pytest.mark.parametrize("streamed", [False, True], ids=["sharded", "streamed"])
def test_checkpoints_resume_to_the_bit_and_name_their_base(streamed: bool, tmp_path: Path) -> None:
    reader = expect_resumed(LLAMA, streamed, tmp_path)
    with pytest.raises(CheckpointError) as refused:
        replace(LLAMA, adapter=LORA).sharded().load_items(reader)
    assert str(refused.value) == (
        "model: the checkpoint's adapters are of random weights of seed 3 in nf4, the model is of random weights of seed 3; set "
        "model.weights, seed and adapter.base as they were"
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["sharded", "streamed"])
def test_compiled_blocks_train_alike(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    build = LLAMA.streamed if streamed else LLAMA.sharded
    plain, compiled = (build(techniques=Techniques("fp32", compile=compiles)) for compiles in (False, True))
    losses = [[loss for loss, _ in LLAMA.train(engine)] for engine in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_first_values_are_those_of_the_full_base_rounded() -> None:
    reference, stack = LLAMA.reference(), materialised(LLAMA.stack())
    batch = LLAMA.batches(1, 0)[0]
    outputs = [made.eval()(batch, lambda output, _: output) for made in (reference, stack)]
    assert torch.equal(*outputs)
    other = materialised(replace(LLAMA, adapter=LORA).stack()).eval()(batch, lambda output, _: output)
    assert not torch.equal(other, outputs[0])
