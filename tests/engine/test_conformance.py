"""What every engine must do. A new engine joins by one line in ENGINES."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.config.schema import Kernel
from fluxray.engine.clip import ClipMode, clip_units
from fluxray.engine.parallelize import Techniques
from fluxray.errors import CheckpointError
from fluxray.protocols import IGNORE_INDEX, Engine, RunState, Schedule, TextBatch
from tests.engine.helpers import (
    FAMILIES,
    NUM_ROWS,
    OPTIM,
    EngineCase,
    EngineFactory,
    broken,
    build_stack,
    cut,
    expect_close,
    expect_close_values,
    expect_equal,
    make_batch,
    model_config,
    plain_trace,
    section,
    sharded_engine,
    train,
)
from tests.engine.stream_helpers import stream_engine
from tests.models.helpers import stand_in_for_varlen

ENGINES: dict[str, EngineFactory] = {
    "resident": sharded_engine,
    "fsdp": lambda case: sharded_engine(case, DeviceMesh("cpu", torch.arange(1))),
    "stream": stream_engine,
}
pytestmark = pytest.mark.usefixtures("process_group")

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> EngineFactory:
    return ENGINES[request.param]


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> EngineCase:
    return EngineCase(model_config(request.param))


NEOX = EngineCase(model_config("gpt_neox"))


def test_equals_a_plain_loop_over_the_librarys_model(build: EngineFactory, case: EngineCase) -> None:
    expect_close(train(build(case)), plain_trace(case))


@pytest.mark.parametrize("kernel", ["flash", "math", "varlen"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_any_attention_kernel_trains_alike(
    build: EngineFactory, kernel: Kernel, recompute: Literal["none", "full"], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in_for_varlen(monkeypatch)
    techniques = Techniques("fp32", activation_checkpoint=recompute)
    case = EngineCase(model_config("llama"), techniques, kernel=kernel)
    expect_close(train(build(case)), plain_trace(case))
    assert bool(calls) == (kernel == "varlen")


@pytest.mark.parametrize("num_micro_batches", [1, 4, 8])
def test_split_into_micro_batches_does_not_matter(build: EngineFactory, num_micro_batches: int) -> None:
    expect_close(train(build(NEOX), num_micro_batches), train(build(NEOX), 2))


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16", "mixed-bf16"])
def test_checkpointing_changes_no_bit(build: EngineFactory, precision: str) -> None:
    plain, full = (replace(NEOX, techniques=Techniques(precision, activation_checkpoint=kind)) for kind in ("none", "full"))
    expect_equal(train(build(full)), train(build(plain)))


@pytest.mark.parametrize("precision", ["amp-bf16", "amp-fp16", "mixed-bf16"])
def test_16_bits_stay_close_to_fp32(build: EngineFactory, precision: str) -> None:
    reduced = train(build(replace(NEOX, techniques=Techniques(precision))))
    exact = train(build(NEOX))
    expect_close_values(torch.tensor(reduced.losses), torch.tensor(exact.losses), 2e-3, "losses")
    assert all(weight.dtype == torch.float32 for weight in reduced.weights.values())
    assert reduced.losses != exact.losses


def test_mixed_bf16_accumulates_gradients_in_fp32(build: EngineFactory) -> None:
    case = EngineCase(model_config("gpt_neox", num_hidden_layers=1), Techniques("mixed-bf16"))
    batch = make_batch([0])
    once, often = build(case), build(case)
    once.train_step([batch], OPTIM.lr)
    often.train_step([batch] * 400, OPTIM.lr)
    expected = section(once, "exp_avg")
    scale = max(moment.abs().max() for moment in expected.values())
    worst = max((moment - expected[name]).abs().max() / scale for name, moment in section(often, "exp_avg").items())
    assert worst < 0.02  # a bf16 sum of equal terms stops growing at 256 of them and would be 36% off


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler: CPU code cannot be compiled"
)
@pytest.mark.parametrize("kind", ["none", "full"])
def test_compiled_equals_eager(kind: str) -> None:
    compiled = replace(NEOX, techniques=Techniques("fp32", compile=True, activation_checkpoint=kind))
    expect_close(train(sharded_engine(compiled)), train(sharded_engine(NEOX)))


def test_clipping_is_by_the_true_global_norm(build: EngineFactory) -> None:
    clipped = replace(NEOX, max_norm=0.1)
    actual, expected = train(build(clipped)), plain_trace(clipped)
    assert min(expected.norms) > 0.1
    expect_close_values(torch.tensor(actual.norms), torch.tensor(expected.norms), 1e-5, "norms")
    for name, weight in expected.weights.items():
        expect_close_values(actual.weights[name], weight, 1e-4, name)


def test_every_clip_mode_reports_the_same_norm_and_clips_by_it(build: EngineFactory) -> None:
    clipped = {mode: build(replace(NEOX, max_norm=0.1, clip=mode)) for mode in ("exact", "previous", "block")}
    free = build(NEOX)
    first = [engine.train_step(cut(2, 0), OPTIM.lr).grad_norm for engine in (free, *clipped.values())]
    assert all(torch.equal(norm, first[0]) for norm in first)
    gradients, units = section(free, "exp_avg"), clip_units(build_stack(NEOX))
    for mode in ("previous", "block"):  # nothing is known of earlier steps yet, so both scale each unit by its own norm
        scaled = section(clipped[mode], "exp_avg")
        for unit in set(units.values()):
            names = [name for name, other in units.items() if other == unit]
            norm = torch.cat([gradients[name].flatten() for name in names]).norm() / (1 - OPTIM.beta1)
            for name in names:
                expect_close_values(scaled[name], gradients[name] * (0.1 / norm).clamp(max=1.0), 1e-5, name)
    clipped["previous"].train_step(cut(2, 1), OPTIM.lr)
    clipped["block"].train_step(cut(2, 1), OPTIM.lr)
    by_average, by_block = section(clipped["previous"], "exp_avg"), section(clipped["block"], "exp_avg")
    assert any(not torch.equal(by_average[name], by_block[name]) for name in by_block)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_what_is_not_finite_changes_neither_weights_nor_moments(build: EngineFactory, precision: str, what: str) -> None:
    case = replace(NEOX, techniques=Techniques(precision), max_norm=0.1, clip="previous")
    engine, undisturbed = build(case), build(case)
    outputs = [engine.train_step(cut(2, 0), OPTIM.lr)]
    before = _state(engine)
    with broken(engine, what):
        outputs.append(engine.train_step(cut(2, 1), OPTIM.lr))
    after = _state(engine)
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert math.isfinite(outputs[1].loss.item()) == (what == "gradient") and not math.isfinite(outputs[1].grad_norm.item())
    assert [output.withheld.item() for output in outputs] == [0.0, 1.0]
    undisturbed.train_step(cut(2, 0), OPTIM.lr)
    expect_equal(train(engine, num_steps=2, start=1), train(undisturbed, num_steps=2, start=1))


def test_a_first_step_that_is_not_finite_leaves_the_beginning(build: EngineFactory, tmp_path: Path) -> None:
    engine = build(NEOX)
    with broken(engine, "loss"):
        engine.train_step(cut(2, 0), OPTIM.lr)
    _save(engine, tmp_path)
    resumed = build(NEOX)
    resumed.load_items(checkpoint.CheckpointReader(tmp_path / "step_00000002"))
    expected = train(build(NEOX))
    expect_equal(train(engine), expected)
    expect_equal(train(resumed), expected)


def test_a_zero_weight_micro_batch_changes_nothing(build: EngineFactory) -> None:
    empty = make_batch([0, 1])
    empty = replace(empty, targets=torch.full_like(empty.targets, IGNORE_INDEX), num_valid=0)
    alone, beside = build(NEOX), build(NEOX)
    first = alone.train_step(cut(2, 0), OPTIM.lr)
    second = beside.train_step([*cut(2, 0), empty], OPTIM.lr)
    assert torch.equal(first.loss, second.loss)
    for name, weight in section(alone, "weights").items():
        assert torch.equal(weight, section(beside, "weights")[name])


def test_a_batch_without_any_valid_token_is_no_division_by_zero(build: EngineFactory) -> None:
    empty = make_batch([0])
    output = build(NEOX).train_step([replace(empty, targets=torch.full_like(empty.targets, -100), num_valid=0)], OPTIM.lr)
    assert output.loss.item() == 0
    assert output.grad_norm.item() == 0


def test_evaluation_leaves_training_as_it_was(build: EngineFactory) -> None:
    dropping = EngineCase(model_config("gpt_neox", **DROPOUT))
    watched, other = build(dropping), build(dropping)
    expected = [other.train_step(cut(2, step), OPTIM.lr).loss.item() for step in range(3)]
    losses = []
    for step in range(3):
        losses.append(watched.train_step(cut(2, step), OPTIM.lr).loss.item())
        first, second = (watched.eval_steps([make_batch([0, 1])])[0] for _ in range(2))
        assert torch.equal(first.sum, second.sum)
    assert losses == expected


def test_evaluation_is_the_loss_before_the_next_step(build: EngineFactory, case: EngineCase) -> None:
    engine = build(case)
    outputs = engine.eval_steps(cut(4, 0))
    for output, batch in zip(outputs, cut(4, 0), strict=True):
        (alone,) = engine.eval_steps([batch])
        assert torch.equal(output.sum, alone.sum) and torch.equal(output.num_valid, alone.num_valid)
    mean = sum(output.sum for output in outputs) / sum(output.num_valid for output in outputs)
    assert engine.train_step(cut(2, 0), OPTIM.lr).loss.item() == pytest.approx(mean.item(), rel=1e-6)


def test_forward_gives_the_librarys_logits(build: EngineFactory, case: EngineCase) -> None:
    batch = make_batch(range(NUM_ROWS))
    stack = build_stack(case)
    for block in (*stack.blocks, None):
        stack.materialise(torch.device("cpu"), block)
    with torch.no_grad():
        expected = stack.model.eval()(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert torch.equal(build(case).forward(batch), expected)


def test_dropout_is_keyed_by_step_and_samples_alone(build: EngineFactory) -> None:
    dropping = EngineCase(model_config("gpt_neox", **DROPOUT))
    recomputing = replace(dropping, techniques=Techniques("fp32", activation_checkpoint="full"))
    torch.manual_seed(1)
    expected = train(build(dropping))
    torch.manual_seed(2)
    expect_equal(train(build(recomputing)), expected)
    assert train(build(NEOX)).losses != expected.losses

    def first_loss(batch: TextBatch) -> float:
        return build(dropping).train_step([batch], OPTIM.lr).loss.item()

    assert (
        first_loss(make_batch([0, 1], step=0)) == first_loss(make_batch([0, 1], step=0)) != first_loss(make_batch([0, 1], step=1))
    )


def test_learning_rate_is_the_steps_own(build: EngineFactory) -> None:
    engine = build(NEOX)
    before = section(engine, "weights")
    engine.train_step(cut(2, 0), 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in section(engine, "weights").items())


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "mixed-bf16"])
def test_saved_and_loaded_goes_on_bit_for_bit(build: EngineFactory, case: EngineCase, precision: str, tmp_path: Path) -> None:
    case = replace(case, techniques=Techniques(precision))
    engine = build(case)
    train(engine, num_steps=2)
    _save(engine, tmp_path)
    expected = train(engine, num_steps=3, start=2)

    resumed = build(case)
    resumed.train_step(cut(1, 9), OPTIM.lr)  # leaves moments that loading must replace
    resumed.load_items(checkpoint.CheckpointReader(tmp_path / "step_00000002"))
    expect_equal(train(resumed, num_steps=3, start=2), expected)


@pytest.mark.parametrize("saved", ["exact", "previous"])
def test_the_average_of_norms_is_resumed_and_starts_anew_where_it_was_not_saved(
    build: EngineFactory, saved: ClipMode, tmp_path: Path
) -> None:
    case = replace(NEOX, max_norm=0.1, clip="previous")
    engine = build(replace(case, clip=saved))
    train(engine, num_steps=2)
    _save(engine, tmp_path)
    uninterrupted = train(engine, num_steps=3, start=2)
    reader = checkpoint.CheckpointReader(tmp_path / "step_00000002")
    assert "average" not in reader.names() and ("clip" in reader.sections("average")) == (saved == "previous")

    fresh, used = build(case), build(case)
    used.train_step(cut(1, 9), OPTIM.lr)  # leaves an average that loading must replace
    for resumed in (fresh, used):
        resumed.load_items(reader)
    trace = train(used, num_steps=3, start=2)
    expect_equal(train(fresh, num_steps=3, start=2), trace)
    if saved == "previous":
        expect_equal(trace, uninterrupted)


def test_before_the_first_step_there_are_no_moments_to_restore(build: EngineFactory, tmp_path: Path) -> None:
    engine = build(NEOX)
    _save(engine, tmp_path)
    expected = train(engine)
    resumed = build(NEOX)
    resumed.train_step(cut(1, 9), OPTIM.lr)
    resumed.load_items(checkpoint.CheckpointReader(tmp_path / "step_00000002"))
    expect_equal(train(resumed), expected)


@pytest.mark.parametrize(
    "other", [{"hidden_size": 64}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}, {"vocab_size": 256}, {"vocab_size": 64}]
)
def test_a_checkpoint_of_another_model_is_refused(build: EngineFactory, other: dict[str, int], tmp_path: Path) -> None:
    _save(build(NEOX), tmp_path)
    engine = build(EngineCase(model_config("gpt_neox", **other)))
    with pytest.raises(CheckpointError, match="another model"):
        engine.load_items(checkpoint.CheckpointReader(tmp_path / "step_00000002"))


def _state(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    engine.flush()
    return {(item.section, item.name): item.tensor.detach().clone() for item in engine.state_items()}


def _save(engine: Engine, folder: Path) -> None:
    engine.flush()
    state = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2)
    checkpoint.save(folder, state, engine.state_items())
