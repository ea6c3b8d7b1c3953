"""The VAE and the text encoders of a published FLUX pipeline, as diffusers' own pipeline runs them.

What a family does with a caption (chat template, system message, which hidden states are stacked) is read from the pipeline's
class in diffusers, and its `encode_prompt` is called. A text encoder keeps only the layers below the last one that is read.

Shapes: B batch, H and W pixels, T tokens of a picture, C packed channels, L text tokens, E text width, P pooled width.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluxray.errors import ConfigError
from fluxray.models.flux_facts import FAMILIES, Family
from fluxray.models.pipeline import flux_config, pipeline_facts, pipeline_folder
from fluxray.models.stored import tensors_in

PACKED = 2
"""Positions of the VAE along each side of a token."""

TEXT_ENCODERS: Mapping[Family, tuple[str, ...]] = {"flux1": ("text_encoder", "text_encoder_2"), "flux2": ("text_encoder",)}
"""Components of a family's pipelines."""

LONG_TEXT, SHORT_TEXT = 512, 256
"""Tokens of a text: the pipelines' own number, and what FLUX.1-schnell was made for."""


@dataclass(frozen=True)
class EncoderFacts:
    """What the encoders of a pipeline make of a picture and its caption.

    `folder` is the pipeline's on this machine, of `reference`. `channels` is the C of packed latents, which `statistics`
    normalise: `shift` and `scale` (FLUX.1) or `mean` and `std` of each channel (FLUX.2). `text_layers` are the hidden states
    that FLUX.2 stacks, by their numbers. `pooled_width` is None for FLUX.2.
    """

    reference: str
    folder: Path
    pipeline: str
    family: Family
    channels: int
    pixels_per_token: int
    text_width: int
    pooled_width: int | None
    statistics: Mapping[str, tuple[float, ...]]
    text_tokens: int
    text_layers: tuple[int, ...]


class Texts(NamedTuple):
    """Embedded captions: text [B, L, E] and, for FLUX.1, pooled [B, P]."""

    text: Tensor
    pooled: Tensor | None


def encoder_facts(reference: str, text_tokens: int | None = None, text_layers: Sequence[int] | None = None) -> EncoderFacts:
    """Return the facts of the pipeline that `path:FOLDER` or `hf:NAME` names; on the hub, its encoders are fetched.

    `text_tokens` and `text_layers` stand in for the pipeline's own. Raises ConfigError for a transformer without its pipeline,
    for layers that its text encoder has not, and for parts that do not belong together.
    """
    pipeline, folder = pipeline_facts(reference), pipeline_folder(reference)
    if pipeline is None or folder is None:
        raise ConfigError(
            f"model.weights: {reference!r} is a transformer alone, and pictures are encoded by the VAE and the text encoders "
            f"around it; name the whole pipeline"
        )
    transformer = flux_config(reference)
    family = FAMILIES[transformer["_class_name"]]
    layers = _text_layers(reference, pipeline.pipeline, folder, text_layers)
    try:
        text_width, pooled_width = _text_widths(folder, family, layers)
        facts = EncoderFacts(
            reference=reference,
            folder=folder,
            pipeline=pipeline.pipeline,
            family=family,
            channels=PACKED**2 * pipeline.latent_channels,
            pixels_per_token=PACKED * 2 ** (len(pipeline.vae["block_out_channels"]) - 1),
            text_width=text_width,
            pooled_width=pooled_width,
            statistics=_statistics(folder, pipeline.latent_shift, pipeline.latent_scale, pipeline.batch_norm_eps),
            text_tokens=text_tokens or (SHORT_TEXT if _is_schnell(family, transformer) else LONG_TEXT),
            text_layers=layers,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.weights: {reference!r} cannot be read ({error}); check that its files are complete") from None
    _check_widths(reference, facts, transformer)
    return facts


class TextEncoder:
    """The text encoders of a pipeline on `device`, with weights of `dtype`."""

    def __init__(self, facts: EncoderFacts, dtype: torch.dtype, device: torch.device) -> None:
        self.facts, self.device = facts, device
        with quiet():
            self.pipeline = _load_pipeline(facts, dtype)
        if facts.text_layers:
            _shorten(self.pipeline.text_encoder, max(facts.text_layers))
        self.pipeline.to(device)

    @torch.no_grad()
    def embed(self, captions: Sequence[str]) -> Texts:
        """Return the embeddings of captions, on the device; text that is longer than the pipeline takes is cut."""
        keys: dict[str, Any] = {"max_sequence_length": self.facts.text_tokens, "device": self.device}
        with quiet():
            if self.facts.family == "flux1":
                text, pooled, _ = self.pipeline.encode_prompt(list(captions), list(captions), **keys)
                return Texts(text, pooled)
            text, _ = self.pipeline.encode_prompt(list(captions), text_encoder_out_layers=self.facts.text_layers, **keys)
        return Texts(text, None)

    def num_cut(self, caption: str) -> int:
        """Return how many tokens of a caption are cut."""
        with quiet():
            return max(_num_tokens(self.pipeline, caption) - self.facts.text_tokens, 0)


def token_counter(facts: EncoderFacts) -> Callable[[str], int]:
    """Return what counts the tokens of a caption, its template included, without the weights of any encoder."""
    with quiet():
        pipeline = _load_pipeline(facts, torch.float32, **dict.fromkeys(TEXT_ENCODERS[facts.family]))

    def count(caption: str) -> int:
        with quiet():
            return _num_tokens(pipeline, caption)

    return count


class VaeEncoder:
    """The VAE of a pipeline on `device`, with weights of `dtype`."""

    def __init__(self, facts: EncoderFacts, dtype: torch.dtype, device: torch.device) -> None:
        self.facts, self.dtype, self.device = facts, dtype, device
        with quiet():
            self.vae = _load_vae(facts, dtype).to(device)
        shape = (1, -1, 1, 1)
        self._numbers = {name: torch.tensor(values, device=device).view(shape) for name, values in facts.statistics.items()}

    @torch.no_grad()
    def latents(self, pixels_BHWC: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return packed, normalised latents [B, T, C] in fp32, on the device, of uint8 pixels [B, H, W, 3].

        FLUX.1 draws from the posterior, each picture by a generator with its own seed; FLUX.2 takes the mean.
        """
        pixels = pixels_BHWC.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 255.0
        posterior = self.vae.encode((2.0 * pixels - 1.0).to(self.dtype)).latent_dist
        mean, numbers = posterior.mean.float(), self._numbers
        if self.facts.family == "flux2":
            patches = _patches(mean)
            return _packed((patches - numbers["mean"]) / numbers["std"])
        noise = torch.stack([torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        drawn = mean + posterior.std.float() * noise.to(self.device, non_blocking=True)
        return _packed(_patches((drawn - numbers["shift"]) * numbers["scale"]))


def default_text_layers(pipeline_class: str) -> tuple[int, ...]:
    """Return the numbers of the hidden states that a pipeline's class of diffusers stacks; none for FLUX.1's."""
    import diffusers

    with quiet():
        parameters = inspect.signature(getattr(diffusers, pipeline_class).encode_prompt).parameters
    found = parameters.get("text_encoder_out_layers")
    return () if found is None else tuple(found.default)


def _patches(latents: Tensor) -> Tensor:
    """Return latents [B, c, h, w] as patches [B, 4c, h/2, w/2]; the channels of a patch by channel, row, column."""
    return nn.functional.pixel_unshuffle(latents, PACKED)


def _packed(patches: Tensor) -> Tensor:
    """Return patches [B, C, h, w] as tokens [B, h w, C], row by row."""
    return patches.flatten(2).transpose(1, 2)


def _is_schnell(family: Family, transformer: Mapping[str, Any]) -> bool:
    return family == "flux1" and not transformer.get("guidance_embeds", False)


def _text_layers(reference: str, pipeline: str, folder: Path, asked: Sequence[int] | None) -> tuple[int, ...]:
    own = default_text_layers(pipeline)
    if not own:
        if asked is not None:
            raise ConfigError(f"encode.text_layers: {list(asked)}, but a {pipeline} reads the last layer alone; drop it")
        return ()
    layers, whose = (own, f", which a {pipeline} reads") if asked is None else (tuple(asked), "")
    num_layers = _num_layers(reference, folder)
    if max(layers) > num_layers:
        raise ConfigError(
            f"encode.text_layers: {list(layers)}{whose}, but the text encoder of {reference} has {num_layers}; set "
            f"encode.text_layers to some that it has"
        )
    return layers


def _num_layers(reference: str, folder: Path) -> int:
    try:
        return int(_text_config(folder, "text_encoder")["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"model.weights: {reference!r} has no readable text_encoder/config.json; complete the pipeline"
        ) from None


def _text_widths(folder: Path, family: Family, layers: Sequence[int]) -> tuple[int, int | None]:
    if family == "flux2":
        return len(layers) * int(_text_config(folder, "text_encoder")["hidden_size"]), None
    return int(_text_config(folder, "text_encoder_2")["d_model"]), int(_text_config(folder, "text_encoder")["hidden_size"])


def _text_config(folder: Path, component: str) -> dict[str, Any]:
    """Return the keys of a text encoder's config.json, with those of its language model where it has a part that sees."""
    keys = json.loads((folder / component / "config.json").read_text(encoding="utf-8"))
    return {**keys, **keys.get("text_config", {})}


def _statistics(folder: Path, shift: float | None, scale: float | None, eps: float | None) -> dict[str, tuple[float, ...]]:
    if eps is None:
        if shift is None or scale is None:
            raise KeyError("vae/config.json lacks shift_factor or scaling_factor")
        return {"shift": (float(shift),), "scale": (float(scale),)}
    stored = tensors_in([str(path) for path in sorted((folder / "vae").glob("*.safetensors")) if path.name.count(".") == 1])
    mean, variance = (stored[f"bn.{name}"].read().float() for name in ("running_mean", "running_var"))
    return {"mean": tuple(mean.tolist()), "std": tuple(torch.sqrt(variance + eps).tolist())}


def _check_widths(reference: str, facts: EncoderFacts, transformer: Mapping[str, Any]) -> None:
    """Compare what the encoders make with what the transformer of the pipeline reads, as far as its config.json tells."""
    made = {
        "in_channels": facts.channels,
        "joint_attention_dim": facts.text_width,
        "pooled_projection_dim": facts.pooled_width,
    }
    for key, value in made.items():
        if value is not None and transformer.get(key, value) != value:
            raise ConfigError(
                f"model.weights: the encoders of {reference} make {value} where its transformer's {key} is {transformer[key]}; "
                f"name a pipeline whose parts belong together"
            )


def _num_tokens(pipeline: Any, caption: str) -> int:
    """Return how many tokens a pipeline makes of a caption before it cuts; FLUX.1's are T5's, CLIP gives one vector of any."""
    if hasattr(pipeline, "tokenizer_2"):
        return len(pipeline.tokenizer_2(caption).input_ids)
    if hasattr(pipeline, "system_message"):
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input([caption], pipeline.system_message)
        return len(pipeline.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][0])
    turns = [{"role": "user", "content": caption}]
    template = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    return len(pipeline.tokenizer(pipeline.tokenizer.apply_chat_template(turns, **template)).input_ids)


def _folder(facts: EncoderFacts) -> Path:
    """Return the pipeline's folder on the machine that this runs on, fetched where the hub has it and the machine has not."""
    if not facts.folder.is_dir() and (fetched := pipeline_folder(facts.reference)) is not None:
        return fetched
    return facts.folder


def _load_pipeline(facts: EncoderFacts, dtype: torch.dtype, **parts: None) -> Any:
    """Return the pipeline with its text encoders and tokenizers alone, and without `parts`."""
    import diffusers

    cls: Any = getattr(diffusers, facts.pipeline)
    return cls.from_pretrained(_folder(facts), vae=None, transformer=None, dtype=dtype, use_safetensors=True, **parts)


def _load_vae(facts: EncoderFacts, dtype: torch.dtype) -> Any:
    import diffusers

    cls: Any = diffusers.AutoencoderKL if facts.family == "flux1" else diffusers.AutoencoderKLFlux2
    vae = cls.from_pretrained(_folder(facts), subfolder="vae", dtype=dtype, use_safetensors=True)
    vae.decoder = None
    return vae.eval()


def _shorten(model: Any, last: int) -> None:
    """Drop what hidden state number `last` does not depend on: the layers above it, and the head.

    The layer behind it stays, since the state behind a model's last layer is normalised.
    """
    del model.get_decoder().layers[last + 1 :]
    model.set_output_embeddings(nn.Identity())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what diffusers and transformers say of cut captions and parts that are left out, and their bars of progress."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", "bitsandbytes.backends.cpu.ops")]
    levels = [logger.level for logger in loggers]
    with_bars = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    for library in with_bars:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in with_bars:
            library.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
