import json
import shutil

import pytest
import torch

from fluxray import cli
from fluxray.checkpoint import directory_name, save
from fluxray.errors import CheckpointError, ConfigError
from fluxray.protocols import RunState, Schedule, StateItem
from fluxray.runtime import checkpoints
from fluxray.runtime.checkpoints import copy, list_checkpoints, prune, table
from fluxray.runtime.paths import REGISTRY_FILE, committed_checkpoints, registered_checkpoints, write_text

SCHEDULE = Schedule("constant", 1e-3, 0, 10, 0.0)


@pytest.fixture
def run_dir(tmp_path):
    """A run with checkpoints 1 to 4, all registered; 3 has a flipped bit, 4 lacks a file."""
    run_dir = tmp_path / "runs" / "first"
    for step in (1, 2, 3, 4):
        save(run_dir, RunState(0, SCHEDULE, step), [StateItem("weights", "w", (64,), 0, torch.ones(64))])
    for part in ("model", "tokenizer"):
        write_text(run_dir / part / "config.json", "{}")
    write_text(run_dir / "config.yaml", "name: first\n")
    shard = run_dir / directory_name(3) / "weights-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    (run_dir / directory_name(4) / "checkpoint.json").unlink()
    register(run_dir, 1, 2, 3, 4)
    return run_dir


def register(run_dir, *steps):
    results = [{"checkpoint_dir_name": directory_name(step), "metrics": {"step": step}} for step in steps]
    registry = {
        "checkpoint_results": results,
        "checkpoint_report_indices": list(steps),
        "latest_checkpoint_result": results[-1],
    }
    (run_dir / REGISTRY_FILE).write_text(json.dumps(registry))


def steps_of(paths):
    return [int(path.name.rpartition("_")[2]) for path in paths]


def test_a_list_tells_what_can_be_used(run_dir):
    register(run_dir, 1, 3, 4)
    entries = list_checkpoints(run_dir)
    assert steps_of(entry.path for entry in entries) == [4, 3, 2, 1]
    assert [entry.state for entry in entries] == [
        "damaged: checkpoint.json is missing",
        "complete",
        "complete, but not committed: a resume passes it over",
        "complete",
    ]
    assert [entry.num_ranks for entry in entries] == [None, 1, 1, 1]
    assert entries[3].num_bytes == sum(path.stat().st_size for path in (run_dir / directory_name(1)).iterdir())
    heading, newest, *_, oldest = table(entries)
    assert heading.split() == ["step", "size", "saved", "ranks", "state"]
    assert newest.split()[0] == "4" and newest.endswith("?  damaged: checkpoint.json is missing")
    assert oldest.split()[0] == "1" and oldest.endswith(" 1  complete")


def test_verifying_finds_a_flipped_bit(run_dir):
    found = {int(entry.path.name[-1]): entry.fault for entry in list_checkpoints(run_dir, verify=True)}
    assert found[1] is None and found[2] is None
    assert found[3] == "weights-00000-of-00001.safetensors: w is not what was written"


@pytest.mark.parametrize(
    ("keep", "verify", "left"), [(1, False, [3]), (1, True, [2]), (2, True, [2, 1]), (0, True, [2]), (9, True, [2, 1])]
)
def test_pruning_keeps_the_newest_usable_ones_and_the_registry_right(run_dir, keep, verify, left):
    gone = prune(run_dir, keep, verify)
    assert steps_of(registered_checkpoints(run_dir)) == left
    assert sorted(steps_of(gone) + left) == [1, 2, 3, 4]
    assert not list(run_dir.glob("*.partial"))
    registry = json.loads((run_dir / REGISTRY_FILE).read_text())
    assert registry["latest_checkpoint_result"]["checkpoint_dir_name"] == directory_name(left[0])
    assert registry["checkpoint_report_indices"] == left[::-1]


def test_pruning_drops_what_is_not_committed_and_works_without_a_registry(run_dir):
    register(run_dir, 1)
    assert steps_of(prune(run_dir, 3)) == [4, 3, 2]
    (run_dir / REGISTRY_FILE).unlink()
    assert prune(run_dir, 1) == [] and steps_of(committed_checkpoints(run_dir)) == [1]


def test_the_last_complete_one_is_never_deleted(run_dir):
    for step in (1, 2):
        (run_dir / directory_name(step) / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="first has no complete checkpoint; nothing is deleted"):
        prune(run_dir, 1, verify=True)
    assert len(list_checkpoints(run_dir)) == 4


def test_a_copy_is_a_run_of_its_own(run_dir, tmp_path):
    shutil.rmtree(run_dir / directory_name(3))
    (tmp_path / "copy").mkdir()
    assert copy(run_dir, tmp_path / "copy") == tmp_path / "copy" / directory_name(2)
    assert copy(run_dir, tmp_path / "deep" / "copy", step=1) == tmp_path / "deep" / "copy" / directory_name(1)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.yaml", "model", "step_00000002", "tokenizer"]
    assert committed_checkpoints(tmp_path / "copy") == [tmp_path / "copy" / directory_name(2)]


def test_what_cannot_be_copied_leaves_nothing(run_dir, tmp_path):
    target = tmp_path / "copy"
    refused = [
        (None, CheckpointError, rf"--copy: checkpoint {run_dir}/step_00000003: .* what was written; choose another with --step"),
        (4, CheckpointError, "--step: 4 is damaged"),
        (7, ConfigError, "--step: 7 is no checkpoint of first; there are 4, 3, 2, 1"),
    ]
    for step, kind, message in refused:
        with pytest.raises(kind, match=message):
            copy(run_dir, target, step)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        copy(run_dir, run_dir)
    with pytest.raises(CheckpointError, match=r"--copy: .* cannot be written"):
        copy(run_dir, tmp_path / "file" / "copy", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (96.4e9, "96.4 GB")])
def test_sizes_read_well(num_bytes, text):
    assert checkpoints._size(num_bytes) == text


def test_the_command_lists_verifies_and_prunes(run_dir, tmp_path, capsys):
    def command(*words):
        with pytest.raises(SystemExit) as end:
            cli.main(["checkpoints", "first", "--storage", str(tmp_path), *words])
        return end.value.code

    assert command() == 1
    captured = capsys.readouterr()
    assert captured.out.count("damaged") == 1 and "1 of 4 checkpoints of first cannot be used" in captured.err
    assert command("--copy", str(tmp_path / "copy"), "--step", "2", "--verify") == 1
    assert "2 of 4 checkpoints" in capsys.readouterr().err
    assert command("--prune", "1", "--verify") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["deleted step_00000004", "deleted step_00000003", "deleted step_00000001"]
    assert lines[-1].endswith("complete") and len(lines) == 5
