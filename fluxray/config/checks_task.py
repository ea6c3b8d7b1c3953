"""What `task.kind` asks of the other keys: a model of its own library, its own data, and no option of the other kind."""

import json
from pathlib import Path
from typing import Any

from fluxray.config.encode import PIXELS_PER_TOKEN, EncodeConfig, holds_pictures
from fluxray.config.schema import DataConfig, FlowTaskConfig, TrainConfig
from fluxray.errors import ConfigError

CACHES = ("cache", "eval_cache", "prior_cache")
ASSUMED = ("resolution", "text_tokens")
"""Keys of data by which a plan is made without a cache."""

FLOW_DATA = {*CACHES, *ASSUMED, "eval_fraction"}
"""Keys of data that task.kind flow reads; the others are of text, and `source`, which may hold pictures to encode."""

OF_LAW = {"timestep_mean": "logit_normal", "timestep_std": "logit_normal", "mode_scale": "mode"}
"""Which of `task.timesteps` a key belongs to."""

TEXT_KERNELS = ("varlen", "flex")


def check_task(config: TrainConfig) -> None:
    """Raise ConfigError for the first key that does not go with `task.kind`."""
    _check_model(config)
    if isinstance(config.task, FlowTaskConfig):
        _check_law(config.task)
        _check_flow(config, config.task)
        _check_encode(config.encode)
        return
    for key, field in EncodeConfig.model_fields.items():
        if (value := getattr(config.encode, key)) != field.default:
            raise ConfigError(f"encode.{key}: {value!r} is of pictures, and task.kind is lm; drop it, or set task.kind=flow")
    for key in CACHES:
        if getattr(config.data, key) is not None:
            raise ConfigError(
                f"data.{key}: {getattr(config.data, key)!r} has no effect with task.kind lm, which reads data.source; drop it, "
                f"or set task.kind=flow"
            )
    for key in ASSUMED:
        if getattr(config.data, key) is not None:
            raise ConfigError(f"data.{key}: {getattr(config.data, key)} is of images, and task.kind is lm; drop it")


def _check_model(config: TrainConfig) -> None:
    model, kind = config.model, config.task.kind
    image_model, text_model = model.config.get("_class_name"), model.config.get("model_type")
    if kind == "lm" and image_model is not None:
        raise ConfigError(f"task.kind: 'lm', but model.config._class_name {image_model!r} is an image model; set task.kind=flow")
    if kind == "flow" and text_model is not None:
        raise ConfigError(f"task.kind: 'flow', but model.config.model_type {text_model!r} is a language model; set task.kind=lm")
    published = None if model.weights is None else _published_kind(model.weights)
    if published not in (None, kind):
        what = "an image model, as its folder says; set task.kind=flow, or choose its preset, such as --model flux1-dev"
        what = what if published == "flow" else "a language model, as its folder says; set task.kind=lm"
        raise ConfigError(f"task.kind: {kind!r}, but model.weights {model.weights} is {what}")


def _published_kind(weights: str) -> str | None:
    """Return the kind of task of published weights as far as files on this machine tell: a hub name, say, tells nothing."""
    folder = Path(weights.removeprefix("path:")).expanduser()
    if not weights.startswith("path:"):
        return None
    if (folder / "model_index.json").is_file():
        return "flow"
    try:
        keys: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return "flow" if "_class_name" in keys else "lm" if "model_type" in keys else None


def _check_law(task: FlowTaskConfig) -> None:
    for key, law in OF_LAW.items():
        value = getattr(task, key)
        if task.timesteps != law and value != FlowTaskConfig.model_fields[key].default:
            raise ConfigError(
                f"task.{key}: {value:g} has no effect with task.timesteps {task.timesteps}; drop it or set task.timesteps={law}"
            )


def _check_assumed(data: DataConfig) -> None:
    for key in ASSUMED:
        if data.cache is not None and getattr(data, key) is not None:
            raise ConfigError(
                f"data.{key}: {getattr(data, key)} has no effect beside data.cache, whose images and texts have their own sizes; "
                f"drop one of them"
            )
    if data.resolution is not None and data.resolution % PIXELS_PER_TOKEN:
        below = data.resolution - data.resolution % PIXELS_PER_TOKEN
        raise ConfigError(
            f"data.resolution: {data.resolution} is not a multiple of {PIXELS_PER_TOKEN}, the pixels of a token; use {below} or "
            f"{below + PIXELS_PER_TOKEN}"
        )


def _check_prior(config: TrainConfig, task: FlowTaskConfig) -> None:
    if config.data.prior_cache is None:
        if task.prior_weight != FlowTaskConfig.model_fields["prior_weight"].default:
            raise ConfigError(
                f"task.prior_weight: {task.prior_weight:g} has no effect without data.prior_cache; drop it or set the cache"
            )
    elif config.global_batch_size % 2:
        raise ConfigError(
            f"data.prior_cache: makes up half of each global batch, and that of {config.global_batch_size} rows has no half; set "
            f"batch.accumulation_steps={2 * config.batch.accumulation_steps}"
        )


def _check_flow(config: TrainConfig, task: FlowTaskConfig) -> None:
    data, fields = config.data, DataConfig.model_fields
    for key in fields:
        if key == "source" and holds_pictures(data.source):
            continue
        if key not in FLOW_DATA and getattr(data, key) != fields[key].default:
            raise ConfigError(f"data.{key}: is of text, and task.kind flow reads images and texts from data.cache; drop it")
    if data.eval_cache is not None and data.eval_fraction != fields["eval_fraction"].default:
        raise ConfigError("data.eval_fraction: has no effect beside data.eval_cache; set one of them")
    _check_assumed(data)
    _check_prior(config, task)
    if config.loss.chunk_tokens is not None:
        raise ConfigError(
            f"loss.chunk_tokens: {config.loss.chunk_tokens} cuts the logits of a language model, and task.kind is flow; drop it"
        )
    if config.batch.dynamic:
        raise ConfigError("batch.dynamic: true is for rows of text, and task.kind is flow; set batch.dynamic=false")
    if config.attention in TEXT_KERNELS:
        raise ConfigError(
            f"attention: {config.attention!r} keeps packed documents apart, and the images of task.kind flow are not packed; "
            f"set attention=auto, or attention=flash"
        )
    if task.guidance != FlowTaskConfig.model_fields["guidance"].default and config.model.config.get("guidance_embeds") is False:
        raise ConfigError(f"task.guidance: {task.guidance:g} has no effect, since model.config.guidance_embeds is false; drop it")


def _check_encode(encode: EncodeConfig) -> None:
    if not encode.resolutions:
        raise ConfigError("encode.resolution: [] names no size; set one, such as encode.resolution=1024")
    smallest = encode.resolutions[-1]
    if smallest < encode.bucket_step:
        step = f"encode.bucket_step={PIXELS_PER_TOKEN}"
        remedy = f"set {step}" if smallest >= PIXELS_PER_TOKEN else f"set at least {PIXELS_PER_TOKEN}"
        raise ConfigError(f"encode.resolution: {smallest} is below encode.bucket_step {encode.bucket_step}; {remedy}")
