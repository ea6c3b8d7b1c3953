from dataclasses import replace

import pytest
import torch

from fluxray.data.latent_facts import CacheNeeds, LatentFacts, check_cache
from fluxray.data.latent_shards import write_cache
from fluxray.data.latents import LatentCache
from fluxray.data.masks import token_mask
from fluxray.errors import ConfigError, DataError
from tests.flow_caches import empty_captions, random_cache, random_facts, random_samples

BUCKETS = {(32, 64, 5): 3, (32, 32, 5): 2}


def with_masks(samples):
    """Give every other sample a mask."""
    drawn = torch.Generator().manual_seed(3)
    return [
        sample._replace(mask=torch.rand(len(sample.latents), generator=drawn)) if number % 2 else sample
        for number, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("layout", ["safetensors", "webdataset"])
@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_masks_come_back_with_the_samples_that_have_one(tmp_path, layout, family):
    facts = random_facts(family=family, pooled_width=10 if family == "flux1" else None)
    samples = with_masks(random_samples(facts, BUCKETS))
    write_cache(tmp_path, facts, empty_captions(facts, [5]), samples, layout, shard_bytes=2000)
    cache = LatentCache(tmp_path)
    assert cache.facts.masks and LatentFacts.from_json(cache.facts.to_json()).masks
    for index, sample in enumerate(samples):
        row = cache[index]
        assert row.latents.equal(sample.latents) and row.text.equal(sample.text)
        assert (row.mask is None) == (sample.mask is None)
        if row.mask is not None:
            assert row.mask.dtype == torch.float32 and row.mask.equal(sample.mask)


def test_masks_are_fp32_beside_latents_of_half_the_bytes(tmp_path):
    facts = random_facts(latent_dtype="bfloat16", text_dtype="bfloat16")
    samples = with_masks(random_samples(facts, BUCKETS))
    write_cache(tmp_path, facts, empty_captions(facts, [5]), samples)
    assert LatentCache(tmp_path)[1].mask.equal(samples[1].mask)


def test_masked_loss_wants_a_cache_with_masks(tmp_path):
    random_cache(tmp_path, BUCKETS)
    facts, needs = LatentCache(tmp_path).facts, CacheNeeds("flux1", 8, 12, 10, masks=True)
    assert not facts.masks
    with pytest.raises(ConfigError) as refused:
        check_cache(facts, needs)
    assert str(refused.value) == ("task.masked_loss: true, but no sample of data.cache has a mask; encode masks, or drop the key")
    check_cache(replace(facts, masks=True), needs)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.zeros(8), "its mask is zero everywhere, or not within 0 and 1"),
        (torch.full((8,), 1.5), "its mask is zero everywhere, or not within 0 and 1"),
        (torch.full((8,), -0.5), "its mask is zero everywhere, or not within 0 and 1"),
        (torch.full((8,), float("nan")), "mask has values that are not finite"),
        (torch.ones(7), "mask of shape (7,), the cache's is (8,)"),
    ],
)
def test_masks_that_say_nothing_are_refused(tmp_path, mask, said):
    facts = random_facts()
    (sample,) = random_samples(facts, {(32, 64, 5): 1})
    with pytest.raises(DataError) as refused:
        write_cache(tmp_path, facts, empty_captions(facts, [5]), [sample._replace(mask=mask)])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_tokens_share_is_the_mean_over_its_pixels():
    mask = torch.zeros(32, 48)
    mask[:16, :16] = 1
    mask[16:20, 32:48] = 1
    mask[0, 16] = 0.5
    assert token_mask(mask, 16).tolist() == [1.0, 0.5 / 256, 0.0, 0.0, 0.0, 0.25]
    assert token_mask(torch.ones(32, 48, dtype=torch.float64), 16).equal(torch.ones(6))
