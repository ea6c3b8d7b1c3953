"""Caches of random latents, made in no time, for tests that need no pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fluxray.data.latent_facts import LatentFacts
from fluxray.data.latent_shards import LatentSample, TextEmbedding, write_cache

PIXELS_PER_TOKEN = 16


def random_facts(**keys: Any) -> LatentFacts:
    """Return the facts of a small cache for FLUX.1; `keys` lie over them."""
    fields: dict[str, Any] = {
        "family": "flux1",
        "channels": 8,
        "text_width": 12,
        "pooled_width": 10,
        "pixels_per_token": PIXELS_PER_TOKEN,
        "vae": "vae-of-noise",
        "text_encoders": {"text_encoder": "clip-of-noise", "text_encoder_2": "t5-of-noise"},
        "latent_statistics": {"shift": (0.0,), "scale": (1.0,)},
        "text_dtype": "float32",
    }
    return LatentFacts(**{**fields, **keys})


def random_samples(facts: LatentFacts, counts: Mapping[tuple[int, int, int], int], seed: int = 0) -> list[LatentSample]:
    """Return so many samples of each bucket (height and width in pixels, text tokens), in an order that mixes buckets."""
    random = torch.Generator().manual_seed(seed)
    drawn = [bucket for bucket, count in counts.items() for _ in range(count)]
    samples = []
    for number, place in enumerate(torch.randperm(len(drawn), generator=random).tolist()):
        height, width, length = drawn[place]
        tokens = height * width // facts.pixels_per_token**2
        samples.append(
            LatentSample(
                f"noise-{number:04d}",
                f"noise number {number}",
                height,
                width,
                torch.randn(tokens, facts.channels, generator=random),
                torch.randn(length, facts.text_width, generator=random),
                None if facts.pooled_width is None else torch.randn(facts.pooled_width, generator=random),
            )
        )
    return samples


def empty_captions(facts: LatentFacts, lengths: list[int]) -> list[TextEmbedding]:
    """Return embeddings of no caption at these text lengths: all ones, so that they are known again."""
    pooled = None if facts.pooled_width is None else torch.ones(facts.pooled_width)
    return [TextEmbedding(torch.ones(length, facts.text_width), pooled) for length in lengths]


def random_cache(folder: Path, counts: Mapping[tuple[int, int, int], int], seed: int = 0, **keys: Any) -> list[LatentSample]:
    """Write a cache of `random_samples` in several shards and return these; `keys` lie over the facts."""
    facts = random_facts(**keys)
    samples = random_samples(facts, counts, seed)
    empty = empty_captions(facts, sorted({length for _, _, length in counts}))
    write_cache(
        folder, facts, empty, samples, shard_bytes=sum(sample.latents.nbytes + sample.text.nbytes for sample in samples) // 3
    )
    return samples
