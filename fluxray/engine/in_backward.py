"""The optimizer's step inside the backward pass: a unit steps as soon as its gradient is complete, which is then freed.

The units are those of clipping (`engine/clip.py`): the parameters of a block together, every other parameter alone. So at most
the gradients of the block that backward is in, and of one parameter outside, are held at once, where a step after backward holds
those of the whole model. That pays with one micro-batch, the only case that there is: gradients that wait for those of other
micro-batches cannot be freed.

A parameter may change as soon as its gradient is complete: autograd hands it over after every computation that reads the
parameter for this backward, and FSDP2 after it has been reduced, in the stream of the reduction, for which the end of backward
waits. The steps are those after backward, bit for bit on one rank, except that a unit whose gradient is not finite is withheld
alone: others have stepped before that is known.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fluxray.engine.clip import Clip
from fluxray.engine.gradients import local_gradients, norm_of
from fluxray.engine.masters import Masters
from fluxray.optim.units import UnitOptimizers


class InBackward:
    """Steps the units of `optimizers`, whose parameters are `masters`, from when `begin` is called until `finish` is.

    `clip` is of mode `previous` or `block`. `sum_over_ranks` returns the sum of an fp32 tensor over the ranks without waiting on
    the host; all ranks complete the units in the same order.
    """

    def __init__(self, masters: Masters, optimizers: UnitOptimizers, clip: Clip, sum_over_ranks: Callable[[Tensor], Tensor]):
        assert clip.mode != "exact", "refused by check_consistent"
        self._masters = masters
        self._optimizers = optimizers
        self._clip = clip
        self._sum_over_ranks = sum_over_ranks
        self._trained = {
            unit: [name for name, parameter in members.items() if parameter.requires_grad]
            for unit, members in optimizers.members.items()
        }
        self._missing: dict[str, int] = {}
        self._squares: dict[str, Tensor] = {}
        self._ok: dict[str, Tensor] = {}
        for unit, names in self._trained.items():
            for name in names:
                masters.on_gradient(name, lambda unit=unit: self._arrived(unit))

    def begin(self, lr: float, loss: Tensor) -> None:
        """Let what backward completes from now on step, if `loss`, over all ranks, is finite."""
        self._lr = lr
        self._loss_is_finite = torch.isfinite(loss)
        self._missing = {unit: len(names) for unit, names in self._trained.items()}
        self._squares.clear()
        self._ok.clear()

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, Tensor]:
        """Step the units of which some parameters have no gradient; return the norm of the whole one and the share withheld."""
        for unit, missing in self._missing.items():
            if 0 < missing < len(self._trained[unit]):
                self._step(unit)
        self._missing.clear()
        units = [unit for unit in self._trained if unit in self._squares]
        norm = torch.stack([self._squares[unit] for unit in units]).sum().sqrt()
        sound = self._loss_is_finite & torch.isfinite(norm)
        self._clip.finish(norm.where(sound, torch.nan))
        return norm, 1 - torch.stack([self._ok[unit] for unit in units]).mean()

    def _arrived(self, unit: str) -> None:
        if self._missing:
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                self._step(unit)

    @torch.no_grad()
    def _step(self, unit: str) -> None:
        gradients = local_gradients(self._optimizers.members[unit].values())
        square = self._sum_over_ranks(norm_of(gradients).square())
        norm = square.sqrt()
        torch._foreach_mul_(gradients, self._clip.of_unit(norm))
        ok = (self._loss_is_finite & torch.isfinite(norm)).float()
        self._squares[unit], self._ok[unit] = square, ok
        del gradients
        self._optimizers.step(unit, self._lr, 1 - ok)
        self._masters.publish(self._trained[unit])
