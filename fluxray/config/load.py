"""From names and `key=value` words to one frozen TrainConfig. The command line, Tune and the tests use `resolve`.

Precedence: schema defaults < model preset < profile < overrides.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import ValidationError

from fluxray.config.checks import check_consistent
from fluxray.config.schema import Section, TrainConfig
from fluxray.errors import ConfigError

Tree = dict[str, Any]
NUMBERS = (int, float, int | None, float | None)


def resolve(profile: str | None = None, model: str | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> TrainConfig:
    """Return the configuration of a run.

    `profile` names a file of `profiles/`, `model` one of `models/`, or is `path:DIR` or `hf:NAME` of a published model. `overrides`
    are words `dotted.key=value` (values read as YAML) or a mapping from dotted keys. Raises ConfigError.
    """
    tree: Tree = {}
    for _, layer in layers(profile, model, overrides):
        tree = merge(tree, layer)
    return build(tree)


def layers(profile: str | None, model: str | None, overrides: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Tree]]:
    """Return the layers over the schema's defaults, lowest first, each with what it is called."""
    found: list[tuple[str, Tree]] = []
    if model is not None:
        found.append((f"model {model}", _model_layer(model)))
    if profile is not None:
        found.append((f"profile {profile}", _read_named("profiles", profile, "--profile")))
    if overrides:
        found.append(("override", _override_layer(overrides)))
    found = [(name, _read_model_config(layer)) for name, layer in found]
    implied = _implied_by_model_config([layer for _, layer in found])
    return [("model.config", implied), *found] if implied else found


def merge(low: Tree, high: Tree) -> Tree:
    """Return `low` with the keys of `high` laid over it; a section whose `kind` changes, or a model's config of another type, starts anew."""
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
    _refuse_bool_for_number(tree)
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    check_consistent(config)
    return config


def to_yaml(config: TrainConfig) -> str:
    """Return all keys as YAML, in the schema's order."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def from_yaml(path: Path) -> TrainConfig:
    """Read what `to_yaml` wrote; raises ConfigError."""
    return build(_read_yaml(path, str(path)))


def flatten(config: Section) -> dict[str, Any]:
    """Return dotted keys and values, sections opened, in the schema's order; dictionaries of free keys stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config:
        if isinstance(value, Section):
            flat.update({f"{key}.{name}": leaf for name, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def origins(profile: str | None, model: str | None, overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Return for each dotted key that some layer sets the name of the layer that has the last word on it."""
    found: dict[str, str] = {}
    for name, layer in layers(profile, model, overrides):
        found.update({key: name for key in _leaf_keys(layer)})
    return found


def preset_names(folder: str) -> list[str]:
    """Return the names that `profiles` or `models` holds."""
    names = (entry.name for entry in files("fluxray.config").joinpath(folder).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _model_layer(model: str) -> Tree:
    if model.startswith(("path:", "hf:")):
        return {"model": {"weights": model}}
    return _read_named("models", model, "--model")


def _read_named(folder: str, name: str, option: str) -> Tree:
    names = preset_names(folder)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        raise ConfigError(f"{option}: {name!r} is unknown; {hint}")
    return cast(Tree, yaml.safe_load(files("fluxray.config").joinpath(folder, f"{name}.yaml").read_text()))


def _override_layer(overrides: Sequence[str] | Mapping[str, Any]) -> Tree:
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parse_word, overrides)
    tree: Tree = {}
    for dotted, value in pairs:
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        tree = merge(tree, cast(Tree, nested))
    return tree


def _parse_word(word: str) -> tuple[str, Any]:
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise ConfigError(f"{word}: not of the form key=value, such as optim.lr=3e-4")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        return key, text


def _read_yaml(path: Path, key: str) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{key}: is not a YAML or JSON file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: holds no keys")
    return cast(Tree, tree)


def _read_model_config(layer: Tree) -> Tree:
    """Replace a `model.config` that names a config.json by what the file holds."""
    model = layer.get("model")
    named = cast(Tree, model).get("config") if isinstance(model, dict) else None
    if not isinstance(named, str):
        return layer
    content = _read_yaml(Path(named.removeprefix("path:")), f"model.config: {named}")
    return {**layer, "model": {**cast(Tree, model), "config": content}}


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
    return any(key in old and key in new and old[key] != new[key] for key in ("kind", "model_type"))


def _leaf_keys(tree: Tree, prefix: str = "") -> Iterator[str]:
    free = {name for name, field in _all_fields() if "dict" in str(field)}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in free:
            yield from _leaf_keys(cast(Tree, value), f"{dotted}.")
        else:
            yield dotted


def _all_fields(section: type[Section] = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted leaf key of the schema with its annotation; a union of sections yields the keys of each."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        inner = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, Section)]
        for part in inner:
            yield from _all_fields(part, f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}", annotation


def _refuse_bool_for_number(tree: Tree) -> None:
    """Python's true is a number to pydantic; nobody who writes `optim.lr=true` means 1.0."""
    annotations = dict(_all_fields())
    for dotted in _leaf_keys(tree):
        value: Any = tree
        for part in dotted.split("."):
            value = value[part]
        if isinstance(value, bool) and annotations.get(dotted) in NUMBERS:
            raise ConfigError(f"{dotted}: {str(value).lower()}: a number is wanted")


def _explain(error: ValidationError) -> str:
    """Return one line for the first fault: key, value, remedy; and how many more there are."""
    faults = error.errors()
    first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    # A discriminated union puts the member's tag into the path: it is the value of `kind`, not a key.
    keys = {name for name, _ in _all_fields()}
    path = [str(part) for part in first["loc"]]
    if path[0] == "engine" and len(path) > 1:
        path = [path[0], *path[2:]] if len(path) > 2 else [path[0]]
    dotted = ".".join(path)
    while dotted not in keys and first["type"] != "extra_forbidden" and "." in dotted:
        dotted = dotted.rpartition(".")[0]                 # members of a union and elements of a list
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 and first["type"] == "extra_forbidden" else ""
    if first["type"] == "extra_forbidden":
        return f"{dotted}: unknown key; {_suggest(dotted, sorted(keys))}{more}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"{dotted}: {_shown(first['input'])}: {message}{more}"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text) if isinstance(value, str) else text


def _suggest(dotted: str, keys: Sequence[str]) -> str:
    close = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.75)
    if not close:
        last = dotted.rpartition(".")[2]
        close = [key for key in keys if key.rpartition(".")[2] == last]
    if not close:
        tails = {key.rpartition(".")[2]: key for key in keys}
        close = [tails[t] for t in difflib.get_close_matches(dotted.rpartition(".")[2], list(tails), n=1, cutoff=0.7)]
    return f"did you mean {close[0]}?" if close else "`fluxray config` prints all keys"
