"""Two trainings on one card, each a process of its own that is held to its share: what only a real card can show."""

import gc
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxray.config.load import resolve
from fluxray.errors import OutOfMemory
from fluxray.runtime import ladder
from fluxray.runtime.worker import _prepare_torch, run_worker
from tests.runtime.test_worker import CORPUS, context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 200
GIB = 2**30
SMALL = (
    f"data.source={CORPUS}", "model.config.hidden_size=64", "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=128", "model.config.vocab_size=8192", "data.vocab_size=512", "data.max_slice=64",
    "batch.accumulation_steps=1", "optim.warmup_steps=1", "train.num_steps=4", "train.log_every=1", "evaluation.max_rows=8",
    "checkpoint.every_steps=2", "checkpoint.asynchronous=false", "hardware.tflops=1", "hardware.memory_bandwidth=1000GB/s",
)  # fmt: skip


def train_down(folder: Path, words: list[str]) -> dict[str, Any]:
    """Train as a driver lets a worker do, rung by rung in this process; return what there is to see."""
    config = resolve("cpu", "lm-tiny", [*SMALL, *words])
    run_dir, told, number, reports = folder / "run", [], 0, []
    ladder.begin(config, run_dir, None)
    while True:
        try:
            summary = run_worker(config, replace(context(run_dir, folder / "cache", reports), rung=number))
            break
        except OutOfMemory as error:
            where = str(error)
        gc.collect()
        torch.cuda.empty_cache()
        down = ladder.step_down(config, run_dir, number, where)
        assert down is not None
        told.append(down.told)
        number = down.rung.number
    losses = {report.step: report.metrics["train/loss"] for report in reports if "train/loss" in report.metrics}
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]
    return {"step": summary.step, "told": told, "losses": losses, "peak": peak, "share": peak / total}


def half_a_card(pipe: Connection, asked: float) -> None:
    """Take the share `asked`, less 2 GiB, for good; then try for more, beside a neighbour that has done the same."""
    device = _prepare_torch(resolve("cpu", "lm-tiny", [f"resources.gpu={asked}"]), 0)
    total = torch.cuda.mem_get_info()[1]
    held = torch.ones(int(asked * total) - 2 * GIB, dtype=torch.uint8, device=device)
    pipe.send("holds its half")
    while (word := pipe.recv()) != "end":
        try:
            torch.empty(int(word), dtype=torch.uint8, device=device)
            pipe.send("got it")
        except torch.OutOfMemoryError:
            pipe.send("out of memory")
    pipe.send(bool(held[:: 2**20].all().item()))


def work(pipe: Connection, folder: Path, words: list[str]) -> None:
    try:
        pipe.send(train_down(folder, words))
    except Exception as error:  # noqa: BLE001 - told by the test
        pipe.send(error)


def start(target: Any, *arguments: Any) -> tuple[Any, Connection]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    return process, here


def answer(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), "no answer in time"
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def test_two_halves_fit_one_card_and_whoever_asks_for_more_fails_alone() -> None:
    workers = [start(half_a_card, 0.5) for _ in range(2)]
    try:
        assert [answer(pipe) for _, pipe in workers] == ["holds its half"] * 2
        (_, greedy), (_, modest) = workers
        greedy.send(3 * GIB // 2)
        assert answer(greedy) == "out of memory", "it would take of the other's half"
        modest.send(256 * 2**20)
        assert answer(modest) == "got it"
        for _, pipe in workers:
            pipe.send("end")
            assert answer(pipe) is True
    finally:
        for process, _ in workers:
            process.kill()
            process.join()


def test_of_two_trainings_the_one_that_needs_more_than_its_share_goes_down_alone(tmp_path: Path) -> None:
    """4,096 rows of 64 tokens have 8.6 GB of fp32 logits; the share is what 3 GB are of this card."""
    asked = f"resources.gpu={3e9 / torch.cuda.get_device_properties(0).total_memory:.4f}"
    folders = [tmp_path / name for name in ("greedy", "modest")]
    runs = [start(work, folder, [asked, f"batch.micro_size={size}"]) for folder, size in zip(folders, (4096, 8), strict=True)]
    try:
        greedy, modest = (answer(pipe) for _, pipe in runs)
    finally:
        for process, _ in runs:
            process.kill()
            process.join()
    assert greedy["step"] == modest["step"] == 4 and modest["told"] == []
    assert greedy["told"] and all(line.startswith("out of memory in ") for line in greedy["told"])
    assert " of 3.0 GB): goes on from the beginning with batch.micro_size=2048 batch.accumulation_steps=2" in greedy["told"][0]
    for found in (greedy, modest):
        assert found["peak"] < 3e9
    alone = start(work, tmp_path / "alone", ["resources.gpu=1", "batch.micro_size=4096"])
    try:
        undisturbed = answer(alone[1])
    finally:
        alone[0].kill()
        alone[0].join()
    assert undisturbed["told"] == []
    assert greedy["losses"] == pytest.approx(undisturbed["losses"], rel=1e-4), "the cut changes rounding only"
