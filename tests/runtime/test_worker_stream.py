"""A streamed run from configuration to export on a CPU, without Ray: stopped, killed, resumed to the bit, evaluated, reported."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fluxray import checkpoint
from fluxray.config.load import from_yaml, resolve
from fluxray.config.schema import TrainConfig
from fluxray.errors import PlanError
from fluxray.export import export_run
from fluxray.protocols import Report
from fluxray.runtime import runwatch
from fluxray.runtime.worker import preflight, run_evaluation, run_worker
from tests.runtime.test_worker import (
    CORPUS,
    InterruptedRunError,
    context,
    deterministic_metrics,
    run,
    saved_tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STREAM = (
    "engine.kind=stream",
    "precision=mixed-bf16",
    "optim.kind=adam8bit",
    "optim.master=split24",
    "clip.mode=previous",
    "activation_checkpoint=full",
    f"data.source={CORPUS}",
    "model.config.num_hidden_layers=3",
    "model.config.intermediate_size=64",
    "model.config.vocab_size=512",
    "data.max_slice=32",
    "batch.micro_size=2",
    "batch.accumulation_steps=2",
    "optim.warmup_steps=2",
    "optim.lr=1e-3",
    "train.num_steps=8",
    "train.log_every=1",
    "checkpoint.every_steps=3",
    "evaluation.max_rows=8",
    "hardware.tflops=0.1",
)  # hidden size 256: 8-bit moments


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def stream(*overrides: str) -> TrainConfig:
    return resolve("cpu", "lm-tiny", [*STREAM, *overrides])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, list[Report], list[str], list[str]]:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    reports: list[Report] = []
    notices: list[str] = []
    published: list[str] = []
    run_worker(stream(), replace(context(run_dir, cache, reports, notices), publish=published.append))
    return run_dir, reports, notices, published


def test_it_learns_and_is_saved_in_the_formats_that_were_asked_for(uninterrupted) -> None:
    run_dir, reports, _, _ = uninterrupted
    losses = [report.metrics["train/loss"] for report in reports if "train/loss" in report.metrics]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    sections = {section for section, _ in saved_tensors(run_dir)}
    assert {"weights", "correction", "exp_avg", "exp_avg_absmax", "step"} <= sections
    assert saved_tensors(run_dir)["weights", "gpt_neox.embed_in.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [0, 2])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(kept: int, tmp_path: Path, cache: Path, uninterrupted) -> None:
    """Once more with other settings of the engine, which change nothing that is computed."""
    config = stream(f"engine.kept_blocks={kept}", f"engine.resident_blocks={kept // 2}")
    before: list[Report] = []
    stopped = run_worker(config, replace(context(tmp_path, cache, before), heartbeat=lambda step: step == 5))
    assert (stopped.step, stopped.eval_loss) == (5, None)
    notices: list[str] = []
    resumed: list[Report] = []
    run_worker(config, context(tmp_path, cache, resumed, notices))
    assert "resumed at step 5 from step_00000005" in notices
    run_dir, expected, _, _ = uninterrupted
    assert deterministic_metrics(before) + deterministic_metrics(resumed) == deterministic_metrics(expected)
    actual, wanted = saved_tensors(tmp_path), saved_tensors(run_dir)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], wanted[key]) for key in wanted)


def test_evaluated_and_exported(tmp_path: Path, cache: Path, uninterrupted) -> None:
    run_dir, reports, _, _ = uninterrupted
    summary = run_evaluation(stream(), context(run_dir, cache, []))
    assert summary.eval_loss == [report.metrics["eval/loss"] for report in reports if "eval/loss" in report.metrics][-1]
    export_run(run_dir, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        ids = torch.arange(40).unsqueeze(0)
        assert torch.isfinite(model(ids, labels=ids).loss)


def test_a_streamed_checkpoint_goes_on_sharded(tmp_path: Path, cache: Path, uninterrupted) -> None:
    (tmp_path / "run").mkdir()
    name = "step_00000006"
    os.symlink(uninterrupted[0] / name, tmp_path / "run" / name)
    words = ("engine.kind=sharded", "optim.master=fp32")
    config = resolve("cpu", "lm-tiny", [*STREAM, *words])
    reports, summary = run(config, tmp_path / "run", cache)
    assert summary.step == 8
    losses, expected = (
        {r.step: r.metrics["train/loss"] for r in found if "train/loss" in r.metrics} for found in (reports, uninterrupted[1])
    )
    assert losses[7] == pytest.approx(expected[7], rel=1e-3) and losses[8] == pytest.approx(expected[8], rel=1e-2)


def test_the_plan_is_told_kept_and_published(uninterrupted) -> None:
    run_dir, _, notices, published = uninterrupted
    assert notices[0].startswith("plan: device ") and notices[1].startswith("plan: ") and "bound by" in notices[1]
    table = (run_dir / "plan.txt").read_text()
    assert f"{run_dir.name}: " in table and "engine stream" in table and "bound by" in table
    assert "plan.txt" in published


def test_every_log_tells_how_near_the_floor_it_is_and_what_it_waited_for(uninterrupted) -> None:
    reports = [report for report in uninterrupted[1] if "perf/tokens_per_s" in report.metrics]
    assert [report.step for report in reports] == list(range(1, 9))
    for report in reports:
        assert report.metrics["perf/of_floor"] > 0
        assert report.metrics["perf/wait_fetch_s"] > 0 and report.metrics["perf/wait_write_s"] == 0


def test_after_warm_up_the_plan_is_told_next_to_what_was_measured(uninterrupted) -> None:
    _, reports, notices, _ = uninterrupted
    lines = [line for line in notices if line.startswith("memory of ")]
    assert [line.partition(":")[0] for line in lines] == [
        f"memory of {name}"
        for name in ("device", "device weights", "device optimizer", "device gradients", "device slots", "host blocks")
    ]
    (found,) = [report for report in reports if "memory/planned_device_gib" in report.metrics]
    assert found.step == 3
    measured = {key.removeprefix("memory/measured_"): value for key, value in found.metrics.items() if "measured" in key}
    planned = {key.removeprefix("memory/planned_"): value for key, value in found.metrics.items() if "planned" in key}
    assert measured.keys() == planned.keys() and len(measured) == 6
    for exact in ("device_weights_gib", "device_optimizer_gib", "device_slots_gib", "host_blocks_gib"):
        assert measured[exact] == planned[exact]
    assert 0.3 * planned["device_gib"] < measured["device_gib"] < 3 * planned["device_gib"]  # the step has no kernel here


def test_one_step_is_drawn(uninterrupted) -> None:
    run_dir, _, notices, published = uninterrupted
    picture = (run_dir / "memory.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    assert published == ["plan.txt", "memory.png"] and not [line for line in notices if "not drawn" in line]


def test_a_picture_that_cannot_be_drawn_is_told_and_ends_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(runwatch, "draw", broken)
    notices: list[str] = []
    assert run_worker(stream("train.num_steps=4"), context(tmp_path, cache, [], notices)).step == 4
    assert "memory.png: not drawn at step 3 (OSError: disk full)" in notices


def test_a_plan_that_does_not_fit_is_refused_before_there_is_a_model(tmp_path: Path, cache: Path) -> None:
    config = stream("hardware.host_memory=16MiB")
    for call in (lambda: preflight(config, cache), lambda: run_worker(config, context(tmp_path, cache, []))):
        with pytest.raises(PlanError, match=r"^plan: .* lacks .* GiB of ") as refused:
            call()
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_killed_in_the_middle_of_a_checkpoint_it_goes_on_from_the_one_before(tmp_path: Path, cache: Path, uninterrupted) -> None:
    run_dir = tmp_path / "runs" / "killed"
    words = [*STREAM, "name=killed", f"storage={tmp_path}"]
    slow = (
        "import sys, time; from fluxray import checkpoint; intact = checkpoint._commit\n"
        "def commit(partial, final, *rest):\n"
        "    time.sleep(0 if final.name < 'step_00000006' else 600)\n"
        "    return intact(partial, final, *rest)\n"
        "checkpoint._commit = commit\n"
        "from fluxray.runtime.torchrun import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", slow, "--profile", "cpu", "--model", "lm-tiny", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while not (run_dir / "step_00000006.partial" / "index-00000-of-00001.json").exists():
            assert process.poll() is None, process.communicate()[1][-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name for path in checkpoint.committed(run_dir)] == ["step_00000003"]
    notices: list[str] = []
    run_worker(from_yaml(run_dir / "config.yaml"), context(run_dir, cache, [], notices))
    assert "resumed at step 3 from step_00000003" in notices
    actual, wanted = saved_tensors(run_dir), saved_tensors(uninterrupted[0])
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], wanted[key]) for key in wanted)


def test_whatever_ends_a_streamed_worker_the_last_checkpoint_is_good(tmp_path: Path, cache: Path) -> None:
    def until_step_5(report: Report) -> None:
        if report.step == 5:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        run_worker(stream(), replace(context(tmp_path, cache, []), report=until_step_5))
    assert run(stream(), tmp_path, cache)[1].step == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_within_the_plan_and_waits_are_told(tmp_path: Path, cache: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what tests before it have left in this process
    words = [word for word in STREAM if not word.startswith(("hardware.", "engine.kind"))]
    limit = ("hardware.device_memory=4GB", "hardware.host_memory=8GiB", "compile=false", "model.config.num_hidden_layers=6")
    reports: list[Report] = []
    published: list[str] = []
    config = resolve("a6000", "lm-tiny", [*words, *limit])
    run_worker(config, replace(context(tmp_path, cache, reports), publish=published.append))
    (found,) = [report.metrics for report in reports if "memory/planned_device_gib" in report.metrics]
    for exact in ("device_weights_gib", "device_optimizer_gib", "device_slots_gib", "host_blocks_gib"):
        assert found[f"memory/measured_{exact}"] == found[f"memory/planned_{exact}"]
    assert found["memory/measured_device_gib"] < 1.2 * found["memory/planned_device_gib"]
    assert all(r.metrics["perf/wait_fetch_s"] >= 0 for r in reports if "perf/of_floor" in r.metrics)
    assert published == ["plan.txt", "memory.png"]


@pytest.mark.parametrize("words", [("offload",), ("selective", "activation_checkpoint_budget=200KB")])
def test_activations_kept_in_another_way_change_no_bit(
    words: tuple[str, ...], tmp_path: Path, cache: Path, uninterrupted
) -> None:
    reports, _ = run(
        stream(f"activation_checkpoint={words[0]}", *words[1:], "train.num_steps=3", "engine.kept_blocks=0"),
        tmp_path / "other",
        cache,
    )
    losses, expected = (
        [report.metrics["train/loss"] for report in found if "train/loss" in report.metrics][:3]
        for found in (reports, uninterrupted[1])
    )
    assert losses == expected
    policy = json.loads((tmp_path / "other" / "policy.json").read_text())
    assert any(policy["kept_operations"]) == (words[0] == "selective")
