"""What a look ahead changes of an encoding: the report, buckets and repetitions."""

import json
from collections import Counter

import pytest
from PIL import Image

from fluxray.config.load import resolve
from fluxray.data.crops import Bucket
from fluxray.data.latents import LatentCache
from fluxray.runtime.preflight import look_ahead
from fluxray.tasks.encode import encode
from tests.encode_helpers import SETTINGS, job_of, run_here, tiny_pipeline, write_photos

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Seven usable pictures, one of them tall, and one that is damaged."""
    folder = tmp_path_factory.mktemp("preflight")
    photos = write_photos(folder / "photos", 6)
    Image.new("RGB", (80, 150), "green").save(photos / "tall.png")
    (photos / "tall.txt").write_text("green")
    (photos / "damaged.png").write_bytes((photos / "tall.png").read_bytes()[:60])
    (photos / "damaged.txt").write_text("damaged")
    return tiny_pipeline("flux2", folder / "pipeline"), photos


def looked(folders, cache, **settings):
    encoders, photos = folders
    said: list[str] = []
    job = job_of(encoders, photos, cache, **settings)
    words = {f"encode.{key}": value for key, value in (SETTINGS | settings).items()}
    config = resolve("cpu", "flux2-tiny", words | {"batch.micro_size": 3, "batch.accumulation_steps": 1})
    refs = look_ahead(config, job.pictures, job.pictures.refs(), job.cache, said.append)
    return job, refs, said


def test_a_report_says_what_comes_before_anything_is_encoded(folders, tmp_path):
    job, refs, said = looked(folders, tmp_path / "cache")
    assert refs == job.pictures.refs()
    assert said[0] == "8 pictures: 7 used, 1 quarantined" and said[1].startswith("  1 truncated, such as damaged.png")
    assert said[-1] == f"report: {tmp_path / 'cache' / 'report'}"
    told = json.loads((tmp_path / "cache" / "report" / "pictures.json").read_text())
    assert told["global_batch"] == 3 and told["used"] == 7 and {len(entry) for entry in told["buckets"]} == {5}


def test_nothing_is_looked_at_that_nobody_asks_for(folders, tmp_path):
    job, refs, said = looked(folders, tmp_path / "cache", report=False)
    assert refs == job.pictures.refs() and said == [] and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("policy", ["merge", "repeat"])
def test_buckets_are_the_same_with_and_without_a_report(folders, tmp_path, policy):
    with_report, without = (looked(folders, tmp_path / "cache", report=flag, small_buckets=policy)[1] for flag in (True, False))
    assert with_report == without and any(ref.bucket for ref in without)


def encoded(folders, cache, **settings):
    job, refs, _ = looked(folders, cache, report=False, **settings)
    encode(job, refs, run_here, lambda *_: None)
    found = LatentCache(cache)
    unit = found.facts.pixels_per_token
    return Counter(Bucket(row.height * unit, row.width * unit) for row in (found[index] for index in range(len(found))))


def test_small_buckets_are_encoded_as_planned(folders, tmp_path):
    kept, merged, repeated = (encoded(folders, tmp_path / policy, small_buckets=policy) for policy in ("keep", "merge", "repeat"))
    assert sum(kept.values()) == sum(merged.values()) == 7 and min(kept.values()) < 3
    assert min(merged.values()) >= 3
    assert min(repeated.values()) >= 3 and set(repeated) == set(kept)
    assert repeated == {bucket: max(count, 3) for bucket, count in kept.items()}
