"""One worker from configuration to checkpoint, without Ray: golden losses, resume to the bit, RunState, torchrun."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.errors import CheckpointError, ConfigError, DataError
from fluxray.protocols import Report, RunState, RunSummary, Schedule
from fluxray.runtime import torchrun, worker
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.planning import check_techniques
from fluxray.runtime.worker import preflight, run_evaluation, run_worker

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parents[1] / "golden"
CORPUS = f"path:{GOLDEN / 'corpus.txt'}"
SMALL = (
    f"data.source={CORPUS}",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.intermediate_size=64",
    "model.config.vocab_size=512",
    "model.config.hidden_dropout=0.1",
    "data.max_slice=64",
    "batch.micro_size=2",
    "batch.accumulation_steps=2",
    "optim.warmup_steps=4",
    "optim.schedule=cosine",
    "optim.min_lr_ratio=0.1",
    "train.num_steps=12",
    "train.log_every=1",
    "checkpoint.every_steps=5",
    "evaluation.max_rows=8",
    "hardware.tflops=1",
)


class InterruptedRunError(Exception):
    """Stands for whatever ends a worker in mid-run."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def small(*overrides: str) -> TrainConfig:
    return resolve("cpu", "lm-tiny", [*SMALL, *overrides])


def context(run_dir: Path, cache: Path, reports: list[Report], notices: list[str] | None = None) -> WorkerContext:
    notify = (notices if notices is not None else []).append
    return WorkerContext(0, 1, 0, run_dir, cache, reports.append, lambda _: False, checkpoint.committed(run_dir), notify)


def run(config: TrainConfig, run_dir: Path, cache: Path) -> tuple[list[Report], RunSummary]:
    reports: list[Report] = []
    summary = run_worker(config, context(run_dir, cache, reports))
    return reports, summary


def deterministic_metrics(reports: Sequence[Report]) -> list[tuple[int, dict[str, float]]]:
    """Return what must repeat to the bit: everything but rates and memory."""
    kept = [(r.step, {k: v for k, v in r.metrics.items() if k.startswith(("train/", "eval/"))}) for r in reports]
    return [(step, metrics) for step, metrics in kept if metrics]


def saved_tensors(run_dir: Path) -> dict[tuple[str, str], torch.Tensor]:
    reader = checkpoint.CheckpointReader(checkpoint.committed(run_dir)[0])
    return {(section, name): reader.read(section, name) for name in reader.names() for section in reader.sections(name)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, list[Report]]:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    reports, _ = run(small(), run_dir, cache)
    return run_dir, reports


def test_golden_losses(tmp_path: Path, cache: Path) -> None:
    golden = json.loads((GOLDEN / "lm-tiny.json").read_text())
    assert golden_losses(tmp_path, cache) == pytest.approx(golden, rel=1e-4)


def golden_losses(run_dir: Path, cache: Path) -> list[float]:
    overrides = [f"data.source={CORPUS}", "train.num_steps=20", "train.log_every=1", "hardware.tflops=1", "evaluation.max_rows=4"]
    reports, _ = run(resolve("cpu", "lm-tiny", overrides), run_dir, cache)
    return [report.metrics["train/loss"] for report in reports if "train/loss" in report.metrics]


def test_resumed_in_mid_epoch_equals_uninterrupted(tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]) -> None:
    reports: list[Report] = []

    def until_step_8(report: Report) -> None:
        reports.append(report)
        if report.checkpoint is not None:
            report.checkpoint.wait()
        if report.step == 8:
            raise InterruptedRunError

    config = small()
    with pytest.raises(InterruptedRunError):
        run_worker(config, replace(context(tmp_path, cache, []), report=until_step_8))
    notices: list[str] = []
    resumed: list[Report] = []
    run_worker(config, context(tmp_path, cache, resumed, notices))
    assert notices[0] == "resumed at step 5 from step_00000005"
    state = checkpoint.CheckpointReader(tmp_path / "step_00000005").state
    assert state.epoch == 0 and state.position == 20
    run_dir, expected = uninterrupted
    before = [item for item in deterministic_metrics(reports) if item[0] <= 5]
    assert before + deterministic_metrics(resumed) == deterministic_metrics(expected)
    actual, wanted = saved_tensors(tmp_path), saved_tensors(run_dir)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], wanted[key]) for key in wanted)


def test_a_run_may_go_on_with_8_bit_moments_and_says_what_it_rounds(tmp_path: Path, cache: Path) -> None:
    wide = ["model.config.hidden_size=256", "model.config.num_hidden_layers=1", "clip.mode=previous", "clip.max_norm=0.5"]
    run(small(*wide, "train.num_steps=6"), tmp_path, cache)
    notices: list[str] = []
    reports: list[Report] = []
    config = small(*wide, "train.num_steps=8", "optim.kind=adam8bit")
    run_worker(config, context(tmp_path, cache, reports, notices))
    assert "parameters were saved in a wider format and are rounded now, such as gpt_neox." in notices[0]
    assert notices[1] == "resumed at step 6 from step_00000006"
    reader = checkpoint.CheckpointReader(checkpoint.committed(tmp_path)[0])
    assert reader.state.step == 8 and reader.state.num_skipped == 0 and "clip" in reader.sections("average")
    assert {"exp_avg_absmax", "exp_avg_sq_absmax"} <= set(reader.sections("gpt_neox.embed_in.weight"))
    notices.clear()
    run_worker(small(*wide, "train.num_steps=9", "optim.kind=adam8bit"), context(tmp_path, cache, reports, notices))
    assert notices[0] == "resumed at step 8 from step_00000008"


@pytest.mark.parametrize(
    "words", [("precision=amp-fp16",), ("optim.in_backward=true", "clip.mode=previous", "batch.accumulation_steps=1")], ids=str
)
def test_fp16_and_steps_in_backward_go_on_to_the_bit(words: tuple[str, ...], tmp_path: Path, cache: Path) -> None:
    words += ("optim.schedule=constant", "optim.min_lr_ratio=0")
    whole, _ = run(small(*words, "train.num_steps=4"), tmp_path / "whole", cache)
    first, _ = run(small(*words, "train.num_steps=2"), tmp_path / "parts", cache)
    rest, _ = run(small(*words, "train.num_steps=4"), tmp_path / "parts", cache)
    of_steps = [
        [(step, metrics) for step, metrics in deterministic_metrics(reports) if "train/loss" in metrics]
        for reports in (whole, first + rest)
    ]
    assert of_steps[0] == of_steps[1] and len(of_steps[0]) == 4
    assert all(("train/loss_scale" in metrics) == (words[0] == "precision=amp-fp16") for _, metrics in of_steps[0])
    saved, expected = saved_tensors(tmp_path / "parts"), saved_tensors(tmp_path / "whole")
    assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in expected)


PERTURBED: dict[str, Any] = {
    "seed": lambda s: replace(s, seed=s.seed + 1),
    "step": lambda s: replace(s, step=s.step + 1),
    "epoch": lambda s: replace(s, epoch=s.epoch + 1),
    "position": lambda s: replace(s, position=s.position + 4),
    "num_tokens": lambda s: replace(s, num_tokens=s.num_tokens + 1),
    "num_skipped": lambda s: replace(s, num_skipped=s.num_skipped + 1),
    "rung": lambda s: replace(s, rung=s.rung + 1),
    "schedule.kind": lambda s: replace(s, schedule=replace(s.schedule, kind="linear")),
    "schedule.peak_lr": lambda s: replace(s, schedule=replace(s.schedule, peak_lr=2 * s.schedule.peak_lr)),
    "schedule.warmup_steps": lambda s: replace(s, schedule=replace(s.schedule, warmup_steps=8)),
    "schedule.min_ratio": lambda s: replace(s, schedule=replace(s.schedule, min_ratio=0.5)),
}


def test_every_field_of_the_state_is_perturbed() -> None:
    names = {field.name for field in fields(RunState)} - {"schedule", "micro_size"}  # that one in tests/runtime/test_dynamic.py
    names |= {f"schedule.{field.name}" for field in fields(Schedule)} - {"schedule.total_steps"}
    assert set(PERTURBED) == names  # the length of the schedule is the configuration's: see the next but one test


@pytest.mark.parametrize("field", PERTURBED)
def test_perturbing_the_state_changes_the_run(
    field: str, tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    run_dir, expected = uninterrupted
    shutil.copytree(run_dir / "step_00000005", tmp_path / "step_00000005")
    head_path = tmp_path / "step_00000005" / "checkpoint.json"
    head = json.loads(head_path.read_text())
    unperturbed, _ = run(small(), _copied(tmp_path, "same"), cache)
    assert deterministic_metrics(unperturbed) == [item for item in deterministic_metrics(expected) if item[0] > 5]
    head["state"] = PERTURBED[field](RunState.from_json(head["state"])).to_json()
    checkpoint.write_json(head_path, {key: value for key, value in head.items() if key != "crc32"})
    perturbed, _ = run(small(), _copied(tmp_path, "other"), cache)
    assert deterministic_metrics(perturbed) != deterministic_metrics(unperturbed)


def _copied(folder: Path, name: str) -> Path:
    shutil.copytree(folder / "step_00000005", folder / name / "step_00000005")
    return folder / name


def test_another_length_changes_the_schedule_of_a_resumed_run(
    tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    shutil.copytree(uninterrupted[0] / "step_00000005", tmp_path / "step_00000005")
    reports, summary = run(small("train.num_steps=20"), tmp_path, cache)
    assert summary.step == 20
    rates = {report.step: report.metrics["train/lr"] for report in reports if "train/lr" in report.metrics}
    expected = {report.step: report.metrics["train/lr"] for report in uninterrupted[1] if "train/lr" in report.metrics}
    assert rates[10] > expected[10]


def test_a_finished_run_repeats_nothing_and_cannot_get_shorter(
    tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run_dir)
    reports, summary = run(small(), run_dir, cache)
    assert [report.metrics.keys() for report in reports] == [{"eval/loss", "eval/perplexity"}]
    assert summary.step == 12 and summary.checkpoint == str(run_dir / "step_00000012")
    with pytest.raises(ConfigError, match=r"train\.num_steps: 8, but step_00000012 is further; raise it"):
        run(small("train.num_steps=8"), run_dir, cache)


def test_a_truncated_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, cache: Path, uninterrupted: tuple[Path, list[Report]]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run_dir)
    broken = run_dir / "step_00000012" / "weights-00000-of-00001.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    notices: list[str] = []
    summary = run_worker(small(), context(run_dir, cache, [], notices))
    assert summary.step == 12
    assert notices[0] == (
        f"checkpoint {run_dir / 'step_00000012'}: weights-00000-of-00001.safetensors is truncated; using step_00000010 instead"
    )


def test_evaluation_repeats_the_last_held_out_loss(cache: Path, uninterrupted: tuple[Path, list[Report]]) -> None:
    run_dir, reports = uninterrupted
    last = [report.metrics["eval/loss"] for report in reports if "eval/loss" in report.metrics][-1]
    summary = run_evaluation(small(), context(run_dir, cache, []))
    assert summary.eval_loss == last
    assert summary.step == 12


def test_evaluation_needs_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        run_evaluation(small(), context(tmp_path, cache, []))


@pytest.mark.parametrize(
    ("override", "fault", "message"),
    [
        ("data.source=path:/nowhere/at/all.txt", DataError, "/nowhere/at/all.txt"),
        ("data.max_slice=1024", ConfigError, "data.max_slice: 1024 is over the model's max_position_embeddings 512; lower it"),
        ("model.config.model_type=gpt2", ConfigError, "model.config.model_type: 'gpt2' has no block list"),
        ("model.config.num_attention_heads=5", ConfigError, "model.config"),
        ("model.config.hiden_size=64", ConfigError, "did you mean model.config.hidden_size?"),
        ("data.vocab_size=1000", ConfigError, "512"),
        ("model.weights=path:/nowhere", ConfigError, "model.weights: 'path:/nowhere' is no folder"),
        ("data.eval_source=path:/nowhere.txt", DataError, "/nowhere.txt"),
    ],
)
def test_preflight_refuses_in_one_line(override: str, fault: type[Exception], message: str, cache: Path) -> None:
    with pytest.raises(fault) as raised:
        preflight(small(override), cache)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_more_processes_than_gpus_are_refused_before_nccl_meets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    words = ["resources.num_workers=8", "resources.gpu=1"]
    with pytest.raises(
        ConfigError, match=r"^--nproc_per_node: 4 processes on a machine with 2 GPUs, and NCCL wants one for each"
    ):
        torchrun._configured("cpu", "lm-tiny", words)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert torchrun._configured("cpu", "lm-tiny", words).resources.num_workers == 8


def test_the_same_worker_runs_under_torchrun(tmp_path: Path) -> None:
    dynamic = ["batch.dynamic=true", "batch.min_micro_size=1", "data.packing=false", "data.length_grouping=true"]
    words = [*SMALL, *dynamic, "resources.num_workers=2", "batch.accumulation_steps=1", "name=without-ray", f"storage={tmp_path}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "fluxray.runtime.worker"]
    command += ["--profile", "cpu", "--model", "lm-tiny", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    run_dir = tmp_path / "runs" / "without-ray"
    assert f"checkpoint {run_dir / 'step_00000012'}" in done.stdout
    assert "batch.dynamic: 2 rows a micro-batch, of 1, 2, which fit" in done.stdout
    assert [path.name for path in checkpoint.committed(run_dir)] == ["step_00000012", "step_00000010"]

    wrong = subprocess.run([*command, "optim.lrr=1"], capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert "fluxray: error: optim.lrr: unknown key; did you mean optim.lr?" in wrong.stderr


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        losses = golden_losses(Path(scratch) / "run", Path(scratch) / "cache")
    (GOLDEN / "lm-tiny.json").write_text(json.dumps([round(loss, 6) for loss in losses]) + "\n")


@pytest.mark.parametrize(
    ("words", "limited"),
    [
        (["resources.gpu=0.25"], [(0.23, 1)]),
        (["resources.gpu=1"], []),
        (["resources.gpu=1", "hardware.device_memory=45GB"], [(0.89, 1)]),
        (["resources.gpu=0.25", "hardware.device_memory=45GB"], [(0.23, 1)]),
    ],
)
def test_a_run_takes_its_share_of_a_gpu_and_no_more_than_the_plan_has(
    monkeypatch: pytest.MonkeyPatch, words: list[str], limited: list
) -> None:
    calls: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: calls.append((share, device.index)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(49.5e9), int(50e9)))
    assert worker._prepare_torch(small(*words), local_rank=3) == torch.device("cuda", 1)
    assert calls == limited


@pytest.mark.parametrize(
    "words",
    [
        ("activation_checkpoint=every_n", "activation_checkpoint_every=2"),
        ("activation_checkpoint=selective", "activation_checkpoint_budget=1MB"),
        ("activation_checkpoint=offload",),
        ("loss.chunk_tokens=1024",),  # more than there are
    ],
)
def test_every_way_to_save_memory_trains_to_the_same_bits(words: tuple[str, ...], tmp_path: Path, cache: Path) -> None:
    brief = ("train.num_steps=5", "evaluation.max_rows=2")
    plain, _ = run(small(*brief), tmp_path / "plain", cache)
    reports, _ = run(small(*brief, *words), tmp_path / "other", cache)
    assert deterministic_metrics(reports) == deterministic_metrics(plain)
    waits = any("perf/wait_fetch_s" in report.metrics for report in reports)
    assert waits == (words[0] == "activation_checkpoint=offload")


@pytest.mark.parametrize(
    ("attention", "dropout", "what", "remedy"),
    [("auto", True, "dropout", "model.config's dropout to 0"), ("flex", False, "attention=flex", "attention=varlen")],
)
def test_operations_that_compiled_blocks_hide_cannot_be_chosen(attention: str, dropout: bool, what: str, remedy: str) -> None:
    words = ("activation_checkpoint=selective", "activation_checkpoint_budget=1MB", "compile=true", f"attention={attention}")
    with pytest.raises(ConfigError) as refused:
        check_techniques(small(*words), dropout)
    assert str(refused.value) == (
        f"activation_checkpoint: 'selective' chooses among operations, which compiled blocks with {what} hide; set "
        f"compile=false, {remedy}, or activation_checkpoint=full"
    )
    check_techniques(small(words[0], *words[2:]), dropout)  # what the plan leaves free may be nothing
