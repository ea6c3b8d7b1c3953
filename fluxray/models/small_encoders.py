"""A VAE and a text encoder of the kinds that FLUX.2 klein has, small enough for a CPU. The VAE is to be trained first.

The text encoder stays as it was drawn: deep enough that every caption has an embedding of its own, which is all that a handful of
captions needs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fluxray.seeding import derive_seed

TEXT_LAYERS = (1, 2, 3)
"""Hidden states of the text encoder that are stacked."""

LOG_VARIANCE = -6.0
"""Of the posterior, everywhere: what FLUX.2 reads is the mean."""

VAE_SIZES: dict[str, Any] = {
    "block_out_channels": (16, 32, 64, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "mid_block_add_attention": False,
    "latent_channels": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def small_vae(seed: int) -> Any:
    """Return an untrained AutoencoderKLFlux2 of 2.7M parameters, with FLUX.2's latents: 32 channels for 8 x 8 pixels.

    Its residual branches begin at zero, and the convolutions between them keep the size of what they are given: so it learns
    several times as fast as from the library's own initial values.
    """
    import diffusers
    from diffusers.models.resnet import ResnetBlock2D

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("small vae", seed))
        vae = diffusers.AutoencoderKLFlux2(**VAE_SIZES)
        for module in vae.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        for module in vae.modules():
            if isinstance(module, ResnetBlock2D):
                nn.init.zeros_(module.conv2.weight)
    last: Any = vae.encoder.conv_out
    channels = VAE_SIZES["latent_channels"]
    with torch.no_grad():
        last.weight[channels:] = 0.0
        last.bias[channels:] = LOG_VARIANCE
    return vae


@torch.no_grad()
def fit_statistics(vae: Any, pixels_BCHW: Tensor) -> None:
    """Set what a VAE's latents are normalised by to their mean and variance over pictures in [-1, 1], B x 3 x H x W."""
    means = torch.cat([vae.encode(picture[None]).latent_dist.mode() for picture in pixels_BCHW])
    patches_CN = nn.functional.pixel_unshuffle(means, 2).transpose(0, 1).flatten(1)
    vae.bn.running_mean.copy_(patches_CN.mean(1))
    vae.bn.running_var.copy_(patches_CN.var(1))


def small_pipeline(vae: Any, tokenizer: Any, text_width: int, seed: int) -> Any:
    """Return a Flux2KleinPipeline without transformer, whose texts are `text_width` wide; `tokenizer` gets a chat template."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=text_width // len(TEXT_LAYERS),
        intermediate_size=64,
        num_hidden_layers=max(TEXT_LAYERS) + 1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("small text encoder", seed))
        qwen3 = Qwen3ForCausalLM(config).eval()
    transformer: Any = None
    return Flux2KleinPipeline(FlowMatchEulerDiscreteScheduler(), vae.eval(), qwen3, tokenizer, transformer)
