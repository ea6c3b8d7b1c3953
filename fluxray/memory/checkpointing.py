"""What each kind of activation checkpointing keeps of a micro-batch, and what it computes again.

`sqrt` keeps the activations of a whole segment while that is differentiated, so it takes less than `full` only where they are few
against a block's input.
"""

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from fluxray.memory.operations import Operation, choose_operations
from fluxray.memory.spec import KindSpec

if TYPE_CHECKING:
    from fluxray.memory.estimate import Demand, Policy


class Kept(NamedTuple):
    """Bytes between forward and backward: `inputs` of blocks on the device, `activations` with the peak of a block, `host`."""

    inputs: int
    activations: int
    host: int


def segments(num_blocks: int) -> list[range]:
    """Return the indices of the blocks in segments of sqrt(num_blocks), rounded up; the first may be shorter."""
    size = isqrt(num_blocks - 1) + 1
    return [range(max(end - size, 0), end) for end in range(num_blocks, 0, -size)][::-1]


def choose(demand: "Demand", kept_blocks: int, budget: int) -> tuple[tuple[Operation, ...], ...]:
    """Return for each block the operations whose results `selective` keeps in `budget` bytes; none for other kinds.

    The stream engine's last block and `kept_blocks` before it keep everything anyway.
    """
    if demand.activation_checkpoint != "selective" or demand.hides_operations:
        return ()
    spec, stream = demand.spec, demand.engine == "stream"
    num_again = len(spec.blocks) - 1 - kept_blocks if stream else len(spec.blocks)
    costs = {name: kind.operations for name, kind in spec.kinds.items()}
    rows = demand.rank_rows if stream else demand.micro_rows
    kinds = [block.kind for block in spec.blocks[:num_again]]
    return choose_operations(kinds, costs, rows, budget, spec.has_dropout)


def kept_by_sharded(demand: "Demand", policy: "Policy") -> Kept:
    """Return what the sharded engine keeps of one micro-batch."""
    rows, blocks = demand.micro_rows, demand.spec.blocks
    kinds = [demand.spec.kinds[block.kind] for block in blocks]
    carries = [rows * block.carry_bytes for block in blocks]
    largest = max(kind.peak(rows) for kind in kinds)
    match demand.activation_checkpoint:
        case "none":
            return Kept(0, _peak(kinds, range(len(kinds)), rows), 0)
        case "full":
            return Kept(sum(carries), largest, 0)
        case "every_n":
            again = range(0, len(kinds), demand.checkpoint_every)
            whole = [index for index in range(len(kinds)) if index not in again]
            return Kept(sum(carries[index] for index in again), _peak(kinds, whole, rows), 0)
        case "sqrt":
            found = segments(len(kinds))
            peaks = [_peak([kinds[index] for index in segment], range(len(segment)), rows) for segment in found]
            return Kept(sum(carries[segment[0]] for segment in found[:-1]), max(peaks), 0)
        case "selective":
            return Kept(sum(carries), largest + rows * kept_operations(demand, policy), 0)
        case "offload":
            return Kept(IN_FLIGHT * max(carries), largest, sum(carries[:-1]))


def blocks_at_once(demand: "Demand") -> int:
    """Return of how many blocks, at most, the sharded engine holds at once what their forward has made."""
    num_blocks = len(demand.spec.blocks)
    match demand.activation_checkpoint:
        case "none":
            return num_blocks
        case "every_n":
            return min(num_blocks - len(range(0, num_blocks, demand.checkpoint_every)) + 1, num_blocks)
        case "sqrt":
            return len(segments(num_blocks)[-1])
        case "full" | "selective" | "offload":
            return 1


IN_FLIGHT = 3
"""Inputs of blocks that are on the device at once where they wait on the host: one in use, one on its way, and the output."""


def kept_operations(demand: "Demand", policy: "Policy") -> int:
    """Return the bytes of one row that `selective` keeps besides inputs."""
    chosen = zip(demand.spec.blocks, policy.kept_operations, strict=False)
    return sum(_costs(demand.spec.kinds[block.kind], kept)[1] for block, kept in chosen)


def again_share(demand: "Demand", policy: "Policy") -> float:
    """Return the FLOPs that backward computes again, as a share of the blocks' forward."""
    spec, stream = demand.spec, demand.engine == "stream"
    num_again = len(spec.blocks) - 1 - policy.kept_blocks if stream else len(spec.blocks)
    return sum(again_flops(demand, policy, i) for i in range(num_again)) / sum(
        spec.kinds[block.kind].forward_flops for block in spec.blocks
    )


def again_flops(demand: "Demand", policy: "Policy", index: int) -> int:
    """Return the FLOPs of one row that the backward of a block computes again, if the engine does not keep its activations."""
    kind = demand.spec.kinds[demand.spec.blocks[index].kind]
    again = kind.again_flops if demand.partly_again else kind.forward_flops
    match demand.activation_checkpoint:
        case "none":
            return 0
        case "every_n":
            return 0 if index % demand.checkpoint_every else again
        case "sqrt":
            return kind.forward_flops if index < segments(len(demand.spec.blocks))[-1][0] else 0
        case "selective":
            kept = policy.kept_operations[index] if index < len(policy.kept_operations) else ()
            return again - _costs(kind, kept)[0]
        case "full" | "offload":
            return again


def _costs(kind: KindSpec, kept: Sequence[Operation]) -> tuple[int, int]:
    """Return FLOPs and bytes of some operations of a block, for one row."""
    costs = [cost for cost in kind.operations if cost.operation in kept]
    return sum(cost.flops for cost in costs), sum(cost.num_bytes for cost in costs)


def _peak(kinds: Sequence[KindSpec], whole: Sequence[int], rows: int) -> int:
    """Return the most bytes while blocks are differentiated from the last to the first, of which `whole` keep everything."""
    kept = [kind.kept(rows) if index in whole else 0 for index, kind in enumerate(kinds)]
    return max(kind.peak(rows) + sum(kept[:index]) for index, kind in enumerate(kinds))
