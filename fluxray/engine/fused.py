"""Parameters that are several of the library's, one below the other: apart in what is saved, together in memory.

A checkpoint knows the library's names alone, so runs with and without `model.fused_qkv` read each other's. All that is kept of a
parameter is kept by rows (a quantisation block never leaves its row), so cutting and joining change no bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fluxray.errors import CheckpointError
from fluxray.protocols import StateItem, StateReader

Fused = Mapping[str, Mapping[str, int]]
"""See `BlockStack.fused`."""


def split_items(items: Iterable[StateItem], fused: Fused) -> Iterator[StateItem]:
    """Yield the items, those of a fused parameter cut at the library's. A number belongs to each of them."""
    for item in items:
        parts = fused.get(item.name)
        if parts is None:
            yield item
        elif not item.shape:
            yield from (item._replace(name=name, tensor=item.tensor.clone()) for name in parts)
        else:
            yield from _cut(item, parts)


def _cut(item: StateItem, parts: Mapping[str, int]) -> Iterator[StateItem]:
    first = item.offset or 0
    begin = 0
    for name, num_rows in parts.items():
        low, high = max(begin, first), min(begin + num_rows, first + item.tensor.shape[0])
        if low < high:
            shape = (num_rows, *item.shape[1:])
            offset = None if item.offset is None else low - begin
            yield StateItem(item.section, name, shape, offset, item.tensor[low - first : high - first])
        begin += num_rows


class FusingReader:
    """A saved state in the library's names, seen in the model's (see `protocols.StateReader`)."""

    def __init__(self, reader: StateReader, fused: Fused):
        self._reader = reader
        self._fused = fused

    def names(self) -> list[str]:
        """Return the names of the saved parameters; those of a fused one as one if all are there."""
        saved = set(self._reader.names())
        for name, parts in self._fused.items():
            if saved.issuperset(parts):
                saved = (saved - set(parts)) | {name}
        return sorted(saved)

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of a whole saved tensor; CheckpointError if parts of a fused one cannot lie one below the other."""
        parts = self._fused.get(name)
        if parts is None:
            return self._reader.shape(section, name)
        shapes = [self._reader.shape(section, part) for part in parts]
        if len({shape[1:] for shape in shapes}) != 1:
            raise CheckpointError(f"checkpoint: {name} would be of {shapes}; it is of another model")
        return shapes[0] if not shapes[0] else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def sections(self, name: str, /) -> Sequence[str]:
        """Return the sections saved for a parameter; CheckpointError if those of a fused one's parts differ."""
        first, *others = self._fused.get(name, (name,))
        found = self._reader.sections(first)
        for other in others:
            if set(self._reader.sections(other)) != set(found):
                raise CheckpointError(
                    f"model.fused_qkv: true, but the checkpoint keeps moments of {first} and {other} in other formats, since one "
                    f"has under 4,096 elements; set model.fused_qkv=false"
                )
        return found

    def read(self, section: str, name: str, offset: int = 0, num_rows: int | None = None, /) -> Tensor:
        """Return rows [offset, offset + num_rows) of a saved tensor, on the host; all from `offset` on for None."""
        parts = self._fused.get(name)
        if parts is None:
            return self._reader.read(section, name, offset, num_rows)
        shape = self.shape(section, name)
        if not shape:
            return self._reader.read(section, next(iter(parts)), 0, None)
        end = shape[0] if num_rows is None else offset + num_rows
        if offset == end:
            return self._reader.read(section, next(iter(parts)), 0, 0)
        begin, found = 0, list[Tensor]()
        for part in parts:
            rows = self._reader.shape(section, part)[0]
            low, high = max(offset, begin), min(end, begin + rows)
            if low < high:
                found.append(self._reader.read(section, part, low - begin, high - low))
            begin += rows
        return torch.cat(found)
