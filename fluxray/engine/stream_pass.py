"""One optimizer step of the stream engine under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fluxray.engine.offload import Parcel
from fluxray.engine.stream_compute import Tensors
from fluxray.protocols import Batch, State


@dataclass
class Pass:
    """One optimizer step under way. `carry_gradients[k]` and `shared_gradients[k]` are those of micro-batch k, so far.

    `shared_names` are the shared tensors that the loss can be differentiated by, `rate` that of moving averages, `ok` holds 1 or
    0 for each clip unit, `sent` of each block the inputs that wait on the host.
    """

    batches: Sequence[Batch]
    embedded: Sequence[State]
    shared_names: Sequence[str]
    divisor: float
    lr: float
    seed: int
    loss_sum: Tensor
    rate: float = 0.0
    carry_gradients: list[Tensors] = field(default_factory=list)
    shared_gradients: list[dict[str, Tensor]] = field(default_factory=list)
    sent: list[list[Parcel]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    ok: list[Tensor] = field(default_factory=list)

    def add_shared(self, k: int, leaves: State) -> None:
        """Add what has come to the shared leaves of micro-batch k, in fp32."""
        held = self.shared_gradients[k]
        for name in self.shared_names:
            leaf = leaves.shared[name]
            if leaf is not None and leaf.grad is not None:
                held[name] = leaf.grad.float() if name not in held else held[name].add_(leaf.grad)
