"""Where gradients are summed: one flat buffer, filled parameter by parameter as the backward pass makes them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fluxray.engine.accumulate import add_to_sum, begin_sum
from fluxray.engine.stream_layout import Layout


class GradientSink:
    """A flat buffer of `numel` fp32 elements that the trained parameters of one unit after the other add their gradients to.

    Where there is nothing to add up, it holds the gradients in their own dtype: the same values, half the traffic for bf16.
    A second use of a tied parameter (see `begin_second_use`) is summed apart, and added when the gradient is read: the sum then
    does not depend on the order in which micro-batches and uses come.
    """

    def __init__(self, numel: int, device: torch.device, tied: Mapping[str, torch.Size] | None = None):
        self._flat = torch.zeros(numel, dtype=torch.float32, device=device)
        self._second = {name: torch.zeros(shape, device=device) for name, shape in (tied or {}).items()}
        self._held: tuple[Layout, torch.dtype] | None = None
        self._views: dict[str, Tensor] = {}
        self._touched: set[str] = set()
        self._touched_again: set[str] = set()
        self._in_second_use = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the device."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return what is held for good."""
        return [self._flat, *self._second.values()]

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take each gradient of `parameters` (by their names in the layout) as soon as backward has it, and free it."""
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(name))

    def begin(self, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        """Start anew with the gradients of a unit of this layout, kept in `dtype`."""
        if self._held is None or self._held[0] is not layout or self._held[1] != dtype:
            self._flat.zero_()  # gaps lie elsewhere now, and must be zero
            self._held, self._views = (layout, dtype), layout.gradient_views(self._flat.view(dtype))
        self._touched.clear()
        self._touched_again.clear()
        self._in_second_use = False

    def begin_second_use(self) -> None:
        """What comes now is the second use of tied parameters."""
        self._in_second_use = True

    def read(self) -> Tensor:
        """Return the flat gradient [num_gradients] of the unit, zero where a parameter has none."""
        assert self._held is not None
        layout, dtype = self._held
        for name, view in self._views.items():
            if name in self._touched_again:
                self._add(name, self._second[name])
            elif name not in self._touched:
                view.zero_()
        self._touched_again.clear()
        return self._flat.view(dtype)[: layout.num_gradients]

    def views(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the parts of those of `names` that have a gradient."""
        return {name: self._views[name] for name in names if name in self._touched}

    @property
    def touched(self) -> frozenset[str]:
        """The names that have a gradient."""
        return frozenset(self._touched)

    def _hook(self, name: str):
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            if not (self._in_second_use and name in self._second):
                self._add(name, gradient)
            elif name in self._touched_again:
                add_to_sum(self._second[name], gradient)
            else:
                self._touched_again.add(name)
                begin_sum(self._second[name], gradient)

        return take

    def _add(self, name: str, gradient: Tensor) -> None:
        if name in self._touched:
            add_to_sum(self._views[name], gradient)
        else:
            self._touched.add(name)
            begin_sum(self._views[name], gradient)
