"""Running the parts of a block stack: each call by itself, so that a graph never spans two blocks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluxray.engine.precision import Precision, autocast
from fluxray.protocols import Batch, BlockStack, LossFn, State

Tensors = tuple[Tensor, ...]


class Graph(NamedTuple):
    """One block's forward of one micro-batch: the leaves that it began with, and the carry behind the block."""

    leaves: State
    carry: Tensors


class Computation:
    """Prologue, blocks and epilogue of a stack under one cast policy."""

    def __init__(self, stack: BlockStack, loss_fn: LossFn, device: torch.device, precision: Precision, epilogue_tokens: int):
        self.stack = stack
        self.device = device
        self._loss_fn = loss_fn
        self._precision: Precision = precision
        self._epilogue_tokens = epilogue_tokens

    def prologue(self, batch: Batch) -> State:
        """Return what goes into the first block."""
        with self._autocast():
            return self.stack.prologue(batch)

    def block(self, index: int, state: State) -> State:
        """Return the state behind a block."""
        with self._autocast():
            return self.stack.blocks[index](state)

    def differentiable_block(self, index: int, state: State, shared_names: Sequence[str]) -> Graph:
        """Run a block on a graph of its own."""
        leaves = with_leaves(state, shared_names)
        with torch.enable_grad():
            return Graph(leaves, self.block(index, leaves).carry)

    def output(self, state: State, batch: Batch) -> Tensor:
        """Return the model's output."""
        return self._epilogue(state, batch, lambda output, _: output)

    def loss(self, state: State, batch: Batch) -> Tensor:
        """Return the summed loss (fp32 scalar), taken piece by piece."""
        total = torch.zeros((), device=self.device)
        for piece, part in self.stack.epilogue_pieces(state, batch, self._epilogue_tokens):
            total += self._epilogue(piece, part, self._loss_fn).sum
        return total

    def backward_loss(
        self,
        state: State,
        batch: Batch,
        weigh: Callable[[Tensor], Tensor],
        shared_names: Sequence[str],
        each: Callable[[State], None],
    ) -> tuple[Tensor, Tensors]:
        """Return the summed loss, and the gradient by the carry of what `weigh` makes of the loss; piece by piece.

        `each` is called with the leaves of each piece, whose shared tensors have their gradients.
        """
        total = torch.zeros((), device=self.device)
        gradients = tuple(torch.zeros_like(tensor) for tensor in state.carry)
        pieces = self.stack.epilogue_pieces(state, batch, self._epilogue_tokens)
        targets = self.stack.epilogue_pieces(state._replace(carry=gradients), batch, self._epilogue_tokens)
        for (piece, part), (target, _) in zip(pieces, targets, strict=True):
            leaves = with_leaves(piece, shared_names)
            with torch.enable_grad():
                loss = self._epilogue(leaves, part, self._loss_fn).sum
            weigh(loss).backward()
            total += loss.detach()
            for tensor, leaf in zip(target.carry, leaves.carry, strict=True):
                tensor.copy_(gradient_of(leaf))
            each(leaves)
        return total, gradients

    def _epilogue(self, state: State, batch: Batch, loss_fn: Callable[[Tensor, Any], Any]) -> Any:
        with self._autocast():
            return self.stack.epilogue(state, batch, loss_fn)

    def _autocast(self) -> torch.autocast:
        """Return the context of one call."""
        return autocast(self._precision, self.device)


def with_leaves(state: State, shared_names: Sequence[str]) -> State:
    """Return the state cut off from what made it; carry and the named shared tensors begin a new graph."""
    carry = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in state.carry)
    shared = {name: None if tensor is None else tensor.detach() for name, tensor in state.shared.items()}
    for name in shared_names:
        tensor = shared[name]
        assert tensor is not None
        tensor.requires_grad_()
    return State(carry, shared, state.dropout_seed)


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, zero if nothing came to it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
