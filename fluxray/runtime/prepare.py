"""From a resolved configuration to a run: its name, its folder, what it may change when it is resumed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxray.config.checks_task import CACHES
from fluxray.config.encode import holds_pictures
from fluxray.config.load import flatten, from_yaml, to_yaml
from fluxray.config.schema import TrainConfig
from fluxray.data.pictures import absolute_pictures
from fluxray.data.sources import absolute_reference, absolute_sources
from fluxray.errors import CheckpointError, ConfigError
from fluxray.objectstore import StoreError
from fluxray.runtime.mirror import Mirror, of_run
from fluxray.runtime.paths import CONFIG_FILE, Home, committed_checkpoints, home, new_run_name, write_text

CHANGEABLE = (
    "train.num_steps",
    "train.log_every",
    "train.on_oom",
    "task.first_loss",
    "model.fused_qkv",
    "storage",
    "resources.",
    "checkpoint.",
    "evaluation.",
    "tracking.",
    "hardware.",
    "profile.",
)
"""Keys that a later start of a run may change; a key with a dot at its end stands for its section."""

BATCH_KEYS = (
    "batch.micro_size",
    "batch.accumulation_steps",
    "batch.global_size",
    "batch.dynamic",
    "batch.min_micro_size",
    "batch.max_micro_size",
)
"""How the global batch is cut may change with the workers, its size may not."""


@dataclass(frozen=True)
class Run:
    """A run about to start: `config` has name, storage and absolute paths; `resumed` holds the changed keys, None if new.

    `mirror` is where its checkpoints are mirrored, if that answers.
    """

    config: TrainConfig
    home: Home
    run_dir: Path
    resumed: Mapping[str, Any] | None
    mirror: Mirror | None = None

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.run_dir.name


def prepare(config: TrainConfig, label: str) -> Run:
    """Name the run and compare it with an earlier start of that name; writes nothing. ConfigError for what may not change."""
    where = home(config.storage)
    name = config.name or new_run_name(label, where.runs)
    config = absolute_paths(config).model_copy(update={"name": name, "storage": str(where.root)})
    run_dir = where.runs / name
    if run_dir.is_symlink():
        raise ConfigError(f"name: {name!r} is a link in {where.runs}, and runs stay there; remove it or set another name")
    mirror, mirrored = _reach_mirror(config, run_dir)
    resumed = None if mirrored is None else changed_keys(mirrored, config)
    if (run_dir / CONFIG_FILE).exists():
        resumed = changed_keys(from_yaml(run_dir / CONFIG_FILE), config)
        _check_length(config, run_dir)
    return Run(config, where, run_dir, resumed, mirror)


def save_config(run: Run) -> None:
    """Write the run's config.yaml."""
    write_text(run.run_dir / CONFIG_FILE, to_yaml(run.config))


def fetch_lost(run: Run) -> None:
    """Fetch the newest complete checkpoint from the mirror if the run's folder has none. Raises CheckpointError."""
    if run.mirror is not None and not committed_checkpoints(run.run_dir):
        run.mirror.fetch(run.run_dir, lambda text: print(text, flush=True))


def again(run_dir: Path) -> str:
    """Return what the same command would do now."""
    command = f"the same command with name={run_dir.name}"
    try:
        saved = bool(committed_checkpoints(run_dir))
    except CheckpointError as error:
        return str(error)
    return f"{command} goes on from its last checkpoint" if saved else f"{command} begins anew, there is no checkpoint yet"


def _reach_mirror(config: TrainConfig, run_dir: Path) -> tuple[Mirror | None, TrainConfig | None]:
    """Return the run's mirror and the configuration there.

    Without an answer only a run goes on that has a checkpoint here: another might start anew over what it has there.
    """
    if config.checkpoint.mirror is None:
        return None, None
    try:
        mirror = of_run(config, run_dir.name)
        mirror.store.check(run_dir.name)
        return mirror, mirror.config()
    except StoreError as error:
        address = config.checkpoint.mirror.partition("?")[0]
        if committed_checkpoints(run_dir):
            print(f"mirror: {address} does not answer ({error}); checkpoints are sent to it once it does", flush=True)
            return None, None
        raise ConfigError(
            f"checkpoint.mirror: {address} does not answer ({error}), and run {run_dir.name} has no checkpoint here to go on "
            f"from; try again, or set checkpoint.mirror=null to start anew"
        ) from None


def _check_length(config: TrainConfig, run_dir: Path) -> None:
    newest = next(iter(committed_checkpoints(run_dir)), None)
    if newest is not None and int(newest.name.rpartition("_")[2]) > config.train.num_steps:
        raise ConfigError(
            f"train.num_steps: {config.train.num_steps}, but {newest.name} is further; raise it, or set another name"
        )


def changed_keys(old: TrainConfig, new: TrainConfig) -> dict[str, Any]:
    """Return the keys with new values that a resume may change; ConfigError names the first that it may not."""
    before, after = flatten(old), flatten(new)
    changed = {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key)}
    for key in changed:
        if key not in BATCH_KEYS and not any(key == free or (free[-1] == "." and key.startswith(free)) for free in CHANGEABLE):
            raise ConfigError(
                f"{key}: {_shown(after.get(key))}, but run {new.name} was started with {_shown(before.get(key))}; "
                f"set it back to go on with that run, or set another name"
            )
    if old.global_batch_size != new.global_batch_size:
        raise ConfigError(
            f"batch.accumulation_steps: {new.batch.accumulation_steps} makes a global batch of {new.global_batch_size} rows on "
            f"{new.resources.num_workers} workers, but run {new.name} was started with {old.global_batch_size}; keep that size, "
            f"or set another name"
        )
    return changed


def _shown(value: Any) -> str:
    """Return a value as it would be written on the command line."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return repr(value) if isinstance(value, str) else json.dumps(value)


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the configuration with each `path:` and each cache absolute, since workers run in other folders.

    Raises DataError or ConfigError for a wrong form.
    """
    data, model = config.data, config.model
    weights = None if model.weights is None else absolute_reference(model.weights)
    places: dict[str, Any]
    match config.task.kind:
        case "lm":
            held_out = None if data.eval_source is None else absolute_sources(data.eval_source, "data.eval_source")
            tokenizer = None if data.tokenizer is None else absolute_reference(data.tokenizer)
            places = {"source": absolute_sources(data.source), "eval_source": held_out, "tokenizer": tokenizer}
        case "flow":
            from fluxray.runtime.images import cache_place  # its imports are no use to a run on text

            caches = {key: getattr(data, key) for key in CACHES}
            places = {key: str(cache_place(name, f"data.{key}")) for key, name in caches.items() if name is not None}
            if holds_pictures(data.source):
                places["source"] = absolute_pictures(data.source)
    model = model.model_copy(update={"weights": weights})
    return config.model_copy(update={"data": data.model_copy(update=places), "model": model})
