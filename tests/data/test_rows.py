import pickle

import numpy as np
import pytest

from fluxray.data.rows import training_lengths
from fluxray.protocols import IGNORE_INDEX


def predicted(rows):
    """Return the (token, next token) pairs over all rows, sorted."""
    pairs = []
    for row in rows:
        valid = row.targets != IGNORE_INDEX
        pairs.extend(zip(row.input_ids[valid].tolist(), row.targets[valid].tolist(), strict=True))
    return sorted(pairs)


def every_pair(lengths):
    ends = np.cumsum(lengths)
    return [(t, t + 1) for end, length in zip(ends, lengths, strict=True) for t in range(end - length, end - 1)]


def test_packed_rows_tile_the_stream_and_predict_across_row_ends(make_rows):
    rows = make_rows([3, 6], max_slice=4)
    assert len(rows) == 2
    first, second = rows
    assert first.input_ids.tolist() == [0, 1, 2, 3]
    assert first.targets.tolist() == [1, 2, IGNORE_INDEX, 4]
    assert first.document_ids.tolist() == [0, 0, 0, 1]
    assert first.position_ids.tolist() == [0, 1, 2, 0]
    assert second.input_ids.tolist() == [4, 5, 6, 7]
    assert second.targets.tolist() == [5, 6, 7, 8]
    assert second.document_ids.tolist() == [0, 0, 0, 0]
    assert second.position_ids.tolist() == [0, 1, 2, 3]


def test_unpacked_rows_hold_one_document_each(make_rows):
    rows = make_rows([3, 6, 1], max_slice=4, packed=False)
    assert [row.input_ids.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert [row.targets.tolist() for row in rows] == [[1, 2, IGNORE_INDEX], [4, 5, 6, 7], [8, IGNORE_INDEX]]
    assert all(not row.document_ids.any() and row.position_ids.tolist() == list(range(len(row.input_ids))) for row in rows)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_but_the_first_of_its_document_is_predicted_once(make_rows, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, size=random.integers(1, 30)).tolist()
    max_slice = int(random.integers(2, 15))
    packed, unpacked = (make_rows(lengths, max_slice, packed) for packed in (True, False))
    assert predicted(packed) == predicted(unpacked) == every_pair(lengths)
    assert packed.num_targets == unpacked.num_targets == sum(lengths) - len(lengths)
    for rows in (packed, unpacked):
        assert rows.row_lengths.tolist() == [len(row.input_ids) for row in rows]
        for row in rows:
            starts = np.flatnonzero(row.position_ids == 0)
            assert starts.tolist() == np.flatnonzero(np.diff(row.document_ids, prepend=-1)).tolist()
            assert all(part.dtype == np.int64 and len(part) <= max_slice for part in row)


def test_rows_pickle_without_their_tokens(make_rows):
    rows = make_rows([30_000, 30_000], max_slice=7)
    expected = rows[5].input_ids
    data = pickle.dumps(rows)
    assert len(data) < 4_000
    assert np.array_equal(pickle.loads(data)[5].input_ids, expected)


def test_index_beyond_the_last_row_is_refused(make_rows):
    rows = make_rows([5], max_slice=2)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_split_holds_out_whole_documents_and_the_tail_of_one():
    lengths = np.full(40, 10)
    training = training_lengths(lengths, 0.11)
    held_out = lengths - training
    assert held_out.sum() == 44
    assert sorted(held_out[held_out > 0]) == [4, 10, 10, 10, 10]


def test_split_of_a_single_document_takes_its_tail():
    assert training_lengths(np.array([100]), 0.25).tolist() == [75]


def test_split_of_share_zero_holds_nothing_out():
    assert training_lengths(np.array([3, 4]), 0.0).tolist() == [3, 4]


@pytest.mark.parametrize("seed", range(10))
def test_split_reaches_its_share_to_the_token(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 50, size=random.integers(1, 60))
    share = float(random.uniform(0.01, 0.99))
    training = training_lengths(lengths, share)
    assert ((training >= 0) & (training <= lengths)).all()
    assert lengths.sum() - training.sum() == round(share * int(lengths.sum()))
    assert ((training > 0) & (training < lengths)).sum() <= 1
