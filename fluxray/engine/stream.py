"""Training a model that does not fit the GPU: blocks are streamed through it from host memory, every parameter is trained.

One step, K micro-batches, L blocks. What is copied beside a line goes on while the line computes:

    prologue of each micro-batch
    for block 0 .. L-2:   keep its K inputs; K forwards                          next blocks' weights in
    for block L-1 .. 0:   K forwards again, each with its backward (the last     next block's weights and states in,
                          block's through the epilogue); the block steps         weights and states of the one before out
    prologue of each micro-batch again, with its backward; what is outside the blocks steps

Host traffic does not depend on K: 2 bytes a parameter in for the forward, weights and states in and out for the backward. A block
whose weights still lie on the device, as the last ones do at the turn, is not fetched again, and may keep its activations instead
of computing them again. All losses are known before anything
steps. In clip mode `exact` a block's gradient waits on the host until the norm of all is known, and is applied when the block
next comes by: in the following forward, or in `flush`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluxray.config.schema import OptimConfig
from fluxray.engine.clip import Clip
from fluxray.engine.parallelize import Precision, cast_buffers
from fluxray.engine.state import check_same_model
from fluxray.engine.stream_gradients import GradientSink
from fluxray.engine.stream_layout import empty_bytes
from fluxray.engine.stream_step import Given, Stepper
from fluxray.engine.stream_store import BlockStore, StreamSettings, Unit, split_parameters, tied_names
from fluxray.engine.stream_transfers import Transfers, transfers_of
from fluxray.protocols import Batch, BlockStack, LossFn, LossOutput, State, StateItem, StateReader, StepOutput
from fluxray.seeding import derive_seed

Tensors = tuple[Tensor, ...]


class Update(NamedTuple):
    """How a unit steps: learning rate, seed, scale of its gradient, and 1 or 0 (fp32): whether it does at all."""

    lr: float
    seed: int
    scale: Tensor
    ok: Tensor


@dataclass
class Pass:
    """One optimizer step under way. `carry_gradients[k]` and `shared_gradients[k]` are those of micro-batch k, so far.

    `shared_names` are the shared tensors that the loss can be differentiated by, `kept[block, k]` leaves and output of forwards
    that need not be done again, `ok` holds 1 or 0 for each clip unit.
    """

    batches: Sequence[Batch]
    embedded: Sequence[State]
    shared_names: Sequence[str]
    divisor: float
    lr: float
    seed: int
    loss_sum: Tensor
    carry_gradients: list[Tensors] = field(default_factory=list)
    shared_gradients: list[dict[str, Tensor]] = field(default_factory=list)
    kept: dict[tuple[int, int], tuple[State, Tensors]] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)
    ok: list[Tensor] = field(default_factory=list)


class StreamEngine:
    """One optimizer step on a stack on the meta device, whose tensors this engine gives memory (see `protocols.Engine`)."""

    def __init__(  # noqa: PLR0913, PLR0917 - one place where all parts meet
        self,
        stack: BlockStack,
        loss_fn: LossFn,
        optim: OptimConfig,
        clip: Clip,
        settings: StreamSettings,
        precision: Precision,
        device: torch.device,
        transfers: Transfers | None = None,
    ):
        self._stack = stack
        self._loss_fn = loss_fn
        self._clip = clip
        self._settings = settings
        self._device = device
        self._amp = precision == "amp-bf16"
        self._transfers = transfers or transfers_of(device)
        self._weight_dtype = weight = torch.bfloat16 if precision == "mixed-bf16" else torch.float32
        inside, outside = split_parameters(stack)
        self._units = [Unit(f"{block.name}.", own, optim, weight) for block, own in zip(stack.blocks, inside, strict=True)]
        self._outside = Unit("", outside, optim, weight)
        self._store = BlockStore(self._units, settings, weight if clip.mode == "exact" else None, self._transfers, device)
        self._stepper = Stepper(optim, [*(unit.prefix for unit in self._units), *outside], device)
        tied = {name: outside[name].shape for name in sorted(tied_names(stack.model))}
        self._gradients = GradientSink(max(unit.layout.num_gradients for unit in self._units), device)
        self._outside_gradients = GradientSink(self._outside.layout.num_gradients, device, tied)
        self._last = len(self._units) - 1
        self._keeping = self._kept_indices(settings)
        self._touched: dict[int, frozenset[str]] = {}
        self._pending: dict[int, tuple[Update, frozenset[str]]] = {}
        self._materialise(precision)

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> StepOutput:
        """Forward, backward, clip and step over the micro-batches of one global batch."""
        self._stack.train()
        step = self._begin(micro_batches, lr)
        inputs = self._forward_blocks(step)
        self._backward_blocks(step, inputs)
        self._backward_prologues(step)
        norm = self._step_outside(step)
        num_valid = torch.full((), float(sum(batch.num_valid for batch in micro_batches)), device=self._device)
        return StepOutput(step.loss_sum / step.divisor, norm, num_valid, 1 - torch.stack(step.ok).mean())

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> LossOutput:
        """Return the summed loss and valid count of a batch, without dropout or gradients."""
        total = torch.zeros((), device=self._device)
        state, batch = self._infer(batch)
        for piece, part in self._stack.epilogue_pieces(state, batch, self._settings.epilogue_tokens):
            total += self._epilogue(piece, part, self._loss_fn).sum
        return LossOutput(total, torch.full((), float(batch.num_valid), device=self._device))

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Return the model's output for `batch`, without dropout or gradients."""
        return self._epilogue(*self._infer(batch), lambda output, _: output)

    @torch.no_grad()
    def flush(self) -> None:
        """Apply what clip mode `exact` has held back, and wait until everything is on the host."""
        if self._pending:
            for _ in self._visit(range(len(self._units))):
                pass
        self._transfers.synchronize()

    def read_waits(self) -> tuple[float, float]:
        """Return for how many seconds the device has waited for fetches, and fetches for write-backs, since the last reading."""
        return self._transfers.read_waits()

    def state_items(self) -> Iterator[StateItem]:
        """Yield all weights, corrections and moments as they lie in memory, step counts of what is trained, clip average."""
        for unit in (*self._units, self._outside):
            for item in unit.state_items():
                yield item
                if item.section == "exp_avg":
                    count = self._stepper.steps[self._clip_unit(unit, item.name)]
                    yield StateItem("step", item.name, (), None, count.clone())  # safetensors refuses one that many share
        yield from self._clip.state_items()

    def load_items(self, reader: StateReader) -> list[str]:
        """Replace weights and optimizer state by saved ones; return the names of those that had to be rounded.

        Raises CheckpointError if they belong to another model.
        """
        units = (*self._units, self._outside)
        weights = [item for unit in units for item in unit.state_items() if item.section == "weights"]
        check_same_model({item.name: item.shape for item in weights}, reader)
        self._transfers.synchronize()
        rounded = [name for unit in units for name in unit.load(reader)]
        for count in self._stepper.steps.values():
            count.zero_()
        for unit in units:
            for whole in (unit.prefix + name for name in unit.parameters):
                if "step" in reader.sections(whole):  # a block has one count, some of its parameters may never have stepped
                    count = self._stepper.steps[self._clip_unit(unit, whole)]
                    count.copy_(torch.maximum(count, reader.read("step", whole, 0, None).to(count)))
        self._clip.load_items(reader)
        self._pending.clear()
        self._store.forget()
        return rounded

    def _materialise(self, precision: Precision) -> None:
        """Give every tensor its first value, block by block, and let the parameters be views of where they live."""
        for index, (unit, block) in enumerate(zip(self._units, self._stack.blocks, strict=True)):
            self._stack.materialise(self._device, block)
            parameters = dict(block.module.named_parameters())
            unit.fill(parameters)
            unit.bind(self._store.weights.get(index))
            self._store.weights.done(index)
            self._gradients.watch(parameters)
        self._stack.materialise(self._device, None)
        _, outside = split_parameters(self._stack)
        layout = self._outside.layout
        self._outside.memory = (empty_bytes(layout.weight_bytes, self._device), empty_bytes(layout.state_bytes, self._device))
        self._outside.fill(outside)
        self._outside.bind(self._outside.memory[0])
        self._outside_gradients.watch(outside)
        if precision == "mixed-bf16":
            cast_buffers(self._stack.model)

    def _begin(self, micro_batches: Sequence[Batch], lr: float) -> Pass:
        key = micro_batches[0].key
        assert key is not None, "a training batch names its random numbers"
        batches = [batch.to(self._device) for batch in micro_batches]
        states = [self._prologue(batch) for batch in batches]
        names = [name for name, tensor in states[0].shared.items() if tensor is not None and tensor.requires_grad]
        self._outside_gradients.begin(self._outside.layout)
        divisor = max(sum(batch.num_valid for batch in batches), 1)
        seed = derive_seed(key.seed, "rounding", key.step)
        embedded = [_with_leaves(state, ()) for state in states]
        return Pass(batches, embedded, names, divisor, lr, seed, torch.zeros((), device=self._device))

    def _kept_indices(self, settings: StreamSettings) -> set[int]:
        """Return the blocks that keep their activations: their weights are still on the device when backward reaches them."""
        found = set[int]()
        for index in range(self._last - 1, -1, -1):
            passing = [i for i in range(index, self._last + 1) if i not in self._store.weights.resident]
            if len(found) == settings.kept_blocks or (
                index not in self._store.weights.resident and len(passing) > settings.weight_slots
            ):
                break
            found.add(index)
        return found

    def _visit(self, order: Sequence[int], stop: int | None = None, backward: bool = False) -> Iterator[int]:
        """Yield the first `stop` blocks of `order` (None: all), each with its weights bound, while the next ones are fetched.

        Backwards the states come too, unless gradients are held back. What is pending for a block is applied before it is
        yielded. Behind the yield its weights are given back.
        """
        ahead = min(1 if backward else 2, self._settings.weight_slots - 1)
        states = backward and self._store.gradients is None
        for position, index in enumerate(order[:stop]):
            self._fetch(order[position : position + 1 + ahead], states)
            self._units[index].bind(self._store.weights.get(index))
            changed = self._apply_pending(index) or states
            yield index
            self._store.weights.done(index, self._units[index].layout.trained_weight_bytes if changed else 0)

    def _fetch(self, blocks: Sequence[int], states: bool) -> None:
        for distance, index in enumerate(blocks):
            self._store.weights.fetch(index)
            if distance > min(1, self._settings.state_slots - 1):
                continue
            if states or index in self._pending:
                self._store.states.fetch(index)
            if self._store.gradients is not None and index in self._pending:
                self._store.gradients.fetch(index)

    def _apply_pending(self, index: int) -> bool:
        """Step a block by the gradient that was held back for it; returns whether there was one."""
        if index not in self._pending:
            return False
        ring, (update, touched), unit = self._store.gradients, self._pending.pop(index), self._units[index]
        assert ring is not None and self._store.gradient_dtype is not None
        gradient = ring.get(index).view(self._store.gradient_dtype)
        self._step_unit(index, gradient, update, touched)
        ring.done(index)
        self._store.states.done(index, unit.layout.state_bytes)
        return True

    def _forward_blocks(self, step: Pass) -> list[list[Tensors]]:
        """Run all blocks but the last, and return what each block got: [block][k]."""
        inputs = [[state.carry for state in step.embedded]]
        for index in self._visit(range(len(self._units)), self._last):
            keeps, outputs = index in self._keeping, list[Tensors]()
            for k, state in enumerate(step.embedded):
                given = state._replace(carry=inputs[-1][k])
                if keeps:
                    step.kept[index, k] = leaves, output = self._differentiable(step, index, given)
                    inputs[-1][k] = leaves.carry
                    outputs.append(tuple(tensor.detach() for tensor in output))
                else:
                    with torch.no_grad():
                        outputs.append(self._block(index, given).carry)
            inputs.append(outputs)
        return inputs

    def _backward_blocks(self, step: Pass, inputs: list[list[Tensors]]) -> None:
        """Differentiate block after block and step each, or hold its gradient back; empties `inputs`."""
        step.shared_gradients.extend({} for _ in step.batches)
        dtype = self._weight_dtype if len(step.batches) == 1 else torch.float32
        for index in self._visit(range(self._last, -1, -1), backward=True):
            self._gradients.begin(self._units[index].layout, dtype)
            carries = inputs.pop()
            for k, state in enumerate(step.embedded):
                given = state._replace(carry=carries[k])
                carries[k] = ()
                leaves, output = step.kept.pop((index, k), None) or self._differentiable(step, index, given)
                if index == self._last:
                    step.carry_gradients.append(self._backward_epilogue(step, k, output))
                torch.autograd.backward(output, step.carry_gradients[k])
                del output, given
                step.carry_gradients[k] = tuple(_gradient(leaf) for leaf in leaves.carry)
                self._add_shared(step, k, leaves)
            self._take_gradient(index, step)

    def _differentiable(self, step: Pass, index: int, state: State) -> tuple[State, Tensors]:
        """Run a block on a new graph; return the leaves of that graph and its output."""
        leaves = _with_leaves(state, step.shared_names)
        with torch.enable_grad():
            return leaves, self._block(index, leaves).carry

    def _backward_epilogue(self, step: Pass, k: int, carry: Tensors) -> Tensors:
        """Take the loss of micro-batch k, piece by piece, and return its gradient by the last block's output."""
        gradients = tuple(torch.zeros_like(tensor) for tensor in carry)
        state, num_tokens = step.embedded[k]._replace(carry=carry), self._settings.epilogue_tokens
        pieces = self._stack.epilogue_pieces(state, step.batches[k], num_tokens)
        targets = self._stack.epilogue_pieces(state._replace(carry=gradients), step.batches[k], num_tokens)
        for (piece, batch), (target, _) in zip(pieces, targets, strict=True):
            leaves = _with_leaves(piece, step.shared_names)
            with torch.enable_grad():
                loss = self._epilogue(leaves, batch, self._loss_fn).sum
            (loss / step.divisor).backward()
            step.loss_sum += loss.detach()
            for part, leaf in zip(target.carry, leaves.carry, strict=True):
                part.copy_(_gradient(leaf))
            self._add_shared(step, k, leaves)
        return gradients

    def _backward_prologues(self, step: Pass) -> None:
        self._outside_gradients.begin_second_use()
        for batch, carry, shared in zip(step.batches, step.carry_gradients, step.shared_gradients, strict=True):
            state = self._prologue(batch)
            pairs = [*zip(state.carry, carry, strict=True), *((state.shared[name], shared[name]) for name in shared)]
            wanted = [
                (tensor, gradient.to(tensor.dtype)) for tensor, gradient in pairs if tensor is not None and tensor.requires_grad
            ]
            if wanted:
                tensors, gradients = zip(*wanted, strict=True)
                torch.autograd.backward(tensors, gradients)

    def _take_gradient(self, index: int, step: Pass) -> None:
        """Use the whole gradient of a block: step it, or hold the gradient back until all norms are known."""
        gradient, touched = self._gradients.read(), self._gradients.touched
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        step.norms.append(norm)
        ring, dtype = self._store.gradients, self._store.gradient_dtype
        if ring is None or dtype is None:
            ok = (torch.isfinite(norm) & torch.isfinite(step.loss_sum)).float()
            step.ok.append(ok)
            self._step_unit(index, gradient, Update(step.lr, step.seed, self._clip.of_unit(norm), ok), touched)
            self._store.states.done(index, self._units[index].layout.state_bytes)
            return
        held = ring.claim(index)
        held.view(dtype).copy_(gradient)
        ring.done(index, held.numel())
        self._touched[index] = touched

    def _step_outside(self, step: Pass) -> Tensor:
        """Step what is outside the blocks, decide on what is held back, and return the norm of the whole gradient."""
        gradient, touched = self._outside_gradients.read(), self._outside_gradients.touched
        norms = {name: torch.linalg.vector_norm(view) for name, view in self._outside_gradients.views(touched).items()}
        whole = torch.linalg.vector_norm(torch.stack([*step.norms, *norms.values()]))
        finite = torch.isfinite(step.loss_sum)
        if self._clip.mode == "exact":
            update = Update(step.lr, step.seed, self._clip.of_all(whole), (finite & torch.isfinite(whole)).float())
            self._pending = {index: (update, names) for index, names in self._touched.items()}
            updates = dict.fromkeys(norms, update)
            step.ok.append(update.ok)
        else:
            oks = {name: (finite & torch.isfinite(norm)).float() for name, norm in norms.items()}
            updates = {name: Update(step.lr, step.seed, self._clip.of_unit(norms[name]), oks[name]) for name in norms}
            step.ok.extend(oks.values())
        controls = {name: self._stepper.control(name, update.scale, update.ok) for name, update in updates.items()}
        given = Given(step.lr, derive_seed(step.seed, "outside"), controls.get)
        self._stepper.step_unit(self._outside.layout, self._outside.memory, gradient, given)
        self._clip.finish(whole.where(finite, torch.nan))
        return whole

    def _step_unit(self, index: int, gradient: Tensor, update: Update, touched: frozenset[str]) -> None:
        unit = self._units[index]
        control = self._stepper.control(unit.prefix, update.scale, update.ok)
        noise = derive_seed(update.seed, unit.prefix)
        given = Given(update.lr, noise, lambda name: control if name in touched else None)
        memory = (self._store.weights.get(index), self._store.states.get(index))
        self._stepper.step_unit(unit.layout, memory, gradient, given)

    @torch.no_grad()
    def _infer(self, batch: Batch) -> tuple[State, Batch]:
        self._stack.eval()
        batch = batch.to(self._device)
        state = self._prologue(batch)
        for index in self._visit(range(len(self._units))):
            state = self._block(index, state)
        return state, batch

    def _prologue(self, batch: Batch) -> State:
        with self._autocast():
            return self._stack.prologue(batch)

    def _block(self, index: int, state: State) -> State:
        with self._autocast():
            return self._stack.blocks[index](state)

    def _epilogue(self, state: State, batch: Batch, loss_fn: Callable[[Tensor, Any], Any]) -> Any:
        with self._autocast():
            return self._stack.epilogue(state, batch, loss_fn)

    def _autocast(self) -> torch.autocast:
        """Return a context for one call: the casts that it remembers are of weights that another block's replace."""
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._amp)

    def _add_shared(self, step: Pass, k: int, leaves: State) -> None:
        for name in step.shared_names:
            leaf = leaves.shared[name]
            if leaf is not None and leaf.grad is not None:
                held = step.shared_gradients[k]
                held[name] = leaf.grad.float() if name not in held else held[name].add_(leaf.grad)

    def _clip_unit(self, unit: Unit, name: str) -> str:
        return name if unit is self._outside else unit.prefix


def _with_leaves(state: State, shared_names: Sequence[str]) -> State:
    """Return the state cut off from what made it; carry and the named shared tensors begin a new graph."""
    carry = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in state.carry)
    shared = {name: None if tensor is None else tensor.detach() for name, tensor in state.shared.items()}
    for name in shared_names:
        tensor = shared[name]
        assert tensor is not None
        tensor.requires_grad_()
    return State(carry, shared, state.dropout_seed)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
