"""Encoding ahead on Ray: pictures are decoded on CPUs, the encoders run in actors, a worker of the configuration each.

The two passes of `fluxray.tasks.encode` are two data sets of Ray Data, one after the other: when the first is through, its actors
are gone and their devices free. Rows are whole shards, which a look at the names of finished ones leaves out, so nothing of Ray
Data's own state is needed to go on after a kill.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError, RayTaskError

from fluxray.config.encode import holds_pictures
from fluxray.config.schema import TrainConfig
from fluxray.data.folders import is_remote
from fluxray.data.pictures import open_pictures
from fluxray.errors import ConfigError, FluxrayError, PlanError, one_line
from fluxray.models.encoders import encoder_facts, token_counter
from fluxray.models.flux_facts import library_config
from fluxray.runtime import cluster
from fluxray.runtime.failure import FAILURE_FILE
from fluxray.runtime.images import cache_folder
from fluxray.runtime.outcome import FailedError, StoppedError
from fluxray.runtime.paths import write_text
from fluxray.runtime.preflight import look_ahead
from fluxray.runtime.prepare import absolute_paths
from fluxray.runtime.progress import LOG_INTERVAL_S, clock
from fluxray.tasks.encode import Encoded, Pass, Stage, Watch, encode, is_up_to_date
from fluxray.tasks.encode_pictures import Row
from fluxray.tasks.encode_plan import EncodeJob, make_job

CALLS_PER_ACTOR = 2
"""While one shard is on the device, another comes or goes."""

RAYS_WORDS = "\nFailed to apply UDF transform"
"""What Ray Data adds to the text of an error."""


def encode_ahead(config: TrainConfig, verbose: bool = False, watch: Watch | None = None) -> Encoded:
    """Encode the pictures of `data.source` into `data.cache`, or bring that up to date.

    How it goes is told to `watch`, by default printed. Raises FluxrayError for the user's faults, FailedError, StoppedError.
    """
    config = absolute_paths(config)
    job, watch = prepare(config), watch or Progress(print)
    cluster.check_machine(config.resources)
    print(f"listing the pictures of {_shown(config.data.source)}", flush=True)
    refs = job.pictures.refs()
    print(f"{len(refs):,} pictures, to be encoded by {config.model.weights} into {job.cache}", flush=True)
    if not is_up_to_date(job, refs):
        refs = look_ahead(config, job.pictures, refs, job.cache, print, partial(_counter, job))
    if is_up_to_date(job, refs):
        return encode(job, refs, _nothing, watch)
    if not verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray warns of how its own actors are made
    with cluster.session(verbose, lambda: "the same command goes on with it") as local_cores:
        cluster.check_resources(config.resources)
        try:
            return encode(job, refs, RayPasses(config, local_cores, verbose), watch)
        except (KeyboardInterrupt, SystemExit):
            raise StoppedError("encoding was stopped; the same command goes on with it") from None


def _counter(job: EncodeJob) -> tuple[Callable[[str], int], int]:
    """Return what counts the tokens of a caption, and how many of them are encoded."""
    return token_counter(job.encoders), job.encoders.text_tokens


def _nothing(*_: Any) -> Iterator[Row]:
    raise AssertionError("a cache that is up to date needs no pass")


def prepare(config: TrainConfig) -> EncodeJob:
    """Return the job of a configuration; writes nothing. Raises ConfigError for what is missing or cannot be honoured."""
    weights = _check(config)
    library_config(config.model)  # where the keys of a preset are not those of the weights, that is said
    settings = config.encode
    assert config.data.cache is not None, "checked"
    return make_job(
        cache_folder(config.data.cache),
        open_pictures(config.data.source, config=settings),
        settings,
        encoder_facts(weights, settings.text_tokens, settings.text_layers),
        "float32" if config.precision == "fp32" else "bfloat16",
        "cuda" if config.resources.gpu > 0 else "cpu",
    )


class RayPasses:
    """Runs passes on Ray Data, with the workers that a configuration asks for."""

    def __init__(self, config: TrainConfig, local_cores: int | None, verbose: bool) -> None:
        self._config = config
        self._environment = {**cluster.worker_environment(config, local_cores), "TRANSFORMERS_VERBOSITY": "error"}
        _silence(verbose)

    def __call__(self, job: EncodeJob, wave: Pass) -> Iterator[Row]:
        """Yield what the last stage returns, in the order in which shards are done."""
        resources = self._config.resources
        actors = {
            "num_cpus": 0,
            "num_gpus": resources.gpu,
            "accelerator_type": resources.accelerator,
            "label_selector": dict(resources.label_selector) or None,
            "runtime_env": {"env_vars": self._environment},
        }
        pool = ActorPoolStrategy(
            size=min(resources.num_workers, len(wave.rows)),
            max_concurrent_calls_per_actor=CALLS_PER_ACTOR,
            enable_true_multi_threading=True,
        )
        rows: Any = ray.data.from_items(list(wave.rows), override_num_blocks=len(wave.rows))
        rows = rows.map(_call, fn_args=(wave.before, job), num_cpus=1)
        rows = rows.map(wave.encoder, fn_constructor_args=(job,), compute=pool, **_given(actors))
        rows = rows.map(_call, fn_args=(wave.after, job), num_cpus=0.5)
        try:
            yield from rows.iter_rows()
        except RayError as error:
            raise _explained(error, wave.unit, job.cache / FAILURE_FILE) from error


class Progress:
    """Says now and then how many pictures or captions are done, how fast, and how long the rest takes."""

    def __init__(self, show: Callable[[str], Any], now: Callable[[], float] = time.monotonic) -> None:
        self._show, self._now = show, now
        self._shown_at = float("-inf")
        self._unit = ""
        self._first: tuple[int, float] | None = None

    def __call__(self, unit: str, num_done: int, total: int) -> None:
        """Take in that `num_done` of `total` are done; another unit than before begins a pass."""
        now = self._now()
        if unit != self._unit:
            self._unit, self._first = unit, None
            self._show(f"{unit}: starting encoders for {total:,}")
        if num_done == 0:
            return
        first = self._first = self._first or (num_done, now)
        if num_done < total and now - self._shown_at < LOG_INTERVAL_S:
            return
        self._shown_at = now
        parts = [f"{unit} {num_done:,}/{total:,}"]
        if now > first[1] and num_done > first[0]:
            rate = (num_done - first[0]) / (now - first[1])
            parts += [f"{rate:,.1f}/s", *([f"{clock((total - num_done) / rate)} left"] if num_done < total else [])]
        self._show("  ".join(parts))


def _check(config: TrainConfig) -> str:
    """Return the pipeline that encodes; raises ConfigError for what an encoding lacks, or cannot honour."""
    data, weights = config.data, config.model.weights
    if config.task.kind != "flow":
        raise ConfigError(
            f"task.kind: {config.task.kind!r}, and pictures are for flow; choose a model, such as --model flux1-dev"
        )
    if not holds_pictures(data.source):
        raise ConfigError(f"data.source: {_shown(data.source)} holds no pictures; set one, such as data.source=folder:DIR")
    if data.cache is None:
        raise ConfigError("data.cache: null, but encoded pictures must go somewhere; set data.cache=FOLDER")
    if is_remote(data.cache):
        raise ConfigError(
            f"data.cache: {data.cache!r}, but pictures are encoded into a folder; name one, and copy it there when it is done"
        )
    if weights is None:
        raise ConfigError(
            "model.weights: null, and a preset has no encoders; set model.weights=path:PIPELINE or model.weights=hf:NAME, a "
            "whole pipeline of diffusers"
        )
    if config.encode.mask == "file" and not all(text.startswith(("folder:", "tars:")) for text in _references(data.source)):
        raise ConfigError(
            f"encode.mask: 'file', but the rows of {_shown(data.source)} have no files beside them; set encode.mask=alpha or none"
        )
    if config.resources.gpu not in (0, 1):
        raise ConfigError(
            f"resources.gpu: {config.resources.gpu:g}, but each worker's encoders take one card; set resources.gpu=1"
        )
    return weights


def _call(row: Row, stage: Stage, job: EncodeJob) -> Row:
    """Run a stage on the host."""
    return stage(job)(row)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _silence(verbose: bool) -> None:
    """Leave the talking to `Progress`, unless Ray's own is wanted."""
    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = verbose
    context.raise_original_map_exception = True
    if not verbose:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _explained(error: RayError, unit: str, story: Path) -> Exception:
    """Return the fault of the user that a worker met, or one line on what went wrong there; the rest goes into a file."""
    cause: BaseException = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause).partition(RAYS_WORDS)[0]
    if isinstance(cause, FluxrayError):
        return type(cause)(text)
    told = one_line(Exception(text))
    if "out of memory" in told.lower():
        key = "encode.batch_pixels" if unit == "pictures" else "encode.batch_captions"
        return PlanError(f"{key}: too many for the device ({told}); lower it, or set precision=mixed-bf16")
    write_text(story, f"{error}\n")
    what = f"encoding {unit} failed: {type(cause).__name__}: {told}"
    return FailedError(f"{what}; the same command goes on with it, the whole story is in {story}")


def _references(source: str | tuple[str, ...]) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source


def _shown(source: str | tuple[str, ...]) -> str:
    return ", ".join(_references(source))
