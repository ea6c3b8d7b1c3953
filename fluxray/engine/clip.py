"""Clipping by the gradient's norm, on the device, for engines that see the whole gradient and for those that do not.

A unit is what is clipped together: the parameters of one block, or one parameter outside the blocks.

* `exact`: every unit is scaled by max_norm over the norm of the whole gradient, if that is above 1.
* `previous`: the scale comes from a running average of the norms of past steps, so a unit can step before the others' gradients
  are known. A unit whose own norm would still be above max_norm is scaled down to it: one outlier cannot slip through.
* `block`: each unit is scaled by its own norm alone.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from fluxray.protocols import BlockStack, StateItem, StateReader

ClipMode = Literal["exact", "previous", "block"]

EPSILON = 1e-6
"""Added to a norm before division, as torch.nn.utils.clip_grad_norm_ does."""

DECAY = 0.9
"""Of the running average of norms."""


class Clip:
    """Scales of one run. `average` (fp32 scalar on the device) is the running average of `previous`; 0 before the first step."""

    def __init__(self, mode: ClipMode, max_norm: float, device: torch.device):
        self.mode: ClipMode = mode
        self._max_norm = max_norm
        self.average = torch.zeros((), dtype=torch.float32, device=device)

    def of_unit(self, norm: Tensor) -> Tensor:
        """Return the scale of a unit by what is known before the step is complete; not for `exact`."""
        assert self.mode != "exact"
        own = self._scale(norm)
        return own if self.mode == "block" else torch.minimum(self._scale(self.average), own)

    def of_all(self, norm: Tensor) -> Tensor:
        """Return the scale of `exact` from the norm of the whole gradient."""
        return self._scale(norm)

    def finish(self, norm: Tensor) -> None:
        """Take the norm of a finished step into the average; one that is not finite is left out."""
        average = torch.where(self.average > 0, DECAY * self.average + (1 - DECAY) * norm, norm)
        self.average.copy_(torch.where(torch.isfinite(norm), average, self.average))

    def state_items(self) -> Iterator[StateItem]:
        """Yield what a resumed run must know: the average of `previous`, nothing in the other modes."""
        if self.mode == "previous":
            yield StateItem("clip", "average", (), None, self.average)

    def load_items(self, reader: StateReader) -> None:
        """Take the saved average; one that was not saved starts anew."""
        self.average.zero_()
        if self.mode == "previous" and "clip" in reader.sections("average"):
            self.average.copy_(reader.read("clip", "average", 0, None))

    def _scale(self, norm: Tensor) -> Tensor:
        return (self._max_norm / (norm + EPSILON)).clamp(max=1.0)


def clip_units(stack: BlockStack) -> dict[str, str]:
    """Return the unit of each parameter, by the library's names: the block that holds it, or the parameter itself."""
    blocks = [block.name for block in stack.blocks]
    return {
        name: next((block for block in blocks if name.startswith(f"{block}.")), name)
        for name, _ in stack.model.named_parameters()
    }
