"""How much `ray job submit --working-dir` would upload, which its job server limits; known here before anything is sent.

Ray calls `refuse_too_large` before it uploads where the user sets RAY_JOB_SUBMIT_HOOK to it.
"""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

MIB = 2**20

LIMIT = 100 * MIB
"""What Ray's job server takes; it answers anything larger with error 413."""

WALK_S = 5.0
"""How long the files are counted at most: a home folder may hold millions."""

REMEDY = "name what the job does not need in .rayignore (or .gitignore), or submit from a clean checkout"
ENTRY_POINT = "jobs/train.py"
USER_FAULT = 2


class Upload(NamedTuple):
    """Bytes of a folder that Ray would pack; name and bytes of the largest file or folder in it; whether all was counted."""

    size: int
    largest: str
    largest_size: int
    complete: bool = True

    @property
    def is_too_large(self) -> bool:
        """Whether the job server would refuse it."""
        return self.size >= LIMIT

    def __str__(self) -> str:
        size = f"{'' if self.complete else 'more than '}{self.size / MIB:.1f} MiB"
        return f"{size} (most in {self.largest}: {self.largest_size / MIB:.1f})" if self.largest else size


def measure(folder: Path) -> Upload:
    """Return what Ray would pack of `folder`, by its own rules: .rayignore, .gitignore, its default excludes, no compression."""
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    sizes: dict[str, int] = {}
    deadline = time.monotonic() + WALK_S

    def count(path: Path) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError
        if path.is_file():
            top = path.relative_to(folder).parts[0]
            sizes[top] = sizes.get(top, 0) + path.stat().st_size

    quiet = logging.Logger("fluxray-upload", logging.CRITICAL + 1)
    excludes = [packaging._get_excludes(folder, ray_constants.get_runtime_env_default_excludes())]
    respects_git = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    try:
        packaging._dir_travel(folder, excludes, count, include_gitignore=respects_git, logger=quiet)
    except TimeoutError:
        return _summed(sizes, complete=False)
    return _summed(sizes, complete=True)


def refuse_too_large(working_dir: str | None = None, **_: Any) -> None:
    """End `ray job submit` with one line if its working directory is more than the job server takes."""
    folder = Path(working_dir).expanduser().absolute() if working_dir and "://" not in working_dir else None
    if folder is None or not folder.is_dir():
        return
    found = measure(folder)
    if found.is_too_large:
        message = f"--working-dir: {folder} is {found}, and Ray's job server takes {LIMIT // MIB} MiB; {REMEDY}"
        print(f"fluxray: error: {message}", file=sys.stderr, flush=True)
        sys.exit(USER_FAULT)


def _summed(sizes: dict[str, int], complete: bool) -> Upload:
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return Upload(sum(sizes.values()), largest, sizes.get(largest, 0), complete)
