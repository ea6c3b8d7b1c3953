"""The fp32 parameters that the optimizer steps, and the copies that the model computes with."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from fluxray.engine.accumulate import add_to_sum, begin_sum


class Masters:
    """Named fp32 parameters. Where the model computes in another dtype on one GPU, each has a compute copy that follows it.

    What is frozen has the dtype that the model computes with, and no copy. Under FSDP the model's own sharded parameters are the
    masters: FSDP casts when it gathers.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], copies: Mapping[str, nn.Parameter]):
        self.named = dict(named)
        self._copies = dict(copies)

    @classmethod
    def of(cls, model: nn.Module) -> "Masters":
        """Take the model's parameters themselves, tied ones once."""
        return cls(dict(model.named_parameters()), {})

    @classmethod
    def with_compute_copies(cls, model: nn.Module, dtype: torch.dtype) -> "Masters":
        """Keep the model's fp32 values as masters and turn its parameters into copies of `dtype`.

        Each copy's gradient is added to its master's in fp32 as soon as backward has it, and freed.
        """
        named = dict(model.named_parameters())
        copies = {name: copy for name, copy in named.items() if copy.requires_grad}
        for name, copy in copies.items():
            named[name] = nn.Parameter(copy.detach())
            copy.data = copy.detach().to(dtype)
            copy.register_post_accumulate_grad_hook(_move_gradient_to(named[name]))
        return cls(named, copies)

    def on_gradient(self, name: str, hook: Callable[[], None]) -> None:
        """Call `hook` each time backward has completed the gradient of a master, which may be freed then."""
        holder = self._copies.get(name, self.named[name])
        holder.register_post_accumulate_grad_hook(lambda _: hook())

    @torch.no_grad()
    def publish(self, names: Iterable[str] | None = None) -> None:
        """Round the stepped masters into the compute copies: those of `names`, or all."""
        if self._copies:
            chosen = [name for name in (self.named if names is None else names) if name in self._copies]
            copies: list[torch.Tensor] = [self._copies[name] for name in chosen]
            torch._foreach_copy_(copies, [self.named[name] for name in chosen])  # pyright: ignore[reportPrivateImportUsage]


def _move_gradient_to(master: nn.Parameter):
    def hook(copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = torch.empty_like(master)
            begin_sum(master.grad, copy.grad)
        else:
            add_to_sum(master.grad, copy.grad)
        copy.grad = None

    return hook
