"""The model of a configuration on the meta device, and batches of the shape that its runs have: for plans, probes and counts."""

from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from fluxray.config.schema import TrainConfig
from fluxray.models.causal_lm import build_causal_lm, library_config
from fluxray.models.flux_facts import FluxFacts, flux_facts
from fluxray.models.flux_stack import build_flux
from fluxray.protocols import Batch, BatchKey, BlockStack, FlowBatch, SampleId, TextBatch
from fluxray.runtime.attention import expected_kernel
from fluxray.runtime.images import ImageSizes, Size, image_sizes

SMALLEST_VOCABULARY = 512

Known = int | ImageSizes | None
"""What is known of a run's rows: the entries of the tokenizer, or the sizes of images; None where nothing has been read yet."""


class Modelled(NamedTuple):
    """A stack without memory, and how one of its rows looks: tokens of a text, or the size of an image, told in words."""

    stack: BlockStack
    shape: int | Size
    facts: PretrainedConfig | FluxFacts
    num_sizes: int = 1
    told: str = ""

    @property
    def row_tokens(self) -> int:
        """Positions of a row."""
        return self.shape if isinstance(self.shape, int) else self.shape.tokens


def model_of(config: TrainConfig, known: Known, device: torch.device | None = None) -> Modelled:
    """Return the model with the attention kernel that it will have on `device`, or on the device that is configured.

    Its first values are random. Raises ConfigError for a model that does not exist.
    """
    match config.task.kind:
        case "lm":
            num_entries = known if isinstance(known, int) else config.data.vocab_size
            facts = library_config(config.model, num_entries)
            kernel = expected_kernel(config, facts, device)
            stack = build_causal_lm(config.model, config.seed, num_entries, kernel, config.adapter)
            return Modelled(stack, config.data.max_slice, facts)
        case "flow":
            sizes = known if isinstance(known, ImageSizes) else image_sizes(config.data)
            facts = flux_facts(config.model)
            stack = build_flux(config.model, config.seed, expected_kernel(config, facts, device), adapter=config.adapter)
            return Modelled(stack, sizes.largest, facts, sizes.num_buckets, sizes.told)


def example(config: TrainConfig, modelled: Modelled, num_rows: int, device: torch.device, keyed: bool = False) -> Batch:
    """Return a micro-batch of so many rows of full size, with random numbers for values; without a key nothing is dropped."""
    shape, facts = modelled.shape, modelled.facts
    key = BatchKey(config.seed, 0, tuple(SampleId(0, row) for row in range(num_rows))) if keyed else None
    if isinstance(shape, int):
        return _texts(num_rows, shape, key, device, packed=config.data.packing)
    assert isinstance(facts, FluxFacts)
    return images(facts, shape, num_rows, device, key)


def images(facts: FluxFacts, size: Size, num_rows: int, device: torch.device, key: BatchKey | None = None) -> FlowBatch:
    """Return a micro-batch of images of one size."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(num_rows, *shape, device=device)

    tokens = size.height * size.width
    return FlowBatch(
        noised=draw(tokens, facts.in_channels),
        target=draw(tokens, facts.in_channels),
        sigma=torch.full((num_rows,), 0.5, device=device),
        weight=torch.ones(num_rows, device=device),
        text=draw(size.text_tokens, facts.text_width),
        pooled=None if facts.pooled_width is None else draw(facts.pooled_width),
        guidance=torch.ones(num_rows, device=device) if facts.embeds_guidance else None,
        height=size.height,
        width=size.width,
        num_valid=num_rows,
        key=key,
    )


def _texts(num_rows: int, length: int, key: BatchKey | None, device: torch.device, packed: bool) -> TextBatch:
    tokens = torch.randint(0, SMALLEST_VOCABULARY // 2, (num_rows, length), device=device)
    places = torch.arange(length, device=device).expand(num_rows, -1).contiguous()
    documents = torch.zeros_like(tokens)
    return TextBatch(tokens, places, documents, tokens, not packed, num_rows * length, key, num_documents=num_rows)
