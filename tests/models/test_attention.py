from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fluxray.models import attention
from fluxray.models.attention import Heads, attend, attention_inputs
from fluxray.models.causal_lm import build_causal_lm
from fluxray.models.masks import document_mask
from fluxray.protocols import TextBatch
from tests.models.helpers import CASES, batch_of, build, logits_of, materialised, model_config, shaken, stand_in_for_varlen

BATCHES = {
    "one document a row": batch_of((9,), (9,)),
    "padded": batch_of((12,), (7,), (1,)),
    "packed": batch_of((5, 7), (1, 11), (4, 4, 4)),
    "single token": batch_of((1,)),
}
PLAIN = [case for case in CASES if "dropout" not in case]


def pair(case: str, kernel: Any) -> tuple[Any, Any]:
    """Return a stack under the kernel and one under the library's own function, of the same weights."""
    plain = shaken(build(case)).eval()
    other = materialised(build_causal_lm(model_config(case), 0, kernel=kernel)).eval()
    other.model.load_state_dict(plain.model.state_dict())
    return other, plain


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@torch.no_grad()
@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        *((kernel, case) for kernel in ("flash", "math", "varlen") for case in PLAIN),
        *(("flex", case) for case in ("gpt_neox", "llama grouped", "qwen3 mixed")),
    ],
)
def test_every_kernel_gives_the_librarys_logits(kernel: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_varlen(monkeypatch)
    stack, plain = pair(case, kernel)
    for name, batch in BATCHES.items():
        actual, expected = logits_of(stack, batch), logits_of(plain, batch)
        if name == "padded":
            actual, expected = (logits[batch.document_ids == 0] for logits in (actual, expected))
        if kernel == "flash":
            assert torch.equal(actual, expected), name  # it is what torch chooses on a CPU
        assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max(), name


@pytest.mark.parametrize("case", ["gpt_neox", "llama grouped", "qwen3 mixed"])
@pytest.mark.parametrize("kernel", ["math", "varlen"])
def test_gradients_are_the_librarys(kernel: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_varlen(monkeypatch)
    stacks = pair(case, kernel)
    for stack in stacks:
        logits_of(stack, BATCHES["packed"]).square().mean().backward()
    actual, expected = (dict(stack.model.named_parameters()) for stack in stacks)
    scale = max(parameter.grad.abs().max() for parameter in expected.values())
    assert all((actual[name].grad - parameter.grad).abs().max() <= 1e-6 * scale for name, parameter in expected.items())


@pytest.mark.parametrize("kernel", ["flash", "math", "cudnn", "efficient", "varlen", "flex"])
def test_what_blocks_share_of_a_packed_batch(kernel: Any) -> None:
    batch = batch_of((500, 524), (1024,))
    inputs = attention_inputs(kernel, batch, {"full": None, "sliding": 5})
    largest = max(tensor.numel() for tensor in inputs.values() if tensor is not None)
    if kernel in ("varlen", "flex"):
        assert inputs["mask.full"] is None and inputs["mask.sliding"] is None
        assert largest <= 2 * 1024
    else:
        assert largest == 2 * 1024 * 1024


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_compiled_block_has_no_graph_break(kernel: Any) -> None:
    stack, plain = pair("llama grouped", kernel)
    stack.blocks = stack.blocks[:1]
    plain.blocks = plain.blocks[:1]
    for block in stack.blocks:
        block.module.forward = torch.compile(block.module.forward, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(kernel != "flex"):  # whose backward does not exist on a CPU
        actual, expected = (logits_of(each, BATCHES["packed"]) for each in (stack, plain))
    assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_compiled_code_calls_the_kernel_that_was_named(kernel: str) -> None:
    """On the meta device, where cuDNN's and the GPU's flash operators exist without a GPU."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    query = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")

    def call(query: Tensor) -> Tensor:
        heads = Heads(query, query, query, 1.0)
        return attention._cudnn(heads, 0.0) if kernel == "cudnn" else attention._of_torch("flash", heads, None, 0.0)

    torch.compile(call, fullgraph=True, backend=backend)(query)
    assert [name for name in seen if "attention" in name] == [f"aten._scaled_dot_product_{kernel}_attention"]


def test_cudnn_gets_dense_inputs_and_a_dense_gradient() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func.__name__] = args
            return func(*args, **(kwargs or {}))

    projected = torch.empty(1, 16, 4, 3 * 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    query, key, value = projected.transpose(1, 2).chunk(3, dim=-1)
    shared = value[:, :1].expand(-1, 2, -1, -1)
    with Note():
        output = attention._cudnn(Heads(query, key[:, ::2], shared, 1.0), 0.0)
        output.sum().backward()  # its gradient has strides of zero
    assert projected.grad is not None and output.shape == query.shape
    forward = seen["_scaled_dot_product_cudnn_attention.default"]
    backward = seen["_scaled_dot_product_cudnn_attention_backward.default"]
    for tensor in (*forward[:3], backward[0]):
        _, heads, length, width = tensor.shape
        assert tensor.stride() == (length * heads * width, width, heads * width, 1)


def test_a_compiled_checkpoint_keeps_what_it_was_given_alone_under_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)

    monkeypatch.setattr(attention, "_aten", SimpleNamespace(_scaled_dot_product_cudnn_attention=stand_in))
    weights = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
    hidden = torch.randn(2, 8, 32, requires_grad=True)
    kept: list[int] = []

    def block(hidden: Tensor) -> Tensor:
        query, key, value = ((hidden @ weight).view(2, 8, 4, 8).transpose(1, 2) for weight in weights[:3])
        return attention._cudnn(Heads(query, key, value, 1.0), 0.0).transpose(1, 2).flatten(2) @ weights[3]

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept.append(tensor.numel())
        return tensor

    def run(hidden: Tensor) -> Any:
        return checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = compiled(hidden)
    assert sorted(kept) == sorted([hidden.numel(), *(weight.numel() for weight in weights)])
    gradients = [torch.autograd.grad(each.square().sum(), [hidden, *weights]) for each in (output, block(hidden))]
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_calls_the_kernel_with_places_of_documents_alone(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in_for_varlen(monkeypatch)
    batch = batch_of((5, 7), (4, 4))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 8, generator=generator).transpose(1, 2) for heads in (4, 2, 2))
    inputs = {"cu_seqlens": attention_inputs("varlen", batch, {"k": window})["cu_seqlens.k"]}
    arguments: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}
    actual, _ = attend(None, q, k, v, None, kernel="varlen", **arguments, **inputs)
    mask = document_mask(batch.document_ids, window)
    expected, _ = attend(None, q, k, v, mask, kernel="math", **arguments)
    assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert calls == [(0, 5, 12, 16, 20, 24, 24, 24, 24)]  # five documents, of eight that there is room for


def test_autocast_reaches_the_kernel() -> None:
    stack, plain = pair("qwen3", "math")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = (logits_of(each, BATCHES["packed"]) for each in (stack, plain))
    assert (actual - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_dropout_of_the_plain_kernel_is_drawn_from_the_blocks_seed() -> None:
    stack = materialised(build_causal_lm(model_config("llama dropout"), 0, kernel="math")).train()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(logits_of(stack, BATCHES["packed"]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_on_the_meta_device_every_kernel_counts_alike_but_for_its_mask() -> None:
    tokens = torch.zeros(1, 64, dtype=torch.int64, device="meta")
    batch = TextBatch(tokens, tokens, tokens, tokens, single_document=False, num_valid=0)
    for kernel in attention.KERNELS:
        stack = build_causal_lm(model_config("llama grouped"), 0, kernel=kernel)
        assert logits_of(stack, batch).shape == (1, 64, 96)
