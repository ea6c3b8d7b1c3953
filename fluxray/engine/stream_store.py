"""Weights and optimizer states of a streamed model: blocks in host memory, everything outside them on the device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fluxray.config.schema import OptimConfig
from fluxray.engine.stream_buffers import HostBuffers, Ring
from fluxray.engine.stream_layout import Layout, empty_bytes
from fluxray.engine.stream_transfers import Transfers
from fluxray.optim.formats import split
from fluxray.optim.restore import restore
from fluxray.optim.states import AVERAGE, StateFormat, state_format
from fluxray.protocols import BlockStack, StateItem, StateReader

PIECE = 2**24
"""Elements that get their first values at once: what rounding them takes besides stays small."""


@dataclass(frozen=True)
class StreamSettings:
    """What the plan has decided.

    `weight_slots` and `state_slots` are the slots on the device that blocks pass through, `resident_blocks` the number of blocks
    that stay there and have no host copy, `epilogue_tokens` the number of tokens whose logits exist at once.
    `offload_inputs`: what goes into blocks waits on the host for their backward.
    """

    weight_slots: int = 3
    state_slots: int = 3
    resident_blocks: int = 0
    epilogue_tokens: int = 2048
    offload_inputs: bool = False


def resident_indices(num_blocks: int, num_resident: int) -> list[int]:
    """Return which blocks stay on the device: spread evenly, so that they give the link time everywhere."""
    return [(2 * i + 1) * num_blocks // (2 * num_resident) for i in range(num_resident)]


class _Place(NamedTuple):
    """A weight, or a view of one, in a block's weights; `offset` in elements from their begin."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Unit:
    """Parameters that are kept together: those of one block, or all outside the blocks.

    `prefix` and a name in the layout make the name in the library's model. `memory` is where the weights and states (uint8) live
    between steps. `saves_frozen`: checkpoints hold what is frozen, too.
    """

    def __init__(
        self,
        prefix: str,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig,
        weight: torch.dtype,
        average: torch.dtype | None = None,
    ):
        eight_bit, master = optim.has_8_bit_moments, optim.master
        self.prefix = prefix
        self.layout = Layout(
            {
                name: (tuple(p.shape), state_format(p.shape, eight_bit, master, _dtype(p, weight), p.requires_grad, average))
                for name, p in parameters.items()
            }
        )
        self.saves_frozen = True
        self.memory = (torch.empty(0), torch.empty(0))
        self.parameters: dict[str, nn.Parameter] = {}
        self._bound = torch.empty(0)
        self._views: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take first values (fp32, or bytes), rounded to nearest, with zero moments, into `memory`, which is zero."""
        self.parameters = dict(parameters)
        for name, fmt, sections in self.layout.sections(*self.memory):
            if not fmt.weight.is_floating_point:
                sections["weights"].copy_(parameters[name])
                continue
            whole = parameters[name].detach().flatten()
            into = {section: tensor.view(-1) for section, tensor in sections.items()}
            for start in range(0, whole.numel(), PIECE):
                piece = slice(start, start + PIECE)
                weight, correction = split(whole[piece], fmt, None)
                into["weights"][piece].copy_(weight)
                if correction is not None:
                    into["correction"][piece].copy_(correction)
                if AVERAGE in sections:
                    into[AVERAGE][piece].copy_(whole[piece])

    def bind(self, weights: Tensor) -> None:
        """Let the model's parameters be views of `weights` (uint8, on the device)."""
        key = weights.data_ptr()
        if key not in self._views:
            self._views[key] = self.layout.weight_views(weights)
        self._bound = weights
        for name, view in self._views[key].items():
            self.parameters[name].data = view

    def forget(self, weights: Tensor) -> None:
        """Keep nothing of `weights`, which nothing is bound to."""
        self._views.pop(weights.data_ptr(), None)

    def saving_places(self) -> saved_tensors_hooks:
        """Return a context in which autograd saves the places of weights and of their views, not the tensors.

        Where backward asks for them, they may lie in another slot than they did: what it gets is where `bind` says they are then.
        """
        return saved_tensors_hooks(self._place_of, self._tensor_at)

    def _place_of(self, tensor: Tensor) -> "Tensor | _Place":
        bound = self._bound
        if tensor.untyped_storage().data_ptr() != bound.untyped_storage().data_ptr():
            return tensor
        offset = tensor.data_ptr() - bound.data_ptr()
        return _Place(offset // tensor.itemsize, tensor.size(), tensor.stride(), tensor.dtype)

    def _tensor_at(self, saved: "Tensor | _Place") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return torch.as_strided(self._bound.view(saved.dtype), saved.size, saved.stride, saved.offset)

    def state_items(self) -> Iterator[StateItem]:
        """Yield all that is kept of each parameter, as views of `memory`."""
        for name, _, sections in self._saved():
            for section, tensor in sections.items():
                yield StateItem(section, self.prefix + name, tuple(tensor.shape), None, tensor)

    @torch.no_grad()
    def load(self, reader: StateReader) -> list[str]:
        """Replace all that is kept by what has been saved, in whatever format; return the names that were rounded."""
        return [self.prefix + name for name, fmt, sections in self._saved() if restore(reader, self.prefix + name, fmt, sections)]

    def _saved(self) -> Iterator[tuple[str, StateFormat, dict[str, Tensor]]]:
        return (of for of in self.layout.sections(*self.memory) if of[1].trained or self.saves_frozen)


class BlockStore:
    """The blocks: their units, and the rings through which weights, states and held-back gradients reach the device.

    `gradient` is the dtype in which gradients are held back on the host (clip mode `exact`), None if they are not.
    """

    def __init__(
        self,
        units: list[Unit],
        settings: StreamSettings,
        gradient: torch.dtype | None,
        transfers: Transfers,
        device: torch.device,
    ):
        self.units = units
        self.gradient_dtype = gradient
        stay = set(resident_indices(len(units), settings.resident_blocks) if settings.resident_blocks else ())
        sizes = [self._sizes(unit) for unit in units]
        self._host = HostBuffers([0 if i in stay else sum(size) for i, size in enumerate(sizes)], device.type == "cuda")
        memory = [empty_bytes(sum(sizes[i]), device) if i in stay else held for i, held in enumerate(self._host.buffers)]
        parts = [torch.split(held, size) for held, size in zip(memory, sizes, strict=True)]
        for unit, (weights, states, _) in zip(units, parts, strict=True):
            unit.memory = (weights, states)

        def ring(part: int, num_slots: int) -> Ring:
            return Ring.of([p[part] for p in parts], {i: parts[i][part] for i in stay}, num_slots, transfers, device)

        self.weights = ring(0, settings.weight_slots)
        self.states = ring(1, settings.state_slots)
        self.gradients = ring(2, 2) if gradient is not None else None
        self.host_bytes = sum(buffer.numel() for buffer in self._host.buffers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(slot.memory.nbytes for ring in self._rings for slot in ring.slots)

    @property
    def resident_bytes(self) -> tuple[int, int, int]:
        """Bytes of weights, states and held-back gradients of the blocks that stay on the device."""
        rings = (self.weights, self.states, self.gradients)
        weights, states, gradients = (sum(t.nbytes for t in ring.resident.values()) if ring else 0 for ring in rings)
        return weights, states, gradients

    def tensors(self) -> Iterator[Tensor]:
        """Yield all that is held for good, on host and device."""
        for ring in self._rings:
            yield from (*ring.host, *ring.resident.values(), *(slot.memory for slot in ring.slots))

    @property
    def _rings(self) -> list[Ring]:
        return [ring for ring in (self.weights, self.states, self.gradients) if ring is not None]

    def release(self) -> None:
        """Give all slots back: whoever visited blocks has given up."""
        for ring in self._rings:
            ring.release()

    def forget(self) -> None:
        """Hold nothing on the device: what is in `memory` has been replaced."""
        for ring in self._rings:
            ring.forget()

    def _sizes(self, unit: Unit) -> list[int]:
        held_back = 0 if self.gradient_dtype is None else unit.layout.num_gradients * self.gradient_dtype.itemsize
        return [unit.layout.weight_bytes, unit.layout.state_bytes, held_back]


def _dtype(parameter: nn.Parameter, weight: torch.dtype) -> torch.dtype:
    return weight if parameter.is_floating_point() else parameter.dtype


def split_parameters(stack: BlockStack) -> tuple[list[dict[str, nn.Parameter]], dict[str, nn.Parameter]]:
    """Return the parameters of each block by their names in it, and those outside by their names in the model, tied ones once."""
    prefixes = tuple(f"{block.name}." for block in stack.blocks)
    outside = {name: p for name, p in stack.model.named_parameters() if not name.startswith(prefixes)}
    return [dict(block.module.named_parameters()) for block in stack.blocks], outside


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that have more than one place in the model."""
    first: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.add(first[id(parameter)])
        first.setdefault(id(parameter), name)
    return tied
