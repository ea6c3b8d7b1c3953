"""Pictures while training: a grid of fixed prompts and seeds by the weights of the moment, in the run's folder and in MLflow.

All ranks sample the same pictures, so that their forwards are equal; rank 0 decodes and draws. Whatever goes wrong is one line
for the user, and training goes on. What no care mends is a device that fails inside a forward on one rank of several: the others
wait for it, as they would in training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download

from fluxray.config.schema import FlowTaskConfig, TrainConfig
from fluxray.data.identity import weights_identity
from fluxray.data.latents import LatentData
from fluxray.data.prompts import PromptSet, chosen, prompts_of_caches, read_prompts
from fluxray.errors import ConfigError, one_line
from fluxray.models.flux_facts import FluxFacts, library_config
from fluxray.models.pipeline import pipeline_facts
from fluxray.protocols import Engine
from fluxray.ranks import Ranks
from fluxray.runtime.images import Size, sizes_of
from fluxray.tasks.grid import draw_grid, save_png
from fluxray.tasks.sampling import EngineTransformer, Recipe, SamplingError, Studio, agreed

FOLDER = "samples"
"""In the run's folder."""

DECODED = ["vae/*", "scheduler/*"]
"""What decoding needs of a pipeline on the hub."""


@dataclass(frozen=True)
class Sampling:
    """What a run's pictures are made of: prompts, recipe, the pipeline around the transformer of configuration `keys`.

    `averaged`: by the moving averages. `rows` pictures go through the model in one micro-batch: their tokens are at most those
    of training.
    """

    prompts: PromptSet
    recipe: Recipe
    folder: Path
    keys: Mapping[str, Any]
    is_distilled: bool | None
    averaged: bool
    rows: int


def plan_sampling(config: TrainConfig, facts: FluxFacts, data: LatentData) -> Sampling | None:
    """Return what the run samples, None for nothing. Raises FluxrayError for prompts and pipelines that are not there."""
    sample, cache = config.sample, data.train.cache
    if sample.every_steps == 0:
        return None
    if sample.embeddings is not None:
        path = Path(sample.embeddings.removeprefix("path:")).expanduser().absolute()
        found = chosen(read_prompts(path, facts.text_width, facts.pooled_width), sample.prompts)
    else:
        found = prompts_of_caches([data.train, data.evaluation], sample.prompts, sample.num_prompts)
    folder = decoder_folder(sample.pipeline or str(config.model.weights))
    size = _size(config, data)
    longest = max(len(prompt.embedding.text) for prompt in found.prompts)
    tokens = Size(size[0] // cache.facts.pixels_per_token, size[1] // cache.facts.pixels_per_token, longest).tokens
    most = config.batch.micro_size * sizes_of(*data).largest.tokens
    return Sampling(
        prompts=found,
        recipe=Recipe(sample.seeds, sample.steps, *size, _guidance(config, facts)),
        folder=folder,
        keys=library_config(config.model),
        is_distilled=facts.is_distilled if facts.is_distilled is not None else _is_distilled(config.model.weights),
        averaged=(sample.weights or ("ema" if config.ema.decay else "trained")) == "ema",
        rows=max(most // tokens, 1),
    )


def check_decoder(sampling: Sampling, data: LatentData) -> None:
    """Raise ConfigError where the VAE that decodes is not the one that has encoded the cache."""
    encoded_by, decodes = data.train.cache.facts.vae, weights_identity(sampling.folder / "vae", "sample.pipeline")
    if encoded_by != decodes:
        raise ConfigError(
            f"sample.pipeline: {sampling.folder} has VAE {decodes}, data.cache was encoded by {encoded_by}; name the "
            f"pipeline that encoded it"
        )


def decoder_folder(reference: str, config_key: str = "sample.pipeline") -> Path:
    """Return the folder of the pipeline `path:FOLDER` or `hf:NAME` whose VAE and scheduler are there; ConfigError without."""
    scheme, _, rest = reference.partition(":")
    if scheme not in ("path", "hf") or not rest:
        raise ConfigError(f"{config_key}: {reference!r} is neither path:FOLDER nor hf:NAME")
    try:
        folder = Path(rest).expanduser().absolute() if scheme == "path" else Path(snapshot_download(rest, allow_patterns=DECODED))
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises
        raise ConfigError(f"{config_key}: {reference} cannot be fetched ({one_line(error)}); check name and network") from None
    for name in ("vae/config.json", "scheduler/scheduler_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{config_key}: {reference} has no {name}; name a pipeline with a VAE and a scheduler")
    return folder


@dataclass(frozen=True)
class Pictures:
    """Draws the grid after a step. Collective: every rank calls it after the same steps."""

    sampling: Sampling
    engine: Engine
    device: torch.device
    ranks: Ranks
    run_dir: Path
    notify: Callable[[str], None]
    publish: Callable[[str], None]

    def at(self, step: int) -> None:
        """Sample, draw and publish; one line says why there is no picture. The engine has nothing pending."""
        name = f"{FOLDER}/step_{step:08d}.png"
        try:
            agreed(lambda: self._draw(step, name), self.ranks.any)
        except Exception as error:  # noqa: BLE001 - whatever sampling meets, training goes on
            what = str(error) if isinstance(error, SamplingError) else f"{type(error).__name__}: {one_line(error)}"
            self.notify(f"{name}: no pictures at step {step} ({what}); training goes on")
        else:
            if self.ranks.rank == 0:
                self.publish(name)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # in the sizes of sampling; training takes others

    def _draw(self, step: int, name: str) -> None:
        sampling, first = self.sampling, self.ranks.rank == 0
        transformer = EngineTransformer(sampling.keys, self.engine.forwards, sampling.rows, self.ranks.any)
        studio = Studio(sampling.folder, transformer, sampling.is_distilled, self.device)
        if sampling.averaged:
            with self.engine.averaged():
                pictures = studio.sample(sampling.prompts, sampling.recipe, decodes=first)
        else:
            pictures = studio.sample(sampling.prompts, sampling.recipe, decodes=first)
        if first:
            told = described(sampling.recipe, self.run_dir.name, step, "ema" if sampling.averaged else "trained")
            captions = [prompt.caption for prompt in sampling.prompts.prompts]
            grid = draw_grid(pictures, captions, sampling.recipe.seeds, ", ".join(f"{key} {told[key]}" for key in told))
            save_png(grid, self.run_dir / name, {**told, "prompts": "\n".join(captions), "seeds": sampling.recipe.seeds})


def described(recipe: Recipe, name: str, step: int | None, weights: str) -> dict[str, object]:
    """Return what pictures were made by, for titles and metadata."""
    of_step = {} if step is None else {"step": step}
    guidance = "the pipeline's" if recipe.guidance is None else f"{recipe.guidance:g}"
    return {"run": name, **of_step, "weights": weights, "denoising steps": recipe.steps, "guidance": guidance}


def _size(config: TrainConfig, data: LatentData) -> tuple[int, int]:
    """Return height and width in pixels: as configured, or those of most images to train on."""
    if config.sample.height is not None and config.sample.width is not None:
        return config.sample.height, config.sample.width
    return commonest_size(data)


def commonest_size(data: LatentData) -> tuple[int, int]:
    """Return height and width in pixels of most images to train on."""
    rows = data.train
    buckets, first, counts = np.unique(rows.buckets, return_index=True, return_counts=True)
    del buckets
    height, width, _ = rows.cache.size(int(rows.indexes[first[counts.argmax()]]))
    return height * rows.cache.facts.pixels_per_token, width * rows.cache.facts.pixels_per_token


def _guidance(config: TrainConfig, facts: FluxFacts) -> float | None:
    """Return the guidance; against a caption that a model from scratch has never seen left out there is none."""
    assert isinstance(config.task, FlowTaskConfig)
    if config.sample.guidance is None and not facts.embeds_guidance and config.model.weights is None:
        return None if config.task.caption_dropout else 1.0
    return config.sample.guidance


def _is_distilled(weights: str | None) -> bool | None:
    pipeline = None if weights is None else pipeline_facts(weights)
    return None if pipeline is None else pipeline.is_distilled
