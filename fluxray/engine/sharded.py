"""Training with every parameter on the GPUs: FSDP2 over N ranks, plain resident training on one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fluxray.engine.average import Averages
from fluxray.engine.chunked_loss import ChunkedLoss, PieceLoss
from fluxray.engine.clip import Clip, clip_units
from fluxray.engine.cuda_graph import CudaGraphs
from fluxray.engine.fused import FusingReader, split_items
from fluxray.engine.gradients import Gradients
from fluxray.engine.in_backward import InBackward
from fluxray.engine.masters import Masters
from fluxray.engine.parallelize import abandon_forward, fsdp_modules
from fluxray.engine.precision import Precision, autocast
from fluxray.engine.scaler import LossScaler
from fluxray.engine.state import base_items, check_base, check_same_model
from fluxray.engine.stream_transfers import transfers_of
from fluxray.optim.rows import Rows
from fluxray.optim.sharded import ShardedOptimizer
from fluxray.optim.units import UnitOptimizers
from fluxray.protocols import Batch, BlockStack, LossFn, LossOutput, StateItem, StateReader, StepOutput


class ShardedEngine:
    """One optimizer step on a stack that `parallelize` has prepared (see `protocols.Engine`).

    The loss is the sum over the global batch divided by its number of valid terms, so it depends neither on the number of ranks
    nor on the split into micro-batches. It is clipped by the norms of whole units or of the whole gradient, all ranks included.
    A step whose loss or gradient is not finite on any rank changes neither weights nor moments on any. For fp16 the
    loss is scaled. With `chunk_tokens` the logits of so many positions exist at once. `averages` move behind each step.
    UnitOptimizers step inside backward (`engine/in_backward.py`). With `cpu_offload` all behind backward happens on the host.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one place where all parts meet
        self,
        stack: BlockStack,
        loss_fn: LossFn,
        masters: Masters,
        optimizer: ShardedOptimizer | UnitOptimizers,
        clip: Clip,
        runtime: "Runtime",
        chunk_tokens: int | None = None,
        averages: Averages | None = None,
    ):
        self._stack = stack
        self._averages = averages
        self._chunked = None if chunk_tokens is None else ChunkedLoss(stack, loss_fn, chunk_tokens)
        self._loss_fn = loss_fn
        self._masters = masters
        self._saved = {name: p for name, p in masters.named.items() if p.requires_grad or not stack.adapts}
        self._optimizer = optimizer
        self._clip = clip
        self._scaler = LossScaler(runtime.precision == "amp-fp16", runtime.step_device)
        self._gradients = Gradients(masters.named, clip_units(stack), clip, self._scaler, runtime.sum_over_ranks)
        self._in_backward = None
        if isinstance(optimizer, UnitOptimizers):
            self._in_backward = InBackward(masters, optimizer, clip, runtime.sum_over_ranks)
        self._runtime = runtime
        self._sharded = fsdp_modules(stack)
        self._graphs = None
        if runtime.notify_of_graphs is not None:
            self._graphs = CudaGraphs(self._differentiate, masters.named, runtime.device, runtime.notify_of_graphs)

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> StepOutput:
        """Forward, backward, clip and step over this rank's micro-batches of one global batch."""
        self._stack.train()
        num_valid = self._runtime.sum_over_ranks(float(sum(batch.num_valid for batch in micro_batches)))
        divisor = num_valid.clamp(min=1.0)
        loss_sum = torch.zeros((), device=self._runtime.device)
        assert self._in_backward is None or len(micro_batches) == 1, "refused by check_consistent"
        if self._graphs is not None:
            self._graphs.begin()
        for batch in micro_batches:
            if self._graphs is not None:
                loss_sum += self._graphs(batch, divisor)
            else:
                loss_sum += self._differentiate(batch.to(self._runtime.device), divisor, lr)
        loss = self._runtime.sum_over_ranks(loss_sum) / divisor
        told = loss.to(self._runtime.step_device)
        grad_norm, withheld = self._step_after(told, lr) if self._in_backward is None else self._in_backward.finish()
        if self._averages is not None:
            key = micro_batches[0].key
            assert key is not None, "a training batch names its random numbers"
            self._averages.move(key)
        return StepOutput(loss, grad_norm, num_valid, withheld, self._scaler.finish(told, grad_norm))

    def _differentiate(self, batch: Batch, divisor: Tensor, lr: float | None = None) -> Tensor:
        """Run forward and backward of a micro-batch and return its summed loss; `lr` is for those who step in backward."""
        loss, scaled = self._loss(batch, divisor)
        if self._in_backward is not None:
            assert lr is not None
            self._in_backward.begin(lr, self._runtime.sum_over_ranks(loss.detach()))
        scaled.backward()
        return loss.detach()

    def _step_after(self, loss: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Clip and step after backward; return the norm of the gradient, and 1 if the step was withheld."""
        assert not isinstance(self._optimizer, UnitOptimizers)
        grad_norm = self._gradients.clip()
        sound = torch.isfinite(loss) & torch.isfinite(grad_norm)
        withheld = 1 - sound.float()
        self._clip.finish(grad_norm.where(sound, torch.nan))
        self._optimizer.step(lr, withheld)
        self._masters.publish()
        return grad_norm, withheld

    def eval_steps(self, batches: Sequence[Batch]) -> list[LossOutput]:
        """Return for each batch the summed loss and valid count of all ranks', without dropout or gradients. Collective."""
        return [self._eval_step(batch) for batch in batches]

    def forward(self, batch: Batch) -> Tensor:
        """Return the model's output for `batch`, without dropout or gradients. Collective."""
        return self._infer(batch, lambda output, _: output)

    def forwards(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the model's output for each batch, without dropout or gradients. Collective."""
        return [self.forward(batch) for batch in batches]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which evaluation and forward compute with the moving averages. Collective."""
        assert self._averages is not None, "refused by check_sampling"
        self._runtime.before_masters_change()
        with self._averages.in_place():
            yield
            self._runtime.before_masters_change()

    def flush(self) -> None:
        """Nothing is ever pending here."""

    def read_waits(self) -> tuple[float, float]:
        """Return for how many seconds the device has waited for what comes and goes, and fetches for write-backs, since the last
        reading. The device must have finished.
        """
        return self._runtime.transfers.read_waits()

    def state_items(self) -> Iterator[StateItem]:
        """Yield this rank's rows of weights and moments, each parameter's step count, and what clipping and scaling remember."""
        return split_items(self._items(), self._stack.fused)

    def _items(self) -> Iterator[StateItem]:
        for name, parameter in self._saved.items():
            rows = Rows.of(parameter)
            yield rows.item("weights", name, rows.local)
            yield from self._optimizer.state_items(name)
            if self._averages is not None:
                yield from self._averages.state_items(name)
        yield from self._clip.state_items()
        yield from self._scaler.state_items()
        yield from base_items(self._stack)

    def load_items(self, reader: StateReader) -> Sequence[str]:
        """Replace weights and optimizer state by saved ones; raises CheckpointError if they belong to another model."""
        reader = FusingReader(reader, self._stack.fused)
        check_same_model({name: parameter.shape for name, parameter in self._saved.items()}, reader)
        check_base(self._stack.base, reader)
        self._runtime.before_masters_change()
        narrowed = [name for name in self._saved if self._optimizer.load(name, reader)]
        if self._averages is not None:
            narrowed += self._averages.load(reader)
        self._clip.load_items(reader)
        self._scaler.load_items(reader)
        self._masters.publish()
        return narrowed

    def _loss(self, batch: Batch, divisor: Tensor) -> PieceLoss:
        """Return the summed loss of a micro-batch, and what backward begins with."""

        def scale(loss: Tensor) -> Tensor:
            return self._scaler.scaled(loss / divisor)

        with self._runtime.autocast():
            if self._chunked is not None:
                return self._stack(batch, None, partial(self._chunked.differentiable, scale=scale))
            loss = self._stack(batch, self._loss_fn).sum
        return PieceLoss(loss, scale(loss))

    def _eval_step(self, batch: Batch) -> LossOutput:
        chunked = self._chunked
        loss = self._infer(batch, self._loss_fn).sum if chunked is None else self._infer(batch, None, chunked.total)
        num_valid = self._runtime.sum_over_ranks(float(batch.num_valid))
        return LossOutput(self._runtime.sum_over_ranks(loss), num_valid)

    @torch.no_grad()
    def _infer(self, batch: Batch, *finish: Any) -> Any:
        self._stack.eval()
        try:
            with self._runtime.autocast():
                output = self._stack(batch.to(self._runtime.device), *finish)
        except BaseException:
            abandon_forward(self._stack)
            raise
        for module in self._sharded:
            module.reshard()  # no backward follows that would; the next step must gather anew
        return output


class Runtime:
    """Where an engine runs: device and the lanes to it, cast policy, the group of ranks (`mesh`; None for one rank).

    With `notify_of_graphs` micro-batches run as CUDA graphs; it is told if there are more shapes than graphs. `cpu_offload`: the
    masters are on the host (`engine/parallelize.py`), and what is computed of their gradients, too.
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        mesh: DeviceMesh | None,
        notify_of_graphs: Callable[[str], None] | None = None,
        cpu_offload: bool = False,
    ):
        self.device = device
        self.step_device = torch.device("cpu") if cpu_offload else device
        self.notify_of_graphs = notify_of_graphs
        self.precision: Precision = precision
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.num_ranks = 1 if mesh is None else mesh.size()
        self.transfers = transfers_of(device)
        self._group = None if mesh is None else mesh.get_group()

    def autocast(self) -> torch.autocast:
        """Return the context in which the model's forward runs."""
        return autocast(self.precision, self.device)

    def sum_over_ranks(self, value: float | Tensor) -> Tensor:
        """Return the sum over the ranks in fp32, in the shape of `value` and where it is: a number, on the device.

        The host waits for the sum of what is on the host, and for no other.
        """
        if isinstance(value, Tensor):
            total = value.to(self.device, torch.float32, copy=True)
        else:
            total = torch.full((), value, dtype=torch.float32, device=self.device)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total.to(value.device) if isinstance(value, Tensor) else total

    def before_masters_change(self) -> None:
        """Wait until no copy reads masters that are on the host, where nothing orders a change behind it.

        Backward does that by itself: it ends when all gradients have come.
        """
        if self.step_device != self.device:
            torch.cuda.synchronize(self.device)
