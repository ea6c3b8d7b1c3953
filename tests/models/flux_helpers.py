"""Tiny FLUX transformers and random batches for them."""

from typing import Any

import torch

from fluxray.config.schema import Kernel, ModelConfig
from fluxray.models.flux_facts import FluxFacts, flux_facts
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.protocols import BatchKey, FlowBatch

CPU = torch.device("cpu")
FLUX1: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "guidance_embeds": True,
    "axes_dims_rope": [2, 2, 4],
}
FLUX2: dict[str, Any] = {
    "_class_name": "Flux2Transformer2DModel",
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "timestep_guidance_channels": 16,
    "guidance_embeds": False,
    "axes_dims_rope": [2, 2, 2, 2],
}
CASES: dict[str, dict[str, Any]] = {
    "flux1 dev": FLUX1,
    "flux1 schnell": {**FLUX1, "guidance_embeds": False},
    "flux2 dev": {**FLUX2, "guidance_embeds": True},
    "flux2 klein": FLUX2,
}
FAMILIES = ("flux1 dev", "flux2 klein")


def flux_config(case: str, fused_qkv: bool = False, **keys: Any) -> ModelConfig:
    """Return the configuration of a tiny transformer; `keys` lie over those of the case."""
    return ModelConfig(config={**CASES[case], **keys}, fused_qkv=fused_qkv)


def built(model: ModelConfig, seed: int = 0, kernel: Kernel | None = None) -> FluxStack:
    """Return a stack with its first values."""
    stack = build_flux(model, seed, kernel)
    for block in (*stack.blocks, None):
        stack.materialise(CPU, block)
    return stack


def output_of(stack: FluxStack, batch: FlowBatch) -> torch.Tensor:
    """Return the output [B, T, C] for a batch."""
    return stack(batch, lambda output, _: output)


def draw_flow(
    facts: FluxFacts, num_samples: int, seed: int, *, height: int = 2, width: int = 3, num_text: int = 4, step: int = 0
) -> FlowBatch:
    """Return a batch of random numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(num_samples, *shape, generator=generator)

    return FlowBatch(
        noised=draw(height * width, facts.in_channels),
        target=draw(height * width, facts.in_channels),
        sigma=torch.rand(num_samples, generator=generator),
        weight=0.5 + torch.rand(num_samples, generator=generator),
        text=draw(num_text, facts.text_width),
        pooled=None if facts.pooled_width is None else draw(facts.pooled_width),
        guidance=1 + torch.rand(num_samples, generator=generator) if facts.embeds_guidance else None,
        height=height,
        width=width,
        num_valid=num_samples,
        key=BatchKey(0, step, ()),
    )


def draw_for(model: ModelConfig, num_samples: int = 2, seed: int = 0, **sizes: int) -> FlowBatch:
    """Return a random batch for a configured model."""
    return draw_flow(flux_facts(model), num_samples, seed, **sizes)
