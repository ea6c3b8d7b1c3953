"""What every engine asks of a saved state before it takes any of it."""

from collections.abc import Mapping, Sequence

from fluxray.errors import CheckpointError
from fluxray.protocols import StateReader


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
