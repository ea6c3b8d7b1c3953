import math
import shutil

import numpy as np
import pytest
import torch

from fluxray.data.rows import TextRow
from fluxray.protocols import IGNORE_INDEX, BatchKey, SampleId, TextBatch
from fluxray.tasks.lm import LmTask, next_token_loss, perplexity

COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def row(length: int, document_ids: list[int] | None = None) -> TextRow:
    tokens = np.arange(10, 10 + length)
    targets = np.append(tokens[1:], IGNORE_INDEX)
    return TextRow(tokens, targets, np.array(document_ids or [0] * length), np.arange(length))


def case(num_rows: int = 3, length: int = 7, vocabulary: int = 11, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_rows, length, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (num_rows, length), generator=generator)
    targets[torch.rand(num_rows, length, generator=generator) < 0.3] = IGNORE_INDEX
    return logits, targets


def written_out(logits: torch.Tensor, targets: torch.Tensor) -> float:
    total = 0.0
    for row_logits, row_targets in zip(logits.double(), targets, strict=True):
        for scores, target in zip(row_logits, row_targets, strict=True):
            if target != IGNORE_INDEX:
                total += (torch.log(torch.exp(scores - scores.max()).sum()) + scores.max() - scores[target]).item()
    return total


def batch_of(targets: torch.Tensor) -> TextBatch:
    zeros = torch.zeros_like(targets)
    return TextBatch(zeros, zeros, zeros, targets, True, int((targets != IGNORE_INDEX).sum()))


def test_loss_is_a_sum_of_log_softmax() -> None:
    logits, targets = case()
    loss = next_token_loss(logits, targets)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(written_out(logits, targets), rel=1e-6)


def test_task_returns_sum_and_count() -> None:
    logits, targets = case()
    output = LmTask(0).loss_fn(logits, batch_of(targets))
    assert output.num_valid == (targets != IGNORE_INDEX).sum()
    assert output.sum.item() == pytest.approx(written_out(logits, targets), rel=1e-6)


def test_sums_of_parts_add_up() -> None:
    logits, targets = case(num_rows=6)
    parts = sum(next_token_loss(logits[i : i + 1], targets[i : i + 1]).item() for i in range(6))
    assert next_token_loss(logits, targets).item() == pytest.approx(parts, rel=1e-6)


def test_batch_without_targets_has_loss_zero_and_gradient_zero() -> None:
    logits = case()[0].requires_grad_()
    output = LmTask(0).loss_fn(logits, batch_of(torch.full(logits.shape[:2], IGNORE_INDEX)))
    assert output.num_valid == 0 and output.sum.item() == 0.0
    output.sum.backward()
    assert logits.grad is not None and not logits.grad.any()


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, targets = case(num_rows=8, length=64, vocabulary=50)
    half = logits.to(torch.bfloat16).requires_grad_()
    loss = next_token_loss(half, targets)
    assert loss.dtype == torch.float32
    expected = written_out(half.detach().float(), targets)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert loss.to(torch.bfloat16).item() != pytest.approx(expected, rel=1e-4)  # bf16 could not hold it
    loss.backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    assert next_token_loss(logits, torch.tensor([[0]])).item() == 0.0
    assert next_token_loss(logits, torch.tensor([[1]])).item() == 2e4


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, so nothing can be compiled")
def test_compiled_loss_equals_the_plain_one() -> None:
    logits, targets = case()
    plain, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = next_token_loss(plain, targets)
    actual = LmTask(0, compiled=True).loss_fn(compiled, batch_of(targets)).sum
    assert actual.dtype == torch.float32 and actual.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    actual.backward()
    assert plain.grad is not None and compiled.grad is not None
    assert torch.allclose(compiled.grad, plain.grad, rtol=1e-5, atol=1e-7)


def test_rows_become_a_batch_padded_with_the_tokenizers_pad() -> None:
    key = BatchKey(1, 2, (SampleId(0, 3), SampleId(0, 4)))
    batch = LmTask(pad_id=5).prepare([row(4), row(2)], key)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13], [10, 11, 5, 5]]
    assert batch.targets.tolist() == [[11, 12, 13, IGNORE_INDEX], [11, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]
    assert (batch.num_valid, batch.num_tokens, batch.single_document, batch.key) == (4, 8, True, key)
    assert LmTask(0).prepare([row(3)], None).key is None


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e6) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
