"""The stream engine on a GPU: real streams, real page-locked memory, compiled blocks."""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fluxray.engine.clip import ClipMode
from fluxray.engine.parallelize import Techniques
from fluxray.engine.precision import Precision
from fluxray.engine.stream_store import StreamSettings
from fluxray.engine.stream_transfers import CudaTransfers, Event
from tests.engine.helpers import EIGHT_BIT, OPTIM, EngineCase, cut, expect_close_values, model_config
from tests.engine.stream_helpers import Sections, expect_same, run_steps, state_of, stream_engine

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; deterministic products need it

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.usefixtures("deterministic"),
]

CUDA = torch.device("cuda", 0)
SPLIT24 = EIGHT_BIT.model_copy(update={"master": "split24"})
DEEP = EngineCase(
    model_config("gpt_neox", num_hidden_layers=6, hidden_size=256, intermediate_size=512),
    Techniques("mixed-bf16"),
    clip="previous",
    max_norm=0.1,
    optim=SPLIT24,
    device=CUDA,
)
SLEEP_CYCLES = 20_000_000
"""Some 10 ms."""


class LateCudaTransfers(CudaTransfers):
    """Copies on streams that are late; a slot holds 0xFF bytes from when its fetch begins until it ends."""

    def fetch(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        self._late(self._fetching, after)
        with torch.cuda.stream(self._fetching):
            device.fill_(0xFF)
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().fetch(device, host, after)

    def write(self, host: Tensor, device: Tensor, after: Sequence[Event]) -> Event:
        self._late(self._writing, after)
        with torch.cuda.stream(self._writing):
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().write(host, device, after)

    @staticmethod
    def _late(stream: torch.cuda.Stream, after: Sequence[Event]) -> None:
        for event in after:
            if event is not None:
                stream.wait_event(event)


def outcome(case: EngineCase, settings: StreamSettings, late: bool = False) -> tuple[list[tuple[float, ...]], Sections]:
    """Train a few steps; return what they put out and the last state."""
    engine = stream_engine(case, settings, LateCudaTransfers(CUDA) if late else None)
    return run_steps(engine), {key: tensor.cpu() for key, tensor in state_of(engine).items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("clip", ["exact", "previous"])
def test_streamed_equals_resident_bit_for_bit(clip: ClipMode, compiled: bool) -> None:
    case = replace(DEEP, clip=clip, techniques=Techniques("mixed-bf16", compile=compiled))
    outputs, state = outcome(case, StreamSettings())
    expected_outputs, expected = outcome(case, StreamSettings(resident_blocks=6))
    assert outputs == expected_outputs
    expect_same(state, expected)


@pytest.mark.parametrize("clip", ["exact", "previous"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 2), (3, 3), (3, 2)])
def test_copies_that_come_late_change_no_bit(slots: tuple[int, int], clip: ClipMode) -> None:
    case = replace(DEEP, clip=clip)
    outputs, state = outcome(case, StreamSettings(*slots), late=True)
    expected_outputs, expected = outcome(case, StreamSettings(resident_blocks=6))
    assert outputs == expected_outputs
    expect_same(state, expected)


def test_compiled_blocks_compute_what_eager_ones_do() -> None:
    eager, _ = outcome(DEEP, StreamSettings())
    compiled, _ = outcome(replace(DEEP, techniques=Techniques("mixed-bf16", compile=True)), StreamSettings())
    expect_close_values(torch.tensor([o[0] for o in compiled]), torch.tensor([o[0] for o in eager]), 5e-3, "losses")


def test_dropout_is_drawn_again_bit_for_bit() -> None:
    model = model_config("gpt_neox", num_hidden_layers=6, hidden_size=256, hidden_dropout=0.2, attention_dropout=0.2)
    for compiled in (False, True):
        case = replace(DEEP, model=model, techniques=Techniques("mixed-bf16", compile=compiled))
        kept, again = (stream_engine(case, StreamSettings(), kept_blocks=number) for number in (5, 0))
        assert run_steps(kept) == run_steps(again)


@pytest.mark.parametrize(("clip", "precision"), [("exact", "mixed-bf16"), ("previous", "mixed-bf16"), ("exact", "amp-fp16")])
def test_the_host_never_waits_for_the_device_inside_a_step(clip: ClipMode, precision: Precision) -> None:
    optim = DEEP.optim if precision == "mixed-bf16" else EIGHT_BIT
    engine = stream_engine(replace(DEEP, clip=clip, techniques=Techniques(precision), optim=optim), StreamSettings())
    micro_batches = [batch.to(CUDA) for batch in cut(2, 0)]
    engine.train_step(micro_batches, OPTIM.lr)
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.train_step(micro_batches, OPTIM.lr)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_memory_is_taken_once_a_run_is_warm() -> None:
    engine = stream_engine(DEEP, StreamSettings())
    run_steps(engine, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run_steps(engine, 3, 2)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_waits_that_are_not_over_count_in_the_next_reading() -> None:
    lanes = CudaTransfers(CUDA)
    host, device = torch.zeros(1 << 20).pin_memory(), torch.zeros(1 << 20, device=CUDA)
    torch.cuda._sleep(int(2e8))
    lanes.fetch(device, host, [lanes.mark()])
    assert lanes.read_waits() == (0.0, 0.0)
    lanes.synchronize()
    assert lanes.read_waits()[1] > 0.01
