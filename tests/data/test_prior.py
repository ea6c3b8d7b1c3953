"""Prior preservation: half of each global batch is of the regularisation set."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from fluxray.config.schema import BatchConfig
from fluxray.data.latent_facts import CacheNeeds
from fluxray.data.latents import LatentData, load_latents
from fluxray.data.loader import Loader
from fluxray.data.prior import RowsWithPrior
from fluxray.errors import ConfigError
from fluxray.protocols import RunState, Schedule
from tests.data.test_loader_buckets import prepare
from tests.flow_caches import random_cache

STATE = RunState(seed=3, schedule=Schedule("constant", 1e-3, 0, 10, 0.0))
NEEDS = CacheNeeds("flux1", 8, 12, 10)
SHAPES = [(1, 8, 1), (1, 2, 4), (2, 2, 2), (4, 1, 2)]
"""Ranks, rows of a micro-batch, micro-batches: global batches of 8."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LatentData:
    own, prior = (tmp_path_factory.mktemp(name) for name in ("own", "prior"))
    random_cache(own, {(64, 64, 6): 13, (32, 64, 6): 8})
    random_cache(prior, {(64, 64, 6): 9, (32, 32, 4): 5}, seed=1)
    return load_latents(own, None, 0.2, NEEDS, prior)


def steps(data, shape, rank=0, state=STATE, count=9):
    num_ranks, micro, accumulation = shape
    rows = RowsWithPrior(data.train, data.prior, 0.25)
    batch = BatchConfig(micro_size=micro, accumulation_steps=accumulation)
    batches = Loader(rows, prepare, batch, rank, num_ranks, num_prior=len(data.prior)).train_batches(state)
    taken = list(islice(batches, count))
    batches.close()
    return taken


def global_samples(data, shape, **keys):
    """Return the samples of each global batch, in order."""
    ranks = [steps(data, shape, rank, **keys) for rank in range(shape[0])]
    return [
        [s for of_ranks in zip(*(rank.batches for rank in step), strict=True) for batch in of_ranks for s in batch.key.samples]
        for step in zip(*ranks, strict=True)
    ]


def test_half_of_each_global_batch_is_of_the_set_in_an_order_of_its_own(data):
    num_own, num_prior = len(data.train), len(data.prior)
    drawn = global_samples(data, (1, 8, 1))
    for samples in drawn:
        assert [sample.index >= num_own for sample in samples] == [False] * 4 + [True] * 4
    prior = [sample for samples in drawn for sample in samples[4:]]
    for epoch in range(2):
        assert sorted(s.index - num_own for s in prior if s.epoch == epoch) == list(range(num_prior))
    own = [sample for samples in drawn for sample in samples[:4]]
    assert sorted(s.index for s in own if s.epoch == 0) == list(range(num_own))
    assert [s.index - num_own for s in prior if s.epoch == 0] != [s.index - num_own for s in prior if s.epoch == 1]


def test_what_is_learned_comes_in_the_order_that_it_has_without_the_set(data):
    loader = Loader(data.train, prepare, BatchConfig(micro_size=4, accumulation_steps=1), 0, 1)
    alone = loader.train_batches(STATE)
    expected = list(islice(alone, 9))
    alone.close()
    found = steps(data, (1, 8, 1))
    assert [(step.epoch, step.position) for step in found] == [(step.epoch, step.position) for step in expected]
    own = [samples[:4] for samples in global_samples(data, (1, 8, 1))]
    assert own == [[sample for batch in step.batches for sample in batch.key.samples] for step in expected]


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_any_shape_draws_the_same_samples(data, shape):
    assert global_samples(data, shape) == global_samples(data, SHAPES[0])


def test_resuming_anywhere_equals_going_on(data):
    whole = steps(data, (2, 2, 2), rank=1)
    for done in range(1, 9):
        state = replace(STATE, step=done, epoch=whole[done - 1].epoch, position=whole[done - 1].position)
        rest = steps(data, (2, 2, 2), 1, state, 9 - done)
        assert [[b.key for b in step.batches] for step in rest] == [[b.key for b in step.batches] for step in whole[done:]]


def test_rows_of_the_set_have_its_weight_and_buckets_are_numbered_over_both(data):
    rows, num_own = RowsWithPrior(data.train, data.prior, 0.25), len(data.train)
    assert {rows[i].weight for i in range(num_own)} == {1.0}
    assert {rows[i].weight for i in range(num_own, len(rows))} == {0.25}
    assert rows[num_own + 2].latents.equal(data.prior[2].latents)
    sizes = [(rows[i].height, rows[i].width, len(rows[i].text)) for i in range(len(rows))]
    assert len(set(zip(rows.buckets.tolist(), sizes, strict=True))) == len(set(sizes)) == 3
    assert np.array_equal(rows.row_lengths, [len(rows[i].latents) + len(rows[i].text) for i in range(len(rows))])
    assert rows.max_slice == 22
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_the_held_out_pictures_and_empty_captions_stay(data):
    assert all(data.evaluation[i].key not in {data.train[j].key for j in range(len(data.train))} for i in range(4))
    assert len(data.evaluation) == 4 and set(data.empty) == {4, 6}
    assert ", regularisation 14;" in data.summary()


def test_a_set_of_another_model_is_refused(tmp_path):
    random_cache(tmp_path / "own", {(32, 32, 6): 4})
    random_cache(tmp_path / "prior", {(32, 32, 6): 4}, vae="another")
    with pytest.raises(ConfigError) as refused:
        load_latents(tmp_path / "own", None, 0.25, NEEDS, tmp_path / "prior")
    assert str(refused.value).startswith("data.prior_cache: encoded by VAE another")
