import shutil
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from fluxray.config.schema import FlowTaskConfig
from fluxray.errors import ConfigError
from fluxray.protocols import BatchKey, FlowBatch, SampleId
from fluxray.tasks.flow import FlowTask, squared_error
from tests.tasks.flow_helpers import NUM_TEXT, SAMPLES, batch_of, empty_of, facts_of, row_of, task_of

COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
VARIED = {"timesteps": "mode", "shift": "resolution", "weighting": "cosmap", "caption_dropout": 0.5}
PER_SAMPLE = [field.name for field in fields(FlowBatch) if field.type in (Tensor, Tensor | None)]


def noise_of(batch: FlowBatch) -> Tensor:
    latents = torch.stack([row_of(sample.index).latents for sample in SAMPLES])
    return batch.target + latents


def sample_of(batch: FlowBatch, place: int) -> dict[str, Tensor]:
    values = {name: getattr(batch, name) for name in PER_SAMPLE}
    return {name: value[place] for name, value in values.items() if value is not None}


def test_every_tensor_of_a_batch_is_compared() -> None:
    assert PER_SAMPLE == ["noised", "target", "sigma", "weight", "text", "pooled", "guidance", "mask"]


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_a_samples_numbers_are_the_same_in_any_cut_and_order(family: str) -> None:
    task = task_of(family, **VARIED)
    whole = batch_of(task, family=family)
    for cut in ([(0,), (1, 2), (3, 4, 5)], [(5, 0), (4, 2), (1, 3)], [(4,), (0,), (5,), (3,), (2,), (1,)]):
        for places in cut:
            part = batch_of(task, tuple(SAMPLES[place] for place in places), family=family)
            for at, place in enumerate(places):
                actual, expected = sample_of(part, at), sample_of(whole, place)
                assert actual.keys() == expected.keys()
                assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("change", ["seed", "step", "epoch", "index"])
def test_whatever_names_a_sample_changes_its_numbers(change: str) -> None:
    task, row = task_of(caption_dropout=0.5), row_of(0)

    def drawn(seed: int = 1, step: int = 2, epoch: int = 0, index: int = 3) -> FlowBatch:
        return task.prepare([row], BatchKey(seed, step, (SampleId(epoch, index),)))

    kept, changed = drawn(), drawn(**{change: 9})
    assert torch.equal(kept.noised, drawn().noised)
    assert not torch.equal(kept.sigma, changed.sigma) and (kept.target - changed.target).abs().mean() > 0.5


def test_noised_images_and_targets_are_those_of_rectified_flow() -> None:
    batch = batch_of(task_of())
    latents, noise = torch.stack([row_of(sample.index).latents for sample in SAMPLES]), noise_of(batch)
    for place, sigma in enumerate(batch.sigma.tolist()):
        expected = (1 - sigma) * latents[place].double() + sigma * noise[place].double()
        assert torch.allclose(batch.noised[place].double(), expected, atol=1e-6)
    assert torch.allclose(batch.noised, noise - (1 - batch.sigma[:, None, None]) * batch.target, atol=1e-6)
    assert batch.noised.dtype == batch.target.dtype == batch.sigma.dtype == batch.weight.dtype == torch.float32
    assert (batch.height, batch.width, batch.num_valid, batch.num_tokens) == (4, 3, 6, 6 * (12 + NUM_TEXT))
    assert batch.key == BatchKey(1, 2, SAMPLES) and batch.timestep is None


def test_noise_is_standard_normal_and_of_each_sample_its_own() -> None:
    samples = tuple(SampleId(0, index) for index in range(8))
    rows = [row_of(0, 32, 32)] * 8
    noise = task_of().prepare(rows, BatchKey(0, 0, samples)).target + rows[0].latents
    flat = noise.flatten(1)
    assert flat.mean(1).abs().max() < 0.05 and (flat.std(1) - 1).abs().max() < 0.05
    assert (torch.corrcoef(flat) - torch.eye(8)).abs().max() < 0.05


def test_noise_does_not_depend_on_law_weight_or_captions() -> None:
    plain, varied = batch_of(task_of()), batch_of(task_of(**VARIED))
    assert torch.equal(plain.target, varied.target) and not torch.equal(plain.sigma, varied.sigma)
    assert torch.equal(plain.weight, torch.ones(6)) and not torch.equal(varied.weight, torch.ones(6))


def test_the_shift_is_that_of_the_images_tokens() -> None:
    small, large = (batch_of(task_of(shift="resolution"), height=side, width=side).sigma for side in (4, 32))
    plain = batch_of(task_of()).sigma
    assert torch.equal(plain, batch_of(task_of(), height=32, width=32).sigma)
    assert (plain < small).all() and (small < large).all()


def test_captions_are_dropped_for_a_share_of_samples_and_nothing_else_changes() -> None:
    samples = tuple(SampleId(0, index) for index in range(400))
    kept, dropped = (batch_of(task_of(caption_dropout=share), samples, height=1, width=1) for share in (0.0, 0.25))
    empty = empty_of()[NUM_TEXT]
    is_empty = (dropped.text == empty.text).flatten(1).all(1)
    assert 70 < is_empty.sum() < 130
    assert dropped.pooled is not None and kept.pooled is not None and empty.pooled is not None
    assert torch.equal((dropped.pooled == empty.pooled).all(1), is_empty)
    assert torch.equal(dropped.text[~is_empty], kept.text[~is_empty]) and torch.equal(dropped.noised, kept.noised)
    assert not (kept.text == empty.text).flatten(1).all(1).any()
    assert (batch_of(task_of(caption_dropout=1.0)).text == 1).all()


def test_guidance_goes_to_models_that_embed_it() -> None:
    guidance = batch_of(task_of(guidance=3.5)).guidance
    assert guidance is not None and guidance.dtype == torch.float32 and guidance.tolist() == [3.5] * 6
    assert batch_of(task_of(guided=False)).guidance is None
    with pytest.raises(ConfigError) as refused:
        FlowTask(FlowTaskConfig(guidance=3.5), facts_of(guided=False), empty_of())
    assert str(refused.value) == "task.guidance: 3.5 has no effect, since the model embeds no guidance; drop it"


def test_flux2_has_no_pooled_text_and_texts_keep_their_dtype() -> None:
    assert batch_of(task_of("flux2"), family="flux2").pooled is None
    row = row_of(0)
    half = task_of().prepare([row._replace(text=row.text.bfloat16())], BatchKey(0, 0, SAMPLES[:1]))
    assert half.text.dtype == torch.bfloat16 and half.noised.dtype == torch.float32


def test_rows_that_stand_in_have_no_weight_and_no_draws() -> None:
    row = row_of(3)._replace(weight=0.0)
    batch = task_of(weighting="sigma_sqrt").prepare([row], BatchKey(1, 2, ()))
    assert (batch.num_valid, batch.weight.tolist()) == (0, [0.0])
    output = torch.randn(1, 12, 8, requires_grad=True)
    loss = task_of().loss_fn(output, batch)
    loss.sum.backward()
    assert loss.num_valid == 0 and loss.sum.item() == 0.0 and output.grad is not None and not output.grad.any()
    filled = task_of().prepare([row_of(7), row], BatchKey(1, 2, SAMPLES[:1]))
    assert torch.equal(filled.noised[0], batch_of(task_of(), SAMPLES[:1]).noised[0]) and filled.num_valid == 1


def written_out(output: Tensor, batch: FlowBatch) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for prediction, target, weight in zip(output.double(), batch.target.double(), batch.weight.double(), strict=True):
        elements = [(p - t) ** 2 for p, t in zip(prediction.flatten(), target.flatten(), strict=True)]
        total = total + weight * sum(elements) / len(elements)
    return total


def test_loss_and_gradient_are_those_of_a_plain_computation() -> None:
    batch = batch_of(task_of(weighting="sigma_sqrt"))
    output = torch.randn(6, 12, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = output.detach().clone().requires_grad_()
    loss, expected = task_of().loss_fn(output, batch), written_out(plain, batch)
    assert loss.num_valid == 6 and loss.sum.dtype == torch.float32 and loss.sum.shape == ()
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.sum.backward()
    expected.backward()
    assert output.grad is not None and plain.grad is not None
    assert (output.grad - plain.grad).abs().max() <= 1e-6 * plain.grad.abs().max()


def test_sums_of_parts_add_up() -> None:
    task = task_of(weighting="cosmap")
    output = torch.randn(6, 12, 8)
    parts = [task.loss_fn(output[i : i + 2], batch_of(task, SAMPLES[i : i + 2])) for i in (0, 2, 4)]
    whole = task.loss_fn(output, batch_of(task))
    assert sum(part.sum.item() for part in parts) == pytest.approx(whole.sum.item(), rel=1e-6)
    assert sum(part.num_valid for part in parts) == whole.num_valid


def test_bf16_predictions_are_compared_in_fp32() -> None:
    batch = batch_of(task_of())
    half = torch.randn(6, 12, 8).bfloat16().requires_grad_()
    loss = task_of().loss_fn(half, batch).sum
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(written_out(half.detach().float(), batch).item(), rel=1e-6)
    loss.backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, so nothing can be compiled")
def test_compiled_loss_equals_the_plain_one() -> None:
    batch = batch_of(task_of())
    plain = torch.randn(6, 12, 8, requires_grad=True)
    compiled = plain.detach().clone().requires_grad_()
    expected = squared_error(plain, batch.target, batch.weight)
    actual = task_of(compiled=True).loss_fn(compiled, batch).sum
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    actual.backward()
    assert plain.grad is not None and compiled.grad is not None
    assert torch.allclose(compiled.grad, plain.grad, rtol=1e-5, atol=1e-8)
