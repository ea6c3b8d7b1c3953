"""Configuration as text: YAML 1.2 files, JSON files and `key=value` words.

PyYAML speaks YAML 1.1, where `3e-4` is text, `no` is false and `2026-01-31` a date. Here plain words mean what JSON would read:
true, false, null and numbers; everything else is text.
"""

import json
import re
from pathlib import Path
from typing import Any, cast

import yaml

from fluxray.errors import ConfigError

Tree = dict[str, Any]

PLAIN = {
    "tag:yaml.org,2002:null": (r"null|~|", ["n", "~", ""]),
    "tag:yaml.org,2002:bool": (r"true|false", list("tf")),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
}
"""What a plain word must look like to be of a type, and its first characters."""


class _Loader(yaml.SafeLoader):
    """Has no aliases, which JSON has not either and which can make a value hold itself."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # pyright: ignore[reportUnknownMemberType]
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes what either dialect would not read as text."""


for _dialect in cast(tuple[Any, ...], (_Loader, _Dumper)):
    for _tag, (_pattern, _first) in PLAIN.items():
        _dialect.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)


def parse(text: str) -> Any:
    """Return what YAML or JSON text says; raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def dump(tree: Tree) -> str:
    """Return YAML that `parse` and YAML 1.1 readers understand alike, in the order of `tree`."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_file(path: Path, key: str) -> Tree:
    """Return the mapping that a YAML or JSON file holds; a ConfigError begins with `key`."""
    try:
        content = path.read_text(encoding="utf-8")
        tree = json.loads(content) if content.lstrip().startswith("{") else parse(content)
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read ({error.strerror}); name another file") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{key}: is not a YAML or JSON file; name one that is") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: holds no keys")
    return cast(Tree, tree)


def parse_word(word: str) -> tuple[str, Any]:
    """Return key and value of `key=value`; what is no YAML, such as `*.txt`, is text."""
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise ConfigError(f"{word}: is not of the form key=value, such as optim.lr=3e-4")
    if not text.strip():
        raise ConfigError(f"{key}: no value behind the =; write {key}=VALUE")
    try:
        return key, parse(text)
    except yaml.YAMLError:
        return key, text
