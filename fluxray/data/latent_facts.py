"""What a cache of encoded pictures says of itself, and whether it belongs to a model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fluxray.errors import ConfigError

Family = Literal["flux1", "flux2"]


@dataclass(frozen=True)
class LatentFacts:
    """How all samples of a cache were made.

    Latents are packed and normalised, `channels` numbers for a token of `pixels_per_token` x `pixels_per_token` pixels, by
    `latent_statistics`: `shift` and `scale` (FLUX.1: z = (sample - shift) scale) or `mean` and `std` of each channel (FLUX.2).
    `text_width` is that of a text's embedding, `pooled_width` that of FLUX.1's pooled one. `vae` and `text_encoders`, by their
    names in the pipeline, are hashes of the weights that encoded (`fluxray.data.identity`); `text_layers` the hidden states that
    FLUX.2 stacks. The dtypes are those on disk. `text_lengths` in tokens and `resolutions`, height and width in pixels, are all
    that occur, and with `masks` some sample has one; whoever writes a cache leaves these to `finish_cache`.
    """

    family: Family
    channels: int
    text_width: int
    pooled_width: int | None
    pixels_per_token: int
    vae: str
    text_encoders: Mapping[str, str]
    latent_statistics: Mapping[str, tuple[float, ...]]
    text_layers: tuple[int, ...] = ()
    latent_dtype: Literal["float32", "bfloat16"] = "float32"
    text_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    text_lengths: tuple[int, ...] = ()
    resolutions: tuple[tuple[int, int], ...] = ()
    masks: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return asdict(replace(self, text_encoders=dict(self.text_encoders), latent_statistics=dict(self.latent_statistics)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LatentFacts":
        """Rebuild from `to_json`; TypeError or KeyError for anything else."""
        fields = dict(values)
        fields["latent_statistics"] = {name: tuple(numbers) for name, numbers in fields["latent_statistics"].items()}
        fields["resolutions"] = tuple(tuple(pair) for pair in fields["resolutions"])
        for name in ("text_layers", "text_lengths"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True)
class CacheNeeds:
    """What a run wants of a cache; None, or an empty value, where it does not care.

    The first four are facts of the transformer. `vae`, `text_encoders` and `text_layers` are those of the pipeline whose weights
    are trained, or of another cache; `latent_statistics` those of its VAE. No other `text_lengths` and `resolutions` may occur.
    `masks`: some sample must have one.
    """

    family: Family
    channels: int
    text_width: int
    pooled_width: int | None
    vae: str | None = None
    text_encoders: Mapping[str, str] = field(default_factory=dict)
    latent_statistics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    text_layers: tuple[int, ...] = ()
    text_lengths: tuple[int, ...] = ()
    resolutions: tuple[tuple[int, int], ...] = ()
    masks: bool = False

    @classmethod
    def of_cache(cls, facts: LatentFacts) -> "CacheNeeds":
        """Return what a held-out cache must be like beside the training cache of these facts; lengths and sizes may differ."""
        names = ("family", "channels", "text_width", "pooled_width", "vae", "text_encoders", "latent_statistics", "text_layers")
        return cls(**{name: getattr(facts, name) for name in names})


def check_cache(facts: LatentFacts, needs: CacheNeeds, config_key: str = "data.cache") -> None:
    """Raise ConfigError, which names both values, where a cache is not of the model; `config_key` is what names the cache."""
    remedy = "name a cache of this model, or encode one with its VAE and text encoders"
    pooled = (_or_none(facts.pooled_width), _or_none(needs.pooled_width))
    numbers = (
        ("the family", facts.family, needs.family),
        ("latent channels per token", facts.channels, needs.channels),
        ("text width", facts.text_width, needs.text_width),
        ("pooled text width", *pooled),
    )
    for what, has, wanted in numbers:
        if has != wanted:
            raise ConfigError(f"{config_key}: {what} of the cache is {has}, the model's {wanted}; {remedy}")
    if needs.vae is not None and facts.vae != needs.vae:
        raise ConfigError(f"{config_key}: encoded by VAE {facts.vae}, the model's is {needs.vae}; {remedy}")
    for name, wanted in needs.text_encoders.items():
        if facts.text_encoders.get(name) != wanted:
            has = facts.text_encoders.get(name, "missing")
            raise ConfigError(f"{config_key}: {name} of the cache is {has}, the model's {wanted}; {remedy}")
    if needs.text_layers and facts.text_layers != needs.text_layers:
        layers = [", ".join(map(str, of)) or "none" for of in (facts.text_layers, needs.text_layers)]
        raise ConfigError(f"{config_key}: text is of layers {layers[0]}, the model reads {layers[1]}; {remedy}")
    _check_statistics(facts, needs, f"{config_key}: ", remedy)
    _check_sizes(facts, needs, config_key)
    if needs.masks and not facts.masks:
        raise ConfigError(f"task.masked_loss: true, but no sample of {config_key} has a mask; encode masks, or drop the key")


def _check_statistics(facts: LatentFacts, needs: CacheNeeds, begin: str, remedy: str) -> None:
    for name, wanted in needs.latent_statistics.items():
        has = facts.latent_statistics.get(name, ())
        if len(has) != len(wanted):
            raise ConfigError(f"{begin}latent {name} of the cache has {len(has)} numbers, the model's {len(wanted)}; {remedy}")
        for number, (one, other) in enumerate(zip(has, wanted, strict=True)):
            if abs(one - other) > 1e-5 * max(abs(one), abs(other)):
                place = f" of channel {number}" if len(has) > 1 else ""
                raise ConfigError(f"{begin}latent {name}{place} is {one:g}, the model's {other:g}; {remedy}")


def _check_sizes(facts: LatentFacts, needs: CacheNeeds, config_key: str) -> None:
    for length in facts.text_lengths:
        if needs.text_lengths and length not in needs.text_lengths:
            wanted = ", ".join(map(str, needs.text_lengths))
            raise ConfigError(f"{config_key}: texts of {length} tokens, the model's have {wanted}; encode them at this length")
    for height, width in facts.resolutions:
        if needs.resolutions and (height, width) not in needs.resolutions:
            wanted = ", ".join(f"{h}x{w}" for h, w in needs.resolutions)
            raise ConfigError(
                f"{config_key}: pictures of {height}x{width} pixels, wanted are {wanted}; encode them at this resolution"
            )


def _or_none(width: int | None) -> int | str:
    return "none" if width is None else width
