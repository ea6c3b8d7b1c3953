"""Stepping inside backward: the same bits as after it, with the gradients of one block at a time."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.config.schema import CheckpointKind, OptimConfig
from fluxray.engine.clip import ClipMode, clip_units
from fluxray.engine.parallelize import Techniques
from fluxray.engine.sharded import ShardedEngine
from fluxray.optim.units import UnitOptimizers
from fluxray.protocols import RunState, Schedule
from tests.engine.helpers import (
    EIGHT_BIT,
    FAMILIES,
    OPTIM,
    EngineCase,
    build_stack,
    cut,
    expect_equal,
    model_config,
    sharded_engine,
    train,
)
from tests.engine.stream_helpers import WIDE, expect_same, run_steps, state_of

pytestmark = pytest.mark.usefixtures("process_group", "one_thread")

NEOX = EngineCase(model_config("gpt_neox"), max_norm=0.1, clip="block")


def inside(case: EngineCase) -> EngineCase:
    """Return the case with the step inside backward."""
    return replace(case, optim=case.optim.model_copy(update={"in_backward": True}))


def build(case: EngineCase, kind: str = "resident") -> ShardedEngine:
    return sharded_engine(case, DeviceMesh("cpu", torch.arange(1)) if kind == "fsdp" else None)


def expect_same_run(case: EngineCase, kind: str) -> None:
    """Assert that steps inside and after backward leave the same bits, and that the norms were clipped."""
    engine, after = build(inside(case), kind), build(case, kind)
    actual, expected = train(engine, 1, num_steps=3), train(after, 1, num_steps=3)
    expect_equal(actual, expected)
    assert min(expected.norms) > case.max_norm
    expect_same(state_of(engine), state_of(after))


each_kind = pytest.mark.parametrize("kind", ["resident", "fsdp"])


@each_kind
@pytest.mark.parametrize("clip", ["previous", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_step_after_backward_bit_for_bit(family: str, clip: ClipMode, kind: str) -> None:
    expect_same_run(replace(NEOX, model=model_config(family), clip=clip), kind)


@each_kind
@pytest.mark.parametrize("optim", [OPTIM, EIGHT_BIT], ids=["adamw", "adam8bit"])
@pytest.mark.parametrize("precision", ["amp-bf16", "mixed-bf16"])
def test_in_every_precision_with_recomputation(precision: str, optim: OptimConfig, kind: str) -> None:
    techniques = Techniques(precision, activation_checkpoint="full")
    expect_same_run(EngineCase(WIDE, techniques, 0.1, "previous", optim), kind)


@each_kind
@pytest.mark.parametrize("checkpointing", ["sqrt", "every_n", "offload"])
def test_with_every_activation_checkpoint(checkpointing: CheckpointKind, kind: str) -> None:
    techniques = Techniques("mixed-bf16", activation_checkpoint=checkpointing)
    expect_same_run(replace(NEOX, techniques=techniques), kind)


@each_kind
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_the_gradients_of_one_block_are_held_at_a_time(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(NEOX, model=model_config("gpt_neox", num_hidden_layers=6), techniques=Techniques(precision))
    stack, units = build_stack(case), clip_units(build_stack(case))
    sizes: dict[str, int] = {}
    for name, parameter in stack.model.named_parameters():
        sizes[units[name]] = sizes.get(units[name], 0) + 4 * parameter.numel()
    blocks = {block.name for block in stack.blocks}
    engine = build(inside(case), kind)
    held: list[int] = []
    intact = UnitOptimizers.step

    def step(self, unit, lr, withheld) -> None:
        everything = {*engine._masters.named.values(), *engine._stack.model.parameters()}
        held.append(sum(p.grad.nbytes for p in everything if p.grad is not None))
        intact(self, unit, lr, withheld)
        assert all(parameter.grad is None for parameter in self.members[unit].values())

    monkeypatch.setattr(UnitOptimizers, "step", step)
    engine.train_step(cut(1, 0), OPTIM.lr)
    assert len(held) == len(sizes)
    largest_block, outside = max(sizes[name] for name in blocks), [sizes[name] for name in sizes if name not in blocks]
    # FSDP reduces what is outside the blocks together
    assert max(held) <= largest_block + (sum(outside) if kind == "fsdp" else max(outside)) < sum(sizes.values()) / 2
    assert held[-1] <= max(sum(outside), largest_block)


@each_kind
def test_saved_and_loaded_goes_on_bit_for_bit_either_way(kind: str, tmp_path: Path) -> None:
    case = EngineCase(WIDE, max_norm=0.1, clip="previous", optim=EIGHT_BIT)
    engine = build(inside(case), kind)
    run_steps(engine, 2, num_micro_batches=1)
    saved = checkpoint.save(tmp_path, RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2), engine.state_items())
    expected = run_steps(engine, 2, 2, num_micro_batches=1)
    for resumed in (build(inside(case), kind), build(case, kind)):
        run_steps(resumed, 1, 9, num_micro_batches=1)
        assert list(resumed.load_items(checkpoint.CheckpointReader(saved))) == []
        assert run_steps(resumed, 2, 2, num_micro_batches=1) == expected
        expect_same(state_of(resumed), state_of(engine))


@each_kind
def test_a_loss_that_is_not_finite_changes_nothing(kind: str) -> None:
    engine, undisturbed = build(inside(NEOX), kind), build(inside(NEOX), kind)
    for each in (engine, undisturbed):
        run_steps(each, 1, num_micro_batches=1)
    before, intact = state_of(engine), engine._loss_fn
    engine._loss_fn = lambda output, batch: intact(output * torch.nan, batch)
    assert engine.train_step(cut(1, 1), OPTIM.lr).withheld.item() == 1
    engine._loss_fn = intact
    expect_same(state_of(engine), before)
    assert run_steps(engine, 2, 1, 1) == run_steps(undisturbed, 2, 1, 1)


@each_kind
def test_a_gradient_that_is_not_finite_is_withheld_and_what_stepped_before_it_stays(kind: str) -> None:
    engine = build(inside(NEOX), kind)
    run_steps(engine, 1, num_micro_batches=1)
    before = state_of(engine)
    weight = engine._stack.blocks[1].module.mlp.dense_h_to_4h
    handle = weight.register_full_backward_hook(lambda _, inputs, __: (inputs[0] * torch.inf,))
    output = engine.train_step(cut(1, 1), OPTIM.lr)
    handle.remove()
    after, units = state_of(engine), clip_units(build_stack(NEOX))
    changed = {units[name] for (section, name), value in after.items() if section == "exp_avg"
               and not torch.equal(value, before[section, name])}  # fmt: skip
    first, second, last = (block.name for block in engine._stack.blocks)
    assert last in changed and not changed & {first, second, "gpt_neox.embed_in.weight"}
    assert output.withheld.item() == pytest.approx(1 - len(changed) / len(set(units.values())))
    assert output.loss.isfinite() and not output.grad_norm.isfinite()
    for (section, name), value in after.items():
        assert units.get(name) in changed or torch.equal(value, before[section, name]), (section, name)


def test_parameters_without_a_gradient_hold_nobody_up() -> None:
    engines = build(inside(NEOX)), build(NEOX)
    for engine in engines:
        bias = engine._stack.blocks[1].module.attention.dense.bias
        engine._stack.blocks[1].module.attention.dense.bias = None
        assert bias is not None
    outputs = [run_steps(engine, 3, num_micro_batches=1) for engine in engines]
    assert outputs[0] == outputs[1]
    expect_same(state_of(engines[0]), state_of(engines[1]))
