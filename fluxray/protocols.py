"""The seams: the values and interfaces through which data, tasks, models, engines and the trainer meet.

Nothing here does work. A model family is a `Task` and a `BlockStack`; a way to run it is an `Engine`; the `Trainer` knows only
these.

Shapes: B micro-batch, S sequence, D hidden size, V vocabulary; T image tokens, C packed channels, L text tokens, E text width,
P pooled width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from fluxray.seeding import derive_seed

IGNORE_INDEX = -100
"""Target of a position that has no next token to predict: the last of its document, or padding."""


@dataclass(frozen=True, order=True)
class SampleId:
    """One draw of one sample: the `index`-th row of the data set, in pass number `epoch` over it."""

    epoch: int
    index: int


@dataclass(frozen=True)
class BatchKey:
    """What names the random numbers of one micro-batch: run seed, optimizer step and the samples in it, in order."""

    seed: int
    step: int
    samples: tuple[SampleId, ...]

    def stream(self, purpose: str) -> int:
        """Return the 63-bit seed of this micro-batch's random stream for `purpose`."""
        return derive_seed(self.seed, purpose, self.step, tuple((s.epoch, s.index) for s in self.samples))


class Batch(Protocol):
    """One micro-batch of one rank, ready for `BlockStack.prologue`."""

    @property
    def key(self) -> BatchKey | None:
        """Names its random numbers; None in evaluation, where there are none."""
        ...

    @property
    def num_valid(self) -> int:
        """Number of terms of the loss: predicted tokens for text, samples for images. 0 in a zero-weight batch."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of positions that the blocks process, padding included."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return a copy whose tensors are on `device`; asynchronous where the source is pinned."""
        ...


@dataclass(frozen=True)
class TextBatch:
    """Rows of tokens. All tensors are int64 [B, S].

    `document_ids` number the documents of a row from 0; positions of different documents do not see each other, and padding is a
    document of its own, the last. `position_ids` restart at 0 in each document. `targets` holds the next token of the same
    document, or IGNORE_INDEX. Two things are known on the host. `single_document`: no row holds a second document beside padding,
    which comes behind it and has no targets, so the mask is plain causal. `num_documents`: of all rows, paddings among them; None
    where nobody has counted.
    """

    input_ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    targets: Tensor
    single_document: bool
    num_valid: int
    key: BatchKey | None = None
    num_documents: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of positions, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "TextBatch":
        """Return a copy whose tensors are on `device`."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "position_ids", "document_ids", "targets")
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class FlowBatch:
    """Noised images of one resolution with texts of one length.

    With latents z, noise eps and noise level `sigma` fp32 [B] in [0, 1]: `noised` = (1 - sigma) z + sigma eps and `target` =
    eps - z, both fp32 [B, T, C] and packed as the family's pipeline packs latents, T = `height` x `width` tokens. `weight` [B]
    multiplies each sample's own mean square error; 0 in a stand-in that does not count. `text` [B, L, E] fp32 or bf16; `pooled`
    [B, P], FLUX.1's, and `guidance` fp32 [B] are None for a model that reads none. `num_valid` samples count. `timestep` is the
    sigma that all samples share in an evaluation by sigma; else None. `mask` fp32 [B, T] multiplies each token's square error and
    has the mean 1 in each sample; None where all tokens count alike.
    """

    noised: Tensor
    target: Tensor
    sigma: Tensor
    weight: Tensor
    text: Tensor
    pooled: Tensor | None
    guidance: Tensor | None
    height: int
    width: int
    num_valid: int
    key: BatchKey | None = None
    timestep: float | None = None
    mask: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of positions of images and texts."""
        return len(self.noised) * (self.noised.shape[1] + self.text.shape[1])

    def to(self, device: torch.device) -> "FlowBatch":
        """Return a copy whose tensors are on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, num_samples: int) -> Iterator["FlowBatch"]:
        """Yield views of at most `num_samples` samples, in order; what they share of the rest is that of the whole."""
        for begin in range(0, len(self.noised), num_samples):
            part = slice(begin, begin + num_samples)
            yield replace(self._mapped(lambda tensor, part=part: tensor[part]), num_valid=len(self.noised[part]))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "FlowBatch":
        names = ("noised", "target", "sigma", "weight", "text", "pooled", "guidance", "mask")
        held = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if tensor is None else change(tensor) for name, tensor in held.items()})


class State(NamedTuple):
    """What travels between blocks.

    `carry` is what one block hands the next (hidden states [B, S, D]); `shared` is what every block reads (rotary embeddings,
    masks), unchanged, so the gradient of a shared tensor is the sum over the blocks. `dropout_seed` keys the dropout of the
    micro-batch and is None where there is none.
    """

    carry: tuple[Tensor, ...]
    shared: Mapping[str, Tensor | None]
    dropout_seed: int | None


class LossOutput(NamedTuple):
    """Sum of the loss over valid terms (fp32 scalar) and their number: a host number for one micro-batch, a scalar over ranks."""

    sum: Tensor
    num_valid: int | Tensor


class LossFn(Protocol):
    """Maps the model's output ([B, S, V] logits for text) and the batch to the summed loss."""

    def __call__(self, output: Tensor, batch: Any, /) -> LossOutput:
        """Return the summed loss of `batch`."""
        ...


class Block(Protocol):
    """One repeated block: the library's own module together with how it is called."""

    @property
    def name(self) -> str:
        """Path of the module in the library's model, such as `gpt_neox.layers.3`."""
        ...

    @property
    def module(self) -> nn.Module:
        """The library's module."""
        ...

    def __call__(self, state: State, /) -> State:
        """Return the state behind this block."""
        ...


class BlockStack(nn.Module, ABC):
    """A model as prologue, ordered blocks and epilogue; its forward composes the three in one module call, so FSDP's hooks fire.

    `model` is the library's; its parameter names are the names used everywhere. `blocks` are its repeated blocks, in order.
    `fused` maps the name of a parameter that is several of the library's, one below the other, to their names and numbers of
    rows, in order: engines hold one, checkpoints the library's. `adapts`: what is trained are adapters; the other parameters are
    frozen and of no checkpoint, which only tells them by `base`, known once all is materialised. `compiles_each_shape`: batches
    have so few shapes that each is worth compiled code of its own.
    `has_dropout` tells whether any dropout probability is above zero; then `dropout_modules` are the modules whose calls get a
    `dropout_seed` keyword while `State.dropout_seed` is set.
    """

    model: nn.Module
    blocks: Sequence[Block]
    has_dropout: bool
    dropout_modules: Sequence[nn.Module]
    fused: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    adapts: bool = False
    base: Mapping[str, str] = MappingProxyType({})
    compiles_each_shape: bool = False

    @property
    def is_whole_again(self) -> bool:
        """Whether backward computes a compiled block again as a whole, by a checkpoint around the compiled code.

        Dropout sets its generator anew for that, which a compiled checkpoint does not do.
        """
        return self.has_dropout

    @abstractmethod
    def materialise(self, device: torch.device, block: Any, /) -> None:
        """Allocate one block, or everything outside the blocks for None, on `device` and give it its first values."""

    @abstractmethod
    def prologue(self, batch: Any, /) -> State:
        """Embed the batch and compute what every block reads."""

    @abstractmethod
    def epilogue(self, state: State, batch: Any, loss_fn: Callable[[Tensor, Any], Any], /) -> Any:
        """Apply final norm and head, then `loss_fn`; returns what `loss_fn` returns."""

    def epilogue_pieces(self, state: State, batch: Any, num_tokens: int, /) -> Sequence[tuple[State, Any]]:
        """Return state and batch in pieces of about `num_tokens` tokens whose losses sum up to the whole's.

        A piece's carry is a view of the state's. A model whose epilogue does not work token by token has one piece.
        """
        return [(state, batch)]

    def run_blocks(self, state: State) -> State:
        """Return the state behind the last block."""
        for block in self.blocks:
            state = block(state)
        return state

    def forward(
        self, batch: Any, loss_fn: Callable[[Tensor, Any], Any], finish: Callable[[State, Any], Any] | None = None
    ) -> Any:
        """Compose prologue, blocks and epilogue with `loss_fn`; or, in the latter's place, `finish(state, batch)`."""
        state = self.run_blocks(self.prologue(batch))
        return self.epilogue(state, batch, loss_fn) if finish is None else finish(state, batch)


class Task(Protocol):
    """What is learned: how raw rows become a batch, and the loss."""

    def prepare(self, raw: Sequence[Any], key: BatchKey | None) -> Batch:
        """Collate raw rows into one micro-batch on the host."""
        ...

    @property
    def loss_fn(self) -> LossFn:
        """The summed loss of a micro-batch."""
        ...


class StepOutput(NamedTuple):
    """What one optimizer step returns; tensors are scalars on the device, so nothing waits for them until they are logged.

    `loss` is the mean over the valid terms of the global batch (fp32), `grad_norm` the true global norm before clipping (fp32),
    `num_valid` the number of valid terms of the global batch. `withheld` (fp32) is the share of clip units that were left as they
    were, weights and moments, because loss or gradient was not finite: 0 in a sound step. `loss_scale` (fp32) is what the loss
    was multiplied by for backward, None where it is not scaled.
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    withheld: Tensor
    loss_scale: Tensor | None = None


class StateItem(NamedTuple):
    """One piece of an engine's state on this rank.

    `section` is `weights`, `step` or one of `StateFormat.state_sections`; `name` the library's parameter name; `shape` the whole
    tensor's; `offset` the first row (dimension 0) of this piece, or None if the piece is the whole tensor, which then every rank
    holds. Sections `clip`, `scaler` and `base` belong to no parameter.
    """

    section: str
    name: str
    shape: tuple[int, ...]
    offset: int | None
    tensor: Tensor


class StateReader(Protocol):
    """Gives back pieces of a saved state."""

    def names(self) -> Sequence[str]:
        """Return the names of the saved parameters."""
        ...

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        """Return the shape of a whole saved tensor."""
        ...

    def sections(self, name: str, /) -> Sequence[str]:
        """Return the sections saved for the parameter `name`."""
        ...

    def read(self, section: str, name: str, offset: int, num_rows: int | None, /) -> Tensor:
        """Return rows [offset, offset + num_rows) of a saved tensor, on the host; all of it for None."""
        ...


class Engine(Protocol):
    """Owns one whole optimizer step. Every engine passes the conformance suite of `tests/engine`."""

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> StepOutput:
        """Forward, backward, clip and step over this rank's micro-batches of one global batch."""
        ...

    def eval_steps(self, batches: Sequence[Batch]) -> Sequence[LossOutput]:
        """Return for each batch the summed loss and valid count of all ranks', without dropout or gradients. Collective.

        The batches are in memory together, and an engine that fetches blocks fetches each once for all of them.
        """
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Return the model's output for `batch`, without dropout or gradients."""
        ...

    def forwards(self, batches: Sequence[Batch]) -> Sequence[Tensor]:
        """Return the model's output for each batch, as `forward`; an engine that fetches blocks fetches each once for all."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which evaluation and forward compute with the moving averages of the weights. Collective.

        Only where `ema.decay` has some kept; nothing is pending. What is trained is as it was behind the context.
        """
        ...

    def read_waits(self) -> tuple[float, float]:
        """Return for how many seconds since the last reading the device has waited for fetches, and fetches for write-backs."""
        ...

    def flush(self) -> None:
        """Apply every update that is still pending, before a save, an evaluation or the end."""
        ...

    def state_items(self) -> Iterator[StateItem]:
        """Yield this rank's pieces of weights and optimizer state."""
        ...

    def load_items(self, reader: StateReader) -> Sequence[str]:
        """Replace weights and optimizer state by saved ones, saved under any number of ranks by either engine.

        Returns the names of the parameters of which something was saved in a wider format than it is kept in, and rounded.
        """
        ...


class MicroBatches(NamedTuple):
    """One global batch as this rank sees it, where the data stands once it has been consumed, and what is to be reported of it.

    `metrics` are of the whole global batch, so the same on every rank.
    """

    batches: Sequence[Batch]
    epoch: int
    position: int
    metrics: Mapping[str, float] = {}


BatchSource = Callable[["RunState"], Generator[MicroBatches, None, None]]
"""Yields global batches without end from where a RunState stands; closing the generator ends what prepares them."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate: linear warm-up over `warmup_steps`, then `kind` down to `min_ratio` of `peak_lr` at `total_steps`."""

    kind: str
    peak_lr: float
    warmup_steps: int
    total_steps: int
    min_ratio: float


@dataclass(frozen=True)
class MicroSize:
    """How large micro-batches are where memory governs that (`fluxray.memory.governor`), as a number of rows of full length.

    Steps before step `since`, counted from 0, are cut by `rows`, those from there on by `next_rows`. `peak` is the most that was
    measured of a step at that size, in bytes of one device. A larger one waits for `patience` steps.
    """

    rows: int
    next_rows: int
    since: int
    peak: int
    patience: int

    def at(self, step: int) -> int:
        """Return the size by which step number `step` is cut, counted from 0."""
        return self.next_rows if step >= self.since else self.rows


@dataclass(frozen=True)
class RunState:
    """Everything that influences the future of a run, apart from the engine's tensors.

    `step` counts finished optimizer steps, `epoch` and `position` say which samples have been consumed (`position` within the
    epoch's order), `seed` names all random streams, `num_tokens` counts the terms of all losses so far, over all ranks,
    `num_skipped` the steps of which an update was withheld, those that overflowed in fp16 among them. `micro_size` is None where
    the configuration alone cuts steps into micro-batches. `rung` counts how far the run has gone down the ladder of
    `train.on_oom`: it decides the cut, too, and with it the last bits.
    """

    seed: int
    schedule: Schedule
    step: int = 0
    epoch: int = 0
    position: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    micro_size: MicroSize | None = None
    rung: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunState":
        """Rebuild from `to_json`."""
        fields = dict(values)
        micro_size = fields.pop("micro_size", None)
        fields["micro_size"] = None if micro_size is None else MicroSize(**micro_size)
        return cls(schedule=Schedule(**fields.pop("schedule")), **fields)


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is being written to `path`.

    `wait` returns once it is committed there, with the seconds that took since it was begun, and raises what went wrong.
    """

    path: Path
    wait: Callable[[], float]


class Report(NamedTuple):
    """What the trainer says: after `log_every` steps, after an evaluation, when a checkpoint is saved.

    `metrics` are host numbers, the same on every rank (`train/loss`, `train/lr`, `train/grad_norm`, `train/skipped_steps`,
    `train/loss_scale`, `perf/tokens_per_s`, `perf/mfu`, `perf/of_floor`, `perf/wait_fetch_s`, `perf/wait_write_s`, `memory/...`,
    `eval/...`), except rates, memory and seconds, which are the rank's own. A loss or gradient norm that is not finite is left
    out. What `MicroBatches.metrics` holds comes along.
    """

    step: int
    metrics: Mapping[str, float]
    checkpoint: SavedCheckpoint | None = None


@dataclass(frozen=True)
class RunSummary:
    """How a run ended: finished optimizer steps, last training loss, held-out loss, last checkpoint.

    `perplexity` is None where the task has none.
    A run that was asked to stop has saved and has fewer steps than were planned; it is not evaluated.
    """

    step: int
    train_loss: float | None
    eval_loss: float | None
    perplexity: float | None
    checkpoint: str | None

    @property
    def held_out(self) -> str:
        """What the evaluation found, in words."""
        if self.eval_loss is None:
            return "not evaluated"
        return f"loss {self.eval_loss:.4f}" + ("" if self.perplexity is None else f", perplexity {self.perplexity:.2f}")
