"""Norms and clipping of gradients that may be sharded over ranks."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fluxray.engine.clip import Clip


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
        sum_over_ranks: Callable[[Tensor], Tensor],
    ):
        self._units: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            self._units.setdefault(units[name], []).append(parameter)
        self._clip = clip
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale the gradients in place and return the norm of the whole one before that (fp32 scalar, all ranks included)."""
        gradients = [local for unit in self._units.values() if (local := _local_gradients(unit))]
        norms = torch.stack([torch.linalg.vector_norm(torch.stack(torch._foreach_norm(unit))) for unit in gradients])
        squares = self._sum_over_ranks(norms.square())
        norm = squares.sum().sqrt()
        if self._clip.mode == "exact":
            torch._foreach_mul_([gradient for unit in gradients for gradient in unit], self._clip.of_all(norm))
        else:
            for unit, scale in zip(gradients, self._clip.of_unit(squares.sqrt()).unbind(), strict=True):
                torch._foreach_mul_(unit, scale)
        return norm


def _local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of each gradient that there is."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found]
