"""Training a model that does not fit the GPU: blocks are streamed through it from host memory, every parameter is trained.

One step, K micro-batches, L blocks. What is copied beside a line goes on while the line computes:

    prologue of each micro-batch
    for block 0 .. L-2:   K forwards, each on a graph of its own                 next blocks' weights in
    for block L-1 .. 0:   K backwards (of the last block each right behind       next block's weights and states in,
                          its forward and the epilogue's); the block steps       weights and states of the one before out
    prologue of each micro-batch again, with its backward; what is outside the blocks steps

A graph keeps the block's input, since `prepare_stream` makes the block compute the rest again, and of the weights only where they
lie: they have gone from the device in between. Host traffic does not depend on K: 2 bytes a parameter in for the forward, weights
and states in and out for the backward. A block whose weights still lie on the device, as the last ones do at the turn, is not
fetched again. All losses are known before anything steps. In clip mode `exact` a block's gradient waits on the host until the
norm of all is known, and is applied when the block next comes by: in the following forward, or in `flush`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from fluxray.config.sampling import EmaConfig
from fluxray.config.schema import OptimConfig
from fluxray.engine.clip import Clip
from fluxray.engine.fused import FusingReader, split_items
from fluxray.engine.offload import Offload, Parcel
from fluxray.engine.parallelize import cast_buffers
from fluxray.engine.precision import Precision
from fluxray.engine.scaler import LossScaler
from fluxray.engine.state import base_items, check_base, check_same_model
from fluxray.engine.stream_blocks import Blocks, Update
from fluxray.engine.stream_compute import Computation, Graph, Tensors, gradient_of, with_leaves
from fluxray.engine.stream_gradients import GradientSink
from fluxray.engine.stream_layout import Moving, empty_bytes
from fluxray.engine.stream_pass import Pass
from fluxray.engine.stream_step import Given, Stepper
from fluxray.engine.stream_store import BlockStore, StreamSettings, Unit, split_parameters, tied_names
from fluxray.engine.stream_timeline import StreamBytes
from fluxray.engine.stream_transfers import Transfers, transfers_of
from fluxray.optim.average import DTYPES, rate_at
from fluxray.protocols import Batch, BlockStack, LossFn, LossOutput, State, StateItem, StateReader, StepOutput
from fluxray.seeding import derive_seed

Observer = Callable[[str, int, int], None]
"""Is told of a phase of a step that has been queued, with its block and micro-batch, -1 where there is none."""


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
        average: EmaConfig | None = None,
    ):
        self._stack = stack
        assert precision != "amp-fp16" or clip.mode == "exact", "refused by check_consistent"
        self._clip = clip
        self._scaler = LossScaler(precision == "amp-fp16", device)
        self._device = device
        self._model = Computation(stack, loss_fn, device, precision, settings.epilogue_tokens)
        self._transfers = transfers or transfers_of(device)
        self._offload = Offload(self._transfers, device) if settings.offload_inputs else None
        self._weight_dtype = weight = torch.bfloat16 if precision == "mixed-bf16" else torch.float32
        self._average = average or EmaConfig()
        kept = DTYPES[self._average.dtype] if self._average.decay else None
        inside, outside = split_parameters(stack)
        self._units = [Unit(f"{block.name}.", own, optim, weight, kept) for block, own in zip(stack.blocks, inside, strict=True)]
        self._outside = Unit("", outside, optim, weight, kept)
        for unit in (*self._units, self._outside):
            unit.saves_frozen = not stack.adapts
        self._averages: Tensor | None = None
        self._store = BlockStore(self._units, settings, weight if clip.mode == "exact" else None, self._transfers, device)
        self._stepper = Stepper(optim, [*(unit.prefix for unit in self._units), *outside], device)
        self._blocks = Blocks(self._store, self._stepper, settings)
        tied = {name: outside[name].shape for name in sorted(tied_names(stack.model))}
        self._gradients = GradientSink(max(unit.layout.num_gradients for unit in self._units), device)
        self._outside_gradients = GradientSink(self._outside.layout.num_gradients, device, tied)
        self._observe: Observer = _unobserved
        self._materialise(precision)

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> StepOutput:
        """Forward, backward, clip and step over the micro-batches of one global batch."""
        self._stack.train()
        self._observe("begin", -1, -1)
        step = self._begin(micro_batches, lr)
        self._observe("prologue", -1, -1)
        graphs = self._forward_blocks(step)
        self._backward_blocks(step, graphs)
        self._backward_prologues(step)
        norm = self._step_outside(step)
        self._observe("end", -1, -1)
        self._observe = _unobserved
        num_valid = torch.full((), float(sum(batch.num_valid for batch in micro_batches)), device=self._device)
        loss_scale = self._scaler.finish(step.loss_sum, norm)
        return StepOutput(step.loss_sum / step.divisor, norm, num_valid, 1 - torch.stack(step.ok).mean(), loss_scale)

    @torch.no_grad()
    def eval_steps(self, batches: Sequence[Batch]) -> list[LossOutput]:
        """Return the summed loss and valid count of each batch, without dropout or gradients; each block is fetched once."""
        losses = [(self._model.loss(state, batch), batch.num_valid) for state, batch in self._infer(batches)]
        return [LossOutput(loss, torch.full((), float(num_valid), device=self._device)) for loss, num_valid in losses]

    def forward(self, batch: Batch) -> Tensor:
        """Return the model's output for `batch`, without dropout or gradients."""
        return self.forwards([batch])[0]

    @torch.no_grad()
    def forwards(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the model's output for each batch, without dropout or gradients; each block is fetched once."""
        return [self._model.output(state, batch) for state, batch in self._infer(batches)]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let evaluation and forward compute with the moving averages; takes memory for the largest block and what is outside."""
        assert self._average.decay > 0, "refused by check_sampling"
        self.flush()
        sizes = (self._outside.layout.weight_bytes, max(unit.layout.weight_bytes for unit in self._units))
        outside, weights = (empty_bytes(size, self._device) for size in sizes)
        self._outside.layout.copy_averages(*self._outside.memory, outside)
        self._outside.bind(outside)
        self._averages = weights
        try:
            yield
        finally:
            self._averages = None
            self._outside.bind(self._outside.memory[0])
            for unit in (*self._units, self._outside):
                unit.forget(weights)
                unit.forget(outside)

    @torch.no_grad()
    def flush(self) -> None:
        """Apply what clip mode `exact` has held back, and wait until everything is on the host."""
        if self._blocks.has_pending:
            for _ in self._blocks.visit(self._blocks.all):
                pass
        self._transfers.synchronize()

    def watch(self, observer: Observer) -> None:
        """Tell `observer` of each phase of the next step: begin, prologue, forward, backward, step, prologue again, end."""
        self._observe = observer

    def held_bytes(self) -> StreamBytes:
        """Return how much is allocated for good."""
        outside = self._outside.layout
        weights, states, held_back = self._store.resident_bytes
        gradients = self._gradients.num_bytes + self._outside_gradients.num_bytes + held_back
        slots = self._store.slot_bytes
        return StreamBytes(self._store.host_bytes, outside.weight_bytes, outside.state_bytes, weights, states, gradients, slots)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that are held for good, on host and device."""
        yield from self._store.tensors()
        yield from (*self._outside.memory, *self._gradients.tensors(), *self._outside_gradients.tensors())
        yield from (*self._stack.model.buffers(), *self._stepper.steps.values())

    def read_waits(self) -> tuple[float, float]:
        """Return for how many seconds the device has waited for fetches, and fetches for write-backs, since the last reading."""
        return self._transfers.read_waits()

    def state_items(self) -> Iterator[StateItem]:
        """Yield weights, corrections and moments as they lie in memory, step counts of what is trained, clip average, scale."""
        return split_items(self._items(), self._stack.fused)

    def _items(self) -> Iterator[StateItem]:
        for unit in (*self._units, self._outside):
            for item in unit.state_items():
                yield item
                if item.section == "exp_avg":
                    count = self._stepper.steps[self._clip_unit(unit, item.name)]
                    yield StateItem("step", item.name, (), None, count.clone())  # safetensors refuses one that many share
        yield from self._clip.state_items()
        yield from self._scaler.state_items()
        yield from base_items(self._stack)

    def load_items(self, reader: StateReader) -> list[str]:
        """Replace weights and optimizer state by saved ones; return the names of those that had to be rounded.

        Raises CheckpointError if they belong to another model.
        """
        reader = FusingReader(reader, self._stack.fused)
        units = (*self._units, self._outside)
        weights = [item for unit in units for item in unit.state_items() if item.section == "weights"]
        check_same_model({item.name: item.shape for item in weights}, reader)
        check_base(self._stack.base, reader)
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
        self._scaler.load_items(reader)
        self._blocks.forget()
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
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of values in fp32, which training has no use for

    def _begin(self, micro_batches: Sequence[Batch], lr: float) -> Pass:
        key = micro_batches[0].key
        assert key is not None, "a training batch names its random numbers"
        batches = [batch.to(self._device) for batch in micro_batches]
        states = [self._model.prologue(batch) for batch in batches]
        names = [name for name, tensor in states[0].shared.items() if tensor is not None and tensor.requires_grad]
        self._outside_gradients.begin(self._outside.layout)
        divisor = max(sum(batch.num_valid for batch in batches), 1)
        seed = derive_seed(key.seed, "rounding", key.step)
        embedded = [with_leaves(state, ()) for state in states]
        loss_sum = torch.zeros((), device=self._device)
        rate = rate_at(self._average.decay, key.step) if self._average.decay else 0.0
        gradients: list[dict[str, Tensor]] = [{} for _ in batches]
        return Pass(batches, embedded, names, divisor, lr, seed, loss_sum, rate=rate, shared_gradients=gradients)

    def _forward_blocks(self, step: Pass) -> list[list[Graph]]:
        """Run all blocks but the last; return their graphs: [block][k]."""
        graphs: list[list[Graph]] = []
        for index in self._blocks.visit(self._blocks.all, self._blocks.last):
            sent: list[Parcel] = []
            of_block: list[Graph] = []
            for k in range(len(step.batches)):
                if self._offload is not None:
                    sent.append(self._offload.send(self._input(step, k, graphs).carry))
                of_block.append(self._run(step, index, k, graphs))
            graphs.append(of_block)
            for parcel in sent:
                parcel.leave()
            step.sent.append(sent)
        return graphs

    def _run(self, step: Pass, index: int, k: int, graphs: list[list[Graph]]) -> Graph:
        """Run a block on micro-batch k, behind the last of `graphs`."""
        state = self._input(step, k, graphs)
        with self._units[index].saving_places():
            graph = self._model.differentiable_block(index, state, step.shared_names)
        self._observe("forward", index, k)
        return graph

    @staticmethod
    def _input(step: Pass, k: int, graphs: list[list[Graph]]) -> State:
        return step.embedded[k]._replace(carry=graphs[-1][k].carry) if graphs else step.embedded[k]

    def _backward_blocks(self, step: Pass, graphs: list[list[Graph]]) -> None:
        """Differentiate block after block and step each, or hold its gradient back; empties `graphs`."""
        dtype = self._weight_dtype if len(step.batches) == 1 else torch.float32
        for index in self._blocks.visit(self._blocks.all[::-1], backward=True):
            self._gradients.begin(self._units[index].layout, dtype)
            is_last = index == self._blocks.last
            for parcel in [] if is_last else step.sent.pop():
                parcel.arrive()
            for parcel in step.sent[-1] if step.sent else []:
                parcel.fetch()
            of_block = [] if is_last else graphs.pop()[::-1]
            for k in range(len(step.batches)):
                graph = self._run(step, index, k, graphs) if is_last else of_block.pop()
                if is_last:
                    step.carry_gradients.append(self._backward_epilogue(step, k, graph.carry))
                torch.autograd.backward(graph.carry, step.carry_gradients[k])
                step.carry_gradients[k] = tuple(gradient_of(leaf) for leaf in graph.leaves.carry)
                step.add_shared(k, graph.leaves)
                del graph
                self._observe("backward", index, k)
            self._take_gradient(index, step)
            self._observe("step", index, -1)

    def _backward_epilogue(self, step: Pass, k: int, carry: Tensors) -> Tensors:
        """Take the loss of micro-batch k and return its gradient by the last block's output."""
        state = step.embedded[k]._replace(carry=carry)
        loss, gradients = self._model.backward_loss(
            state,
            step.batches[k],
            lambda total: self._scaler.scaled(total / step.divisor),
            step.shared_names,
            lambda leaves: step.add_shared(k, leaves),
        )
        step.loss_sum += loss
        return gradients

    def _backward_prologues(self, step: Pass) -> None:
        self._outside_gradients.begin_second_use()
        for k, batch in enumerate(step.batches):
            carry, shared, state = step.carry_gradients[k], step.shared_gradients[k], self._model.prologue(batch)
            pairs = [*zip(state.carry, carry, strict=True), *((state.shared[name], shared[name]) for name in shared)]
            wanted = [(tensor, grad.to(tensor.dtype)) for tensor, grad in pairs if tensor is not None and tensor.requires_grad]
            if wanted:
                tensors, gradients = zip(*wanted, strict=True)
                torch.autograd.backward(tensors, gradients)
            self._observe("prologue again", -1, k)

    def _take_gradient(self, index: int, step: Pass) -> None:
        """Use the whole gradient of a block: step it, or hold the gradient back until all norms are known."""
        gradient, touched = self._gradients.read(), self._gradients.touched
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        step.norms.append(norm)
        if self._clip.mode == "exact":
            self._blocks.hold_back(index, gradient, touched)
            return
        ok = (torch.isfinite(norm) & torch.isfinite(step.loss_sum)).float()
        step.ok.append(ok)
        self._blocks.step(index, gradient, Update(step.lr, step.seed, self._clip.of_unit(norm), ok, step.rate), touched)

    def _step_outside(self, step: Pass) -> Tensor:
        """Step what is outside the blocks, decide on what is held back, and return the norm of the whole gradient."""
        gradient, touched = self._outside_gradients.read(), self._outside_gradients.touched
        norms = {name: torch.linalg.vector_norm(view) for name, view in self._outside_gradients.views(touched).items()}
        whole = self._scaler.unscaled(torch.linalg.vector_norm(torch.stack([*step.norms, *norms.values()])))
        finite = torch.isfinite(step.loss_sum)
        if self._clip.mode == "exact":
            factor = self._scaler.unscaled(self._clip.of_all(whole))
            update = Update(step.lr, step.seed, factor, (finite & torch.isfinite(whole)).float(), step.rate)
            self._blocks.apply_later(update)
            updates = dict.fromkeys(norms, update)
            step.ok.append(update.ok)
        else:
            oks = {name: (finite & torch.isfinite(norm)).float() for name, norm in norms.items()}
            updates = {name: Update(step.lr, step.seed, self._clip.of_unit(norms[name]), oks[name]) for name in norms}
            step.ok.extend(oks.values())
        controls = {name: self._stepper.control(name, update.scale, update.ok) for name, update in updates.items()}
        moving = Moving(step.rate, step.seed, "") if step.rate else None
        given = Given(step.lr, derive_seed(step.seed, "outside"), controls.get, moving)
        self._stepper.step_unit(self._outside.layout, self._outside.memory, gradient, given)
        self._clip.finish(whole.where(finite, torch.nan))
        return whole

    @torch.no_grad()
    def _infer(self, batches: Sequence[Batch]) -> list[tuple[State, Batch]]:
        self._stack.eval()
        batches = [batch.to(self._device) for batch in batches]
        states = [self._model.prologue(batch) for batch in batches]
        with closing(self._blocks.visit(self._blocks.all, averages=self._averages)) as visits:
            for index in visits:
                for k, state in enumerate(states):
                    states[k] = self._model.block(index, state)
        return list(zip(states, batches, strict=True))

    def _clip_unit(self, unit: Unit, name: str) -> str:
        return name if unit is self._outside else unit.prefix


def _unobserved(phase: str, block: int, micro_batch: int) -> None:
    """Nobody watches this step."""
