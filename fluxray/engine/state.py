"""What every engine asks of a saved state before it takes any of it."""

import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from fluxray.errors import CheckpointError
from fluxray.protocols import BlockStack, StateItem, StateReader

BASE, IDENTITY = "base", "identity"
"""Section and name of the JSON text, as bytes, that tells what adapters belong to."""


def base_items(stack: BlockStack) -> Iterator[StateItem]:
    """Yield what tells the frozen parameters that a checkpoint of adapters does not hold."""
    if stack.adapts:
        text = torch.frombuffer(bytearray(json.dumps(dict(stack.base)).encode()), dtype=torch.uint8)
        yield StateItem(BASE, IDENTITY, tuple(text.shape), None, text)


def base_in(reader: StateReader) -> Mapping[str, str]:
    """Return what a checkpoint tells of the base of its adapters; nothing where it holds none."""
    if BASE not in reader.sections(IDENTITY):
        return {}
    return json.loads(bytes(reader.read(BASE, IDENTITY, 0, None).tolist()))


def check_base(base: Mapping[str, str], reader: StateReader) -> None:
    """Raise CheckpointError if the saved adapters belong to another base. An empty `base`, a rank's without one, fits all."""
    saved = base_in(reader)
    if base and saved and dict(saved) != dict(base):
        raise CheckpointError(
            f"model: the checkpoint's adapters are of {_shown(saved)}, the model is of {_shown(base)}; set "
            f"model.weights, seed and adapter.base as they were"
        )


def _shown(base: Mapping[str, str]) -> str:
    told = f"weights with the hash {base['weights']}" if "weights" in base else f"random weights of seed {base['seed']}"
    return f"{told} in {base['kept']}" if "kept" in base else told


def check_same_model(shapes: Mapping[str, Sequence[int]], reader: StateReader) -> None:
    """Raise CheckpointError unless the saved weights have exactly the names and shapes of the model's parameters."""
    saved = set(reader.names())
    for name in sorted(saved ^ set(shapes)):
        where = "is not in the model" if name in saved else "is missing"
        raise CheckpointError(f"checkpoint: {name} {where}; it is of another model")
    for name, shape in shapes.items():
        found = reader.shape("weights", name)
        if found != tuple(shape):
            raise CheckpointError(f"checkpoint: {name} is {found}, the model's is {tuple(shape)}; it is of another model")
