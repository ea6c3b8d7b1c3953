"""The stream engine computes what a plain loop computes, in whatever order and from wherever the blocks come."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxray.engine.clip import ClipMode
from fluxray.engine.dropout import apply_dropout_keys
from fluxray.engine.parallelize import Precision, Techniques
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_step import Stepper
from fluxray.engine.stream_store import StreamSettings
from fluxray.optim.adam8bit import AdamConfig, FlatState, adam_step, bias_corrections
from fluxray.optim.formats import split
from fluxray.optim.states import state_format
from fluxray.protocols import State, TextBatch
from fluxray.tasks.lm import LmTask
from tests.engine.helpers import (
    FAMILIES,
    OPTIM,
    EngineCase,
    build_stack,
    cut,
    expect_close_values,
    make_batch,
    model_config,
    sharded_engine,
)
from tests.engine.stream_helpers import (
    CLIP_MODES,
    CLIPPED,
    CPU,
    FORMATS,
    SMALL,
    Sections,
    expect_same,
    masters_of,
    moments_of,
    run_steps,
    state_of,
    stream_engine,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {family: EngineCase(model_config(family)) for family in FAMILIES}
NEOX = CASES["gpt_neox"]
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
DROPPING = EngineCase(model_config("gpt_neox", **DROPOUT), clip="block")
MIXED = replace(NEOX, techniques=Techniques("mixed-bf16"))


@cache
def _streamed(name: str, mode: ClipMode, resident: int) -> tuple[list[tuple[float, ...]], Sections]:
    case = replace(FORMATS[name], clip=mode, max_norm=CLIPPED)
    engine = stream_engine(case, StreamSettings(resident_blocks=resident))
    return run_steps(engine), state_of(engine)


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_streamed_equals_resident_bit_for_bit(name: str, mode: ClipMode) -> None:
    num_blocks = FORMATS[name].model.config["num_hidden_layers"]
    expected_outputs, expected = _streamed(name, mode, 0)
    for resident in (1, num_blocks):
        outputs, state = _streamed(name, mode, resident)
        assert outputs == expected_outputs
        expect_same(state, expected)


@pytest.mark.parametrize("mode", ["exact", "block"])
@pytest.mark.parametrize(("num_kept", "num_resident", "num_slots"), [(1, 0, 3), (2, 0, 3), (9, 0, 1), (1, 2, 2), (9, 4, 3)])
def test_kept_activations_change_no_bit(num_kept: int, num_resident: int, num_slots: int, mode: ClipMode) -> None:
    case = EngineCase(SMALL.model_copy(update={"config": {**SMALL.config, **DROPOUT}}), clip=mode, max_norm=CLIPPED)
    keeping = stream_engine(case, StreamSettings(num_slots, num_slots, num_resident), kept_blocks=num_kept)
    recomputing = stream_engine(case)
    assert run_steps(keeping) == run_steps(recomputing)
    expect_same(state_of(keeping), state_of(recomputing))
    num_blocks = len(keeping._units)
    assert _count_forwards(recomputing) == 2 * num_blocks - 1
    assert _count_forwards(keeping) == 2 * num_blocks - 1 - min(num_kept, num_blocks - 1)


def _count_forwards(engine: StreamEngine) -> int:
    """Return how many blocks run forward in a step of one micro-batch."""
    counted: list[int] = []
    modules = [block.module.get_submodule("input_layernorm") for block in engine._stack.blocks]
    hooks = [module.register_forward_pre_hook(lambda *_: counted.append(1)) for module in modules]
    run_steps(engine, 1, 3, num_micro_batches=1)
    for hook in hooks:
        hook.remove()
    return len(counted)


def test_20_steps_equal_those_of_torch_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[dict[str, Tensor]] = []
    intact = Stepper.step_unit
    engine = stream_engine(NEOX)
    prefixes = {id(unit.layout): unit.prefix for unit in (*engine._units, engine._outside)}

    def recording(self: Stepper, layout: Any, memory: Any, gradient: Tensor, given: Any) -> None:
        prefix = prefixes[id(layout)]
        fed.append({prefix + name: view.clone() for name, view in layout.gradient_views(gradient).items()})
        intact(self, layout, memory, gradient, given)

    monkeypatch.setattr(Stepper, "step_unit", recording)
    named = {name: nn.Parameter(weight) for name, weight in masters_of(state_of(engine)).items()}
    groups = [
        {"params": [p for p in named.values() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, OPTIM.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, foreach=False)
    for step in range(20):
        fed.clear()
        engine.train_step(cut(2, step), OPTIM.lr)
        engine.flush()
        gradients = {name: gradient for part in fed for name, gradient in part.items()}
        assert gradients.keys() == named.keys()
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        optimizer.step()
    for name, weight in masters_of(state_of(engine)).items():
        expect_close_values(weight, named[name].detach(), 1e-6, name)


class _MicroBatchMajor:
    """The whole model for one micro-batch after the other. Gradients are summed in fp32, those of the two uses of a tied
    parameter apart.
    """

    def __init__(self, case: EngineCase):
        self.stack = build_stack(case)
        apply_dropout_keys(self.stack)
        for block in (*self.stack.blocks, None):
            self.stack.materialise(CPU, block)
        weight = torch.bfloat16 if case.techniques.precision == "mixed-bf16" else torch.float32
        self.named = dict(self.stack.model.named_parameters())
        self.states: dict[str, FlatState] = {}
        for name, parameter in self.named.items():
            master, fmt = parameter.detach().clone().flatten(), state_format(parameter.shape, False, "fp32", weight)
            exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
            self.states[name] = FlatState(*split(master, fmt, None), exp_avg, exp_avg_sq, None, None)
            parameter.data = self.states[name].weight.view(parameter.shape)

    def step(self, batches: Sequence[TextBatch], number: int) -> float:
        stack, loss_fn, loss_sum = self.stack, LmTask(0).loss_fn, torch.zeros(())
        divisor = sum(batch.num_valid for batch in batches)
        uses: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for batch in batches:
            first = stack.prologue(batch)
            leaf = first.carry[0].detach().requires_grad_()
            state: State = first._replace(carry=(leaf,))
            for block in stack.blocks:
                state = block(state)
            loss = stack.epilogue(state, batch, loss_fn).sum
            (loss / divisor).backward()
            self._collect(uses[0])
            first.carry[0].backward(leaf.grad)
            self._collect(uses[1])
            loss_sum += loss.detach()
        for name in self.named:
            gradient = sum(use[name] for use in uses if name in use)
            assert isinstance(gradient, Tensor)
            decay = OPTIM.weight_decay if gradient.ndim > 1 else 0.0
            config = AdamConfig(OPTIM.beta1, OPTIM.beta2, OPTIM.eps, decay)
            control = torch.stack([torch.ones(()), torch.ones(()), *bias_corrections(torch.tensor(float(number)), config)])
            adam_step(self.states[name], gradient.flatten(), config, OPTIM.lr, control, 0)
        return (loss_sum / divisor).item()

    def _collect(self, sums: dict[str, Tensor]) -> None:
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.float()
                parameter.grad = None


@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
@pytest.mark.parametrize(("which", "num_micro_batches"), [("gpt_neox", 4), ("qwen3 tied", 1), ("qwen3 tied", 4), ("dropping", 4)])
def test_layer_by_layer_equals_one_micro_batch_after_the_other_bit_for_bit(
    which: str, num_micro_batches: int, precision: Precision
) -> None:
    case = replace({**CASES, "dropping": DROPPING}[which], techniques=Techniques(precision), clip="block")
    engine, plain = stream_engine(case), _MicroBatchMajor(case)
    for step in range(3):
        batches = cut(num_micro_batches, step)
        assert engine.train_step(batches, OPTIM.lr).loss.item() == plain.step(batches, step + 1)
    state = state_of(engine)
    for name, flat in plain.states.items():
        assert torch.equal(state["weights", name].flatten(), flat.weight), name
        assert torch.equal(state["exp_avg", name].flatten(), flat.exp_avg), name
        assert torch.equal(state["exp_avg_sq", name].flatten(), flat.exp_avg_sq), name


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_sharded_engine_and_reports_its_norm(family: str, mode: ClipMode) -> None:
    case = replace(CASES[family], clip=mode, max_norm=CLIPPED)
    streamed, sharded = stream_engine(case), sharded_engine(case)
    for (loss, norm, *counts), (other_loss, other_norm, *others) in zip(run_steps(streamed), run_steps(sharded), strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6) and counts == others
        assert norm == pytest.approx(other_norm, rel=1e-5) and norm > CLIPPED
    _expect_close(state_of(streamed), state_of(sharded), 1e-4, 1e-5)


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_equals_the_sharded_engine_in_mixed_bf16(mode: ClipMode) -> None:
    case = replace(MIXED, max_norm=CLIPPED, clip=mode)
    streamed, sharded = stream_engine(case), sharded_engine(case)
    (first, *outputs), (expected_first, *expected) = run_steps(streamed, 5), run_steps(sharded, 5)
    assert first[0] == expected_first[0] and first[1] == pytest.approx(expected_first[1], rel=1e-6)
    for output, other in zip(outputs, expected, strict=True):
        assert output[0] == pytest.approx(other[0], rel=1e-4) and output[1] == pytest.approx(other[1], rel=2e-3)
    tolerance = 0.1 if mode == "exact" else 0.01  # gradients that are held back are bf16; biases have moved by 5 steps alone
    _expect_close(state_of(streamed), state_of(sharded), tolerance, tolerance)


def _expect_close(actual: Sections, expected: Sections, weight: float, moment: float) -> None:
    """Compare masters and first moments, the latter relative to the largest of all, as gradients are."""
    masters, moments = masters_of(actual), moments_of(actual, "exp_avg")
    for name, reference in masters_of(expected).items():
        expect_close_values(masters[name], reference, weight, name)
    others = moments_of(expected, "exp_avg")
    scale = max(value.abs().max() for value in others.values())
    for name, reference in others.items():
        error = (moments[name] - reference).abs().max() / scale
        assert error <= moment, f"first moment of {name}: off by {error:.2e}"


@pytest.mark.parametrize("num_tokens", [1, 5, 24, 32, 10000])
def test_an_epilogue_in_pieces_equals_a_whole_one(num_tokens: int) -> None:
    whole, pieces = (stream_engine(NEOX, StreamSettings(epilogue_tokens=count)) for count in (64, num_tokens))
    assert [len(whole._stack.epilogue_pieces(_state_of_one(), cut(2, 0)[0], count)) for count in (64, num_tokens)] == [
        1,
        {1: 64, 5: 16, 24: 4, 32: 2, 10000: 1}[num_tokens],
    ]
    for step in range(2):
        outputs = [engine.train_step(cut(2, step), OPTIM.lr) for engine in (whole, pieces)]
        assert outputs[1].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-6)
        if step == 0:
            _expect_close(state_of(pieces), state_of(whole), 1e-4, 1e-6)
    losses = [engine.eval_steps([make_batch([0, 1, 2])])[0].sum.item() for engine in (whole, pieces)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def _state_of_one() -> State:
    return State((torch.zeros(4, 16, 32),), {}, None)


def test_dropout_is_the_same_wherever_blocks_lie_and_in_the_sharded_engine() -> None:
    engines = [stream_engine(DROPPING, StreamSettings(resident_blocks=count)) for count in (0, 1, 3)]
    outputs = [run_steps(engine) for engine in engines]
    states = [state_of(engine) for engine in engines]
    assert outputs[1:] == outputs[:1] * 2
    for state in states[1:]:
        expect_same(state, states[0])
    assert outputs[0] != run_steps(stream_engine(replace(DROPPING, model=NEOX.model)))
    recomputing = replace(DROPPING, techniques=Techniques("fp32", activation_checkpoint="full"))
    streamed, sharded = stream_engine(recomputing), sharded_engine(recomputing)
    for step in range(3):  # the weights stay, the masks change
        outputs = [engine.train_step(cut(2, step), 0.0) for engine in (streamed, sharded)]
        assert torch.equal(outputs[0].loss, outputs[1].loss)
        assert outputs[0].grad_norm.item() == pytest.approx(outputs[1].grad_norm.item(), rel=1e-6)


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_evaluation_between_steps_sees_every_update_and_changes_nothing(mode: ClipMode) -> None:
    case = replace(NEOX, model=SMALL, clip=mode, max_norm=CLIPPED)
    watched, other, sharded = stream_engine(case), stream_engine(case), sharded_engine(case)
    for step in range(3):
        outputs = [engine.train_step(cut(2, step), OPTIM.lr) for engine in (watched, other, sharded)]
        assert torch.equal(outputs[0].loss, outputs[1].loss)
        losses = [engine.eval_steps([make_batch([0, 1])])[0].sum.item() for engine in (watched, watched, sharded)]
        assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
        expect_close_values(watched.forward(make_batch([2])), sharded.forward(make_batch([2])), 1e-4, "logits")
    expect_same(state_of(watched), state_of(other))
