from dataclasses import replace

import pytest
import torch
from torch import nn

from fluxray.config.load import resolve
from fluxray.memory.checkpointing import segments
from fluxray.memory.estimate import IN_FLIGHT
from fluxray.memory.operations import Operation, OperationCost, choose_operations, read_operations
from fluxray.memory.plan import MemoryPlan
from fluxray.runtime.planning import nearest
from tests.memory.helpers import planned

SHARDED = ("engine.kind=sharded", "optim.kind=adamw", "optim.master=fp32", "clip.mode=exact", "compile=false")
EVERY_2 = ("activation_checkpoint=every_n", "activation_checkpoint_every=2")
NO_DROPOUT = ("model.config.hidden_dropout=0", "model.config.attention_dropout=0")
UP, DOWN, CORE = (Operation("product", 0), Operation("product", 1), Operation("attention", 0))


def seed(kind: str, *words: str) -> MemoryPlan:
    return planned("flux2-seed", *SHARDED, f"activation_checkpoint={kind}", *words)


def test_operations_of_a_block_counted_by_hand():
    width, rows = 32, 8
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        hidden = torch.empty(rows, width)
    (found,) = read_operations(module, (hidden,), {})  # the second product's result is not needed again
    assert found == OperationCost(UP, 2 * rows * width * 4 * width, 4 * rows * 4 * width)


def test_the_operations_of_gpt_neox():
    found = seed("none", *NO_DROPOUT).demand.spec
    (kind,) = found.kinds.values()
    length, width = found.row_tokens, 2048
    by_name = {cost.operation: cost for cost in kind.operations}
    assert set(by_name) == {Operation("product", 0), Operation("attention", 0), Operation("product", 2)}
    assert by_name[Operation("product", 0)].flops == 2 * length * width * 3 * width
    assert by_name[Operation("product", 0)].num_bytes == 2 * length * 3 * width
    assert by_name[Operation("attention", 0)].num_bytes == 2 * length * width + 4 * length * 16
    assert by_name[Operation("attention", 0)].flops == 4 * length * length * width


def test_the_dearest_by_byte_are_kept_first_and_in_the_last_blocks():
    costs = {"a": (OperationCost(UP, 100, 10), OperationCost(DOWN, 100, 5), OperationCost(CORE, 100, 1))}
    kept = choose_operations(["a"] * 3, costs, 2, 2 * (3 * 1 + 2 * 5) + 9, has_dropout=False)
    assert kept == ((CORE,), (CORE, DOWN), (CORE, DOWN))
    assert choose_operations(["a"] * 3, costs, 2, 1000, has_dropout=False) == ((CORE, UP, DOWN),) * 3
    assert choose_operations(["a"] * 3, costs, 2, 1000, has_dropout=True) == ((UP, DOWN),) * 3
    assert choose_operations(["a"] * 3, costs, 2, 1, has_dropout=False) == ((),) * 3


def test_what_each_kind_keeps_and_computes_again():
    none, full = seed("none"), seed("full")
    every = seed("every_n", "activation_checkpoint_every=2")
    root, budget = seed("sqrt"), 2**30
    some = seed("selective", f"activation_checkpoint_budget={budget}")
    away = seed("offload", "hardware.link=25GB/s")
    spec, rows = none.demand.spec, none.demand.micro_rows
    (kind,) = spec.kinds.values()
    count, carry = len(spec.blocks), spec.blocks[0].carry_bytes * rows
    size = len(segments(count)[-1])
    assert (count, size) == (24, 5)
    kept, peak = kind.kept(rows), kind.peak(rows)
    assert none.bytes.device["activations"] == peak + (count - 1) * kept
    assert full.bytes.device["activations"] == away.bytes.device["activations"] == peak
    assert every.bytes.device["activations"] == peak + (count // 2) * kept - kept
    assert root.bytes.device["activations"] == peak + (size - 1) * kept
    assert peak + 0.9 * budget < some.bytes.device["activations"] <= peak + budget
    shared = rows * spec.shared_bytes
    inputs = {"none": none, "full": full, "every": every, "root": root, "some": some, "away": away}
    assert {name: (plan.bytes.device["kept inputs"] - shared) // carry for name, plan in inputs.items()} == {
        "none": 0, "full": count, "every": count // 2, "root": len(segments(count)) - 1, "some": count, "away": IN_FLIGHT
    }  # fmt: skip
    assert away.bytes.host["waiting inputs"] == (count - 1) * carry and full.bytes.host["waiting inputs"] == 0
    forward = kind.forward_flops * none.demand.rank_rows / (none.hardware.tflops * 1e12)
    again = {name: (plan.speed.floor - none.speed.floor) / forward for name, plan in inputs.items()}
    spared = sum(cost.flops for kept in some.policy.kept_operations for cost in kind.operations if cost.operation in kept)
    assert again["full"] == pytest.approx(count) and again["every"] == pytest.approx(count / 2)
    assert again["root"] == pytest.approx(count - size)
    assert spared > 0 and again["some"] == pytest.approx(count - spared / kind.forward_flops)


def test_compiled_blocks_without_dropout_compute_again_what_backward_needs():
    eager, compiled = seed("full", *NO_DROPOUT), seed("full", *NO_DROPOUT, "compile=true")
    (kind,) = compiled.demand.spec.kinds.values()
    saved = (kind.forward_flops - kind.again_flops) * 24 * compiled.demand.rank_rows / (compiled.hardware.tflops * 1e12)
    assert eager.speed.floor - compiled.speed.floor == pytest.approx(saved)


def test_a_streamed_models_inputs_wait_on_the_host_and_its_budget_counts_all_micro_batches():
    base = ("engine.kept_blocks=0", "engine.resident_blocks=0")
    full, away = (planned("neox-20b", *base, f"activation_checkpoint={kind}") for kind in ("full", "offload"))
    carry = full.demand.rank_rows * full.demand.spec.blocks[0].carry_bytes
    assert away.bytes.host["waiting inputs"] == 43 * carry
    assert full.bytes.device["kept inputs"] - away.bytes.device["kept inputs"] == (45 - IN_FLIGHT - 1) * carry
    some = planned("neox-20b", *base, "activation_checkpoint=selective", "activation_checkpoint_budget=4GB")
    more = some.bytes.device["activations"] - full.bytes.device["activations"]
    assert 3.5e9 < more <= 4e9 and some.speed.floor < full.speed.floor
    assert len(some.policy.kept_operations) == 43  # the last block keeps everything


@pytest.mark.parametrize("profile", ["a6000", "fsdp8"])
def test_selective_keeps_what_full_keeps_where_compiled_blocks_hide_operations(profile):
    given = ("hardware.device_memory=80GB", "hardware.tflops=100", "hardware.memory_bandwidth=1TB/s", "hardware.link=25GB/s")
    words = (*given, "adapter.kind=lora", "adapter.dropout=0.1")
    found, full = (planned("flux1-dev", *words, *more, profile=profile) for more in ((), ("activation_checkpoint=full",)))
    assert found.demand.activation_checkpoint == "selective" and found.demand.hides_operations
    assert found.policy == full.policy and found.bytes == full.bytes and found.speed == full.speed


def test_what_fits_may_be_another_kind():
    words = (*SHARDED, "batch.micro_size=3", "batch.accumulation_steps=1")
    config = resolve("a6000", "flux2-seed", [*words, "activation_checkpoint=none"])
    plans = {kind: planned("flux2-seed", *words, *kind) for kind in (("activation_checkpoint=none",), EVERY_2)}
    none, every = plans.values()
    lacking = replace(none, hardware=replace(none.hardware, device_bytes=every.device_bytes))
    assert nearest(config, lacking)[:2] == [
        "activation_checkpoint=every_n activation_checkpoint_every=2",
        "activation_checkpoint=full",
    ]


def test_logits_of_a_sharded_run_come_in_pieces():
    whole, pieces = seed("full"), seed("full", "loss.chunk_tokens=1024")
    tokens, outputs = whole.demand.micro_tokens, whole.demand.spec.num_outputs
    assert whole.bytes.device["logits"] == tokens * outputs * 12
    assert pieces.bytes.device["logits"] == 1024 * outputs * 12
    head = max(parameter.numel for parameter in whole.demand.spec.outside)
    assert pieces.bytes.device["gradients"] - whole.bytes.device["gradients"] == 6 * head
    assert pieces.device_bytes < whole.device_bytes
