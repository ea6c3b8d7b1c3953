"""Pictures by diffusers' own pipelines, whose transformer is an engine: one forward of all pictures a denoising step.

Everything around the transformer is done on the host in fp32: noise, scheduler, guidance. Each picture has a generator of its
own, so it does not depend on the others. FLUX.1 and FLUX.2-dev are told the guidance; klein bases, which are not, get
classifier-free guidance against the empty caption, which takes two forwards.

Shapes: B pictures, T image tokens, C packed channels, L text tokens, E text width, P pooled width.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from fluxray.data.latent_shards import TextEmbedding
from fluxray.data.prompts import Prompt, PromptSet
from fluxray.errors import ConfigError, one_line
from fluxray.models.flux_facts import FAMILIES
from fluxray.protocols import Batch, FlowBatch

T = TypeVar("T")
Forwards = Callable[[Sequence[Batch]], Sequence[Tensor]]
Agree = Callable[[bool], bool]
"""Returns on every rank whether any has brought True; collective."""


class SamplingError(Exception):
    """Why there are no pictures, in words."""


class OtherRankError(SamplingError):
    """Another rank has failed, and says why."""


@dataclass(frozen=True)
class Recipe:
    """How pictures are sampled; `height` and `width` in pixels. Without a guidance the pipeline's own holds."""

    seeds: tuple[int, ...]
    steps: int
    height: int
    width: int
    guidance: float | None


class EngineTransformer(nn.Module):
    """What pipelines call as their transformer. `config` is the library's configuration of the one that `forwards` runs.

    Pictures go through it in parts of `rows`, all in one call of `forwards`. Before each call the ranks `agree` that none has
    failed.
    """

    def __init__(self, config: Mapping[str, Any], forwards: Forwards, rows: int, agree: Agree = lambda failed: failed):
        super().__init__()
        from diffusers.configuration_utils import FrozenDict

        self.config = FrozenDict(config)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._forwards = forwards
        self._rows = rows
        self._agree = agree

    def cache_context(self, _: str) -> AbstractContextManager[None]:
        """Nothing is cached between steps."""
        return nullcontext()

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        guidance: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor]:
        """Return the prediction [B, T, C] for `hidden_states` [B, T, C], texts [B, L, E] and noise levels [B] in [0, 1].

        `img_ids` are the pipeline's, row by row; those of texts are always the same.
        """
        last = (img_ids[0] if img_ids.ndim == 3 else img_ids)[-1]
        whole = FlowBatch(
            noised=hidden_states,
            target=hidden_states,
            sigma=timestep,
            weight=torch.ones_like(timestep),
            text=encoder_hidden_states,
            pooled=pooled_projections,
            guidance=guidance if self.config["guidance_embeds"] else None,
            height=int(last[1]) + 1,
            width=int(last[2]) + 1,
            num_valid=len(hidden_states),
        )
        if self._agree(False):
            raise OtherRankError("another rank has failed")
        outputs = self._forwards(list(whole.split(self._rows)))
        return (torch.cat([output.to(hidden_states) for output in outputs]),)


class Studio:
    """Pipeline, VAE and scheduler around a transformer. `folder` is a pipeline's, `device` decodes, one picture after another.

    The VAE waits on the host between pictures. Raises ConfigError for a folder without a VAE or a scheduler of the family.
    """

    def __init__(self, folder: Path, transformer: EngineTransformer, is_distilled: bool | None, device: torch.device):
        self._device = device
        with _quiet(), torch.random.fork_rng(devices=[]):
            try:
                self.pipeline = _pipeline(folder, transformer, bool(is_distilled))
            except Exception as error:  # noqa: BLE001 - whatever the library meets in files
                raise ConfigError(
                    f"sample.pipeline: {folder} has no VAE and scheduler that diffusers loads ({one_line(error)}); name a "
                    f"whole pipeline"
                ) from None

    def sample(self, found: PromptSet, recipe: Recipe, decodes: bool = True) -> list[list[Image.Image]]:
        """Return of each prompt the pictures of all seeds; empty lists where this rank does not decode.

        Raises SamplingError for latents that are not finite, and whatever the library raises.
        """
        made: dict[int, list[Image.Image]] = {number: [] for number in range(len(found.prompts))}
        for length in dict.fromkeys(len(prompt.embedding.text) for prompt in found.prompts):
            numbers = [n for n, prompt in enumerate(found.prompts) if len(prompt.embedding.text) == length]
            pictures = self._sample([found.prompts[n] for n in numbers], found.empty.get(length), recipe, decodes)
            for place, picture in enumerate(pictures):
                made[numbers[place // len(recipe.seeds)]].append(picture)
        return list(made.values())

    @torch.no_grad()
    def _sample(
        self, prompts: Sequence[Prompt], empty: TextEmbedding | None, recipe: Recipe, decodes: bool
    ) -> Sequence[Image.Image]:
        """Sample prompts whose texts have one length."""
        texts = [prompt.embedding for prompt in prompts for _ in recipe.seeds]
        given: dict[str, Any] = {"prompt_embeds": torch.stack([text.text for text in texts]).float()}
        if texts[0].pooled is not None:
            given["pooled_prompt_embeds"] = torch.stack([text.pooled for text in texts if text.pooled is not None]).float()
        if type(self.pipeline).__name__ == "Flux2KleinPipeline" and empty is not None:
            given["negative_prompt_embeds"] = empty.text.float().expand(len(texts), -1, -1)
        if recipe.guidance is not None:
            given["guidance_scale"] = recipe.guidance

        def at_end(_: Any, step: int, __: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
            if step == self.pipeline.num_timesteps - 1:
                if not values["latents"].isfinite().all():
                    raise SamplingError("the latents are not finite")
                if decodes:
                    self.pipeline.vae.to(self._device)
            return values

        try:
            with _quiet():
                images = self.pipeline(
                    **given,
                    height=recipe.height,
                    width=recipe.width,
                    num_inference_steps=recipe.steps,
                    generator=[torch.Generator().manual_seed(seed) for _ in prompts for seed in recipe.seeds],
                    output_type="pil" if decodes else "latent",
                    callback_on_step_end=at_end,
                ).images
        finally:
            self.pipeline.vae.to("cpu")
        return images if decodes else []


def agreed(action: Callable[[], T], agree: Agree) -> T:
    """Return what `action` returns, which calls an EngineTransformer with the same `agree`, if it fails on no rank.

    Otherwise every rank raises, and has agreed as often as every other one.
    """
    try:
        result = action()
    except OtherRankError:
        raise
    except Exception:
        agree(True)
        raise
    if agree(False):
        raise OtherRankError("another rank has failed")
    return result


def _pipeline(folder: Path, transformer: EngineTransformer, is_distilled: bool) -> Any:
    """Return the pipeline of the transformer's family without text encoders."""
    import diffusers

    second = FAMILIES[transformer.config["_class_name"]] == "flux2"
    vae_class: Any = diffusers.AutoencoderKLFlux2 if second else diffusers.AutoencoderKL
    vae = vae_class.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32, use_safetensors=True).eval()
    vae.requires_grad_(False).enable_slicing()
    keys = json.loads((folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    scheduler_class: Any = getattr(diffusers, keys["_class_name"])
    common: dict[str, Any] = {"scheduler": scheduler_class.from_config(keys), "vae": vae, "transformer": transformer}
    common |= {"text_encoder": None, "tokenizer": None}
    more: dict[str, Any] = {"text_encoder_2": None, "tokenizer_2": None}
    if not second:
        pipeline = diffusers.FluxPipeline(**common, **more)
    elif transformer.config["guidance_embeds"]:
        pipeline = diffusers.Flux2Pipeline(**common)
    else:
        pipeline = diffusers.Flux2KleinPipeline(**common, is_distilled=is_distilled)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what diffusers says of components that are none of its own."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
