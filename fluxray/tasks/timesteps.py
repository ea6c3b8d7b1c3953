"""How much noise a sample is trained with: laws of sigma, the shift by resolution, weights of the loss.

sigma in (0, 1] is the share of noise in x = (1 - sigma) z + sigma eps. Formulas are of Esser et al., "Scaling Rectified Flow
Transformers for High-Resolution Image Synthesis" (arXiv:2403.03206), where t is our sigma.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fluxray.config.schema import FlowTaskConfig
from fluxray.models.flux_facts import Family

SAMPLING_STEPS = 50
"""FLUX.2 shifts by the number of sampling steps as well, up to 4,300 tokens; this is its pipeline's default, so that training
looks at what sampling visits. Fewer steps shift more; at 200, mu is FLUX.1's line, with which it goes on beyond 4,300."""

SMALLEST_WEIGHTED_SIGMA = 1e-3
"""sigma^-2 has no bound; below this, the smallest sigma of diffusers' training steps, the weight stays what it is there."""


def draw_sigma(task: FlowTaskConfig, random: np.random.Generator, shift_mu: float) -> float:
    """Return one sigma by the law of `task.timesteps`, shifted by `shift_mu`.

    logit_normal: sigmoid(N(mean, std)). mode: 1 - u - s (cos(pi u / 2)^2 - 1 + u) with u uniform and the scale s. The uniform u
    is below 1, so no law gives 0, but for what rounding makes of a logit far below 0.
    """
    match task.timesteps:
        case "uniform":
            sigma = 1 - random.random()
        case "logit_normal":
            logit = task.timestep_mean + task.timestep_std * random.standard_normal()
            sigma = (1 + math.tanh(logit / 2)) / 2
        case "mode":
            u = random.random()
            sigma = 1 - u - task.mode_scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    return shifted(sigma, shift_mu)


def shifted(sigma: float, mu: float) -> float:
    """Return e^mu sigma / (1 + (e^mu - 1) sigma): more noise for mu above 0, the same for 0."""
    scale = math.exp(mu)
    return scale * sigma / (1 + (scale - 1) * sigma)


def resolution_mu(family: Family, num_tokens: int) -> float:
    """Return the mu by which a family's pipeline shifts the noise of an image of `num_tokens` tokens.

    FLUX.1: linear from 0.5 at 256 tokens to 1.15 at 4,096. FLUX.2 (diffusers' `compute_empirical_mu`): by tokens and sampling
    steps up to 4,300 tokens; beyond, by tokens alone, so that mu falls there from 2.0 to 1.2.
    """
    if family == "flux1":
        return 0.5 + (1.15 - 0.5) * (num_tokens - 256) / (4096 - 256)
    at_200_steps = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200_steps
    at_10_steps = 8.73809524e-05 * num_tokens + 1.89833333
    return at_200_steps + (at_200_steps - at_10_steps) * (SAMPLING_STEPS - 200) / 190


def loss_weight(weighting: Literal["none", "sigma_sqrt", "cosmap"], sigma_B: Tensor) -> Tensor:
    """Return the weight of each sample's loss, fp32 [B]: 1, sigma^-2, or 2 / (pi (1 - 2 sigma + 2 sigma^2))."""
    match weighting:
        case "none":
            return torch.ones_like(sigma_B)
        case "sigma_sqrt":
            return sigma_B.clamp(min=SMALLEST_WEIGHTED_SIGMA) ** -2.0
        case "cosmap":
            return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B**2))
