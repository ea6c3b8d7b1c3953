"""Real pictures with captions, encoded into a cache by the tiny, untrained encoders of a pipeline, in seconds.

Everything a pipeline knows how to do (embedding texts, resizing pictures, patches of latents) is done by diffusers' own.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from fluxray.data.identity import weights_identity
from fluxray.data.latent_facts import Family, LatentFacts
from fluxray.data.latent_shards import LatentSample, Layout, TextEmbedding, write_cache
from fluxray.data.tokenizer import EOS_TOKEN, train_tokenizer
from fluxray.seeding import derive_seed

TEXT_WIDTH: dict[str, int] = {"flux1": 64, "flux2": 96}
POOLED_WIDTH = 32
TEXT_TOKENS = 32
TEXT_LAYERS = (1, 2, 3)
SIZES = ((64, 64), (48, 80), (80, 48))
"""Height and width in pixels of the buckets."""

PLACES = ("top left", "top right", "bottom left", "bottom right")


_VAE: dict[str, Any] = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 64,
}
"""As deep as the real ones, so that a latent is 8 x 8 pixels."""


class Picture(NamedTuple):
    """A picture with its caption."""

    key: str
    caption: str
    image: Image.Image


def photographs() -> dict[str, Image.Image]:
    """Return the photographs that come with matplotlib and scikit-learn, by caption."""
    from matplotlib.cbook import get_sample_data
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    with get_sample_data("grace_hopper.jpg") as file:
        portrait = Image.open(file).convert("RGB")
    return {
        "a Chinese temple with a curved roof, seen through trees": Image.fromarray(china),
        "a pink water lily with yellow stamens": Image.fromarray(flower),
        "a portrait of Grace Hopper in the uniform of the navy": portrait,
    }


def pictures() -> list[Picture]:
    """Return 15 pictures: the photographs and the quarters of each."""
    found = []
    for number, (caption, photograph) in enumerate(photographs().items()):
        found.append(Picture(f"photo-{number}", caption, photograph))
        width, height = photograph.width // 2, photograph.height // 2
        for quarter, place in enumerate(PLACES):
            left, top = quarter % 2 * width, quarter // 2 * height
            part = photograph.crop((left, top, left + width, top + height))
            found.append(Picture(f"photo-{number}-{quarter}", f"the {place} of {caption}", part))
    return found


@dataclass(frozen=True)
class Encoders:
    """The encoders of a pipeline of diffusers, in `folder` as it saves them; its transformer is None.

    `statistics` are those by which latents are normalised; texts have `text_tokens`.
    """

    family: Family
    pipeline: Any
    folder: Path
    text_tokens: int

    @property
    def cache(self) -> Path:
        """Where `write_pictures` puts the cache."""
        return self.folder.parent / "cache"

    @property
    def pixels_per_token(self) -> int:
        """Along one side."""
        return 2 * self.pipeline.vae_scale_factor

    @property
    def statistics(self) -> dict[str, tuple[float, ...]]:
        """What latents are normalised by."""
        vae = self.pipeline.vae
        if self.family == "flux1":
            return {"shift": (vae.config.shift_factor,), "scale": (vae.config.scaling_factor,)}
        std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        return {"mean": tuple(vae.bn.running_mean.tolist()), "std": tuple(std.tolist())}

    def facts(self) -> LatentFacts:
        """Return the facts of a cache that is encoded by these."""
        texts = [name for name in ("text_encoder", "text_encoder_2") if getattr(self.pipeline, name, None) is not None]
        return LatentFacts(
            family=self.family,
            channels=4 * self.pipeline.vae.config.latent_channels,
            text_width=TEXT_WIDTH[self.family],
            pooled_width=POOLED_WIDTH if self.family == "flux1" else None,
            pixels_per_token=self.pixels_per_token,
            vae=weights_identity(self.folder / "vae", "data.cache"),
            text_encoders={name: weights_identity(self.folder / name, "data.cache") for name in texts},
            latent_statistics=self.statistics,
            text_layers=TEXT_LAYERS if self.family == "flux2" else (),
        )

    @torch.no_grad()
    def embed(self, caption: str) -> TextEmbedding:
        """Return the embedding of a caption."""
        if self.family == "flux1":
            text, pooled, _ = self.pipeline.encode_prompt(caption, caption, max_sequence_length=self.text_tokens)
            return TextEmbedding(text[0], pooled[0])
        text, _ = self.pipeline.encode_prompt(caption, max_sequence_length=self.text_tokens, text_encoder_out_layers=TEXT_LAYERS)
        return TextEmbedding(text[0], None)

    @torch.no_grad()
    def latents(self, key: str, image: Image.Image, size: tuple[int, int]) -> Tensor:
        """Return the packed, normalised latents [T, C] of a picture that is cropped and resized to `size`.

        FLUX.1 draws from the posterior, by a generator that `key` names; FLUX.2 takes its mean.
        """
        pixels = self.pipeline.image_processor.preprocess(image, *size, resize_mode="crop")
        posterior = self.pipeline.vae.encode(pixels).latent_dist
        if self.family == "flux2":
            return pack(self._normalised(_patches(posterior.mode())))[0]
        drawn = posterior.sample(torch.Generator().manual_seed(derive_seed("posterior", key)))
        return pack(_patches(self._normalised(drawn)))[0]

    def sample(self, picture: Picture, size: tuple[int, int]) -> LatentSample:
        """Return an encoded picture."""
        text, pooled = self.embed(picture.caption)
        return LatentSample(picture.key, picture.caption, *size, self.latents(picture.key, picture.image, size), text, pooled)

    def _normalised(self, latents: Tensor) -> Tensor:
        """Return latents [B, c, h, w] (FLUX.1) or patches [B, C, h, w] (FLUX.2) normalised."""
        numbers = {name: torch.tensor(values).view(1, -1, 1, 1) for name, values in self.statistics.items()}
        if self.family == "flux1":
            return (latents - numbers["shift"]) * numbers["scale"]
        return (latents - numbers["mean"]) / numbers["std"]


def _patches(latents: Tensor) -> Tensor:
    """Return latents [B, c, h, w] as patches [B, 4c, h/2, w/2]; the channels of a patch by channel, row, column."""
    return torch.nn.functional.pixel_unshuffle(latents, 2)


def pack(patches: Tensor) -> Tensor:
    """Return patches [B, C, h, w] as tokens [B, h w, C], row by row."""
    return patches.flatten(2).transpose(1, 2)


def tiny_encoders(family: Family, folder: Path, text_tokens: int = TEXT_TOKENS) -> Encoders:
    """Make tiny encoders, always the same, whose latents of the pictures have mean 0 and variance 1; saved in `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("tiny encoders", family))
        pipeline = _flux1() if family == "flux1" else _flux2()
    encoders = Encoders(family, pipeline, folder, text_tokens)
    _fit_statistics(encoders)
    pipeline.save_pretrained(folder)
    return encoders


def write_pictures(folder: Path, family: Family, layout: Layout = "safetensors", **keys: Any) -> Encoders:
    """Write `folder`/cache: all pictures, a third in each of SIZES; return the encoders, saved in `folder`/pipeline.

    `keys` are the number of `text_tokens` and the dtypes that `LatentFacts` has.
    """
    encoders = tiny_encoders(family, folder / "pipeline", keys.pop("text_tokens", TEXT_TOKENS))
    facts = replace(encoders.facts(), **keys)
    samples = (encoders.sample(picture, SIZES[number % 3]) for number, picture in enumerate(pictures()))
    write_cache(folder / "cache", facts, [encoders.embed("")], samples, layout, shard_bytes=1 << 16)
    return encoders


def _fit_statistics(encoders: Encoders) -> None:
    """Set what latents are normalised by to their mean and variance over the pictures, rounded: equal on any machine."""
    vae = encoders.pipeline.vae
    if encoders.family == "flux1":
        vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    tokens = torch.cat([encoders.latents(picture.key, picture.image, SIZES[0]) for picture in pictures()])
    if encoders.family == "flux1":
        vae.register_to_config(shift_factor=round(float(tokens.mean()), 3), scaling_factor=round(float(1 / tokens.std()), 3))
    else:
        vae.bn.running_mean.copy_(tokens.mean(0).round(decimals=3))
        vae.bn.running_var.copy_(tokens.var(0).round(decimals=5))


def _flux1() -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    tokenizer = _tokenizer()
    vocab, end = len(tokenizer), tokenizer.eos_token_id
    clip = CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=POOLED_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        eos_token_id=end,
        bos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    t5 = T5Config(vocab_size=vocab, d_model=TEXT_WIDTH["flux1"], d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    vae = AutoencoderKL(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, **_VAE)
    with torch.no_grad():
        vae.encoder.conv_out.bias[16:] = -6  # the logarithm of the posterior's variance: a trained VAE is as certain
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(),
        vae.eval(),
        CLIPTextModel(clip).eval(),
        tokenizer,
        T5EncoderModel(t5).eval(),
        _tokenizer(),
        None,
    )


def _flux2() -> Any:
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}"
    width = TEXT_WIDTH["flux2"] // len(TEXT_LAYERS)
    qwen = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=max(TEXT_LAYERS) + 1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
    )
    vae = AutoencoderKLFlux2(latent_channels=32, **_VAE)
    return Flux2KleinPipeline(FlowMatchEulerDiscreteScheduler(), vae.eval(), Qwen3ForCausalLM(qwen).eval(), tokenizer, None)


def _tokenizer() -> Any:
    """Return a byte-level BPE that is trained on the captions and ends each text."""
    tokenizer = train_tokenizer([picture.caption for picture in pictures()], 512)
    end = (EOS_TOKEN, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {EOS_TOKEN}", special_tokens=[end])
    tokenizer.model_max_length = TEXT_TOKENS
    return tokenizer
