"""How long a step takes, and what it waits for, from FLOPs, bytes and the rates of the hardware.

Per block and pass the larger counts: computing, or the copies beside it, each way by itself. A streamed block's weights come in
for the forward; for the backward its weights, unless they still lie in a slot, and its states, and both go back. Backward
computes the block again (Chen et al., arXiv:1604.06174), compiled only what it needs of it, and differentiates it, which are two
forwards more; those alone where activations are kept, as they are of the last block. Inputs of blocks that wait on the host go
there in the forward and come back in the backward. Where masters are on the host, each micro-batch fetches a rank's fp32 shards
for each pass and brings back the gradient's; the step there is not in it.
Beside the arithmetic, the step reads and writes weights and states, and a gradient is copied or added up, read for its norm and
read again by the step: 8 bytes a parameter of one micro-batch in bf16, 14 of the first of several and 10 for each further one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fluxray.memory.checkpointing import again_flops
from fluxray.memory.estimate import Demand, Policy, UnitBytes

BLOCK_SHARE = 0.79
"""Of the rate of a large matrix product, what GPT-NeoX-20B's compiled blocks reach on an H200 in bf16, 16,384 tokens a step,
attention counted in full though it is causal: taken where blocks are not measured. The floor is computed with all of it."""

ARITHMETIC, LINK_IN, LINK_OUT, STEP = "arithmetic", "link to the device", "link back", "memory bandwidth of the step"


@dataclass(frozen=True)
class Hardware:
    """What one device and its host can do.

    `tflops` of large matrix products, of which blocks reach `block_share`; `link` bytes/s each way with both ways in use, and
    `memory_bandwidth` bytes/s of the device's memory, None where they do not matter. Limits in bytes; None: no limit. `sources`
    tells where each figure is from.
    """

    device_bytes: int | None
    host_bytes: int | None
    disk_bytes: int | None
    tflops: float
    link: float | None
    memory_bandwidth: float | None
    sources: Mapping[str, str]
    block_share: float = BLOCK_SHARE


@dataclass(frozen=True)
class Speed:
    """Seconds of one step: `seconds` expected, `floor` with nothing lost, `by` what the expected ones are spent waiting for.

    From `hiding_tokens` positions a step on, copies hide behind arithmetic; None where nothing is streamed.
    """

    seconds: float
    floor: float
    by: Mapping[str, float]
    hiding_tokens: int | None


class _Pass(NamedTuple):
    """One pass through one block: FLOPs, bytes in and out over the link, bytes that the step moves in the device's memory."""

    flops: float
    bytes_in: int
    bytes_out: int
    step_bytes: int


def predict(demand: Demand, policy: Policy, hardware: Hardware) -> Speed:
    """Return how long one step takes. What ranks exchange, and a step on the host, is not in it."""
    passes = list(_passes(demand, policy))
    expected, floor = _times(passes, hardware, hardware.block_share), _times(passes, hardware, 1.0)
    copies = any(p.bytes_in or p.bytes_out for p in passes)
    hiding = _hiding_tokens(demand, policy, hardware) if copies and hardware.link else None
    return Speed(sum(expected.values()), sum(floor.values()), expected, hiding)


def _passes(demand: Demand, policy: Policy) -> Iterator[_Pass]:
    """Yield forward and backward of each block, and prologue and epilogue, which stay on the device."""
    rows, spec = demand.rank_rows, demand.spec
    stream = demand.engine == "stream"
    resident = set(demand.resident_indices(policy.resident_blocks) if policy.resident_blocks else ())
    streamed = [index for index in range(len(demand.blocks)) if stream and index not in resident]
    in_slots = set(streamed[-policy.weight_slots :])
    first_kept = len(demand.blocks) - 1 - policy.kept_blocks if stream else len(demand.blocks)
    for index, (block, unit) in enumerate(zip(spec.blocks, demand.blocks, strict=True)):
        kind = spec.kinds[block.kind]
        flops, recomputed = kind.forward_flops * rows, 0
        if index < first_kept:
            recomputed = rows * again_flops(demand, policy, index)
        backward = kind.backward_flops * rows + recomputed
        waiting = rows * block.carry_bytes if demand.activation_checkpoint == "offload" and index < len(demand.blocks) - 1 else 0
        if demand.cpu_offload:
            shard, gradient = (
                demand.num_micro_batches * n // demand.num_ranks
                for n in (4 * unit.num_weights + unit.codes, 4 * unit.num_gradients)
            )
            yield _Pass(flops, shard, waiting, 0)
            yield _Pass(backward, waiting + (0 if demand.stays_gathered else shard), gradient, 0)
            continue
        moved = index in streamed
        fetched = moved * (0 if index in in_slots else unit.weights)
        trained = moved * (unit.trained_weights + unit.states)
        step = _step_bytes(unit, demand)
        if demand.hold_gradients and stream:  # the step comes with the next forward, which needs states and gradients
            gradients = moved * demand.itemsize * unit.num_gradients
            yield _Pass(flops, moved * unit.total + gradients, trained + waiting, step)
            yield _Pass(backward, fetched + waiting, gradients, 0)
        else:
            yield _Pass(flops, moved * unit.weights, waiting, 0)
            yield _Pass(backward, fetched + moved * unit.states + waiting, trained, step)
    at_the_end = 0 if demand.cpu_offload else _step_bytes(demand.outside, demand)
    yield _Pass((3 * spec.outside_flops - spec.outside_frozen_flops) * rows, 0, 0, at_the_end)


def _step_bytes(unit: UnitBytes, demand: Demand) -> int:
    if demand.num_micro_batches == 1:
        gradient = 4 * demand.itemsize
    else:
        gradient = demand.itemsize + 12 + (demand.num_micro_batches - 1) * (demand.itemsize + 8)
    return (2 * (unit.trained_weights + unit.states) + gradient * unit.num_gradients) // demand.num_ranks


def _times(passes: list[_Pass], hardware: Hardware, share: float) -> dict[str, float]:
    """Return seconds by what they are spent on: of each pass the longest of computing (arithmetic, then the step) and copies."""
    by: dict[str, float] = dict.fromkeys((ARITHMETIC, LINK_IN, LINK_OUT, STEP), 0.0)
    for flops, bytes_in, bytes_out, step_bytes in passes:
        arithmetic = flops / (hardware.tflops * 1e12 * share)
        step = step_bytes / hardware.memory_bandwidth if hardware.memory_bandwidth else 0.0
        link_in, link_out = (n / hardware.link if hardware.link else 0.0 for n in (bytes_in, bytes_out))
        if max(link_in, link_out) > arithmetic + step:
            by[LINK_IN if link_in >= link_out else LINK_OUT] += max(link_in, link_out)
        else:
            by[ARITHMETIC] += arithmetic
            by[STEP] += step
    return by


def _hiding_tokens(demand: Demand, policy: Policy, hardware: Hardware) -> int:
    """Return from how many positions a step the floor of neither pass through the blocks is that of the link."""
    assert hardware.link is not None
    passes = list(_passes(demand, policy))[:-1]
    needed = 0.0
    for of_pass in (passes[0::2], passes[1::2]):
        copies = max(sum(p.bytes_in for p in of_pass), sum(p.bytes_out for p in of_pass)) / hardware.link
        arithmetic = sum(p.flops for p in of_pass) / (hardware.tflops * 1e12)
        needed = max(needed, copies / arithmetic)
    return round(needed * demand.tokens)
