from dataclasses import dataclass, replace

import pytest

from fluxray.errors import PlanError
from fluxray.memory.estimate import GIB
from fluxray.runtime import hostmemory
from fluxray.runtime.hostmemory import HostWatch, require_room
from tests.memory.helpers import planned


@dataclass(frozen=True)
class Memory:
    total: int = 100 * GIB
    available: int = 50 * GIB


@pytest.fixture
def host(monkeypatch):
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    memory = [Memory()]
    notices: list[str] = []
    return memory, HostWatch("stream", notices.append, lambda: memory[0]), notices


def test_a_host_that_runs_short_is_told_once_each_time(host):
    memory, watch, notices = host
    for available, told in [(50, 0), (8, 0), (6.9, 1), (3, 1), (20, 1), (6, 2)]:
        memory[0] = replace(memory[0], available=int(available * GIB))
        watch.look()
        assert len(notices) == told
    assert notices[0] == (
        "host memory: 6.9 of 100.0 GiB are free, and Ray ends workers above 95%: stop other programs there, or at the next start "
        "set optim.master=stochastic or more engine.resident_blocks"
    )


def test_rays_threshold_is_the_users(host, monkeypatch):
    memory, watch, notices = host
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.6")
    memory[0] = replace(memory[0], available=41 * GIB)
    watch.look()
    assert "above 60%" in notices[0]


def test_blocks_that_find_no_room_are_refused_before_anything_is_allocated(monkeypatch):
    found = planned("neox-20b")
    monkeypatch.setattr(hostmemory.psutil, "virtual_memory", lambda: Memory(128 * GIB, 94 * GIB))
    monkeypatch.setattr(hostmemory, "container_limit", lambda: None)
    require_room(found)
    monkeypatch.setattr(hostmemory, "container_limit", lambda: 64 * GIB)
    with pytest.raises(PlanError) as refused:
        require_room(found)
    assert str(refused.value) == (
        "hardware.host_memory: the blocks take 93.4 GiB, and 64.0 of this host's 128.0 GiB are free; stop other programs, set "
        "optim.master=stochastic or more engine.resident_blocks, or choose a larger host"
    )
