"""Activation checkpointing: which block activations are kept for the backward pass, and which are computed again."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint

from fluxray.engine.forward import wrap_forward
from fluxray.protocols import Block, BlockStack


def apply_activation_checkpoint(stack: BlockStack, kind: Literal["none", "full"]) -> None:
    """Make each block keep only its input (`full`; Chen et al., arXiv:1604.06174) or everything (`none`)."""
    if kind == "full":
        checkpoint_blocks(stack.blocks)


def checkpoint_blocks(blocks: Sequence[Block]) -> None:
    """Make the blocks keep only their inputs.

    What is checkpointed is `forward`, not the module's call, so hooks (FSDP's among them) fire once per block and pass. The
    random state is not saved: dropout is keyed inside the checkpointed function.
    """
    for block in blocks:
        wrap_forward(block.module, _checkpointed)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
