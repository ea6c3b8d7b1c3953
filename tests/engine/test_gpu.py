"""The resident and the sharded engine on a GPU."""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fluxray.config.schema import OptimConfig
from fluxray.engine import cuda_graph
from fluxray.engine.clip import ClipMode
from fluxray.engine.cuda_graph import use_own_stream
from fluxray.engine.parallelize import Techniques
from tests.engine.helpers import (
    EIGHT_BIT,
    OPTIM,
    EngineCase,
    cut,
    expect_close,
    expect_close_values,
    expect_equal,
    model_config,
    sharded_engine,
    train,
)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; deterministic products need it

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

CUDA = torch.device("cuda", 0)
NEOX = EngineCase(model_config("gpt_neox"), device=CUDA)
WIDE = EngineCase(
    model_config("gpt_neox", hidden_size=256, num_hidden_layers=2, hidden_dropout=0.2, attention_dropout=0.2), device=CUDA
)
"""Its matrices are large enough for 8-bit moments."""
DROPPING = EngineCase(model_config("gpt_neox", hidden_dropout=0.2, attention_dropout=0.2), device=CUDA)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "qwen3 tied"])
def test_fp32_on_the_gpu_equals_the_host_from_the_same_weights(family: str) -> None:
    host = sharded_engine(EngineCase(model_config(family)))
    gpu = sharded_engine(EngineCase(model_config(family), device=CUDA))
    _copy_weights(host, gpu)
    actual, expected = train(gpu), train(host)
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 1e-5, "losses")


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16", "mixed-bf16"])
def test_sharded_equals_resident(mesh: DeviceMesh, precision: str) -> None:
    case = replace(NEOX, techniques=Techniques(precision))
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    actual, expected = train(sharded_engine(case, mesh)), train(sharded_engine(case))
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), tolerance, "losses")


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "mixed-bf16"])
@pytest.mark.usefixtures("deterministic")
def test_recomputation_draws_the_same_dropout_bit_for_bit(precision: str) -> None:
    plain, full = (replace(DROPPING, techniques=Techniques(precision, activation_checkpoint=kind)) for kind in ("none", "full"))
    expect_equal(train(sharded_engine(full)), train(sharded_engine(plain)))


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_repeat_bit_for_bit() -> None:
    case = replace(DROPPING, techniques=Techniques("mixed-bf16"))
    expect_equal(train(sharded_engine(case)), train(sharded_engine(case)))


def test_compiled_equals_eager() -> None:
    compiled, eager = (replace(NEOX, techniques=Techniques("fp32", compile=flag)) for flag in (True, False))
    expect_close(train(sharded_engine(compiled)), train(sharded_engine(eager)), loss=1e-5, gradient=1e-5, weight=1e-3)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("optim", [OPTIM, EIGHT_BIT], ids=["adamw", "adam8bit"])
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_what_is_not_finite_changes_neither_weights_nor_moments(
    mesh: DeviceMesh, precision: str, optim: OptimConfig, sharded: bool
) -> None:
    case = replace(WIDE, techniques=Techniques(precision), optim=optim, clip="previous")
    engine, undisturbed = (sharded_engine(case, mesh if sharded else None) for _ in range(2))
    for each in (engine, undisturbed):
        each.train_step(cut(2, 0), OPTIM.lr)
    before = [item.tensor.clone() for item in engine.state_items()]
    intact = engine._loss_fn
    engine._loss_fn = lambda output, batch: intact(output * torch.nan, batch)
    assert engine.train_step(cut(2, 1), OPTIM.lr).withheld.item() == 1
    assert all(torch.equal(item.tensor, old) for item, old in zip(engine.state_items(), before, strict=True))
    engine._loss_fn = intact
    actual, expected = train(engine, num_steps=2, start=1), train(undisturbed, num_steps=2, start=1)
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 1e-4, "losses")


@pytest.mark.parametrize("sharded", [False, True])
def test_8_bit_moments_on_the_gpu_stay_close_to_the_hosts(mesh: DeviceMesh, sharded: bool) -> None:
    case = EngineCase(model_config("gpt_neox", hidden_size=256, num_hidden_layers=2), optim=EIGHT_BIT, device=CUDA)
    host, gpu = sharded_engine(replace(case, device=torch.device("cpu"))), sharded_engine(case, mesh if sharded else None)
    _copy_weights(host, gpu)
    actual, expected = train(gpu), train(host)
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 1e-3, "losses")


@pytest.mark.parametrize("clip", ["exact", "previous", "block"])
@pytest.mark.parametrize("kind", ["adamw", "adam8bit", "paged_adam8bit"])
@pytest.mark.parametrize("precision", ["amp-bf16", "amp-fp16", "mixed-bf16"])
def test_the_host_never_waits_for_the_device_inside_a_step(precision: str, kind: str, clip: ClipMode) -> None:
    techniques = Techniques(precision, activation_checkpoint="full")
    optim = OPTIM.model_copy(update={"kind": kind})
    engine = sharded_engine(replace(WIDE, techniques=techniques, optim=optim, clip=clip))
    micro_batches = [batch.to(CUDA) for batch in cut(2, 0)]
    engine.train_step(micro_batches, OPTIM.lr)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.train_step(micro_batches, OPTIM.lr)
    finally:
        torch.cuda.set_sync_debug_mode("default")


PAGED = OPTIM.model_copy(update={"kind": "paged_adam8bit"})


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.usefixtures("deterministic")
def test_paged_states_are_those_of_8_bit_adam_bit_for_bit(mesh: DeviceMesh, sharded: bool) -> None:
    case, on = replace(WIDE, clip="block"), mesh if sharded else None
    paged, plain = (sharded_engine(replace(case, optim=optim), on) for optim in (PAGED, EIGHT_BIT))
    expect_equal(train(paged), train(plain))
    states = [{(item.section, item.name): item.tensor for item in engine.state_items()} for engine in (paged, plain)]
    assert states[0].keys() == states[1].keys()
    assert all(tensor.is_cuda and torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


def test_paged_states_are_no_memory_of_the_allocator_and_survive_being_pushed_out() -> None:
    case = replace(WIDE, model=model_config("gpt_neox", hidden_size=1024, num_hidden_layers=2, intermediate_size=4096))
    held, traces = [], []
    for optim in (EIGHT_BIT, PAGED):
        gc.collect()
        before = torch.cuda.memory_allocated()
        engine = sharded_engine(replace(case, optim=optim))
        held.append(torch.cuda.memory_allocated() - before)
        traces.append(train(engine, num_steps=2))
        if optim is PAGED:
            pages = engine._optimizer._paged
            for page in pages._pages.values():
                pages._library.prefetch_tensor(page, to_cpu=True)
            torch.cuda.synchronize()
        traces[-1].losses.extend(train(engine, num_steps=2, start=2).losses)
        del engine
    num_large = 2 * 12 * 1024 * 1024  # parameters in the blocks' matrices
    assert held[0] - held[1] == pytest.approx(num_large * (2 + 8 / 256), rel=0.05)
    expect_close_values(torch.tensor(traces[1].losses), torch.tensor(traces[0].losses), 1e-5, "losses")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "adam8bit", "paged_adam8bit"])
@pytest.mark.parametrize("precision", ["amp-bf16", "mixed-bf16"])
@pytest.mark.usefixtures("deterministic")
def test_stepping_in_backward_equals_stepping_after_it_bit_for_bit(
    mesh: DeviceMesh, precision: str, kind: str, sharded: bool
) -> None:
    optim = OPTIM.model_copy(update={"kind": kind})
    techniques = Techniques(precision, activation_checkpoint="full")
    after = replace(WIDE, techniques=techniques, clip="previous", max_norm=0.1, optim=optim)
    inside = replace(after, optim=optim.model_copy(update={"in_backward": True}))
    on = mesh if sharded else None
    expect_equal(train(sharded_engine(inside, on), 1), train(sharded_engine(after, on), 1))


@pytest.mark.parametrize("kind", ["adamw", "adam8bit", "paged_adam8bit"])
def test_stepping_in_backward_takes_the_gradients_of_one_block_and_the_host_never_waits(kind: str) -> None:
    model = model_config("gpt_neox", hidden_size=1024, num_hidden_layers=8, intermediate_size=4096)
    peaks = []
    for in_backward in (False, True):
        optim = OPTIM.model_copy(update={"kind": kind, "in_backward": in_backward})
        engine = sharded_engine(EngineCase(model, Techniques("mixed-bf16"), clip="block", optim=optim, device=CUDA))
        micro_batches = [batch.to(CUDA) for batch in cut(1, 0)]
        engine.train_step(micro_batches, OPTIM.lr)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.train_step(micro_batches, OPTIM.lr)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del engine
        gc.collect()
    block = 12 * 1024 * 1024
    assert peaks[0] > 4 * 8 * block and peaks[1] < 4 * 4 * block


def _copy_weights(source, target) -> None:
    weights = {item.name: item.tensor for item in source.state_items() if item.section == "weights"}
    for item in target.state_items():
        if item.section == "weights":
            item.tensor.copy_(weights[item.name])


@pytest.fixture
def own_stream() -> Iterator[None]:
    before = torch.cuda.current_stream(CUDA)
    use_own_stream(CUDA)
    yield
    torch.cuda.set_stream(before)


GRAPHED = replace(NEOX, clip="previous", max_norm=0.1)


@pytest.mark.parametrize(
    "techniques",
    [
        Techniques("fp32"),
        Techniques("amp-bf16", activation_checkpoint="full"),
        Techniques("amp-fp16"),
        Techniques("mixed-bf16", compile=True),
    ],
    ids=["fp32", "amp-bf16 recomputed", "amp-fp16", "mixed-bf16 compiled"],
)
@pytest.mark.usefixtures("deterministic", "own_stream")
def test_a_graph_gives_the_bits_of_kernel_by_kernel(techniques: Techniques) -> None:
    case = replace(GRAPHED, techniques=techniques)
    expect_equal(train(sharded_engine(case, graphs=True)), train(sharded_engine(case)))


@pytest.mark.usefixtures("deterministic", "own_stream")
def test_each_shape_has_a_graph_and_what_is_too_many_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 1)
    graphed, plain = sharded_engine(GRAPHED, graphs=True), sharded_engine(GRAPHED)
    for step, num_micro_batches in enumerate((4, 2, 4, 2)):
        outputs = [engine.train_step(cut(num_micro_batches, step), OPTIM.lr) for engine in (graphed, plain)]
        assert outputs[0].loss.item() == outputs[1].loss.item()
        assert outputs[0].grad_norm.item() == outputs[1].grad_norm.item()
    assert graphed._graphs is not None and len(graphed._graphs._graphs) == 1
