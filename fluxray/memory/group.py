"""What a group of GPUs needs besides its shares of a model (FSDP2): gathered blocks, and what waits on the host."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fluxray.memory.checkpointing import segments

if TYPE_CHECKING:
    from fluxray.memory.estimate import Demand


def gathered(demand: "Demand") -> int:
    """Return what FSDP2 has gathered at once: the block that computes and the next, a gradient before and after reduction.

    What is outside stays gathered, and so do the blocks of a segment that is computed again, or all. Of a block whose shards come
    from the host, these are there besides, as they come and as they are gathered.
    """
    num_blocks, sizes = len(demand.blocks), [demand.itemsize * unit.num_weights + unit.codes for unit in demand.blocks]
    at_once = max(2, len(segments(num_blocks)[-1])) if demand.activation_checkpoint == "sqrt" else 2
    blocks = sum(sizes) if demand.stays_gathered else max(sizes) * min(at_once, num_blocks)
    gradient = max(unit.num_gradients for unit in demand.blocks) * 2 * 4
    coming = 0
    if demand.cpu_offload:
        units = (*demand.blocks, demand.outside)
        coming = max(unit.num_weights * (4 + demand.itemsize) + 2 * unit.codes for unit in units) // demand.num_ranks
    return blocks + demand.itemsize * demand.outside.num_weights + gradient + coming


def offloaded(demand: "Demand", states: int) -> Mapping[str, int]:
    """Return what masters, gradients and states take of the host, those of all ranks.

    PyTorch page-locks the shards and the gradients of each parameter by themselves, in blocks of a power of two. Each further
    micro-batch's gradient of a parameter waits in memory of its own until it is added.
    """
    ranks = demand.num_ranks
    parameters = [p for block in demand.spec.blocks for p in block.parameters] + list(demand.spec.outside)
    shards = {p: -(-p.shape[0] // ranks) * (p.numel // p.shape[0]) if p.numel else 0 for p in set(parameters)}
    trained = [p for p in parameters if p.trained]
    another = max((shards[p] for p in trained), default=0) if demand.num_micro_batches > 1 else 0
    frozen = {False: demand.itemsize, True: 1}
    weight_bytes = [shards[p] * (4 if p.trained else frozen[p.stands_for is not None]) for p in parameters]
    return {
        "weights": ranks * sum(map(page_locked, weight_bytes)),
        "gradients": ranks * (sum(page_locked(4 * shards[p]) for p in trained) + 4 * another),
        "optimizer": states,
    }


def page_locked(num_bytes: int) -> int:
    """Return the bytes that PyTorch's own page-locked memory takes for so many: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
