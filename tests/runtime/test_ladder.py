"""Down the ladder of `train.on_oom`: which rungs there are, where a run stands, and that it learns the same on each."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError, OutOfMemory, PlanError
from fluxray.protocols import Report, RunSummary
from fluxray.runtime import ladder, torchrun, worker
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.outcome import FailedError
from fluxray.runtime.worker import run_evaluation, run_worker
from tests.runtime import forked
from tests.runtime.servers import free_port
from tests.runtime.short import Short
from tests.runtime.test_worker import SMALL, context, deterministic_metrics, run, saved_tensors, small

pytestmark = pytest.mark.usefixtures("one_thread")

STREAM = ("engine.kind=stream", "activation_checkpoint=full")
AS_GIVEN = ("batch.micro_size=4", "batch.accumulation_steps=1", "model.config.hidden_dropout=0", "optim.schedule=constant")
AS_GIVEN = (*AS_GIVEN, "optim.min_lr_ratio=0", "evaluation.every_steps=4", "checkpoint.asynchronous=false")
ONCE_FINER = ("batch.micro_size=2", "batch.accumulation_steps=2")
NUM_STEPS, SAVED_AT = 8, 3
STEPS = (f"train.num_steps={NUM_STEPS}", f"checkpoint.every_steps={SAVED_AT}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def configured(*overrides: str) -> TrainConfig:
    return small(*AS_GIVEN, *STEPS, *overrides)


def words(*overrides: str) -> list[str]:
    return [rung.words for rung in ladder.rungs(resolve("cpu", "lm-tiny", overrides))]


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def short(*faults: tuple[str, int]) -> None:
        left, build = list(faults), worker.build_engine
        monkeypatch.setattr(worker, "build_engine", lambda *arguments: Short(build(*arguments), left))

    return short


def descend(config: TrainConfig, run_dir: Path, cache: Path) -> tuple[list[list[Report]], list[str], RunSummary]:
    """Do what the driver does, in this process; return the reports of each attempt, what was told, and how it ended."""
    number, attempts, told = ladder.begin(config, run_dir, None).number, [], []
    while True:
        attempts.append([])
        try:
            return attempts, told, run_worker(config, replace(context(run_dir, cache, attempts[-1]), rung=number))
        except OutOfMemory as error:
            down = ladder.step_down(config, run_dir, number, str(error))
        assert down is not None and down.count == len(told) + 1
        number = down.rung.number
        told.append(down.told)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, list[Report]]:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return run_dir, run(configured(), run_dir, cache)[0]


@pytest.fixture(scope="module")
def finer_from_there(tmp_path_factory: pytest.TempPathFactory, cache: Path, undisturbed: Any) -> tuple[Path, list[Report]]:
    """That run, taken up by its user from its first checkpoint in the finer cut."""
    run_dir = tmp_path_factory.mktemp("finer")
    name = checkpoint.directory_name(SAVED_AT)
    if not (run_dir / name).exists():
        shutil.copytree(undisturbed[0] / name, run_dir / name)
    return run_dir, run(configured(*ONCE_FINER), run_dir, cache)[0]


def losses(reports: Sequence[Report]) -> list[float]:
    return [report.metrics["train/loss"] for report in reports if "train/loss" in report.metrics]


def test_micro_batches_shrink_before_anything_is_computed_again_and_blocks_leave_the_card_last() -> None:
    finer = ["", "batch.micro_size=3 batch.accumulation_steps=2", "batch.micro_size=1 batch.accumulation_steps=6"]
    full = f"{finer[-1]} activation_checkpoint=full"
    wide = ["batch.micro_size=6", "batch.accumulation_steps=1", "batch.global_size=6"]
    streamed = f"{full} engine.kind=stream"
    assert words(*wide) == [*finer, full, streamed, f"{streamed} engine.kept_blocks=0"]
    assert words("batch.micro_size=1", "activation_checkpoint=full", "resources.num_workers=2") == [""]
    two = words(*wide[:2], "resources.num_workers=2")
    assert two == [*finer, full], "streaming is for one worker"
    sizes = {rung.config.global_batch_size for rung in ladder.rungs(resolve("cpu", "lm-tiny", wide))}
    assert sizes == {6}


def test_on_a_card_activations_wait_on_the_host_before_the_blocks_do() -> None:
    given = ("resources.gpu=1", "batch.micro_size=1", "activation_checkpoint=every_n", "activation_checkpoint_every=3")
    assert [line.replace("activation_checkpoint", "ac") for line in words(*given)] == [
        "",
        "ac=full ac_every=null",
        "ac=offload ac_every=null",
        "ac=offload ac_every=null engine.kind=stream",
        "ac=offload ac_every=null engine.kind=stream engine.kept_blocks=0",
    ]


def test_graphs_go_before_micro_batches_shrink() -> None:
    given = ("resources.gpu=1", "cuda_graph=true", "batch.micro_size=2", "batch.accumulation_steps=1")
    assert words(*given)[1:3] == ["cuda_graph=false", "cuda_graph=false batch.micro_size=1 batch.accumulation_steps=2"]


def test_what_the_stream_engine_does_by_itself_stands_not_in_its_way() -> None:
    given = ("resources.gpu=1", "batch.micro_size=1", "activation_checkpoint=offload", "clip.mode=block")
    for override in ("optim.in_backward=true", "optim.kind=paged_adam8bit"):
        last = words(*given, "batch.accumulation_steps=1", override)[1]
        assert last in ("engine.kind=stream optim.in_backward=false", "engine.kind=stream optim.kind=adam8bit")


def test_a_cut_that_memory_governs_is_fixed_before_it_is_made_finer() -> None:
    given = ("batch.dynamic=true", "batch.micro_size=4", "batch.accumulation_steps=4", "batch.max_micro_size=8")
    fixed = "batch.dynamic=false batch.min_micro_size=4 batch.max_micro_size=16"
    assert words(*given)[:3] == ["", fixed, f"{fixed} batch.micro_size=2 batch.accumulation_steps=8"]


def test_a_streamed_run_keeps_nothing_in_the_end() -> None:
    assert words(*STREAM, "batch.micro_size=1") == ["", "engine.kept_blocks=0"]
    assert words(*STREAM, "batch.micro_size=1", "engine.kept_blocks=0") == [""]


def test_streaming_is_no_rung_where_its_plan_does_not_fit() -> None:
    last = ("batch.micro_size=1", "activation_checkpoint=full", "hardware.tflops=1")
    assert words(*last, "hardware.host_memory=64GiB")[1:] == ["engine.kind=stream", "engine.kind=stream engine.kept_blocks=0"]
    assert words(*last, "hardware.host_memory=64MiB") == [""]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (("step", 5), "in step 5 (rank 0)"),
        (("evaluation", 4), "in the evaluation after step 4 (rank 0)"),
        (("save", 6), "in the save after step 6 (rank 0)"),
    ],
)
def test_a_run_goes_on_in_a_finer_cut_as_if_its_user_had_cut_it(
    fault: tuple[str, int],
    told: str,
    tmp_path: Path,
    cache: Path,
    short_of_memory: Callable[..., None],
    undisturbed: tuple[Path, list[Report]],
    finer_from_there: tuple[Path, list[Report]],
) -> None:
    short_of_memory(fault)
    attempts, lines, summary = descend(configured(), tmp_path, cache)
    assert lines == [f"out of memory {told}: goes on from step {SAVED_AT} with {' '.join(ONCE_FINER)}"]
    assert summary.step == NUM_STEPS and len(attempts) == 2
    assert deterministic_metrics(attempts[1]) == deterministic_metrics(finer_from_there[1])
    actual, wanted = saved_tensors(tmp_path), saved_tensors(finer_from_there[0])
    assert all(torch.equal(actual[key], wanted[key]) for key in wanted)
    whole = losses(undisturbed[1])
    assert losses(attempts[0])[:SAVED_AT] == whole[:SAVED_AT]
    assert losses(attempts[1]) == pytest.approx(whole[SAVED_AT:], rel=1e-5), "sums in another order, and Adam on top"
    assert checkpoint.CheckpointReader(checkpoint.committed(tmp_path)[0]).state.rung == 1


def test_before_the_first_checkpoint_it_begins_anew_and_goes_on_down(
    tmp_path: Path, cache: Path, short_of_memory: Callable[..., None]
) -> None:
    finest = ("batch.micro_size=1", "batch.accumulation_steps=4")
    expected, _ = run(configured(*finest), tmp_path / "expected", cache)
    short_of_memory(("step", 1), ("step", 2))
    attempts, lines, _ = descend(configured(), tmp_path / "run", cache)
    assert [line.partition(": ")[2] for line in lines] == [
        f"goes on from the beginning with {' '.join(cut)}" for cut in (ONCE_FINER, finest)
    ]
    assert deterministic_metrics(attempts[-1]) == deterministic_metrics(expected)
    record = json.loads((tmp_path / "run" / ladder.FILE).read_text())
    assert record == {"rung": 2, "told": lines}


def test_down_to_the_stream_engine_and_no_further(tmp_path: Path, cache: Path, short_of_memory: Callable[..., None]) -> None:
    config = configured("batch.micro_size=2", "batch.accumulation_steps=2")
    expected = losses(run(config, tmp_path / "expected", cache)[0])
    short_of_memory(("step", 4), ("step", 5), ("step", 6), ("save", 6), ("step", 7))
    with pytest.raises(FailedError) as end:
        descend(config, tmp_path / "run", cache)
    told = json.loads((tmp_path / "run" / ladder.FILE).read_text())["told"]
    given = "batch.micro_size=1 batch.accumulation_steps=4"
    assert [line.partition(" with ")[2] for line in told] == [
        given,
        f"{given} activation_checkpoint=full",
        f"{given} activation_checkpoint=full engine.kind=stream",
        f"{given} activation_checkpoint=full engine.kind=stream engine.kept_blocks=0",
    ]
    assert str(end.value) == (
        f"run run: out of memory in step 7 (rank 0), with {given} activation_checkpoint=full engine.kind=stream "
        f"engine.kept_blocks=0, the last of 4 rungs; give it more memory (resources.num_workers, a larger card); "
        f"the same command with name=run goes on from its last checkpoint"
    )
    resumed: list[Report] = []
    rung = ladder.begin(config, tmp_path / "run", {})
    assert rung.number == 4, "a resume stands where the run stood"
    run_worker(config, replace(context(tmp_path / "run", cache, resumed), rung=rung.number))
    assert losses(resumed) == pytest.approx(expected[6:], rel=1e-5)


def test_where_streaming_does_not_fit_either_the_run_ends_and_stands_one_rung_higher(tmp_path: Path) -> None:
    config = configured("batch.micro_size=1", "activation_checkpoint=full")
    ladder.begin(config, tmp_path, None)
    down = ladder.step_down(config, tmp_path, 0, "in step 2 (rank 0)")
    assert down is not None and down.rung.config.engine.kind == "stream"
    end = ladder.refused(config, tmp_path, 1, PlanError("plan: host memory lacks 3 GB; fits with X"))
    assert isinstance(end, FailedError) and "engine.kind=stream, which does not fit (plan: host memory lacks 3 GB" in str(end)
    assert ladder.begin(config, tmp_path, {}).number == 0
    own = PlanError("plan: of a run that streams anyway")
    assert ladder.refused(configured(*STREAM), tmp_path, 1, own) is own


def test_stop_ends_the_run_and_names_what_would_go_on(tmp_path: Path) -> None:
    config = configured("train.on_oom=stop")
    ladder.begin(config, tmp_path, None)
    with pytest.raises(FailedError) as end:
        ladder.step_down(config, tmp_path, 0, "in step 2 (rank 0, 43.1 of 45.0 GB)")
    assert str(end.value) == (
        f"run {tmp_path.name}: out of memory in step 2 (rank 0, 43.1 of 45.0 GB); train.on_oom=ladder would go on with "
        f"{' '.join(ONCE_FINER)}; the same command with name={tmp_path.name} begins anew, there is no checkpoint yet"
    )


def test_several_ranks_go_down_together_by_one_rung(tmp_path: Path) -> None:
    config = configured()
    ladder.begin(config, tmp_path, None)
    assert ladder.step_down(config, tmp_path, 0, "in step 2 (rank 0)") is not None
    assert ladder.step_down(config, tmp_path, 0, "in step 2 (rank 1)") is None
    assert ladder.begin(config, tmp_path, {"train.num_steps": 20}).number == 1


@pytest.mark.parametrize("key", ["batch.micro_size", "resources.num_workers", "hardware.device_memory"])
def test_who_makes_room_by_hand_begins_on_the_first_rung(key: str, tmp_path: Path) -> None:
    config = configured()
    ladder.begin(config, tmp_path, None)
    ladder.step_down(config, tmp_path, 0, "in step 2 (rank 0)")
    assert ladder.begin(config, tmp_path, {key: 2}).number == 0


def test_a_run_that_lost_its_folder_stands_where_its_checkpoint_says(
    tmp_path: Path, cache: Path, short_of_memory: Callable[..., None]
) -> None:
    short_of_memory(("step", 1))
    descend(configured(), tmp_path, cache)
    (tmp_path / ladder.FILE).unlink()
    assert ladder.begin(configured(), tmp_path, {}).words == " ".join(ONCE_FINER)
    asked: list[int] = []
    short = worker.build_parts

    def build_parts(config: TrainConfig, where: Any) -> Any:
        asked.append(config.batch.micro_size)
        return short(config, where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "build_parts", build_parts)
        run_evaluation(configured(), context(tmp_path, cache, []))
    assert asked == [2], "what did not fit in training would not fit in evaluation"


def test_what_other_libraries_say_counts_and_other_faults_do_not() -> None:
    config = configured()
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"):
        with pytest.raises(OutOfMemory, match=r"^before the first step \(rank 3\)$"), ladder.explained(config, 3):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), ladder.explained(config, 0):
        raise RuntimeError("shape mismatch")


def test_what_is_taken_of_the_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, int(80e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(42.1e9))
    for asked, limit in ((["resources.gpu=1", "hardware.device_memory=45GB"], "45.0"), (["resources.gpu=0.5"], "40.0")):
        error = torch.OutOfMemoryError("CUDA out of memory")
        error.add_note("in step 4")
        told = rf"^in step 4 \(rank 0, 43\.1 of {limit} GB\)$"
        with pytest.raises(OutOfMemory, match=told), ladder.explained(configured(*asked), 0):
            raise error


class ShortWhileCoarse(Short):
    """An engine that has not the memory for step 5 as long as micro-batches hold more than one row."""

    def train_step(self, micro_batches: Any, lr: float) -> Any:
        if micro_batches[0].input_ids.shape[0] > 1:
            self._faults[:] = [("step", 5)]
        return super().train_step(micro_batches, lr)


def rank_main(environment: dict[str, str], words: Sequence[str], said: Path) -> None:
    """One of torchrun's processes; rank 1 has not the memory, rank 0 writes down its losses."""
    os.environ.update(environment)
    rank, build, train = int(environment["RANK"]), worker.build_engine, torchrun.run_worker
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if rank == 1:
        worker.build_engine = lambda *arguments: ShortWhileCoarse(build(*arguments), [])

    def recorded(config: TrainConfig, where: WorkerContext) -> RunSummary:
        def report(item: Report) -> None:
            where.report(item)
            if rank == 0 and "train/loss" in item.metrics:
                with (where.run_dir / "losses.txt").open("a") as file:
                    file.write(json.dumps([where.rung, item.step, item.metrics["train/loss"]]) + "\n")

        return train(config, replace(where, report=report))

    torchrun.run_worker = recorded
    sys.exit(torchrun.main(words))


def as_torchrun(words: Sequence[str], said: Path, restart: int) -> list[int | None]:
    """Do what torchrun does with two ranks on its `restart`-th time: end both as soon as one has failed; return their codes."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": "1"}
    ranks = [
        forked.fork(rank_main, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, words, said, preload=[__name__])
        for rank in (0, 1)
    ]
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        if any(process.exitcode not in (0, None) for process in ranks):
            break
        time.sleep(0.1)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def test_two_ranks_under_torchrun_go_down_with_its_restarts(tmp_path: Path, cache: Path) -> None:
    cut = ("batch.micro_size=2", "batch.accumulation_steps=1", "resources.num_workers=2", f"storage={tmp_path}", "name=short")
    cut = (*cut, "tracking.uri=http://127.0.0.1:9", "tracking.system_metrics_s=0")
    words = ["--profile=cpu", "--model=lm-tiny", *SMALL, *AS_GIVEN, *STEPS, *cut]
    assert 1 in as_torchrun(words, tmp_path / "first", 0)
    told = "out of memory in step 5 (rank 1): goes on from step 3 with batch.micro_size=1 batch.accumulation_steps=2"
    first = (tmp_path / "first").read_text()
    assert first.count(f"fluxray: failed: {told}\n") == 1, first
    assert as_torchrun(words, tmp_path / "second", 1) == [0, 0], (tmp_path / "second").read_text()
    assert "out of memory earlier: goes on with batch.micro_size=1" in (tmp_path / "second").read_text()
    found = [json.loads(line) for line in (tmp_path / "runs" / "short" / "losses.txt").read_text().splitlines()]
    before, after = [[0, step] for step in range(1, 5)], [[1, step] for step in range(SAVED_AT + 1, NUM_STEPS + 1)]
    assert [place for *place, _ in found] == before + after
    expected = losses(run(configured(), tmp_path / "alone", cache)[0])
    assert [loss for *_, loss in found[4:]] == pytest.approx(expected[SAVED_AT:], rel=1e-5)


def test_restarts_of_torchrun_want_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=r"^name: is not set, and torchrun's --max-restarts would begin another run"):
        torchrun._configured("cpu", "lm-tiny", [])
    assert torchrun._configured("cpu", "lm-tiny", ["name=mine"]).name == "mine"
