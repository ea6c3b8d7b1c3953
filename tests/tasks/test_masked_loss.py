"""Masked loss: each token's square error is weighed by the sample's mask, over the mask's mean."""

import torch

from fluxray.protocols import BatchKey
from fluxray.tasks.flow_gate import FirstLossGate
from tests.tasks.flow_helpers import SAMPLES, row_of, task_of


def rows(masks):
    return [row_of(sample.index)._replace(mask=mask) for sample, mask in zip(SAMPLES, masks, strict=False)]


def batch_with(masks, **keys):
    task = task_of(masked_loss=True, **keys)
    return task, task.prepare(rows(masks), BatchKey(1, 2, SAMPLES[: len(masks)]))


def test_masked_loss_is_a_plain_computation():
    drawn = torch.Generator().manual_seed(0)
    masks = [torch.rand(12, generator=drawn), None, torch.eye(12)[3]]
    task, batch = batch_with(masks, weighting="cosmap")
    output = torch.randn(batch.target.shape, generator=drawn).requires_grad_()
    loss = task.loss_fn(output, batch)
    loss.sum.backward()
    total = 0.0
    for sample, mask in enumerate(masks):
        weights = [1.0] * 12 if mask is None else mask.tolist()
        errors = (output[sample].detach().double() - batch.target[sample].double()).square().mean(1).tolist()
        total += batch.weight[sample].item() * sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
    assert loss.num_valid == 3 and abs(loss.sum.item() - total) < 1e-5 * total
    assert output.grad is not None
    assert output.grad[2].abs().sum(1).nonzero().flatten().tolist() == [3]  # nothing is learned outside of a mask


def test_a_mask_of_ones_is_no_mask_bit_for_bit():
    masked, ones = batch_with([torch.ones(12)] * 3, weighting="cosmap", caption_dropout=0.5)
    plain = task_of(weighting="cosmap", caption_dropout=0.5)
    batch = plain.prepare(rows([None] * 3), BatchKey(1, 2, SAMPLES[:3]))
    assert batch.mask is None and ones.mask is not None and ones.mask.equal(torch.ones(3, 12))
    outputs = [torch.randn(batch.target.shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    losses = [masked.loss_fn(outputs[0], ones).sum, plain.loss_fn(outputs[1], batch).sum]
    for loss in losses:
        loss.backward()
    assert losses[0].equal(losses[1]) and outputs[0].grad.equal(outputs[1].grad)


def test_without_the_key_masks_are_left_alone():
    batch = task_of().prepare(rows([torch.rand(12)] * 2), BatchKey(1, 2, SAMPLES[:2]))
    assert batch.mask is None and batch.to(torch.device("cpu")).mask is None
    _, masked = batch_with([torch.rand(12)] * 2)
    assert masked.to(torch.device("meta")).mask.device.type == "meta"


def test_the_first_losses_share_is_of_what_the_masks_leave():
    said = []
    row = row_of(0, 8, 8)
    half = torch.cat([torch.ones(32), torch.zeros(32)])
    latents = torch.cat([row.latents[:32] * 0.9, row.latents[32:] * 1.2])
    batch = task_of(masked_loss=True).prepare([row._replace(latents=latents, mask=half)], BatchKey(0, 0, SAMPLES[:1]))
    power = batch.target[0, :32].square().mean().item()
    gate = FirstLossGate("warn", True, lambda value: [value], said.append)
    gate([batch], 0.6499 * power)
    assert not said
    gate([batch], 0.66 * power)
    assert len(said) == 1
