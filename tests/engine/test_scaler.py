"""fp16 with a scaled loss: small gradients survive, a step that overflows changes nothing, and the scale finds its place."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.config.schema import OptimConfig
from fluxray.engine.clip import ClipMode
from fluxray.engine.parallelize import Techniques
from fluxray.engine.scaler import INITIAL_SCALE, SMALLEST_SCALE, LossScaler
from fluxray.protocols import Engine, RunState, Schedule
from tests.engine.helpers import (
    EIGHT_BIT,
    OPTIM,
    EngineCase,
    EngineFactory,
    broken,
    cut,
    expect_equal,
    model_config,
    section,
    sharded_engine,
    train,
)
from tests.engine.stream_helpers import CPU, WIDE, expect_same, run_steps, state_of, stream_engine

ENGINES: dict[str, EngineFactory] = {
    "resident": sharded_engine,
    "fsdp": lambda case: sharded_engine(case, DeviceMesh("cpu", torch.arange(1))),
    "stream": stream_engine,
}
pytestmark = pytest.mark.usefixtures("process_group", "one_thread")

NEOX = EngineCase(model_config("gpt_neox"), Techniques("amp-fp16"))
NO_DECAY = OPTIM.model_copy(update={"weight_decay": 0.0})


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> EngineFactory:
    return ENGINES[request.param]


def with_scaler(engine: Engine, scale: float, growth_interval: int) -> Engine:
    """Let a fresh engine begin with another scale, and grow it sooner."""
    scaler = engine._scaler
    scaler._scale.fill_(scale)
    scaler._interval = growth_interval
    return engine


def scales(engine: Engine, num_steps: int, start: int = 0) -> list[float]:
    """Return the scale of each of a few steps."""
    return [output[-1] for output in run_steps(engine, num_steps, start)]


def test_without_a_scale_small_gradients_vanish(build: EngineFactory) -> None:
    few = [replace(batch, num_valid=1_000_000 * batch.num_valid) for batch in cut(2, 0)]  # a mean over so many terms
    gradients = {}
    for name, precision, scale in (("exact", "fp32", 1.0), ("scaled", "amp-fp16", 2.0**22), ("plain", "amp-fp16", 1.0)):
        engine = build(replace(NEOX, techniques=Techniques(precision), optim=NO_DECAY))
        with_scaler(engine, scale, 2000).train_step(few, OPTIM.lr)
        gradients[name] = torch.cat([moment.flatten() for moment in section(engine, "exp_avg").values()])
    error = {name: ((gradients[name] - gradients["exact"]).norm() / gradients["exact"].norm()).item() for name in gradients}
    assert error["scaled"] < 0.01 and error["plain"] > 0.3


@pytest.mark.parametrize("optim", [OPTIM, EIGHT_BIT], ids=["adamw", "adam8bit"])
def test_a_step_that_overflows_changes_nothing_but_the_scale(build: EngineFactory, optim: OptimConfig) -> None:
    case = replace(NEOX, model=WIDE, optim=optim)
    engine, undisturbed = build(case), build(case)
    run_steps(engine, 1), run_steps(undisturbed, 1)
    before = state_of(engine)
    with broken(engine, "gradient"):
        output = engine.train_step(cut(2, 1), OPTIM.lr)
    assert output.withheld.item() == 1 and output.loss.isfinite() and output.loss_scale is not None
    assert output.loss_scale.item() == INITIAL_SCALE
    after = state_of(engine)
    assert after.pop(("scaler", "scale")).item() == INITIAL_SCALE / 2 and before.pop(("scaler", "scale")).item() == INITIAL_SCALE
    assert after.pop(("scaler", "count")).item() == 0 and before.pop(("scaler", "count")).item() == 1
    expect_same(after, before)
    with_scaler(undisturbed, INITIAL_SCALE / 2, 2000)
    expect_equal(train(engine, num_steps=2, start=1), train(undisturbed, num_steps=2, start=1))


def test_a_scale_that_is_too_large_is_halved_until_gradients_fit_and_grows_again(build: EngineFactory) -> None:
    engine = with_scaler(build(NEOX), 2.0**30, growth_interval=3)
    found = scales(engine, 16)
    fits = found.index(min(found))
    assert found[: fits + 1] == [2.0 ** (30 - step) for step in range(fits + 1)] and 8 < fits < 14
    assert found[fits : fits + 4] == [found[fits]] * 3 + [2 * found[fits]]


def test_a_loss_that_is_no_number_leaves_the_scale(build: EngineFactory) -> None:
    engine = build(NEOX)
    run_steps(engine, 1)
    before = state_of(engine)
    with broken(engine, "loss"):
        assert engine.train_step(cut(2, 1), OPTIM.lr).withheld.item() == 1
    expect_same(state_of(engine), before)


def test_scale_and_count_are_resumed_bit_for_bit(build: EngineFactory, tmp_path: Path) -> None:
    engine = with_scaler(build(NEOX), 2.0**14, growth_interval=4)
    with broken(engine, "gradient"):
        run_steps(engine, 1)
    run_steps(engine, 3, 1)  # one short of growing
    engine.flush()
    saved = checkpoint.save(tmp_path, RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=4), engine.state_items())
    expected = run_steps(engine, 4, 4)
    assert [output[-1] for output in expected] == [2.0**13] + [2.0**14] * 3
    reader = checkpoint.CheckpointReader(saved)
    assert "scale" not in reader.names()

    resumed = with_scaler(build(NEOX), INITIAL_SCALE, growth_interval=4)
    run_steps(resumed, 1, 9)  # leaves a count that loading must replace
    resumed.load_items(reader)
    assert run_steps(resumed, 4, 4) == expected
    expect_same(state_of(resumed), state_of(engine))


def test_a_checkpoint_of_another_precision_begins_with_the_first_scale(build: EngineFactory, tmp_path: Path) -> None:
    plain = build(replace(NEOX, techniques=Techniques("amp-bf16")))
    plain.flush()
    saved = checkpoint.save(tmp_path, RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0)), plain.state_items())
    engine = with_scaler(build(NEOX), 8.0, 2000)
    engine.load_items(checkpoint.CheckpointReader(saved))
    assert scales(engine, 1) == [INITIAL_SCALE]


@pytest.mark.parametrize("clip", ["exact", "previous", "block"])
def test_norms_and_clipping_are_of_the_gradient_without_its_scale(clip: ClipMode) -> None:
    case = replace(NEOX, clip=clip, max_norm=0.1)
    small, large = (with_scaler(sharded_engine(case), scale, 2000) for scale in (2.0**10, 2.0**13))
    for first, second in zip(run_steps(small), run_steps(large), strict=True):
        assert first[:2] == pytest.approx(second[:2], rel=1e-3) and first[1] > 0.1
    half, exact = (run_steps(sharded_engine(replace(case, techniques=Techniques(kind))), 2) for kind in ("amp-fp16", "fp32"))
    for first, second in zip(half, exact, strict=True):
        assert first[:2] == pytest.approx(second[:2], rel=5e-3)


def test_streamed_equals_sharded() -> None:
    case = replace(NEOX, max_norm=0.1)
    for streamed, sharded in zip(run_steps(stream_engine(case)), run_steps(sharded_engine(case)), strict=True):
        assert streamed[0] == pytest.approx(sharded[0], rel=1e-4) and streamed[1] == pytest.approx(sharded[1], rel=5e-3)
        assert streamed[2:] == sharded[2:]


def test_the_scale_stays_within_bounds() -> None:
    one, bad = torch.ones(()), torch.tensor(torch.inf)
    scaler = LossScaler(True, CPU, scale=4 * SMALLEST_SCALE)
    assert [scaler.finish(one, bad).item() / SMALLEST_SCALE for _ in range(5)] == [4, 2, 1, 1, 1]
    scaler = LossScaler(True, CPU, scale=2.0**126, growth_interval=1)
    assert [scaler.finish(one, one).item() for _ in range(4)] == [2.0**126, 2.0**127, 2.0**127, 2.0**127]


def test_the_rule_is_that_of_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours, weight = LossScaler(True, CPU, growth_interval=3), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.0)
    for norm in [1.0, 1.0, 1.0, torch.inf, 1.0, 1.0, torch.nan, torch.inf, *[1.0] * 8]:
        theirs.scale(weight.sum()).backward()
        weight.grad = torch.tensor([norm])
        used = theirs.get_scale()
        theirs.step(optimizer)
        theirs.update()
        assert ours.finish(torch.ones(()), torch.tensor(norm)).item() == used
