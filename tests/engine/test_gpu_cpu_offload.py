"""Masters, gradients and states that wait on the host, on one GPU: FSDP2 of one rank against the same without offloading."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.config.sampling import EmaConfig
from fluxray.engine.clip import ClipMode
from fluxray.engine.parallelize import Techniques
from fluxray.engine.precision import Precision
from fluxray.engine.sharded import ShardedEngine
from fluxray.protocols import RunState, Schedule
from fluxray.runtime.planning import plan_run
from tests.engine.helpers import (
    LENGTH,
    OPTIM,
    VOCABULARY,
    EngineCase,
    broken,
    cut,
    expect_close,
    expect_close_values,
    model_config,
    sharded_engine,
    train,
)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; deterministic products need it

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.usefixtures("deterministic"),
]

CUDA = torch.device("cuda", 0)
NEOX = EngineCase(model_config("gpt_neox"), Techniques("fp32"), device=CUDA)
TOLERANCE: dict[Precision, float] = {"fp32": 1e-6, "amp-bf16": 2e-3, "amp-fp16": 1e-3, "mixed-bf16": 2e-3}


def offloaded(case: EngineCase) -> EngineCase:
    return replace(case, techniques=replace(case.techniques, cpu_offload=True))


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("clip", ["exact", "previous", "block"])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_offloaded_equals_not_offloaded(mesh: DeviceMesh, precision: Precision, clip: ClipMode, num_micro_batches: int) -> None:
    """The first loss and the gradients come from the same kernels; the step rounds elsewhere on a CPU than on a GPU."""
    case = replace(NEOX, techniques=Techniques(precision, activation_checkpoint="full"), clip=clip, max_norm=0.1)
    actual, expected = (train(sharded_engine(one, mesh), num_micro_batches) for one in (offloaded(case), case))
    assert actual.losses[0] == expected.losses[0]
    if precision == "fp32":
        expect_close(actual, expected, gradient=1e-5)
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), TOLERANCE[precision], "losses")
    expect_close_values(torch.tensor(actual.norms), torch.tensor(expected.norms), 10 * TOLERANCE[precision], "norms")


def test_everything_that_a_step_keeps_is_on_the_host(mesh: DeviceMesh) -> None:
    engine = sharded_engine(offloaded(replace(NEOX, ema=EmaConfig(decay=0.9), clip="previous")), mesh)
    output = engine.train_step(cut(2, 0), OPTIM.lr)
    assert all(item.tensor.device.type == "cpu" for item in engine.state_items())
    assert output.loss.is_cuda and {p.device.type for p in engine._masters.named.values()} == {"cpu"}
    assert all(parameter.is_pinned() for parameter in _shards(engine))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_changes_neither_weights_nor_moments(mesh: DeviceMesh, what: str) -> None:
    engine = sharded_engine(offloaded(NEOX), mesh)
    engine.train_step(cut(2, 0), OPTIM.lr)
    before = [item.tensor.clone() for item in engine.state_items()]
    with broken(engine, what):
        assert engine.train_step(cut(2, 1), OPTIM.lr).withheld.item() == 1
    assert all(torch.equal(item.tensor, old) for item, old in zip(engine.state_items(), before, strict=True))
    assert engine.train_step(cut(2, 1), OPTIM.lr).withheld.item() == 0


def test_a_gradient_that_overflows_halves_the_scale(mesh: DeviceMesh) -> None:
    engine = sharded_engine(offloaded(replace(NEOX, techniques=Techniques("amp-fp16"))), mesh)
    with broken(engine, "gradient"):
        first = engine.train_step(cut(1, 0), OPTIM.lr)
    second = engine.train_step(cut(1, 0), OPTIM.lr)
    assert first.loss_scale is not None and second.loss_scale is not None
    assert first.withheld.item() == 1 and second.loss_scale.item() == first.loss_scale.item() / 2


@pytest.mark.parametrize("first_offloaded", [False, True])
def test_a_checkpoint_goes_from_one_to_the_other_bit_for_bit(mesh: DeviceMesh, first_offloaded: bool, tmp_path: Path) -> None:
    case = replace(NEOX, ema=EmaConfig(decay=0.9), clip="previous", techniques=Techniques("amp-fp16"))
    before, after = (offloaded(case), case) if first_offloaded else (case, offloaded(case))
    engine, other = sharded_engine(before, mesh), sharded_engine(after, mesh)
    whole = train(engine, num_steps=2)
    state = RunState(0, Schedule("constant", OPTIM.lr, 0, 4, 0.0), step=2)
    reader = checkpoint.CheckpointReader(checkpoint.save(tmp_path, state, engine.state_items()))
    assert list(other.load_items(reader)) == []
    for item in other.state_items():
        assert torch.equal(item.tensor.cpu(), reader.read(item.section, item.name)), f"{item.section} of {item.name}"
    actual, expected = train(other, num_steps=2, start=2), train(engine, num_steps=2, start=2)
    assert actual.losses[0] == expected.losses[0] < whole.losses[0]
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 1e-3, "losses")


def test_evaluation_and_averages_compute_with_what_is_on_the_host(mesh: DeviceMesh) -> None:
    case = replace(NEOX, ema=EmaConfig(decay=0.9))
    engines = [sharded_engine(one, mesh) for one in (offloaded(case), case)]
    found = []
    for engine in engines:
        train(engine, num_steps=2)
        plain = engine.eval_steps(cut(1, 0))[0].sum.item()
        with engine.averaged():
            averaged = engine.eval_steps(cut(1, 0))[0].sum.item()
        assert engine.eval_steps(cut(1, 0))[0].sum.item() == plain != averaged
        found.append(torch.tensor([plain, averaged]))
    expect_close_values(*found, 1e-5, "evaluations")


def test_bytes_are_those_of_the_plan(mesh: DeviceMesh) -> None:
    shape = {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 4096}
    model = model_config("gpt_neox", **shape)
    config = resolve(
        "fsdp8",
        None,
        {
            "model.config": dict(model.config),
            "resources.num_workers": 1,
            "engine.cpu_offload": True,
            "data.max_slice": LENGTH,
            "data.vocab_size": VOCABULARY * 3,
            "batch.micro_size": 4,
            "batch.accumulation_steps": 2,
            "compile": False,
            **{f"hardware.{key}": 10**12 for key in ("device_memory", "host_memory", "link", "memory_bandwidth")},
            "hardware.tflops": 100,
        },
    )
    planned = plan_run(config).bytes
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory.reset_peak_host_memory_stats()
    device, host = torch.cuda.memory_allocated(), _pinned("current")
    engine = sharded_engine(offloaded(EngineCase(model, Techniques("mixed-bf16"), device=CUDA)), mesh)
    assert _pinned("current") - host == planned.host["weights"]
    micro_batches = cut(2, 0)
    engine.train_step(micro_batches, OPTIM.lr)
    one_gradient = 4 * 4 * 1024 * 1024
    assert _pinned("peak") - host == planned.host["weights"] + planned.host["gradients"] - one_gradient
    held, num_parameters = torch.cuda.memory_allocated() - device, sum(p.numel() for p in engine._masters.named.values())
    assert held < 0.05 * 4 * num_parameters
    beside = ("CUDA context", "workspaces")
    on_device = sum(count for name, count in planned.device.items() if name not in beside)
    assert torch.cuda.max_memory_allocated() - device <= on_device + 2**20


def _pinned(what: str) -> int:
    return torch.cuda.memory.host_memory_stats()[f"active_bytes.{what}"]


def _shards(engine: ShardedEngine) -> list[torch.Tensor]:
    return [item.tensor for item in engine.state_items() if item.section == "weights"]
