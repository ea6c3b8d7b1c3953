"""Where the parameters of one block lie in its memory: `[weights | states]`, each a table of flat arrays.

A run is the parameters of a block that are kept in the same way, one behind the other, so that one kernel steps them all:

    weights   run 0 | run 1 | ... | frozen run                                                what the forward pass fetches
    states    run 0: correction | exp_avg | exp_avg_sq | absmax of both | ema; run 1: ...     what only the step needs

A parameter begins at a multiple of 256 elements. What lies between two parameters is zero and stays so: its gradient is zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fluxray.optim.average import move, noise_of
from fluxray.optim.states import AVERAGE, QUANT_BLOCK, Section, StateFormat


class Place(NamedTuple):
    """One parameter in its run: `offset` and `numel` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class Run:
    """Parameters of one format. `numel` has the gaps in it; the byte offsets count from the begin of weights or states."""

    format: StateFormat
    places: tuple[Place, ...]
    numel: int
    weight_offset: int
    state_offset: int
    gradient_offset: int

    def weights(self, weights: Tensor) -> Tensor:
        """Return the run's flat weights [numel] as a view of a block's bytes."""
        return _view(weights, self.weight_offset, self.format.weight_section(self.numel))

    def states(self, states: Tensor) -> dict[str, Tensor]:
        """Return the run's flat state arrays by section as views of a block's bytes."""
        offset, found = self.state_offset, dict[str, Tensor]()
        for section in self.format.state_sections(self.numel):
            found[section.name] = _view(states, offset, section)
            offset += section.num_bytes
        return found

    def of_parameter(self, place: Place, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one parameter's part of flat arrays, shaped like it; absmax as [rows, blocks of a row]."""
        found = {}
        for name, array in flat.items():
            if name.endswith("_absmax"):
                part = array[place.offset // QUANT_BLOCK : (place.offset + place.numel) // QUANT_BLOCK]
                found[name] = part.view(place.shape[0], -1)
            else:
                found[name] = array[place.offset : place.offset + place.numel].view(place.shape)
        return found


class Moving(NamedTuple):
    """How averages move in one step: by which `rate`, and the `seed` and the unit's `prefix` that name their random numbers."""

    rate: float
    seed: int
    prefix: str


class Layout:
    """The table of one block, or of one set of parameters outside the blocks. All sizes follow from names, shapes and formats."""

    def __init__(self, parameters: Mapping[str, tuple[Sequence[int], StateFormat]]):
        self.runs = tuple(_runs(parameters))
        trained = [run for run in self.runs if run.format.trained]
        self.weight_bytes = sum(run.format.weight_section(run.numel).num_bytes for run in self.runs)
        self.trained_weight_bytes = sum(run.format.weight_section(run.numel).num_bytes for run in trained)
        self.state_bytes = sum(section.num_bytes for run in trained for section in run.format.state_sections(run.numel))
        self.num_gradients = sum(run.numel for run in trained)
        frozen = [run for run in self.runs if not run.format.trained]
        self.num_frozen = sum(run.numel for run in frozen if run.format.weight.is_floating_point)
        self.num_codes = sum(run.numel for run in frozen if not run.format.weight.is_floating_point)

    def weight_views(self, weights: Tensor) -> dict[str, Tensor]:
        """Return every parameter's weight by name as a view of the block's weight bytes (uint8)."""
        return {
            place.name: run.of_parameter(place, {"weights": run.weights(weights)})["weights"]
            for run in self.runs
            for place in run.places
        }

    def gradient_views(self, gradients: Tensor) -> dict[str, Tensor]:
        """Return every trained parameter's part of a flat gradient [num_gradients]."""
        return {
            place.name: gradients[begin : begin + place.numel].view(place.shape)
            for run in self.runs
            if run.format.trained
            for place in run.places
            for begin in (run.gradient_offset + place.offset,)
        }

    def move_averages(self, weights: Tensor, states: Tensor, moving: "Moving") -> None:
        """Move the average of each trained parameter towards its master; `weights` and `states` are the block's bytes."""
        for run in self.runs:
            if run.format.average is None:
                continue
            flat = {"weights": run.weights(weights), **run.states(states)}
            for place in run.places:
                end = place.offset + place.numel
                average, weight = (flat[name][place.offset : end] for name in (AVERAGE, "weights"))
                correction = flat["correction"][place.offset : end] if "correction" in flat else None
                move(average, weight, correction, moving.rate, noise_of(moving.seed, moving.prefix + place.name))

    def copy_averages(self, weights: Tensor, states: Tensor, target: Tensor) -> None:
        """Fill `target`, bytes like `weights`, with averages, rounded to nearest, and with the weights that have none."""
        target.copy_(weights)
        for run in self.runs:
            if run.format.average is not None:
                run.weights(target).copy_(run.states(states)[AVERAGE])

    def sections(self, weights: Tensor, states: Tensor) -> Iterator[tuple[str, StateFormat, dict[str, Tensor]]]:
        """Yield each parameter's name and format and all of its state by section, as views of the block's bytes."""
        for run in self.runs:
            flat = {"weights": run.weights(weights), **run.states(states)}
            for place in run.places:
                yield place.name, run.format, run.of_parameter(place, flat)


def _runs(parameters: Mapping[str, tuple[Sequence[int], StateFormat]]) -> Iterator[Run]:
    formats = sorted({fmt for _, fmt in parameters.values()}, key=lambda fmt: (not fmt.trained, str(fmt)))
    weight_offset = state_offset = gradient_offset = 0
    for fmt in formats:
        places, numel = [], 0
        for name, (shape, own) in parameters.items():
            if own == fmt:
                places.append(Place(name, tuple(shape), numel, prod(shape)))
                numel += -(-prod(shape) // QUANT_BLOCK) * QUANT_BLOCK
        yield Run(fmt, tuple(places), numel, weight_offset, state_offset, gradient_offset)
        weight_offset += fmt.weight_section(numel).num_bytes
        state_offset += sum(section.num_bytes for section in fmt.state_sections(numel))
        gradient_offset += numel if fmt.trained else 0


def _view(memory: Tensor, offset: int, section: Section) -> Tensor:
    return memory[offset : offset + section.num_bytes].view(section.dtype)


def empty_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed memory on `device` (uint8)."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
