"""The check at start that FLUX's block stack computes diffusers' own forward, bit for bit."""

from typing import Any

import torch
from torch import Tensor

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError, one_line
from fluxray.models.flux_facts import FluxFacts, flux_facts, library_config
from fluxray.models.flux_stack import FluxStack, build_flux
from fluxray.models.verify import FUSED_TOLERANCE
from fluxray.protocols import FlowBatch

HEIGHT, WIDTH, TEXT_TOKENS, TEXT_WIDTH = 2, 3, 4, 256
"""Of the small batch. Text embeddings are narrower than the model's: only the first projection reads them."""

HEADS = 4
"""Attention heads that are kept: all widths inside follow from them. FLUX.2-dev's 48 would take 9 GB and half a minute."""


def check_flux_stack(model: ModelConfig, seed: int = 0) -> None:
    """Raise unless prologue, one block of each kind and epilogue give the library's own output, in fp32 and in bf16.

    Runs on the host, within a second, on a copy cut to one block of each kind, to HEADS heads and to narrow texts. ConfigError if
    the library's own forward fails on such a model or overflows; RuntimeError if the two differ: in any bit, or in fp32 with
    fused projections by more than FUSED_TOLERANCE.
    """
    cut = _cut(model)
    facts = flux_facts(cut)
    batch = _batch(facts, seed)
    plain = cut.model_copy(update={"fused_qkv": False})
    stack = _materialised(plain, seed)
    expected = _compare(stack, batch, facts)
    if model.fused_qkv:
        with torch.no_grad():
            difference = (_output(_materialised(cut, seed), batch) - expected).abs().max() / expected.abs().max()
        if not difference <= FUSED_TOLERANCE:
            raise RuntimeError(f"fused projections of {facts.family} differ from the library's forward by {difference:.2g}")
    _compare(stack.to(torch.bfloat16), batch, facts)


@torch.no_grad()
def _compare(stack: FluxStack, batch: FlowBatch, facts: FluxFacts) -> Tensor:
    """Return the library's output if the stack's is the same."""
    try:
        expected = library_output(stack.model, batch)
    except Exception as error:  # noqa: BLE001 - sizes that contradict each other show first here
        raise ConfigError(f"model.config: the library's own forward fails ({one_line(error)}); mend its values") from None
    if not expected.isfinite().all():
        raise ConfigError("model.config: the library's own forward gives no finite numbers; mend its values")
    found = _output(stack, batch)
    if not torch.equal(found, expected):
        difference = (found - expected).abs().max().item()
        raise RuntimeError(f"the block stack of {facts.family} differs from the library's forward by {difference}")
    return expected


def library_output(model: Any, batch: FlowBatch) -> Tensor:
    """Return the output [B, T, C] of diffusers' own forward, called with ids as its pipelines make them."""
    dtype = model.x_embedder.weight.dtype
    num_text = batch.text.shape[1]
    rows, columns = torch.meshgrid(torch.arange(batch.height), torch.arange(batch.width), indexing="ij")
    zeros = torch.zeros_like(rows)
    inputs: dict[str, Any] = {"guidance": batch.guidance}
    if batch.pooled is None:
        text_ids = torch.cartesian_prod(*(torch.arange(n) for n in (1, 1, 1, num_text)))
        image_ids = torch.stack([zeros, rows, columns, zeros], dim=-1)
    else:
        text_ids = torch.zeros(num_text, 3)
        image_ids = torch.stack([zeros, rows, columns], dim=-1)
        inputs["pooled_projections"] = batch.pooled.to(dtype)
    return model(
        hidden_states=batch.noised.to(dtype),
        encoder_hidden_states=batch.text.to(dtype),
        timestep=batch.sigma,
        img_ids=image_ids.flatten(0, 1),
        txt_ids=text_ids,
        return_dict=False,
        **inputs,
    )[0]


def _output(stack: FluxStack, batch: FlowBatch) -> Tensor:
    return stack(batch, lambda output, _: output)


def _materialised(model: ModelConfig, seed: int) -> FluxStack:
    stack = build_flux(model, seed)
    for block in (*stack.blocks, None):
        stack.materialise(torch.device("cpu"), block)
    return stack.eval()


def _cut(model: ModelConfig) -> ModelConfig:
    """Return a copy with one block of each kind that the model has."""
    config = library_config(model)
    for key in ("num_layers", "num_single_layers"):
        config[key] = min(config[key], 1)
    config["num_attention_heads"] = min(config["num_attention_heads"], HEADS)
    config["joint_attention_dim"] = min(config["joint_attention_dim"], TEXT_WIDTH)
    return model.model_copy(update={"config": config, "weights": None})


def _batch(facts: FluxFacts, seed: int) -> FlowBatch:
    """Return two images that are not square."""
    generator = torch.Generator().manual_seed(seed)
    tokens = HEIGHT * WIDTH

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    return FlowBatch(
        noised=draw(tokens, facts.in_channels),
        target=draw(tokens, facts.in_channels),
        sigma=torch.tensor([0.3013, 0.703]),
        weight=torch.ones(2),
        text=draw(TEXT_TOKENS, facts.text_width),
        pooled=None if facts.pooled_width is None else draw(facts.pooled_width),
        guidance=torch.tensor([1.0, 3.5]) if facts.embeds_guidance else None,
        height=HEIGHT,
        width=WIDTH,
        num_valid=2,
    )
