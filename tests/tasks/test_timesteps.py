import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from fluxray.config.schema import FlowTaskConfig
from fluxray.seeding import generator
from fluxray.tasks.timesteps import SAMPLING_STEPS, draw_sigma, loss_weight, resolution_mu, shifted

NUM_DRAWS = 20_000
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
NORMAL = NormalDist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mode_at(u: float, scale: float) -> float:
    return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)


LAWS: dict[str, tuple[dict[str, Any], Any]] = {
    "uniform": ({"timesteps": "uniform"}, lambda q: q),
    "logit_normal": ({"timesteps": "logit_normal"}, lambda q: sigmoid(NORMAL.inv_cdf(q))),
    "logit_normal of other moments": (
        {"timesteps": "logit_normal", "timestep_mean": 0.7, "timestep_std": 0.5},
        lambda q: sigmoid(0.7 + 0.5 * NORMAL.inv_cdf(q)),
    ),
    "mode": ({"timesteps": "mode"}, lambda q: mode_at(1 - q, 1.29)),
    "mode towards the ends": ({"timesteps": "mode", "mode_scale": -0.8}, lambda q: mode_at(1 - q, -0.8)),
    "mode of scale 0": ({"timesteps": "mode", "mode_scale": 0.0}, lambda q: q),
}


@pytest.mark.parametrize("mu", [0.0, 1.15])
@pytest.mark.parametrize("law", LAWS)
def test_quantiles_are_those_of_the_law(law: str, mu: float) -> None:
    keys, quantile = LAWS[law]
    random = generator("law", law)
    drawn = np.array([draw_sigma(FlowTaskConfig(**keys), random, mu) for _ in range(NUM_DRAWS)])
    assert drawn.min() > 0 and drawn.max() <= 1
    for q in QUANTILES:
        share = (drawn <= shifted(quantile(q), mu)).mean()  # of a binomial with the chance q
        assert abs(share - q) < 4 * math.sqrt(q * (1 - q) / NUM_DRAWS), q


def test_logit_normal_has_its_moments() -> None:
    task = FlowTaskConfig(timestep_mean=-0.4, timestep_std=1.5)
    random = generator("moments")
    logits = np.array([math.log(s / (1 - s)) for s in (draw_sigma(task, random, 0.0) for _ in range(NUM_DRAWS))])
    assert logits.mean() == pytest.approx(-0.4, abs=0.05) and logits.std() == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize("scale", [-1.0, 0.3, 1.29, 1.75])
def test_mode_is_diffusers_formula(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class At:
        def __init__(self, u: float):
            self.random = lambda: u

    task = FlowTaskConfig(timesteps="mode", mode_scale=scale)
    uniform = torch.linspace(0, 0.999, 20, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda **_: uniform)
    expected = compute_density_for_timestep_sampling("mode", 20, mode_scale=scale)
    actual = [draw_sigma(task, At(u), 0.0) for u in uniform.tolist()]  # type: ignore[arg-type]
    assert actual == pytest.approx(expected.tolist(), abs=1e-12)
    assert actual == sorted(actual, reverse=True), "within the bounds of the scale the law is one to one"


@pytest.mark.parametrize("num_tokens", [16, 256, 1024, 2304, 4096, 4300, 4301, 16384])
def test_shifts_are_the_pipelines(num_tokens: int) -> None:
    assert resolution_mu("flux1", num_tokens) == pytest.approx(calculate_shift(num_tokens), abs=1e-12)
    assert resolution_mu("flux2", num_tokens) == pytest.approx(compute_empirical_mu(num_tokens, SAMPLING_STEPS), abs=1e-6)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigmas = torch.linspace(0.02, 1, 9, dtype=torch.float64)
    for family in ("flux1", "flux2"):
        mu = resolution_mu(family, num_tokens)
        expected = scheduler.time_shift(mu, 1.0, sigmas).tolist()
        assert [shifted(sigma, mu) for sigma in sigmas.tolist()] == pytest.approx(expected, rel=1e-12)


def test_flux1_shift_is_a_line_of_the_published_ends() -> None:
    assert resolution_mu("flux1", 256) == pytest.approx(0.5) and resolution_mu("flux1", 4096) == pytest.approx(1.15)
    assert shifted(0.5, 1.15) == pytest.approx(math.e**1.15 / (1 + math.e**1.15)) and shifted(1.0, 1.15) == 1.0


def test_larger_images_get_more_noise() -> None:
    for sizes in ("flux1", (256, 1024, 4096, 9216)), ("flux2", (256, 1024, 4096, 4300)), ("flux2", (4301, 9216)):
        mus = [resolution_mu(sizes[0], num_tokens) for num_tokens in sizes[1]]
        assert mus == sorted(mus) and mus[0] < mus[-1]
    assert resolution_mu("flux2", 4301) < resolution_mu("flux2", 256), "the pipeline's own step"
    assert compute_empirical_mu(4096, 200) == pytest.approx(resolution_mu("flux1", 4096), abs=1e-3)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_weights_are_diffusers(weighting: Any) -> None:
    sigma = torch.linspace(1e-3, 1, 50)
    actual = loss_weight(weighting, sigma)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual, compute_loss_weighting_for_sd3(weighting, sigma), rtol=1e-6)


def test_no_weight_is_infinite() -> None:
    weights = loss_weight("sigma_sqrt", torch.tensor([0.0, 1e-8, 1e-3, 1.0]))
    assert weights.tolist() == pytest.approx([1e6, 1e6, 1e6, 1.0])
