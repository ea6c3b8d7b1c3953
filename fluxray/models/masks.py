"""Attention masks built from document numbers on the device, without waiting for it.

The library derives the same masks from position_ids, but asks the device whether a row is packed (one synchronisation a forward)
and has renamed the arguments of its mask functions between versions.
"""

import torch
from torch import Tensor


def document_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Return the bool mask [B, 1, S, S] that is true where query position i may attend to key position j.

    That is j <= i, both in the same document (`document_ids` int64 [B, S]), and i - j < `window` if one is given.
    """
    position = torch.arange(document_ids.shape[1], device=document_ids.device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    same_document = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same_document & visible


def attention_masks(document_ids: Tensor, single_document: bool, windows: dict[str, int | None]) -> dict[str, Tensor | None]:
    """Return the mask of each kind of block in `windows`, which maps its name to its sliding window (None: full attention).

    None stands for the plain causal mask, which attention kernels know without being given one.
    """
    length = document_ids.shape[1]
    return {
        name: None if single_document and (window is None or length < window) else document_mask(document_ids, window)
        for name, window in windows.items()
    }
