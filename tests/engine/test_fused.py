"""Fused projections on every engine: trained alike, saved in the library's names, read from and by runs without them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.engine.fused import FusingReader, split_items
from fluxray.engine.parallelize import Techniques
from fluxray.errors import CheckpointError
from fluxray.protocols import Engine, RunState, Schedule, StateItem
from tests.engine.helpers import (
    EIGHT_BIT,
    EngineCase,
    EngineFactory,
    expect_close,
    fused,
    model_config,
    plain_trace,
    sharded_engine,
    train,
)
from tests.engine.stream_helpers import stream_engine

pytestmark = pytest.mark.usefixtures("process_group")
ENGINES: dict[str, EngineFactory] = {
    "resident": sharded_engine,
    "fsdp": lambda case: sharded_engine(case, DeviceMesh("cpu", torch.arange(1))),
    "stream": stream_engine,
}
WIDE = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2}
"""Its matrices are large enough for 8-bit moments."""


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> EngineFactory:
    return ENGINES[request.param]


def saved(engine: Engine, folder: Path) -> checkpoint.CheckpointReader:
    engine.flush()
    checkpoint.save(folder, RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2), engine.state_items())
    return checkpoint.CheckpointReader(folder / "step_00000002")


def states(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    engine.flush()
    return {(item.section, item.name): item.tensor.detach().clone() for item in engine.state_items()}


@pytest.mark.parametrize("family", ["llama", "qwen3 tied", "gemma3"])
def test_trains_like_the_librarys_model_under_its_names(build: EngineFactory, family: str) -> None:
    case = EngineCase(fused(model_config(family, attention_bias=True)))
    expect_close(train(build(case)), plain_trace(case))


@pytest.mark.parametrize("optim", ["adamw", "adam8bit"])
@pytest.mark.parametrize("order", ["fused first", "fused second"])
def test_all_that_is_kept_crosses_between_runs_bit_for_bit(build: EngineFactory, optim: str, order: str, tmp_path: Path) -> None:
    plain = EngineCase(model_config("llama", **WIDE), Techniques("mixed-bf16"))
    if optim == "adam8bit":
        plain = replace(plain, optim=EIGHT_BIT)
    cases = [replace(plain, model=fused(plain.model)), plain]
    first, second = cases if order == "fused first" else cases[::-1]
    engine = build(first)
    train(engine, num_steps=2)
    before = states(engine)
    other = build(second)
    assert not other.load_items(saved(engine, tmp_path))
    after = states(other)
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert any(section == "exp_avg_absmax" and "k_proj" in name for section, name in after) == (optim == "adam8bit")
    actual, expected = train(other, num_steps=2, start=2), train(engine, num_steps=2, start=2)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-3)  # bf16 products of other shapes


def test_moments_of_other_formats_are_refused(build: EngineFactory, tmp_path: Path) -> None:
    keys = {**WIDE, "head_dim": 8, "num_key_value_heads": 1}  # keys have 8 x 256 elements, queries 32 x 256
    plain = EngineCase(model_config("llama", **keys), optim=EIGHT_BIT)
    engine = build(plain)
    train(engine, num_steps=1)
    with pytest.raises(
        CheckpointError, match=r"^model\.fused_qkv: true, but .* in other formats, .*; set model\.fused_qkv=false"
    ):
        build(replace(plain, model=fused(plain.model))).load_items(saved(engine, tmp_path))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_rows_of_any_number_of_ranks_are_cut_and_joined(num_ranks: int, tmp_path: Path) -> None:
    whole, bias = torch.arange(40.0).view(10, 4), torch.arange(10.0)
    parts = {"q": 5, "k": 2, "v": 3}
    names = {"w": {f"{part}.w": rows for part, rows in parts.items()}, "b": {f"{part}.b": rows for part, rows in parts.items()}}
    size = -(-10 // num_ranks)
    found: dict[str, dict[int, torch.Tensor]] = {}
    for rank in range(num_ranks):
        first = min(rank * size, 10)
        items = [
            StateItem("weights", name, tuple(t.shape), first, t[first : first + size]) for name, t in (("w", whole), ("b", bias))
        ]
        for item in split_items(items, names):
            assert item.offset is not None and item.shape == (parts[item.name[0]], *whole.shape[1:])[: item.tensor.ndim]
            found.setdefault(item.name, {})[item.offset] = item.tensor
    joined = {name: torch.cat([pieces[offset] for offset in sorted(pieces)]) for name, pieces in found.items()}
    assert all(torch.equal(torch.cat([joined[f"{part}.{leaf}"] for part in parts]), t) for leaf, t in (("w", whole), ("b", bias)))

    checkpoint.save(
        tmp_path,
        RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2),
        [StateItem("weights", name, tuple(t.shape), None, t) for name, t in joined.items()],
    )
    reader = FusingReader(checkpoint.CheckpointReader(tmp_path / "step_00000002"), names)
    assert reader.names() == ["b", "w"] and reader.shape("weights", "w") == (10, 4)
    for first in range(0, 10, size):
        assert torch.equal(reader.read("weights", "w", first, min(size, 10 - first)), whole[first : first + size])
    assert reader.read("weights", "w", 10, 0).shape == (0, 4)
    assert torch.equal(reader.read("weights", "b", 0, None), bias)
