"""`batch.dynamic` in a whole worker: the same losses in another cut, decisions that repeat to the bit, ranks that agree.

Memory is made up here: what a step takes depends on the largest micro-batch that the engine was given.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.engine.sharded import ShardedEngine
from fluxray.engine.stream import StreamEngine
from fluxray.memory import governor
from fluxray.metrics import StepMemory
from fluxray.protocols import MicroSize, Report, RunState
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.worker import run_worker

pytestmark = pytest.mark.usefixtures("one_thread")

CORPUS = f"path:{Path(__file__).parents[1] / 'golden' / 'corpus.txt'}"
SMALL = (
    f"data.source={CORPUS}",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=64",
    "model.config.vocab_size=512",
    "data.max_slice=32",
    "batch.micro_size=4",
    "batch.accumulation_steps=4",
    "optim.warmup_steps=4",
    "train.num_steps=24",
    "train.log_every=1",
    "checkpoint.every_steps=5",
    "evaluation.max_rows=8",
    "hardware.tflops=1",
    "hardware.host_memory=1GiB",
)
DYNAMIC = "batch.dynamic=true"
DROPOUT = "model.config.hidden_dropout=0.1"
UNPACKED = ("data.packing=false", "data.length_grouping=true")
NOT_NEARLY_FULL, FULL = 2**29, int(0.97 * 2**30)


class InterruptedRunError(Exception):
    """Stands for whatever ends a worker in mid-run."""


def fill(monkeypatch: Any, used: Callable[[int], int]) -> None:
    """Let a step take `used(positions of its largest micro-batch)` bytes, and the governor wait for 4 steps."""
    largest: list[int] = [0]

    def watched(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, micro_batches: Sequence[Any], lr: float) -> Any:
            largest[0] = max(batch.num_tokens for batch in micro_batches)
            return train_step(self, micro_batches, lr)

        return run

    for engine in (ShardedEngine, StreamEngine):
        monkeypatch.setattr(engine, "train_step", watched(engine.train_step))
    monkeypatch.setattr(StepMemory, "read", lambda self: used(largest[0]))
    monkeypatch.setattr(governor, "PATIENCE", 4)


@pytest.fixture
def full_at_16(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, lambda tokens: NOT_NEARLY_FULL if tokens <= 8 * 32 else FULL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def small(*overrides: str) -> TrainConfig:
    return resolve("cpu", "lm-tiny", [*SMALL, *overrides])


def run(config: TrainConfig, run_dir: Path, cache: Path, report: Any = None) -> tuple[list[Report], list[str]]:
    reports: list[Report] = []
    notices: list[str] = []
    found = checkpoint.committed(run_dir)
    run_worker(config, WorkerContext(0, 1, 0, run_dir, cache, report or reports.append, lambda _: False, found, notices.append))
    return reports, notices


def values(reports: Sequence[Report], *keys: str) -> list[tuple[int, str, float]]:
    return [(r.step, key, r.metrics[key]) for r in reports for key in keys if key in r.metrics]


def sizes(reports: Sequence[Report]) -> list[float]:
    return [value for _, _, value in values(reports, "batch/micro_size")]


KEPT = ("train/loss", "train/grad_norm", "eval/loss", "batch/micro_size")
GROWN = [4.0] * 6 + [8.0] * 6 + [16.0] * 3 + [8.0] * 9
"""Begins with 4, grows after 4 steps each, 2 steps later; 16 fill the card, so 8 again, this time for 8 steps."""


@pytest.fixture
def uninterrupted(full_at_16: None, tmp_path: Path, cache: Path) -> tuple[Path, list[Report]]:
    run_dir = tmp_path / "uninterrupted"
    reports, _ = run(small(DYNAMIC, DROPOUT), run_dir, cache)
    return run_dir, reports


def test_the_cut_changes_and_the_losses_do_not(full_at_16: None, tmp_path: Path, cache: Path) -> None:
    reports, notices = run(small(DYNAMIC), tmp_path / "dynamic", cache)
    assert sizes(reports) == GROWN
    fixed, _ = run(small(), tmp_path / "fixed", cache)
    for key, tolerance in (("train/loss", 1e-6), ("train/grad_norm", 1e-5), ("eval/loss", 1e-6)):
        ours, theirs = (torch.tensor([value for _, _, value in values(found, key)]) for found in (reports, fixed))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)
    assert values(reports, "train/tokens") == values(fixed, "train/tokens")
    assert "batch/micro_size" not in fixed[0].metrics
    assert [line for line in notices if "rows a micro-batch" in line] == [
        "batch.dynamic: 4 rows a micro-batch, of 4, 8, 16, which fit",
        "step 4: 8 rows a micro-batch from step 7 on, after 4; a step took 0.50 of 1.00 GiB",
        "step 10: 16 rows a micro-batch from step 13 on, after 8; a step took 0.50 of 1.00 GiB",
        "step 13: 8 rows a micro-batch from step 16 on, after 16; a step took 0.97 of 1.00 GiB",
        "step 23: 16 rows a micro-batch from step 26 on, after 8; a step took 0.50 of 1.00 GiB",
    ]


def test_a_streamed_model_is_cut_anew_as_well(full_at_16: None, tmp_path: Path, cache: Path) -> None:
    words = ("engine.kind=stream", "activation_checkpoint=full", "hardware.host_memory=16GiB", "train.num_steps=8")
    reports, _ = run(small(DYNAMIC, *words), tmp_path / "dynamic", cache)
    assert sizes(reports) == GROWN[:8]
    fixed, _ = run(small(*words), tmp_path / "fixed", cache)
    ours, theirs = (torch.tensor([value for _, _, value in values(found, "train/loss")]) for found in (reports, fixed))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_a_size_that_stays_is_the_cut_that_the_configuration_would_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    fill(monkeypatch, lambda tokens: int(0.92 * 2**30))
    words = (DROPOUT, "train.num_steps=6", "batch.micro_size=8", "batch.accumulation_steps=2")
    governed, _ = run(small(*words, DYNAMIC), tmp_path / "governed", cache)
    fixed, _ = run(small(*words), tmp_path / "fixed", cache)
    assert values(governed, *KEPT[:3]) == values(fixed, *KEPT[:3])


def test_a_resumed_run_cuts_as_the_uninterrupted_one_did(
    tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    """Killed in step 8; step 5 is saved between a decision and the step from which it holds."""
    run_dir = tmp_path / "resumed"
    before: list[Report] = []

    def until_step_8(report: Report) -> None:
        before.append(report)
        if report.step == 8:
            raise InterruptedRunError

    config = small(DYNAMIC, DROPOUT)
    with pytest.raises(InterruptedRunError):
        run(config, run_dir, cache, until_step_8)
    saved = checkpoint.CheckpointReader(run_dir / "step_00000005").state
    assert saved.micro_size == MicroSize(rows=4, next_rows=8, since=6, peak=0, patience=4)
    assert saved.epoch == 0 and saved.position == 80
    after, _ = run(config, run_dir, cache)
    assert [item for item in values(before, *KEPT) if item[0] <= 5] + values(after, *KEPT) == values(uninterrupted[1], *KEPT)
    ours, theirs = (checkpoint.CheckpointReader(checkpoint.committed(folder)[0]) for folder in (run_dir, uninterrupted[0]))
    assert ours.state == theirs.state
    for name in theirs.names():
        for section in theirs.sections(name):
            assert torch.equal(ours.read(section, name), theirs.read(section, name))


PERTURBED: dict[str, Callable[[MicroSize], MicroSize]] = {
    "rows": lambda m: replace(m, rows=16),
    "next_rows": lambda m: replace(m, next_rows=4),
    "since": lambda m: replace(m, since=7),
    "peak": lambda m: replace(m, peak=2**30),
    "patience": lambda m: replace(m, patience=5),
}


def test_every_field_of_the_decision_changes_the_run(
    tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    assert set(PERTURBED) == {field.name for field in fields(MicroSize)}
    expected = [item for item in values(uninterrupted[1], *KEPT) if item[0] > 5]
    for name, perturb in {"none": lambda m: m, **PERTURBED}.items():
        folder = tmp_path / name / "step_00000005"
        shutil.copytree(uninterrupted[0] / "step_00000005", folder)
        head = json.loads((folder / "checkpoint.json").read_text())
        state = RunState.from_json(head["state"])
        assert state.micro_size is not None
        head["state"] = replace(state, micro_size=perturb(state.micro_size)).to_json()
        checkpoint.write_json(folder / "checkpoint.json", {key: value for key, value in head.items() if key != "crc32"})
        reports, _ = run(small(DYNAMIC, DROPOUT), folder.parent, cache)
        assert (values(reports, *KEPT) == expected) == (name == "none"), name


def test_a_run_may_go_on_without_it_or_with_other_bounds(
    tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    bounds = (DYNAMIC, "batch.min_micro_size=2", "batch.max_micro_size=4")
    for words, expected in (((), []), (bounds, [4.0] * 4)):
        folder = tmp_path / str(len(words))
        shutil.copytree(uninterrupted[0] / "step_00000020", folder / "step_00000020")
        reports, _ = run(small(DROPOUT, *words), folder, cache)
        assert sizes(reports) == expected
        state = checkpoint.CheckpointReader(checkpoint.committed(folder)[0]).state
        assert (state.micro_size is not None) == bool(words)


def test_two_ranks_decide_by_the_fuller_one_and_learn_what_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    mp.start_processes(_rank_main, (str(tmp_path), str(cache)), 2, start_method="spawn")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    fill(monkeypatch, lambda tokens: NOT_NEARLY_FULL)
    alone, _ = run(small(*TWO_RANKS, "resources.num_workers=1", "batch.accumulation_steps=4"), tmp_path / "alone", cache)
    losses = torch.tensor([value for _, key, value in first if key == "train/loss"])
    torch.testing.assert_close(losses, torch.tensor([v for _, _, v in values(alone, "train/loss")]), rtol=1e-5, atol=0)
    assert [value for _, key, value in first if key == "batch/micro_size"] == [4.0] * 10
    assert sizes(alone)[-1] == 8.0


TWO_RANKS = (DYNAMIC, *UNPACKED, "train.num_steps=10", "resources.num_workers=2", "batch.accumulation_steps=2")


def _rank_main(rank: int, folder: str, cache: str) -> None:
    """Train on two ranks, of which the second alone has no room to grow."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, lambda tokens: NOT_NEARLY_FULL if rank == 0 else int(0.92 * 2**30))
        reports: list[Report] = []
        arguments = (rank, 2, rank, Path(folder, "run"), Path(cache), reports.append, lambda _: False, [], lambda _: None)
        run_worker(small(*TWO_RANKS), WorkerContext(*arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(values(reports, *KEPT, "batch/padding_share")))
    dist.destroy_process_group()
