"""A memory plan in words, and next to what was measured."""

from collections.abc import Iterator, Mapping

from fluxray.memory.estimate import GIB
from fluxray.memory.plan import HOST_SHARE, MemoryPlan

GB = 10**9


def table(plan: MemoryPlan) -> list[str]:
    """Return what goes where, against the limits, and how fast a step is: lines for people."""
    figures = [f"{key} {source}" for key, source in plan.hardware.sources.items()]
    halves = [", ".join(figures[:3]), ", ".join(figures[3:])]
    hardware = [f"{'hardware' if i == 0 else '':<18}{half}" for i, half in enumerate(halves) if half]
    return [*_places(plan), *_speed(plan), *hardware]


def summary(plan: MemoryPlan) -> list[str]:
    """Return the plan in two lines: where it takes how much of what there is, and what a step waits for."""
    policy, speed = plan.policy, plan.speed
    limits = {"device": plan.hardware.device_bytes, "host": plan.host_limit}
    needed = {"device": plan.device_bytes, "host": plan.host_bytes}
    places = ", ".join(
        f"{place} {_gib(needed[place])}" + (f" of {_gib(limit)}" if limit is not None else "") + " GiB"
        for place, limit in limits.items()
    )
    how = f"; {policy.resident_blocks} of {len(plan.demand.blocks)} blocks resident, activations of {policy.kept_blocks} kept"
    if not plan.demand.spec.told:
        how += f", logits of {policy.epilogue_tokens:,} tokens at once"
    return [
        f"plan: {places}{how if plan.demand.engine == 'stream' else ''}",
        f"plan: {_seconds(speed.seconds)} a step, {plan.demand.tokens / speed.seconds:,.0f} tokens/s; bound by {_bounds(plan)}; "
        f"floor {_seconds(speed.floor)}",
    ]


def reason(plan: MemoryPlan) -> str:
    """Return in one line where a plan that does not fit lacks how much, and what takes most there."""
    words: list[str] = []
    for short in plan.shortfalls:
        categories: Mapping[str, int] = getattr(plan.bytes, short.place)
        name = max(categories, key=lambda name: categories[name])
        words.append(
            f"{short.place} memory lacks {_gib(short.missing)} GiB of {_gib(short.needed)} (most: {name}, "
            f"{_gib(categories[name])} GiB)"
            if short.place != "disk"
            else f"the disk lacks {_gib(short.missing)} GiB of {_gib(short.needed)} for checkpoints"
        )
    return "; ".join(words)


def comparison(plan: MemoryPlan, measured: Mapping[str, int]) -> list[str]:
    """Return a line for each measured number of bytes, with the planned one beside it.

    Keys are `device`, `host` and `disk` for totals, or a place and a category, such as `device slots`. ValueError for others.
    """
    planned = plan.by_name
    unknown = [name for name in measured if name not in planned]
    if unknown:
        raise ValueError(f"{unknown[0]} is not in the plan; it has {', '.join(planned)}")
    lines: list[str] = []
    for name, found in measured.items():
        ratio = f", {(found - planned[name]) / planned[name]:+.1%}" if planned[name] else ""
        lines.append(f"memory of {name}: planned {planned[name] / GIB:.2f} GiB, measured {found / GIB:.2f} GiB{ratio}")
    return lines


def _places(plan: MemoryPlan) -> Iterator[str]:
    short = {shortfall.place: shortfall for shortfall in plan.shortfalls}
    limits = {"device": plan.hardware.device_bytes, "host": plan.host_limit, "disk": plan.hardware.disk_bytes}
    for place, limit in limits.items():
        categories: Mapping[str, int] = getattr(plan.bytes, place)
        total = sum(categories.values())
        yield f"{place:<18}{'GiB':>8}"
        for name, count in categories.items():
            if count:
                yield f"  {name:<16}{_gib(count):>8}"
        of_limit = "no limit set" if limit is None else f"of {_gib(limit)}"
        share = f" ({HOST_SHARE:.0%} of hardware.host_memory)" if place == "host" and limit is not None else ""
        verdict = f"  LACKS {_gib(short[place].missing)}" if place in short else ""
        yield f"  {'total':<16}{_gib(total):>8}  {total / GB:.1f} GB, {of_limit}{share}{verdict}"


def _speed(plan: MemoryPlan) -> Iterator[str]:
    speed, tokens = plan.speed, plan.demand.tokens
    rows = plan.demand.rank_rows * plan.demand.num_ranks
    what = "images" if plan.demand.spec.told else "rows"
    rates = f"{tokens / speed.seconds:,.0f} tokens/s, {rows / speed.seconds:.3g} {what}/s"
    yield f"{'speed':<18}{_seconds(speed.seconds)} a step, {rates}"
    yield f"{'bound by':<18}{_bounds(plan)}"
    share = f"{plan.hardware.block_share:.0%} of the matrix rate"
    yield f"{'floor':<18}{_seconds(speed.floor)} a step; expected are {share} inside the blocks"
    if speed.hiding_tokens is not None:
        where = "above" if tokens >= speed.hiding_tokens else "below"
        yield f"{'transfers':<18}hide from {speed.hiding_tokens:,} tokens a step on; this run is {where}"
    unknown = {"what the ranks exchange": plan.demand.num_ranks > 1, "the optimizer's step on the host": plan.demand.cpu_offload}
    if any(unknown.values()):
        yield f"{'left out':<18}{', '.join(what for what, is_there in unknown.items() if is_there)}"


def _bounds(plan: MemoryPlan) -> str:
    speed = plan.speed
    shares = sorted(speed.by.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds / speed.seconds:.0%}" for name, seconds in shares if seconds >= 0.005 * speed.seconds)


def _gib(count: int) -> str:
    return f"{count / GIB:,.2f}" if count < 10 * GIB else f"{count / GIB:,.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
