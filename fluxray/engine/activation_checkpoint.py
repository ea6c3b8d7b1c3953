"""Activation checkpointing: which activations are kept for the backward pass, and which are computed again or fetched back.

* `none`: a block keeps everything.
* `full`: a block keeps its input, and backward computes each block again.
* `every_n`: one block in n keeps its input, the others everything.
* `sqrt`: of the L blocks, each segment of sqrt(L) keeps its input (Chen et al., arXiv:1604.06174), the last one everything.
* `selective`: a block keeps its input, and results that are dear to compute again (`memory/operations.py` chooses).
* `offload`: as `full`, but the inputs wait on the host (`engine/offload.py`).

The random state is never saved: dropout is keyed inside what is computed again.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fluxray.engine.forward import wrap_forward
from fluxray.memory.checkpointing import segments
from fluxray.memory.operations import PRODUCTS, Operation
from fluxray.protocols import Block, BlockStack, State

ATTENTIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
)
KINDS = {**dict.fromkeys(PRODUCTS, "product"), **dict.fromkeys(ATTENTIONS, "attention")}


def checkpoint_blocks(blocks: Sequence[Block], kept: Sequence[Collection[Operation]] = ()) -> None:
    """Make the blocks keep only their inputs, and of the i-th one the results of the operations `kept[i]`.

    What is checkpointed is `forward`, not the module's call, so hooks (FSDP's among them) fire once per block and pass.
    """
    for index, block in enumerate(blocks):
        wrap_forward(block.module, partial(_checkpointed, kept=frozenset(kept[index] if kept else ())))


def checkpoint_segments(stack: BlockStack) -> None:
    """Make the stack keep only the input of each segment of blocks, and everything in the last: its backward follows at once."""
    *again, last = segments(len(stack.blocks))

    def run_blocks(state: State) -> State:
        for segment in again:
            state = checkpoint(_run, [stack.blocks[i] for i in segment], state, use_reentrant=False, preserve_rng_state=False)
        return _run([stack.blocks[i] for i in last], state)

    stack.run_blocks = run_blocks


def _run(blocks: Sequence[Block], state: State) -> State:
    for block in blocks:
        state = block(state)
    return state


def _checkpointed(forward: Callable[..., Any], kept: frozenset[Operation]) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": _context_maker(kept)} if kept else {}

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return run


@cache
def _context_maker(kept: frozenset[Operation]) -> Callable[[], tuple[Any, Any]]:
    """Return the same function for the same operations, so that blocks which keep the same share compiled code."""
    return partial(_contexts, kept)


def _contexts(kept: frozenset[Operation]) -> tuple[Any, Any]:
    """Return the contexts of one checkpoint's forward and recomputation, between which the results of `kept` are handed on."""
    numbers: dict[tuple[bool, str], int] = defaultdict(int)

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kind = KINDS.get(function)
        if kind is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = numbers[context.is_recompute, kind]
        numbers[context.is_recompute, kind] += 1
        return CheckpointPolicy.MUST_SAVE if (kind, number) in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
