"""Moving averages of the weights: against a plain computation, in both engines, resumed, and computed with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.config.sampling import EmaConfig
from fluxray.engine.clip import ClipMode
from fluxray.engine.parallelize import Techniques
from fluxray.engine.precision import Precision
from fluxray.engine.stream_store import StreamSettings
from fluxray.optim.average import move, rate_at
from fluxray.optim.formats import join
from fluxray.protocols import Engine, RunState, Schedule
from tests.engine.helpers import EngineCase, EngineFactory, make_batch, sharded_engine
from tests.engine.stream_helpers import (
    CLIP_MODES,
    CLIPPED,
    FORMATS,
    SMALL,
    LateTransfers,
    expect_same,
    masters_of,
    run_steps,
    state_of,
    stream_engine,
)

pytestmark = pytest.mark.usefixtures("process_group", "one_thread")
FP32, BF16 = EmaConfig(decay=0.9), EmaConfig(decay=0.9, dtype="bf16")
ENGINES: dict[str, EngineFactory] = {
    "resident": sharded_engine,
    "fsdp": lambda case: sharded_engine(case, DeviceMesh("cpu", torch.arange(1))),
    "stream": stream_engine,
    "stream, one block resident": lambda case: stream_engine(case, StreamSettings(resident_blocks=1)),
}
PLAIN = EngineCase(SMALL, ema=FP32)
BATCH = make_batch(range(4))


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> EngineFactory:
    return ENGINES[request.param]


def averages_of(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor for (kind, name), tensor in state_of(engine).items() if kind == "ema"}


def test_rates_begin_high_and_reach_the_decay() -> None:
    assert rate_at(0.9, 0) == pytest.approx(0.9) and rate_at(0.9, 8) == pytest.approx(0.5)
    assert rate_at(0.9, 1000) == pytest.approx(0.1)


def test_averages_are_those_of_a_plain_computation(build: EngineFactory) -> None:
    engine = build(PLAIN)
    expected = masters_of(state_of(engine))
    for step in range(3):
        run_steps(engine, 1, step)
        masters = masters_of(state_of(engine))
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {name: decay * average + (1 - decay) * masters[name] for name, average in expected.items()}
    actual = averages_of(engine)
    assert actual.keys() == expected.keys()
    for name, average in expected.items():
        torch.testing.assert_close(actual[name], average, rtol=0, atol=3e-7)
        assert not torch.equal(actual[name], masters[name])


def test_streamed_averages_are_those_of_the_sharded_engine() -> None:
    engines = [build(PLAIN) for build in (sharded_engine, stream_engine)]
    for engine in engines:
        run_steps(engine, 3)
    sharded, streamed = map(averages_of, engines)
    for name, average in sharded.items():
        torch.testing.assert_close(streamed[name], average, rtol=0, atol=2e-6)


@pytest.mark.parametrize("average", [FP32, BF16])
@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("name", ["fp32", "split24", "stochastic"])
def test_streamed_and_resumed_goes_on_bit_for_bit(name: str, mode: ClipMode, average: EmaConfig, tmp_path: Path) -> None:
    case = replace(FORMATS[name], clip=mode, max_norm=CLIPPED, ema=average)
    engine = stream_engine(case, transfers=LateTransfers())
    run_steps(engine, 2)
    resumed = stream_engine(case)
    resumed.load_items(saved(engine, tmp_path))
    run_steps(engine, 2, 2)
    run_steps(resumed, 2, 2)
    expect_same(state_of(resumed), state_of(engine))


@pytest.mark.parametrize("average", [FP32, BF16])
def test_averages_go_from_one_engine_to_the_other(build: EngineFactory, average: EmaConfig, tmp_path: Path) -> None:
    case = replace(PLAIN, ema=average)
    engine = build(case)
    run_steps(engine, 2)
    for other in (sharded_engine(case), stream_engine(case)):
        assert not list(other.load_items(saved(engine, tmp_path)))
        expect_same(state_of(other), state_of(engine))


def test_an_average_that_was_not_kept_begins_with_the_weights(build: EngineFactory, tmp_path: Path) -> None:
    engine, kept = build(EngineCase(SMALL)), build(PLAIN)
    run_steps(engine, 2)
    run_steps(kept, 1)
    kept.load_items(saved(engine, tmp_path))
    masters = masters_of(state_of(kept))
    for name, average in averages_of(kept).items():
        assert torch.equal(average, masters[name])


@pytest.mark.parametrize("average", [FP32, BF16])
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_what_is_computed_with_averages(build: EngineFactory, precision: Precision, average: EmaConfig, tmp_path: Path) -> None:
    case = replace(PLAIN, techniques=Techniques(precision), ema=average)
    engine, undisturbed, other = build(case), build(case), build(EngineCase(SMALL, Techniques(precision)))
    for each in (engine, undisturbed):
        run_steps(each, 2)
    other.load_items(Exchanged(saved(engine, tmp_path)))
    trained = engine.forward(BATCH)
    with engine.averaged():
        assert torch.equal(engine.forwards([BATCH])[0], other.forward(BATCH))
    assert torch.equal(engine.forward(BATCH), trained)
    assert not torch.equal(trained, other.forward(BATCH))
    for each in (engine, undisturbed):
        run_steps(each, 2, 2)
    expect_same(state_of(engine), state_of(undisturbed))


def test_a_forward_that_fails_leaves_no_trace(build: EngineFactory) -> None:
    case = replace(PLAIN, clip="previous")
    engine, undisturbed = build(case), build(case)
    for each in (engine, undisturbed):
        run_steps(each, 2)
    block = engine._stack.blocks[1].module  # type: ignore[attr-defined]
    hook = block.register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(ArithmeticError), engine.averaged():
            engine.forward(BATCH)
    hook.remove()
    for each in (engine, undisturbed):
        run_steps(each, 2, 2)
    expect_same(state_of(engine), state_of(undisturbed))


@pytest.mark.parametrize("average", [FP32, BF16])
def test_an_average_takes_its_bytes_of_the_host(average: EmaConfig) -> None:
    size = 4 if average.dtype == "fp32" else 2
    without, kept = (
        stream_engine(case).held_bytes() for case in (EngineCase(SMALL, clip="block"), replace(PLAIN, clip="block", ema=average))
    )
    assert kept.host_blocks - without.host_blocks == size * (without.host_blocks // 12)  # weights and two moments
    assert kept.outside_states - without.outside_states == size * (without.outside_states // 8)


def test_rounded_movements_do_not_vanish() -> None:
    average = torch.ones(2**16).bfloat16()
    for step in range(100):
        move(average, torch.full((2**16,), 1.01), None, 1e-3, step)
    assert average.float().mean().item() == pytest.approx(1 + 0.01 * (1 - 0.999**100), rel=2e-5)
    cut = torch.ones(2**16).bfloat16()
    for begin, end in ((0, 1000), (1000, 2**16)):
        for step in range(100):
            move(cut[begin:end], torch.full((end - begin,), 1.01), None, 1e-3, step, begin)
    assert torch.equal(cut, average)


class Exchanged:
    """A checkpoint of which the averages are read as weights."""

    def __init__(self, reader: checkpoint.CheckpointReader):
        self._reader = reader
        self.names, self.shape = reader.names, reader.shape

    def sections(self, name: str, /) -> list[str]:
        return ["weights"]

    def read(self, section: str, name: str, offset: int, num_rows: int | None, /) -> Tensor:
        if section != "weights":
            return self._reader.read(section, name, offset, num_rows)
        return join(self._reader.read("ema", name, offset, num_rows), None)


def saved(engine: Engine, folder: Path) -> checkpoint.CheckpointReader:
    engine.flush()
    state = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2)
    return checkpoint.CheckpointReader(checkpoint.save(folder, state, engine.state_items()))


def fail(*_: object) -> None:
    raise ArithmeticError
