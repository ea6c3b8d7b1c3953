"""What pictures while training take, for the memory plan: counted on the meta device."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fluxray.config.encode import PIXELS_PER_TOKEN
from fluxray.config.schema import TrainConfig
from fluxray.data.prompts import CAPTIONS
from fluxray.memory.estimate import SampleDemand
from fluxray.memory.live import FusedAttention, LiveBytes
from fluxray.runtime.pictures import decoder_folder

TEXT_TOKENS = 512
"""Of a prompt, where the picture's own size is configured."""


def sampling_needs(config: TrainConfig, row_tokens: int) -> SampleDemand | None:
    """Return what the grid takes beside a run's rows of `row_tokens` positions; None where nothing is sampled."""
    sample = config.sample
    if sample.every_steps == 0:
        return None
    num_pictures = _num_prompts(config) * len(sample.seeds)
    if sample.height is None or sample.width is None:
        pixels, tokens = row_tokens * PIXELS_PER_TOKEN**2, row_tokens
    else:
        pixels = sample.height * sample.width
        tokens = pixels // PIXELS_PER_TOKEN**2 + TEXT_TOKENS
    folder = decoder_folder(sample.pipeline or str(config.model.weights))
    averaged = bool(config.ema.decay) and sample.weights != "trained"
    rows = math.ceil(num_pictures * tokens / row_tokens)
    return SampleDemand(rows, decode_bytes(folder, math.ceil(pixels**0.5)), averaged, config.ema.dtype == "bf16")


@cache
def decode_bytes(folder: Path, side: int) -> int:
    """Return the fp32 bytes of the VAE in a pipeline's folder and of what it holds at most while it decodes a square picture."""
    import diffusers

    keys = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
    cls: Any = diffusers.AutoencoderKLFlux2 if keys.get("batch_norm_eps") is not None else diffusers.AutoencoderKL
    with torch.device("meta"):
        vae = cls(**{key: value for key, value in keys.items() if not key.startswith("_")})
        latents = torch.empty(1, keys["latent_channels"], *2 * [math.ceil(side / 2 ** (len(keys["block_out_channels"]) - 1))])
    held = [*vae.parameters(), *vae.buffers()]
    with torch.no_grad(), LiveBytes(held) as live, FusedAttention():
        vae.decode(latents)
    return sum(tensor.nbytes for tensor in held) + live.peak


def _num_prompts(config: TrainConfig) -> int:
    sample = config.sample
    if sample.prompts is not None:
        return len(sample.prompts)
    if sample.embeddings is None:
        return sample.num_prompts
    try:
        with safe_open(Path(sample.embeddings.removeprefix("path:")).expanduser(), framework="pt") as file:
            return len(json.loads((file.metadata() or {})[CAPTIONS]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return sample.num_prompts  # the run itself refuses the file
