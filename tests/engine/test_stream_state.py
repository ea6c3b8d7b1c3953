"""What the stream engine keeps: saved and resumed in every mode and format, across engines, and of exactly the planned size."""

import gc
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fluxray import checkpoint
from fluxray.engine.clip import ClipMode
from fluxray.engine.parallelize import Techniques
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.protocols import Engine, RunState, Schedule
from fluxray.tasks.lm import LmTask
from tests.engine.helpers import EIGHT_BIT, OPTIM, EngineCase, build_stack, expect_close_values, model_config, sharded_engine
from tests.engine.stream_helpers import (
    CLIP_MODES,
    CLIPPED,
    FORMATS,
    WIDE,
    expect_same,
    freeze,
    masters_of,
    moments_of,
    run_steps,
    sharded_of,
    state_of,
    stream_engine,
    stream_of,
)
from tests.engine.two_kinds import TwoKindsStack, square_loss, two_kinds_batches

pytestmark = pytest.mark.usefixtures("one_thread")

SPLIT24 = EngineCase(
    model_config("gpt_neox", hidden_size=256, intermediate_size=64),
    Techniques("mixed-bf16"),
    optim=EIGHT_BIT.model_copy(update={"master": "split24"}),
)
TIED = replace(SPLIT24, model=model_config("qwen3 tied", hidden_size=256, head_dim=64))


def _saved(engine: Engine, folder: Path, step: int = 2) -> checkpoint.CheckpointReader:
    engine.flush()
    state = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=step)
    return checkpoint.CheckpointReader(checkpoint.save(folder, state, engine.state_items()))


@pytest.mark.parametrize("mode", CLIP_MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_resumed_goes_on_bit_for_bit(name: str, mode: ClipMode, tmp_path: Path) -> None:
    case = replace(FORMATS[name], clip=mode, max_norm=CLIPPED)
    engine = stream_engine(case)
    run_steps(engine, 2)
    reader = _saved(engine, tmp_path)
    expected = run_steps(engine, 2, 2)
    resumed = stream_engine(case, StreamSettings(2, 1, resident_blocks=1))
    run_steps(resumed, 1, 9)  # leaves moments, and in mode exact a gradient held back, which loading must replace
    assert resumed.load_items(reader) == []
    assert run_steps(resumed, 2, 2) == expected
    expect_same(state_of(resumed), state_of(engine))


@pytest.mark.parametrize("name", ["fp32", "fp32, 8-bit moments", "fp32 master", "split24"])
def test_the_sharded_engine_goes_on_from_a_streamed_run(name: str, tmp_path: Path) -> None:
    case = FORMATS[name]
    streamed, sharded = stream_engine(case), sharded_engine(replace(case, optim=case.optim.model_copy(update={"master": "fp32"})))
    run_steps(streamed, 2)
    run_steps(sharded, 1, 9)
    assert sharded.load_items(_saved(streamed, tmp_path)) == []
    _expect_same_values(sharded, streamed)
    outputs, expected = run_steps(sharded, 2, 2), run_steps(streamed, 2, 2)
    if case.techniques.precision == "fp32":
        assert outputs[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    assert [output[0] for output in outputs] == pytest.approx([output[0] for output in expected], rel=1e-3)


@pytest.mark.parametrize("name", ["fp32", "fp32, 8-bit moments", "fp32 master"])
def test_a_streamed_run_goes_on_from_the_sharded_engine(name: str, tmp_path: Path) -> None:
    case = FORMATS[name]
    streamed, sharded = stream_engine(case), sharded_engine(case)
    run_steps(sharded, 2)
    run_steps(streamed, 1, 9)
    assert streamed.load_items(_saved(sharded, tmp_path)) == []
    _expect_same_values(streamed, sharded)
    outputs, expected = run_steps(streamed, 2, 2), run_steps(sharded, 2, 2)
    if case.techniques.precision == "fp32":  # a master half way between two bf16 weights goes up here and to the even one there
        assert outputs[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    assert [output[0] for output in outputs] == pytest.approx([output[0] for output in expected], rel=1e-3)


def test_a_narrower_format_names_what_it_has_rounded(tmp_path: Path) -> None:
    sharded, streamed = sharded_engine(FORMATS["fp32 master"]), stream_engine(FORMATS["split24"])
    run_steps(sharded, 2)
    rounded = streamed.load_items(_saved(sharded, tmp_path))
    actual, expected = state_of(streamed), state_of(sharded)
    masters, references = masters_of(actual), masters_of(expected)
    assert set(rounded) == {name for name, weight in masters.items() if weight.ndim > 1}
    for name, reference in references.items():
        expect_close_values(masters[name], reference, 2.0**-16 if name in rounded else 0, name)
    for moment in ("exp_avg", "exp_avg_sq"):
        values = moments_of(actual, moment)
        assert all(torch.equal(values[name], reference) for name, reference in moments_of(expected, moment).items())


def test_a_block_with_frozen_parameters_keeps_its_step_count_across_engines(tmp_path: Path) -> None:
    frozen, case = ("singles.0.down", "doubles.1", "doubles.0.condition.bias"), EngineCase(WIDE)

    def build(streamed: bool) -> Engine:
        stack = TwoKindsStack()
        freeze(stack, frozen)
        return stream_of(stack, square_loss, case) if streamed else sharded_of(stack, square_loss, case)

    for streamed in (True, False):
        first, second = build(streamed), build(not streamed)
        for step in range(2):
            first.train_step(two_kinds_batches(step, 2), OPTIM.lr)
        assert list(second.load_items(_saved(first, tmp_path / str(streamed)))) == []
        for step in (2, 3):
            outputs = [engine.train_step(two_kinds_batches(step, 2), OPTIM.lr) for engine in (first, second)]
            assert outputs[1].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-6)
        masters = masters_of(state_of(second))
        for name, weight in masters_of(state_of(first)).items():
            expect_close_values(masters[name], weight, 1e-5, name)


def _expect_same_values(actual: Engine, expected: Engine) -> None:
    """Assert that masters, moments and step counts are equal bit for bit, in whatever format they are kept."""
    first, second = state_of(actual), state_of(expected)
    pairs = [(masters_of(first), masters_of(second))]
    pairs += [(moments_of(first, moment), moments_of(second, moment)) for moment in ("exp_avg", "exp_avg_sq")]
    pairs += [tuple({name: value for (section, name), value in state.items() if section == "step"} for state in (first, second))]
    for values, references in pairs:
        assert values.keys() == references.keys()
        assert all(torch.equal(values[name], reference) for name, reference in references.items())


def _alive() -> Counter[int]:
    """Return how many storages of each size in bytes there are, apart from empty ones."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter) and thing.device.type != "meta"]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return Counter(size for size in sizes.values() if size)


def _padded(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // 256) * 256


def _split24_bytes(parameters: Iterable[nn.Parameter]) -> tuple[int, int, int]:
    """Return the bytes of weights, of states and of gradients held back."""
    weights = states = held = 0
    for parameter in parameters:
        numel, row = _padded(parameter), prod(parameter.shape[1:])
        quantised = parameter.ndim > 1 and parameter.numel() >= 4096 and row % 256 == 0
        weights += 2 * numel
        if parameter.requires_grad:
            states += (1 if parameter.ndim > 1 else 2) * numel + (2 * numel + 8 * numel // 256 if quantised else 8 * numel)
            held += 2 * numel
    return weights, states, held


@pytest.mark.parametrize("mode", ["exact", "block"])
@pytest.mark.parametrize(("family", "num_resident"), [("neox", 0), ("neox", 1), ("neox", 3), ("tied", 0)])
def test_every_tensor_has_exactly_the_size_of_the_layout(family: str, num_resident: int, mode: ClipMode) -> None:
    case = replace(SPLIT24 if family == "neox" else TIED, clip=mode)
    loss_fn = LmTask(0).loss_fn
    stack = build_stack(case)
    freeze(stack, (stack.blocks[1].name, f"{stack.blocks[2].name}.mlp"))
    run_steps(stream_engine(case), 1)  # fills the caches of the process
    before = _alive()
    engine = stream_of(stack, loss_fn, case, StreamSettings(3, 2, num_resident))
    expected = _expected_sizes(engine, stack, mode, num_resident)
    assert _alive() - before == expected
    run_steps(engine, 2)
    engine.flush()
    assert _alive() - before == expected


def _expected_sizes(engine: StreamEngine, stack: nn.Module, mode: ClipMode, num_resident: int) -> Counter[int]:
    blocks = [list(block.module.parameters()) for block in engine._stack.blocks]
    inside = {id(parameter) for block in blocks for parameter in block}
    outside = [parameter for parameter in stack.parameters() if id(parameter) not in inside]
    sizes = [_split24_bytes(block) for block in blocks]
    held_back = [size[2] if mode == "exact" else 0 for size in sizes]
    resident = {0: [], 1: [1], 3: [0, 1, 2]}[num_resident]
    passing = [i for i in range(3) if i not in resident]
    found = [sizes[i][0] + sizes[i][1] + held_back[i] for i in range(3)]  # the host buffer of each block, or its place here
    assert engine._store.host_bytes == sum(found[i] for i in passing)
    if passing:
        found += [max(sizes[i][0] for i in passing)] * 3 + [max(sizes[i][1] for i in passing)] * 2
        found += [max(held_back[i] for i in passing)] * 2
    found += [2 * max(size[2] for size in sizes)]  # fp32
    weights, states, held = _split24_bytes(outside)
    found += [weights, states, 2 * held]
    found += [4 * parameter.numel() for name, parameter in stack.named_parameters() if name in _tied(stack)]
    found += [4] * (len(blocks) + len(outside) + 3)  # step counts, the average of norms, scale of the loss and its count
    found += [buffer.untyped_storage().nbytes() for buffer in stack.buffers()]
    return Counter(size for size in found if size)


def _tied(stack: nn.Module) -> set[str]:
    names: dict[int, list[str]] = {}
    for name, parameter in stack.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0] for found in names.values() if len(found) > 1}


def test_one_input_of_each_block_and_micro_batch_is_kept_and_freed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, size = stream_engine(SPLIT24), 2 * 16 * 256 * 2  # rows, tokens, hidden size, bytes
    run_steps(engine, 1)
    before, kept = _alive(), []
    intact = engine._backward_blocks

    def watching(*args) -> None:
        kept.append((_alive() - before)[size])
        intact(*args)
        kept.append((_alive() - before)[size])

    monkeypatch.setattr(engine, "_backward_blocks", watching)
    run_steps(engine, 1, 1, num_micro_batches=4)
    assert kept == [3 * 4, 2 * 4]  # blocks, micro-batches; in the end what the prologue gave and its gradient
