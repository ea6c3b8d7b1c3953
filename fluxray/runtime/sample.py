"""`fluxray sample`: pictures by the newest checkpoint of a run, or by a published or exported pipeline."""

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fluxray.checkpoint import committed, open_newest
from fluxray.config.encode import PIXELS_PER_TOKEN
from fluxray.config.load import from_yaml
from fluxray.config.schema import ModelConfig
from fluxray.config.text import read_file
from fluxray.data.latent_shards import TextEmbedding
from fluxray.data.latents import LatentCache
from fluxray.data.prompts import Prompt, PromptSet, read_prompts, write_prompts
from fluxray.errors import CheckpointError, ConfigError, FluxrayError
from fluxray.export import MODEL_DIR
from fluxray.export.adapter import adapters_of, is_adapted, merged
from fluxray.export.files import Kept
from fluxray.export.run import require_averages
from fluxray.models.encoders import TextEncoder, encoder_facts
from fluxray.models.flux_facts import flux_facts, library_config
from fluxray.models.pipeline import INDEX, flux_config, pipeline_facts
from fluxray.protocols import StateReader
from fluxray.runtime.images import cache_place
from fluxray.runtime.inference import Averaged, load_forwards, model_of
from fluxray.runtime.paths import CONFIG_FILE
from fluxray.runtime.pictures import decoder_folder, described
from fluxray.tasks.grid import draw_grid, file_name, save_png
from fluxray.tasks.sampling import EngineTransformer, Recipe, SamplingError, Studio

PROMPT_FILE = ".safetensors"
TOKENS_AT_ONCE = 1 << 14
"""Positions of pictures and texts in one micro-batch."""


@dataclass(frozen=True)
class Origin:
    """What pictures are sampled from: `weights` are a checkpoint's, or the name of a published model.

    `pipeline` names the VAE, the scheduler and the text encoders around it, None where nothing does. `text_tokens`,
    `text_layers` and `size` are those that the run was trained on, where its cache is still there.
    """

    name: str
    step: int | None
    model: ModelConfig
    weights: StateReader | str
    pipeline: str | None
    text_tokens: int | None = None
    text_layers: tuple[int, ...] | None = None
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Wish:
    """What is asked for. `size` is height and width in pixels; None leaves the choice to run or pipeline."""

    seeds: tuple[int, ...] = (0,)
    steps: int = 28
    size: tuple[int, int] | None = None
    guidance: float | None = None


def of_run(run_dir: Path, averaged: bool, pipeline: str | None, notify: Callable[[str], None]) -> Origin:
    """Return the newest checkpoint of a run. Raises CheckpointError where there is none, or one of no image model."""
    config = from_yaml(run_dir / CONFIG_FILE)
    if config.task.kind != "flow":
        raise ConfigError(f"RUN: {run_dir.name} is of a language model; name the run of an image model")
    reader = open_newest(committed(run_dir), notify)
    if reader is None:
        raise CheckpointError(f"RUN: {run_dir.name} has no checkpoint yet; train it first")
    if averaged:
        require_averages(reader, run_dir.name)
    model = model_of(run_dir / MODEL_DIR).model_copy(update={"fused_qkv": False})
    weights: StateReader = Averaged(reader) if averaged else reader
    if is_adapted(reader):
        keys = read_file(run_dir / CONFIG_FILE, f"RUN: {run_dir}")
        weights = merged(adapters_of(keys, run_dir / MODEL_DIR, model.config, Kept(reader, torch.float32, averaged))).reader
    found = Origin(run_dir.name, reader.state.step, model, weights, pipeline or config.sample.pipeline or config.model.weights)
    try:
        cache = LatentCache(cache_place(config.data.cache or ""))
    except FluxrayError:
        return found
    lengths, layers = cache.facts.text_lengths, cache.facts.text_layers
    return replace(found, text_tokens=max(lengths), text_layers=layers or None, size=_commonest(cache))


def of_pipeline(reference: str, pipeline: str | None) -> Origin:
    """Return a published or exported model, `path:FOLDER` or `hf:NAME`."""
    model = ModelConfig(config=dict(flux_config(reference)), weights=reference)
    return Origin(Path(reference.partition(":")[2]).name, None, model, reference, pipeline or reference)


def is_pipeline(run: str) -> str | None:
    """Return the reference of a pipeline's folder or of `path:` and `hf:` names, None for anything else."""
    if run.startswith(("path:", "hf:")):
        return run
    folder = Path(run).expanduser().absolute()
    return f"path:{folder}" if (folder / INDEX).is_file() else None


def embed(origin: Origin, captions: Sequence[str], device: torch.device) -> PromptSet:
    """Return captions, and the empty one, as the pipeline's text encoders embed them; these are gone from the device then.

    Raises ConfigError where there are no text encoders, or others than the model's.
    """
    reference = _pipeline_of(origin)
    facts = encoder_facts(reference, origin.text_tokens, origin.text_layers)
    needed = flux_facts(origin.model)
    if (facts.text_width, facts.pooled_width) != (needed.text_width, needed.pooled_width):
        raise ConfigError(
            f"--pipeline: the texts of {reference} are {facts.text_width} wide, {origin.name} reads {needed.text_width}; name "
            f"the pipeline that encoded what it was trained on"
        )
    encoder = TextEncoder(facts, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    found = [_embedded(encoder, caption) for caption in (*captions, "")]
    del encoder
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    prompts = [Prompt(caption, embedding) for caption, embedding in zip(captions, found[:-1], strict=True)]
    return PromptSet(prompts, {len(found[-1].text): found[-1]})


def sample(  # noqa: PLR0913 - each is asked for apart
    origin: Origin,
    prompts: PromptSet,
    wish: Wish,
    out_dir: Path,
    *,
    device: torch.device,
    streamed: bool | None = None,
    weights: Literal["trained", "ema"] = "trained",
    notify: Callable[[str], None] = print,
) -> list[Path]:
    """Write each picture, and the grid of all, which comes last; return their paths. Raises ConfigError and SamplingError."""
    folder = decoder_folder(_pipeline_of(origin), "--pipeline")
    height, width = wish.size or origin.size or (1024, 1024)
    recipe = Recipe(wish.seeds, wish.steps, height, width, wish.guidance)
    forwards, is_streamed = load_forwards(origin.model, origin.weights, device, streamed)
    how = "its blocks streamed" if is_streamed else "resident"
    notify(
        f"sampling {len(prompts.prompts) * len(wish.seeds)} pictures of {height}x{width} px by {origin.name} on {device}, {how}"
    )
    longest = max(len(prompt.embedding.text) for prompt in prompts.prompts)
    rows = max(TOKENS_AT_ONCE // (height * width // PIXELS_PER_TOKEN**2 + longest), 1)
    transformer = EngineTransformer(library_config(origin.model), forwards, rows)
    pictures = Studio(folder, transformer, _is_distilled(origin, folder), device).sample(prompts, recipe)
    told = described(recipe, origin.name, origin.step, weights)
    captions = [prompt.caption for prompt in prompts.prompts]
    paths: list[Path] = []
    try:
        for number, (caption, row) in enumerate(zip(captions, pictures, strict=True)):
            for seed, picture in zip(wish.seeds, row, strict=True):
                paths.append(out_dir / file_name(number, caption, seed))
                save_png(picture, paths[-1], {"prompt": caption, "seed": seed, **told})
        grid = draw_grid(pictures, captions, wish.seeds, ", ".join(f"{key} {value}" for key, value in told.items()))
        save_png(grid, out_dir / "grid.png", {"prompts": "\n".join(captions), "seeds": wish.seeds, **told})
    except OSError as error:
        raise ConfigError(f"--out: {out_dir} cannot be written ({error.strerror}); name another folder") from None
    return [*paths, out_dir / "grid.png"]


def command(  # noqa: PLR0913, PLR0917 - the command's own options
    origin: Origin,
    captions: Sequence[str],
    prompt_file: Path | None,
    embed_to: Path | None,
    wish: Wish,
    out_dir: Path,
    weights: Literal["trained", "ema"],
) -> list[Path]:
    """Do what `fluxray sample` is asked for and return what was written."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    facts = flux_facts(origin.model)
    if prompt_file is not None and prompt_file.suffix == PROMPT_FILE:
        prompts = read_prompts(prompt_file, facts.text_width, facts.pooled_width)
    else:
        texts = [*captions, *([] if prompt_file is None else _lines(prompt_file))]
        if not texts:
            raise ConfigError("--prompt: is missing; give one, or --grid FILE with one a line")
        prompts = embed(origin, texts, device)
    if embed_to is not None:
        write_prompts(embed_to, prompts)
        return [embed_to]
    try:
        return sample(origin, prompts, wish, out_dir, device=device, weights=weights)
    except SamplingError as error:
        raise ConfigError(f"RUN: {origin.name} gives no pictures ({error}); try an earlier checkpoint") from None


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Return height and width of `HxW` in pixels; ConfigError for another form and for what no tokens cover."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--size: {text!r} is not HxW, such as 1024x768")
    height, width = map(int, parts)
    if height % PIXELS_PER_TOKEN or width % PIXELS_PER_TOKEN:
        raise ConfigError(f"--size: {text} is no multiple of {PIXELS_PER_TOKEN} both ways; choose one that is")
    return height, width


def _embedded(encoder: TextEncoder, caption: str) -> TextEmbedding:
    text, pooled = encoder.embed([caption])
    return TextEmbedding(text[0].cpu(), None if pooled is None else pooled[0].cpu())


def _pipeline_of(origin: Origin) -> str:
    if origin.pipeline is None:
        raise ConfigError(f"--pipeline: {origin.name} began from none; name one whose VAE and text encoders fit, path:FOLDER")
    return origin.pipeline


def _commonest(cache: LatentCache) -> tuple[int, int]:
    """Return height and width in pixels of most samples."""
    counts: dict[tuple[int, int], int] = dict.fromkeys(cache.facts.resolutions, 0)
    for index in range(len(cache)):
        height, width, _ = cache.size(index)
        counts[height * cache.facts.pixels_per_token, width * cache.facts.pixels_per_token] += 1
    return max(counts, key=lambda size: counts[size])


def _is_distilled(origin: Origin, folder: Path) -> bool | None:
    """Return what the model's own pipeline says, or the one around it."""
    found = pipeline_facts(origin.weights) if isinstance(origin.weights, str) else None
    if found is not None:
        return found.is_distilled
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return index.get("is_distilled")


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--grid: {path} cannot be read ({error}); name a text file with one prompt a line") from None
    return [line.strip() for line in lines if line.strip()]
