"""Two kinds of blocks, shared tensors that need a gradient, frozen and unused parameters, and what is not finite."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fluxray.engine.clip import ClipMode
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.protocols import Engine, LossOutput, State
from tests.engine.helpers import OPTIM, EngineCase, cut, expect_close_values, model_config
from tests.engine.stream_helpers import (
    CLIP_MODES,
    CLIPPED,
    FORMATS,
    LateTransfers,
    expect_same,
    freeze,
    masters_of,
    moments_of,
    run_steps,
    state_of,
    stream_engine,
    stream_of,
)
from tests.engine.two_kinds import TwoKindsStack, plain_two_kinds, square_loss, two_kinds_batches

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = EngineCase(model_config("gpt_neox"))
FROZEN: dict[str, Sequence[str]] = {
    "a block of each kind": ("doubles.1", "singles.0"),
    "the first blocks and what is before them": ("image", "text", "time", "doubles"),
    "one parameter of a block": ("singles.1.down.weight", "doubles.0.image.bias"),
    "what makes the shared tensor": ("time",),
    "the embeddings": ("image", "text"),
    "the end": ("final", "head"),
    "all blocks": ("doubles", "singles"),
}


def _two_kinds(settings: StreamSettings | None = None, frozen: Sequence[str] = ()) -> StreamEngine:
    stack = TwoKindsStack()
    freeze(stack, frozen)
    return stream_of(stack, square_loss, CASE, settings)


def _train(engine: Engine, num_steps: int, num_micro_batches: int, spare: Sequence[int] = ()) -> list[float]:
    steps = range(num_steps)
    return [engine.train_step(two_kinds_batches(step, num_micro_batches, spare), OPTIM.lr).loss.item() for step in steps]


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_two_kinds_of_blocks_with_a_shared_tensor_equal_plain_autograd(num_micro_batches: int) -> None:
    losses, gradients, weights = plain_two_kinds(OPTIM, 5, num_micro_batches)
    first = _two_kinds()
    output = first.train_step(two_kinds_batches(0, num_micro_batches), OPTIM.lr)
    norm = torch.cat([gradient.flatten() for gradient in gradients[0].values()]).norm()
    assert output.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)  # nothing of one block lies between another's
    moments, scale = moments_of(state_of(first), "exp_avg"), max(g.abs().max() for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert (moments[name] / (1 - OPTIM.beta1) - gradient).abs().max() <= 1e-6 * scale, name
    for settings in (StreamSettings(), StreamSettings(1, 1), StreamSettings(2, 2, resident_blocks=2)):
        engine = _two_kinds(settings)
        assert _train(engine, 5, num_micro_batches) == pytest.approx(losses, rel=5e-6)
        for name, weight in masters_of(state_of(engine)).items():
            expect_close_values(weight, weights[name], 1e-4, name)


@pytest.mark.parametrize("what", FROZEN)
def test_what_is_frozen_never_changes_and_the_rest_equals_plain_autograd(what: str) -> None:
    frozen = FROZEN[what]
    losses, _, weights = plain_two_kinds(OPTIM, 4, 2, frozen)
    for settings in (StreamSettings(2, 2), StreamSettings(resident_blocks=5)):
        engine = _two_kinds(settings, frozen)
        before = state_of(engine)
        assert _train(engine, 4, 2) == pytest.approx(losses, rel=5e-6)
        state = state_of(engine)
        for name, weight in masters_of(state).items():
            expect_close_values(weight, weights[name], 1e-4, name)
            if name.startswith(tuple(frozen)):
                assert torch.equal(weight, before["weights", name])
                assert [section for section, other in state if other == name] == ["weights"]


def test_what_is_frozen_is_never_written_back() -> None:
    written: list[int] = []

    class Counting(LateTransfers):
        def write(self, host, device, after):
            written.append(host.numel())
            return super().write(host, device, after)

    stack = TwoKindsStack()
    freeze(stack, ("doubles.1", "singles.1.up"))
    engine = stream_of(stack, square_loss, replace(CASE, clip="block"), transfers=Counting(0.0, 0.0))
    _train(engine, 1, 2)
    trained = [(unit.layout.trained_weight_bytes, unit.layout.state_bytes) for unit in engine._units]
    assert trained[1] == (0, 0) and 0 < trained[3][0] < engine._units[3].layout.weight_bytes
    assert sorted(written) == sorted(size for sizes in trained for size in sizes if size)


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_what_is_not_used_is_left_alone(mode: ClipMode) -> None:
    engine = stream_of(TwoKindsStack(), square_loss, replace(CASE, clip=mode))
    before = state_of(engine)
    _train(engine, 2, 2)
    state = state_of(engine)
    changed = {name for (section, name), tensor in state.items() if not torch.equal(tensor, before[section, name])}
    unused = {name for _, name in state if name.startswith("unused") or ".spare." in name}
    assert len(unused) == 6
    assert {name for name in unused if torch.count_nonzero(state["exp_avg", name]) > 0} == set()
    assert {name for name in unused if not torch.equal(state["weights", name], before["weights", name])} == set()
    assert {name for section, name in state if section == "weights"} - unused <= changed


def test_what_one_micro_batch_alone_uses_gets_its_gradient() -> None:
    losses, _, weights = plain_two_kinds(OPTIM, 3, 4, spare=(2,))
    engine = _two_kinds()
    assert _train(engine, 3, 4, spare=(2,)) == pytest.approx(losses, rel=5e-6)
    for name, weight in masters_of(state_of(engine)).items():
        expect_close_values(weight, weights[name], 1e-4, name)


BAD = ("loss of one micro-batch", "infinite loss with a finite gradient", "gradient")
BAD_BLOCK = 1


@contextmanager
def _broken(engine: StreamEngine, what: str) -> Iterator[None]:
    """Make one loss infinite meanwhile, or the gradient by the output of block BAD_BLOCK."""

    class Overflowing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden: Tensor) -> Tensor:
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * torch.inf

    stack, num_calls = engine._stack, itertools.count(1)
    intact, blocks = stack.epilogue, stack.blocks

    def epilogue(*args) -> LossOutput:
        result = intact(*args)
        if next(num_calls) != 2 or what == BAD[2]:
            return result
        return result._replace(sum=result.sum * torch.inf if what == BAD[0] else result.sum + torch.inf)

    def block(state: State) -> State:
        state = blocks[BAD_BLOCK](state)
        return state._replace(carry=(Overflowing.apply(state.carry[0]),))

    stack.epilogue = epilogue
    if what == BAD[2]:
        stack.blocks = (*blocks[:BAD_BLOCK], block, *blocks[BAD_BLOCK + 1 :])  # type: ignore[assignment]
    yield
    del stack.epilogue
    stack.blocks = blocks


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", ["fp32", "split24"])
def test_what_is_not_finite_is_withheld(name: str, what: str, mode: ClipMode) -> None:
    engine, undisturbed = (stream_engine(replace(FORMATS[name], clip=mode, max_norm=CLIPPED)) for _ in range(2))
    for each in (engine, undisturbed):
        run_steps(each, 1)
    before = state_of(engine)
    with _broken(engine, what):
        output = engine.train_step(cut(2, 1), OPTIM.lr)
        after = state_of(engine)
    num_blocks = len(engine._units)
    steps_on = {name for name, _ in (engine._stack.model.named_parameters() if what == BAD[2] and mode != "exact" else ())}
    steps_on = {name for name in steps_on if not name.startswith("gpt_neox.embed_in")}
    steps_on = {name for name in steps_on if not any(name.startswith(f"gpt_neox.layers.{i}.") for i in range(BAD_BLOCK + 1))}
    assert math.isfinite(output.loss.item()) == (what == BAD[2])
    assert math.isfinite(output.grad_norm.item()) == (what == BAD[1])
    withheld = (BAD_BLOCK + 2) / (num_blocks + 4) if steps_on else 1.0  # the blocks up to it and the embedding, of all
    assert output.withheld.item() == pytest.approx(withheld)
    for (section, parameter), tensor in after.items():
        if parameter in steps_on:
            assert section != "exp_avg" or not torch.equal(tensor, before[section, parameter]), parameter
            assert torch.isfinite(tensor.float()).all()
        else:
            assert torch.equal(tensor, before[section, parameter]), (section, parameter)
    outputs = run_steps(engine, 2, 1)
    assert all(math.isfinite(value) for output in outputs for value in output) and {output[3] for output in outputs} == {0.0}
    if not steps_on:
        assert outputs == run_steps(undisturbed, 2, 1)
        expect_same(state_of(engine), state_of(undisturbed))
