"""What frozen weights save."""

from typing import Any

from torch import Tensor, nn


class FrozenFlops:
    """Counts the FLOPs that backward saves of the forwards run in its context: the gradients of frozen linear layers' weights.

    Each takes as many as the layer's forward.
    """

    def __init__(self, model: nn.Module):
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
        self._hooks: list[Any] = []
        self.count = 0

    def __enter__(self) -> "FrozenFlops":
        self._hooks = [layer.register_forward_hook(self._add) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, layer: nn.Module, _: Any, output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        self.count += 2 * output.numel() * layer.in_features
