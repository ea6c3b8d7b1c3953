"""What a model is made of and what a row of its input costs, found out on the meta device.

A row is one sample: a sequence of tokens, or an image with its text. FLOPs are those of matrix products and attention, counted by
FlopCounterMode, attention in full whether or not a mask lets kernels skip part of it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from fluxray.memory.frozen import FrozenFlops
from fluxray.memory.live import BlockMemory, flops_again, measure_block
from fluxray.memory.operations import OperationCost, read_operations

NUM_ROWS = (1, 2, 4, 16)
"""Micro-batches of as many rows are measured; what lies between and beyond is on the lines through them."""


class ParameterSpec(NamedTuple):
    """One parameter: its name in the block, or in the model if it is outside the blocks.

    `stands_for` is the number of the model's parameters that bytes are codes of; None where it is made of numbers.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    stands_for: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_parameters(self) -> int:
        """Number of the model's parameters."""
        return self.numel if self.stands_for is None else self.stands_for


@dataclass(frozen=True)
class BlockSpec:
    """One repeated block. `kind` names what it shares with others: class and parameters. `carry_bytes` go into it, per row."""

    name: str
    kind: str
    parameters: tuple[ParameterSpec, ...]
    carry_bytes: int

    @property
    def num_parameters(self) -> int:
        """Number of elements of all its parameters, whatever they are kept in."""
        return sum(parameter.num_parameters for parameter in self.parameters)


@dataclass(frozen=True)
class KindSpec:
    """What a kind of block costs: FLOPs of the forward of one row, and bytes by the number of rows.

    `again_flops` are those of the forward that backward needs once more where only the block's input is kept, and `operations`
    what makes most of them up. `frozen_flops` backward does without, since weights are frozen.
    """

    forward_flops: int
    again_flops: int
    memory: Mapping[int, BlockMemory]
    operations: tuple[OperationCost, ...] = ()
    frozen_flops: int = 0

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward of one row, what it computes again left out."""
        return 2 * self.forward_flops - self.frozen_flops

    def kept(self, num_rows: int) -> int:
        """Return the bytes that autograd keeps of `num_rows` rows between forward and backward."""
        return _on_lines([(rows, memory.kept) for rows, memory in self.memory.items()], num_rows)

    def peak(self, num_rows: int) -> int:
        """Return the most bytes that forward and backward of `num_rows` rows hold at once."""
        return _on_lines([(rows, memory.peak) for rows, memory in self.memory.items()], num_rows)


@dataclass(frozen=True)
class ModelSpec:
    """A model as blocks and the rest.

    `row_tokens` positions make a row. Per row: `outside_flops` of prologue and epilogue (forward), `outside_frozen_flops` that
    their backward does without, `shared_bytes` of what all blocks read. `num_outputs` numbers come out per position: the
    vocabulary of a language model. `has_dropout` tells whether any dropout is above zero. `tied` parameters have more than one
    place and count once. Rows come in `num_sizes` sizes, of which a micro-batch has one; a row is one of the largest, which
    `told` says in words.
    """

    blocks: tuple[BlockSpec, ...]
    kinds: Mapping[str, KindSpec]
    outside: tuple[ParameterSpec, ...]
    tied: tuple[str, ...]
    row_tokens: int
    outside_flops: int
    shared_bytes: int
    num_outputs: int
    has_dropout: bool = False
    num_sizes: int = 1
    told: str = ""
    outside_frozen_flops: int = 0

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, tied ones once."""
        return sum(block.num_parameters for block in self.blocks) + sum(parameter.numel for parameter in self.outside)

    @property
    def num_trained(self) -> int:
        """Number of elements of the parameters that are trained."""
        units = (*(block.parameters for block in self.blocks), self.outside)
        return sum(parameter.numel for parameters in units for parameter in parameters if parameter.trained)

    @property
    def step_flops(self) -> int:
        """FLOPs of forward and backward of one row, nothing computed again."""
        blocks = [self.kinds[block.kind] for block in self.blocks]
        inside = sum(kind.forward_flops + kind.backward_flops for kind in blocks)
        return 3 * self.outside_flops - self.outside_frozen_flops + inside

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward of one row."""
        return self.outside_flops + sum(self.kinds[block.kind].forward_flops for block in self.blocks)


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def read_spec(model: nn.Module, blocks: Sequence[str], forward: Callable[[int], Tensor], row_tokens: int) -> ModelSpec:
    """Return the spec of a meta model whose repeated blocks are the modules at `blocks`, in the dtype it computes in.

    `forward(num_rows)` runs the whole model on a batch of so many rows and returns its output [rows, positions, outputs].
    """
    modules = [model.get_submodule(name) for name in blocks]
    kinds = _kinds(modules)
    with torch.no_grad():
        counter = FlopCounterMode(display=False)
        with counter, FrozenFlops(model) as frozen:
            calls, output = _calls_of(modules, lambda: forward(1))
        doubled, _ = _calls_of(modules, lambda: forward(2))
    costs: dict[str, KindSpec] = {}
    for index, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
        if kind not in costs:
            stretched = {num_rows: _stretch(calls[index], doubled[index], num_rows) for num_rows in NUM_ROWS}
            memory = {num_rows: measure_block(module, *call) for num_rows, call in stretched.items()}
            one, again = calls[index], flops_again(module, *calls[index])
            forward_flops, saved = _forward_flops(module, one)
            costs[kind] = KindSpec(forward_flops, again, memory, read_operations(module, *one), saved)
    shared = _shared(calls)
    carries = [_num_bytes([t for t in call.tensors() if id(t) not in shared]) for call in calls]
    inside = tuple(f"{name}." for name in blocks)
    return ModelSpec(
        blocks=tuple(
            BlockSpec(name, kind, _parameters(module), carry)
            for name, kind, module, carry in zip(blocks, kinds, modules, carries, strict=True)
        ),
        kinds=costs,
        outside=tuple(parameter for parameter in _parameters(model) if not parameter.name.startswith(inside)),
        tied=_tied(model),
        row_tokens=row_tokens,
        outside_flops=counter.get_total_flops() - sum(costs[kind].forward_flops for kind in kinds),
        shared_bytes=_num_bytes(shared.values()),
        num_outputs=output.shape[-1],
        outside_frozen_flops=frozen.count - sum(costs[kind].frozen_flops for kind in kinds),
    )


def _calls_of(modules: Sequence[nn.Module], forward: Callable[[], Tensor]) -> tuple[list[_Call], Tensor]:
    calls: list[_Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(args, kwargs))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        output = forward()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(calls) == len(modules)
    return calls, output


def _forward_flops(module: nn.Module, call: _Call) -> tuple[int, int]:
    """Return the FLOPs of a forward, and those that backward saves."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), FrozenFlops(module) as frozen:
        module(*call.args, **call.kwargs)
    return counter.get_total_flops(), frozen.count


def _shared(calls: Sequence[_Call]) -> dict[int, Tensor]:
    """Return the tensors that more than one block reads, by id. What one alone reads counts as handed to it: an upper bound."""
    readers = Counter(key for call in calls for key in {id(t) for t in call.tensors()})
    return {id(t): t for call in calls for t in call.tensors() if readers[id(t)] > 1}


def _kinds(modules: Sequence[nn.Module]) -> list[str]:
    """Name each module's kind: its class, with a number where blocks of one class have other parameters."""
    found: dict[str, list[tuple[ParameterSpec, ...]]] = {}
    names: list[str] = []
    for module in modules:
        name, structure = type(module).__name__, _parameters(module)
        structures = found.setdefault(name, [])
        if structure not in structures:
            structures.append(structure)
        number = structures.index(structure) + 1
        names.append(name if number == 1 else f"{name}.{number}")
    return names


def _parameters(module: nn.Module) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(name, tuple(p.shape), p.requires_grad, None if p.is_floating_point() else _stands_for(module, name))
        for name, p in module.named_parameters()
    )


def _stands_for(module: nn.Module, name: str) -> int:
    """Return how many weights of a frozen linear layer an array of bytes holds the codes of; 0 for what scales them."""
    path, _, leaf = name.rpartition(".")
    layer = module.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer.in_features * layer.out_features if leaf == "weight" else 0


def _tied(model: nn.Module) -> tuple[str, ...]:
    once = {name for name, _ in model.named_parameters()}
    again = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in once}
    return tuple(name for name, p in model.named_parameters() if id(p) in again)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _stretch(one: _Call, two: _Call, num_rows: int) -> _Call:
    """Return the inputs of a block for `num_rows` rows, given those for one and for two."""

    def leaf(first: Any, second: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        shape = [a + (b - a) * (num_rows - 1) for a, b in zip(first.shape, second.shape, strict=True)]
        return first.new_empty(shape)

    return _Call(*tree_map(leaf, tuple(one), tuple(two)))


def _on_lines(points: Sequence[tuple[int, int]], x: int) -> int:
    """Return the height at `x` of the line through the two points around it, or through the last two."""
    points = sorted(points)
    right = min(max(bisect_left([at for at, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(0, y0 + (y1 - y0) * (x - x0) // (x1 - x0))
