"""Mirrored runs as a user sees them: listed, and fetched to this machine for evaluation and export."""

import re
from collections.abc import Callable
from pathlib import Path

from fluxray.config.load import from_yaml, to_yaml
from fluxray.errors import CheckpointError, ConfigError
from fluxray.objectstore import StoreError, open_store
from fluxray.runtime.checkpoints import table
from fluxray.runtime.mirror import Mirror, of_run
from fluxray.runtime.paths import CONFIG_FILE, Home, write_text


def lines_of(run_dir: Path) -> list[str]:
    """Return what the mirror of a run on this machine has, as lines to show; none for a run without a mirror."""
    config = from_yaml(run_dir / CONFIG_FILE)
    if config.checkpoint.mirror is None:
        return []
    try:
        return ["", *_listed(of_run(config, run_dir.name))]
    except (StoreError, ConfigError) as error:
        return ["", f"mirror {config.checkpoint.mirror.partition('?')[0]} cannot be listed: {error}"]


def lines_at(address: str) -> list[str]:
    """Return what the mirrored run `MIRROR/RUN` has, as lines to show. Raises ConfigError, CheckpointError."""
    try:
        return _listed(_at(address))
    except StoreError as error:
        raise _unreadable(address, error) from None


def fetch_run(address: str, where: Home, notify: Callable[[str], None]) -> Path:
    """Make the run `MIRROR/RUN` a run of this machine, with its newest checkpoint, and return its folder.

    Raises ConfigError if there is no such run or one of that name is here already, CheckpointError as `Mirror.fetch`.
    """
    try:
        mirror = _at(address)
        run_dir = where.runs / mirror.name
        if (run_dir / CONFIG_FILE).exists():
            raise ConfigError(f"RUN: {address}: {mirror.name} is here already, in {run_dir}; name that, or another --storage")
        config = mirror.config()
        if config is None:
            raise ConfigError(f"RUN: {mirror.address} holds no run; name MIRROR/RUN, of its checkpoint.mirror and name")
        if mirror.fetch(run_dir, notify) is None:
            raise CheckpointError(f"RUN: {mirror.address} has no complete checkpoint")
        mirror.fetch_beside(run_dir)
    except StoreError as error:
        raise _unreadable(address, error) from None
    write_text(run_dir / CONFIG_FILE, to_yaml(config.model_copy(update={"storage": str(where.root)})))
    return run_dir


def _at(address: str) -> Mirror:
    before, question, query = address.partition("?")
    above, _, name = before.rstrip("/").rpartition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or above.endswith("/"):
        raise ConfigError("RUN: does not end in a run's name; name MIRROR/RUN, such as s3://BUCKET/PREFIX/RUN")
    return Mirror(open_store(f"{above}{question}{query}", key="RUN"), name)


def _listed(mirror: Mirror) -> list[str]:
    found = mirror.checkpoints()
    return [f"in {mirror.address}:", *table(found)] if found else [f"{mirror.address} has no checkpoint yet"]


def _unreadable(address: str, error: StoreError) -> CheckpointError:
    return CheckpointError(f"RUN: {address.partition('?')[0]} cannot be read ({error}); try again")
