"""Weights on their way from a checkpoint into safetensors files, and the folder that these go to.

The host holds one file of weights at a time, or one tensor where all belong into one file.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fluxray.errors import ConfigError, one_line
from fluxray.optim.restore import restore
from fluxray.optim.states import AVERAGE, StateFormat

FILE_BYTES = 5 * 10**9
"""What a file of weights may hold; a larger tensor has one for itself."""

MASTER = StateFormat(torch.float32, None, quantised=False, decays=False, trained=False)
"""How an exported fp32 weight is kept: whole, and alone."""

CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""What a safetensors header calls the formats of exported weights."""


class Saved(Protocol):
    """Weights by name, as `protocols.StateReader` gives them back; the rows to read may be left out."""

    def names(self) -> Sequence[str]:
        """Return the names of the parameters."""
        ...

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def sections(self, name: str, /) -> Sequence[str]:
        """Return what there is of a parameter."""
        ...

    def read(self, section: str, name: str, offset: int = 0, num_rows: int | None = None, /) -> Tensor:
        """Return rows of a tensor; all by default."""
        ...


class Kept(NamedTuple):
    """A parameter's trained values in a checkpoint, read anew each time, in the format that they are exported in.

    `averaged`: their moving averages in their place, where there are any.
    """

    reader: Saved
    dtype: torch.dtype
    averaged: bool = False

    def weight(self, name: str) -> Tensor:
        """Return a parameter's trained values, a copy of its own."""
        values = torch.empty(self.reader.shape("weights", name), dtype=self.dtype)
        if self.averaged and AVERAGE in self.reader.sections(name):
            values.copy_(self.reader.read(AVERAGE, name))
        elif self.dtype == torch.float32:
            restore(self.reader, name, MASTER, {"weights": values})
        else:
            values.copy_(self.reader.read("weights", name))
        return values


def write_shards(kept: Kept, names: Mapping[str, str], like: Mapping[str, Tensor], folder: Path, file_name: str) -> None:
    """Write weights as the libraries do: one file, or several of at most `FILE_BYTES` with an index.

    `names` maps the keys in the files to parameters, `like` to tensors of their shapes and formats; `file_name` is that of one
    file, with `{suffix}` where the number goes.
    """
    split = split_torch_state_dict_into_shards(dict(like), filename_pattern=file_name, max_shard_size=FILE_BYTES)
    for file, held in split.filename_to_tensors.items():
        weights = {key: kept.weight(names[key]) for key in held}
        save_file(weights, folder / file, metadata={"format": "pt"})
        del weights  # before those of the next file are read
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in like.values()), **split.metadata}
        write_json(
            folder / f"{file_name.format(suffix='')}.index.json",
            {"metadata": metadata, "weight_map": split.tensor_to_filename},
        )


def write_streamed(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write one safetensors file whose tensors are read and written one by one, by name.

    The format: 8 bytes with the length of the header, little-endian; the header, JSON; the tensors' bytes without gaps.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for key, shape in sorted(shapes.items()):
        end = begin + prod(shape) * dtype.itemsize
        header[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, shape in sorted(shapes.items()):
            tensor = read(key)
            assert tensor.dtype == dtype and list(tensor.shape) == list(shape), f"{key}: {tensor.dtype} {list(tensor.shape)}"
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file as the libraries lay it out."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def check_target(out_dir: Path) -> None:
    """Raise ConfigError unless `out_dir` is empty or can be made."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"DIR: {out_dir} exists and is not empty; name another folder")
    for parent in out_dir.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(f"DIR: {out_dir} cannot be made, {parent} is a file; name another folder")


@contextmanager
def filled_or_empty(out_dir: Path) -> Iterator[None]:
    """Make the folder, which must be empty if it exists; empty it again if what fills it fails."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in out_dir.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(
                f"DIR: {out_dir} cannot be written ({one_line(error)}); free space there or name another folder"
            ) from None
        raise
