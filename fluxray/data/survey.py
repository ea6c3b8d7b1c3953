"""All pictures of a source looked at before anything is encoded: what can be used, at which size, and what cannot and why."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from fluxray.config.encode import EncodeConfig
from fluxray.data.bucket_plan import BucketPlan, Placed, plan_buckets
from fluxray.data.crops import Crop
from fluxray.data.decode import Quarantined
from fluxray.data.pictures import PictureRef, Pictures
from fluxray.data.prepared import prepare_picture


class Surveyed(NamedTuple):
    """A picture that was looked at.

    Usable ones have a `caption`, a `size` (width, height, upright), a `crop` and the hash of their cropped pixels; others a
    `fault`.
    """

    key: str
    caption: str = ""
    size: tuple[int, int] = (0, 0)
    crop: Crop | None = None
    pixels: str = ""
    notes: tuple[str, ...] = ()
    fault: Quarantined | None = None


@dataclass(frozen=True)
class Survey:
    """What a source holds. `ignored` counts files that are neither pictures nor captions, by kind."""

    pictures: tuple[Surveyed, ...]
    plan: BucketPlan
    ignored: Mapping[str, int]

    @property
    def used(self) -> list[Surveyed]:
        """Those that can be used."""
        return [picture for picture in self.pictures if picture.fault is None]

    @property
    def quarantined(self) -> dict[str, list[Surveyed]]:
        """Those that cannot, by reason; the most frequent first."""
        found: dict[str, list[Surveyed]] = {}
        for picture in self.pictures:
            if picture.fault is not None:
                found.setdefault(picture.fault.reason, []).append(picture)
        return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))

    @property
    def notes(self) -> dict[str, int]:
        """How many of the used pictures each note is of."""
        return dict(Counter(note for picture in self.used for note in picture.notes).most_common())

    @property
    def duplicates(self) -> list[list[str]]:
        """The keys of used pictures whose cropped pixels are equal, of each such set, in their order."""
        same: dict[str, list[str]] = {}
        for picture in self.used:
            same.setdefault(picture.pixels, []).append(picture.key)
        return [keys for keys in same.values() if len(keys) > 1]


def survey(
    pictures: Pictures,
    config: EncodeConfig,
    global_batch: int,
    num_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Decode all pictures, in `num_threads` threads; the result does not depend on their number.

    `progress` is told how many of how many are done. Raises DataError for a source without pictures.
    """
    refs = pictures.refs()

    def look(ref: PictureRef) -> Surveyed:
        try:
            return _prepare(pictures, ref, config)
        except Quarantined as fault:
            return Surveyed(ref.key, notes=ref.notes, fault=fault)

    found = []
    for picture in _in_order(look, refs, num_threads):
        found.append(picture)
        if progress is not None:
            progress(len(found), len(refs))
    placed = {one.key: Placed(one.size, one.crop) for one in found if one.crop is not None}
    return Survey(tuple(found), plan_buckets(placed, config, global_batch), pictures.ignored())


def planned(refs: Sequence[PictureRef], plan: BucketPlan) -> list[PictureRef]:
    """Return the references with the buckets that were planned; those that are to be repeated come again as `KEY~2`, ..."""
    found = []
    for ref in refs:
        bucket = plan.bucket_of.get(ref.key)
        found.append(replace(ref, bucket=None if bucket is None else tuple(bucket)))
        found += [replace(found[-1], key=f"{ref.key}~{number}") for number in range(2, plan.repeats.get(ref.key, 1) + 1)]
    return found


def pixel_hash(pixels: np.ndarray) -> str:
    """Return a hash of a picture's shape and pixels (32 hex digits)."""
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def _prepare(pictures: Pictures, ref: PictureRef, config: EncodeConfig) -> Surveyed:
    ready = prepare_picture(pictures, ref, config)
    return Surveyed(ref.key, ready.caption, ready.size, ready.crop, pixel_hash(ready.pixels), ready.notes)


def _in_order(look: Callable[[PictureRef], Surveyed], refs: Sequence[PictureRef], num_threads: int) -> Iterator[Surveyed]:
    """Yield the results in the order of `refs`, with a bounded number of them waiting."""
    if num_threads == 1:
        yield from map(look, refs)
        return
    rest = iter(refs)
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Surveyed]] = deque(pool.submit(look, ref) for ref in islice(rest, 4 * num_threads))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(look, ref) for ref in islice(rest, 1))
