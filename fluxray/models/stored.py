"""Tensors in safetensors files: where each lies, and its values, one tensor at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor


class Stored(NamedTuple):
    """Where a tensor lies and what it is. With `rows` it is these ranges of the stored one's rows, one below the other."""

    file: str
    key: str
    shape: torch.Size
    dtype: str
    rows: tuple[tuple[int, int], ...] = ()

    def taken(self, rows: Sequence[tuple[int, int]]) -> "Stored":
        """Return the tensor that is made of ranges of this one's rows."""
        num_rows = sum(end - begin for begin, end in rows)
        return self._replace(shape=torch.Size([num_rows, *self.shape[1:]]), rows=tuple(rows))

    def read(self) -> Tensor:
        """Return the tensor: whole, it maps its file, which is closed when the tensor is let go; of parts, a copy of them.

        Raises OSError or SafetensorError for a file that is gone or damaged.
        """
        with safe_open(self.file, framework="pt") as opened:
            if not self.rows:
                return opened.get_tensor(self.key)
            stored = opened.get_slice(self.key)
            parts = [stored[begin:end] for begin, end in self.rows]
            return parts[0] if len(parts) == 1 else torch.cat(parts)


def tensors_in(files: Iterable[str]) -> dict[str, Stored]:
    """Return every tensor in safetensors files by its key; no values are read."""
    found: dict[str, Stored] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dictionary
                stored = opened.get_slice(key)
                found[key] = Stored(file, key, torch.Size(stored.get_shape()), stored.get_dtype())
    return found


def metadata_of(file: str) -> Mapping[str, str]:
    """Return the free text that a safetensors file carries."""
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}
