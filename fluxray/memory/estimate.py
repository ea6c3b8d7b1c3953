"""How many bytes a run takes of device, host and disk, by category: plain arithmetic on sizes that others have counted.

Every category stands at its own peak, as if all peaks came at once, so a total is an upper bound of what is allocated. Only in
the stream engine, which fills a device to a few percent, the loss counts with what it takes beyond the activations of a block:
the two peaks use the same memory, one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fluxray.config.schema import CheckpointKind
from fluxray.memory.checkpointing import IN_FLIGHT, blocks_at_once, kept_by_sharded, kept_operations
from fluxray.memory.group import gathered, offloaded
from fluxray.memory.operations import Operation
from fluxray.memory.spec import ModelSpec

GIB = 2**30

CONTEXT_BYTES = 1_000_000_000
"""What nvidia-smi counts of a process that trains, beside what PyTorch reserves: 0.65 GB when its CUDA context begins, up to 1.03
when the kernels of libraries and compiler are loaded (H200, torch 2.11)."""

WORKSPACE_BYTES = 150_000_000
"""What the libraries' kernels take beside the tensors of a block: up to 0.14 GB over the count on an H200 (torch 2.11, bf16)."""

PROCESS_BYTES = 4 * GIB
"""What a worker's process, its libraries and Ray take of the host beside any tensor."""

FULL_CHUNK = 2048
"""Positions whose logits exist at once, where nothing else is said."""

LOGIT_BYTES_FP32 = 8
"""Temporaries of the cross-entropy per logit: its fp32 value and the fp32 log-probability that becomes its gradient."""


@dataclass(frozen=True)
class UnitBytes:
    """Memory of one block, or of everything outside the blocks.

    `weights` in the dtype that the model computes with, `states` what only the step needs (rest of the masters, moments),
    `trained_weights` the part of the weights that is written back, `num_gradients` elements of the gradient, `num_frozen` those
    of weights that have none. `codes` are bytes of the weights that are no numbers.
    """

    weights: int
    states: int
    trained_weights: int
    num_gradients: int
    num_frozen: int = 0
    codes: int = 0

    @property
    def num_weights(self) -> int:
        """Elements of all weights that are numbers."""
        return self.num_gradients + self.num_frozen

    @property
    def total(self) -> int:
        """Weights and states."""
        return self.weights + self.states


@dataclass(frozen=True)
class SampleDemand:
    """Pictures while training: all together as large as `rows` rows, the VAE with what it holds while it decodes one.

    `averaged`: by the moving averages of the weights; `rounded` tells bf16 ones, for which sharded masters wait on the host.
    """

    rows: int
    decode_bytes: int
    averaged: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class Demand:
    """What a run asks for, in plain values.

    A step is `num_micro_batches` of `micro_rows` rows on each of `num_ranks`. `itemsize` are the bytes of a number that the
    model computes with. `hold_gradients`: clipping needs the whole norm before any block steps. `activation_checkpoint`: which
    activations backward computes again, with `checkpoint_every` (blocks) and `checkpoint_budget` (bytes; None: what the plan
    leaves) of the kinds that have them; `partly_again`: only what it needs of a block; `hides_operations`: `selective` can spare
    none. `resident_indices(n)` are the blocks that the stream engine keeps on the device if it keeps n. `whole_copies`: beside
    fp32 masters a rank holds a whole copy of the weights to compute with. `paged_states`: optimizer states may leave the device
    for the host. `steps_in_backward`: a block's gradients are freed before the next one's come. `fused_loss`: it has no fp32
    temporaries.
    Where rows have several sizes, a step that mixes them has up to `most_micro_batches`, with as many rows in all. `cast_bytes`
    autocast makes of a weight for its matrix product, which are kept with what autograd keeps of it. `saves_frozen`: checkpoints
    hold weights that are not trained. `cpu_offload`: masters, gradients and states are on the host. `stays_gathered`: all blocks
    are, from forward to backward.
    """

    engine: Literal["stream", "sharded"]
    spec: ModelSpec
    blocks: tuple[UnitBytes, ...]
    outside: UnitBytes
    micro_rows: int
    num_micro_batches: int
    itemsize: int
    num_ranks: int = 1
    on_gpu: bool = True
    hold_gradients: bool = False
    activation_checkpoint: CheckpointKind = "full"
    checkpoint_every: int = 2
    checkpoint_budget: int | None = 0
    partly_again: bool = False
    hides_operations: bool = False
    whole_copies: bool = False
    paged_states: bool = False
    steps_in_backward: bool = False
    fused_loss: bool = False
    cast_bytes: int = 0
    asynchronous_saves: bool = True
    num_checkpoints: int = 1
    most_micro_batches: int | None = None
    saves_frozen: bool = True
    cpu_offload: bool = False
    stays_gathered: bool = False
    samples: SampleDemand | None = None
    resident_indices: Callable[[int], Sequence[int]] = range

    def saved(self, unit: UnitBytes) -> int:
        """Bytes of a unit in a checkpoint."""
        return unit.total if self.saves_frozen else unit.trained_weights + unit.states

    @property
    def gathers(self) -> bool:
        """Whether blocks are gathered from shards (FSDP2) and not resident."""
        return self.engine == "sharded" and (self.num_ranks > 1 or self.cpu_offload)

    @property
    def micro_tokens(self) -> int:
        """Positions of one micro-batch."""
        return self.micro_rows * self.spec.row_tokens

    @property
    def rank_rows(self) -> int:
        """Rows of one step on one rank."""
        return self.micro_rows * self.num_micro_batches

    @property
    def tokens(self) -> int:
        """Positions of one step on all ranks."""
        return self.rank_rows * self.spec.row_tokens * self.num_ranks


@dataclass(frozen=True)
class Policy:
    """What is decided for a run. `kept_blocks` before the last keep their activations instead of computing them again.

    `kept_operations` are of each block those whose results `selective` keeps, in `checkpoint_budget` bytes.
    """

    weight_slots: int = 3
    state_slots: int = 3
    resident_blocks: int = 0
    kept_blocks: int = 0
    epilogue_tokens: int = FULL_CHUNK
    kept_operations: tuple[tuple[Operation, ...], ...] = ()
    checkpoint_budget: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes by category, of one rank's device, of one host (all ranks on it), and of the folder with the checkpoints."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]


def estimate(demand: Demand, policy: Policy) -> Estimate:
    """Return what `demand` takes under `policy`."""
    return _stream(demand, policy) if demand.engine == "stream" else _sharded(demand, policy)


def _stream(demand: Demand, policy: Policy) -> Estimate:
    resident = set(demand.resident_indices(policy.resident_blocks) if policy.resident_blocks else ())
    streamed = [unit for index, unit in enumerate(demand.blocks) if index not in resident]
    staying = [demand.outside, *(demand.blocks[index] for index in resident)]
    inputs = [block.carry_bytes for block in demand.spec.blocks]
    carries, waiting = sum(inputs) + inputs[-1], 0
    if demand.activation_checkpoint == "offload":
        carries, waiting = (IN_FLIGHT + 1) * max(inputs), sum(inputs[:-1])
    last = len(demand.blocks) - 1
    num_more = (demand.most_micro_batches or demand.num_micro_batches) - demand.num_micro_batches
    kept = sum(
        demand.num_micro_batches * _kept_inside(demand, index, demand.micro_rows) + num_more * _kept_inside(demand, index, 1)
        for index in range(last - policy.kept_blocks, last)
    )
    kept += demand.rank_rows * kept_operations(demand, policy)
    held_back = demand.itemsize if demand.hold_gradients else 0
    largest = max(unit.num_gradients for unit in demand.blocks)
    casts = (policy.kept_blocks * (demand.num_micro_batches + num_more) + 1) * _largest_weights(demand)
    casts += max((parameter.numel for parameter in demand.spec.outside), default=0)
    device = {
        "CUDA context": CONTEXT_BYTES if demand.on_gpu else 0,
        "workspaces": WORKSPACE_BYTES if demand.on_gpu else 0,
        "weights": sum(unit.weights for unit in staying),
        "optimizer": sum(unit.states for unit in staying),
        "gradients": 4 * demand.outside.num_gradients
        + 4 * largest
        + held_back * sum(demand.blocks[index].num_gradients for index in resident),
        "slots": policy.weight_slots * max((unit.weights for unit in streamed), default=0)
        + policy.state_slots * max((unit.states for unit in streamed), default=0)
        + 2 * held_back * max((unit.num_gradients for unit in streamed), default=0),
        "kept inputs": demand.rank_rows * (carries + demand.spec.shared_bytes) + demand.micro_rows * inputs[-1],
        "activations": _largest_block(demand) + kept + demand.cast_bytes * casts,
        "logits": _beyond_a_block(demand, policy.epilogue_tokens),
    }
    host = {
        "blocks": sum(unit.total + held_back * unit.num_gradients for unit in streamed),
        "waiting inputs": demand.rank_rows * waiting,
        "checkpoint": max(demand.saved(unit) for unit in demand.blocks) if demand.asynchronous_saves else 0,
        "process": PROCESS_BYTES,
    }
    return Estimate(_with_validation(device, demand, demand.num_micro_batches, policy.epilogue_tokens), host, _disk(demand))


def _sharded(demand: Demand, policy: Policy) -> Estimate:
    units = [*demand.blocks, demand.outside]
    ranks = demand.num_ranks
    masters, states = sum(unit.weights for unit in units), sum(unit.states for unit in units)
    num_gradients = sum(unit.num_gradients for unit in units)
    largest = max(unit.num_gradients for unit in demand.blocks)
    copies = demand.itemsize * num_gradients if demand.whole_copies else 0
    # a parameter outside steps by itself, but those of a group are reduced together
    stepped = largest + (demand.outside.num_gradients if demand.gathers else _largest_outside(demand))
    kept = kept_by_sharded(demand, policy)
    casts = blocks_at_once(demand) * _largest_weights(demand) + max((p.numel for p in demand.spec.outside), default=0)
    # a piece's gradient of the head and the sum over pieces, in fp32
    chunked = (demand.itemsize + 4) * _largest_outside(demand) if policy.epilogue_tokens < demand.micro_tokens else 0
    optimizer = states if not demand.paged_states else max(unit.states for unit in units)
    gradients = 4 * (stepped if demand.steps_in_backward else num_gradients)
    on_device = 0 if demand.cpu_offload else 1
    device = {
        "CUDA context": CONTEXT_BYTES if demand.on_gpu else 0,
        "workspaces": WORKSPACE_BYTES if demand.on_gpu else 0,
        "weights": on_device * masters // ranks + copies,
        "optimizer": on_device * optimizer // ranks,
        "gradients": on_device * gradients // ranks + chunked,
        "gathered blocks": gathered(demand) if demand.gathers else 0,
        "kept inputs": kept.inputs + demand.micro_rows * demand.spec.shared_bytes,
        "activations": kept.activations + demand.cast_bytes * casts,
        "logits": _logits(demand, policy.epilogue_tokens),
    }
    saved = sum(demand.saved(unit) for unit in units)
    # fp32 weights and moments of all ranks; a page-locked copy, which is used again, lets training go on during a save
    host = {
        "waiting inputs": kept.host * ranks,
        "checkpoint": saved if demand.asynchronous_saves else 0,
        "process": PROCESS_BYTES * ranks,
    }
    if demand.cpu_offload:
        host |= offloaded(demand, states)
    if demand.samples is not None and demand.samples.averaged and demand.samples.rounded:
        host["waiting weights"] = masters
    if demand.paged_states:
        host["paged states"] = states
    return Estimate(_with_validation(device, demand, 1, policy.epilogue_tokens), host, _disk(demand))


def _with_validation(device: dict[str, int], demand: Demand, num_batches: int, chunk: int) -> dict[str, int]:
    """Add what evaluation needs beyond the memory of kept inputs, activations and logits, which it uses again.

    `num_batches` go through the model together; the logits of `chunk` positions exist at once.
    """
    free = device["kept inputs"] + device["activations"] + device["logits"]
    logits = min(chunk, demand.micro_tokens) * demand.spec.num_outputs * (demand.itemsize + LOGIT_BYTES_FP32 // 2)
    carry = (num_batches + 1) * demand.micro_rows * demand.spec.blocks[-1].carry_bytes
    return {**device, "validation": max(0, logits + carry - free, _sampling(demand) - free)}


def _sampling(demand: Demand) -> int:
    """Return what a grid of pictures takes: all of it between two blocks, one micro-batch inside one; or the VAE, afterwards.

    Streamed averages are computed with in memory for the largest block and for what is outside.
    """
    samples = demand.samples
    if samples is None:
        return 0
    between = samples.rows * (demand.spec.blocks[-1].carry_bytes + demand.spec.shared_bytes)
    inside = max(kind.peak(demand.micro_rows) for kind in demand.spec.kinds.values())
    scratch = max(unit.weights for unit in demand.blocks) + demand.outside.weights
    in_averages = scratch if samples.averaged and demand.engine == "stream" else 0
    return max(between + inside + in_averages, samples.decode_bytes)


def _kept_inside(demand: Demand, index: int, num_rows: int) -> int:
    """Return what a block keeps of so many rows besides its output, which is the next one's input."""
    block, behind = demand.spec.blocks[index], demand.spec.blocks[-1 if index == -1 else index + 1]
    return max(0, demand.spec.kinds[block.kind].kept(num_rows) - num_rows * behind.carry_bytes)


def _largest_block(demand: Demand) -> int:
    return max(kind.peak(demand.micro_rows) for kind in demand.spec.kinds.values())


def _largest_weights(demand: Demand) -> int:
    return max(unit.num_weights for unit in demand.blocks)


def _largest_outside(demand: Demand) -> int:
    return max((p.numel for p in demand.spec.outside if p.trained), default=0)


def _logits(demand: Demand, chunk: int) -> int:
    """Logits and their gradient in the compute dtype, and the fp32 temporaries, of `chunk` positions at most."""
    temporaries = 0 if demand.fused_loss else LOGIT_BYTES_FP32
    return min(chunk, demand.micro_tokens) * demand.spec.num_outputs * (2 * demand.itemsize + temporaries)


def _beyond_a_block(demand: Demand, chunk: int) -> int:
    """What the loss of `chunk` positions takes beyond the peak of a block, while the last one keeps its activations.

    First the logits and their gradient, then that gradient and the head's; beside them, hidden states, their normalised values
    and the gradient of these.
    """
    last, tokens = demand.spec.blocks[-1], min(chunk, demand.micro_tokens)
    hidden = 3 * tokens * last.carry_bytes // demand.spec.row_tokens
    gradients = demand.itemsize * (tokens * demand.spec.num_outputs + _largest_outside(demand))
    at_the_loss = _kept_inside(demand, -1, demand.micro_rows) + hidden + max(_logits(demand, chunk), gradients)
    return max(0, at_the_loss - _largest_block(demand))


def _disk(demand: Demand) -> Mapping[str, int]:
    """The checkpoints that are kept, and the one being written before the oldest is deleted."""
    one = sum(demand.saved(unit) for unit in (*demand.blocks, demand.outside))
    return {"checkpoints": one * (demand.num_checkpoints + 1)}
