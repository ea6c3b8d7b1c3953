"""Flow matching (rectified flow): the model predicts eps - z from x = (1 - sigma) z + sigma eps, z an image's latents, eps noise.

All random numbers of a sample are drawn on the host, keyed by (seed, step, sample), so they are the same in every cut into
micro-batches, on every rank and under every engine.

Shapes: B micro-batch, T image tokens, C packed channels, L text tokens, E text width, P pooled width.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluxray.config.schema import FlowTaskConfig
from fluxray.data.latent_shards import TextEmbedding
from fluxray.data.latents import FlowRow
from fluxray.errors import ConfigError
from fluxray.models.flux_facts import FluxFacts
from fluxray.protocols import BatchKey, FlowBatch, LossOutput, SampleId
from fluxray.seeding import KeyPart, generator
from fluxray.tasks.timesteps import draw_sigma, loss_weight, resolution_mu


class Draw(NamedTuple):
    """The random numbers of a sample: noise fp32 [T, C], its share in the mixture, whether the caption is left out."""

    noise: Tensor
    sigma: float
    drops_caption: bool


def squared_error(output_BTC: Tensor, target_BTC: Tensor, weight_B: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Return the sum over samples of weight x mean square error over the sample's own elements (fp32 scalar).

    A token's square errors are multiplied by its number in the mask.
    """
    square_BTC = (output_BTC.float() - target_BTC).square()
    if mask_BT is not None:
        square_BTC = square_BTC * mask_BT.unsqueeze(-1)
    return (square_BTC.flatten(1).mean(1) * weight_B).sum()


def mean_one_masks(rows: Sequence[FlowRow]) -> Tensor:
    """Return each row's mask over its own mean, so that a small mask counts as much as a large one: fp32 [B, T].

    With it the loss of a sample is sum of mask x square error / sum of mask; a row without a mask counts everywhere alike.
    """
    masks = [torch.ones(len(row.latents)) if row.mask is None else row.mask for row in rows]
    return torch.stack([mask / mask.mean() for mask in masks])


def draw_noise(shape: tuple[int, ...], *key: KeyPart) -> Tensor:
    """Return standard normal numbers of the stream named `key`, fp32."""
    return torch.from_numpy(generator(*key).standard_normal(shape, dtype=np.float32))


class FlowTask:
    """Text to image by flow matching.

    `empty` holds the encoded empty text by its length in tokens, for `caption_dropout`. With `compiled` the loss is one fused
    kernel. Raises ConfigError for a guidance that the model does not read.
    """

    def __init__(self, config: FlowTaskConfig, facts: FluxFacts, empty: Mapping[int, TextEmbedding], compiled: bool = False):
        if not facts.embeds_guidance and config.guidance != FlowTaskConfig().guidance:
            raise ConfigError(f"task.guidance: {config.guidance:g} has no effect, since the model embeds no guidance; drop it")
        self._config = config
        self._facts = facts
        self._empty = empty
        self._loss = torch.compile(squared_error, dynamic=False) if compiled else squared_error

    def prepare(self, raw: Sequence[FlowRow], key: BatchKey | None) -> FlowBatch:
        """Return rows of one resolution and text length as one micro-batch on the host, noised by the draws of its samples.

        `key` names the samples in order; rows beyond them stand in and are not drawn for. Held-out rows, which have no key, are
        `fluxray.tasks.validation`'s.
        """
        assert key is not None, "held-out rows are noised by fluxray.tasks.validation"
        pairs = list(zip_longest(raw, key.samples))
        draws = [self._draw(row, key, sample) for row, sample in pairs]
        captions = [self._empty[len(row.text)] if draw.drops_caption else row for row, draw in zip(raw, draws, strict=True)]
        noise_BTC = torch.stack([draw.noise for draw in draws])
        sigma_B = torch.tensor([draw.sigma for draw in draws], dtype=torch.float32)
        weight_B = loss_weight(self._config.weighting, sigma_B)
        return self.noised(raw, captions, noise_BTC, sigma_B, weight_B, key)

    def noised(
        self,
        rows: Sequence[FlowRow],
        captions: Sequence[FlowRow | TextEmbedding],
        noise_BTC: Tensor,
        sigma_B: Tensor,
        weight_B: Tensor,
        key: BatchKey | None = None,
    ) -> FlowBatch:
        """Return rows mixed with noise; each row's own weight multiplies `weight_B`."""
        first = rows[0]
        assert all((row.height, row.width) == (first.height, first.width) for row in rows), "one resolution a batch"
        latents_BTC = torch.stack([row.latents for row in rows])
        share_B11 = sigma_B[:, None, None]
        pooled = [caption.pooled for caption in captions if caption.pooled is not None]
        own_weight_B = torch.tensor([row.weight for row in rows], dtype=torch.float32)
        return FlowBatch(
            noised=(1 - share_B11) * latents_BTC + share_B11 * noise_BTC,
            target=noise_BTC - latents_BTC,
            sigma=sigma_B,
            weight=own_weight_B * weight_B,
            text=torch.stack([caption.text for caption in captions]),
            pooled=torch.stack(pooled) if pooled else None,
            guidance=torch.full_like(sigma_B, self._config.guidance) if self._facts.embeds_guidance else None,
            height=first.height,
            width=first.width,
            num_valid=sum(row.weight > 0 for row in rows),
            key=key,
            mask=mean_one_masks(rows) if self._config.masked_loss else None,
        )

    def loss_fn(self, output: Tensor, batch: FlowBatch) -> LossOutput:
        """Return the summed loss of predictions [B, T, C] and the number of samples that count."""
        return LossOutput(self._loss(output, batch.target, batch.weight, batch.mask), batch.num_valid)

    def _draw(self, row: FlowRow, key: BatchKey, sample: SampleId | None) -> Draw:
        if sample is None:
            return Draw(torch.zeros_like(row.latents), 0.5, False)
        own = (key.step, sample.epoch, sample.index)
        config = self._config
        mu = resolution_mu(self._facts.family, len(row.latents)) if config.shift == "resolution" else 0.0
        return Draw(
            draw_noise(tuple(row.latents.shape), key.seed, "noise", *own),
            draw_sigma(config, generator(key.seed, "sigma", *own), mu),
            generator(key.seed, "caption", *own).random() < config.caption_dropout,
        )
