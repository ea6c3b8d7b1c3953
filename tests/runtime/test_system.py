import sys
import types

import pytest

from fluxray.runtime.system import GIB, SystemMetrics


class FakeNvml(types.ModuleType):
    """Two cards; the second has no load of its own."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index > 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if handle == 1:
            raise self.NVMLError
        return types.SimpleNamespace(gpu=75)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return types.SimpleNamespace(used=(handle + 1) * GIB)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"system/gpu0_percent": 75, "system/gpu0_memory_gib": 1, "system/gpu1_memory_gib": 2}),
        ("1,0", {"system/gpu0_memory_gib": 2, "system/gpu1_percent": 75, "system/gpu1_memory_gib": 1}),
        ("GPU-b", {"system/gpu0_memory_gib": 2}),
        ("0,9,1", {"system/gpu0_percent": 75, "system/gpu0_memory_gib": 1}),
    ],
)
def test_gpus_are_those_that_the_process_may_see(monkeypatch, visible, expected):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = SystemMetrics().read()
    assert {key: value for key, value in found.items() if "gpu" in key} == expected


def test_the_host_is_read_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = SystemMetrics().read()
    assert 0 <= found["system/cpu_percent"] <= 100
    assert 0 < found["system/memory_percent"] < 100
    assert found["system/memory_gib"] > 0


@pytest.mark.gpu
def test_a_real_gpu_is_read():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.zeros(2**28, device="cuda")
    found = SystemMetrics().read()
    assert found["system/gpu0_memory_gib"] > 0.25
