"""The loss piece by piece equals the whole one, and so many positions' logits exist at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from fluxray.engine.parallelize import Techniques
from fluxray.engine.sharded import ShardedEngine
from fluxray.memory.estimate import LOGIT_BYTES_FP32
from fluxray.memory.live import LiveBytes
from tests.engine.helpers import (
    OPTIM,
    EngineCase,
    cut,
    expect_close,
    expect_close_values,
    expect_equal,
    model_config,
    sharded_engine,
    train,
)

pytestmark = pytest.mark.usefixtures("process_group", "one_thread")

MESHES: dict[str, Callable[[], DeviceMesh | None]] = {
    "resident": lambda: None,
    "fsdp": lambda: DeviceMesh("cpu", torch.arange(1)),
}


@pytest.fixture(params=MESHES)
def build(request: pytest.FixtureRequest) -> Callable[..., ShardedEngine]:
    return lambda case, chunk_tokens=None: sharded_engine(case, MESHES[request.param](), chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [5, 16, 40])
@pytest.mark.parametrize("family", ["gpt_neox", "qwen3 tied"])
def test_pieces_equal_the_whole(build: Callable[..., ShardedEngine], family: str, chunk_tokens: int) -> None:
    """Parts of a row, one row, two rows. In fp32 the order of sums alone differs."""
    case = EngineCase(model_config(family))
    expect_close(train(build(case, chunk_tokens)), train(build(case)))


@pytest.mark.parametrize("precision", ["amp-bf16", "mixed-bf16", "amp-fp16"])
def test_pieces_equal_the_whole_in_16_bits(build: Callable[..., ShardedEngine], precision: Any) -> None:
    case = EngineCase(model_config("gpt_neox"), Techniques(precision))
    actual, expected = train(build(case, 16)), train(build(case))
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 1e-4, "losses")
    scale = max(gradient.abs().max() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert (actual.gradients[name] - gradient).abs().max() <= 5e-3 * scale, name


def test_one_piece_is_the_whole_bit_for_bit(build: Callable[..., ShardedEngine]) -> None:
    case = EngineCase(model_config("gpt_neox", hidden_dropout=0.1))
    expect_equal(train(build(case, 1024), num_steps=2), train(build(case), num_steps=2))


def test_pieces_sum_gradients_in_fp32() -> None:
    """Of many equal pieces a bf16 sum would stop growing."""
    case = EngineCase(model_config("gpt_neox", num_hidden_layers=1), Techniques("mixed-bf16"))
    exact = EngineCase(case.model, Techniques("amp-bf16"))
    head = "lm_head.weight" if "lm_head.weight" in train(sharded_engine(case), 1, 1).gradients else "embed_out.weight"
    pieces, whole = (train(sharded_engine(case, chunk_tokens=n), 1, 1).gradients[head] for n in (1, 128))
    reference = train(sharded_engine(exact), 1, 1).gradients[head]
    error = [(gradient - reference).norm() / reference.norm() for gradient in (pieces, whole)]
    assert error[0] < 1.5 * error[1] + 1e-3


def test_evaluation_and_output_are_those_of_the_whole(build: Callable[..., ShardedEngine]) -> None:
    case = EngineCase(model_config("gpt_neox"))
    pieces, whole = build(case, 16), build(case)
    batches = cut(2, 0)
    for found, expected in zip(pieces.eval_steps(batches), whole.eval_steps(batches), strict=True):
        assert found.sum.item() == pytest.approx(expected.sum.item(), rel=1e-6) and found.num_valid == expected.num_valid
    assert torch.equal(pieces.forward(batches[0]), whole.forward(batches[0]))


NUM_OUTPUTS = 200
"""No other dimension of the model is like it."""
HIDDEN = 32
"""By this the head's weights and their gradients are told from logits."""


class LogitBytes(LiveBytes):
    """Counts the storages of tensors whose last dimension is the vocabulary's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (NUM_OUTPUTS,) and leaf.shape[0] != HIDDEN:
                self._see(leaf.untyped_storage())
        return result


@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_so_many_logits_exist_at_once(build: Callable[..., ShardedEngine], precision: Any) -> None:
    peaks = {}
    for chunk_tokens in (None, 64, 16):
        engine = build(EngineCase(model_config("gpt_neox", vocab_size=NUM_OUTPUTS), Techniques(precision)), chunk_tokens)
        engine.train_step(cut(1, 0), OPTIM.lr)
        with LogitBytes(engine._stack.parameters()) as live:
            engine.train_step(cut(1, 0), OPTIM.lr)
        peaks[chunk_tokens] = live.peak
    num_tokens, itemsize = cut(1, 0)[0].num_tokens, 2 if precision == "mixed-bf16" else 4
    assert peaks[None] * 64 == peaks[64] * num_tokens and peaks[None] * 16 == peaks[16] * num_tokens
    assert peaks[16] <= 16 * NUM_OUTPUTS * (2 * itemsize + LOGIT_BYTES_FP32)  # what the plan counts


def test_pieces_and_steps_inside_backward_go_together(build: Callable[..., ShardedEngine]) -> None:
    optim = OPTIM.model_copy(update={"in_backward": True})
    case = EngineCase(model_config("qwen3 tied"), optim=optim, clip="block", max_norm=0.1)
    away = replace(case, techniques=Techniques("fp32", activation_checkpoint="offload"))
    expected = train(build(case), num_micro_batches=1, num_steps=3)
    expect_close(train(build(away, 16), num_micro_batches=1, num_steps=3), expected)
