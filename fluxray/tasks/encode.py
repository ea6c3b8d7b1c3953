"""Encoding ahead: captioned pictures become a cache of latents and text embeddings, which training reads.

Two passes over the shards, so that the VAE and the text encoders never share a device: the second begins when the first has let
go of its memory. A shard that is finished is passed over, so an encoding that was killed goes on where it was; in one that has
changed, samples are encoded again whose pixels, caption, encoders or lengths have changed, and the rest is taken from old shards.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from fluxray.data.latent_shards import CACHE_FILE, finish_cache, index_path, read_json
from fluxray.data.pictures import PictureRef
from fluxray.errors import DataError
from fluxray.tasks.encode_pictures import PictureEncoder, ReadPictures, Row, WriteLatents, waiting_file
from fluxray.tasks.encode_plan import (
    SAMPLES_SUFFIX,
    EncodeJob,
    Shard,
    check_folder,
    is_done,
    plan_shards,
    read_samples,
    shard_file,
)
from fluxray.tasks.encode_texts import CaptionEncoder, ReadCaptions, WriteShard, empty_file, read_empty

QUARANTINE_FILE, REPORT_FILE = "quarantine.jsonl", "report.json"

Stage = Callable[[EncodeJob], Callable[[Row], Row]]


class Pass(NamedTuple):
    """One pass: each row goes through the three stages, of which `encoder` wants the device. `unit` is what is counted."""

    unit: str
    rows: Sequence[Row]
    before: Stage
    encoder: Stage
    after: Stage


Run = Callable[[EncodeJob, Pass], Iterator[Row]]
"""Runs a pass, in any order and any processes, and yields what its last stage returns."""

Watch = Callable[[str, int, int], None]
"""Is told after each shard: the unit, how many of them are done, and of how many."""


@dataclass(frozen=True)
class Encoded:
    """What an encoding came to. `pictures` and `captions` were encoded now, in `seconds`, by unit; the rest was there already.

    `num_cut` captions were too long, by `tokens_cut` tokens together; `left_out` counts pictures by the reason why they are.
    """

    cache: Path
    num_samples: int
    num_shards: int
    num_bytes: int
    left_out: Mapping[str, int]
    num_cut: int
    tokens_cut: int
    pictures: int
    captions: int
    seconds: Mapping[str, float]

    def summary(self) -> str:
        """Return one line."""
        rates = [
            f"{number:,} {unit} at {number / max(self.seconds[unit], 1e-9):,.1f}/s" for unit, number in self._now() if number
        ]
        out = sum(self.left_out.values())
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(self.left_out.items()))
        parts = [
            f"{self.num_samples:,} samples in {self.num_shards:,} shards, {self.num_bytes / 1e9:,.2f} GB",
            f"encoded now: {', '.join(rates)}" if rates else "encoded now: nothing, all was there",
            *([f"{self.num_cut:,} captions cut, by {self.tokens_cut:,} tokens"] if self.num_cut else []),
            *([f"{out:,} left out ({reasons}), see {QUARANTINE_FILE}"] if out else []),
        ]
        return f"{self.cache}: {'; '.join(parts)}"

    def _now(self) -> tuple[tuple[str, int], ...]:
        return ("pictures", self.pictures), ("captions", self.captions)


def is_up_to_date(job: EncodeJob, refs: Iterable[PictureRef]) -> bool:
    """Return whether the cache is what an encoding would make it."""
    shards = plan_shards(job, refs)
    return all(is_done(job, shard) for shard in shards) and _names_in(job.cache) == _names(job, shards)


def encode(job: EncodeJob, refs: Iterable[PictureRef], run: Run, watch: Watch) -> Encoded:
    """Encode pictures into the cache of the job, or bring the cache up to date with them.

    Raises DataError for a folder that another encoding is writing or that holds a cache of other origin, and where no picture
    can be used.
    """
    with _alone(job.cache):
        check_folder(job.cache)
        for partial in job.cache.rglob("*.partial"):  # of an encoding that was killed
            partial.unlink(missing_ok=True)
        shards = plan_shards(job, refs)
        missing = [shard for shard in shards if not is_done(job, shard)]
        pictures = _run(job, run, watch, [shard for shard in missing if not waiting_file(job, shard).exists()], _PICTURES)
        is_finished = not missing and _names_in(job.cache) == _names(job, shards)
        wanted: list[Shard | None] = [*missing]
        if not is_finished and not empty_file(job).exists():
            wanted.insert(0, None)
        captions = _run(job, run, watch, wanted, _CAPTIONS)
        done = _count(job, shards, pictures, captions)
        _write_quarantine(job, shards)
        if done.num_samples == 0:
            first = next(iter(done.left_out), "")
            raise DataError(
                f"data.source: none of {sum(done.left_out.values()):,} pictures can be used (first reason: {first}); see "
                f"{job.cache / QUARANTINE_FILE}"
            )
        if not is_finished:
            finish_cache(job.cache, job.facts, [read_empty(job)], _names(job, shards))
            _drop_others(job, shards)
        (job.cache / REPORT_FILE).write_text(json.dumps(_report(done), indent=1) + "\n")
        return done


def _run(
    job: EncodeJob, run: Run, watch: Watch, shards: Sequence[Shard | None], stages: tuple[str, Stage, Stage, Stage]
) -> tuple[int, float]:
    """Run a pass over shards, None being the empty caption; return how many were encoded and the seconds that it took."""
    if not shards:
        return 0, 0.0
    unit, before, encoder, after = stages
    total = sum(0 if shard is None else len(shard.refs) for shard in shards)
    begin, num_done, num_encoded = time.monotonic(), 0, 0
    watch(unit, 0, total)
    for row in run(job, Pass(unit, [{"shard": shard} for shard in shards], before, encoder, after)):
        num_done += int(row["num"])
        num_encoded += int(row["num_encoded"])
        watch(unit, num_done, total)
    return num_encoded, time.monotonic() - begin


_PICTURES = ("pictures", ReadPictures, PictureEncoder, WriteLatents)
_CAPTIONS = ("captions", ReadCaptions, CaptionEncoder, WriteShard)


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache / ".lock", timeout=0):
            yield
    except Timeout:
        raise DataError(f"data.cache: {cache} is being encoded by another process; wait for it, or name another folder") from None


def _names(job: EncodeJob, shards: Iterable[Shard]) -> list[str]:
    """Return the files of the shards that hold samples."""
    return [shard_file(shard) for shard in shards if index_path(job.cache, shard_file(shard)).exists()]


def _names_in(cache: Path) -> list[str] | None:
    if not (cache / CACHE_FILE).exists():
        return None
    return [shard["file"] for shard in read_json(cache / CACHE_FILE, f"data.cache: {cache}")["shards"]]


def _count(job: EncodeJob, shards: Sequence[Shard], pictures: tuple[int, float], captions: tuple[int, float]) -> Encoded:
    told = [of for shard in shards if (of := read_samples(job.cache, shard.stem)) is not None]
    cuts = [sample["tokens_cut"] for of in told for sample in of["samples"].values()]
    names = _names(job, shards)
    return Encoded(
        cache=job.cache,
        num_samples=len(cuts),
        num_shards=len(names),
        num_bytes=sum((job.cache / name).stat().st_size for name in names),
        left_out=Counter(one["reason"] for of in told for one in of["left_out"]),
        num_cut=sum(cut > 0 for cut in cuts),
        tokens_cut=sum(cuts),
        pictures=pictures[0],
        captions=captions[0],
        seconds={"pictures": pictures[1], "captions": captions[1]},
    )


def _write_quarantine(job: EncodeJob, shards: Sequence[Shard]) -> None:
    """Write every picture that was left out, and why, a line each."""
    lines = [
        json.dumps(one, ensure_ascii=False) + "\n"
        for shard in shards
        if (of := read_samples(job.cache, shard.stem)) is not None
        for one in of["left_out"]
    ]
    (job.cache / QUARANTINE_FILE).write_text("".join(lines), encoding="utf-8")


def _report(done: Encoded) -> dict[str, Any]:
    seconds = dict(done.seconds)
    return {
        "samples": done.num_samples,
        "shards": done.num_shards,
        "bytes": done.num_bytes,
        "left_out": dict(done.left_out),
        "captions_cut": done.num_cut,
        "tokens_cut": done.tokens_cut,
        "encoded_now": {"pictures": done.pictures, "captions": done.captions},
        "seconds": seconds,
    }


def _drop_others(job: EncodeJob, shards: Sequence[Shard]) -> None:
    """Remove shards that the finished cache no longer names, and what waited for it."""
    kept = {shard.stem for shard in shards}
    for path in job.cache.glob(f"*{SAMPLES_SUFFIX}"):
        stem = path.name.removesuffix(SAMPLES_SUFFIX)
        if stem not in kept:
            for file in (*job.cache.glob(f"{stem}.*"), path):
                file.unlink(missing_ok=True)
    shutil.rmtree(job.work_folder, ignore_errors=True)
