from itertools import islice

import numpy as np
import pytest
import torch

from fluxray.data.batching import (
    WINDOW,
    bucketed_batches,
    bucketed_order,
    collate_text,
    cut_buckets,
    cut_rounds,
    global_batches,
    grouped_order,
    padding_share,
    rank_micro_batches,
    sample_order,
    without_targets,
)
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


def some_lengths(num_rows, seed=0):
    return np.random.default_rng(seed).integers(1, 500, num_rows)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_rows", "global_size"), [(7, 3), (64, 4), (3, 8), (1, 5), (1000, 4), (4 * WINDOW + 3, 4)])
def test_grouping_draws_every_sample_once_an_epoch_and_resumes_anywhere(num_rows, global_size, seed):
    lengths = some_lengths(num_rows, seed)
    count = 5 + 3 * num_rows // global_size
    whole = list(islice(global_batches(num_rows, global_size, seed, lengths=lengths), count))
    drawn = [sample for samples, _, _ in whole for sample in samples]
    assert {len(samples) for samples, _, _ in whole} == {global_size}
    for epoch in range(len(drawn) // num_rows):
        of_epoch = drawn[epoch * num_rows : (epoch + 1) * num_rows]
        assert {sample.epoch for sample in of_epoch} == {epoch}
        assert sorted(sample.index for sample in of_epoch) == list(range(num_rows))
    for done in range(1, count, 1 + count // 7):
        _, epoch, position = whole[done - 1]
        assert list(islice(global_batches(num_rows, global_size, seed, epoch, position, lengths), count - done)) == whole[done:]


def test_grouped_batches_ascend_come_in_any_order_and_differ_between_epochs():
    lengths, global_size = some_lengths(70 * 8 + 3), 8
    firsts = []
    for samples, _, _ in islice(global_batches(len(lengths), global_size, 1, lengths=lengths), 200):
        of_batch = lengths[[sample.index for sample in samples]]
        if len({sample.epoch for sample in samples}) == 1:
            assert np.all(np.diff(of_batch) >= 0) and of_batch[-1] - of_batch[0] <= 60  # 50 batches share 500 lengths
            firsts.append(of_batch[0])
        else:
            assert of_batch.max() <= 60  # what two epochs share are short rows of both
    rising = np.mean(np.diff(firsts) > 0)
    assert 0.3 < rising < 0.7
    orders = [grouped_order(lengths, global_size, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] and orders[0] != orders[2]


def some_buckets(num_rows, seed=0):
    """Buckets of very different sizes, one of them empty."""
    return np.random.default_rng(seed).choice([0, 1, 3, 4], num_rows, p=[0.6, 0.3, 0.08, 0.02])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_rows", "global_size"), [(7, 3), (64, 4), (3, 8), (1, 5), (1000, 16), (203, 8)])
def test_buckets_draw_every_sample_once_an_epoch_and_resume_anywhere(num_rows, global_size, seed):
    buckets = some_buckets(num_rows, seed)
    count = 5 + 3 * num_rows // global_size
    whole = list(islice(bucketed_batches(buckets, global_size, seed), count))
    drawn = [sample for samples, _, _ in whole for sample in samples]
    assert {len(samples) for samples, _, _ in whole} == {global_size}
    for epoch in range(len(drawn) // num_rows):
        of_epoch = drawn[epoch * num_rows : (epoch + 1) * num_rows]
        assert {sample.epoch for sample in of_epoch} == {epoch}
        assert sorted(sample.index for sample in of_epoch) == list(range(num_rows))
    for done in range(1, count, 1 + count // 7):
        _, epoch, position = whole[done - 1]
        assert list(islice(bucketed_batches(buckets, global_size, seed, epoch, position), count - done)) == whole[done:]


@pytest.mark.parametrize("seed", range(5))
def test_global_batches_have_one_bucket_as_far_as_it_goes_and_come_in_any_order(seed):
    global_size, epochs = 8, 6
    buckets = some_buckets(203, seed)
    wanted = sum(int(count) // global_size for count in np.bincount(buckets))
    num_pure, places = 0, []
    for number, (samples, _, _) in enumerate(islice(bucketed_batches(buckets, global_size, seed), 203 * epochs // global_size)):
        of_batch = buckets[[sample.index for sample in samples]]
        epochs_in_it = [sample.epoch for sample in samples]
        for epoch in set(epochs_in_it):
            assert np.all(np.diff(of_batch[np.equal(epochs_in_it, epoch)]) >= 0), "neighbours are of one bucket"
        num_pure += len(set(of_batch.tolist())) == 1
        places += [number % (203 // global_size)] if of_batch[0] != of_batch[-1] else []
    assert num_pure >= (wanted - 1) * epochs
    assert np.ptp(places) > 10, "mixed batches stand anywhere"
    orders = [bucketed_order(buckets, global_size, of_seed, epoch).tolist() for of_seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_one_bucket_is_never_mixed_and_all_of_it_is_shuffled():
    seen = set()
    for samples, _, _ in islice(bucketed_batches(np.zeros(50, np.int64), 8, seed=1), 100):
        seen.add(tuple(sample.index for sample in samples))
    assert len(seen) == 100


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_by_buckets_has_one_bucket_a_round(seed):
    random = np.random.default_rng(seed)
    num_ranks, max_rows, max_tokens = int(random.integers(1, 5)), int(random.integers(1, 9)), int(random.integers(500, 3000))
    buckets = np.sort(some_buckets(int(random.integers(1, 60)), seed)).tolist()
    lengths = [100 + 50 * bucket for bucket in buckets]
    for bounds in ((num_ranks, max_rows), (num_ranks, max_rows, max_tokens)):
        rounds = cut_buckets(lengths, buckets, *bounds)
        assert [index for of_ranks in rounds for share in of_ranks for index in share] == list(range(len(buckets)))
        for of_ranks in rounds:
            assert len(of_ranks) == num_ranks
            assert len({buckets[index] for share in of_ranks for index in share}) == 1
            assert buckets[of_ranks[0].start] in {buckets[index] for share in of_ranks for index in share}, "what stands in"
            sizes = [len(share) for share in of_ranks]
            assert max(sizes) <= max_rows and max(sizes) - min(sizes) <= 1
        of_one = cut_buckets([100] * len(buckets), [7] * len(buckets), *bounds)
        assert of_one == cut_rounds([100] * len(buckets), *bounds)


def test_a_position_beyond_the_cache_is_refused():
    with pytest.raises(DataError, match=r"data\.cache: 5 samples in an epoch, but the run stands at sample 5; resume it on"):
        next(bucketed_batches(np.zeros(5, np.int64), 2, seed=0, position=5))


def test_equal_lengths_are_cut_as_if_there_were_none():
    for num_ranks, micro_size, num_micro_batches in ((1, 8, 4), (2, 4, 3), (3, 2, 1), (4, 1, 2)):
        samples = range(num_ranks * micro_size * num_micro_batches)
        rounds = cut_rounds([64] * len(samples), num_ranks, micro_size, 64 * micro_size)
        for rank in range(num_ranks):
            expected = list(rank_micro_batches(samples, micro_size, rank, num_ranks))
            assert [tuple(of_ranks[rank]) for of_ranks in rounds] == expected
        assert padding_share([64] * len(samples), rounds) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_covers_the_batch_in_order_within_its_bounds(seed):
    random = np.random.default_rng(seed)
    num_ranks, max_rows, max_tokens = int(random.integers(1, 5)), int(random.integers(1, 17)), int(random.integers(500, 3000))
    lengths = np.sort(some_lengths(int(random.integers(1, 100)), seed)).tolist()
    rounds = cut_rounds(lengths, num_ranks, max_rows, max_tokens)
    assert [index for of_ranks in rounds for share in of_ranks for index in share] == list(range(len(lengths)))
    for of_ranks in rounds:
        sizes = [len(share) for share in of_ranks]
        longest = max(lengths[index] for share in of_ranks for index in share)
        assert max(sizes) <= max_rows and (max(sizes) == 1 or max(sizes) * longest <= max_tokens)
        assert max(sizes) - min(sizes) <= (0 if of_ranks is not rounds[-1] else 1)
    positions = sum(
        len(share) * max(lengths[index] for index in share) if share else lengths[of_ranks[0].start]
        for of_ranks in rounds
        for share in of_ranks
    )
    assert padding_share(lengths, rounds) == pytest.approx(1 - sum(lengths) / positions)


def test_short_rows_share_a_micro_batch_and_long_ones_do_not():
    assert cut_rounds([10, 10, 10, 10, 100, 100, 100], 1, 4, 200) == [[range(4)], [range(4, 6)], [range(6, 7)]]
    assert cut_rounds([300, 300], 1, 4, 200) == [[range(1)], [range(1, 2)]]
    assert cut_rounds([10] * 9, 2, 4, 1000)[-1] == [range(8, 8), range(8, 9)]


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
    [([row(4), row(4)], True), ([row(4), row(3)], True), ([row(2, 2), row(4)], False), ([row(1)], True)],
)
def test_single_document_means_no_second_one_beside_padding(rows, single):
    batch = collate_text(rows, None, pad_id=0)
    assert batch.single_document is single
    assert single == all(not any(r.document_ids) for r in rows)


def test_documents_are_counted_over_all_rows_with_their_paddings():
    batch = collate_text([row(4), row(2, 1), row(1, 1, 1)], None, pad_id=0)
    assert batch.num_documents == 1 + 3 + 4 == sum(len(ids.unique()) for ids in batch.document_ids)


def test_zero_weight_row_counts_nothing():
    batch = collate_text([without_targets(row(3)), row(4)], None, pad_id=0)
    assert batch.num_valid == 3
    assert (batch.targets[0] == IGNORE_INDEX).all()
