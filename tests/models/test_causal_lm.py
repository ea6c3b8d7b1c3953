from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fluxray.models import causal_lm
from fluxray.models.causal_lm import CausalLMBlock, build_causal_lm
from fluxray.models.verify import check_stack
from fluxray.protocols import IGNORE_INDEX, BatchKey, SampleId, TextBatch
from fluxray.tasks.lm import LmTask
from tests.models.helpers import CASES, CPU, batch_of, build, logits_of, materialised, model_config, shaken

BATCHES = {
    "one row, one document": batch_of((12,)),
    "one document a row": batch_of((9,), (9,), (9,)),
    "as long as the window": batch_of((5,)),
    "shorter than the window": batch_of((4,)),
    "packed": batch_of((5, 7), (1, 11), (4, 4, 4)),
    "one packed row": batch_of((8, 3)),
    "padded": batch_of((12,), (7,), (3, 2)),
    "single token": batch_of((1,)),
}
loss_fn = LmTask(0).loss_fn


def librarys_own(model: Any, batch: TextBatch) -> torch.Tensor:
    return model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def test_stack_equals_the_librarys_forward_bit_for_bit(case: str) -> None:
    stack = shaken(build(case)).eval()
    for name, batch in BATCHES.items():
        assert torch.equal(logits_of(stack, batch), librarys_own(stack.model, batch)), name


@torch.no_grad()
def test_stack_equals_a_model_that_the_library_built_itself(case: str) -> None:
    stack = shaken(build(case)).eval()
    model = AutoModelForCausalLM.from_config(stack.model.config, attn_implementation="sdpa").eval()
    model.load_state_dict(stack.model.state_dict())
    for name, batch in BATCHES.items():
        assert torch.equal(logits_of(stack, batch), librarys_own(model, batch)), name


def test_gradients_equal_the_librarys_bit_for_bit(case: str) -> None:
    stack = shaken(build(case)).eval()
    batch = BATCHES["packed"]
    loss_fn(logits_of(stack, batch), batch).sum.backward()
    actual: dict[str, Any] = {name: parameter.grad for name, parameter in stack.model.named_parameters()}
    stack.model.zero_grad(set_to_none=True)
    loss_fn(librarys_own(stack.model, batch), batch).sum.backward()
    for name, parameter in stack.model.named_parameters():
        assert parameter.grad is not None and torch.equal(actual[name], parameter.grad), name


@pytest.mark.parametrize("case", [case for case in CASES if "dropout" in case or "mixed" in case])
def test_dropout_is_drawn_as_the_library_draws_it(case: str) -> None:
    stack = build(case).train()
    assert stack.has_dropout
    for name, batch in BATCHES.items():
        torch.manual_seed(1)
        expected = librarys_own(stack.model, batch)
        torch.manual_seed(1)
        assert torch.equal(logits_of(stack, batch), expected), name
    assert not torch.equal(logits_of(stack, BATCHES["packed"]), logits_of(stack, BATCHES["packed"]))


@torch.no_grad()
def test_packed_rows_equal_separate_documents(case: str) -> None:
    stack = shaken(build(case)).eval()
    batch = BATCHES["packed"]
    logits = logits_of(stack, batch)
    packed = loss_fn(logits, batch)
    total, count = 0.0, 0
    for row, documents in enumerate(batch.document_ids):
        for document in documents.unique():
            here = documents == document
            alone = TextBatch(
                batch.input_ids[row, here][None],
                batch.position_ids[row, here][None],
                torch.zeros_like(documents[here])[None],
                batch.targets[row, here][None],
                single_document=True,
                num_valid=int((batch.targets[row, here] != IGNORE_INDEX).sum()),
            )
            alone_logits = logits_of(stack, alone)
            assert (logits[row, here] - alone_logits[0]).abs().max() <= 1e-6 * logits.abs().max()
            loss = loss_fn(alone_logits, alone)
            total, count = total + loss.sum.item(), count + int(loss.num_valid)
    assert packed.sum.item() == pytest.approx(total, rel=1e-6)
    assert packed.num_valid == count


@torch.no_grad()
def test_padding_changes_no_loss(case: str) -> None:
    stack = shaken(build(case)).eval()
    alone, padded = batch_of((7,)), batch_of((7,), (12,))
    first = TextBatch(padded.input_ids[:1], padded.position_ids[:1], padded.document_ids[:1], padded.targets[:1], False, 6)
    assert first.input_ids.shape == (1, 12) and torch.equal(first.input_ids[:, :7], alone.input_ids)
    assert loss_fn(logits_of(stack, first), first).sum.item() == pytest.approx(
        loss_fn(logits_of(stack, alone), alone).sum.item(), rel=1e-6
    )


def test_blocks_are_named_as_the_library_names_them(case: str) -> None:
    stack = build_causal_lm(model_config(case), seed=0)
    names = [block.name for block in stack.blocks]
    assert len(names) == 3
    assert all(stack.model.get_submodule(block.name) is block.module for block in stack.blocks)
    assert sum(p.numel() for p in stack.parameters()) > 0 and all(p.is_meta for p in stack.parameters())


def test_mixed_windows_reach_their_own_blocks() -> None:
    stack = build("qwen3 mixed")
    blocks: Any = stack.blocks
    assert [block.kind for block in blocks] == ["sliding_attention", "full_attention", "sliding_attention"]
    state = stack.prologue(BATCHES["packed"])
    sliding, full = state.shared["mask.sliding_attention"], state.shared["mask.full_attention"]
    assert sliding is not None and full is not None and sliding.sum() < full.sum()


def test_random_values_depend_on_seed_and_path_only(case: str) -> None:
    first = build(case).model.state_dict()
    other_order = build_causal_lm(model_config(case), seed=0)
    torch.manual_seed(99)
    for block in (*reversed(other_order.blocks), None):
        torch.rand(3)
        other_order.materialise(CPU, block)
    for name, tensor in other_order.model.state_dict().items():
        assert torch.equal(tensor, first[name]), name
    kinds: dict[str, Any] = {"layer_types": ["full_attention"] * 4} if "mixed" in case or "gemma3" in case else {}
    deeper = build(case, num_hidden_layers=4, **kinds).model.state_dict()
    assert all(torch.equal(deeper[name], tensor) for name, tensor in first.items())
    reseeded = build(case, seed=1).model.state_dict()
    drawn = [name for name, tensor in first.items() if tensor.ndim > 1]
    assert drawn
    assert not any(torch.equal(reseeded[name], first[name]) for name in drawn)
    layers = [first[name] for name in drawn if name.endswith(("mlp.down_proj.weight", "mlp.dense_4h_to_h.weight"))]
    assert len(layers) == 3 and not torch.equal(layers[0], layers[1])


def test_making_values_leaves_the_global_random_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    build("llama")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "qwen3", "gemma3"])
def test_random_values_follow_the_librarys_rule(family: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills memory that nobody initialises with NaN
    try:
        stack = build(family, hidden_size=128, intermediate_size=256, initializer_range=0.05)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(stack.model.config).state_dict()
    for name, tensor in stack.model.state_dict().items():
        assert tensor.dtype == torch.float32 and tensor.isfinite().all(), name
        if tensor.ndim == 1:
            assert torch.equal(tensor, reference[name]), name
        else:
            assert tensor.std().item() == pytest.approx(0.05, rel=0.05), name
            assert tensor.std().item() == pytest.approx(reference[name].std().item(), rel=0.05), name
            assert abs(tensor.mean().item()) < 0.05 * 0.05, name


def test_buffers_are_right_after_the_meta_device(case: str) -> None:
    stack = build(case)
    reference = dict(AutoModelForCausalLM.from_config(stack.model.config).named_buffers())
    assert reference
    for name, buffer in stack.model.named_buffers():
        assert buffer.device == CPU and torch.equal(buffer, reference[name]), name


@pytest.mark.parametrize("case", ["llama grouped", "qwen3 tied", "gemma3"])
def test_tied_embeddings_stay_one_parameter(case: str) -> None:
    model: Any = build(case).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_dropout_seeds_reach_embedding_and_blocks_and_differ() -> None:
    stack = build("gpt_neox dropout").train()
    batch = BATCHES["packed"]
    keyed = TextBatch(**{**batch.__dict__, "key": BatchKey(0, 4, (SampleId(0, 1),))})
    seeds: list[int | None] = []
    for module in stack.dropout_modules:
        wrapped = module.forward

        def record(*args, dropout_seed=None, wrapped=wrapped, **kwargs):
            seeds.append(dropout_seed)
            return wrapped(*args, **kwargs)

        module.forward = record
    logits_of(stack, keyed)
    assert None not in seeds and len(set(seeds)) == len(seeds) == 4
    first = list(seeds)
    seeds.clear()
    logits_of(stack, keyed)
    assert seeds == first
    seeds.clear()
    logits_of(stack.eval(), keyed)
    assert seeds == [None] * 4


@pytest.mark.parametrize(("case", "index"), [("gpt_neox", 0), ("llama", 1), ("qwen3 mixed", 2), ("gemma3", 3)])
def test_check_passes_on_every_case_and_small_vocabularies(case: str, index: int) -> None:
    check_stack(build_causal_lm(model_config(case), 0).model.config)
    check_stack(build_causal_lm(model_config(case, vocab_size=3 + index), 0).model.config)


def test_check_refuses_blocks_called_without_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(self: CausalLMBlock, state):
        (hidden,) = state.carry
        shared = state.shared
        hidden = self.module(
            hidden, attention_mask=None, position_embeddings=(shared["cos.full_attention"], shared["sin.full_attention"])
        )
        return state._replace(carry=(hidden,))

    monkeypatch.setattr(CausalLMBlock, "__call__", without_mask)
    with pytest.raises(RuntimeError, match="block stack of llama differs from the library's forward by"):
        check_stack(build_causal_lm(model_config("llama"), 0).model.config)


@pytest.mark.parametrize("case", ["gpt_neox", "llama", "qwen3 mixed", "gemma3"])
@pytest.mark.parametrize("fault", ["skipped block", "no final norm", "wrong positions", "one window for all"])
def test_check_refuses_other_faults(case: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prologue, parts_of = causal_lm.CausalLMStack.prologue, causal_lm.parts_of
    if fault == "skipped block":
        monkeypatch.setattr(CausalLMBlock, "__call__", lambda self, state: state)
    elif fault == "no final norm":
        monkeypatch.setattr(
            causal_lm, "parts_of", lambda model: parts_of(model).__class__(**{**vars(parts_of(model)), "norm": nn.Identity()})
        )
    elif fault == "wrong positions":

        def unshifted(self, batch):
            return prologue(self, TextBatch(**{**batch.__dict__, "position_ids": torch.zeros_like(batch.position_ids)}))

        monkeypatch.setattr(causal_lm.CausalLMStack, "prologue", unshifted)
    else:
        monkeypatch.setattr(causal_lm, "windows_of", lambda config: dict.fromkeys(("full_attention", "sliding_attention"), 2))
    with pytest.raises(RuntimeError, match="differs from the library's forward"):
        check_stack(build_causal_lm(model_config(case), 0).model.config)


def test_loss_is_that_of_the_library() -> None:
    stack = build("llama").eval()
    batch = BATCHES["one document a row"]
    output = loss_fn(logits_of(stack, batch), batch)
    model: Any = stack.model
    expected = model(input_ids=batch.input_ids, labels=batch.input_ids).loss
    assert (output.sum / output.num_valid).item() == pytest.approx(expected.item(), rel=1e-6)
    assert F.cross_entropy(logits_of(stack, batch).flatten(0, 1), batch.targets.flatten()).item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_meta_stack_allocates_nothing_until_asked() -> None:
    stack = build_causal_lm(model_config("gpt_neox", hidden_size=8192, num_hidden_layers=40, intermediate_size=32768), seed=0)
    assert sum(p.numel() for p in stack.parameters()) > 3e10
    assert all(tensor.is_meta for tensor in (*stack.parameters(), *stack.buffers()))
    small = build_causal_lm(model_config("llama"), seed=0)
    small.materialise(CPU, small.blocks[1])
    assert {name for name, p in small.model.named_parameters() if not p.is_meta} == {
        f"{small.blocks[1].name}.{name}" for name, _ in small.blocks[1].module.named_parameters()
    }
    assert materialised(small)
