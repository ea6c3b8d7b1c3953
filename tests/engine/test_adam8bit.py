"""8-bit Adam in the sharded engine, resident and over one rank; tests/engine/test_ranks.py has more ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.engine.parallelize import Techniques
from fluxray.engine.sharded import ShardedEngine
from fluxray.optim.formats import dequantise
from fluxray.optim.states import SMALLEST_QUANTISED
from fluxray.protocols import RunState, Schedule
from tests.engine.helpers import (
    EIGHT_BIT,
    OPTIM,
    EngineCase,
    cut,
    expect_close,
    expect_close_values,
    expect_equal,
    model_config,
    plain_trace,
    sharded_engine,
    train,
)

pytestmark = pytest.mark.usefixtures("process_group")

WIDE = EngineCase(model_config("gpt_neox", hidden_size=256, num_hidden_layers=2, intermediate_size=256))
"""Its matrices are large enough for 8-bit moments."""
NARROW = EngineCase(model_config("gpt_neox"), optim=EIGHT_BIT)
EIGHT = replace(WIDE, optim=EIGHT_BIT)


def build(case: EngineCase, kind: str = "resident") -> ShardedEngine:
    return sharded_engine(case, DeviceMesh("cpu", torch.arange(1)) if kind == "fsdp" else None)


each_kind = pytest.mark.parametrize("kind", ["resident", "fsdp"])


@each_kind
def test_without_a_large_parameter_it_is_adamw(kind: str) -> None:
    expect_close(train(build(NARROW, kind)), plain_trace(NARROW))


@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_resident_equals_sharded_bit_for_bit(precision: str) -> None:
    case = replace(EIGHT, techniques=Techniques(precision))
    resident, sharded = build(case), build(case, "fsdp")
    expect_equal(train(sharded, num_micro_batches=1), train(resident, num_micro_batches=1))
    states = state(resident), state(sharded)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


@each_kind
def test_large_matrices_have_8_bit_moments_and_the_rest_fp32_ones(kind: str) -> None:
    engine = build(EIGHT, kind)
    engine.train_step(cut(1, 0), OPTIM.lr)
    items = {(item.section, item.name): item for item in engine.state_items()}
    quantised = {name for section, name in items if section == "exp_avg_absmax"}
    for name in {name for _, name in items}:
        shape = items["weights", name].shape
        assert (name in quantised) == (len(shape) == 2 and shape[0] * shape[1] >= SMALLEST_QUANTISED)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert items[moment, name].shape == shape == tuple(items[moment, name].tensor.shape)
            assert items[moment, name].tensor.dtype == (torch.uint8 if name in quantised else torch.float32)
            if name in quantised:
                absmax = items[f"{moment}_absmax", name]
                assert absmax.shape == (shape[0], 1) and absmax.tensor.dtype == torch.float32 and bool((absmax.tensor > 0).any())
        assert items["step", name].tensor.item() == 1
    assert quantised


@each_kind
def test_losses_stay_close_to_those_of_adamw(kind: str) -> None:
    actual, expected = train(build(EIGHT, kind), num_steps=8), train(build(WIDE, kind), num_steps=8)
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 5e-3, "losses")


@each_kind
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_saved_and_loaded_goes_on_bit_for_bit(kind: str, precision: str, tmp_path: Path) -> None:
    case = replace(EIGHT, techniques=Techniques(precision))
    engine = build(case, kind)
    train(engine, num_steps=2)
    reader = save(engine, tmp_path)
    expected = train(engine, num_steps=3, start=2)
    resumed = build(case, kind)
    resumed.train_step(cut(1, 9), OPTIM.lr)
    assert list(resumed.load_items(reader)) == []
    expect_equal(train(resumed, num_steps=3, start=2), expected)


@each_kind
def test_fp32_moments_become_8_bit_ones_which_is_told_and_back(kind: str, tmp_path: Path) -> None:
    engine = build(WIDE, kind)
    train(engine, num_steps=3)
    saved = state(engine)
    narrow = build(EIGHT, kind)
    narrowed = narrow.load_items(save(engine, tmp_path / "wide"))
    held = state(narrow)
    assert set(narrowed) == {name for section, name in held if section == "exp_avg_absmax"} != set()
    for (section, name), tensor in saved.items():
        if section in {"weights", "step"} or name not in narrowed:
            assert torch.equal(held[section, name], tensor), (section, name)
        else:
            values = dequantise(held[section, name], held[f"{section}_absmax", name], section == "exp_avg")
            expect_close_values(values, tensor, 0.06, f"{section} of {name}")
    wide = build(WIDE, kind)
    assert list(wide.load_items(save(narrow, tmp_path / "narrow"))) == []
    for name in narrowed:
        values = dequantise(held["exp_avg", name], held["exp_avg_absmax", name], signed=True)
        assert torch.equal(state(wide)["exp_avg", name], values)
    expected = train(engine, num_steps=2, start=3).losses
    for resumed in (narrow, wide):
        losses = train(resumed, num_steps=2, start=3).losses
        expect_close_values(torch.tensor(losses), torch.tensor(expected), 5e-3, "losses")


@each_kind
def test_what_is_not_finite_changes_nothing(kind: str) -> None:
    engine, undisturbed = build(EIGHT, kind), build(EIGHT, kind)
    for each in (engine, undisturbed):
        each.train_step(cut(2, 0), OPTIM.lr)
    before = state(engine)
    with broken(engine):
        assert engine.train_step(cut(2, 1), OPTIM.lr).withheld.item() == 1
    after = state(engine)
    assert all(torch.equal(after[key], before[key]) for key in before)
    expect_equal(train(engine, num_steps=2, start=1), train(undisturbed, num_steps=2, start=1))


@contextmanager
def broken(engine: Any) -> Iterator[None]:
    intact = engine._loss_fn
    engine._loss_fn = lambda output, batch: intact(output * torch.nan, batch)
    yield
    engine._loss_fn = intact


def state(engine: ShardedEngine) -> dict[tuple[str, str], torch.Tensor]:
    return {(item.section, item.name): item.tensor.detach().clone() for item in engine.state_items()}


def save(engine: ShardedEngine, folder: Path) -> checkpoint.CheckpointReader:
    run_state = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2)
    return checkpoint.CheckpointReader(checkpoint.save(folder, run_state, engine.state_items()))
