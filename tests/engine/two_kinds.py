"""A stack of two kinds of blocks with a shared tensor that needs a gradient, as FLUX has, and its plain training loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fluxray.config.schema import OptimConfig
from fluxray.models.blocks import materialise
from fluxray.protocols import BatchKey, Block, BlockStack, LossOutput, State
from tests.engine.stream_helpers import CPU, freeze

WIDTH, NUM_IMAGE, NUM_TEXT, NUM_SAMPLES = 16, 6, 3, 4


class DoubleBlock(nn.Module):
    """Two streams, each shifted by the condition. `spare` is used where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.condition = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor, with_spare: bool) -> tuple[Tensor, Tensor]:
        shift_image, shift_text = self.condition(condition).unsqueeze(1).chunk(2, dim=-1)
        mixed = image + F.gelu(self.image(image + shift_image)) + text.mean(1, keepdim=True)
        other = text + torch.tanh(self.text(text + shift_text)) * image.mean(1, keepdim=True)
        return (mixed + self.spare(image) if with_spare else mixed), other


class SingleBlock(nn.Module):
    """One stream of both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH, bias=False), nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden * (1 + condition.unsqueeze(1)))))


class TwoKindsModel(nn.Module):
    """Two double blocks, then three single ones; the condition comes from a layer outside and reaches every block and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.time = nn.Linear(5, WIDTH), nn.Linear(7, WIDTH), nn.Linear(1, WIDTH)
        self.doubles = nn.ModuleList(DoubleBlock() for _ in range(2))
        self.singles = nn.ModuleList(SingleBlock() for _ in range(3))
        self.final, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.unused = nn.Linear(WIDTH, WIDTH)


@dataclass(frozen=True)
class TwoKindsBatch:
    """`image` [B, NUM_IMAGE, 5], `text` [B, NUM_TEXT, 7], `time` [B, 1]."""

    image: Tensor
    text: Tensor
    time: Tensor
    with_spare: bool
    key: BatchKey | None = None

    @property
    def num_valid(self) -> int:
        return len(self.image)

    @property
    def num_tokens(self) -> int:
        return len(self.image) * (NUM_IMAGE + NUM_TEXT)

    def to(self, device: torch.device) -> "TwoKindsBatch":
        return replace(self, image=self.image.to(device), text=self.text.to(device), time=self.time.to(device))


@dataclass(frozen=True)
class TwoKindsBlock:
    """A block and how it is called."""

    name: str
    module: nn.Module

    def __call__(self, state: State) -> State:
        condition: Any = state.shared["condition"]
        if isinstance(self.module, DoubleBlock):
            return state._replace(carry=self.module(*state.carry, condition, state.shared["spare"] is not None))
        hidden = torch.cat(state.carry[::-1], dim=1) if len(state.carry) == 2 else state.carry[0]
        return state._replace(carry=(self.module(hidden, condition),))


class TwoKindsStack(BlockStack):
    """The model on the meta device as a block stack."""

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = TwoKindsModel()
        kinds = {"doubles": self.model.doubles, "singles": self.model.singles}
        self.blocks = tuple(
            TwoKindsBlock(f"{kind}.{i}", module) for kind, modules in kinds.items() for i, module in enumerate(modules)
        )
        self.has_dropout, self.dropout_modules = False, ()

    def materialise(self, device: torch.device, block: Block | None) -> None:
        inside = tuple(f"{b.name}." for b in self.blocks)
        every = [path for path, _ in self.model.named_modules()]
        if block is None:
            paths = [path for path in every if not f"{path}.".startswith(inside)]
        else:
            paths = [path for path in every if f"{path}.".startswith(f"{block.name}.")]
        materialise(self.model, paths, device, 0, _initialise)

    def prologue(self, batch: TwoKindsBatch) -> State:
        model: Any = self.model
        dtype = model.time.weight.dtype
        condition = torch.tanh(model.time(batch.time.to(dtype)))
        carry = (model.image(batch.image.to(dtype)), model.text(batch.text.to(dtype)) + condition.unsqueeze(1))
        return State(carry, {"condition": condition, "spare": torch.ones(()) if batch.with_spare else None}, None)

    def epilogue(self, state: State, batch: TwoKindsBatch, loss_fn: Callable[[Tensor, Any], Any]) -> Any:
        model: Any = self.model
        condition: Any = state.shared["condition"]
        hidden = state.carry[0][:, NUM_TEXT:]
        return loss_fn(model.head(torch.tanh(model.final(hidden)) * (1 + condition.unsqueeze(1))), batch)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)


def square_loss(output: Tensor, batch: TwoKindsBatch) -> LossOutput:
    """Return the squared error to the negated image, each sample the mean over its elements."""
    return LossOutput((output.float() + batch.image).square().mean(dim=(1, 2)).sum(), batch.num_valid)


def two_kinds_batches(step: int, num_micro_batches: int, spare: Sequence[int] = ()) -> list[TwoKindsBatch]:
    """Return micro-batches; those numbered in `spare` use what only some do."""
    generator = torch.Generator().manual_seed(step)
    size = NUM_SAMPLES // num_micro_batches
    shapes = ((NUM_IMAGE, 5), (NUM_TEXT, 7), (1,))
    values = [torch.randn(NUM_SAMPLES, *shape, generator=generator) for shape in shapes]
    return [
        TwoKindsBatch(*(v[k * size : (k + 1) * size] for v in values), k in spare, BatchKey(0, step, ()))  # type: ignore[arg-type]
        for k in range(num_micro_batches)
    ]


def plain_two_kinds(
    optim: OptimConfig, num_steps: int, num_micro_batches: int, frozen: Sequence[str] = (), spare: Sequence[int] = ()
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train the two-kind model by autograd and torch's AdamW; return losses, gradients of each step, and last weights."""
    stack = TwoKindsStack()
    for block in (*stack.blocks, None):
        stack.materialise(CPU, block)
    freeze(stack, frozen)
    named = dict(stack.model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if (p.ndim > 1) == decays and p.requires_grad], "weight_decay": decay}
        for decays, decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False)
    losses, gradients = [], []
    for step in range(num_steps):
        batches = two_kinds_batches(step, num_micro_batches, spare)
        loss = torch.stack([stack(batch, square_loss).sum for batch in batches]).sum() / NUM_SAMPLES
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach().clone() for name, p in named.items()}
