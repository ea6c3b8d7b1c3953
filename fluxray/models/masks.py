"""Attention masks, and what stands for them, built from document numbers on the device, without waiting for it.

The library derives the same masks from position_ids, but asks the device whether a row is packed (one synchronisation a forward)
and has renamed the arguments of its mask functions between versions.
"""

import torch
from torch import Tensor

FLEX_BLOCK = 128
"""Positions on a side of a block of FlexAttention's tables."""

FLEX_TABLES = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)
"""Arguments of torch's BlockMask, in their order: by blocks of queries, then of keys, those seen in part and in full."""


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


def document_bounds(document_ids: Tensor, num_documents: int | None = None) -> Tensor:
    """Return where the documents begin in the rows laid one behind the other, and their end: int32 [N + 1].

    `document_ids` [B, S] never decrease in a row. N is `num_documents`, of all rows, rounded up to a power of two, so that few
    shapes occur; the documents that do not exist have no positions. Where their number is not known, every position may be one.
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    number = starts.flatten().cumsum(0) - 1  # which document each position belongs to
    count = document_ids.numel() if num_documents is None else 1 << (num_documents - 1).bit_length()
    wanted = torch.arange(count + 1, device=document_ids.device)
    return torch.searchsorted(number, wanted, out_int32=True)


def flex_tables(document_ids: Tensor, window: int | None = None) -> dict[str, Tensor]:
    """Return FlexAttention's tables (int32) of the mask that `document_mask` describes, without making that mask.

    `document_ids` [B, S] never decrease in a row, so the first and the last of a block tell which documents are in it. The
    numbers of blocks are [B, 1, n], their indices [B, 1, n, n], n = S / FLEX_BLOCK rounded up.
    """
    length = document_ids.shape[1]
    begins = torch.arange(0, length, FLEX_BLOCK, device=document_ids.device)
    ends = (begins + FLEX_BLOCK - 1).clamp(max=length - 1)
    first, last = document_ids[:, begins], document_ids[:, ends]
    earlier = begins[:, None] > begins[None, :]  # [block of queries, block of keys]
    seen = earlier & (last[:, None, :] == first[:, :, None])
    whole = (ends - begins + 1 == FLEX_BLOCK)[:, None]
    full = earlier & whole & (first[:, None, :] == last[:, :, None])
    if window is not None:
        seen &= begins[:, None] - ends[None, :] < window
        full &= ends[:, None] - begins[None, :] < window
    partly = (seen | (begins[:, None] == begins[None, :])) & ~full
    tables = [table for blocks in (partly, full, partly.mT, full.mT) for table in _ordered(blocks[:, None])]
    return dict(zip(FLEX_TABLES, tables, strict=True))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row that are set, and the indices of all, those first."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).contiguous(), order.int().contiguous()  # as the kernel's backward reads them
