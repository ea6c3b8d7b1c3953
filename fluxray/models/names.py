"""A model's parameter names in memory and in published files, by transformers' own conversion rules (5.17 and later).

Only rules that rename are followed. Where the library would also split, join or turn tensors, both functions return None.
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

from transformers import PreTrainedModel

RENAME_PARAMETERS = {"source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"}
"""What `rename_source_key` is called with."""


def names_in_memory(model: PreTrainedModel, keys: Iterable[str], known: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the stored key of each name of `known` that one of the stored `keys` holds; other keys are of no use and left out.

    `known` maps the model's names to anything but None. None is returned if a tensor would be converted, if two keys have one
    name, or if the library's rules have another form than here.
    """
    rename = _library_rename(model, known)
    if rename is None:
        return None
    found: dict[str, str] = {}
    for key in sorted(keys):
        name, converts = rename(key)
        if converts or name in found:
            return None
        if name in known:
            found[name] = key
    return found


def names_on_disk(model: PreTrainedModel) -> dict[str, str] | None:
    """Return the key under which the library stores each parameter, a tied one once.

    None is returned if a tensor would be converted, or if the library's rules have another form than here.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    parameters = dict(model.named_parameters())
    keys = list(revert_weight_conversion(model, dict(parameters)))
    found = names_in_memory(model, keys, parameters)
    return found if found is not None and len(found) == len(keys) == len(parameters) else None


def _library_rename(model: PreTrainedModel, known: Mapping[str, Any]) -> Callable[[str], tuple[str, bool]] | None:
    """Return the library's rule from a stored key to the name in memory and whether the tensor is converted."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None
    if not set(signature(rename_source_key).parameters) >= RENAME_PARAMETERS:
        return None
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    if len(renamings) + len(converters) != len(rules):
        return None
    prefix: dict[str, Any] = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": known}

    def rename(key: str) -> tuple[str, bool]:
        name, pattern = rename_source_key(key, renamings, converters, **prefix)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], **prefix)
        return name, pattern is not None

    return rename
