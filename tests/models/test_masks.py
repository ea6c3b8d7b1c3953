from typing import Any

import pytest
import torch

from fluxray.models.masks import attention_masks, document_mask
from fluxray.protocols import TextBatch
from tests.models.helpers import batch_of, build

ROWS = {"packed": ((5, 7), (1, 11), (4, 4, 4)), "padded": ((12,), (7,), (3, 2)), "one row": ((2, 6),)}


@torch.no_grad()
def librarys_masks(window: int, batch: TextBatch) -> dict[str, torch.Tensor | None]:
    """Return what the library's own forward hands its full and its sliding blocks."""
    stack = build("qwen3 mixed", sliding_window=window).eval()
    seen: dict[str, torch.Tensor | None] = {}
    blocks: Any = stack.blocks
    for block in blocks:

        def note(_, __, kwargs, kind=block.kind):
            seen[kind] = kwargs["attention_mask"]

        block.module.register_forward_pre_hook(note, with_kwargs=True)
    stack.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    return seen


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [1, 2, 5, 12, 40])
def test_masks_are_the_librarys(rows: str, window: int) -> None:
    batch = batch_of(*ROWS[rows])
    masks = attention_masks(batch.document_ids, batch.single_document, {"full_attention": None, "sliding_attention": window})
    expected = librarys_masks(window, batch)
    assert masks.keys() == expected.keys()
    for kind, mask in masks.items():
        librarys = expected[kind]
        assert mask is not None and mask.dtype == torch.bool
        assert librarys is not None and torch.equal(mask, librarys), kind


@pytest.mark.parametrize("window", [1, 5, 8, 9, 40])
def test_single_documents_need_a_mask_only_beyond_the_window(window: int) -> None:
    batch = batch_of((8,), (8,))
    assert batch.single_document
    masks = attention_masks(batch.document_ids, True, {"full": None, "sliding": window})
    librarys = librarys_masks(window, batch)
    assert masks["full"] is None and librarys["full_attention"] is None
    sliding = librarys["sliding_attention"]
    assert (masks["sliding"] is None) == (sliding is None) == (window > 8)
    if sliding is not None and masks["sliding"] is not None:
        assert torch.equal(masks["sliding"], sliding.expand(2, -1, -1, -1))


def test_mask_written_out() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert document_mask(documents).int().tolist() == [[expected]]
    expected[4] = [0, 0, 0, 1, 1]
    assert document_mask(documents, window=2).int().tolist() == [[expected]]


def test_every_position_sees_itself() -> None:
    batch = batch_of((1, 1, 3), (5,), (2,))
    for window in (None, 1, 3):
        assert document_mask(batch.document_ids, window).diagonal(dim1=-2, dim2=-1).all()
