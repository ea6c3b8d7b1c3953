from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fluxray.models.masks import FLEX_TABLES, attention_masks, document_bounds, document_mask, flex_tables
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


@pytest.mark.parametrize("length", [1, 127, 128, 200, 384, 700])
@pytest.mark.parametrize("window", [None, 1, 5, 130, 300])
def test_tables_are_those_that_torch_makes_from_the_whole_mask(length: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(length)
    document_ids = (torch.rand(3, length, generator=generator) < 0.01).long().cumsum(1)
    document_ids[0] = 0

    def visible(row, _, at, of):
        same = (at >= of) & (document_ids[row, at] == document_ids[row, of])
        return same if window is None else same & (at - of < window)

    expected = create_block_mask(visible, 3, None, length, length, device="cpu")
    for name, table in flex_tables(document_ids, window).items():
        assert torch.equal(table, getattr(expected, name)), name
        assert table.is_contiguous(), f"{name}: the kernel's backward takes no strides of its last dimension"
    assert tuple(flex_tables(document_ids, window)) == FLEX_TABLES


@pytest.mark.parametrize("rows", ROWS)
def test_bounds_are_where_documents_begin_then_the_end_again_and_again(rows: str) -> None:
    batch = batch_of(*ROWS[rows])
    lengths = [int((row == document).sum()) for row in batch.document_ids for document in row.unique()]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert batch.num_documents == len(lengths)
    counted, uncounted = document_bounds(batch.document_ids, len(lengths)), document_bounds(batch.document_ids)
    room = 1 << (len(lengths) - 1).bit_length()
    for bounds, count in ((counted, room), (uncounted, batch.num_tokens)):
        assert bounds.dtype == torch.int32
        assert bounds.tolist() == starts + [batch.num_tokens] * (count + 1 - len(starts))
