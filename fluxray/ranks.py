"""The workers of a run as one: what they gather, what they agree on, the fault of one raised on all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fluxray.errors import FluxrayError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One of `num_ranks` workers.

    `gather` brings a value and returns all ranks' values, in order, once every rank has brought its own; `any` returns whether
    any rank brought True, at the cost of one small reduction, and `highest` the largest number that any rank brought.
    """

    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[Any], Sequence[Any]] = lambda value: [value]
    any: Callable[[bool], bool] = lambda flag: flag
    highest: Callable[[float], float] = lambda number: number

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> "Ranks":
        """Return this process's place in a group over the host's network (gloo)."""

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(values, value, group)
            return values

        def any_of(flag: bool) -> bool:
            total = torch.tensor([int(flag)])
            dist.all_reduce(total, group=group)
            return total.item() > 0

        def highest(number: float) -> float:
            most = torch.tensor([number], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            return most.item()

        return cls(dist.get_rank(group), dist.get_world_size(group), gather, any_of, highest)

    def together(self, action: Callable[[], T]) -> T:
        """Return what `action` returns, once every rank has done its own; raise the first rank's FluxrayError on every rank.

        So no rank waits in a later collective for one that has given up.
        """
        result, fault = None, None
        try:
            result = action()
        except FluxrayError as error:
            fault = error
        for found in self.gather(fault):
            if found is not None:
                raise found
        return result  # type: ignore[return-value]


ALONE = Ranks()
"""A run of one worker."""
