"""FLUX's attention kernels and fused projections."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from fluxray.config.schema import Kernel
from fluxray.errors import ConfigError
from fluxray.models import attention, flux_attention, flux_verify, kernels
from fluxray.models.flux_facts import FluxFacts, flux_facts
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.models.flux_verify import check_flux_stack
from fluxray.models.kernels import Setting, candidates, prove
from tests.models.flux_helpers import CASES, CPU, FAMILIES, FLUX2, built, draw_for, flux_config, output_of

FACTS = FluxFacts("flux1", 64, 4096, 768, True, False, 24, 128)
HOST = Setting.of_flux(FACTS, device="cpu", capability=None, dtype=torch.float32, length=600, deterministic=False)
H200 = Setting.of_flux(FACTS, device="cuda", capability=(9, 0), dtype=torch.bfloat16, length=1536, deterministic=False)


def grads(stack: FluxStack, batch: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean square output."""
    output_of(stack, batch).square().mean().backward()
    return {name: p.grad for name, p in stack.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_computes_what_the_library_does(case: str, kernel: Kernel) -> None:
    plain, stack = built(flux_config(case)), built(flux_config(case), kernel=kernel)
    batch = draw_for(flux_config(case), 3)
    actual, expected = output_of(stack, batch), output_of(plain, batch)
    if kernel == "flash":
        assert torch.equal(actual, expected)  # it is what torch chooses on a CPU
    assert (actual - expected).abs().max() <= 2e-6 * expected.abs().max()
    found, others = grads(stack, batch), grads(plain, batch)
    scale = max(gradient.abs().max() for gradient in others.values())
    assert found.keys() == others.keys()
    assert all((found[name] - gradient).abs().max() <= 1e-6 * scale for name, gradient in others.items())


@pytest.mark.parametrize("case", FAMILIES)
def test_kernels_under_autocast(case: str) -> None:
    plain, stack = built(flux_config(case)), built(flux_config(case), kernel="math")
    batch = draw_for(flux_config(case))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = output_of(stack, batch), output_of(plain, batch)
    assert actual.dtype == expected.dtype and (actual - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_the_operator_is_told_that_all_see_all(kernel: Kernel) -> None:
    """On the meta device, where the GPU's operators exist without one."""
    seen: list[tuple[Any, ...]] = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in func.__name__:
                seen.append((func.__name__, [arg for arg in args if isinstance(arg, bool)], kwargs))
            return func(*args, **(kwargs or {}))

    query = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    for causal in (True, False):
        heads = attention.Heads(query, query, query, 1.0, causal)
        with Note():
            attention._cudnn(heads, 0.0) if kernel == "cudnn" else attention._of_torch(kernel, heads, None, 0.0)
    assert [name.split(".")[0] for name, *_ in seen] == [f"_scaled_dot_product_{kernel}_attention"] * 2
    causal, not_causal = (flags for _, flags, _ in seen)
    assert sum(causal) == sum(not_causal) + 1


@pytest.mark.parametrize("case", FAMILIES)
def test_cudnn_gets_dense_tensors_in_compiled_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced on the meta device; where blocks are not compiled `tests/models/test_attention.py` shows it."""

    def attend(_: Any, query: Any, key: Any, value: Any, mask: None, *, kernel: str, scaling: float, causal: bool) -> Any:
        return attention._rows_first(attention._cudnn(attention.Heads(query, key, value, scaling, causal), 0.0)), None

    monkeypatch.setattr(flux_attention, "attend", attend)
    seen: list[tuple[str, bool]] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if "cudnn" in str(node.target):
                tensors: Any = node.args[: 4 if "backward" in str(node.target) else 3]
                for value in (tensor.meta["val"] for tensor in tensors):
                    _, heads, length, width = value.shape
                    dense = value.stride() == (length * heads * width, width, heads * width, 1)
                    seen.append((str(node.target), dense))
        return make_boxed_func(graph.forward)

    axes = [16, 24, 24] if case == "flux1 dev" else [16] * 4
    model = flux_config(case, attention_head_dim=64, axes_dims_rope=axes)
    stack = build_flux(model, 0, "cudnn").to(torch.bfloat16)
    state = stack.prologue(draw_for(model).to(torch.device("meta")))
    for block in stack.blocks:
        block.module.forward = torch.compile(
            block.module.forward, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look)
        )
    stack.run_blocks(state).carry[0].float().square().mean().backward()
    assert len(seen) == 7 * len(stack.blocks)
    assert all(dense for _, dense in seen)


def test_the_librarys_switch_of_the_whole_process_is_left_alone() -> None:
    before = _AttentionBackendRegistry.get_active_backend()
    output_of(built(flux_config("flux1 dev"), kernel="math"), draw_for(flux_config("flux1 dev")))
    assert _AttentionBackendRegistry.get_active_backend() == before


def test_which_kernels_may_serve() -> None:
    assert candidates("auto", HOST) == ["flash", "math"]
    assert candidates("auto", H200) == ["cudnn", "flash", "efficient", "math"]
    assert candidates("auto", replace(H200, capability=(8, 6), dtype=torch.float32)) == ["efficient", "math"]
    for kernel in ("varlen", "flex"):
        for setting, other in ((H200, "flash"), (HOST, "math")):
            with pytest.raises(ConfigError, match=f"^attention: '{kernel}'; .*images are not packed; set attention={other}$"):
                candidates(kernel, setting)


def test_setting_is_of_the_models_own_heads() -> None:
    setting = Setting.of_flux(
        flux_facts(flux_config("flux2 klein")), device="cpu", capability=None, dtype=torch.float32, length=9, deterministic=True
    )
    assert (setting.num_heads, setting.num_shared_heads, setting.head_dim, setting.length) == (2, 2, 8, 9)
    assert not setting.causal and not setting.packed and setting.deterministic


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_proof_wants_attention_of_all_to_all(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(HOST, num_heads=2, num_shared_heads=2, head_dim=16, length=40)
    prove(kernel, small, CPU)
    intact, calls = kernels.attend, iter(range(9))

    def causal_at_first(*args: Any, **kwargs: Any) -> Any:
        return intact(*args, **{**kwargs, "causal": next(calls) == 0})

    monkeypatch.setattr(kernels, "attend", causal_at_first)
    with pytest.raises(RuntimeError, match="its output is off by"):
        prove(kernel, small, CPU)


@pytest.mark.parametrize(("kernel", "fused_qkv"), [(None, False), ("flash", True)])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_compiled_block_has_no_graph_break(case: str, kernel: Kernel | None, fused_qkv: bool) -> None:
    stack = built(flux_config(case, fused_qkv), kernel=kernel)
    batch = draw_for(flux_config(case))
    expected = output_of(stack, batch)
    for block in stack.blocks:
        block.module.forward = torch.compile(block.module.forward, fullgraph=True, backend="eager")
    assert torch.equal(output_of(stack, batch), expected)


@torch.no_grad()
@pytest.mark.parametrize("kernel", [None, "flash"])
@pytest.mark.parametrize("case", CASES)
def test_fused_projections_begin_with_the_same_values_and_compute_the_same(case: str, kernel: Kernel | None) -> None:
    plain, stack = built(flux_config(case)), built(flux_config(case, True), kernel=kernel)
    batch = draw_for(flux_config(case))
    expected = output_of(plain, batch)
    assert (output_of(stack, batch) - expected).abs().max() <= 2e-6 * expected.abs().max()
    separate = dict(plain.model.named_parameters())
    for name, parts in stack.fused.items():
        assert torch.equal(stack.model.get_parameter(name), torch.cat([separate.pop(part) for part in parts]))
    others = {name: p for name, p in stack.model.named_parameters() if name not in stack.fused}
    assert others.keys() == separate.keys() and all(torch.equal(others[name], p) for name, p in separate.items())
    # two of a double block, one of FLUX.1's single blocks, and biases of FLUX.1's
    assert len(stack.fused) == (2 * (2 * 2 + 2) if case.startswith("flux1") else 2 * 2)


def test_fused_projections_where_there_are_none_apart() -> None:
    with pytest.raises(ConfigError, match=r"^model\.fused_qkv: true, but Flux2Transformer2DModel has one projection already"):
        build_flux(flux_config("flux2 klein", True, num_layers=0), 0)


def test_the_check_at_start_covers_fused_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = flux_verify.build_flux

    def swapped(model: Any, seed: int) -> FluxStack:
        stack = intact(model, seed)
        for module in stack.model.modules():
            if model.fused_qkv and hasattr(module, "added_qkv_proj"):
                module.add_k_proj, module.add_v_proj = module.add_v_proj, module.add_k_proj
        return stack

    monkeypatch.setattr(flux_verify, "build_flux", swapped)
    with pytest.raises(RuntimeError, match="fused projections of flux2 differ from the library's forward by"):
        check_flux_stack(flux_config("flux2 klein", True))
    assert FLUX2["num_layers"] == 2
