"""Where a worker stands and whom it tells.

Ray's workers import this before they know whether they have anything to train, so it must stay light: no models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxray.protocols import Report


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands and whom it tells.

    `run_dir` is the run's folder on shared storage, `cache_dir` holds tokenised data and trained tokenizers. Every rank calls
    `report` with the same Reports, and `heartbeat` with the step after each step; that returns whether the run should stop, and
    one rank's word is enough. `checkpoints` are the committed ones to resume from, newest first. `notify` takes one line for the
    user, `publish` the name of a file in the run's folder for the tracker, both on rank 0 only. `rung` is where the run stands on
    the ladder of `train.on_oom`; None: where its newest checkpoint says.
    """

    rank: int
    num_ranks: int
    local_rank: int
    run_dir: Path
    cache_dir: Path
    report: Callable[[Report], None]
    heartbeat: Callable[[int], bool]
    checkpoints: Sequence[Path]
    notify: Callable[[str], None]
    publish: Callable[[str], None] = lambda _: None
    rung: int | None = None
