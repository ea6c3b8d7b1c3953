"""The loss of a micro-batch piece by piece, so that only some positions' logits exist at once.

Each piece is differentiated as soon as its loss is known, in the forward pass: no logits are kept, and none are computed again.
What backward hands on is the gradient by the last block's output, put together from the pieces, and the gradients of what lies
behind the blocks (norm, head), summed over the pieces in fp32. Under FSDP2 this runs inside the root's forward, where these
parameters are gathered and stay so.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluxray.engine.accumulate import add_to_sum, begin_sum
from fluxray.engine.stream_compute import with_leaves
from fluxray.engine.stream_store import split_parameters
from fluxray.protocols import BlockStack, LossFn, State


class PieceLoss(NamedTuple):
    """The summed loss (fp32, no gradient), and the scalar that backward begins with."""

    sum: Tensor
    scaled: Tensor


class ChunkedLoss:
    """Takes the place of a stack's epilogue and loss; `num_tokens` positions' logits exist at once."""

    def __init__(self, stack: BlockStack, loss_fn: LossFn, num_tokens: int):
        self._stack = stack
        self._loss_fn = loss_fn
        self._num_tokens = num_tokens

    def total(self, state: State, batch: Any) -> Tensor:
        """Return the summed loss, without gradients."""
        return torch.stack([self._loss(piece, part) for piece, part in self._pieces(state, batch)]).sum()

    def differentiable(self, state: State, batch: Any, scale: Callable[[Tensor], Tensor]) -> PieceLoss:
        """Return the summed loss, and `scale` of it, which is linear, to be differentiated."""
        shared = [name for name, tensor in state.shared.items() if tensor is not None and tensor.requires_grad]
        behind = [parameter for parameter in split_parameters(self._stack)[1].values() if parameter.requires_grad]
        inputs = [*state.carry, *(state.shared[name] for name in shared), *behind]

        def run() -> tuple[PieceLoss, list[Tensor | None]]:
            return self._run(state, batch, scale, shared, behind)

        return PieceLoss(*_Pieces.apply(run, *inputs))

    def _run(
        self, state: State, batch: Any, scale: Callable[[Tensor], Tensor], shared: Sequence[str], behind: Sequence[Tensor]
    ) -> tuple[PieceLoss, list[Tensor | None]]:
        """Return the losses, and the gradients of the scaled one by carry, shared tensors and parameters."""
        by_carry = tuple(torch.zeros_like(tensor) for tensor in state.carry)
        targets = self._pieces(state._replace(carry=by_carry), batch)
        sums: list[Tensor | None] = [None] * (len(shared) + len(behind))
        losses: list[Tensor] = []
        for (piece, part), (target, _) in zip(self._pieces(state, batch), targets, strict=True):
            leaves = with_leaves(piece, shared)
            with torch.enable_grad():
                loss = self._loss(leaves, part)
                wanted = [*leaves.carry, *(leaves.shared[name] for name in shared), *behind]
                found = torch.autograd.grad(scale(loss), wanted, allow_unused=True)
            losses.append(loss.detach())
            for tensor, gradient in zip(target.carry, found, strict=False):
                tensor.copy_(gradient)
            for index, gradient in enumerate(found[len(target.carry) :]):
                sums[index] = _added(sums[index], gradient)
        total = torch.stack(losses).sum()
        return PieceLoss(total, scale(total)), [*by_carry, *sums]

    def _pieces(self, state: State, batch: Any) -> Sequence[tuple[State, Any]]:
        return self._stack.epilogue_pieces(state, batch, self._num_tokens)

    def _loss(self, state: State, batch: Any) -> Tensor:
        return self._stack.epilogue(state, batch, self._loss_fn).sum


class _Pieces(torch.autograd.Function):
    """Calls what computes losses and gradients in forward, and gives the gradients out in backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple[PieceLoss, list[Tensor | None]]], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        losses, ctx.gradients = run()
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        ctx.mark_non_differentiable(losses.sum)
        return losses.sum, losses.scaled

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients[::-1], None
        scaled: list[Tensor | None] = [None]
        for dtype in ctx.dtypes:  # one after the other, each sum freed at once
            gradient = gradients.pop()
            scaled.append(None if gradient is None else gradient.mul_(above[1]).to(dtype))
        return tuple(scaled)


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    if total is None:
        total = torch.empty_like(gradient, dtype=torch.float32)
        begin_sum(total, gradient)
    else:
        add_to_sum(total, gradient)
    return total
