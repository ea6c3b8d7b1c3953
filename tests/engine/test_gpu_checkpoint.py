"""Activation checkpointing on a GPU: copies on streams of their own, fused attention that draws random numbers, real memory."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from fluxray.engine.parallelize import Techniques
from fluxray.engine.stream_store import StreamSettings
from fluxray.memory.operations import Operation
from tests.engine.helpers import (
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
from tests.engine.stream_helpers import run_steps, stream_engine

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; deterministic products need it

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

CUDA = torch.device("cuda", 0)
LAYERS = 6
SHAPE = {"num_hidden_layers": LAYERS}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
QKV, UP, CORE = Operation("product", 0), Operation("product", 2), Operation("attention", 0)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sqrt": {},
    "every_n": {"checkpoint_every": 2},
    "selective": {"kept_operations": ((QKV, UP),) * LAYERS},
    "offload": {},
}


def checkpointed(case: EngineCase, kind: str, **more: Any) -> EngineCase:
    given = {**KINDS[kind], **more}
    return replace(case, techniques=replace(case.techniques, activation_checkpoint=kind, **given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.usefixtures("deterministic")
def test_no_bit_changes(kind: str, dropout: dict[str, float]) -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE, **dropout), Techniques("mixed-bf16"), device=CUDA)
    expect_equal(train(sharded_engine(checkpointed(plain, kind))), train(sharded_engine(plain)))


@pytest.mark.usefixtures("deterministic")
def test_kept_attention_changes_no_bit_and_is_not_run_again() -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE), Techniques("mixed-bf16"), device=CUDA)
    kept = checkpointed(plain, "selective", kept_operations=((CORE,),) * LAYERS)
    expect_equal(train(sharded_engine(kept)), train(sharded_engine(plain)))
    runs = {kind: attentions(case) for kind, case in {"none": plain, "kept": kept, "full": checkpointed(plain, "full")}.items()}
    assert runs["kept"] == runs["none"] < runs["full"]


def attentions(case: EngineCase) -> int:
    """Return how many kernels' worth of attention forward a step runs, as the profiler sees operators on the host."""
    engine = sharded_engine(case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.train_step(cut(1, 0), OPTIM.lr)
    forward = ("aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward")
    return sum(event.name in forward for event in profile.events())


@pytest.mark.parametrize("kind", ["full", "selective", "offload", "sqrt"])
def test_compiled_equals_eager(kind: str) -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE), device=CUDA)
    compiled = replace(plain, techniques=Techniques("fp32", compile=True))
    actual = train(sharded_engine(checkpointed(compiled, kind)))
    expect_close(actual, train(sharded_engine(plain)), loss=1e-5, gradient=1e-5, weight=1e-3)


def test_inputs_leave_the_device_and_the_host_never_waits_for_it() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 64, "num_attention_heads": 16, "num_hidden_layers": 12}
    held = {}
    for kind in ("full", "offload"):
        engine = sharded_engine(checkpointed(EngineCase(model_config("gpt_neox", **sizes), device=CUDA), kind))
        batch = cut(1, 0)[0].to(CUDA)
        for _ in range(2):
            engine.train_step([batch], OPTIM.lr)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = engine._stack.train()(batch, engine._loss_fn)
        torch.cuda.synchronize()
        held[kind] = torch.cuda.memory_allocated() - before
        output.sum.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.train_step([batch], OPTIM.lr)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert held["full"] - held["offload"] >= 10 * 4 * batch.num_tokens * 1024


@pytest.mark.usefixtures("deterministic")
def test_streamed_blocks_keep_operations_or_send_their_inputs_away_and_no_bit_changes() -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE, **DROPOUT), Techniques("mixed-bf16"), device=CUDA, clip="previous")
    chosen = replace(plain, techniques=replace(plain.techniques, kept_operations=((QKV, UP),) * (LAYERS - 1)))
    expected = run_steps(stream_engine(plain))
    assert run_steps(stream_engine(chosen)) == expected
    assert run_steps(stream_engine(plain, StreamSettings(offload_inputs=True))) == expected
    assert run_steps(stream_engine(plain, StreamSettings(offload_inputs=True), kept_blocks=2)) == expected


@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_the_loss_in_pieces_equals_the_whole(precision: Any) -> None:
    case = EngineCase(model_config("gpt_neox", **SHAPE), Techniques(precision), device=CUDA)
    pieces, whole = (train(sharded_engine(case, chunk_tokens=count)) for count in (16, None))
    tolerance = 1e-5 if precision == "fp32" else 1e-3
    expect_close_values(torch.tensor(pieces.losses), torch.tensor(whole.losses), tolerance, "losses")
