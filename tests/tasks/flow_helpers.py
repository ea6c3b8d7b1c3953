"""Rows and facts for tests of flow matching."""

from typing import Any

import torch

from fluxray.config.schema import FlowTaskConfig
from fluxray.data.latent_shards import TextEmbedding
from fluxray.data.latents import FlowRow
from fluxray.models.flux_facts import FluxFacts
from fluxray.protocols import BatchKey, SampleId
from fluxray.tasks.flow import FlowTask

NUM_TEXT, CHANNELS, TEXT_WIDTH, POOLED = 5, 8, 12, 10
SAMPLES = tuple(SampleId(epoch, index) for epoch, index in ((0, 7), (0, 3), (0, 11), (1, 3), (1, 0), (1, 8)))


def facts_of(family: Any = "flux1", guided: bool = True, distilled: bool | None = None) -> FluxFacts:
    return FluxFacts(family, CHANNELS, TEXT_WIDTH, POOLED if family == "flux1" else None, guided, distilled, 2, 8)


def row_of(index: int, height: int = 4, width: int = 3, family: str = "flux1", power: float = 1.0) -> FlowRow:
    """Return row number `index` of an endless data set."""
    random = torch.Generator().manual_seed(index)
    latents = power**0.5 * torch.randn(height * width, CHANNELS, generator=random)
    text = torch.randn(NUM_TEXT, TEXT_WIDTH, generator=random)
    pooled = torch.randn(POOLED, generator=random) if family == "flux1" else None
    return FlowRow(latents, height, width, text, pooled, key=f"row-{index}")


def empty_of(family: str = "flux1") -> dict[int, TextEmbedding]:
    """Return an empty caption that is known again."""
    return {NUM_TEXT: TextEmbedding(torch.ones(NUM_TEXT, TEXT_WIDTH), torch.ones(POOLED) if family == "flux1" else None)}


def task_of(family: str = "flux1", guided: bool = True, compiled: bool = False, **keys: Any) -> FlowTask:
    return FlowTask(FlowTaskConfig(**keys), facts_of(family, guided), empty_of(family), compiled)


def batch_of(task: FlowTask, samples: tuple[SampleId, ...] = SAMPLES, seed: int = 1, step: int = 2, **of_row: Any):
    return task.prepare([row_of(sample.index, **of_row) for sample in samples], BatchKey(seed, step, samples))
