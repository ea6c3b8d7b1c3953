"""How many trials run at a time: as many as never wait for each other's resources, wherever Ray puts them.

A trial is its driver, a small share of a CPU on any node, and its workers. A driver holds its share while it waits for workers,
so too many at once would leave none of them room. What Ray knows only as numbers is counted as it is placed: a worker lies on
one node, a share of a GPU on one card.
"""

import math
from collections.abc import Sequence

from fluxray.config.schema import ResourcesConfig
from fluxray.errors import PlanError
from fluxray.runtime.cluster import GRAIN, Node, check_fits, matching, room

DRIVER_CPU = 0.1
"""What Ray sets aside for a trial's driver, which mostly waits."""

MAX_AT_ONCE = 512
"""A process and some 300 MB each for their drivers alone."""


def largest(needs: Sequence[ResourcesConfig]) -> ResourcesConfig:
    """Return what is enough for any of several trials: the most workers, each with the most CPUs and GPUs."""
    return needs[0].model_copy(
        update={key: max(getattr(need, key) for need in needs) for key in ("num_workers", "cpu", "gpu", "wait_s")}
    )


def max_concurrent(nodes: Sequence[Node], asked: ResourcesConfig, wanted: int) -> int:
    """Return how many of `wanted` trials that ask for `asked` run at once on `nodes`, all free, and never wait for each other.

    Trials that ask for less count as if they asked for `asked`: one of their workers takes at most the room of one of its.
    Raises PlanError if not even one fits.
    """
    check_fits(asked, nodes)
    fitting = matching(nodes, asked)
    for number in range(min(wanted, MAX_AT_ONCE), 0, -1):
        if _drivers_fit(nodes, number) and _least_room(fitting, asked, number) >= number * asked.num_workers:
            return number
    raise PlanError(
        f"resources.cpu: {asked.num_workers} workers of {asked.cpu:g} CPUs fit, but not beside the {DRIVER_CPU:g} CPUs of their "
        f"trial's driver; set resources.cpu={_just_fitting(nodes, asked):g}"
    )


def _drivers_fit(nodes: Sequence[Node], number: int) -> bool:
    return sum(_num_drivers(node, number) for node in nodes) >= number


def _num_drivers(node: Node, limit: int) -> int:
    return min(limit, math.floor((node.resources.get("CPU", 0) + GRAIN) / DRIVER_CPU))


def _least_room(nodes: Sequence[Node], asked: ResourcesConfig, number: int) -> int:
    """Return for how many workers there is room when `number` drivers lie where they take most of it."""
    lost = [0] * (number + 1)  # by drivers placed so far: the most room that they take
    for node in nodes:
        whole = room(node, asked)
        takes = [whole - room(_without(node, count), asked) for count in range(_num_drivers(node, number) + 1)]
        useful = [count for count in range(len(takes)) if count == 0 or takes[count] > takes[count - 1]]
        lost = [max(lost[placed - count] + takes[count] for count in useful if count <= placed) for placed in range(number + 1)]
    return sum(room(node, asked) for node in nodes) - lost[number]


def _without(node: Node, num_drivers: int) -> Node:
    return Node({**node.resources, "CPU": node.resources.get("CPU", 0) - num_drivers * DRIVER_CPU}, node.labels)


def _just_fitting(nodes: Sequence[Node], asked: ResourcesConfig) -> float:
    """Return a number of CPUs a worker with which one trial fits, rounded down."""
    share = asked.cpu
    while share > GRAIN and _least_room(matching(nodes, asked), asked.model_copy(update={"cpu": share}), 1) < asked.num_workers:
        share *= 0.95
    return float(f"{share * 0.98:.1g}")
