from itertools import islice

import numpy as np
import pytest
import torch

from fluxray.data.batching import collate_text, global_batches, rank_micro_batches, sample_order, without_targets
from fluxray.data.rows import TextRow
from fluxray.errors import DataError
from fluxray.protocols import IGNORE_INDEX, BatchKey, SampleId


def row(*documents: int) -> TextRow:
    """Return a row of documents of the given lengths."""
    sizes = np.array(documents)
    positions = np.concatenate([np.arange(n) for n in documents])
    ids = np.repeat(np.arange(len(documents)), sizes)
    tokens = 100 + np.arange(sizes.sum())
    targets = np.where(np.append(ids[1:] == ids[:-1], False), tokens + 1, IGNORE_INDEX)
    return TextRow(tokens, targets, ids, positions)


def test_order_is_a_permutation_keyed_by_seed_and_epoch():
    orders = [sample_order(50, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert np.array_equal(orders[0], sample_order(50, 0, 0))


@pytest.mark.parametrize(("num_rows", "global_size"), [(7, 3), (4, 4), (3, 8), (1, 5), (10, 1)])
def test_nothing_is_dropped_or_drawn_twice_within_an_epoch(num_rows, global_size):
    drawn = [sample for samples, _, _ in islice(global_batches(num_rows, global_size, seed=5), 12) for sample in samples]
    assert len(drawn) == 12 * global_size
    for epoch in range(len(drawn) // num_rows):
        of_epoch = drawn[epoch * num_rows : (epoch + 1) * num_rows]
        assert {sample.epoch for sample in of_epoch} == {epoch}
        assert [sample.index for sample in of_epoch] == sample_order(num_rows, 5, epoch).tolist()


@pytest.mark.parametrize("seed", range(10))
def test_resume_from_any_position_equals_the_uninterrupted_run(seed):
    random = np.random.default_rng(seed)
    num_rows, global_size = int(random.integers(1, 20)), int(random.integers(1, 12))
    whole = list(islice(global_batches(num_rows, global_size, seed), 10))
    for done, (_, epoch, position) in enumerate(whole, start=1):
        assert done * global_size == epoch * num_rows + position
        assert position < num_rows
        assert list(islice(global_batches(num_rows, global_size, seed, epoch, position), 10 - done)) == whole[done:]


def test_position_beyond_the_data_is_refused():
    with pytest.raises(DataError, match=r"data\.source: 5 rows in an epoch, but the run stands at row 5"):
        next(global_batches(5, 2, seed=0, position=5))


def test_all_shapes_of_equal_product_see_the_same_global_order():
    samples = tuple(SampleId(0, index) for index in range(24))
    shapes = [(n, m, 24 // (n * m)) for n in (1, 2, 3, 4, 8) for m in (1, 2, 3, 6) if 24 % (n * m) == 0]
    assert len(shapes) > 10
    for num_ranks, micro_size, num_micro_batches in shapes:
        ranks = [list(rank_micro_batches(samples, micro_size, rank, num_ranks)) for rank in range(num_ranks)]
        assert {len(micro_batches) for micro_batches in ranks} == {num_micro_batches}
        in_order = [sample for k in range(num_micro_batches) for rank in range(num_ranks) for sample in ranks[rank][k]]
        assert tuple(in_order) == samples


def test_sample_goes_to_the_stated_rank_and_micro_batch():
    num_ranks, micro_size = 3, 2
    for rank in range(num_ranks):
        for k, share in enumerate(rank_micro_batches(range(24), micro_size, rank, num_ranks)):
            assert all(g // (num_ranks * micro_size) == k and (g // micro_size) % num_ranks == rank for g in share)


def test_ranks_agree_on_the_number_of_micro_batches_of_a_short_batch():
    shares = [list(rank_micro_batches(range(9), 2, rank, 3)) for rank in range(3)]
    assert shares == [[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), ()]]


def test_collation_pads_with_a_document_of_its_own():
    key = BatchKey(0, 0, (SampleId(0, 0), SampleId(0, 1)))
    batch = collate_text([row(2, 3), row(2)], key, pad_id=9)
    assert batch.input_ids.tolist() == [[100, 101, 102, 103, 104], [100, 101, 9, 9, 9]]
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 1, 2]]
    assert batch.targets.tolist()[1] == [101, *[IGNORE_INDEX] * 4]
    assert batch.num_valid == int((batch.targets != IGNORE_INDEX).sum()) == 4
    assert batch.num_tokens == 10
    assert batch.key == key
    for tensor in (batch.input_ids, batch.document_ids, batch.position_ids, batch.targets):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


@pytest.mark.parametrize(
    ("rows", "single"),
    [([row(4), row(4)], True), ([row(4), row(3)], False), ([row(2, 2), row(4)], False), ([row(1)], True)],
)
def test_single_document_means_neither_second_document_nor_padding(rows, single):
    batch = collate_text(rows, None, pad_id=0)
    assert batch.single_document is single
    assert single == (not batch.document_ids.any())


def test_zero_weight_row_counts_nothing():
    batch = collate_text([without_targets(row(3)), row(4)], None, pad_id=0)
    assert batch.num_valid == 3
    assert (batch.targets[0] == IGNORE_INDEX).all()
