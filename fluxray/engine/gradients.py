"""Norms and clipping of gradients that may be sharded over ranks."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluxray.engine.clip import Clip
from fluxray.engine.scaler import LossScaler


class Gradients:
    """The gradients of named parameters, by clip unit.

    `units` names each parameter's unit (see `clip_units`). `sum_over_ranks` returns the sum of an fp32 tensor over the ranks
    without waiting on the host; every rank holds other elements of the gradient.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[str, str],
        clip: Clip,
        scaler: LossScaler,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ):
        self._units: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            self._units.setdefault(units[name], []).append(parameter)
        self._clip = clip
        self._scaler = scaler
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Take the loss's scale out of the gradients, clip them, and return the norm of the whole one in between.

        The norm is an fp32 scalar, all ranks included.
        """
        gradients = [local for unit in self._units.values() if (local := local_gradients(unit))]
        norms = torch.stack([norm_of(unit) for unit in gradients])
        squares = self._sum_over_ranks(self._scaler.unscaled(norms).square())
        norm = squares.sum().sqrt()
        if self._clip.mode == "exact":
            factor = self._scaler.unscaled(self._clip.of_all(norm))
            torch._foreach_mul_([gradient for unit in gradients for gradient in unit], factor)
        else:
            factors = self._scaler.unscaled(self._clip.of_unit(squares.sqrt()))
            for unit, factor in zip(gradients, factors.unbind(), strict=True):
                torch._foreach_mul_(unit, factor)
        return norm


def norm_of(gradients: list[Tensor]) -> Tensor:
    """Return the norm of some gradients together (fp32 scalar)."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of each gradient that there is."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found]
