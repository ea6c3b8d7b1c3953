from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fluxray.metrics import GIB, StepMemory, Throughput, count_forward_flops, measure_matrix_tflops, memory_metrics
from fluxray.models.causal_lm import build_causal_lm
from fluxray.protocols import Batch, TextBatch
from tests.models.helpers import CASES, model_config


def forward_flops(case: str, length: int, num_rows: int = 1, packed: bool = False, **keys: Any) -> int:
    stack = build_causal_lm(model_config(case, **keys), seed=0)
    tokens = torch.zeros(num_rows, length, dtype=torch.int64, device="meta")
    batch = TextBatch(tokens, tokens, tokens, tokens, single_document=not packed, num_valid=0)
    return count_forward_flops(lambda: stack(batch, lambda logits, _: logits))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 16, 33])
def test_flops_are_two_per_matrix_parameter_and_token_plus_attention(case: str, length: int) -> None:
    stack = build_causal_lm(model_config(case), seed=0)
    config: Any = stack.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    matrices = sum(module.weight.numel() for module in stack.modules() if isinstance(module, nn.Linear))
    attention = 2 * 2 * length**2 * config.num_attention_heads * head_dim * config.num_hidden_layers
    assert forward_flops(case, length) == 2 * matrices * length + attention


def test_tiny_neox_counted_by_hand() -> None:
    hidden, inner, vocabulary, layers, length = 32, 48, 96, 3, 16
    block = 4 * hidden * hidden + 2 * hidden * inner  # query, key, value, output; two of the MLP
    expected = 2 * length * (layers * block + hidden * vocabulary) + layers * 4 * length * length * hidden
    assert forward_flops("gpt_neox", length) == expected == 884736


def test_flops_grow_with_rows_and_do_not_depend_on_packing() -> None:
    assert forward_flops("llama", 16, num_rows=3) == 3 * forward_flops("llama", 16)
    assert forward_flops("llama", 16, packed=True) == forward_flops("llama", 16)


def test_counting_leaves_no_gradient_behind() -> None:
    layer = nn.Linear(3, 5)
    assert count_forward_flops(lambda: layer(torch.ones(2, 3))) == 2 * 2 * 3 * 5
    assert layer.weight.grad is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that passes only when a test says so."""
    now = [100.0]
    monkeypatch.setattr("fluxray.metrics.time.perf_counter", lambda: now[0])
    return now


def batches(num_tokens: int) -> list[Any]:
    return [SimpleNamespace(num_tokens=num_tokens)]


def flops(batch: Batch) -> float:
    return float(batch.num_tokens)


def test_throughput_is_tokens_over_seconds_since_the_last_reading(clock: list[float]) -> None:
    throughput = Throughput(lambda batch: 6e9 * batch.num_tokens, peak_tflops=2.0, num_devices=4)
    throughput.add(batches(250))
    throughput.add(batches(125))
    clock[0] += 3.0
    assert throughput.read() == {"perf/tokens_per_s": 500.0, "perf/mfu": pytest.approx(500 * 6e9 / 8e12)}
    clock[0] += 1.0
    throughput.add(batches(10))
    clock[0] += 1.0
    assert throughput.read()["perf/tokens_per_s"] == 20.0


def test_images_are_counted_as_the_losses_count_them(clock: list[float]) -> None:
    throughput = Throughput(flops, 1.0, 2, terms="images")
    throughput.add(batches(64))
    clock[0] += 2.0
    assert throughput.read(7) == {"perf/tokens_per_s": 64.0, "perf/images_per_s": 3.5, "perf/mfu": pytest.approx(32e-12)}


def test_pauses_do_not_count(clock: list[float]) -> None:
    throughput = Throughput(flops, 1.0, 1)
    throughput.add(batches(100))
    clock[0] += 1.0
    with throughput.pause():
        clock[0] += 50.0
    clock[0] += 1.0
    with pytest.raises(OSError, match="gone"), throughput.pause():
        clock[0] += 7.0
        raise OSError("gone")
    assert throughput.read()["perf/tokens_per_s"] == 50.0
    with throughput.pause():
        clock[0] += 50.0
    clock[0] += 2.0
    throughput.add(batches(8))
    assert throughput.read()["perf/tokens_per_s"] == 4.0


def test_a_plans_floor_and_the_waits_of_a_step_are_told(clock: list[float]) -> None:
    waits = [(3.0, 1.0), (50.0, 50.0), (2.0, 0.5)]
    throughput = Throughput(flops, 1.0, 1, floor_tflops=40e-12, read_waits=lambda: waits.pop(0))
    for _ in range(4):
        throughput.add(batches(25))
    clock[0] += 5.0
    found = throughput.read()
    assert (found["perf/of_floor"], found["perf/wait_fetch_s"], found["perf/wait_write_s"]) == (0.5, 0.75, 0.25)
    with throughput.pause():  # what an evaluation waits for is no step's
        clock[0] += 50.0
    throughput.add(batches(25))
    clock[0] += 1.0
    found = throughput.read()
    assert (found["perf/of_floor"], found["perf/wait_fetch_s"], found["perf/wait_write_s"]) == (0.625, 2.0, 0.5)


def test_a_reading_without_steps_gives_no_rates(clock: list[float]) -> None:
    throughput = Throughput(flops, 1.0, 1)
    assert throughput.read() == {}
    throughput.add(batches(10))
    assert throughput.read()["perf/tokens_per_s"] > 0  # no time has gone by: no division by zero


def test_host_memory_is_that_of_this_process() -> None:
    before = memory_metrics(torch.device("cpu"))
    assert set(before) == {"memory/host_gib"} and 0.01 < before["memory/host_gib"] < 1000
    held = torch.ones(GIB // 4 // 4)  # a quarter of a GiB
    assert memory_metrics(torch.device("cpu"))["memory/host_gib"] - before["memory/host_gib"] == pytest.approx(0.25, abs=0.05)
    del held


def test_measured_rate_is_a_rate() -> None:
    assert 1e-4 < measure_matrix_tflops(torch.device("cpu"), torch.float32) < 1e3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_device_memory_is_the_peak_since_the_start() -> None:
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.empty(GIB, dtype=torch.uint8, device=device)
    del held
    metrics = memory_metrics(device)
    assert metrics["memory/allocated_gib"] >= 1.0
    assert metrics["memory/reserved_gib"] >= metrics["memory/allocated_gib"]


def test_on_a_cpu_a_step_takes_what_the_process_holds() -> None:
    memory = StepMemory(torch.device("cpu"))
    memory.begin()
    before = memory.read()
    held = bytearray(b"x" * 2**28)
    assert memory.read() - before == pytest.approx(len(held), rel=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_each_step_has_its_own_peak_and_the_run_keeps_the_highest() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    memory, before, taken = StepMemory(device), torch.cuda.memory_allocated(device), []
    for size in (2**28, 2**30, 2**28):
        memory.begin()
        torch.empty(size, dtype=torch.uint8, device=device)
        taken.append(memory.read() - before)
    assert taken == [2**28, 2**30, 2**28]
    memory.begin()
    found = memory_metrics(device, memory)
    assert found["memory/allocated_gib"] >= 1.0 <= found["memory/reserved_gib"]
