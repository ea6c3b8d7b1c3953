"""Buckets and crops: arithmetic that holds for every picture."""

import numpy as np
import pytest
from PIL import Image

from fluxray.config.encode import EncodeConfig
from fluxray.data.bucket_plan import Placed, plan_buckets
from fluxray.data.crops import Bucket, bucket_sizes, choose_crop, cut, fit
from fluxray.data.decode import Quarantined

CONFIGS = [
    EncodeConfig(resolution=resolution, bucket_step=step, max_aspect=aspect, max_upscale=8)
    for resolution in (64, 100, 127, 512, 1024)
    for step in (16, 64)
    for aspect in (1.0, 2.0, 3.0)
    if step <= resolution
]


def random_sizes(count: int, aspect: float) -> list[tuple[int, int]]:
    generator = np.random.default_rng(7)
    areas = np.exp(generator.uniform(np.log(64**2), np.log(6000**2), count))
    shapes = np.exp(generator.uniform(-np.log(aspect), np.log(aspect), count))
    return [
        (max(round(float(a * s) ** 0.5), 32), max(round(float(a / s) ** 0.5), 32)) for a, s in zip(areas, shapes, strict=True)
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.resolution}-{c.bucket_step}-{c.max_aspect}")
def test_buckets_keep_to_area_step_and_shape_and_come_in_pairs(config):
    (resolution,) = config.resolutions
    buckets = bucket_sizes(resolution, config)
    assert len(set(buckets)) == len(buckets)
    assert {Bucket(width, height) for height, width in buckets} == set(buckets)
    for height, width in buckets:
        assert height % config.bucket_step == width % config.bucket_step == 0 < min(height, width)
        assert height * width <= resolution**2
        assert max(height, width) <= config.max_aspect * min(height, width)
        short, long = sorted((height, width))
        assert height == width or short * (long + config.bucket_step) > resolution**2, "the longest side that fits"
    side = resolution // config.bucket_step * config.bucket_step
    assert Bucket(side, side) in buckets
    assert bucket_sizes(resolution, config.model_copy(update={"buckets": "square"})) == [Bucket(side, side)]


def test_the_buckets_of_1024_are_those_of_the_field():
    names = {str(bucket) for bucket in bucket_sizes(1024, EncodeConfig(max_aspect=2))}
    assert names >= {"1024x1024", "896x1152", "832x1216", "768x1344"} and len(names) == 9


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.resolution}-{c.bucket_step}-{c.max_aspect}")
def test_a_crop_lies_in_the_picture_covers_the_bucket_and_no_bucket_keeps_more(config):
    (resolution,) = config.resolutions
    buckets = bucket_sizes(resolution, config)
    for width, height in random_sizes(150, config.max_aspect):
        try:
            crop = choose_crop((width, height), config)
        except Quarantined:
            assert all(fit((width, height), bucket).scale > config.max_upscale for bucket in buckets if bucket == buckets[0])
            continue
        left, top, right, bottom = crop.box
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert crop.scale <= config.max_upscale
        assert (right - left) * crop.scale == pytest.approx(crop.width)
        assert (bottom - top) * crop.scale == pytest.approx(crop.height)
        assert (right - left == width) or (bottom - top == height), "nothing is cut off that need not be"
        from_middle = max(abs((width - right) - left), abs((height - bottom) - top))
        assert from_middle <= (1 if crop.scale == 1 else 1e-6)

        def kept(bucket, size=(width, height)):
            box = fit(size, bucket).box
            return (box[2] - box[0]) * (box[3] - box[1])

        assert kept(crop.bucket) >= max(map(kept, buckets)) * (1 - 1e-9)


def test_turning_a_picture_turns_its_crop():
    config = EncodeConfig(resolution=512)
    for width, height in random_sizes(100, 2.9):
        if min(width, height) > 400:
            one, other = choose_crop((width, height), config), choose_crop((height, width), config)
            assert one.bucket == Bucket(other.width, other.height) and one.scale == other.scale


def test_a_picture_takes_the_largest_resolution_it_is_large_enough_for():
    config = EncodeConfig(resolution=(512, 1024, 256), max_upscale=1.25)
    assert config.resolutions == (1024, 512, 256)
    assert choose_crop((4000, 4000), config).bucket == Bucket(1024, 1024)
    assert choose_crop((820, 820), config).bucket == Bucket(1024, 1024)
    assert choose_crop((818, 818), config).bucket == Bucket(512, 512)
    assert choose_crop((205, 205), config).bucket == Bucket(256, 256)
    with pytest.raises(Quarantined, match=r"too small: 200 x 200 would be enlarged 1\.28 times, encode\.max_upscale is 1\.25"):
        choose_crop((200, 200), config)


def test_pixels_that_are_not_scaled_are_copied_and_others_are_filtered():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (65, 101, 3), dtype=np.uint8)
    crop = fit((101, 65), Bucket(65, 64))
    assert crop.scale == 1 and crop.box == (18, 0, 82, 65)
    assert np.array_equal(cut(Image.fromarray(pixels), crop), pixels[:, 18:82])
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    small = cut(Image.fromarray(stripes), fit((256, 256), Bucket(64, 64)))
    assert small.shape == (64, 64, 3) and np.abs(small[4:-4, 4:-4].astype(int) - 128).max() <= 2, "no aliasing"
    mask = cut(Image.fromarray(stripes[:, :, 0]), fit((256, 256), Bucket(32, 64)))
    assert mask.shape == (32, 64) and mask.dtype == np.uint8
    assert crop.to_json() == {"box": [18, 0, 82, 65], "scale": 1.0, "height": 65, "width": 64}


def placed(counts: dict[tuple[int, int], int], config: EncodeConfig) -> dict[str, Placed]:
    return {
        f"{width}x{height}-{number}": Placed((width, height), choose_crop((width, height), config))
        for (width, height), count in counts.items()
        for number in range(count)
    }


SIZES = {(1000, 1000): 9, (1100, 900): 3, (900, 1200): 2, (1500, 600): 1}


@pytest.mark.parametrize("policy", ["keep", "merge", "repeat"])
def test_no_policy_leaves_a_picture_out_and_the_order_decides_nothing(policy):
    config = EncodeConfig(resolution=512, small_buckets=policy)
    given = placed(SIZES, config)
    plan = plan_buckets(given, config, 8)
    assert set(plan.bucket_of) == set(given) and min(plan.repeats.values(), default=2) > 1
    assert plan == plan_buckets(dict(reversed(given.items())), config, 8)


def test_small_buckets_are_kept_merged_or_repeated():
    keep, merge, repeat = (EncodeConfig(resolution=512, small_buckets=policy) for policy in ("keep", "merge", "repeat"))
    given = placed(SIZES, keep)
    kept = plan_buckets(given, keep, 8)
    assert sorted(kept.counts.values()) == [1, 2, 3, 9] and [small.action for small in kept.small] == ["kept"] * 3
    merged = plan_buckets(given, merge, 8)
    assert sum(merged.counts.values()) == 15 and min(merged.counts.values()) >= 8
    assert {small.action for small in merged.small} == {"merged"}
    repeated = plan_buckets(given, repeat, 8)
    assert sorted(repeated.counts.values()) == [8, 8, 8, 9] and repeated.repeats["1500x600-0"] == 8
    assert [times for key, times in repeated.repeats.items() if key.startswith("1100")] == [3, 3, 2]
    assert plan_buckets(given, merge, 1).small == ()


def test_a_bucket_is_not_merged_where_its_pictures_would_be_enlarged_too_much():
    config = EncodeConfig(resolution=(512, 256), small_buckets="merge", max_upscale=1.0)
    given = placed({(600, 600): 8, (300, 300): 1}, config)
    plan = plan_buckets(given, config, 4)
    assert plan.counts == {Bucket(256, 256): 1, Bucket(512, 512): 8}
    assert [str(small) for small in plan.small] == ["256x256 with 1: kept"]
    down = plan_buckets(placed({(600, 600): 1, (300, 300): 8}, config), config, 4)
    assert down.counts == {Bucket(256, 256): 9} and str(down.small[0]) == "512x512 with 1: merged into 256x256"
