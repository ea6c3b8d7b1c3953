"""Tiny pipelines with transformers that fit them, and prompts that their text encoders have embedded."""

from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from fluxray.config.schema import ModelConfig
from fluxray.data.prompts import Prompt, PromptSet
from fluxray.models.flux_facts import library_config
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.tasks.sampling import Recipe
from tests.flow_pictures import POOLED_WIDTH, TEXT_TOKENS, TEXT_WIDTH, Encoders
from tests.models.flux_helpers import CASES

CAPTIONS = ("a pink water lily", "the roof of a temple")
RECIPE = Recipe(seeds=(3, 8), steps=3, height=48, width=32, guidance=3.0)


class Scene(NamedTuple):
    """A pipeline in `folder` and the model of a transformer for it."""

    case: str
    folder: Path
    model: ModelConfig
    prompts: PromptSet
    empty: Any

    @property
    def keys(self) -> dict[str, Any]:
        """The library's whole configuration of the transformer."""
        return library_config(self.model)

    def stack(self) -> FluxStack:
        """Return the stack on the meta device."""
        return build_flux(self.model, 5)

    @torch.no_grad()
    def expected(self, model: Any, recipe: Recipe = RECIPE, **keys: Any) -> Any:
        """Return what diffusers' own pipeline makes of one prompt after the other with the library's model."""
        pipeline = self._pipeline(model)
        made = []
        for prompt in self.prompts.prompts:
            repeat = len(recipe.seeds)
            text = prompt.embedding.text.float().repeat(repeat, 1, 1)
            given: dict[str, Any] = {"prompt_embeds": text}
            if prompt.embedding.pooled is not None:
                given["pooled_prompt_embeds"] = prompt.embedding.pooled.float().repeat(repeat, 1)
            if isinstance(pipeline, diffusers.Flux2KleinPipeline):
                given["negative_prompt_embeds"] = self.empty.text.float().repeat(repeat, 1, 1)
            made += pipeline(
                **given,
                guidance_scale=recipe.guidance,
                height=recipe.height,
                width=recipe.width,
                num_inference_steps=recipe.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in recipe.seeds],
                **keys,
            ).images
        return made

    def _pipeline(self, model: Any) -> Any:
        parts: dict[str, Any] = {"text_encoder": None, "tokenizer": None, "transformer": model}
        if self.case.startswith("flux1"):
            cls: Any = diffusers.FluxPipeline
            parts |= {"text_encoder_2": None, "tokenizer_2": None}
        else:
            cls = diffusers.Flux2Pipeline if self.case == "flux2 dev" else diffusers.Flux2KleinPipeline
        pipeline = cls.from_pretrained(self.folder, **parts)
        pipeline.vae.enable_slicing()
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def scene(case: str, encoders: Encoders) -> Scene:
    """Return a transformer that the encoders go with."""
    family = encoders.family
    keys = {**CASES[case], "in_channels": encoders.facts().channels, "joint_attention_dim": TEXT_WIDTH[family]}
    keys |= {"pooled_projection_dim": POOLED_WIDTH} if family == "flux1" else {}
    empty = encoders.embed("")
    prompts = [Prompt(caption, encoders.embed(caption)) for caption in CAPTIONS]
    return Scene(case, encoders.folder, ModelConfig(config=keys), PromptSet(prompts, {TEXT_TOKENS: empty}), empty)
