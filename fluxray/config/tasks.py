"""What is learned: the sections that `task.kind` chooses from."""

from typing import Literal

from pydantic import Field

from fluxray.config.section import Section


class LmTaskConfig(Section):
    """Causal language modelling: cross-entropy of the next token of the same document."""

    kind: Literal["lm"] = "lm"


class FlowTaskConfig(Section):
    """Text to image by flow matching (rectified flow): the model predicts noise minus image from a mixture of the two.

    `sigma` is the share of noise in the mixture. By default it is drawn and weighted as in torchtitan's training of FLUX.
    """

    kind: Literal["flow"] = "flow"
    timesteps: Literal["uniform", "logit_normal", "mode"] = Field(
        default="logit_normal", description="law of sigma in training (arXiv:2403.03206)"
    )
    timestep_mean: float = Field(default=0.0, description="logit_normal: mean of the logit of sigma; above 0 means more noise")
    timestep_std: float = Field(default=1.0, gt=0, description="logit_normal: standard deviation of the logit of sigma")
    mode_scale: float = Field(
        default=1.29, ge=-1, le=1.75, description="mode: how much the middle is preferred; below 0 the ends are, 0 is uniform"
    )
    shift: Literal["none", "resolution"] = Field(
        default="none", description="resolution: more noise for larger images, as the model's family samples them"
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        default="none", description="of a sample's loss by its sigma s: s^-2, or 2/(pi (1-2s+2s^2)); names are diffusers'"
    )
    guidance: float = Field(default=1.0, ge=0, description="what a model is told that embeds guidance; 1 where it trains")
    caption_dropout: float = Field(default=0.0, ge=0, le=1, description="share of samples that get the empty caption")
    masked_loss: bool = Field(
        default=False, description="weigh each token's square error by the sample's mask, over the mask's mean; by 1 without one"
    )
    prior_weight: float = Field(default=1.0, gt=0, description="of the loss of samples of data.prior_cache")
    first_loss: Literal["off", "warn", "stop"] = Field(
        default="warn", description="when the loss of step 1 is not what random or published weights have"
    )
