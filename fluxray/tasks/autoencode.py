"""A small VAE learns to give pictures back: mean absolute error, and a little of the latents' mean square.

What `make train-images` needs, where no published VAE is at hand. Those are trained with perceptual and adversarial losses, which
so few pictures would not feed.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fluxray.seeding import derive_seed

BATCH, CROP = 8, 32
"""Crops of a step, and pixels of their sides: on a CPU many small steps learn faster than few large ones."""

CROPPED_SHARE, WHOLE_BATCH = 0.85, 2
"""Share of the steps on crops; then whole pictures, so many a step, whose statistics are those that the norms will see."""

LR, WARMUP_STEPS = 1e-3, 30
LATENT_WEIGHT = 1e-4
STRIDE = 8
"""Pixels of a position in the latents: crops begin at one."""


def train_vae(vae: Any, pixels_BCHW: Tensor, num_steps: int, seed: int, watch: Callable[[int, float], None]) -> None:
    """Train on pictures in [-1, 1], B x 3 x H x W with sides that are multiples of 8 and at least CROP.

    `watch` is told the number of each step and the mean absolute error in it, in [0, 1] of the range of pixels.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for one another: each operation is small
    vae.train()
    random = torch.Generator().manual_seed(derive_seed("vae crops", seed))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = _learning_rate(step, num_steps)
        is_cropped = step < CROPPED_SHARE * num_steps
        pictures = _drawn(pixels_BCHW, random, *((BATCH, CROP) if is_cropped else (WHOLE_BATCH, None)))
        posterior = vae.encode(pictures).latent_dist
        error = (vae.decode(posterior.sample(random)).sample - pictures).abs().mean()
        (error + LATENT_WEIGHT * posterior.mean.square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch(step + 1, error.item() / 2)
    vae.eval()
    torch.set_num_threads(threads)


@torch.no_grad()
def reconstructed(vae: Any, pixels_BCHW: Tensor) -> Tensor:
    """Return what a VAE makes of the means of its own latents: fp32 in [-1, 1], shaped like the pictures."""
    return torch.cat([vae.decode(vae.encode(picture[None]).latent_dist.mode()).sample for picture in pixels_BCHW]).clamp(-1, 1)


def _learning_rate(step: int, num_steps: int) -> float:
    return LR * min((step + 1) / WARMUP_STEPS, 1.0) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def _drawn(pixels_BCHW: Tensor, random: torch.Generator, batch: int, crop: int | None) -> Tensor:
    """Return random pictures, half of them mirrored, or square crops of them: [batch, 3, crop, crop]."""
    number, _, height, width = pixels_BCHW.shape
    tall, wide = crop or height, crop or width

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=random))

    found = []
    for _ in range(batch):
        picture = pixels_BCHW[draw(number)]
        top, left = STRIDE * draw((height - tall) // STRIDE + 1), STRIDE * draw((width - wide) // STRIDE + 1)
        part = picture[:, top : top + tall, left : left + wide]
        found.append(part.flip(2) if draw(2) else part)
    return torch.stack(found)
