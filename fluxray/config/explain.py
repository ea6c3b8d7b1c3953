"""What is wrong with a tree of values, in one line: the key, the value and the remedy."""

import difflib
import json
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fluxray.config.keys import is_free, kind_of, leaf_items, schema_fields, sections_of
from fluxray.config.quantities import Quantity
from fluxray.config.schema import Section, TrainConfig
from fluxray.config.text import Tree
from fluxray.errors import ConfigError

ELSEWHERE = {
    "learning_rate": "optim.lr",
    "epochs": "train.num_steps",
    "num_epochs": "train.num_steps",
    "max_steps": "train.num_steps",
    "per_device_train_batch_size": "batch.micro_size",
    "gradient_checkpointing": "activation_checkpoint",
    "max_grad_norm": "clip.max_norm",
    "save_steps": "checkpoint.every_steps",
    "logging_steps": "train.log_every",
    "eval_steps": "evaluation.every_steps",
    "bf16": "precision",
    "fp16": "precision",
}
"""What other trainers call our keys, where the spelling alone would not lead there."""

BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most", "multiple_of": "in multiples of"}


def conform(tree: Tree) -> Tree:
    """Return `tree` with the `kind` of every union of sections filled in.

    Raises ConfigError for what pydantic words badly or accepts: unknown keys, values in a section's place, sections in a value's
    place, and true or false for a number.
    """
    faults: list[str] = []
    conformed = _conform(tree, TrainConfig, "", faults)
    if faults:
        raise ConfigError(faults[0] + _more(faults))
    return conformed


def explain(error: ValidationError, tree: Tree) -> str:
    """Return one line for the first value that pydantic refuses in a conformed tree."""
    dotted = [_dotted(fault["loc"]) for fault in error.errors()]
    distinct = list(dict.fromkeys(dotted))
    return _bad_value(distinct[0], dict(leaf_items(tree))[distinct[0]], schema_fields()[distinct[0]]) + _more(distinct)


def _conform(tree: Tree, section: type[Section], prefix: str, faults: list[str]) -> Tree:
    conformed: Tree = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        field = section.model_fields.get(key)
        if field is None:
            faults.append(_unknown(*next(leaf_items({key: value}, prefix))))
        elif not sections_of(field):
            faults.extend(_value_faults(dotted, value, field))
            conformed[key] = value
        elif not isinstance(value, dict):
            faults.append(f"{dotted}: {_shown(value)} is not a section; set a key of it, such as {_sample_key(dotted, field)}")
        else:
            conformed[key] = _conform_section(cast(Tree, value), field, dotted, faults)
    return conformed


def _conform_section(tree: Tree, field: FieldInfo, dotted: str, faults: list[str]) -> Tree:
    members = sections_of(field)
    if len(members) == 1:
        return _conform(tree, members[0], f"{dotted}.", faults)
    by_kind = {kind_of(member): member for member in members}
    kind = tree.get("kind", field.default.kind)
    if not isinstance(kind, str) or kind not in by_kind:
        faults.append(f"{dotted}.kind: {_shown(kind)} is not one of {', '.join(by_kind)}")
        return tree
    owners = {key: name for name, member in by_kind.items() for key in member.model_fields}
    foreign = [key for key in tree if key in owners and key not in by_kind[kind].model_fields]
    for key in foreign:
        faults.append(f"{dotted}.{key}: has no effect with {dotted}.kind {kind}; drop it or set {dotted}.kind={owners[key]}")
    own = {key: value for key, value in tree.items() if key not in foreign}
    return _conform({**own, "kind": kind}, by_kind[kind], f"{dotted}.", faults)


def _value_faults(dotted: str, value: Any, field: FieldInfo) -> list[str]:
    if isinstance(value, dict) and value and not is_free(field):
        return [_unknown(*next(leaf_items({dotted: value})))]
    if isinstance(value, bool) and {int, float} & _types(field):
        return [_bad_value(dotted, value, field)]
    return []


def _unknown(dotted: str, value: Any) -> str:
    keys = list(schema_fields())
    tails = {key.rpartition(".")[2]: key for key in reversed(keys)}
    words = dotted.lower().replace("-", "_")
    tail = words.rpartition(".")[2]
    close = [ELSEWHERE[tail]] if tail in ELSEWHERE else difflib.get_close_matches(words, keys, n=1, cutoff=0.75)
    close = close or [tails[name] for name in difflib.get_close_matches(tail, list(tails), n=1, cutoff=0.7)]
    return f"{dotted}: unknown key; " + (f"did you mean {close[0]}?" if close else "`fluxray config` prints all keys")


def _bad_value(dotted: str, value: Any, field: FieldInfo) -> str:
    return f"{dotted}: {_shown(value)} is not {_wanted(field)}"


def _wanted(field: FieldInfo) -> str:
    """Return in words what a field takes."""
    types = _types(field)
    quantity = next((limit for limit in field.metadata if isinstance(limit, Quantity)), None)
    if quantity is not None:
        return f"{quantity.words} or null"
    if get_origin(field.annotation) is Literal:
        choices = [str(choice) for choice in get_args(field.annotation)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if {int, float} & types:
        bounds = [
            f"{word} {getattr(limit, name):g}"
            for limit in field.metadata
            for name, word in BOUNDS.items()
            if hasattr(limit, name)
        ]
        words = " ".join(["a number" if float in types else "a whole number", " and ".join(bounds)]).rstrip()
        words += " or a list of them" if any(get_origin(part) is tuple for part in types) else ""
    elif bool in types:
        words = "true or false"
    elif is_free(field):
        words = "a mapping of names to texts" if str in get_args(field.annotation)[1:] else "a mapping"
    else:
        patterns = [limit.pattern for limit in field.metadata if hasattr(limit, "pattern")]
        words = f"text of the form {patterns[0]}" if patterns else "text"
        words += " or a list of texts" if any(get_origin(part) is tuple for part in types) else ""
    return f"{words} or null" if type(None) in types else words


def _types(field: FieldInfo) -> set[Any]:
    return {field.annotation, *get_args(field.annotation)}


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return the key of a pydantic location, which also names members of unions, elements of lists and free keys."""
    keys = schema_fields()
    path: list[str] = []
    for part in map(str, loc):
        if any(key == ".".join([*path, part]) or key.startswith(".".join([*path, part]) + ".") for key in keys):
            path.append(part)
    return ".".join(path)


def _sample_key(dotted: str, field: FieldInfo) -> str:
    members = sections_of(field)
    names = list(members[0].model_fields)
    return f"{dotted}.{names[0]}" if len(members) > 1 or len(names) == 1 else f"{dotted}.{next(n for n in names if n != 'kind')}"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _more(faults: list[str]) -> str:
    return f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
