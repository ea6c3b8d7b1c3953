import sys
from types import SimpleNamespace

import pytest

from fluxray.runtime.sharing import served_card


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
