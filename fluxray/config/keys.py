"""The schema seen as dotted keys, and trees of values walked along it."""

from collections.abc import Iterator
from typing import Any, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from fluxray.config.schema import Section, TrainConfig
from fluxray.config.text import Tree


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """Return the section a field opens, or the members of its union of sections; empty for a value."""
    return [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, Section)]


def kind_of(section: type[Section]) -> str:
    """Return the `kind` that chooses `section` among the members of a union."""
    return str(section.model_fields["kind"].default)


def is_free(field: FieldInfo) -> bool:
    """Return whether the field's value is a mapping of free keys."""
    return get_origin(field.annotation) is dict


def schema_fields(section: type[Section] = TrainConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Return every dotted key of the schema that holds a value; a union of sections has the keys of all its members."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        for part in sections_of(field):
            fields |= schema_fields(part, f"{prefix}{name}.")
        if not sections_of(field):
            fields[f"{prefix}{name}"] = field
    return fields


def leaf_items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a tree; mappings of free keys and empty ones stay whole."""
    fields = schema_fields()
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        field = fields.get(dotted)
        if isinstance(value, dict) and value and not (field and is_free(field)):
            yield from leaf_items(cast(Tree, value), f"{dotted}.")
        else:
            yield dotted, value


def nested(dotted: str, value: Any) -> Tree:
    """Return the tree that holds one value."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return cast(Tree, value)
