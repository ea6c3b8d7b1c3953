import threading
from pathlib import Path

import pytest
import torch

from fluxray import checkpoint
from fluxray.errors import CheckpointError
from fluxray.protocols import RunState, Schedule, StateItem
from fluxray.ranks import ALONE, Ranks
from fluxray.runtime.saver import HostCopy, Saver

STATE = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=3)


def items_of(**tensors: torch.Tensor) -> list[StateItem]:
    return [StateItem("weights", name, tuple(tensor.shape), None, tensor) for name, tensor in tensors.items()]


def gated() -> tuple[Ranks, threading.Event]:
    """Return a run of one worker whose saves get no further than their first agreement until the event is set."""
    gate = threading.Event()

    def gather(value: object) -> list[object]:
        assert gate.wait(30)
        return [value]

    return Ranks(gather=gather), gate


def test_what_is_saved_is_the_state_at_the_call_however_late_it_is_written(tmp_path: Path) -> None:
    ranks, gate = gated()
    weight = torch.arange(6.0).view(2, 3)
    saved = Saver(tmp_path, ranks, asynchronous=True).save(STATE, items_of(w=weight, step=torch.tensor(3.0)))
    weight.fill_(-1)
    assert checkpoint.committed(tmp_path) == []
    gate.set()
    assert saved.wait() > 0
    assert checkpoint.committed(tmp_path) == [saved.path]
    reader = checkpoint.CheckpointReader(saved.path)
    assert torch.equal(reader.read("weights", "w"), torch.arange(6.0).view(2, 3))
    assert reader.read("weights", "step") == 3


def test_without_asynchronous_it_is_durable_at_once(tmp_path: Path) -> None:
    saved = Saver(tmp_path, ALONE, asynchronous=False).save(STATE, items_of(w=torch.ones(2)))
    assert checkpoint.committed(tmp_path) == [saved.path]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_refuses_is_a_fault_for_whoever_waits(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "run").write_text("a file where the run's folder should be")
    saved = Saver(tmp_path / "run", ALONE, asynchronous).save(STATE, items_of(w=torch.ones(2)))
    with pytest.raises(CheckpointError, match="cannot be written"):
        saved.wait()


def test_a_copy_uses_its_memory_again_and_keeps_dtypes_and_shapes() -> None:
    copy = HostCopy()
    first = items_of(a=torch.randn(3, 5), b=torch.randn(7).to(torch.bfloat16), c=torch.tensor(2.0), d=torch.empty(0, 4))
    held = copy.take(first)
    assert [item.tensor.dtype for item in held] == [item.tensor.dtype for item in first]
    assert all(torch.equal(kept.tensor, item.tensor) for kept, item in zip(held, first, strict=True))
    second = [item._replace(tensor=item.tensor + 1) for item in first]
    again = copy.take(second)
    assert [item.tensor.data_ptr() for item in again[:3]] == [item.tensor.data_ptr() for item in held[:3]]
    assert all(torch.equal(kept.tensor, item.tensor) for kept, item in zip(again, second, strict=True))
    larger = items_of(a=torch.randn(300, 5))
    assert torch.equal(copy.take(larger)[0].tensor, larger[0].tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_copy_from_the_gpu_is_page_locked_and_complete() -> None:
    copy = HostCopy()
    for _ in range(2):
        items = items_of(a=torch.randn(1 << 20, device="cuda"), b=torch.randn(3, device="cuda"))
        held = copy.take(items)
        assert held[0].tensor.is_pinned()
        assert all(torch.equal(kept.tensor, item.tensor.cpu()) for kept, item in zip(held, items, strict=True))
