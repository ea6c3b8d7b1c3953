"""The memory plan: the fastest policy that fits device, host and disk."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fluxray.memory.checkpointing import choose
from fluxray.memory.estimate import FULL_CHUNK, Demand, Estimate, Policy, estimate
from fluxray.memory.speed import Hardware, Speed, predict

HOST_SHARE = 0.95
"""Of the host's memory; above it Ray ends workers (its default threshold)."""

SMALLEST_CHUNK = 256
"""Positions of logits below which smaller chunks save nothing worth the launches."""

SAME_SPEED = 1.001
"""A policy must be faster by more than this to be worth more memory."""


SPARE_SHARE = 0.06
"""Of the device that stays free where activations are kept for speed alone: what an allocator may lose to fragmentation."""


GROUP_SPARE_SHARE = 0.10
"""The same where blocks are gathered: they come and go on streams of their own, whose free memory the others cannot use."""


@dataclass(frozen=True)
class Wanted:
    """The parts of the policy that the configuration fixes; None leaves the choice to the plan."""

    weight_slots: int = 3
    state_slots: int = 3
    resident_blocks: int | None = None
    kept_blocks: int | None = None
    epilogue_tokens: int | None = None


@dataclass(frozen=True)
class Shortfall:
    """Where a plan does not fit: `place` is device, host or disk."""

    place: str
    needed: int
    limit: int

    @property
    def missing(self) -> int:
        """Bytes over the limit."""
        return self.needed - self.limit


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will take and how fast it will be, worked out before anything is allocated."""

    demand: Demand
    policy: Policy
    hardware: Hardware
    bytes: Estimate
    speed: Speed

    @property
    def device_bytes(self) -> int:
        """Bytes of one device, as nvidia-smi counts them."""
        return sum(self.bytes.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of one host."""
        return sum(self.bytes.host.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of the folder with the checkpoints."""
        return sum(self.bytes.disk.values())

    @property
    def by_name(self) -> dict[str, int]:
        """Planned bytes by `device`, `host` and `disk` for totals, and by a place and a category, such as `device slots`."""
        found = {"device": self.device_bytes, "host": self.host_bytes, "disk": self.disk_bytes}
        for place in tuple(found):
            found.update({f"{place} {name}": n for name, n in getattr(self.bytes, place).items()})
        return found

    @property
    def floor_flops(self) -> float:
        """Model FLOPs/s of all devices with nothing lost."""
        return self.demand.spec.step_flops * self.demand.rank_rows * self.demand.num_ranks / self.speed.floor

    @property
    def host_limit(self) -> int | None:
        """Bytes of the host that a run may take."""
        return None if self.hardware.host_bytes is None else int(HOST_SHARE * self.hardware.host_bytes)

    @property
    def shortfalls(self) -> tuple[Shortfall, ...]:
        """Where the plan does not fit; empty if it does."""
        hardware = self.hardware
        needed = self.device_bytes, self.host_bytes, self.disk_bytes
        limits = hardware.device_bytes, self.host_limit, hardware.disk_bytes
        found = zip(("device", "host", "disk"), needed, limits, strict=True)
        return tuple(Shortfall(place, n, limit) for place, n, limit in found if limit is not None and n > limit)


def plan(demand: Demand, hardware: Hardware, wanted: Wanted) -> MemoryPlan:
    """Return the fastest plan that fits, with the fewest resident blocks that make it so fast.

    Activations are kept where the device then still has memory to spare and it makes a step faster.

    The logits' chunk is smaller than it might be only where nothing else would fit. If nothing fits, return the plan that lacks
    least on the device, then on the host; its `shortfalls` say what.
    """
    tried: list[MemoryPlan] = []
    best: MemoryPlan | None = None
    for policy in _policies(demand, wanted):
        if best is not None and policy.epilogue_tokens < best.policy.epilogue_tokens:
            break
        one = _planned(demand, policy, hardware)
        tried.append(one)
        if not one.shortfalls and (best is None or one.speed.seconds * SAME_SPEED < best.speed.seconds):
            best = one
    if best is not None and wanted.kept_blocks is None:
        return _with_kept(best)
    return best or min(tried, key=_lack)


def fitting_sizes(found: MemoryPlan, sizes: Iterable[int], misfits: bool = False) -> dict[int, int]:
    """Return bytes of one device by rows of a micro-batch, of those sizes for which the device has the memory, or of all."""
    plans = [cut_anew(found, size) for size in sizes]
    fitting = [one for one in plans if misfits or all(short.place != "device" for short in one.shortfalls)]
    return {one.demand.micro_rows: one.device_bytes for one in fitting}


def cut_anew(found: MemoryPlan, micro_rows: int) -> MemoryPlan:
    """Return the plan of the same step under the same policy, cut into micro-batches of `micro_rows`; its speed stays."""
    demand = replace(found.demand, micro_rows=micro_rows, num_micro_batches=found.demand.rank_rows // micro_rows)
    whole = demand.engine == "sharded" and found.policy.epilogue_tokens == found.demand.micro_tokens
    policy = replace(found.policy, epilogue_tokens=demand.micro_tokens) if whole else found.policy
    return replace(found, demand=demand, policy=policy, bytes=estimate(demand, policy))


def _planned(demand: Demand, policy: Policy, hardware: Hardware) -> MemoryPlan:
    budget = _spare(demand, policy, hardware) if demand.checkpoint_budget is None else demand.checkpoint_budget
    kept = choose(demand, policy.kept_blocks, budget)
    policy = replace(policy, kept_operations=kept, checkpoint_budget=budget)
    return MemoryPlan(demand, policy, hardware, estimate(demand, policy), predict(demand, policy, hardware))


def _spare(demand: Demand, policy: Policy, hardware: Hardware) -> int:
    """Return the bytes of a device that nothing takes while every block is computed again, less those that stay free."""
    if demand.activation_checkpoint != "selective" or demand.hides_operations or hardware.device_bytes is None:
        return 0
    share = GROUP_SPARE_SHARE if demand.gathers else SPARE_SHARE
    taken = sum(estimate(demand, replace(policy, kept_operations=())).device.values())
    return max(0, int((1 - share) * hardware.device_bytes) - taken)


def _with_kept(found: MemoryPlan) -> MemoryPlan:
    """Return the plan with as many blocks keeping their activations as spare memory allows and as make it faster."""
    demand, hardware = found.demand, found.hardware
    limit = None if hardware.device_bytes is None else (1 - SPARE_SHARE) * hardware.device_bytes
    best = found
    for num_kept in range(1, len(demand.blocks)):
        policy = replace(found.policy, kept_blocks=num_kept)
        one = _planned(demand, policy, hardware)
        if one.shortfalls or (limit is not None and one.device_bytes > limit):
            break
        if one.speed.seconds * SAME_SPEED < best.speed.seconds:
            best = one
    return best


def _policies(demand: Demand, wanted: Wanted) -> Iterator[Policy]:
    """Yield what may be chosen from: the largest chunk of logits and the fewest resident blocks first."""
    base = Policy(wanted.weight_slots, wanted.state_slots, kept_blocks=wanted.kept_blocks or 0)
    if demand.engine == "sharded":
        yield replace(base, epilogue_tokens=wanted.epilogue_tokens or demand.micro_tokens)
        return
    chunk = wanted.epilogue_tokens or min(FULL_CHUNK, demand.micro_tokens)
    smallest = chunk if wanted.epilogue_tokens else min(SMALLEST_CHUNK, chunk)
    counts = range(len(demand.blocks) + 1) if wanted.resident_blocks is None else [wanted.resident_blocks]
    while chunk >= smallest:
        for num_resident in counts:
            yield replace(base, epilogue_tokens=chunk, resident_blocks=num_resident)
        chunk //= 2


def _lack(found: MemoryPlan) -> tuple[int, int]:
    missing = {shortfall.place: shortfall.missing for shortfall in found.shortfalls}
    return missing.get("device", 0), missing.get("host", 0)
