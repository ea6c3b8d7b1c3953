"""Steps that are looked at closely, and the allocator they run under."""

import gzip
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fluxray.config.load import resolve
from fluxray.config.schema import ProfileConfig
from fluxray.errors import ConfigError
from fluxray.metrics import Throughput, memory_metrics
from fluxray.protocols import Report
from fluxray.runtime.allocator import require_allocator, restart_with_allocator
from fluxray.runtime.profiling import StepRecorder
from fluxray.runtime.worker import run_worker
from tests.runtime.test_worker import context, deterministic_metrics, small

pytestmark = pytest.mark.usefixtures("one_thread")

BRIEF = ("train.num_steps=5", "evaluation.max_rows=2")
ON_GPU = {"resources.gpu": 1, "allocator": "async"}


def test_a_trace_of_chosen_steps_is_published_and_changes_nothing(tmp_path: Path) -> None:
    published: list[str] = []
    found: dict[str, list[Report]] = {"plain": [], "traced": []}
    for name, words in {"plain": (), "traced": ("profile.first_step=2", "profile.num_steps=2")}.items():
        to = replace(context(tmp_path / name, tmp_path / "cache", found[name]), publish=published.append)
        run_worker(small(*BRIEF, *words), to)
    assert deterministic_metrics(found["traced"]) == deterministic_metrics(found["plain"])
    assert published.count("trace_steps_2_3.json.gz") == 1
    with gzip.open(tmp_path / "traced" / "trace_steps_2_3.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name == "aten::addmm" for name in names) >= 2 * 2 * 2 * 4  # steps, micro-batches, blocks, products
    timed = {report.step for report in found["traced"] if "perf/tokens_per_s" in report.metrics}
    assert timed == {1, 2, 4, 5}  # at its end the reading begins anew


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_memory_snapshot_of_chosen_steps_is_published(tmp_path: Path) -> None:
    published: list[str] = []
    throughput = Throughput(lambda _: 1.0, 1.0, 1)
    profile = ProfileConfig(first_step=2, num_steps=2, record="memory")
    device = torch.device("cuda", 0)
    recorder = StepRecorder(profile, device, tmp_path, published.append, throughput.pause, throughput.read)
    for step in range(5):
        recorder.at(step)
        torch.ones(1000, device=device)
    assert published == ["memory_steps_2_3.snapshot"]
    assert (tmp_path / published[0]).stat().st_size > 1000


def test_the_allocator_is_in_the_environment_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun's processes begin: without it they begin anew, with it they go on."""
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    config = resolve("cpu", "lm-tiny", ON_GPU)
    restart_with_allocator(resolve("cpu", "lm-tiny"))
    assert not started
    restart_with_allocator(config)
    ((program, words, environment),) = started
    assert (program, words) == (sys.executable, sys.orig_argv)
    assert environment["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, environment[name])
    restart_with_allocator(config)
    assert len(started) == 1


def test_an_allocator_that_came_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    with pytest.raises(ConfigError) as refused:
        require_allocator(resolve("cpu", "lm-tiny", ON_GPU))
    assert str(refused.value) == (
        "allocator: 'async', but this process imported torch for native; start it with "
        "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync in its environment"
    )
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    require_allocator(resolve("cpu", "lm-tiny", {**ON_GPU, "allocator": "expandable"}))
    assert settings == ["expandable_segments:True"]


def test_what_fragmentation_costs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 4 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 6 * 2**30)
    assert memory_metrics(torch.device("cuda", 0))["memory/reserved_over_allocated"] == 1.5
