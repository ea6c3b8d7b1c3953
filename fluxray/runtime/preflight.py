"""Before pictures are encoded: a look at all of them, the report on it, and the buckets that follow from their number."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxray.config.schema import TrainConfig
from fluxray.data.pictures import PictureRef, Pictures
from fluxray.data.survey import planned, survey
from fluxray.runtime.picture_report import Tokens, describe, write_report
from fluxray.runtime.progress import LOG_INTERVAL_S, clock

REPORT_FOLDER = "report"
"""Within the cache."""


def look_ahead(
    config: TrainConfig,
    pictures: Pictures,
    refs: list[PictureRef],
    cache: Path,
    show: Callable[[str], Any],
    counter: Callable[[], tuple[Tokens, int]] | None = None,
) -> list[PictureRef]:
    """Return the references as they are to be encoded: with buckets and repetitions, where `encode.small_buckets` asks for them.

    With `encode.report` the report goes into the cache's folder and its lines to `show`. Without it pictures are looked at only
    where buckets depend on their number. `counter` gives what counts the tokens of a caption, and how many are not cut.
    """
    settings = config.encode
    if not settings.report and settings.small_buckets == "keep":
        return refs
    watch = _Watch(show)
    found = survey(pictures, settings, config.global_batch_size, _num_threads(), watch)
    if settings.report:
        count_tokens, max_tokens = (None, None) if counter is None else counter()
        told = write_report(cache / REPORT_FOLDER, found, pictures, settings, count_tokens, max_tokens)
        for line in (*describe(told), f"report: {cache / REPORT_FOLDER}"):
            show(line)
    return refs if settings.small_buckets == "keep" else planned(refs, found.plan)


class _Watch:
    """Says now and then how many pictures were looked at."""

    def __init__(self, show: Callable[[str], Any]) -> None:
        self._show, self._began, self._shown_at = show, time.monotonic(), time.monotonic()

    def __call__(self, num_done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown_at >= LOG_INTERVAL_S and num_done < total:
            self._shown_at = now
            rest = (now - self._began) / num_done * (total - num_done)
            self._show(f"looked at {num_done:,}/{total:,} pictures  {clock(rest)} left")


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
