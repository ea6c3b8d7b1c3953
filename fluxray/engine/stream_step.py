"""The optimizer step on flat memory: which control each unit gets, and the launches."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fluxray.config.schema import OptimConfig
from fluxray.engine.stream_layout import Layout, Moving, Run
from fluxray.optim.adam8bit import AdamConfig, FlatState, adam_step, bias_corrections
from fluxray.optim.states import QUANT_BLOCK


class Given(NamedTuple):
    """What one unit's step is given: learning rate, the seed of its rounding, and each parameter's control by its name.

    A parameter whose control is None has no gradient and is left alone. `moving`: averages move behind the step.
    """

    lr: float
    noise: int
    control: Callable[[str], Tensor | None]
    moving: Moving | None = None


class Stepper:
    """Steps the runs of any unit. `steps` counts each clip unit's steps (fp32 scalars on the device)."""

    def __init__(self, optim: OptimConfig, units: Iterable[str], device: torch.device):
        self._decayed = AdamConfig(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
        self._plain = AdamConfig(optim.beta1, optim.beta2, optim.eps, 0.0)
        self.steps = {unit: torch.zeros((), dtype=torch.float32, device=device) for unit in dict.fromkeys(units)}

    def control(self, unit: str, scale: Tensor, ok: Tensor) -> Tensor:
        """Return what `adam_step` reads, and count a step of `unit`; where `ok` (fp32, 1 or 0) is 0 neither happens."""
        step = self.steps[unit].add_(ok)
        return torch.stack([scale, ok, *bias_corrections(step, self._plain)])

    def step_unit(self, layout: Layout, memory: tuple[Tensor, Tensor], gradient: Tensor, given: Given) -> None:
        """Step all trained parameters of a unit in place.

        `memory` holds its weights and states (uint8), `gradient` is flat [num_gradients]. A run whose parameters all have the
        same control is one launch.
        """
        for run in layout.runs:
            if not run.format.trained:
                continue
            state = _flat_state(run, memory)
            config = self._decayed if run.format.decays else self._plain
            for begin, stop, control in _launches(run, given):
                offset = run.gradient_offset + begin
                part = gradient[offset : offset + stop - begin]
                adam_step(state.slice(begin, stop), part, config, given.lr, control, given.noise, offset)
        if given.moving is not None:
            layout.move_averages(*memory, given.moving)


def _launches(run: Run, given: Given) -> Iterator[tuple[int, int, Tensor]]:
    controls = [given.control(place.name) for place in run.places]
    first = controls[0]
    if first is not None and all(control is first for control in controls):
        yield 0, run.numel, first
        return
    for place, control in zip(run.places, controls, strict=True):
        if control is not None:
            yield place.offset, place.offset + -(-place.numel // QUANT_BLOCK) * QUANT_BLOCK, control


def _flat_state(run: Run, memory: tuple[Tensor, Tensor]) -> FlatState:
    arrays = run.states(memory[1])
    return FlatState(
        run.weights(memory[0]),
        arrays.get("correction"),
        arrays["exp_avg"],
        arrays["exp_avg_sq"],
        arrays.get("exp_avg_absmax"),
        arrays.get("exp_avg_sq_absmax"),
    )
