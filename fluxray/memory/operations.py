"""Which results of a block are worth keeping for backward: FLOPs spared over bytes held, largest first, under a budget.

Only matrix products and attention are asked about; what lies between them costs little to compute again. The choice is a
knapsack's, taken greedily: items are small against any budget that is worth setting.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fluxray.memory.live import FusedAttention, Operations, as_input

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Operation(NamedTuple):
    """The `number`-th matrix product with a weight, or the `number`-th attention, of a block's forward."""

    kind: Literal["product", "attention"]
    number: int


class OperationCost(NamedTuple):
    """What one operation of a block computes for one row (FLOPs), and the bytes of its result."""

    operation: Operation
    flops: int
    num_bytes: int


def read_operations(module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OperationCost, ...]:
    """Return the operations of a meta module's forward behind which lies a tensor that backward needs, with inputs of one row.

    Attention counts as a fused kernel, with one fp32 number a query beside its output.
    """
    args, kwargs = cast(tuple[tuple[Any, ...], dict[str, Any]], tree_map(as_input, (args, kwargs)))
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(id(tensor.untyped_storage()))
        return tensor

    with _Listed() as listed, _ListedAttention(listed), saved_tensors_hooks(note, lambda tensor: tensor):
        module(*args, **kwargs)
    found: list[OperationCost] = []
    for (flops, read, made), cost in zip(reversed(listed.found), reversed(listed.costs), strict=True):
        if saved & made:
            saved |= read
            if cost is not None:
                found.append(cost._replace(flops=max(flops, cost.flops)))
    return tuple(reversed(found))


def choose_operations(
    blocks: Sequence[str], costs: Mapping[str, Sequence[OperationCost]], num_rows: int, budget: int, has_dropout: bool
) -> tuple[tuple[Operation, ...], ...]:
    """Return for each block, given by its kind, the operations whose results are kept, of `num_rows` rows in `budget` bytes.

    The first that does not fit ends the choice: so blocks of a kind differ in one operation at most, and compiled code has two
    forms. With dropout attention is always computed again: it may draw random numbers, and what is drawn behind it in
    recomputation must not depend on whether it ran.
    """
    ranked = sorted(
        (
            (cost.flops / cost.num_bytes, kind, cost)
            for kind, of_kind in costs.items()
            for cost in of_kind
            if not (has_dropout and cost.operation.kind == "attention")
        ),
        key=lambda item: -item[0],
    )
    kept: list[list[Operation]] = [[] for _ in blocks]
    for _, kind, cost in ranked:
        of_kind = [index for index, name in enumerate(blocks) if name == kind]
        num_kept = min(len(of_kind), budget // (cost.num_bytes * num_rows))
        for index in of_kind[len(of_kind) - num_kept :]:
            kept[index].append(cost.operation)
        budget -= num_kept * cost.num_bytes * num_rows
        if num_kept < len(of_kind):
            break
    return tuple(tuple(sorted(of_block)) for of_block in kept)


class _Listed(Operations):
    """Notes besides which of the operations may be kept: `costs` has an entry, or None, for each that was found."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[OperationCost | None] = []
        self.num_attentions = 0
        self._num_products = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        cost = None
        if func in PRODUCTS:
            cost = OperationCost(Operation("product", self._num_products), 0, _num_bytes(result))
            self._num_products += 1
        self.costs.append(cost)
        return result

    def add_attention(self, given: Sequence[Tensor], result: Tensor, flops: int) -> None:
        """Note an attention whose parts were of no matter."""
        log_sums = 4 * result.numel() // result.shape[-1]
        cost = OperationCost(Operation("attention", self.num_attentions), flops, _num_bytes(result) + log_sums)
        self.num_attentions += 1
        self.costs.append(cost)
        self.found.append((flops, self._storages(given), self._storages(result)))


class _ListedAttention(TorchFunctionMode):
    """Hands each attention to a list, as one operation."""

    def __init__(self, listed: _Listed):
        super().__init__()
        self._listed = listed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        with FusedAttention():
            result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        query, key, value = (cast(Tensor, part) for part in (*args, *kwargs.values())[:3])
        num_scores = query.numel() // query.shape[-1] * key.shape[-2]  # of all heads of the queries, shared keys or not
        self._listed.add_attention(given, result, 2 * num_scores * (query.shape[-1] + value.shape[-1]))
        return result


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
