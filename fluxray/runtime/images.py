"""What a configuration of flow matching names: caches that belong to its model, and how large their images are."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluxray.config.checks_task import CACHES
from fluxray.config.encode import PIXELS_PER_TOKEN
from fluxray.config.schema import DataConfig, TrainConfig
from fluxray.data.folders import check_remote, is_remote
from fluxray.data.identity import with_pipeline
from fluxray.data.latent_facts import CacheNeeds
from fluxray.data.latents import LatentCache, LatentData, LatentRows, load_latents
from fluxray.errors import ConfigError, DataError
from fluxray.models.flux_facts import FluxFacts
from fluxray.models.pipeline import PipelineFacts, pipeline_facts, pipeline_folder

RESOLUTION, TEXT_TOKENS = 1024, 512
"""What is assumed of images and texts where a plan is made without a cache; the published pipelines' own."""

LATENT_PATCH = 4
"""Positions of the VAE that a token packs: 2 x 2."""


class Size(NamedTuple):
    """Of a bucket, in tokens."""

    height: int
    width: int
    text_tokens: int

    @property
    def tokens(self) -> int:
        """Positions of image and text."""
        return self.height * self.width + self.text_tokens


class ImageSizes(NamedTuple):
    """How large the images of a run and their texts are.

    `largest` has the most positions; images to train on come in `num_buckets` sizes. `told` says in words where this is from.
    """

    largest: Size
    num_buckets: int
    told: str


def cache_place(reference: str, config_key: str = "data.cache") -> Path | str:
    """Return the absolute folder of `FOLDER` or `path:FOLDER`, an address as it is; ConfigError for another form."""
    if not is_remote(reference):
        return cache_folder(reference, config_key)
    check_remote(reference, config_key)
    return reference


def cache_folder(reference: str, config_key: str = "data.cache") -> Path:
    """Return the absolute folder of `FOLDER` or `path:FOLDER`; ConfigError for another form."""
    kind, colon, rest = reference.partition(":")
    if kind == "hf" or (colon and kind == "path" and not rest):
        raise ConfigError(f"{config_key}: {reference!r} is no folder; name one, such as {config_key}=FOLDER")
    return Path(rest if colon and kind == "path" else reference).expanduser().absolute()


def load_images(data: DataConfig, needs: CacheNeeds, masked: bool = False) -> LatentData:
    """Return the rows of a run, of which with `masked` some must have a mask.

    Raises DataError for a cache that cannot be read, ConfigError for another model's.
    """
    assert data.cache is not None, "refused by check_available"
    held_out = None if data.eval_cache is None else cache_place(data.eval_cache, "data.eval_cache")
    prior = None if data.prior_cache is None else cache_place(data.prior_cache, "data.prior_cache")
    return load_latents(cache_place(data.cache), held_out, data.eval_fraction, replace(needs, masks=masked), prior)


def needs_of(facts: FluxFacts) -> CacheNeeds:
    """Return what a transformer wants of a cache."""
    return CacheNeeds(facts.family, facts.in_channels, facts.text_width, facts.pooled_width)


def with_published(needs: CacheNeeds, weights: str | None) -> CacheNeeds:
    """Return the needs with those of the pipeline around published weights.

    One on the hub is known by its small files alone. Raises ConfigError where the pipeline's VAE is not of its transformer.
    """
    pipeline = None if weights is None else pipeline_facts(weights)
    if weights is None or pipeline is None:
        return needs
    packed = LATENT_PATCH * pipeline.latent_channels
    if packed != needs.channels:
        raise ConfigError(
            f"model.weights: the VAE of {weights} has {packed} latent channels per token, its transformer {needs.channels}; name "
            f"a pipeline whose parts belong together"
        )
    if weights.startswith("path:"):
        folder = pipeline_folder(weights)
        assert folder is not None, "it has facts"
        needs = with_pipeline(needs, folder)
        return replace(needs, text_layers=_text_layers(pipeline, folder))
    if pipeline.latent_shift is None or pipeline.latent_scale is None:
        return needs
    return replace(needs, latent_statistics={"shift": (pipeline.latent_shift,), "scale": (pipeline.latent_scale,)})


def image_sizes(data: DataConfig) -> ImageSizes:
    """Return the sizes in the caches of a configuration; where they cannot be read, what is assumed without one."""
    why = ""
    if data.cache is not None:
        try:
            train, *others = (_rows_of(getattr(data, key), f"data.{key}") for key in CACHES)
            assert train is not None
            return sizes_of(train, *others)
        except DataError as error:
            why = f" ({error})"
    resolution, text_tokens = data.resolution or RESOLUTION, data.text_tokens or TEXT_TOKENS
    side = resolution // PIXELS_PER_TOKEN
    is_assumed = "" if data.resolution and data.text_tokens else "assumed: "
    return ImageSizes(
        Size(side, side, text_tokens), 1, f"{is_assumed}one image of {resolution} px and {text_tokens} tokens of text{why}"
    )


def _rows_of(reference: str | None, config_key: str) -> LatentRows | None:
    if reference is None:
        return None
    cache = LatentCache(cache_place(reference, config_key), config_key)
    return LatentRows(cache, np.arange(len(cache)))


def sizes_of(train: LatentRows, held_out: LatentRows | None = None, prior: LatentRows | None = None) -> ImageSizes:
    """Return the sizes of rows to train on, of those that are held out, and of a regularisation set.

    A step has rows to train on and behind them rows of the set, so sizes of both count apart, but for one that all have.
    """
    found = {name: buckets_of(rows) for name, rows in (("train", train), ("held out", held_out), ("prior", prior)) if rows}
    largest = max((size for sizes in found.values() for size in sizes), key=lambda size: size.tokens)
    pixels = f"{largest.height * PIXELS_PER_TOKEN}x{largest.width * PIXELS_PER_TOKEN}"
    drawn = [*found["train"], *found.get("prior", ())]
    num = 1 if len(set(drawn)) == 1 else len(drawn)
    of = "" if num == 1 else f", the largest of {len(set(drawn))} sizes in data.cache"
    return ImageSizes(largest, num, f"an image of {pixels} px and {largest.text_tokens} tokens of text{of}")


def buckets_of(rows: LatentRows) -> list[Size]:
    """Return the size of each bucket of which there are rows."""
    _, first = np.unique(rows.buckets, return_index=True)
    return [Size(*rows.cache.size(int(rows.indexes[index]))) for index in first]


def check_steps(config: TrainConfig, num_buckets: int) -> None:
    """Raise ConfigError for what wants steps of one micro-batch, where images of several sizes make steps of several."""
    if config.optim.in_backward and num_buckets > 1:
        raise ConfigError(
            f"optim.in_backward: true wants one micro-batch a step, and the {num_buckets} sizes of images and texts in "
            f"data.cache make steps of several; set optim.in_backward=false, or train on one size"
        )


def _text_layers(pipeline: PipelineFacts, folder: Path) -> tuple[int, ...]:
    """Return the hidden states that the pipeline's class stacks by itself; none where its text encoder has not so many layers."""
    import diffusers

    cls: Any = getattr(diffusers, pipeline.pipeline, None)
    parameters: Mapping[str, Any] = inspect.signature(cls.encode_prompt).parameters if cls is not None else {}
    if "text_encoder_out_layers" not in parameters:
        return ()
    layers = tuple(parameters["text_encoder_out_layers"].default)
    try:
        keys = json.loads((folder / "text_encoder" / "config.json").read_text(encoding="utf-8"))
        num_layers = int({**keys, **keys.get("text_config", {})}["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return layers if max(layers) <= num_layers else ()
