"""The blocks of a streamed model one after the other: fetched ahead, computed with, stepped, written back."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fluxray.engine.stream_layout import Moving
from fluxray.engine.stream_step import Given, Stepper
from fluxray.engine.stream_store import BlockStore, StreamSettings
from fluxray.seeding import derive_seed


class Update(NamedTuple):
    """How a unit steps: learning rate, seed, scale of its gradient, and 1 or 0 (fp32): whether it does at all.

    `rate` is that of moving averages, 0 where none are kept.
    """

    lr: float
    seed: int
    scale: Tensor
    ok: Tensor
    rate: float = 0.0

    def moving(self, prefix: str) -> Moving | None:
        """Return how the averages of a unit move."""
        return Moving(self.rate, self.seed, prefix) if self.rate else None


class Blocks:
    """Visits the blocks of a store in an order, and steps them now or, where gradients are held back, when they next come by."""

    def __init__(self, store: BlockStore, stepper: Stepper, settings: StreamSettings):
        self.store = store
        self._units = store.units
        self._stepper = stepper
        self._settings = settings
        self._held_back: dict[int, frozenset[str]] = {}
        self._pending: dict[int, tuple[Update, frozenset[str]]] = {}
        self.last = len(store.units) - 1

    @property
    def all(self) -> range:
        """All blocks, in order."""
        return range(self.last + 1)

    @property
    def has_pending(self) -> bool:
        """Whether some block has yet to step."""
        return bool(self._pending)

    def visit(
        self, order: Sequence[int], stop: int | None = None, backward: bool = False, averages: Tensor | None = None
    ) -> Generator[int, None, None]:
        """Yield the first `stop` blocks of `order` (None: all), each with its weights bound, while the next ones are fetched.

        Backwards the states come too, unless gradients are held back. What is pending for a block is applied before it is
        yielded. Behind the yield its weights are given back. With `averages`, memory of the largest block's size (uint8), it is
        these that are bound, of blocks of which nothing is pending. Whoever may fail must close the iterator.
        """
        try:
            yield from self._visit(order, stop, backward, averages)
        except BaseException:  # the visitor's, by closing; or a copy's
            self.store.release()
            raise

    def _visit(self, order: Sequence[int], stop: int | None, backward: bool, averages: Tensor | None) -> Iterator[int]:
        ahead = min(1 if backward else 2, self._settings.weight_slots - 1)
        states = backward and self.store.gradients is None
        for position, index in enumerate(order[:stop]):
            self._fetch(order[position : position + 1 + ahead], states or averages is not None)
            weights = self.store.weights.get(index)
            self._units[index].bind(weights)
            changed = self._apply_pending(index) or states
            if averages is not None:
                self._bind_averages(index, weights, averages)
            yield index
            if averages is not None:
                self._units[index].bind(weights)
            self.store.weights.done(index, self._units[index].layout.trained_weight_bytes if changed else 0)

    @torch.no_grad()
    def _bind_averages(self, index: int, weights: Tensor, averages: Tensor) -> None:
        unit, target = self._units[index], averages[: weights.numel()]
        unit.layout.copy_averages(weights, self.store.states.get(index), target)
        self.store.states.done(index)
        unit.bind(target)

    def step(self, index: int, gradient: Tensor, update: Update, touched: frozenset[str]) -> None:
        """Step the block that is being visited by its flat gradient; parameters that are not `touched` are left alone."""
        self._step(index, gradient, update, touched)
        self.store.states.done(index, self._units[index].layout.state_bytes)

    def hold_back(self, index: int, gradient: Tensor, touched: frozenset[str]) -> None:
        """Send the gradient of a block to the host until `apply_later` says what becomes of it."""
        ring, dtype = self.store.gradients, self.store.gradient_dtype
        assert ring is not None and dtype is not None
        held = ring.claim(index)
        held.view(dtype).copy_(gradient)
        ring.done(index, held.numel())
        self._held_back[index] = touched

    def apply_later(self, update: Update) -> None:
        """Let each block whose gradient is held back step when it next comes by."""
        self._pending = {index: (update, touched) for index, touched in self._held_back.items()}
        self._held_back = {}

    def forget(self) -> None:
        """Drop what is pending and what lies on the device: all memory has been replaced."""
        self._pending.clear()
        self.store.forget()

    def _fetch(self, blocks: Sequence[int], states: bool) -> None:
        for distance, index in enumerate(blocks):
            self.store.weights.fetch(index)
            if distance > min(1, self._settings.state_slots - 1):
                continue
            if states or index in self._pending:
                self.store.states.fetch(index)
            if self.store.gradients is not None and index in self._pending:
                self.store.gradients.fetch(index)

    def _apply_pending(self, index: int) -> bool:
        """Step a block by the gradient that was held back for it; returns whether there was one."""
        if index not in self._pending:
            return False
        ring, (update, touched) = self.store.gradients, self._pending.pop(index)
        assert ring is not None and self.store.gradient_dtype is not None
        self._step(index, ring.get(index).view(self.store.gradient_dtype), update, touched)
        ring.done(index)
        self.store.states.done(index, self._units[index].layout.state_bytes)
        return True

    @torch.no_grad()
    def _step(self, index: int, gradient: Tensor, update: Update, touched: frozenset[str]) -> None:
        unit = self._units[index]
        control = self._stepper.control(unit.prefix, update.scale, update.ok)
        noise = derive_seed(update.seed, unit.prefix)
        moving = update.moving(unit.prefix)
        given = Given(update.lr, noise, lambda name: control if name in touched else None, moving)
        memory = (self.store.weights.get(index), self.store.states.get(index))
        self._stepper.step_unit(unit.layout, memory, gradient, given)
