"""Scaling of the loss for gradients in fp16, whose exponent has 5 bits (Micikevicius et al., arXiv:1710.03740).

The loss is multiplied by a power of two before backward, so that small gradients do not vanish, and the gradient is divided by it
before it is used. Rule and constants are those of `torch.amp.GradScaler`:

    a gradient overflowed           the step changes nothing, scale / 2, count 0
    otherwise                       count + 1; at 2,000 of them scale x 2, count 0

GradScaler itself goes through all gradients once more to divide them and asks the host whether to step. Here the division is part
of the factor by which clipping multiplies them anyway, what overflowed shows in the norm, on all ranks alike, and the decision
stays on the device.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fluxray.protocols import StateItem, StateReader

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 2.0**-24
"""Where halving ends: its inverse is still a number. The trainer ends a run long before."""


class LossScaler:
    """The scale of one run and the steps since it last changed, on the device (fp32 scalars).

    One that is not `enabled` scales nothing and saves nothing.
    """

    def __init__(self, enabled: bool, device: torch.device, scale: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL):
        self._enabled = enabled
        self._initial = scale
        self._interval = growth_interval
        self._scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._count = torch.zeros((), dtype=torch.float32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what backward begins with."""
        return loss * self._scale if self._enabled else loss

    def unscaled(self, value: Tensor) -> Tensor:
        """Return a norm of gradients, or a factor for them, with the scale divided out: exact, for it is a power of two."""
        return value / self._scale if self._enabled else value

    def finish(self, loss: Tensor, norm: Tensor) -> Tensor | None:
        """Adapt the scale to a step's loss and gradient norm; return the one that the step had, None if not enabled.

        A loss that is not finite says nothing about the scale, since the forward is not scaled: nothing changes then.
        """
        if not self._enabled:
            return None
        used, known, fits = self._scale.clone(), torch.isfinite(loss), torch.isfinite(norm)
        count = torch.where(fits, self._count + 1, 0)
        grows = count >= self._interval
        grown = torch.where(grows, used * 2, used)
        halved = (used / 2).clamp(min=SMALLEST_SCALE)
        scale = torch.where(fits, torch.where(torch.isfinite(grown), grown, used), halved)
        self._scale.copy_(torch.where(known, scale, used))
        self._count.copy_(torch.where(known, torch.where(grows, 0, count), self._count))
        return used

    def state_items(self) -> Iterator[StateItem]:
        """Yield what a resumed run must know."""
        if self._enabled:
            yield StateItem("scaler", "scale", (), None, self._scale)
            yield StateItem("scaler", "count", (), None, self._count)

    def load_items(self, reader: StateReader) -> None:
        """Take the saved scale and count; a run that had none starts anew."""
        saved = self._enabled and "scaler" in reader.sections("scale")
        self._scale.copy_(reader.read("scaler", "scale", 0, None)) if saved else self._scale.fill_(self._initial)
        self._count.copy_(reader.read("scaler", "count", 0, None)) if saved else self._count.zero_()
