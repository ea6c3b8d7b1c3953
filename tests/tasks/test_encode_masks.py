"""Masks that `fluxray encode` stores: those of the pictures as they were cut, and ready for masked loss."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fluxray.data.latent_facts import CacheNeeds
from fluxray.data.latents import LatentCache, load_latents
from fluxray.data.masks import token_mask
from fluxray.data.prepared import prepare_picture
from fluxray.tasks.encode_plan import cache_key
from tests.encode_helpers import encode_here, job_of, tiny_pipeline, write_photos

pytestmark = pytest.mark.usefixtures("one_thread")

MASKED = ("photo-0", "photo-0-0", "photo-0-1")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return tiny_pipeline("flux1", tmp_path_factory.mktemp("pipeline") / "pipeline")


@pytest.fixture
def photos(tmp_path):
    """Six pictures of two shapes, of which three have a mask, as a file and as alpha."""
    folder = write_photos(tmp_path / "photos", 6)
    random = np.random.default_rng(0)
    for name in MASKED:
        picture = Image.open(folder / f"{name}.png")
        mask = Image.fromarray(random.integers(0, 256, (3, 4), dtype=np.uint8)).resize(picture.size)
        mask.save(folder / f"{name}.mask.png")
        picture.putalpha(mask)
        picture.save(folder / f"{name}.png")
    return folder


def masks_in(cache):
    rows = LatentCache(cache)
    return {rows.key(index): rows[index].mask for index in range(len(rows))}


@pytest.mark.parametrize("mask", ["file", "alpha"])
def test_a_sample_has_the_mask_of_its_crop(mask, encoders, photos, tmp_path):
    job = job_of(encoders, photos, tmp_path / "cache", mask=mask)
    encode_here(job)
    found = masks_in(job.cache)
    assert {key for key, values in found.items() if values is not None} == {cache_key(f"{name}.png") for name in MASKED}
    for ref in job.pictures.refs():
        made = prepare_picture(job.pictures, ref, job.settings)
        values = found[cache_key(ref.key)]
        assert (values is None) == (made.mask is None)
        if values is not None and made.mask is not None:
            in_place = token_mask(torch.from_numpy(made.mask) / 255, 16)
            assert values.equal(in_place) and values.std() > 0
    facts = LatentCache(job.cache).facts
    needs = CacheNeeds("flux1", facts.channels, facts.text_width, facts.pooled_width, masks=True)
    assert "with masks" in load_latents(job.cache, None, 0.2, needs).summary()


def test_a_changed_mask_is_taken_in_and_encodes_no_picture(encoders, photos, tmp_path):
    job = job_of(encoders, photos, tmp_path / "cache", mask="file")
    encode_here(job)
    before = masks_in(job.cache)
    Image.new("L", Image.open(photos / "photo-0.png").size, 255).save(photos / "photo-0.mask.png")
    done = encode_here(job_of(encoders, photos, job.cache, mask="file"))
    after = masks_in(job.cache)
    assert (done.pictures, done.captions) == (0, 1), "the empty caption"
    changed = {key for key in after if after[key] is not None and not after[key].equal(before[key])}
    assert changed == {cache_key("photo-0.png")} and after[changed.pop()].equal(torch.ones(16))
    afresh = job_of(encoders, photos, tmp_path / "afresh", mask="file")
    encode_here(afresh)
    assert (afresh.cache / "cache.json").read_bytes() == (job.cache / "cache.json").read_bytes()


def test_a_picture_whose_mask_is_empty_is_left_out_and_one_without_counts_in_full(encoders, photos, tmp_path):
    Image.new("L", Image.open(photos / "photo-0.png").size).save(photos / "photo-0.mask.png")
    shutil.copy(photos / "photo-0-0.mask.png", photos / "photo-1.mask.png")
    with Image.open(photos / "photo-1.mask.png") as mask:
        mask.resize((mask.width, mask.width)).save(photos / "photo-1.mask.png")
    job = job_of(encoders, photos, tmp_path / "cache", mask="file")
    done = encode_here(job)
    assert dict(done.left_out) == {"mask empty": 1, "mask of another shape": 1} and done.num_samples == 4
    assert sum(values is None for values in masks_in(job.cache).values()) == 2
