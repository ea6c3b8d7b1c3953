"""What a FLUX transformer's own configuration says about it; nothing here knows a model by its name."""

import difflib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
from fluxray.models.pipeline import flux_config, pipeline_facts

Family = Literal["flux1", "flux2"]

FAMILIES: Mapping[str, Family] = {"FluxTransformer2DModel": "flux1", "Flux2Transformer2DModel": "flux2"}
"""By `_class_name` of the config.json files that diffusers writes."""


@dataclass(frozen=True)
class FluxFacts:
    """What tasks, data and kernels must know of a transformer.

    `in_channels` is the C of packed latents, `text_width` the E of text embeddings, `pooled_width` the P of the pooled one that
    FLUX.1 reads, None for FLUX.2. `embeds_guidance`: it wants a guidance scale with each sample. `is_distilled` in the number of
    steps, so that training it by rectified flow undoes what it was made for; None where its configuration does not tell.
    """

    family: Family
    in_channels: int
    text_width: int
    pooled_width: int | None
    embeds_guidance: bool
    is_distilled: bool | None
    num_heads: int
    head_dim: int


def flux_facts(model: ModelConfig, is_distilled: bool | None = None) -> FluxFacts:
    """Return the facts of a configured or published transformer.

    A step-distilled FLUX.1 is known by its lack of guidance, a FLUX.2 with guidance is none; of a FLUX.2 without guidance the
    model_index.json of its pipeline alone tells, or else the caller. ConfigError for what diffusers does not know.
    """
    config = library_config(model)
    family = FAMILIES[config["_class_name"]]
    guided = bool(config["guidance_embeds"])
    if is_distilled is None and (family == "flux1" or guided):
        is_distilled = not guided
    elif is_distilled is None and model.weights is not None:
        around = pipeline_facts(model.weights)
        is_distilled = None if around is None else around.is_distilled
    return FluxFacts(
        family,
        config["in_channels"],
        config["joint_attention_dim"],
        config["pooled_projection_dim"] if family == "flux1" else None,
        guided,
        is_distilled,
        config["num_attention_heads"],
        config["attention_head_dim"],
    )


def transformer_class(name: str) -> Any:
    """Return diffusers' class of a FLUX transformer; ConfigError for another name."""
    if name not in FAMILIES:
        raise ConfigError(f"model.config._class_name: {name!r} is no FLUX transformer; use one of {', '.join(FAMILIES)}")
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # what it lacks is for inference in 4 bits
    import diffusers

    return getattr(diffusers, name)


def library_config(model: ModelConfig) -> dict[str, Any]:
    """Return the whole configuration of a transformer, `_class_name` and the class's own defaults included.

    Raises ConfigError for a key that the class does not have, for keys that contradict those of the published `model.weights`,
    and for a transformer that does not map latents to latents.
    """
    given = model.config if model.weights is None else flux_config(model.weights)
    name = given.get("_class_name", "")
    cls = transformer_class(name)
    parameters = {key: value for key, value in inspect.signature(cls.__init__).parameters.items() if key != "self"}
    keys = {key: value for key, value in given.items() if not key.startswith("_")}
    for key in keys:
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, n=1)
            hint = f"did you mean model.config.{close[0]}?" if close else "drop it"
            raise ConfigError(f"model.config.{key}: is no key of {name}; {hint}")
    config = {"_class_name": name, **{key: parameter.default for key, parameter in parameters.items()}, **keys}
    _check_agrees(config, model)
    for key, wanted in (("patch_size", 1), ("out_channels", config["in_channels"])):
        if config[key] not in (None, wanted):
            raise ConfigError(f"model.config.{key}: {config[key]!r}, but a transformer of latents has {wanted}; drop it")
    return config


def _check_agrees(config: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError for what `model.config` says otherwise than the published configuration."""
    for key, value in model.config.items():
        published = config.get(key)
        if key in config and published != value and not _is_same_list(published, value):
            raise ConfigError(
                f"model.config.{key}: {value!r}, but {model.weights} has {published!r}; drop the key or the weights"
            )


def _is_same_list(one: Any, other: Any) -> bool:
    return isinstance(one, list | tuple) and isinstance(other, list | tuple) and list(one) == list(other)
