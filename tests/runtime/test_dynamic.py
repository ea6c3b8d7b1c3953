"""`batch.dynamic` in a whole worker: the same losses in another cut, decisions that repeat to the bit, ranks that agree.

Memory is made up here: what a step takes depends on the largest micro-batch that the engine was given.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.data.loader import PREFETCHED_STEPS
from fluxray.engine.sharded import ShardedEngine
from fluxray.engine.stream import StreamEngine
from fluxray.memory import governor
from fluxray.metrics import StepMemory
from fluxray.protocols import MicroSize, Report, RunState, Schedule
from fluxray.ranks import ALONE
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.governing import Governing
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
    keys = ("train/loss", "batch/micro_size")
    expected = [item for item in values(uninterrupted[1], *keys) if 5 < item[0] <= 13]  # 13 is the first step of 16 rows
    for name, perturb in {"none": lambda m: m, **PERTURBED}.items():
        folder = tmp_path / name / "step_00000005"
        shutil.copytree(uninterrupted[0] / "step_00000005", folder)
        head = json.loads((folder / "checkpoint.json").read_text())
        state = RunState.from_json(head["state"])
        assert state.micro_size is not None
        head["state"] = replace(state, micro_size=perturb(state.micro_size)).to_json()
        checkpoint.write_json(folder / "checkpoint.json", {key: value for key, value in head.items() if key != "crc32"})
        reports, _ = run(small(DYNAMIC, DROPOUT, "train.num_steps=13"), folder.parent, cache)
        assert (values(reports, *keys) == expected) == (name == "none"), name


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


def test_ranks_decide_alike_by_the_fuller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in step, of which first none and then the second alone has too little room."""
    readings = {0: 0, 1: 0}
    ranks = replace(ALONE, highest=lambda number: float(max(number, *readings.values())))
    one = governor.Governor({4: 10, 8: 20, 16: 40}, 100, PREFETCHED_STEPS)
    memories = [StepMemory(torch.device("cpu")) for _ in readings]
    for rank, memory in enumerate(memories):
        monkeypatch.setattr(memory, "read", lambda rank=rank: readings[rank])
    both = [Governing(one, memory, ranks, lambda _: None) for memory in memories]
    states = [rank.begin(RunState(0, Schedule("constant", 1.0, 0, 1, 0.0)), 4) for rank in both]
    seen: list[int] = []
    for step in range(30):
        readings |= {0: 20, 1: 20 if step < 12 else 99}
        states = [rank.after_step(replace(state, step=step + 1)) for rank, state in zip(both, states, strict=True)]
        assert states[0] == states[1] and states[0].micro_size is not None
        seen.append(states[0].micro_size.at(step + 1))
    assert max(seen) == 8 and seen[-1] == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_larger_micro_batches_take_more_and_a_resumed_run_cuts_alike(tmp_path: Path, cache: Path) -> None:
    words = (DYNAMIC, "resources.gpu=1", "data.max_slice=128", "hardware.memory_bandwidth=1TB/s", "checkpoint.keep=5")
    whole, _ = run(small(*words), tmp_path / "whole", cache)
    assert sizes(whole) == [4.0] * 10 + [8.0] * 10 + [16.0] * 4
    saved = [checkpoint.CheckpointReader(tmp_path / "whole" / f"step_{step:08}").state.micro_size for step in (5, 15, 24)]
    peaks = [size.peak for size in saved if size is not None]
    assert 0 < peaks[0] < peaks[1] < peaks[2]
    shutil.copytree(tmp_path / "whole" / "step_00000020", tmp_path / "rest" / "step_00000020")
    rest, _ = run(small(*words), tmp_path / "rest", cache)
    assert sizes(rest) == sizes(whole)[20:]
