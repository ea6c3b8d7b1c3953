import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from fluxray import cli
from fluxray.config.load import resolve
from fluxray.data.batching import cut_buckets
from fluxray.errors import ConfigError, PlanError
from fluxray.memory import probe
from fluxray.memory.speed import BLOCK_SHARE
from fluxray.metrics import count_forward_flops
from fluxray.models.flux_facts import flux_facts
from fluxray.models.flux_stack import build_flux
from fluxray.runtime import blockprobe, planning
from fluxray.runtime.blockprobe import probe_blocks
from fluxray.runtime.images import Size
from fluxray.runtime.learn_images import META, flops_of_images
from fluxray.runtime.stacks import images
from tests.flow_caches import random_cache
from tests.memory.helpers import planned

SCRATCH = 2**23
"""What CUDA's reductions take of the device besides: here the bias's gradient, summed by several thread blocks an output."""


def run(*words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code


def test_a_plan_that_fits_is_printed(capsys):
    assert run("plan", "--profile", "a6000", "--model", "neox-20b") == 0
    captured = capsys.readouterr()
    assert "20.55B parameters" in captured.out and "32,768 tokens" in captured.out
    assert "bound by          arithmetic" in captured.out
    assert captured.err == ""


def test_the_sizes_that_memory_allows_are_printed(capsys):
    assert run("plan", "--profile", "a6000", "--model", "neox-20b", "batch.dynamic=true", "hardware.device_memory=42GB") == 0
    assert "micro-batches     change with memory, of 4, 8, 16 rows: fitting are 4, 8\n" in capsys.readouterr().out


def test_one_that_does_not_is_printed_and_says_what_would(capsys):
    assert run("plan", "--profile", "a6000", "--model", "flux2-dev", "hardware.host_memory=128GiB", "hardware.link=25GB/s") == 2
    captured = capsys.readouterr()
    assert "LACKS" in captured.out and "assumed: one image of 1024 px" in captured.out
    assert captured.err.startswith("fluxray: error: plan: host memory lacks ") and captured.err.count("\n") == 1
    assert captured.err.endswith("fits with optim.master=stochastic\n")


def test_moving_averages_lie_on_the_host():
    without, kept, half = (
        planned("neox-20b", "engine.resident_blocks=0", *words)
        for words in ((), ("ema.decay=0.99",), ("ema.decay=0.99", "ema.dtype=bf16"))
    )
    in_blocks = sum(block.num_parameters for block in without.demand.spec.blocks)
    assert kept.bytes.host["blocks"] - without.bytes.host["blocks"] == pytest.approx(4 * in_blocks, rel=1e-3)
    assert half.bytes.host["blocks"] - without.bytes.host["blocks"] == pytest.approx(2 * in_blocks, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("neox-20b", ("batch.micro_size=16", "batch.accumulation_steps=1")),
        ("neox-20b", ("batch.micro_size=8",)),
        ("neox-20b", ("clip.mode=exact", "engine.resident_blocks=0")),
        ("flux2-dev", ("optim.master=stochastic", "engine.resident_blocks=0")),
        ("neox-20b", ("hardware.host_memory=110GiB", "batch.accumulation_steps=2")),
    ],
)
def test_the_settings_that_are_named_fit(model, words):
    found = planned(model, *words)
    near = planning.nearest(resolve("a6000", model, words), found) if found.shortfalls else []
    assert near or not found.shortfalls
    for change in near:
        assert not planned(model, *words, *change.split()).shortfalls


def test_what_leaves_the_result_as_it_is_comes_first():
    words = ("batch.micro_size=16", "batch.accumulation_steps=1")
    found = planned("neox-20b", *words, "hardware.device_memory=40GB")
    near = planning.nearest(resolve("a6000", "neox-20b", [*words, "hardware.device_memory=40GB"]), found)
    assert near[0].startswith("batch.micro_size=8 batch.accumulation_steps=2")


def test_nothing_fits_a_card_that_is_too_small():
    words = ("hardware.device_memory=4GB",)
    with pytest.raises(PlanError, match=r"would fit$"):
        planning.require_fit(resolve("a6000", "neox-20b", words), planned("neox-20b", *words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
def test_open_figures_of_a_gpu_that_is_not_here_are_asked_for():
    with pytest.raises(ConfigError) as refused:
        planned("flux2-seed", profile="fsdp8")
    assert str(refused.value) == (
        "hardware.device_memory: is open and torch finds no GPU here to ask; give hardware.device_memory=45GB "
        "hardware.memory_bandwidth=768GB/s hardware.tflops=100"
    )


def test_a_machine_without_a_gpu_is_read_and_measured():
    found = planned("lm-tiny", profile="cpu").hardware
    assert found.device_bytes == found.host_bytes and found.tflops > 0
    assert found.sources["host_memory"].endswith("read from this machine")


def test_a_plan_for_the_cpu_has_no_context_and_no_link():
    found = planned("lm-tiny", "hardware.tflops=0.1", "precision=fp32", profile="cpu")
    assert found.bytes.device["CUDA context"] == 0 and found.speed.hiding_tokens is None


def test_more_resident_blocks_than_there_are_are_refused():
    with pytest.raises(ConfigError, match=r"^engine\.resident_blocks: 45, but the model has 44 blocks; lower it$"):
        planned("neox-20b", "engine.resident_blocks=45")


def test_more_kept_blocks_than_there_are_before_the_last_are_refused():
    with pytest.raises(
        ConfigError, match=r"^engine\.kept_blocks: 44, but before the last of the model's 44 blocks there are 43; "
    ):
        planned("neox-20b", "engine.kept_blocks=44")
    found = planned("neox-20b", "engine.kept_blocks=43")
    assert {short.place for short in found.shortfalls} == {"device"}
    assert planning.nearest(resolve("a6000", "neox-20b", ["engine.kept_blocks=43"]), found) == ["engine.kept_blocks=0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.config._class_name=UNet"], "model.config._class_name: 'UNet' is no FLUX transformer; use one of "),
        (["model.config.num_layer=3"], "model.config.num_layer: is no key of Flux2Transformer2DModel; did you mean"),
    ],
)
def test_image_models_that_diffusers_does_not_know_are_refused(words, message):
    with pytest.raises(ConfigError) as refused:
        planning.model_spec(resolve("a6000", "flux2-klein-4b", words))
    assert str(refused.value).startswith(message)


def test_flux_fits_small_cards(capsys):
    words = ("hardware.device_memory=24GB", "hardware.host_memory=64GiB")
    assert run("plan", "--profile", "a6000", "--model", "flux1-dev", *words) == 0
    captured = capsys.readouterr()
    assert "11.9B parameters, 57 blocks" in captured.out and "images x 4,608 tokens" in captured.out
    assert "an image          assumed: one image of 1024 px and 512 tokens of text\n" in captured.out
    assert "logits" not in captured.out
    small = ("data.resolution=512", "data.text_tokens=256", "hardware.device_memory=16GB")
    assert run("plan", "--profile", "a6000", "--model", "flux2-klein-4b", *small) == 0
    assert "an image          one image of 512 px and 256 tokens of text\n" in capsys.readouterr().out


def cached(folder, **counts):
    facts = {"channels": 64, "text_width": 64, "pooled_width": 32}
    buckets = {(48, 80, 5): 3, (64, 64, 7): 2} if not counts else {(64, 64, 7): 5}
    random_cache(folder, buckets, **facts)
    return folder


def test_images_are_planned_as_large_as_the_cache_has_them(tmp_path):
    words = ("model.config.num_layers=1", "model.config.num_single_layers=1", f"data.cache={cached(tmp_path / 'several')}")
    held_out = cached(tmp_path / "one", single=True)
    found = planned("flux1-tiny", *words).demand
    assert found.spec.row_tokens == 16 + 7 and found.spec.num_sizes == 2
    assert found.spec.told == "an image of 64x64 px and 7 tokens of text, the largest of 2 sizes in data.cache"
    alone = planned("flux1-tiny", *words[:2], f"data.cache={held_out}").demand.spec
    assert alone.num_sizes == 1 and alone.told == "an image of 64x64 px and 7 tokens of text"
    gone = planned("flux1-tiny", *words[:2], f"data.cache=path:{tmp_path / 'gone'}").demand.spec
    assert gone.told.startswith("assumed: one image of 1024 px and 512 tokens of text (data.cache: ")


@pytest.mark.parametrize(
    ("micro_size", "steps", "workers", "num_sizes"), [(2, 3, 1, 2), (4, 2, 2, 3), (1, 4, 1, 5), (8, 1, 1, 2)]
)
def test_no_step_has_more_micro_batches_than_are_planned(micro_size, steps, workers, num_sizes):
    words = [f"batch.micro_size={micro_size}", f"batch.accumulation_steps={steps}", f"resources.num_workers={workers}"]
    config = resolve("cpu", "flux1-tiny", words)
    bound, most = planning.most_micro_batches(config, num_sizes), 0
    random = np.random.default_rng(0)
    for _ in range(300):
        runs = np.sort(random.integers(0, num_sizes, config.global_batch_size))
        border = random.integers(0, len(runs) + 1)
        mixed = [*np.sort(random.permutation(runs)[:border]), *np.sort(random.permutation(runs)[border:])]
        most = max(most, len(cut_buckets([1] * len(mixed), mixed, workers, micro_size)))
    assert bound is not None and steps <= most <= bound
    assert planning.most_micro_batches(config, 1) is None


def test_mixed_steps_are_given_room_for_what_each_micro_batch_keeps():
    words = ("precision=amp-bf16", "optim.master=fp32", "engine.kept_blocks=1", "data.resolution=64", "data.text_tokens=8")
    one = planned("flux1-tiny", *words)
    spec = replace(one.demand.spec, num_sizes=3)
    several = planning.plan_run(resolve("a6000", "flux1-tiny", words), spec)
    activations = [found.bytes.device["activations"] for found in (one, several)]
    largest = max(unit.num_gradients for unit in one.demand.blocks)
    assert several.demand.most_micro_batches == 6
    assert activations[1] - activations[0] >= 5 * 2 * largest  # of each, autocast keeps a copy of the block's weights


@pytest.mark.parametrize("model", ["flux1-tiny", "flux2-tiny"])
def test_flops_of_images_are_counted_for_every_size(model):
    config = resolve("cpu", model)
    facts, stack = flux_facts(config.model), build_flux(config.model, 0, "flash")
    flops_of = flops_of_images(stack, facts)
    for size in (Size(3, 5, 11), Size(16, 12, 77)):
        batch = images(facts, size, 3, META)
        assert flops_of(batch) == pytest.approx(3 * count_forward_flops(lambda batch=batch: stack(batch, lambda out, _: out)))
    spec = planning.model_spec(resolve("cpu", model, ["data.resolution=64", "data.text_tokens=9"]))
    assert flops_of(images(facts, Size(4, 4, 9), 1, META)) == pytest.approx(3 * spec.forward_flops)


@pytest.mark.parametrize("model", ["flux1-tiny", "flux2-tiny"])
def test_blocks_of_flux_compute_as_in_training_and_are_timed(model):
    small = ["model.config.num_attention_heads=2", "data.resolution=32", "data.text_tokens=9", "batch.micro_size=1"]
    config = resolve("a6000", model, ["compile=false", *small])
    spec = planning.model_spec(config)
    rate, found = probe_blocks(config, spec, torch.device("cpu"))
    assert 1e6 < rate < 1e13 and found == spec and len(spec.kinds) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_probes_measure_what_hardware_can_do():
    device = torch.device("cuda")
    assert 2e9 < probe.probe_link(device) < 1e12
    assert 1e11 < probe.probe_memory_bandwidth(device) < 2e13


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_block_is_measured_where_the_matrix_rate_is_open():
    words = ("compile=false", "allocator=native", "attention=flash", "batch.micro_size=8", "data.packing=false")
    counted, found = (planned("lm-tiny", *words, *more) for more in ((), ("hardware.tflops=null",)))
    assert 0 < found.hardware.block_share < 1 and found.hardware.block_share != BLOCK_SHARE
    assert found.hardware.sources["blocks"].endswith(" TFLOPS, measured")
    (was,), (now,) = (one.demand.spec.kinds.values() for one in (counted, found))
    assert now.kept(8) == pytest.approx(was.kept(8), rel=0.1)
    assert 0.75 * was.peak(8) < now.peak(8) < 1.25 * was.peak(8) + SCRATCH


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_block_computes_as_in_training_and_is_timed(dropout):
    words = ("compile=false", f"model.config.hidden_dropout={dropout}", "model.config.num_hidden_layers=2")
    config = resolve("a6000", "lm-tiny", list(words))
    rate, spec = probe_blocks(config, planning.model_spec(config), torch.device("cpu"))
    assert 1e8 < rate < 1e13
    assert spec == planning.model_spec(config)  # bytes are measured on a GPU only


def test_nothing_of_a_probed_block_stays(monkeypatch):
    config = resolve("a6000", "lm-tiny", ["compile=false", "model.config.num_hidden_layers=2"])
    spec, built, built_by = planning.model_spec(config), [], blockprobe.model_of

    def model_of(*given):
        found = built_by(*given)
        found.stack.model.itself = [found.stack.model]  # a cycle, as compiled forwards are
        built.append(weakref.ref(found.stack.model))
        return found

    monkeypatch.setattr(blockprobe, "model_of", model_of)
    gc.disable()
    try:
        probe_blocks(config, spec, torch.device("cpu"))
        assert [model() for model in built] == [None]
    finally:
        gc.enable()


def test_a_kernel_that_cannot_serve_the_run_is_refused(capsys):
    assert run("plan", "--profile", "a6000", "--model", "lm-tiny", "attention=cudnn") == 2
    assert capsys.readouterr().err == (
        "fluxray: error: attention: 'cudnn'; it takes no mask, and rows hold several documents; set data.packing=false, or "
        "attention=varlen or flex\n"
    )
