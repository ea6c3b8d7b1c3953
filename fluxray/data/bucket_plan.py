"""Which bucket each picture goes to, once it is known how many there are: what becomes of buckets that fill no global batch."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fluxray.config.encode import EncodeConfig
from fluxray.data.crops import Bucket, Crop, fit


class Placed(NamedTuple):
    """An upright picture's `size` (width, height) and the crop that fits it best."""

    size: tuple[int, int]
    crop: Crop


class SmallBucket(NamedTuple):
    """A bucket of `num_pictures`, too few for a global batch, and what was done: merged into `target`, repeated, or kept."""

    bucket: Bucket
    num_pictures: int
    action: Literal["kept", "merged", "repeated"]
    target: Bucket | None = None

    def __str__(self) -> str:
        where = f" into {self.target}" if self.target else ""
        return f"{self.bucket} with {self.num_pictures}: {self.action}{where}"


@dataclass(frozen=True)
class BucketPlan:
    """The bucket of each picture, by key, and how often it comes where that is more than once. No picture is ever left out."""

    bucket_of: Mapping[str, Bucket]
    repeats: Mapping[str, int]
    small: tuple[SmallBucket, ...]
    global_batch: int

    @property
    def counts(self) -> dict[Bucket, int]:
        """How many samples each bucket has, repetitions counted."""
        counts: Counter[Bucket] = Counter()
        for key, bucket in self.bucket_of.items():
            counts[bucket] += self.repeats.get(key, 1)
        return dict(sorted(counts.items()))


def plan_buckets(placed: Mapping[str, Placed], config: EncodeConfig, global_batch: int) -> BucketPlan:
    """Return the buckets of pictures by `encode.small_buckets`; small is one of fewer than `global_batch`.

    The order of `placed` decides nothing. With merge the smallest goes first, to the bucket of the nearest shape and area in
    which none of its pictures is enlarged by more than `encode.max_upscale`; one without such a neighbour is kept. With repeat
    the pictures of a bucket come as often as fills a global batch.
    """
    bucket_of = {key: placed[key].crop.bucket for key in sorted(placed)}
    small: list[SmallBucket] = []
    repeats: dict[str, int] = {}
    if config.small_buckets == "merge":
        _merge(bucket_of, placed, config, global_batch, small)
    members: dict[Bucket, list[str]] = {}
    for key, bucket in bucket_of.items():
        members.setdefault(bucket, []).append(key)
    for bucket, keys in sorted(members.items()):
        if len(keys) >= global_batch:
            continue
        if config.small_buckets == "repeat":
            each, more = divmod(global_batch, len(keys))
            repeats |= {key: each + (number < more) for number, key in enumerate(keys)}
        small.append(SmallBucket(bucket, len(keys), "repeated" if config.small_buckets == "repeat" else "kept"))
    return BucketPlan(bucket_of, {key: times for key, times in repeats.items() if times > 1}, tuple(small), global_batch)


def _merge(
    bucket_of: dict[str, Bucket],
    placed: Mapping[str, Placed],
    config: EncodeConfig,
    global_batch: int,
    small: list[SmallBucket],
) -> None:
    stuck: set[Bucket] = set()
    while True:
        counts = Counter(bucket_of.values())
        waiting = sorted((count, bucket) for bucket, count in counts.items() if count < global_batch and bucket not in stuck)
        if not waiting:
            return
        count, bucket = waiting[0]
        keys = [key for key, at in bucket_of.items() if at == bucket]
        sizes = {placed[key].size for key in keys}
        near = [
            other for other in counts if other != bucket and all(fit(size, other).scale <= config.max_upscale for size in sizes)
        ]
        if not near:
            stuck.add(bucket)
            continue
        target = min(near, key=lambda other: (_distance(bucket, other), other))
        small.append(SmallBucket(bucket, count, "merged", target))
        bucket_of |= dict.fromkeys(keys, target)


def _distance(one: Bucket, other: Bucket) -> float:
    """Return how far two buckets are apart in shape and in area, each as the logarithm of a ratio."""
    shape = math.log(one.width * other.height / (one.height * other.width))
    area = math.log(one.width * one.height / (other.width * other.height))
    return round(abs(shape) + abs(area), 9)
