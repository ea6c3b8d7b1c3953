"""Counting what a block's forward and backward hold and compute, on the meta device, where nothing is computed."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry


class BlockMemory(NamedTuple):
    """Bytes of one block and some rows: `kept` from forward to backward (outputs included), `peak` during both.

    Parameters and inputs are not counted. The gradients of inputs are, and of the weights' gradients the one that backward
    has just made: each is added to its accumulator and freed at once.
    """

    kept: int
    peak: int


def measure_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockMemory:
    """Run forward and backward of a meta module on meta inputs and return what eager execution would hold.

    Attention counts as a fused kernel. A compiled block holds less.
    """
    args, kwargs = cast(tuple[tuple[Any, ...], dict[str, Any]], tree_map(as_input, (args, kwargs)))
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    trained = [p for p in module.parameters() if p.requires_grad]
    hooks: list[Any] = [cast(Any, p).register_post_accumulate_grad_hook(_free_gradient) for p in trained]
    try:
        with LiveBytes([*given, *module.parameters(), *module.buffers()]) as live, FusedAttention():
            outputs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            kept = live.now
            live.ignore(gradients := [torch.empty_like(output) for output in outputs])
            torch.autograd.backward(outputs, gradients)
    finally:
        for hook in hooks:
            hook.remove()
    return BlockMemory(kept, live.peak)


def flops_again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the FLOPs of the part of a meta module's forward that backward needs where only the inputs are kept.

    That are the operations behind which some tensor lies that autograd saves. A compiler leaves the others out, such as the last
    matrix product of a block, whose output only the next block reads.
    """
    args, kwargs = cast(tuple[tuple[Any, ...], dict[str, Any]], tree_map(as_input, (args, kwargs)))
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(id(tensor.untyped_storage()))
        return tensor

    def give(tensor: Tensor) -> Tensor:
        return tensor

    with Operations() as operations, saved_tensors_hooks(note, give):
        module(*args, **kwargs)
    flops = 0
    for own, read, made in reversed(operations.found):
        if saved & made:
            saved |= read
            flops += own
    return flops


class Operations(TorchDispatchMode):
    """Notes the operations while it is active: the FLOPs of each, the storages that it reads, the storages that it returns."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.found: list[tuple[int, set[int], set[int]]] = []
        self._held: list[object] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = cast(Any, flop_registry).get(cast(Any, func)._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count is not None else 0
        self.found.append((flops, self._storages((args, kwargs)), self._storages(result)))
        return result

    def _storages(self, values: Any) -> set[int]:
        storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        self._held += storages  # so that no id comes twice
        return {id(storage) for storage in storages}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is active: `now`, and at most, `peak`. Those of `known` do not count."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.now = self.peak = 0
        self._seen: dict[int, object] = {}
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen.update({id(storage): storage for storage in self._known})

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting `tensors`: something else has counted them."""
        self.now -= sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        self._seen.update({id(s): s for s in (tensor.untyped_storage() for tensor in tensors)})

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def gone(_: object) -> None:
            if isinstance(self._seen.pop(key), weakref.ref):
                self.now -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class FusedAttention(TorchFunctionMode):
    """Lets attention hold what a fused kernel does instead of the scores, which it would hold on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return cast(Any, _Attention).apply(*(given.get(name) for name in names))


class _Attention(torch.autograd.Function):
    """Shapes and lifetimes of FlashAttention-2 (Dao, arXiv:2307.08691): keeps q, k, v, the output and one fp32 per query.

    Queries [B, H, S, D] lie in memory as [B, S, H, D], and so does what is returned. A boolean mask becomes an additive one of
    the inputs' dtype, as the memory-efficient kernel wants it.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = _new_heads(query, value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        bias = None if mask is None or mask.dtype != torch.bool else mask.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sums, bias)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        gathered = query.new_empty(query.shape, dtype=torch.float32)
        made = tuple(_new_heads(tensor, tensor.shape[-1]) for tensor in (query, key, value))
        del gathered
        return (*made, None)


def _new_heads(like: Tensor, width: int) -> Tensor:
    *batch, heads, length, _ = like.shape
    return like.new_empty((*batch, length, heads, width)).transpose(-3, -2)


def as_input(leaf: Any) -> Any:
    """Return a tensor cut off from what made it, with a gradient if it can have one; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point())


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None
