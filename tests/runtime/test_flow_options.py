"""Masked loss and prior preservation from configuration to checkpoint, without Ray."""

from pathlib import Path

import pytest
import torch

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.data.latent_shards import write_cache
from fluxray.errors import FluxrayError
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.images import image_sizes
from fluxray.runtime.worker import preflight, run_worker
from tests.flow_caches import empty_captions, random_cache, random_facts, random_samples

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = (
    "model.config.num_layers=1",
    "model.config.num_single_layers=1",
    "model.config.attention_head_dim=16",
    "model.config.num_attention_heads=2",
    "model.config.axes_dims_rope=[4, 6, 6]",
    "model.config.in_channels=8",
    "model.config.joint_attention_dim=12",
    "model.config.pooled_projection_dim=10",
    "batch.micro_size=2",
    "batch.accumulation_steps=2",
    "optim.warmup_steps=1",
    "train.num_steps=4",
    "train.log_every=1",
    "checkpoint.every_steps=2",
    "evaluation.max_rows=2",
    "hardware.tflops=1",
    "task.first_loss=off",
)
BUCKETS = {(32, 32, 5): 6, (32, 64, 5): 6}


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A cache of which half have a mask, the same without masks, and a regularisation set of another size."""
    folder = tmp_path_factory.mktemp("caches")
    facts = random_facts()
    samples = random_samples(facts, BUCKETS)
    random = torch.Generator().manual_seed(0)
    masked = [
        sample._replace(mask=torch.rand(len(sample.latents), generator=random)) if i % 2 else sample
        for i, sample in enumerate(samples)
    ]
    ones = [sample._replace(mask=torch.ones(len(sample.latents))) for sample in samples]
    for name, own in (("masked", masked), ("ones", ones), ("plain", samples)):
        write_cache(folder / name, facts, empty_captions(facts, [5]), own)
    random_cache(folder / "prior", {(64, 64, 3): 5}, seed=1)
    return folder


def run(caches: Path, run_dir: Path, cache: str, *overrides: str, steps: int = 4):
    """Train and return losses by step, and the last weights."""
    config = resolve("cpu", "flux1-tiny", [f"data.cache={caches / cache}", *TINY, *overrides, f"train.num_steps={steps}"])
    preflight(config, caches)
    reports = []
    found = checkpoint.committed(run_dir)
    context = WorkerContext(0, 1, 0, run_dir, caches, reports.append, lambda _: False, found, lambda _: None)
    run_worker(config, context)
    reader = checkpoint.CheckpointReader(checkpoint.committed(run_dir)[0])
    losses = [(r.step, r.metrics["train/loss"]) for r in reports if "train/loss" in r.metrics]
    held_out = [value for r in reports for key, value in r.metrics.items() if key == "eval/loss"]
    return losses, held_out, {name: reader.read("weights", name) for name in reader.names()}


def test_masks_of_ones_train_as_without_bit_for_bit_and_others_do_not(caches, tmp_path):
    plain = run(caches, tmp_path / "plain", "plain", steps=2)
    ones = run(caches, tmp_path / "ones", "ones", "task.masked_loss=true", steps=2)
    masked = run(caches, tmp_path / "masked", "masked", "task.masked_loss=true", steps=2)
    assert ones[:2] == plain[:2] and all(torch.equal(value, plain[2][name]) for name, value in ones[2].items())
    assert masked[0] != plain[0] and masked[1] != plain[1]


@pytest.mark.parametrize("engine", ["sharded", "stream"])
def test_a_regularisation_set_changes_training_and_resumes_to_the_bit(caches, tmp_path, engine):
    how = ("engine.kind=stream", "activation_checkpoint=full") if engine == "stream" else ()
    keys = (f"data.prior_cache={caches / 'prior'}", "task.prior_weight=0.5", *how)
    keys += ("checkpoint.every_steps=1",)
    whole = run(caches, tmp_path / "whole", "plain", *keys, steps=3)
    first = run(caches, tmp_path / "parts", "plain", *keys, steps=1)
    rest = run(caches, tmp_path / "parts", "plain", *keys, steps=3)
    assert first[0] + rest[0] == whole[0] and rest[1] == whole[1]
    assert all(torch.equal(value, whole[2][name]) for name, value in rest[2].items())


def test_what_the_options_lack_is_said_in_a_line(caches):
    def refusal(*overrides: str) -> str:
        with pytest.raises(FluxrayError) as refused:
            preflight(resolve("cpu", "flux1-tiny", [f"data.cache={caches / 'plain'}", *TINY, *overrides]), caches)
        return str(refused.value)

    assert refusal("task.masked_loss=true") == (
        "task.masked_loss: true, but no sample of data.cache has a mask; encode masks, or drop the key"
    )
    assert refusal("task.prior_weight=0.5") == (
        "task.prior_weight: 0.5 has no effect without data.prior_cache; drop it or set the cache"
    )
    assert refusal("data.prior_cache=x", "batch.micro_size=3", "batch.accumulation_steps=1") == (
        "data.prior_cache: makes up half of each global batch, and that of 3 rows has no half; set batch.accumulation_steps=2"
    )
    assert "data.prior_cache: " in refusal("data.prior_cache=nowhere")
    assert refusal(f"data.prior_cache={caches / 'prior'}", "optim.in_backward=true", "clip.mode=block", *ONE_BATCH).startswith(
        "optim.in_backward: true wants one micro-batch a step, and the 3 sizes"
    )


ONE_BATCH = ("batch.micro_size=2", "batch.accumulation_steps=1")


def test_plans_know_the_sizes_of_the_set(caches):
    config = resolve("cpu", "flux1-tiny", [f"data.cache={caches / 'plain'}", f"data.prior_cache={caches / 'prior'}"])
    sizes = image_sizes(config.data)
    assert tuple(sizes.largest) == (4, 4, 3) and sizes.num_buckets == 3
    alone = resolve("cpu", "flux1-tiny", [f"data.cache={caches / 'prior'}", f"data.prior_cache={caches / 'prior'}"])
    assert image_sizes(alone.data).num_buckets == 1
