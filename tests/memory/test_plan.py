from dataclasses import replace

import pytest

from fluxray.memory.plan import Wanted, plan
from fluxray.memory.speed import LINK_IN
from fluxray.memory.table import comparison, summary, table
from tests.memory.helpers import GIB, planned

STEP_16K = ("batch.micro_size=4", "batch.accumulation_steps=2")


def test_neox_20b_under_45_gb_as_planned_by_hand():
    small, large = (planned("neox-20b", *words, "engine.kept_blocks=0") for words in (STEP_16K, ()))
    assert small.demand.tokens == 16_384 and large.demand.tokens == 32_768
    assert small.device_bytes / GIB == pytest.approx(26.0, rel=0.03)
    assert large.device_bytes / GIB == pytest.approx(34.5, rel=0.03)
    assert large.bytes.host["blocks"] / GIB == pytest.approx(93.4, abs=0.1)
    assert not small.shortfalls and not large.shortfalls


@pytest.mark.parametrize(("master", "gib"), [("split24", 55.5), ("stochastic", 44.4)])
def test_flux1_dev_on_the_host_as_planned_by_hand(master, gib):
    found = planned("flux1-dev", f"optim.master={master}")
    assert found.policy.resident_blocks == 0
    assert found.bytes.host["blocks"] / GIB == pytest.approx(gib, abs=0.1)


def test_flux2_dev_fits_128_gib_of_host_memory_without_corrections_alone():
    split, stochastic = planned("flux2-dev"), planned("flux2-dev", "optim.master=stochastic")
    assert {short.place for short in split.shortfalls} == {"host"}
    assert not stochastic.shortfalls
    assert stochastic.policy.resident_blocks > 0  # the host alone would not do


def test_clipping_by_the_exact_norm_leaves_room_for_stochastic_masters_alone():
    assert planned("neox-20b", "clip.mode=exact", "engine.resident_blocks=0").shortfalls
    assert not planned("neox-20b", "clip.mode=exact", "optim.master=stochastic").shortfalls


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (("hardware.tflops=120",), 4_800),
        (("hardware.tflops=700", "hardware.link=50GB/s"), 14_000),
        (("hardware.tflops=700", "hardware.link=50GB/s", "clip.mode=exact", "optim.master=stochastic"), 42_000),
    ],
)
def test_where_transfers_hide(words, tokens):
    """Work of 2 FLOPs a parameter and token; attention makes it a little more, and the number of tokens less."""
    found = planned("neox-20b", "engine.resident_blocks=0", *words)
    assert found.speed.hiding_tokens == pytest.approx(tokens, rel=0.08)


def test_flux1_moves_nearly_twice_the_parameters_that_a_token_meets():
    found = planned("flux1-dev", "engine.resident_blocks=0", "hardware.tflops=120")
    assert found.speed.hiding_tokens == pytest.approx(8_800 * 12.2 / 16.1, rel=0.1)  # attention at 4,608 tokens counts here


def test_a_step_is_bound_by_the_link_below_and_by_arithmetic_above():
    short = planned("neox-20b", "data.max_slice=512", "batch.accumulation_steps=1", "engine.resident_blocks=0")
    long = planned("neox-20b", "engine.resident_blocks=0")
    assert short.speed.by[LINK_IN] > 0.7 * short.speed.seconds
    assert long.speed.by[LINK_IN] == 0
    # 144 GB in; what backward finds in the slots is not fetched again
    assert short.speed.floor == pytest.approx((19.93e9 * 7.03 - 3 * 0.906e9) / 25e9, rel=0.05)


def test_the_floor_is_flops_over_rate_where_nothing_else_bounds_it():
    found = planned("neox-20b", "engine.resident_blocks=0", "engine.kept_blocks=0")
    spec, rows = found.demand.spec, found.demand.rank_rows
    blocks = sum(spec.kinds[block.kind].forward_flops for block in spec.blocks)
    again = sum(spec.kinds[block.kind].again_flops for block in spec.blocks[:-1])  # the last one is not computed again
    arithmetic = rows * (3 * blocks + again + 3 * spec.outside_flops) / 100e12
    # weights and states read and written; a bf16 gradient of four micro-batches copied, added thrice, read for norm and step
    step = 20.55e9 * (2 * 5.03 + 6 + 3 * 10 + 4 + 4) / 768e9
    assert found.speed.floor == pytest.approx(arithmetic + step, rel=1e-3)


def test_spare_memory_holds_blocks_where_the_link_is_the_limit():
    words = ("data.max_slice=512", "batch.accumulation_steps=1")
    free, fixed = planned("neox-20b", *words), planned("neox-20b", *words, "engine.resident_blocks=0")
    assert free.policy.resident_blocks > 0 and free.speed.seconds < fixed.speed.seconds
    assert free.device_bytes <= free.hardware.device_bytes
    moved = free.policy.resident_blocks * (free.demand.blocks[0].total)
    assert fixed.bytes.host["blocks"] - free.bytes.host["blocks"] == moved
    assert planned("neox-20b").policy.resident_blocks == 0  # above, they would buy nothing


def test_the_slots_and_buffers_are_those_of_the_engine():
    found = planned("neox-20b", "engine.weight_slots=2", "engine.state_slots=4")
    unit = found.demand.blocks[0]
    assert found.bytes.device["slots"] == 2 * unit.weights + 4 * unit.states
    held = planned("neox-20b", "clip.mode=exact", "optim.master=stochastic")
    unit = held.demand.blocks[0]
    assert held.bytes.device["slots"] == 3 * unit.weights + 3 * unit.states + 2 * 2 * unit.num_gradients
    assert held.bytes.host["blocks"] == 44 * (unit.total + 2 * unit.num_gradients)


def test_kept_activations_cost_their_bytes_and_save_a_forward_of_their_block():
    free, none = planned("neox-20b", *STEP_16K), planned("neox-20b", *STEP_16K, "engine.kept_blocks=0")
    spec, num_kept = free.demand.spec, free.policy.kept_blocks
    assert num_kept == 4 and none.policy.kept_blocks == 0
    (kind,) = spec.kinds.values()
    beside_output = kind.kept(4) - 4 * spec.blocks[0].carry_bytes  # which is the next block's input
    assert free.bytes.device["activations"] - none.bytes.device["activations"] == num_kept * 2 * beside_output
    assert free.device_bytes <= 0.94 * free.hardware.device_bytes
    saved = num_kept * kind.again_flops * 8 / (free.hardware.tflops * 1e12)
    assert none.speed.floor - free.speed.floor == pytest.approx(saved, rel=1e-6)
    assert planned("neox-20b").policy.kept_blocks == 0  # would leave less than the allocator may lose
    fixed = planned("neox-20b", *STEP_16K, "engine.kept_blocks=1")
    assert fixed.policy.kept_blocks == 1 and none.speed.seconds > fixed.speed.seconds > free.speed.seconds


def test_below_where_transfers_hide_nothing_is_kept_that_saves_no_time():
    found = planned(
        "neox-20b", "batch.micro_size=1", "data.max_slice=512", "batch.accumulation_steps=1", "engine.resident_blocks=0"
    )
    assert found.policy.kept_blocks == 0


def test_a_streamed_model_is_saved_without_a_copy():
    assert planned("neox-20b").bytes.host["checkpoint"] == 0
    words = ("engine.kind=sharded", "optim.kind=adamw", "optim.master=fp32", "clip.mode=exact")
    assert planned("flux2-seed", *words).bytes.host["checkpoint"] > 0


def test_logits_come_in_smaller_chunks_only_where_nothing_else_fits():
    found = planned("neox-20b")
    assert found.policy.epilogue_tokens == 2048
    tight = replace(found.hardware, device_bytes=found.device_bytes - 1)
    again = plan(found.demand, tight, Wanted())
    assert again.policy.epilogue_tokens == 1024 and not again.shortfalls


def test_a_group_holds_its_share_and_a_gathered_block():
    one = planned("flux2-seed", "engine.kind=sharded", "optim.kind=adamw", "optim.master=fp32", "clip.mode=exact")
    words = (
        "hardware.device_memory=40GB",
        "hardware.tflops=200",
        "hardware.memory_bandwidth=1500GB/s",
        "hardware.host_memory=1TB",
    )
    eight = planned("flux2-seed", *words, profile="fsdp8")
    num = one.demand.spec.num_parameters
    assert eight.bytes.device["weights"] + eight.bytes.device["optimizer"] + eight.bytes.device["gradients"] == pytest.approx(
        16 * num / 8, rel=1e-3
    )
    assert one.bytes.device["weights"] == pytest.approx(6 * num, rel=1e-3)  # masters and copies to compute with
    assert eight.bytes.device["gathered blocks"] > 0 and "slots" not in eight.bytes.device
    assert eight.demand.tokens == 8 * one.demand.tokens
    assert eight.speed.hiding_tokens is None


def test_paged_states_are_the_hosts_but_for_those_of_a_block():
    words = ("engine.kind=sharded", "optim.master=fp32", "clip.mode=exact")
    paged, plain = (planned("flux2-seed", *words, f"optim.kind={kind}") for kind in ("paged_adam8bit", "adam8bit"))
    units = (*plain.demand.blocks, plain.demand.outside)
    assert plain.bytes.device["optimizer"] == paged.bytes.host["paged states"] == sum(unit.states for unit in units)
    assert paged.bytes.device["optimizer"] == max(unit.states for unit in units) and "paged states" not in plain.bytes.host


@pytest.mark.parametrize("profile", ["a6000", "fsdp8"])
def test_stepping_in_backward_holds_the_gradients_of_one_block_and_of_what_is_reduced_with_it(profile):
    words = ("engine.kind=sharded", "optim.kind=adamw", "optim.master=fp32", "clip.mode=block", "batch.accumulation_steps=1")
    figures = ("hardware.device_memory=40GB", "hardware.tflops=200", "hardware.memory_bandwidth=1500GB/s")
    inside, after = (
        planned("flux2-seed", *words, *figures, f"optim.in_backward={flag}", profile=profile) for flag in ("true", "false")
    )
    blocks, outside = after.demand.blocks, after.demand.spec.outside
    num_outside = max(p.numel for p in outside) if profile == "a6000" else after.demand.outside.num_gradients
    ranks = after.demand.num_ranks
    assert inside.bytes.device["gradients"] == 4 * (max(u.num_gradients for u in blocks) + num_outside) // ranks
    assert after.bytes.device["gradients"] > 4 * inside.bytes.device["gradients"]
    rest = [{key: value for key, value in found.bytes.device.items() if key != "gradients"} for found in (inside, after)]
    assert rest[0] == rest[1]


@pytest.mark.parametrize("precision", ["amp-fp16", "amp-bf16"])
def test_autocast_keeps_16_bit_weights_with_the_activations(precision):
    words = ("engine.kind=sharded", "optim.kind=adamw", "optim.master=fp32", "clip.mode=exact")
    for checkpointing, at_once in (("full", 1), ("none", 24)):
        amp, full = (
            planned("flux2-seed", *words, f"activation_checkpoint={checkpointing}", f"precision={kind}")
            for kind in (precision, "fp32")
        )
        block, head = amp.demand.blocks[0].num_gradients, max(p.numel for p in amp.demand.spec.outside)
        casts = amp.bytes.device["activations"] - full.bytes.device["activations"]
        assert casts == 2 * (at_once * block + head)
        assert amp.bytes.device["weights"] == full.bytes.device["weights"]
    streamed = (
        "engine.kind=stream",
        "optim.master=fp32",
        "clip.mode=exact",
        "engine.kept_blocks=2",
        "engine.resident_blocks=0",
        "batch.accumulation_steps=2",
    )
    amp, full = (planned("flux2-seed", *streamed, f"precision={kind}") for kind in (precision, "fp32"))
    assert amp.bytes.device["activations"] - full.bytes.device["activations"] == 2 * (5 * block + head)


def test_measured_bytes_are_told_beside_the_planned():
    found = planned("neox-20b")
    lines = comparison(found, {"device": found.device_bytes + found.device_bytes // 50, "host blocks": 50 * GIB})
    assert lines[0].startswith("memory of device: planned 3") and lines[0].endswith("+2.0%")
    assert lines[1].startswith("memory of host blocks: planned 93.43 GiB, measured 50.00 GiB, -46.5%")
    with pytest.raises(ValueError, match="device x is not in the plan"):
        comparison(found, {"device x": 1})


def test_a_summary_is_two_lines_with_what_bounds_a_step():
    first, second = summary(planned("neox-20b", "engine.kept_blocks=0"))
    assert " of 41.9 GiB, host 97.4 of 121.6 GiB; 0 of 44 blocks resident, activations of 0 kept, logits of 2,048" in first
    assert "bound by arithmetic 98%" in second and second.startswith("plan: ") and "; floor " in second


def test_the_categories_of_the_table_add_up():
    found = planned("neox-20b")
    lines = table(found)
    device = lines[: lines.index(f"{'host':<18}{'GiB':>8}")]
    rows = [line.split() for line in device[1:-1]]
    assert sum(float(row[-1]) for row in rows) == pytest.approx(found.device_bytes / GIB, rel=0.01)
    assert device[-1].split()[:2] == ["total", f"{found.device_bytes / GIB:.1f}"]


def test_eager_blocks_and_those_with_dropout_are_computed_again_as_a_whole():
    compiled, eager = planned("neox-20b"), planned("neox-20b", "compile=false")
    dropping = planned("neox-20b", "model.config.hidden_dropout=0.1")
    assert compiled.speed.floor < 0.95 * eager.speed.floor
    assert dropping.speed.floor == pytest.approx(eager.speed.floor, rel=1e-3)
