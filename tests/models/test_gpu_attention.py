"""Attention kernels on a GPU: each against plain mathematics, and that it is the one which runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fluxray.config.schema import Kernel
from fluxray.engine.activation_checkpoint import checkpoint_blocks
from fluxray.engine.parallelize import Techniques, apply_compile
from fluxray.models.attention import KERNELS, attend, attention_inputs
from fluxray.models.flux_stack import build_flux
from fluxray.models.kernels import Setting, candidates, prove
from fluxray.protocols import TextBatch
from tests.engine.helpers import EngineCase, EngineFactory, cut, expect_close_values, model_config, sharded_engine, train
from tests.engine.stream_helpers import stream_engine
from tests.models.flux_helpers import draw_for, flux_config, output_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

CUDA = torch.device("cuda", 0)
ON_GPU = {"flash": "flash", "efficient": "fmha", "cudnn": "cudnn", "varlen": "flash", "flex": "flex"}
"""A part of the name of each kernel's own kernels."""


def setting(**changed: Any) -> Setting:
    capability = torch.cuda.get_device_capability(CUDA)
    return replace(Setting("cuda", capability, torch.bfloat16, False, (), 0.0, 8, 8, 64, 384, False), **changed)


def inputs_of(kernel: Kernel, batch: TextBatch, window: int | None = None) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the mask and what else the kernel reads of a batch."""
    found: dict[str, Any] = {
        name.removesuffix(".k"): tensor for name, tensor in attention_inputs(kernel, batch, {"k": window}).items()
    }
    return found.pop("mask"), found


def able(kernel: Kernel, found: Setting) -> Setting:
    """Return the setting; skips where this GPU has not the kernel."""
    try:
        candidates(kernel, found)
    except Exception as error:  # noqa: BLE001
        pytest.skip(str(error))
    return found


@pytest.mark.parametrize("length", [64, 127, 384, 1024])
@pytest.mark.parametrize(("heads", "shared", "width"), [(8, 8, 64), (8, 2, 128), (4, 4, 96), (4, 1, 64)])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_plain_causal_attention(kernel: Kernel, heads: int, shared: int, width: int, length: int) -> None:
    found = setting(num_heads=heads, num_shared_heads=shared, head_dim=width, length=length)
    prove(kernel, able(kernel, found), CUDA)


@pytest.mark.parametrize("length", [1, 77, 768, 1024])
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (4, 128)])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "math"])
def test_attention_of_all_to_all(kernel: Kernel, heads: int, width: int, length: int) -> None:
    found = setting(num_heads=heads, num_shared_heads=heads, head_dim=width, length=length, causal=False)
    prove(kernel, able(kernel, found), CUDA)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["flux1 dev", "flux2 klein"])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "math"])
def test_flux_blocks_are_differentiated_alike_under_every_kernel(kernel: Kernel, case: str, compiled: bool) -> None:
    axes = [16, 24, 24] if case == "flux1 dev" else [16] * 4
    model = flux_config(case, attention_head_dim=64, axes_dims_rope=axes)
    able(kernel, setting(causal=False))
    torch.compiler.reset()
    batch = draw_for(model, height=16, width=15, num_text=77).to(CUDA)
    gradients = []
    for each in (kernel, None):
        stack = build_flux(model, 0, each)
        for block in (*stack.blocks, None):
            stack.materialise(CUDA, block)
        stack.to(torch.bfloat16)
        checkpoint_blocks(stack.blocks)
        if compiled and each is not None:
            apply_compile(stack)
        output_of(stack, batch).float().square().mean().backward()
        gradients.append({name: parameter.grad.float() for name, parameter in stack.model.named_parameters()})
    scale = max(gradient.abs().max() for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).abs().max() <= 3e-2 * scale, name


@pytest.mark.parametrize("window", [None, 1, 100, 128])
@pytest.mark.parametrize(("heads", "shared", "width"), [(8, 8, 64), (8, 2, 128), (4, 4, 96), (4, 4, 256)])
@pytest.mark.parametrize("kernel", ["efficient", "math", "varlen", "flex"])
def test_packed_rows_and_windows(kernel: Kernel, heads: int, shared: int, width: int, window: int | None) -> None:
    windows = () if window is None else (window,)
    found = setting(num_heads=heads, num_shared_heads=shared, head_dim=width, packed=True, windows=windows, length=500)
    prove(kernel, able(kernel, found), CUDA)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["zero strides", "view of a larger one", "strided inputs"])
def test_cudnn_takes_inputs_and_gradients_of_any_layout(kind: str, rows: int) -> None:
    able("cudnn", setting())
    leaf = torch.randn(rows, 256, 4, 3 * 96, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for kernel in ("cudnn", "math"):
        query, key, value = leaf.transpose(1, 2).chunk(3, dim=-1)
        if kind != "strided inputs":
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output, _ = attend(None, query, key, value, None, kernel=kernel, scaling=96**-0.5)
        loss = output.sum() if kind == "zero strides" else torch.cat([output[:, 100:], output[:, :100]], 1).square().sum()
        results.append(torch.autograd.grad(loss, leaf)[0].float())
    expect_close_values(results[0], results[1], 2e-2, "gradient")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", list(ON_GPU))
def test_the_kernel_that_was_named_is_the_one_that_runs(kernel: Kernel, compiled: bool) -> None:
    found = able(kernel, setting(packed=kernel in ("varlen", "flex")))
    torch.compiler.reset()
    ids = torch.arange(384, device=CUDA).expand(2, -1) // 100
    batch = TextBatch(ids, ids, ids, ids, not found.packed, 0, num_documents=8)
    mask, inputs = inputs_of(kernel, batch)
    leaf = torch.randn(2, 8, 384, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def call(hidden: torch.Tensor) -> torch.Tensor:
        return attend(None, hidden, hidden, hidden, mask, kernel=kernel, scaling=0.125, **inputs)[0]

    run = torch.compile(call, fullgraph=True) if compiled else call

    def once() -> torch.Tensor:
        output = checkpoint(run, leaf, use_reentrant=False)
        output.square().mean().backward()
        return output

    once()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        once()
        torch.cuda.synchronize()
    names = [event.key.lower() for event in seen.key_averages()]
    wanted = "triton" if kernel == "flex" and compiled else ON_GPU[kernel]
    assert any(wanted in name for name in names), names
    if kernel != "cudnn":
        assert not any("cudnn" in name for name in names), names


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_packed_rows_take_no_memory_by_the_square_of_their_length(kernel: Kernel) -> None:
    able(kernel, setting(packed=True))
    length = 16384
    ids = (torch.arange(length, device=CUDA)[None] // 1000).contiguous()
    batch = TextBatch(ids, ids, ids, ids, False, 0, num_documents=17)
    leaf = torch.randn(1, 4, length, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def once() -> None:
        mask, inputs = inputs_of(kernel, batch, 300)
        output, _ = attend(None, leaf, leaf, leaf, mask, kernel=kernel, scaling=0.1, sliding_window=300, **inputs)
        output.sum().backward()

    once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < length * length


@pytest.mark.parametrize("build", [sharded_engine, stream_engine])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "math"])
def test_engines_train_alike_under_every_kernel(kernel: Kernel, compiled: bool, build: EngineFactory) -> None:
    able(kernel, setting(packed=kernel not in ("flash", "cudnn")))
    torch.compiler.reset()
    model = model_config("llama", hidden_size=256, num_hidden_layers=3)
    techniques = Techniques("mixed-bf16", compile=compiled, activation_checkpoint="full")
    engines = [build(EngineCase(model, techniques, device=CUDA, kernel=name)) for name in (kernel, "math")]
    if kernel in ("flash", "cudnn"):  # rows of one document each
        steps = [[_one_document(batch) for batch in cut(2, step)] for step in range(3)]
        losses = [[engine.train_step(batches, 1e-3).loss for batches in steps] for engine in engines]
    else:
        losses = [train(engine, num_steps=3).losses for engine in engines]
    actual, expected = (torch.tensor([float(loss) for loss in each]) for each in losses)
    expect_close_values(actual, expected, 5e-3, "losses")


def _one_document(batch: TextBatch) -> TextBatch:
    positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids).contiguous()
    return replace(batch, position_ids=positions, document_ids=torch.zeros_like(positions), single_document=True)
