"""Attention by a kernel that the run names, and what each kernel reads of a packed batch.

`attend` is what the library's layers call in place of their own attention function. It calls torch's operators themselves instead
of `scaled_dot_product_attention` in a context that allows one backend: what has been named is then what runs, compiled or not,
and also where a block is computed again inside a compiled region, in which a context is not allowed.

    kernel      what it is                                              several documents a row, windows
    flash       FlashAttention-2 (Dao, arXiv:2307.08691)                on a CPU by a mask, not on a GPU
    efficient   Rabe and Staats, arXiv:2112.05682                       by an additive mask [B, H, S, S]
    math        matrix products and a softmax                           by a mask [B, 1, S, S]
    cudnn       cuDNN's fused attention                                 no
    varlen      FlashAttention-2 on documents one behind the other      where documents begin, [documents + 1]; no mask
    flex        FlexAttention (arXiv:2412.05496), a generated kernel    tables of blocks, [B, 1, S / 128, S / 128]; no mask

Shapes: B micro-batch, H heads, S sequence, D head size, T = B S tokens.
"""

from functools import cache
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from fluxray.config.schema import Kernel
from fluxray.models.masks import FLEX_BLOCK, FLEX_TABLES, attention_masks, document_bounds, flex_tables
from fluxray.protocols import TextBatch

NAME = "fluxray"
"""Under which `attend` stands in the library's table of attention functions."""

KERNELS: tuple[Kernel, ...] = get_args(Kernel)

PACKED: tuple[Kernel, ...] = ("varlen", "flex")
"""Kernels for rows of several documents alone; they are causal."""

BIAS_ALIGNMENT = 16
"""Elements to a multiple of which the rows of an additive mask are laid out, as the memory-efficient kernel wants it."""

_aten: Any = torch.ops.aten


def register() -> None:
    """Make `attend` known to the library, without a mask function: prologues make what it reads."""
    AttentionInterface.register(NAME, attend)


def input_names(kernel: Kernel | None) -> tuple[str, ...]:
    """Return the names under which `attend` gets tensors beside the mask."""
    match kernel:
        case "varlen":
            return ("cu_seqlens",)
        case "flex":
            return ("document_ids", *FLEX_TABLES)
        case _:
            return ()


def attention_inputs(kernel: Kernel | None, batch: TextBatch, windows: dict[str, int | None]) -> dict[str, Tensor | None]:
    """Return what the layers' attention reads of a batch, by `name.kind` for each kind of layer in `windows`; `mask` always is.

    Nothing waits for the device. Without a kernel they are the masks of the library's own function.
    """
    found: dict[str, Tensor | None] = {}
    match kernel:
        case "varlen":
            bounds = document_bounds(batch.document_ids, batch.num_documents)
            for kind in windows:
                found |= {f"mask.{kind}": None, f"cu_seqlens.{kind}": bounds}
        case "flex":
            for kind, window in windows.items():
                tables = {"document_ids": batch.document_ids, **flex_tables(batch.document_ids, window)}
                found |= {f"mask.{kind}": None, **{f"{name}.{kind}": table for name, table in tables.items()}}
        case _:
            masks = attention_masks(batch.document_ids, batch.single_document, windows)
            found |= {f"mask.{kind}": mask for kind, mask in masks.items()}
    return found


class Heads(NamedTuple):
    """Queries, keys and values [B, H, S, D], the latter two of fewer heads perhaps, and what scores are multiplied by.

    Where there is no mask, a position sees itself and those before it, or all if attention is not `causal`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    causal: bool = True

    @property
    def are_shared(self) -> bool:
        """Whether queries share heads of keys and values."""
        return self.key.shape[1] != self.query.shape[1]


def attend(  # noqa: PLR0913 - as the library calls its attention functions
    module: Any,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: Kernel,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    causal: bool = True,
    **inputs: Any,
) -> tuple[Tensor, None]:
    """Return causal attention [B, S, H, D] within documents, as the library's attention functions do.

    Keys and values may have fewer heads, each shared by as many consecutive heads of the queries. `attention_mask` is bool
    [B, 1, S, S] or None (plain causal), `inputs` hold what `input_names` says. Queries and keys are cast to the values' dtype:
    under autocast rotary embeddings have widened them. With `causal` false every position sees all; `varlen` and `flex` cannot.
    """
    query, key, value = query_BHSD.to(value_BHSD.dtype), key_BHSD.to(value_BHSD.dtype), value_BHSD
    if kernel == "efficient" or (kernel == "flash" and query.device.type == "cpu"):
        key, value = _all_heads(key, query), _all_heads(value, query)
    heads = Heads(query, key, value, scaling, causal)
    assert causal or kernel not in PACKED, "refused at start"
    if query.device.type == "meta":  # plans and FLOPs: every kernel counts alike, but for its mask
        return _rows_first(_counted(heads, attention_mask, dropout)), None
    match kernel:
        case "varlen":
            found = _varlen(heads, inputs["cu_seqlens"], sliding_window)
        case "flex":
            found = _flex(heads, inputs, sliding_window)
        case "cudnn":
            assert attention_mask is None, "refused at start"
            found = _cudnn(heads, dropout)
        case _:
            found = _of_torch(kernel, heads, attention_mask, dropout)
    return _rows_first(found), None


def _counted(heads: Heads, mask: Tensor | None, dropout: float) -> Tensor:
    query, key, value, scaling, causal = heads
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal and mask is None, scale=scaling, enable_gqa=heads.are_shared
    )


def _of_torch(kernel: Kernel, heads: Heads, mask: Tensor | None, dropout: float) -> Tensor:
    """Call one of the kernels that lie behind `scaled_dot_product_attention`, with a mask that it takes."""
    query, key, value, scaling, causal = heads
    causal = causal and mask is None
    bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    options: dict[str, Any] = {"scale": scaling}
    match kernel:
        case "math":
            options["enable_gqa"] = heads.are_shared
            return _aten._scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, **options)[0]
        case "efficient":
            bias = None if bias is None else _aligned(bias).expand(-1, query.shape[1], -1, -1)
            return _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout, causal, **options)[0]
        case _:
            assert kernel == "flash"
    if query.device.type == "cpu":
        options["attn_mask"] = bias
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, **options)[0]
    assert bias is None, "refused at start"
    return _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, **options)[0]


def _cudnn(heads: Heads, dropout: float) -> Tensor:
    """Call cuDNN with inputs and gradients in the one layout that all its versions take: dense, as [B, S, H, D].

    Compiled, inputs are laid out by plain operations: of an autograd function torch 2.11 keeps the results for backward, inside a
    checkpoint, too. The gradient then comes as traced, dense from the projection behind attention.
    """
    if heads.query.shape[2] == 1:  # it takes no sequence of one position
        return _of_torch("math", heads, None, dropout)
    lay_out = _laid_out if torch.compiler.is_compiling() else _dense
    query, key, value = (lay_out(tensor) for tensor in heads[:3])
    options: dict[str, Any] = {"scale": heads.scaling}
    found = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, dropout, heads.causal, False, **options)[0]
    return found if torch.compiler.is_compiling() else _dense(found)


def _varlen(heads: Heads, bounds: Tensor, window: int | None) -> Tensor:
    """Call FlashAttention's kernel for rows of uneven lengths on all documents of the batch, [T, H, D]."""
    num_rows, _, length, _ = heads.query.shape
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in heads[:3]]
    left, right = (None, None) if window is None else (window - 1, 0)
    options: dict[str, Any] = {"scale": heads.scaling, "window_size_left": left, "window_size_right": right}
    output = _aten._flash_attention_forward(*flat, bounds, bounds, length, length, 0.0, True, False, **options)[0]
    return output.unflatten(0, (num_rows, length)).transpose(1, 2)


def _flex(heads: Heads, inputs: dict[str, Any], window: int | None) -> Tensor:
    document_ids: Tensor = inputs["document_ids"]

    def visible(row: Tensor, head: Tensor, at: Tensor, of: Tensor) -> Tensor:
        same = (at >= of) & (document_ids[row, at] == document_ids[row, of])
        return same if window is None else same & (at - of < window)

    query, key, value, scaling, _ = heads
    length = query.shape[2]
    tables = [inputs[name] for name in FLEX_TABLES]
    blocks = BlockMask((length, length), *tables, BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK), mask_mod=visible)
    run: Any = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
    return run(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=heads.are_shared)


@cache
def _compiled_flex() -> Any:
    """Return FlexAttention compiled by itself: for blocks that are not, since uncompiled it holds all scores."""
    return torch.compile(flex_attention)


def _rows_first(found: Tensor) -> Tensor:
    return found.transpose(1, 2).contiguous()


def _all_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one head for each of the queries'."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _aligned(bias: Tensor) -> Tensor:
    """Return a view of the same shape whose rows are a multiple of BIAS_ALIGNMENT apart."""
    length = bias.shape[-1]
    return F.pad(bias, (0, -length % BIAS_ALIGNMENT))[..., :length]


def _dense(tensor: Tensor) -> Tensor:
    return cast(Any, _Dense).apply(tensor)


class _Dense(torch.autograd.Function):
    """Lays a tensor [B, H, S, D], and the gradient that comes back for it, densely in memory as [B, S, H, D].

    A gradient may arrive broadcast (strides of zero) or as a view of a larger one, which cuDNN's backward has failed on.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _laid_out(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _laid_out(gradients[0])


def _laid_out(tensor: Tensor) -> Tensor:
    dense = tensor.transpose(1, 2).contiguous()
    return dense.view(-1).view(dense.shape).transpose(1, 2)  # also the strides of dimensions of size 1
