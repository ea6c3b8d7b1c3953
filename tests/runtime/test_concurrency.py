"""How many trials run at once: under every way of placing them none waits, and one more could."""

import itertools
import random

import pytest

from fluxray.config.schema import ResourcesConfig
from fluxray.errors import PlanError
from fluxray.runtime.cluster import Node, room
from fluxray.runtime.concurrency import DRIVER_CPU, largest, max_concurrent


def node(cpu, gpu=0, **labels):
    return Node({"CPU": cpu, "GPU": gpu}, labels)


def least_places(nodes, asked, number):
    """Return the fewest workers for which there is room, over all ways in which so many drivers can lie; None if they cannot."""
    fewest = None
    for counts in itertools.product(range(number + 1), repeat=len(nodes)):
        left = [round(one.resources["CPU"] - DRIVER_CPU * count, 6) for one, count in zip(nodes, counts, strict=True)]
        if sum(counts) == number and min(left) >= 0:
            places = sum(room(Node({**one.resources, "CPU": cpu}, {}), asked) for one, cpu in zip(nodes, left, strict=True))
            fewest = places if fewest is None else min(fewest, places)
    return fewest


@pytest.mark.parametrize("seed", range(150))
def test_no_placement_lets_a_trial_wait_and_one_more_could(seed):
    stream = random.Random(seed)
    with_gpus = stream.random() < 0.5
    nodes = [
        node(stream.choice([0.5, 1, 1.5, 2, 3, 4]), stream.randint(0, 2) if with_gpus else 0) for _ in range(stream.randint(1, 3))
    ]
    gpu = stream.choice([0.2, 0.34, 0.5, 1]) if with_gpus else 0
    asked = ResourcesConfig(num_workers=stream.randint(1, 3), cpu=stream.choice([0.1, 0.4, 0.5, 0.9, 1, 2]), gpu=gpu)
    wanted = stream.randint(1, 5)
    try:
        number = max_concurrent(nodes, asked, wanted)
    except PlanError:
        number = 0
    if number:
        places = least_places(nodes, asked, number)
        assert places is not None and places >= number * asked.num_workers
    if number < wanted:
        places = least_places(nodes, asked, number + 1)
        assert places is None or places < (number + 1) * asked.num_workers


@pytest.mark.parametrize("seed", range(50))
def test_trials_that_ask_for_less_fit_in_any_order(seed):
    stream = random.Random(seed)
    needs = [
        ResourcesConfig(num_workers=stream.randint(1, 3), cpu=stream.choice([0.2, 0.5, 0.7, 1.0]))
        for _ in range(stream.randint(1, 6))
    ]
    nodes = [node(stream.choice([2, 3, 4])) for _ in range(stream.randint(1, 3))]
    try:
        number = max_concurrent(nodes, largest(needs), len(needs))
    except PlanError:
        return
    free = [one.resources["CPU"] for one in nodes]
    for _ in range(number):
        index = stream.choice([i for i, cpu in enumerate(free) if cpu >= DRIVER_CPU])
        free[index] = round(free[index] - DRIVER_CPU, 6)
    for need in stream.sample(needs, number):
        for _ in range(need.num_workers):
            fitting = [i for i, cpu in enumerate(free) if cpu >= need.cpu]
            assert fitting, "a worker would wait"
            index = stream.choice(fitting)
            free[index] = round(free[index] - need.cpu, 6)


@pytest.mark.parametrize(
    ("nodes", "asked", "number"),
    [
        ([node(2)], ResourcesConfig(cpu=0.9), 2),
        ([node(2)], ResourcesConfig(cpu=1), 1),
        ([node(16, 1)], ResourcesConfig(cpu=4, gpu=1), 1),
        ([node(16, 1)], ResourcesConfig(cpu=4, gpu=0.33), 3),
        ([node(16, 2)], ResourcesConfig(cpu=1, gpu=0.4), 4),
        ([node(128, 8)], ResourcesConfig(num_workers=8, cpu=4, gpu=1), 1),
        ([node(128, 8)], ResourcesConfig(num_workers=2, cpu=4, gpu=1), 4),
    ],
)
def test_usual_shapes(nodes, asked, number):
    assert max_concurrent(nodes, asked, 100) == number


def test_a_trial_larger_than_the_cluster_is_refused():
    with pytest.raises(
        PlanError, match=r"^resources\.num_workers: 3 workers of 1 CPU each are asked for, the cluster has .*2 CPUs"
    ):
        max_concurrent([node(2)], ResourcesConfig(num_workers=3), 10)
    with pytest.raises(PlanError, match=r"^resources\.cpu: 2 workers of 1 CPUs fit, but not beside .*set resources\.cpu=0\.9"):
        max_concurrent([node(2)], ResourcesConfig(num_workers=2), 10)


def test_a_share_of_a_card_lies_on_one_card():
    assert room(node(8, 3), ResourcesConfig(cpu=0.1, gpu=0.4)) == 6
    assert room(node(8, 3), ResourcesConfig(cpu=0.1, gpu=0.2)) == 15
    assert room(node(8, 3), ResourcesConfig(cpu=0.1, gpu=1)) == 3
