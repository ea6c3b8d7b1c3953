"""What the first step of flow matching tells: whether weights, latents and texts belong together.

A model that knows nothing predicts about 0, and its loss is the power of the target, the mean of (eps - z)^2: 1 for the noise and
1, roughly, for latents as a family normalises them, less for smooth pictures. Random weights add their own output's power to
that. Published weights leave about a quarter of the target's power unexplained (a loss near 0.4), more where sigma is near its
ends. So the loss is judged as a share of the power of the step's own targets, under the same weights: that depends little on the
law of sigma, the weighting, or chance. Power of the latents themselves is judged apart, since wrongly normalised ones raise loss
and target alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from fluxray.errors import ConfigError
from fluxray.models.flux_facts import FluxFacts
from fluxray.protocols import Batch, FlowBatch
from fluxray.tasks.flow import squared_error

RANDOM_SHARE = (0.8, 2.0)
"""Loss over the power of the targets, with random weights."""

PUBLISHED_SHARE = (0.03, 0.65)
"""Loss over the power of the targets, with published weights."""

LATENT_POWER = (0.15, 4.0)
"""Mean square of normalised latents, of flat to busy pictures."""


class FirstLossGate:
    """Judges the loss of step 1; the trainer calls it on every rank, with the rank's micro-batches and the loss of all.

    `published`: training starts from weights of a trained model. `gather` brings a value of each rank to all. Outside the
    plausible range it notifies (`policy` warn) or raises ConfigError on every rank (stop).
    """

    def __init__(
        self,
        policy: Literal["warn", "stop"],
        published: bool,
        gather: Callable[[Any], Sequence[Any]],
        notify: Callable[[str], None],
    ):
        self._policy = policy
        self._published = published
        self._gather = gather
        self._notify = notify

    def __call__(self, batches: Sequence[Batch], loss: float) -> None:
        """Judge. Collective."""
        sums = [sum(values) for values in zip(*self._gather(_sums(batches)), strict=True)]
        target_power, latent_power, num_valid = sums
        fault = judge(loss, target_power / num_valid, latent_power / num_valid, self._published)
        if fault is None:
            return
        if self._policy == "stop":
            raise ConfigError(f"task.first_loss: {fault}; mend that, or set task.first_loss=warn")
        self._notify(f"task.first_loss: {fault}; task.first_loss=stop would end such a run, off is silent")


def judge(loss: float, target_power: float, latent_power: float, published: bool) -> str | None:
    """Return what is wrong with the loss of step 1 and its likely causes, in one line; None if it is plausible.

    `target_power` is the mean over samples of weight x mean of (eps - z)^2, `latent_power` that of z^2 without weights.
    """
    said = f"the loss of step 1 is {loss:.3g}"
    low, high = LATENT_POWER
    if not low <= latent_power <= high:
        return (
            f"{said} and the mean square of the latents {latent_power:.3g}, normalised ones have {low:g} to {high:g}: they are "
            f"scaled or shifted otherwise than the model's VAE says, or the cache is of another VAE"
        )
    low, high = PUBLISHED_SHARE if published else RANDOM_SHARE
    share = loss / target_power
    if low <= share <= high:
        return None
    kind = "published" if published else "random"
    line = f"{said}, {share:.2f} of the targets' power, and {kind} weights leave {low:g} to {high:g}"
    if share < low:
        return f"{line}: the target can be read off the input, or the run did not start from {kind} weights"
    if published:
        return f"{line}: texts of another encoder or of other layers, a cache of another model, or weights that were not loaded"
    return f"{line}: model.config initialises to large outputs, or latents or texts hold outliers"


def distilled_warning(facts: FluxFacts, weights: str | None) -> str | None:
    """Return a warning, in one line, where training starts from weights that are distilled to few steps; else None."""
    if not facts.is_distilled or weights is None:
        return None
    base = "FLUX.1-dev" if facts.family == "flux1" else "its base model (FLUX.2-klein-base-4B, or -base-9B)"
    return (
        f"model.weights: {weights} is distilled to sample in few steps, which training by flow matching undoes; train {base} "
        f"instead"
    )


def _sums(batches: Sequence[Batch]) -> tuple[float, float, int]:
    """Return over samples that count: weight x power of the target, power of the latents, and their number."""
    target_power = latent_power = 0.0
    num_valid = 0
    for batch in batches:
        assert isinstance(batch, FlowBatch)
        counts_B = (batch.weight > 0).float()
        latents_BTC = batch.noised - batch.sigma[:, None, None] * batch.target
        target_power += float(squared_error(torch.zeros_like(batch.target), batch.target, batch.weight, batch.mask))
        latent_power += float(torch.dot(counts_B, latents_BTC.square().flatten(1).mean(1)))
        num_valid += batch.num_valid
    return target_power, latent_power, num_valid
