"""The plan of a group: a rank holds its share of the whole and what is gathered, or its host does."""

import pytest

from fluxray.config.load import resolve
from fluxray.memory.group import page_locked
from fluxray.memory.plan import MemoryPlan
from fluxray.runtime import planning
from tests.memory.helpers import GIB, spec_of

FIGURES = ("host_memory=2TB", "tflops=700", "memory_bandwidth=3TB/s", "link=50GB/s")
OFFLOADED = "engine.cpu_offload=true"
MODELS = ("flux1-dev", "flux2-dev", "neox-20b")


def group(model: str, *words: str, num_ranks: int = 8, memory_gb: int = 80) -> MemoryPlan:
    hardware = [f"hardware.{figure}" for figure in (*FIGURES, f"device_memory={memory_gb}GB")]
    config = resolve("fsdp8", model, [f"resources.num_workers={num_ranks}", *hardware, *words])
    return planning.plan_run(config, spec_of(model))


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_its_share_of_the_whole_and_gathered_blocks(model: str, num_ranks: int) -> None:
    found = group(model, "activation_checkpoint=full", num_ranks=num_ranks)
    blocks, outside = found.demand.blocks, found.demand.outside
    number, largest = found.demand.spec.num_parameters, max(unit.num_gradients for unit in blocks)
    device = found.bytes.device
    sharded = device["weights"] + device["optimizer"] + device["gradients"]
    assert sharded == pytest.approx(16 * number / num_ranks, rel=1e-5)  # fp32 masters, gradients and two moments
    # bf16: two blocks and what is outside them; fp32: a block's gradient before and after reduction
    assert device["gathered blocks"] == 2 * (2 * largest + outside.num_weights) + 8 * largest
    per_micro_batch = ("kept inputs", "activations", "logits", "CUDA context", "workspaces", "validation")
    alone = group(model, "activation_checkpoint=full", num_ranks=num_ranks, memory_gb=40).bytes.device
    assert device == alone and set(device) == {"weights", "optimizer", "gradients", "gathered blocks", *per_micro_batch}


FITS = {"flux1-dev": (True, True), "flux2-dev": (False, False), "neox-20b": (True, False)}


@pytest.mark.parametrize(("model", "fits"), FITS.items())
def test_what_eight_gpus_of_80_and_of_40_gb_can_train(model: str, fits: tuple[bool, bool]) -> None:
    words = ("activation_checkpoint=full",)
    assert tuple(not group(model, *words, memory_gb=memory_gb).shortfalls for memory_gb in (80, 40)) == fits
    assert not group(model, *words, OFFLOADED, memory_gb=40).shortfalls


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_offloaded_leaves_every_device_for_the_host(model: str, num_ranks: int) -> None:
    there, here = group(model, OFFLOADED, num_ranks=num_ranks), group(model, num_ranks=max(num_ranks, 2))
    spec, host = there.demand.spec, there.bytes.host
    parameters = [p for block in spec.blocks for p in block.parameters] + list(spec.outside)
    assert [there.bytes.device[name] for name in ("weights", "optimizer", "gradients")] == [0, 0, 0]
    assert host["optimizer"] == pytest.approx(8 * spec.num_parameters, rel=1e-5)
    locked = num_ranks * sum(page_locked(4 * (p.numel // p.shape[0]) * -(-p.shape[0] // num_ranks)) for p in parameters)
    assert host["weights"] == locked and 4 * spec.num_parameters <= locked < 8 * spec.num_parameters
    assert locked <= host["gradients"] <= locked + num_ranks * 4 * max(p.numel for p in parameters)
    largest = max(unit.num_weights for unit in (*there.demand.blocks, there.demand.outside))
    coming = there.bytes.device["gathered blocks"] - here.bytes.device["gathered blocks"]
    assert coming == largest * (4 + 2) // num_ranks  # fp32 shards of a block, and what they are cast to
    assert "weights" not in here.bytes.host


def test_offloading_is_told_with_what_it_makes_wait() -> None:
    there = group("flux1-dev", OFFLOADED, "batch.accumulation_steps=1")
    one, four = (
        group("flux1-dev", OFFLOADED, f"batch.accumulation_steps={n}", "hardware.link=1GB/s").speed.seconds for n in (1, 4)
    )
    assert four == pytest.approx(4 * one, rel=0.05)  # each micro-batch fetches all shards, and sends gradients back
    assert one == pytest.approx((2 + 0) * 4 * 11.9e9 / 8 / 1e9, rel=0.05)  # the longer way of both passes
    lines = planning.describe(resolve("fsdp8", "flux1-dev", []), there, "x")
    assert any(line.startswith("left out") and "the optimizer's step on the host" in line for line in lines)


def test_blocks_that_stay_gathered_are_counted() -> None:
    again, stays = (group("neox-20b", f"engine.reshard_after_forward={flag}") for flag in ("true", "false"))
    more = stays.bytes.device["gathered blocks"] - again.bytes.device["gathered blocks"]
    assert more == 2 * (44 - 2) * again.demand.blocks[0].num_weights
    assert more / GIB > 35


def test_a_plan_that_does_not_fit_names_offloading() -> None:
    config = resolve("fsdp8", "flux2-dev", [f"hardware.{figure}" for figure in (*FIGURES, "device_memory=40GB")])
    found = planning.plan_run(config, spec_of("flux2-dev"))
    assert found.shortfalls and "engine.cpu_offload=True" in planning.nearest(config, found)


@pytest.mark.parametrize(("num_bytes", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (3 * 2**30, 4 * 2**30)])
def test_page_locked_memory_comes_in_powers_of_two(num_bytes: int, taken: int) -> None:
    assert page_locked(num_bytes) == taken


def test_recomputation_is_spared_with_the_memory_that_is_left() -> None:
    full, planned = (group("flux1-dev", f"activation_checkpoint={kind}") for kind in ("full", "selective"))
    spec, limit = full.demand.spec, 0.9 * 80e9
    everything = sum(
        cost.num_bytes * full.demand.micro_rows for block in spec.blocks for cost in spec.kinds[block.kind].operations
    )
    assert planned.policy.checkpoint_budget == pytest.approx(limit - full.device_bytes, abs=1)
    more = planned.bytes.device["activations"] - full.bytes.device["activations"]
    assert more == everything < planned.policy.checkpoint_budget  # so little is kept of two images that there is room for all
    assert planned.speed.seconds < 0.85 * full.speed.seconds
    larger = group("flux1-dev", "batch.micro_size=8", "batch.accumulation_steps=1")
    assert larger.demand.activation_checkpoint == "selective"  # as the preset has it
    assert 0.88 * 80e9 < larger.device_bytes <= limit and larger.speed.seconds < full.speed.seconds
    tight = group("flux1-dev", memory_gb=36)
    assert tight.policy.checkpoint_budget == 0 and not any(tight.policy.kept_operations)


def test_a_given_budget_holds_whatever_is_left() -> None:
    given, full = (
        group("flux1-dev", *words) for words in (("activation_checkpoint_budget=1GB",), ("activation_checkpoint=full",))
    )
    assert given.policy.checkpoint_budget == 10**9
    assert 0.9e9 < given.bytes.device["activations"] - full.bytes.device["activations"] <= 10**9
