"""One optimizer for each set of parameters that steps by itself."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from fluxray.optim.sharded import ShardedOptimizer
from fluxray.protocols import StateItem, StateReader


class UnitOptimizers:
    """The optimizers of all units; `units` names the unit of each parameter, `make` makes the optimizer of one.

    What is saved of a parameter does not depend on how parameters are grouped.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[str, str],
        make: Callable[[Mapping[str, nn.Parameter]], ShardedOptimizer],
    ):
        members: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            members.setdefault(units[name], {})[name] = parameter
        self.members: Mapping[str, Mapping[str, nn.Parameter]] = members
        self._optimizers = {unit: make(own) for unit, own in members.items()}
        self._of_parameter = {name: self._optimizers[units[name]] for name in parameters}

    def step(self, unit: str, lr: float, withheld: Tensor) -> None:
        """Step a unit by its gradients and free them. Where `withheld` (fp32 scalar on the device) is 1, nothing else changes."""
        self._optimizers[unit].step(lr, withheld)

    def state_items(self, name: str) -> Iterator[StateItem]:
        """Yield what is kept of a parameter beside its weights."""
        yield from self._of_parameter[name].state_items(name)

    def load(self, name: str, reader: StateReader) -> bool:
        """Replace weights and state of a parameter, saved in any format; return whether anything was rounded."""
        return self._of_parameter[name].load(name, reader)
