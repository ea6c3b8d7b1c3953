"""Training with every parameter on the GPUs: FSDP2 over N ranks, plain resident training on one."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fluxray.engine.clip import Clip, clip_units
from fluxray.engine.gradients import Gradients
from fluxray.engine.masters import Masters
from fluxray.engine.parallelize import Precision, fsdp_modules
from fluxray.engine.state import check_same_model
from fluxray.protocols import Batch, BlockStack, LossFn, LossOutput, StateItem, StateReader, StepOutput

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedEngine:
    """One optimizer step on a stack that `parallelize` has prepared (see `protocols.Engine`).

    The loss is the sum over the global batch divided by its number of valid terms, so it depends neither on the number of ranks
    nor on the split into micro-batches. It is clipped by the norms of whole units or of the whole gradient, all ranks included.
    A step whose loss or gradient is not finite on any rank changes neither weights nor moments on any.
    """

    def __init__(
        self,
        stack: BlockStack,
        loss_fn: LossFn,
        masters: Masters,
        optimizer: torch.optim.Optimizer,
        clip: Clip,
        runtime: "Runtime",
    ):
        self._stack = stack
        self._loss_fn = loss_fn
        self._masters = masters
        self._optimizer = optimizer
        self._clip = clip
        self._gradients = Gradients(masters.named, clip_units(stack), clip, runtime.sum_over_ranks)
        self._runtime = runtime
        self._sharded = fsdp_modules(stack)

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> StepOutput:
        """Forward, backward, clip and step over this rank's micro-batches of one global batch."""
        self._stack.train()
        num_valid = self._runtime.sum_over_ranks(float(sum(batch.num_valid for batch in micro_batches)))
        divisor = num_valid.clamp(min=1.0)
        loss_sum = torch.zeros((), device=self._runtime.device)
        for batch in micro_batches:
            with self._runtime.autocast():
                output = self._stack(batch.to(self._runtime.device), self._loss_fn)
            (output.sum / divisor).backward()
            loss_sum += output.sum.detach()
        loss = self._runtime.sum_over_ranks(loss_sum) / divisor
        grad_norm = self._gradients.clip()
        sound = torch.isfinite(loss) & torch.isfinite(grad_norm)
        withheld = 1 - sound.float()
        self._clip.finish(grad_norm.where(sound, torch.nan))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.found_inf = withheld  # pyright: ignore[reportAttributeAccessIssue]  (as torch.amp.GradScaler sets it)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.publish()
        return StepOutput(loss, grad_norm, num_valid, withheld)

    def eval_step(self, batch: Batch) -> LossOutput:
        """Return the summed loss and valid count of all ranks' batches, without dropout or gradients. Collective."""
        output = self._infer(batch, self._loss_fn)
        num_valid = self._runtime.sum_over_ranks(float(output.num_valid))
        return LossOutput(self._runtime.sum_over_ranks(output.sum), num_valid)

    def forward(self, batch: Batch) -> Tensor:
        """Return the model's output for `batch`, without dropout or gradients. Collective."""
        return self._infer(batch, lambda output, _: output)

    def flush(self) -> None:
        """Nothing is ever pending here."""

    def state_items(self) -> Iterator[StateItem]:
        """Yield this rank's rows of weights and moments, each parameter's step count, and what clipping remembers."""
        for name, parameter in self._masters.named.items():
            yield self._item("weights", name, parameter.detach())
            state = self._optimizer.state.get(parameter, {})
            for section in MOMENTS:
                if section in state:
                    yield self._item(section, name, state[section])
            if "step" in state:
                yield StateItem("step", name, (), None, state["step"])
        yield from self._clip.state_items()

    @torch.no_grad()
    def load_items(self, reader: StateReader) -> None:
        """Replace weights and optimizer state by saved ones; raises CheckpointError if they belong to another model."""
        check_same_model({name: parameter.shape for name, parameter in self._masters.named.items()}, reader)
        for name, parameter in self._masters.named.items():
            sections = reader.sections(name)
            self._restore(reader, "weights", name, parameter)
            self._optimizer.state.pop(parameter, None)
            if "step" not in sections:
                continue
            step = reader.read("step", name, 0, None).to(self._runtime.device)
            state: dict[str, Tensor] = {"step": step}
            for section in MOMENTS:
                state[section] = torch.zeros_like(parameter)
                self._restore(reader, section, name, state[section])
            self._optimizer.state[parameter] = state
        self._clip.load_items(reader)
        self._masters.publish()

    @torch.no_grad()
    def _infer(self, batch: Batch, loss_fn: Any) -> Any:
        self._stack.eval()
        with self._runtime.autocast():
            output = self._stack(batch.to(self._runtime.device), loss_fn)
        for module in self._sharded:
            module.reshard()  # no backward follows that would; the next step must gather anew
        return output

    def _item(self, section: str, name: str, tensor: Tensor) -> StateItem:
        if isinstance(tensor, DTensor):
            return StateItem(section, name, tuple(tensor.shape), self._first_row(tensor), tensor.to_local())
        return StateItem(section, name, tuple(tensor.shape), None, tensor)

    def _restore(self, reader: StateReader, section: str, name: str, target: Tensor) -> None:
        local = target.to_local() if isinstance(target, DTensor) else target
        if local.numel() == 0:
            return
        offset = self._first_row(target) if isinstance(target, DTensor) else 0
        local.copy_(reader.read(section, name, offset, local.shape[0] if local.ndim else None))

    def _first_row(self, tensor: DTensor) -> int:
        """Return the first row of this rank's shard: FSDP2 cuts dimension 0 like `torch.chunk`."""
        rows_per_rank = -(-tensor.shape[0] // self._runtime.num_ranks)
        return min(self._runtime.rank * rows_per_rank, tensor.shape[0])


class Runtime:
    """Where an engine runs: device, cast policy and the group of ranks (`mesh`; None for one rank)."""

    def __init__(self, device: torch.device, precision: Precision, mesh: DeviceMesh | None):
        self.device = device
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.num_ranks = 1 if mesh is None else mesh.size()
        self._group = None if mesh is None else mesh.get_group()
        self._amp = precision == "amp-bf16"

    def autocast(self) -> torch.autocast:
        """Return the context in which the model's forward runs."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._amp)

    def sum_over_ranks(self, value: float | Tensor) -> Tensor:
        """Return the sum over the ranks in fp32, on the device and in the shape of `value`; the host does not wait for it."""
        if isinstance(value, Tensor):
            total = value.to(torch.float32, copy=True)
        else:
            total = torch.full((), value, dtype=torch.float32, device=self.device)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total
