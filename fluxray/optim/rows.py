"""A parameter whose rows may be spread over ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from fluxray.optim.restore import restore
from fluxray.optim.states import StateFormat
from fluxray.protocols import StateItem, StateReader


class Rows(NamedTuple):
    """This rank's rows of a tensor: the data itself, the shape of the whole, and the first row; None where it is all here."""

    local: Tensor
    shape: Sequence[int]
    first: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> "Rows":
        """Take a tensor that is whole, or that FSDP2 has cut along dimension 0, which it does like `torch.chunk`."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return cls(tensor, tensor.shape, None)
        mesh = tensor.device_mesh
        rows_per_rank = -(-tensor.shape[0] // mesh.size())
        return cls(tensor.to_local(), tensor.shape, min(mesh.get_local_rank() * rows_per_rank, tensor.shape[0]))

    def item(self, section: str, name: str, tensor: Tensor) -> StateItem:
        """Return the piece of a checkpoint for `tensor`, which has something for each of these rows."""
        shape = (*self.shape[:1], *tensor.shape[1:]) if tensor.ndim else ()
        return StateItem(section, name, shape, self.first, tensor)

    def restore(self, reader: StateReader, name: str, fmt: StateFormat, sections: Mapping[str, Tensor]) -> bool:
        """Fill these rows and their `sections` of state from a checkpoint; return whether anything was narrowed."""
        if self.local.numel() == 0:
            return False
        num_rows = self.local.shape[0] if self.local.ndim else None
        return restore(reader, name, fmt, {"weights": self.local, **sections}, self.first or 0, num_rows)
