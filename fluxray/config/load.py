"""From names and `key=value` words to one frozen TrainConfig. The command line, Tune and the tests use `resolve`.

Precedence: schema defaults < model preset < profile < overrides.
"""

import difflib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from fluxray.config import text
from fluxray.config.checks import check_consistent
from fluxray.config.explain import conform, explain
from fluxray.config.keys import leaf_items, nested
from fluxray.config.schema import Section, TrainConfig
from fluxray.config.text import Tree
from fluxray.errors import ConfigError

MODEL_NAMES = ("model_type", "_class_name")
"""Keys by which a config.json names its model: that of transformers and that of diffusers."""

Overrides = Sequence[str] | Mapping[str, Any]


def resolve(profile: str | None = None, model: str | None = None, overrides: Overrides = ()) -> TrainConfig:
    """Return the configuration of a run.

    `profile` names a file of `profiles/`, or is the path of another (FILE.yaml). `model` names one of `models/`, or is `path:DIR`
    or `hf:NAME` of a published model. `overrides` are words `dotted.key=value` (values read as YAML) or a mapping from dotted
    keys. Raises ConfigError.
    """
    tree: Tree = {}
    for _, layer in layers(profile, model, overrides):
        tree = merge(tree, layer)
    return build(tree)


def layers(profile: str | None, model: str | None, overrides: Overrides) -> list[tuple[str, Tree]]:
    """Return the layers over the schema's defaults, lowest first, each with what it is called."""
    return with_implied(named_layers(profile, model, overrides))


def named_layers(profile: str | None, model: str | None, overrides: Overrides) -> list[tuple[str, Tree]]:
    """Return the layers that somebody has written, lowest first, each with what it is called."""
    found: list[tuple[str, Tree]] = []
    if model is not None:
        found.append((f"model {model}", _model_layer(model)))
    if profile is not None:
        found.append((f"profile {profile}", _read_named("profiles", profile, "--profile")))
    if overrides:
        found.append(("override", _override_layer(overrides)))
    return found


def with_implied(found: list[tuple[str, Tree]]) -> list[tuple[str, Tree]]:
    """Return the layers above those that follow from their contents."""
    trees = [layer for _, layer in found]
    implied = (("model.config", _implied_by_model_config(trees)), ("engine.kind", _implied_by_engine(trees)))
    return [*((name, layer) for name, layer in implied if layer), *found]


def merge(low: Tree, high: Tree) -> Tree:
    """Return `low` with the keys of `high` laid over it.

    A section whose `kind` changes, and a `model.config` that becomes another library's or another model's, starts anew.
    """
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _other_kind(cast(Tree, old), cast(Tree, value)):
            merged[key] = merge(cast(Tree, old), cast(Tree, value))
        else:
            merged[key] = value
    return merged


def build(tree: Tree) -> TrainConfig:
    """Return the TrainConfig of a nested mapping; ConfigError names the first wrong key, its value and the remedy."""
    conformed = conform(tree)
    try:
        config = TrainConfig.model_validate(conformed)
    except ValidationError as error:
        raise ConfigError(explain(error, conformed)) from None
    check_consistent(config)
    return config


def to_yaml(config: TrainConfig) -> str:
    """Return all keys as YAML, in the schema's order."""
    return text.dump(config.model_dump(mode="json"))


def from_yaml(path: Path) -> TrainConfig:
    """Read what `to_yaml` wrote; raises ConfigError."""
    return build(text.read_file(path, str(path)))


def flatten(config: Section) -> dict[str, Any]:
    """Return dotted keys and values, sections opened, in the schema's order; mappings of free keys stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config:
        if isinstance(value, Section):
            flat.update({f"{key}.{name}": leaf for name, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def origins(profile: str | None, model: str | None, overrides: Overrides) -> dict[str, str]:
    """Return for each dotted key that some layer sets the name of the layer that has the last word on it."""
    return {key: name for name, layer in layers(profile, model, overrides) for key, _ in leaf_items(layer)}


def preset_names(folder: str) -> list[str]:
    """Return the names that `profiles` or `models` holds."""
    names = (entry.name for entry in files("fluxray.config").joinpath(folder).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _model_layer(model: str) -> Tree:
    if model.startswith(("path:", "hf:")):
        return {"model": {"weights": model}}
    return _read_named("models", model, "--model")


def _read_named(folder: str, name: str, option: str) -> Tree:
    if name.endswith((".yaml", ".yml", ".json")):
        return text.read_file(Path(name).expanduser(), f"{option}: {name}")
    names = preset_names(folder)
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.75)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        raise ConfigError(f"{option}: {name!r} is unknown; {hint}")
    return cast(Tree, text.parse(files("fluxray.config").joinpath(folder, f"{name}.yaml").read_text(encoding="utf-8")))


def _override_layer(overrides: Overrides) -> Tree:
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(text.parse_word, overrides)
    tree: Tree = {}
    for dotted, value in pairs:
        named = dotted == "model.config" and isinstance(value, str)
        content = text.read_file(Path(value.removeprefix("path:")), f"model.config: {value}") if named else value
        tree = merge(tree, nested(dotted, content))
    return tree


def _implied_by_engine(found: Sequence[Tree]) -> Tree:
    """A streamed model computes its blocks again in backward; any layer's `activation_checkpoint` outranks it."""
    tree: Tree = {}
    for layer in found:
        tree = merge(tree, layer)
    engine = tree.get("engine")
    kind = cast(Tree, engine).get("kind") if isinstance(engine, dict) else None
    return {"activation_checkpoint": "full"} if kind == "stream" else {}


def _implied_by_model_config(found: Sequence[Tree]) -> Tree:
    """Report A's config.json switches checkpointing by a key of its own; any layer's `activation_checkpoint` outranks it."""
    implied: Tree = {}
    for layer in found:
        model = layer.get("model")
        config = cast(Tree, model).get("config") if isinstance(model, dict) else None
        if isinstance(config, dict) and "use_gradient_checkpointing" in config:
            implied = {"activation_checkpoint": "full" if config["use_gradient_checkpointing"] else "none"}
    return implied


def _other_kind(old: Tree, new: Tree) -> bool:
    changed = any(key in old and key in new and old[key] != new[key] for key in ("kind", *MODEL_NAMES))
    return changed or any(one in old and other in new for one, other in (MODEL_NAMES, MODEL_NAMES[::-1]))
