"""Encoding ahead, without Ray: equal to encoding in place, resumable to the byte, and never more than what has changed."""

import json
import os
import shutil
import tarfile
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file

from fluxray.config.schema import BatchConfig
from fluxray.data.bucket_plan import BucketPlan
from fluxray.data.crops import Bucket
from fluxray.data.identity import with_pipeline
from fluxray.data.latent_facts import CacheNeeds, check_cache
from fluxray.data.latents import LatentCache, load_latents
from fluxray.data.loader import Loader
from fluxray.data.pictures import open_pictures
from fluxray.data.prepared import prepare_picture
from fluxray.data.survey import planned
from fluxray.errors import DataError
from fluxray.protocols import RunState, Schedule
from fluxray.tasks.encode import encode, is_up_to_date
from fluxray.tasks.encode_plan import cache_key
from tests.data.test_loader_buckets import prepare
from tests.encode_helpers import encode_here, encode_until_killed, job_of, run_here, tiny_pipeline, write_photos
from tests.flow_pictures import Encoders
from tests.stores import web_on

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, Encoders]:
    folder = tmp_path_factory.mktemp("pipelines")
    return {family: tiny_pipeline(family, folder / family) for family in ("flux1", "flux2")}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("pictures") / "photos", 10)


@pytest.fixture(scope="module")
def whole(pipelines, photos, tmp_path_factory):
    """The cache of an encoding that nothing has disturbed."""
    cache = tmp_path_factory.mktemp("whole") / "cache"
    return cache, encode_here(job_of(pipelines["flux1"], photos, cache))


def content(cache):
    """Return the bytes of all files of a cache that say nothing of the time that it took."""
    return {
        path.name: path.read_bytes() for path in cache.iterdir() if path.is_file() and path.name not in (".lock", "report.json")
    }


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_rows_are_those_of_encoding_in_place(family, pipelines, photos, tmp_path):
    encoders = pipelines[family]
    job = job_of(encoders, photos, tmp_path / "cache", batch_pixels=1, batch_captions=1)
    done = encode_here(job)
    cache = LatentCache(job.cache)
    facts = cache.facts
    needs = CacheNeeds(family, facts.channels, facts.text_width, facts.pooled_width)
    check_cache(facts, with_pipeline(needs, encoders.folder))
    assert len(cache) == done.num_samples == done.pictures == 10 and len(cache.facts.resolutions) > 1
    rows = {cache.key(index): (cache[index], cache.caption(index)) for index in range(len(cache))}
    for ref in job.pictures.refs():
        key = cache_key(ref.key)
        row, caption = rows[key]
        picture = prepare_picture(job.pictures, ref, job.settings)
        height, width = picture.pixels.shape[:2]
        assert caption == picture.caption and (row.height, row.width) == (height // 16, width // 16)
        assert row.latents.equal(encoders.latents(key, Image.fromarray(picture.pixels), (height, width)))
        text, pooled = encoders.embed(caption)
        assert row.text.equal(text.bfloat16())
        assert row.pooled is None if pooled is None else row.pooled is not None and row.pooled.equal(pooled.bfloat16())
    text, pooled = encoders.embed("")
    assert cache.empty[32].text.equal(text.bfloat16())


def test_larger_batches_change_no_more_than_rounding(whole, pipelines, photos, tmp_path):
    encode_here(job_of(pipelines["flux1"], photos, tmp_path / "cache", batch_pixels=1, batch_captions=1))
    one, other = LatentCache(whole[0]), LatentCache(tmp_path / "cache")
    for index in range(len(one)):
        assert one.key(index) == other.key(index)
        torch.testing.assert_close(one[index].latents, other[index].latents, rtol=0, atol=1e-4)
        torch.testing.assert_close(one[index].text.float(), other[index].text.float(), rtol=0, atol=2e-2)


def test_tars_of_a_web_server_are_encoded_as_the_folder_in_them(whole, pipelines, photos, tmp_path):
    (tmp_path / "web").mkdir()
    with tarfile.open(tmp_path / "web" / "photos-0.tar", "w") as tar:
        for path in sorted(path for path in photos.rglob("*") if path.is_file()):
            tar.add(path, path.relative_to(photos))
    with web_on(tmp_path / "web") as web:
        plain = job_of(pipelines["flux1"], photos, tmp_path / "cache")
        job = replace(plain, pictures=open_pictures(f"tars:{web.address}/photos-{{0..0}}.tar", config=plain.settings))
        assert encode_here(job).pictures == 10 and is_up_to_date(job, job.pictures.refs())
        one, other = LatentCache(whole[0]), LatentCache(tmp_path / "cache")
        assert [one.key(index) for index in range(10)] == [other.key(index) for index in range(10)]
        assert all(one[index].latents.equal(other[index].latents) for index in range(10))
        assert all(one[index].text.equal(other[index].text) for index in range(10))
        os.utime(tmp_path / "web" / "photos-0.tar", (1, 1))
        again = replace(plain, pictures=open_pictures(f"tars:{web.address}/photos-{{0..0}}.tar", config=plain.settings))
        assert not is_up_to_date(again, again.pictures.refs())


@pytest.mark.parametrize("number", [0, 3, 5, 6, 13])
def test_killed_anywhere_and_started_again_it_makes_the_same_bytes(number, whole, pipelines, photos, tmp_path):
    expected, cache = content(whole[0]), tmp_path / "cache"
    assert len([name for name in expected if name.endswith(".tar")]) == 3
    job = job_of(pipelines["flux1"], photos, cache)
    encode_until_killed(job, number)
    assert list(cache.rglob("*.partial")) and not (cache / "cache.json").exists()
    done = encode_here(job)
    assert content(cache) == expected and not (cache / ".encoding").exists()
    assert done.pictures == max(10 - 4 * min(number, 3), 0), "what was done is not done again"


def test_the_same_again_encodes_nothing(whole, pipelines, photos):
    before = content(whole[0])

    def run(*_):
        raise AssertionError("nothing is to be run")

    done = encode_here(job_of(pipelines["flux1"], photos, whole[0]), run)
    assert (done.pictures, done.captions, done.num_samples) == (0, 0, 10) and content(whole[0]) == before
    assert "encoded now: nothing, all was there" in done.summary()


@pytest.fixture
def changing(whole, photos, tmp_path):
    """A copy of the finished cache and of its pictures."""
    shutil.copytree(whole[0], tmp_path / "cache")
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "photos", tmp_path / "cache"


def rows_of(folder):
    cache = LatentCache(folder)
    return {cache.key(index): cache[index] for index in range(len(cache))}


def same(one, other):
    return one.latents.equal(other.latents) and one.text.equal(other.text) and one.pooled.equal(other.pooled)


def test_a_changed_caption_encodes_one_text(changing, pipelines, whole):
    photos, cache = changing
    (photos / "photo-0-1.txt").write_text("a bridge in the rain")
    done = encode_here(job_of(pipelines["flux1"], photos, cache))
    assert (done.pictures, done.captions, done.num_samples) == (0, 2, 10), "the caption, and the empty one"
    before, after = rows_of(whole[0]), rows_of(cache)
    changed = [key for key in after if not same(before[key], after[key])]
    assert changed == [cache_key("photo-0-1.png")]
    assert after[changed[0]].latents.equal(before[changed[0]].latents)
    afresh = cache.with_name("afresh")
    encode_here(job_of(pipelines["flux1"], photos, afresh))
    assert content(afresh) == content(cache)


def test_pictures_that_come_and_go_and_change_leave_the_others_alone(changing, pipelines, whole):
    photos, cache = changing
    shutil.copy(photos / "photo-1.png", photos / "aaa.png")
    (photos / "aaa.txt").write_text("a new first picture")
    (photos / "photo-0-3.png").unlink()
    (photos / "photo-0-3.txt").unlink()
    Image.new("RGB", (90, 70), "red").save(photos / "photo-1-0.png")
    done = encode_here(job_of(pipelines["flux1"], photos, cache))
    assert (done.pictures, done.captions, done.num_samples) == (2, 2, 10)
    before, after = rows_of(whole[0]), rows_of(cache)
    kept = set(before) & set(after) - {cache_key("photo-1-0.png")}
    assert len(kept) == 8 and all(same(before[key], after[key]) for key in kept)
    assert len(list(cache.glob("*.tar"))) == len(list(cache.glob("*.index.json"))) == done.num_shards == 3


def test_another_length_of_texts_keeps_the_latents(changing, pipelines):
    photos, cache = changing
    done = encode_here(job_of(pipelines["flux1"], photos, cache, text_tokens=24))
    assert (done.pictures, done.captions) == (0, 11)
    assert LatentCache(cache).facts.text_lengths == (24,)


def test_a_copied_picture_that_is_the_same_is_looked_at_and_not_encoded(changing, pipelines):
    photos, cache = changing
    os.utime(photos / "photo-0.png", (1, 1))
    done = encode_here(job_of(pipelines["flux1"], photos, cache))
    assert (done.pictures, done.captions) == (0, 1)


def test_what_cannot_be_used_is_told_with_its_reason_and_stops_nothing(pipelines, photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    whole_png = (folder / "photo-0.png").read_bytes()
    (folder / "truncated.png").write_bytes(whole_png[: len(whole_png) // 2])
    (folder / "nothing.png").write_bytes(b"")
    (folder / "words.png").write_text("no picture at all")
    Image.new("RGB", (4, 4)).save(folder / "tiny.png")
    Image.new("RGB", (900, 20)).save(folder / "long.png")
    for name in ("truncated", "nothing", "words", "tiny", "long"):
        (folder / f"{name}.txt").write_text(name)
    Image.new("CMYK", (80, 80)).save(folder / "cmyk.jpg")
    (folder / "cmyk.txt").write_text("a word " * 10_000)
    shutil.copy(photos / "photo-0.png", folder / "silent.png")
    vanishing = folder / "vanishing.png"
    shutil.copy(photos / "photo-0.png", vanishing)
    (folder / "vanishing.txt").write_text("gone")
    job = job_of(pipelines["flux1"], folder, tmp_path / "cache")
    refs = job.pictures.refs()
    vanishing.unlink()
    done = encode(job, refs, run_here, lambda *_: None)
    told = [json.loads(line) for line in (job.cache / "quarantine.jsonl").read_text().splitlines()]
    reasons = {one["name"]: one["reason"] for one in told}
    assert reasons.keys() == {f"{name}.png" for name in ("truncated", "nothing", "words", "tiny", "long", "silent", "vanishing")}
    assert (
        reasons["nothing.png"] == "zero bytes" and reasons["vanishing.png"] == "missing" and reasons["silent.png"] == "no caption"
    )
    assert done.num_samples == 11 and sum(done.left_out.values()) == 7 and done.num_cut == 1 and done.tokens_cut > 10_000
    assert "7 left out (" in done.summary() and "1 captions cut, by" in done.summary()
    assert json.loads((job.cache / "report.json").read_text())["left_out"] == dict(done.left_out)


def test_no_picture_of_use_is_a_fault_of_one_line(pipelines, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.png").write_bytes(b"")
        (folder / f"{name}.txt").write_text(name)
    with pytest.raises(
        DataError, match=r"^data\.source: none of 2 pictures can be used \(first reason: zero bytes\); see .*quarantine"
    ):
        encode_here(job_of(pipelines["flux1"], folder, tmp_path / "cache"))
    assert len((tmp_path / "cache" / "quarantine.jsonl").read_text().splitlines()) == 2


def test_one_encoding_at_a_time_and_none_into_a_cache_of_other_origin(pipelines, photos, whole, tmp_path):
    (tmp_path / "cache").mkdir()
    with FileLock(tmp_path / "cache" / ".lock"), pytest.raises(DataError, match=r"is being encoded by another process; wait"):
        encode_here(job_of(pipelines["flux1"], photos, tmp_path / "cache"))
    shutil.copytree(whole[0], tmp_path / "other")
    for path in (tmp_path / "other").glob("*.samples.json"):
        path.unlink()
    with pytest.raises(DataError, match=r"holds a cache that `fluxray encode` has not made; name another folder$"):
        encode_here(job_of(pipelines["flux1"], photos, tmp_path / "other"))


def test_a_plan_of_buckets_is_followed_and_repeated_pictures_are_samples_of_their_own(pipelines, photos, tmp_path):
    job = job_of(pipelines["flux1"], photos, tmp_path / "cache")
    refs = job.pictures.refs()
    keys = [ref.key for ref in refs]
    placed = planned(refs, BucketPlan(dict.fromkeys(keys[:9], Bucket(48, 48)), {keys[0]: 3}, (), 4))
    assert not is_up_to_date(job, placed)
    done = encode(job, placed, run_here, lambda *_: None)
    assert done.num_samples == 12 and is_up_to_date(job, placed) and not is_up_to_date(job, refs)
    rows = rows_of(job.cache)
    again = [rows[cache_key(key)] for key in (keys[0], f"{keys[0]}~2", f"{keys[0]}~3")]
    assert again[0].text.equal(again[1].text) and not again[0].latents.equal(again[1].latents)
    assert sum((row.height, row.width) == (3, 3) for row in rows.values()) == 11


def test_three_ranks_see_each_sample_once_an_epoch_of_three_shards(whole):
    folder, _ = whole
    assert len(list(folder.glob("*.tar"))) == 3
    facts = LatentCache(folder).facts
    data = load_latents(folder, None, 0.1, CacheNeeds("flux1", facts.channels, facts.text_width, facts.pooled_width))
    assert len(data.train) == 9

    def keyed(rows, key):
        return prepare([row._replace(key="0000") for row in rows], key)

    seen = []
    for rank in range(3):
        loader = Loader(data.train, keyed, BatchConfig(micro_size=1, accumulation_steps=1), rank, 3)
        batches = loader.train_batches(RunState(seed=3, schedule=Schedule("constant", 1e-3, 0, 10, 0.0)))
        for step in islice(batches, 3):
            seen += [sample for batch in step.batches if batch.num_valid for sample in batch.key.samples]
        batches.close()
    assert sorted(sample.index for sample in seen if sample.epoch == 0) == list(range(9))


def test_shards_are_webdatasets_with_all_that_a_sample_is(whole):
    import io
    import tarfile

    from safetensors.torch import load

    folder, _ = whole
    cache = LatentCache(folder)
    shard = sorted(folder.glob("*.tar"))[0]
    with tarfile.open(shard) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    key = cache.key(0)
    told = json.loads(io.BytesIO(members[f"{key}.json"]).read())
    assert told["caption"] == cache.caption(0)
    assert load(members[f"{key}.safetensors"])["latents"].equal(cache[0].latents)
    samples = json.loads(shard.with_name(shard.name.replace(".tar", ".samples.json")).read_text())["samples"]
    assert samples[key]["crop"]["scale"] < 1 and len(samples[key]["picture"]) == len(samples[key]["text"]) == 32
    assert np.prod(load_file(folder / "empty.safetensors")["text.32"].shape) == 32 * 64
