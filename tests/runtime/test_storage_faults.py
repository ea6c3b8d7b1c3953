"""What a storage can do to a run: 300 seeded faults, each of which must end in the right checkpoint or in one clear line."""

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fluxray import checkpoint
from fluxray.errors import CheckpointError, DamagedCheckpointError
from fluxray.protocols import RunState, Schedule, StateItem
from fluxray.ranks import ALONE
from fluxray.runtime.saver import Saver

STEPS = (1, 2, 3)
NUM_FAULTS = 300


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Return what the run holds after a step; different after each."""
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(20, 4, generator=generator), "b": torch.randn(3, generator=generator)}


def items(step: int) -> list[StateItem]:
    sections = ("weights", "exp_avg")
    return [StateItem(section, name, tuple(t.shape), None, t) for section in sections for name, t in tensors(step).items()]


def state(step: int) -> RunState:
    return RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=step, position=step)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("healthy")
    for step in STEPS:
        checkpoint.save(run_dir, state(step), items(step))
    return run_dir


def damage(directory: Path, draw: random.Random) -> str:
    """Do one thing to one file of a checkpoint, and return what."""
    victim = draw.choice(sorted(directory.iterdir()))
    content = victim.read_bytes()
    kind = draw.choice(("truncated", "flipped", "vanished", "emptied", "zeroed", "unreadable directory in its place"))
    if kind == "truncated":
        victim.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "flipped":
        position = draw.randrange(len(content))
        victim.write_bytes(content[:position] + bytes([content[position] ^ (1 << draw.randrange(8))]) + content[position + 1 :])
    elif kind == "emptied":
        victim.write_bytes(b"")
    elif kind == "zeroed":
        victim.write_bytes(bytes(len(content)))
    else:
        victim.unlink()
        if kind != "vanished":
            victim.mkdir()
    return f"{victim.name} {kind}"


def loaded(directory: Path) -> checkpoint.CheckpointReader:
    """Open a checkpoint and read all of it, as an engine does."""
    reader = checkpoint.CheckpointReader(directory)
    for name in reader.names():
        for section in reader.sections(name):
            reader.read(section, name)
    return reader


@pytest.mark.parametrize("seed", range(10))
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(healthy: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(NUM_FAULTS // 10):
        run_dir = tmp_path / str(number)
        shutil.copytree(healthy, run_dir)
        candidates = checkpoint.committed(run_dir)
        num_damaged = draw.choice((1, 1, 1, 2, 3))
        done = [damage(directory, draw) for directory in candidates[:num_damaged]]
        notices: list[str] = []
        try:
            reader = checkpoint.open_newest(candidates, notices.append, loaded)
        except DamagedCheckpointError:
            assert num_damaged == 3, done
            continue
        assert reader is not None, done
        step = reader.state.step
        # a flip that changes no value, in the blanks of a header, may leave a checkpoint as good as it was
        assert step >= STEPS[-1] - num_damaged, done
        assert reader.state == state(step), done
        assert all(torch.equal(reader.read("weights", name), tensor) for name, tensor in tensors(step).items()), done
        assert all(torch.equal(reader.read("exp_avg", name), tensor) for name, tensor in tensors(step).items()), done
        assert len(notices) == STEPS[-1] - step and all("\n" not in notice for notice in notices), done


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_one_line_and_what_was_saved_stays(full_disk: Path, asynchronous: bool) -> None:
    saver = Saver(full_disk, ALONE, asynchronous)
    saved = [saver.save(state(1), items(1))]
    saved[0].wait()
    with pytest.raises(CheckpointError, match=r"^storage: .* cannot be written \(No space left on device\); free space there"):
        for step in range(2, 20):
            saved.append(saver.save(state(step), items(step)))
            saved[-1].wait()
    whole = checkpoint.committed(full_disk)
    assert [path for path in whole if path == saved[-1].path] == []
    reader = checkpoint.open_newest(whole, pytest.fail, loaded)
    assert reader is not None and torch.equal(reader.read("weights", "w"), tensors(reader.state.step)["w"])
    for old in whole:
        shutil.rmtree(old)
    again = saver.save(state(20), items(20))
    again.wait()
    assert checkpoint.committed(full_disk) == [again.path]


def test_a_slow_disk_does_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = checkpoint.os.fsync
    monkeypatch.setattr(checkpoint.os, "fsync", lambda descriptor: (time.sleep(0.2), sync(descriptor))[1])
    start = time.perf_counter()
    saved = Saver(tmp_path, ALONE, asynchronous=True).save(state(1), items(1))
    returned = time.perf_counter() - start
    durable = saved.wait()
    assert returned < durable / 2
    assert checkpoint.committed(tmp_path) == [saved.path]
