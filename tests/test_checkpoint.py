import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fluxray.checkpoint import CheckpointReader, committed, directory_name, open_newest, save
from fluxray.errors import CheckpointError, DamagedCheckpointError
from fluxray.protocols import RunState, Schedule, StateItem
from fluxray.ranks import Ranks

STATE = RunState(seed=3, schedule=Schedule("cosine", 1e-3, 5, 100, 0.1), step=7, epoch=2, position=11, num_tokens=12345678901)
TENSORS = {
    ("weights", "embed.weight"): torch.arange(30.0).view(10, 3),
    ("weights", "norm.bias"): torch.arange(3.0),
    ("exp_avg", "embed.weight"): -torch.arange(30.0).view(10, 3),
    ("exp_avg_sq", "embed.weight"): torch.arange(30.0).view(10, 3).to(torch.bfloat16),
    ("step", "embed.weight"): torch.tensor(7.0),
    ("step", "norm.bias"): torch.tensor(8.0),
}


def pieces(cuts: list[int], rank: int) -> Iterator[StateItem]:
    """Yield rank's rows of every tensor, cut as `cuts` says (rows a rank, the last one takes the rest); 0-d tensors are whole."""
    for (section, name), tensor in TENSORS.items():
        if tensor.ndim == 0:
            yield StateItem(section, name, (), None, tensor)
            continue
        bounds = [min(sum(cuts[:r]), len(tensor)) for r in range(len(cuts))] + [len(tensor)]
        yield StateItem(section, name, tuple(tensor.shape), bounds[rank], tensor[bounds[rank] : bounds[rank + 1]])


def meeting(num_ranks: int) -> Callable[[int, object], list[object]]:
    """Return what threads that stand for ranks gather with."""
    barrier, values = threading.Barrier(num_ranks), [None] * num_ranks

    def gather(rank: int, value: object) -> list[object]:
        values[rank] = value
        barrier.wait(30)
        gathered = list(values)
        barrier.wait(30)
        return gathered

    return gather


def save_all(run_dir: Path, cuts: list[int], state: RunState = STATE) -> Path:
    """Save from as many ranks as there are cuts, one thread each."""
    gather = meeting(len(cuts))
    folders: list[Path | None] = [None] * len(cuts)

    def run(rank: int) -> None:
        folders[rank] = save(run_dir, state, pieces(cuts, rank), Ranks(rank, len(cuts), lambda value: gather(rank, value)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(cuts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1 and folders[0] is not None
    return folders[0]


def save_one(run_dir: Path, step: int = 7, **tensors: torch.Tensor) -> Path:
    """Save from one rank; every tensor is a weight."""
    items = [
        StateItem("weights", name, tuple(tensor.shape), 0, tensor) for name, tensor in (tensors or {"w": torch.ones(4)}).items()
    ]
    return save(run_dir, RunState(0, STATE.schedule, step), items)


@pytest.mark.parametrize("cuts", [[10], [5, 5], [4, 4, 2], [10, 0, 0], [0, 3, 7], [2] * 8, [1, 9], [1] * 12])
def test_what_is_saved_is_read_back_from_any_cut(tmp_path: Path, cuts: list[int]) -> None:
    folder = save_all(tmp_path, cuts)
    assert folder == tmp_path / "step_00000007"
    reader = CheckpointReader(folder)
    assert reader.state == STATE
    assert list(reader.names()) == ["embed.weight", "norm.bias"]
    assert sorted(reader.sections("embed.weight")) == ["exp_avg", "exp_avg_sq", "step", "weights"]
    assert sorted(reader.sections("norm.bias")) == ["step", "weights"] and not reader.sections("other")
    for (section, name), tensor in TENSORS.items():
        assert reader.shape(section, name) == tuple(tensor.shape)
        whole = reader.read(section, name)
        assert whole.dtype == tensor.dtype and torch.equal(whole, tensor)


@pytest.mark.parametrize("cuts", [[10], [4, 4, 2], [0, 3, 7], [2] * 8])
def test_rows_are_read_across_pieces(tmp_path: Path, cuts: list[int]) -> None:
    reader = CheckpointReader(save_all(tmp_path, cuts))
    tensor = TENSORS["weights", "embed.weight"]
    for offset in range(11):
        for num_rows in range(11 - offset):
            rows = reader.read("weights", "embed.weight", offset, num_rows)
            assert rows.shape == (num_rows, 3) and torch.equal(rows, tensor[offset : offset + num_rows])
        assert torch.equal(reader.read("weights", "embed.weight", offset, None), tensor[offset:])


def test_rows_beyond_the_tensor_are_refused(tmp_path: Path) -> None:
    reader = CheckpointReader(save_all(tmp_path, [4, 6]))
    with pytest.raises(CheckpointError, match=r"embed\.weight has 10 rows, 12 are wanted; it is of another model"):
        reader.read("weights", "embed.weight", 8, 4)


def test_tensor_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    reader = CheckpointReader(save_all(tmp_path, [4, 6]))
    with pytest.raises(CheckpointError, match=r"holds no exp_avg of norm\.bias; it is of another model"):
        reader.read("exp_avg", "norm.bias")
    with pytest.raises(CheckpointError, match=r"holds no weights of other"):
        reader.shape("weights", "other")


def test_whole_tensors_are_written_by_the_first_rank_only(tmp_path: Path) -> None:
    gather = meeting(2)

    def run(rank: int) -> None:
        items = [StateItem("weights", "w", (2,), None, torch.full((2,), float(rank)))]
        save(tmp_path, STATE, items, Ranks(rank, 2, lambda value: gather(rank, value)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = tmp_path / "step_00000007"
    assert sorted(path.name for path in folder.glob("weights*")) == ["weights-00000-of-00002.safetensors"]
    assert CheckpointReader(folder).read("weights", "w").tolist() == [0.0, 0.0]


def test_tensors_of_every_kind_keep_their_bits(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    tensors = {
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
        "transposed": torch.randn(4, 6).t(),
        "first view": flat[:12].view(3, 4),
        "second view": flat[12:].view(4, 3),
        "bf16": torch.randn(5).to(torch.bfloat16),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "odd values": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "four dimensions": torch.randn(2, 3, 1, 2),
    }
    reader = CheckpointReader(save_one(tmp_path, **tensors))
    for name, tensor in tensors.items():
        actual = reader.read("weights", name)
        assert actual.dtype == tensor.dtype and actual.shape == tensor.shape, name
        assert torch.equal(actual.contiguous().view(torch.uint8), tensor.detach().contiguous().view(torch.uint8)), name


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    folder = save_all(tmp_path, [4, 4, 2])
    assert {path.suffix for path in folder.rglob("*")} == {".json", ".safetensors"}
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    listed = json.loads((folder / "checkpoint.json").read_text())["files"]
    assert set(listed) | {"checkpoint.json"} == {path.name for path in folder.iterdir()}


def test_only_committed_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    assert committed(tmp_path) == [] and committed(tmp_path / "nowhere") == []
    for step in (20, 3, 100, 9):
        save_one(tmp_path, step)
    shutil.copytree(tmp_path / directory_name(100), tmp_path / f"{directory_name(200)}.partial")
    (tmp_path / "step_00000300").write_text("no directory")
    (tmp_path / "model").mkdir()
    assert [path.name for path in committed(tmp_path)] == [directory_name(step) for step in (100, 20, 9, 3)]


@pytest.mark.parametrize("dies_at", ["first piece", "second rank", "commit"])
def test_interrupted_save_leaves_nothing_that_is_listed(tmp_path: Path, dies_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = save_one(tmp_path, 1)

    def dying() -> Iterator[StateItem]:
        yield StateItem("weights", "w", (4,), 0, torch.zeros(4))
        if dies_at == "first piece":
            raise KeyboardInterrupt

    calls = 0

    def gather(value: object) -> list[object]:
        nonlocal calls
        calls += 1
        if dies_at == "second rank" and calls == 2:
            raise RuntimeError("lost a rank")
        return [value]

    if dies_at == "commit":
        monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises((KeyboardInterrupt, RuntimeError, CheckpointError)):
        save(tmp_path, STATE, dying(), Ranks(gather=gather))
    assert committed(tmp_path) == [before]
    monkeypatch.undo()
    assert save(tmp_path, STATE, pieces([10], 0)) == committed(tmp_path)[0]
    assert not list(tmp_path.glob("*.partial"))


def test_same_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save_all(tmp_path, [4, 4, 2])
    folder = save_one(tmp_path, 7, w=torch.full((4,), 2.0))
    assert not list(folder.glob("*-of-00003*"))
    reader = CheckpointReader(folder)
    assert reader.names() == ["w"] and reader.read("weights", "w").tolist() == [2.0] * 4
    assert committed(tmp_path) == [folder]


def test_leftovers_of_an_interrupted_save_do_not_get_into_the_next(tmp_path: Path) -> None:
    partial = tmp_path / "step_00000007.partial"
    partial.mkdir()
    (partial / "weights-00003-of-00004.safetensors").write_bytes(b"half")
    folder = save_one(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        "index-00000-of-00001.json",
        "weights-00000-of-00001.safetensors",
    ]


def truncate(folder: Path, name: str, kept: int = -1) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:kept])


def rewrite(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {name: value for name, value in values.items() if name != key}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard truncated": (lambda f: truncate(f, "weights-00000-of-00001.safetensors"), r"weights-00000.* is truncated"),
    "shard empty": (lambda f: truncate(f, "weights-00000-of-00001.safetensors", 0), r"weights-00000.* is truncated"),
    "shard missing": (lambda f: (f / "weights-00000-of-00001.safetensors").unlink(), r"weights-00000.* is missing"),
    "index truncated": (lambda f: truncate(f, "index-00000-of-00001.json"), r"index-00000.* is truncated"),
    "index missing": (lambda f: (f / "index-00000-of-00001.json").unlink(), r"index-00000.* is missing"),
    "head missing": (lambda f: (f / "checkpoint.json").unlink(), r"checkpoint\.json is missing"),
    "head truncated": (lambda f: truncate(f, "checkpoint.json", 20), r"checkpoint\.json is damaged"),
    "head empty": (lambda f: (f / "checkpoint.json").write_text(""), r"checkpoint\.json is damaged"),
    "head binary": (lambda f: (f / "checkpoint.json").write_bytes(b"\xff\xfe\x00"), r"checkpoint\.json is damaged"),
    "head a list": (lambda f: (f / "checkpoint.json").write_text("[]"), r"damaged"),
    "head a number": (lambda f: (f / "checkpoint.json").write_text("1"), r"damaged"),
    "head without files": (lambda f: rewrite(f, "checkpoint.json", without("files")), r"damaged"),
    "head without state": (lambda f: rewrite(f, "checkpoint.json", without("state")), r"damaged"),
    "head without ranks": (lambda f: rewrite(f, "checkpoint.json", without("num_ranks")), r"damaged"),
    "state of another kind": (lambda f: rewrite(f, "checkpoint.json", lambda v: {**v, "state": {"seed": 0}}), r"damaged"),
    "other format": (lambda f: rewrite(f, "checkpoint.json", lambda v: {**v, "format": 99}), r"has format 99, .* reads 1; use"),
    "no format": (lambda f: rewrite(f, "checkpoint.json", without("format")), r"has format None"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_gives_way_to_the_one_before_and_it_is_said_once(tmp_path: Path, damage: str) -> None:
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    break_it, message = DAMAGES[damage]
    break_it(tmp_path / directory_name(3))
    with pytest.raises(CheckpointError, match=message) as failure:
        CheckpointReader(tmp_path / directory_name(3))
    assert "\n" not in str(failure.value) and str(tmp_path / directory_name(3)) in str(failure.value)
    said: list[str] = []
    reader = open_newest(committed(tmp_path), said.append)
    assert reader is not None and reader.directory == tmp_path / directory_name(2)
    assert said == [f"{failure.value}; using step_00000002 instead"]


def test_index_of_equal_size_but_other_content_is_damage(tmp_path: Path) -> None:
    folder = save_one(tmp_path)
    index = folder / "index-00000-of-00001.json"
    index.write_text("[" + "1" * (index.stat().st_size - 2) + "]")
    with pytest.raises(CheckpointError, match="damaged"):
        CheckpointReader(folder)


def test_shard_of_equal_size_but_other_content_is_refused_when_read(tmp_path: Path) -> None:
    folder = save_one(tmp_path)
    shard = folder / "weights-00000-of-00001.safetensors"
    shard.write_bytes(b"\x7f" * shard.stat().st_size)
    reader = CheckpointReader(folder)
    with pytest.raises(CheckpointError, match=r"weights-00000-of-00001\.safetensors cannot be read") as failure:
        reader.read("weights", "w")
    assert "\n" not in str(failure.value)


def flip(file: Path, position: int, mask: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= mask
    file.write_bytes(content)


def test_any_flipped_byte_is_found_unless_it_changes_nothing(tmp_path: Path) -> None:
    random = Random(0)
    folder = save_all(tmp_path, [4, 6])
    files = sorted(folder.iterdir())
    num_found = 0
    for _ in range(400):
        file = random.choice(files)
        position, mask = random.randrange(file.stat().st_size), random.randrange(1, 256)
        flip(file, position, mask)
        try:
            reader = CheckpointReader(folder)
            reader.verify()
        except DamagedCheckpointError:
            num_found += 1
        else:
            assert reader.state == STATE and list(reader.names()) == ["embed.weight", "norm.bias"]
            assert all(torch.equal(reader.read(section, name), tensor) for (section, name), tensor in TENSORS.items())
        flip(file, position, mask)
    CheckpointReader(folder).verify()
    assert num_found > 350


@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_of_a_tensor_is_found_when_it_is_read_whole(tmp_path: Path, bit: int) -> None:
    folder = save_one(tmp_path, 7, w=torch.ones(4, 2))
    shard = folder / "weights-00000-of-00001.safetensors"
    flip(shard, shard.stat().st_size - 1, bit)
    reader = CheckpointReader(folder)
    for read in (reader.verify, lambda: reader.read("weights", "w"), lambda: reader.read("weights", "w", 0, 4)):
        with pytest.raises(DamagedCheckpointError, match=r"weights-00000-of-00001\.safetensors: w is not what was"):
            read()
    assert reader.read("weights", "w", 0, 2).tolist() == [[1.0, 1.0]] * 2


def test_what_is_found_damaged_while_it_is_loaded_gives_way_too(tmp_path: Path) -> None:
    for step in (1, 2):
        shard = save_one(tmp_path, step) / "weights-00000-of-00001.safetensors"
    flip(shard, shard.stat().st_size - 1, 1)

    def load(directory: Path) -> CheckpointReader:
        reader = CheckpointReader(directory)
        reader.read("weights", "w")
        return reader

    said: list[str] = []
    reader = open_newest(committed(tmp_path), said.append, load)
    assert reader is not None and reader.state.step == 1
    assert len(said) == 1 and said[0].endswith("w is not what was written; using step_00000001 instead")


def test_a_checkpoint_of_another_model_does_not_give_way(tmp_path: Path) -> None:
    for step in (1, 2):
        save_one(tmp_path, step)

    def load(directory: Path) -> CheckpointReader:
        raise CheckpointError(f"{directory}: it is of another model")

    with pytest.raises(CheckpointError, match="step_00000002: it is of another model"):
        open_newest(committed(tmp_path), [].append, load)


def test_lost_rank_of_a_complete_looking_checkpoint_is_missed(tmp_path: Path) -> None:
    folder = save_all(tmp_path, [4, 4, 2])
    (folder / "exp_avg-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"exp_avg-00001-of-00003\.safetensors is missing"):
        CheckpointReader(folder)


def test_several_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    for step in (2, 3):
        (tmp_path / directory_name(step) / "checkpoint.json").unlink()
    said: list[str] = []
    reader = open_newest(committed(tmp_path), said.append)
    assert reader is not None and reader.state.step == 1
    assert len(said) == 2 and all("using step_00000001 instead" in line for line in said)


def test_nothing_but_damage_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    assert open_newest([], said.append) is None
    for step in (1, 2):
        (save_one(tmp_path, step) / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000002: checkpoint\.json is missing; no earlier one is complete either"):
        open_newest(committed(tmp_path), said.append)
    assert said == []


def test_run_state_survives_json_with_every_field() -> None:
    assert RunState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE


def test_a_rank_that_cannot_write_is_a_fault_on_every_rank(tmp_path: Path) -> None:
    before = save_one(tmp_path, 1)
    gather = meeting(2)
    faults: list[str] = []

    def items(rank: int) -> Iterator[StateItem]:
        yield StateItem("weights", "w", (2,), rank, torch.zeros(1))
        if rank == 1:
            raise OSError(28, "No space left on device")

    def run(rank: int) -> None:
        with pytest.raises(CheckpointError) as raised:
            save(tmp_path, STATE, items(rank), Ranks(rank, 2, lambda value: gather(rank, value)))
        faults.append(str(raised.value))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (fault,) = set(faults)
    reason = "cannot be written (No space left on device); free space there or name another storage"
    assert fault == f"storage: {tmp_path / 'step_00000007'} {reason}"
    assert committed(tmp_path) == [before]
