"""Activation checkpointing: which block activations are kept for the backward pass, and which are computed again."""

from functools import partial
from typing import Literal

from torch.utils.checkpoint import checkpoint

from fluxray.engine.forward import wrap_forward
from fluxray.protocols import BlockStack


def apply_activation_checkpoint(stack: BlockStack, kind: Literal["none", "full"]) -> None:
    """Make each block keep only its input (`full`; Chen et al., arXiv:1604.06174) or everything (`none`).

    What is checkpointed is `forward`, not the module's call, so hooks (FSDP's among them) fire once per block and pass. The
    random state is not saved: dropout is keyed inside the checkpointed function.
    """
    if kind == "none":
        return
    for block in stack.blocks:
        wrap_forward(block.module, lambda forward: partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False))
