import sys
from types import SimpleNamespace

import pytest

from fluxray.errors import ConfigError
from fluxray.memory.estimate import CONTEXT_BYTES
from fluxray.runtime.sharing import allocator_share, served_card


@pytest.fixture
def two_cards(monkeypatch):
    """NVML on a machine with cards of 40 and 80 GB."""
    sizes = [40 * 10**9, 80 * 10**9]

    def unknown(uuid):
        raise ValueError(uuid)

    nvml = SimpleNamespace(
        NVMLError=ValueError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(sizes),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=unknown,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=sizes[handle]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


@pytest.mark.usefixtures("two_cards")
def test_the_card_of_this_process_counts_and_only_where_an_mps_server_listens(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert served_card() is None
    (tmp_path / "control").touch()
    assert served_card() == 80 * 10**9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert served_card() is None


@pytest.mark.parametrize(
    ("asked", "device_memory", "used", "share"),
    [
        (1, None, 0.4e9, 1),
        (2, None, 0.4e9, 1),
        (0.25, None, 0.4e9, (12.5e9 - CONTEXT_BYTES) / 50e9),
        (0.5, None, 30e9, (25e9 - CONTEXT_BYTES) / 50e9),  # beside a neighbour
        (1, 45e9, 0.5e9, 44.5 / 50),
        (1, 45e9, 20e9, (45e9 - CONTEXT_BYTES) / 50e9),  # others are on the card; a context is counted as the plan does
        (0.5, 45e9, 0.5e9, (25e9 - CONTEXT_BYTES) / 50e9),
        (0.5, 20e9, 0.5e9, (20e9 - CONTEXT_BYTES) / 50e9),
        (1, 0.1e9, 0.5e9, 0),
    ],
)
def test_the_allocator_gets_what_the_context_leaves_of_the_limit(asked, device_memory, used, share):
    limit = None if device_memory is None else int(device_memory)
    assert allocator_share(asked, limit, 50 * 10**9, int(used)) == pytest.approx(share)


def test_shares_that_add_up_fit_the_card_with_their_contexts():
    total = 50 * 10**9
    assert 2 * (allocator_share(0.5, None, total, 0) * total + CONTEXT_BYTES) <= total


def test_a_card_smaller_than_the_plan_believes_is_refused():
    with pytest.raises(ConfigError, match=r"^hardware\.device_memory: 45 GB, but the card has 24 GB; lower it, or set null$"):
        allocator_share(1, 45 * 10**9, 24 * 10**9, 10**9)
