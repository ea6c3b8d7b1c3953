"""The loader on rows that stand in buckets: pictures of several sizes with texts of several lengths."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from fluxray.config.schema import BatchConfig
from fluxray.data.latent_facts import CacheNeeds
from fluxray.data.latents import LatentData, load_latents
from fluxray.data.loader import Loader
from fluxray.protocols import FlowBatch, MicroBatches, RunState, Schedule
from tests.flow_caches import random_cache

STATE = RunState(seed=3, schedule=Schedule("constant", 1e-3, 0, 10, 0.0))
BUCKETS = {(64, 64, 6): 23, (32, 64, 6): 11, (64, 32, 6): 9, (64, 32, 4): 3}
SHAPES = [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 2, 1), (8, 1, 1)]
"""Ranks, rows of a micro-batch, micro-batches: global batches of 8."""


def prepare(rows, key):
    """Return rows of one size, or fail, as a batch without noise whose sigma says which samples they are."""
    (height, width), *others = {(row.height, row.width) for row in rows}
    assert not others
    latents = torch.stack([row.latents for row in rows])
    weight = torch.tensor([row.weight for row in rows])
    return FlowBatch(
        noised=latents,
        target=latents,
        sigma=torch.tensor([float(row.key[-4:]) for row in rows]),
        weight=weight,
        text=torch.stack([row.text for row in rows]),
        pooled=torch.stack([row.pooled for row in rows]),
        guidance=None,
        height=height,
        width=width,
        num_valid=int(weight.count_nonzero()),
        key=key,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LatentData:
    folder = tmp_path_factory.mktemp("cache")
    random_cache(folder, BUCKETS)
    return load_latents(folder, None, 0.2, CacheNeeds("flux1", 8, 12, 10))


def steps(data, shape, rank=0, state=STATE, count=6, **keys) -> list[MicroBatches]:
    num_ranks, micro, accumulation = shape
    batch = BatchConfig(micro_size=micro, accumulation_steps=accumulation, max_micro_size=max(micro, 16))
    batches = Loader(data.train, prepare, batch, rank, num_ranks, **keys).train_batches(state)
    taken = list(islice(batches, count))
    batches.close()
    return taken


def all_ranks(data, shape, **keys):
    """Return [step][round][rank] micro-batches."""
    ranks = [steps(data, shape, rank, **keys) for rank in range(shape[0])]
    together = zip(*ranks, strict=True)
    return [list(zip(*(rank.batches for rank in step), strict=True)) for step in together]  # as many rounds on every rank


def samples_of(step):
    return [sample for of_ranks in step for batch in of_ranks for sample in batch.key.samples]


def test_any_shape_draws_the_same_samples_in_the_same_order(data):
    expected = [samples_of(step) for step in all_ranks(data, SHAPES[0])]
    assert all(len(samples) == 8 for samples in expected)
    for shape in SHAPES[1:]:
        assert [samples_of(step) for step in all_ranks(data, shape)] == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_comes_once_an_epoch_in_micro_batches_of_one_bucket(data, shape):
    num_rows = len(data.train)
    seen, mixed = [], 0
    for step in all_ranks(data, shape, count=2 * num_rows // 8):
        mixed += len({(batch.height, batch.width, batch.text.shape[1]) for of_ranks in step for batch in of_ranks}) > 1
        for of_ranks in step:
            assert len({(batch.height, batch.width, batch.text.shape[1]) for batch in of_ranks}) == 1  # over the ranks, too
            for batch in of_ranks:
                assert batch.num_valid == len(batch.key.samples) == int(batch.weight.sum())
                assert len(batch.noised) == max(batch.num_valid, 1) <= shape[1]
                assert batch.noised.shape[1] == batch.height * batch.width
                keys = [float(data.train[sample.index].key[-4:]) for sample in batch.key.samples]
                assert batch.sigma[: batch.num_valid].tolist() == keys
        assert sum(batch.num_valid for of_ranks in step for batch in of_ranks) == 8
        seen += samples_of(step)
    first = [sample.index for sample in seen if sample.epoch == 0]
    assert sorted(first) == list(range(num_rows)) and mixed > 0


def test_resuming_anywhere_equals_going_on(data):
    whole = steps(data, (2, 2, 2), rank=1, count=14)  # more than two epochs
    assert whole[-1].epoch >= 2
    for done in range(1, 14):
        state = replace(STATE, step=done, epoch=whole[done - 1].epoch, position=whole[done - 1].position)
        for shape in ((2, 2, 2), (2, 4, 1)):
            rest = steps(data, shape, 1, state, 14 - done)
            assert [(step.epoch, step.position) for step in rest] == [(step.epoch, step.position) for step in whole[done:]]
            if shape == (2, 2, 2):
                for one, other in zip(rest, whole[done:], strict=True):
                    assert [batch.key for batch in one.batches] == [batch.key for batch in other.batches]
                    assert all(a.noised.equal(b.noised) for a, b in zip(one.batches, other.batches, strict=True))


def test_a_rank_without_a_row_gets_one_of_the_round_that_does_not_count(data):
    stand_ins = [
        (batch, of_ranks) for step in all_ranks(data, (8, 1, 1)) for of_ranks in step for batch in of_ranks if not batch.num_valid
    ]
    assert stand_ins
    for batch, of_ranks in stand_ins:
        assert len(batch.weight) == 1 and batch.weight.item() == 0 and batch.key.samples == ()
        assert batch.sigma.item() in [other.sigma[0].item() for other in of_ranks if other.num_valid]
    told = [step.metrics["batch/padding_share"] for step in steps(data, (8, 1, 1))]
    assert max(told) > 0 and min(told) == 0  # what stands in is the only padding


def test_sizes_that_memory_governs_cut_the_same_samples_between_buckets(data):
    expected = [samples_of(step) for step in all_ranks(data, (2, 4, 1))]
    longest = data.train.max_slice
    for size in (1, 2, 4):
        governed = all_ranks(data, (2, 4, 1), micro_rows=lambda step, size=size: size)
        assert [samples_of(step) for step in governed] == expected
        assert all(b.num_tokens <= size * longest for step in governed for of_ranks in step for b in of_ranks)


@pytest.mark.parametrize(("num_ranks", "micro", "max_rows"), [(1, 3, 100), (2, 2, 100), (4, 1, 6), (8, 2, 100)])
def test_evaluation_counts_each_picture_once_in_batches_of_one_bucket(data, num_ranks, micro, max_rows):
    def batches(rank):
        return list(
            Loader(data.train, prepare, BatchConfig(micro_size=micro), rank, num_ranks).eval_batches(data.evaluation, max_rows)
        )

    ranks = [batches(rank) for rank in range(num_ranks)]
    counted = []
    for of_ranks in zip(*ranks, strict=True):
        assert len({(batch.height, batch.width, batch.text.shape[1]) for batch in of_ranks}) == 1
        for batch in of_ranks:
            assert len(batch.noised) == micro and batch.key is None
            counted += batch.sigma[batch.weight > 0].tolist()
    held_out = [float(data.evaluation[index].key[-4:]) for index in range(min(max_rows, len(data.evaluation)))]
    assert len(data.evaluation) == 9 and sorted(counted) == sorted(held_out)


def test_buckets_of_rows_are_those_of_the_cache(data):
    rows = data.train
    assert np.array_equal(rows.row_lengths, [len(row.latents) + len(row.text) for row in (rows[i] for i in range(len(rows)))])
    assert len(np.unique(rows.buckets)) == len(BUCKETS)
