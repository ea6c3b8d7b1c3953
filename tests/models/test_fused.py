from pathlib import Path

import pytest
import torch

from fluxray.config.schema import ModelConfig
from fluxray.errors import ConfigError
from fluxray.models import verify
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm
from fluxray.models.verify import check_stack
from tests.models.helpers import CASES, batch_of, build, logits_of, materialised, model_config, shaken

FUSIBLE = [case for case in CASES if "neox" not in case]
BATCH = batch_of((5, 7), (1, 11))


def fused(case: str, seed: int = 0, **keys) -> CausalLMStack:
    model = model_config(case, **keys)
    return build_causal_lm(model.model_copy(update={"fused_qkv": True}), seed)


@torch.no_grad()
@pytest.mark.parametrize("case", FUSIBLE)
def test_begins_with_the_same_values_and_computes_the_same(case: str) -> None:
    plain, stack = build(case).eval(), materialised(fused(case)).eval()
    expected = logits_of(plain, BATCH)
    assert (logits_of(stack, BATCH) - expected).abs().max() <= 1e-6 * expected.abs().max()
    separate = dict(plain.model.named_parameters())
    for name, parts in stack.fused.items():
        whole = stack.model.get_parameter(name)
        assert torch.equal(whole, torch.cat([separate.pop(part) for part in parts]))
    others = {name: p for name, p in stack.model.named_parameters() if name not in stack.fused}
    assert others.keys() == separate.keys() and all(torch.equal(others[name], p) for name, p in separate.items())
    assert len(stack.fused) == 3 * (2 if stack.model.config.attention_bias else 1)


def test_one_product_makes_queries_keys_and_values() -> None:
    stack = materialised(fused("llama grouped"))
    attention = stack.blocks[0].module.get_submodule("self_attn")
    names = {name for name, _ in attention.named_parameters()}
    assert names == {"qkv_proj.weight", "o_proj.weight"}
    assert attention.get_parameter("qkv_proj.weight").shape == (32 + 2 * 16, 32)


def test_making_values_leaves_the_global_random_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    materialised(fused("llama"))
    assert torch.equal(torch.rand(4), expected)


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama grouped", "gemma3 untied"])
def test_published_weights_are_loaded(case: str, tmp_path: Path) -> None:
    plain = shaken(build(case)).eval()
    plain.model.save_pretrained(tmp_path)
    stack = materialised(build_causal_lm(ModelConfig(weights=f"path:{tmp_path}", fused_qkv=True), seed=9)).eval()
    for name, parts in stack.fused.items():
        assert torch.equal(stack.model.get_parameter(name), torch.cat([plain.model.get_parameter(part) for part in parts]))
    expected = logits_of(plain, BATCH)
    assert (logits_of(stack, BATCH) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_compiled_block_has_no_graph_break() -> None:
    stack = materialised(fused("qwen3"))
    expected = logits_of(stack, BATCH)
    for block in stack.blocks:
        block.module.forward = torch.compile(block.module.forward, fullgraph=True, backend="eager")
    assert (logits_of(stack, BATCH) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_family_that_has_one_projection_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"^model\.fused_qkv: true, but gpt_neox has one projection already; drop the key$"):
        fused("gpt_neox")


def test_the_check_at_start_covers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fused("qwen3").model.config
    check_stack(config, fused_qkv=True)
    intact = verify.fuse_projections

    def swapped(model, model_type) -> None:
        intact(model, model_type)
        for module in model.modules():
            if hasattr(module, "k_proj"):
                module.k_proj, module.v_proj = module.v_proj, module.k_proj

    monkeypatch.setattr(verify, "fuse_projections", swapped)
    with pytest.raises(RuntimeError, match="fused projections of qwen3 differ from the library's forward by"):
        check_stack(config, fused_qkv=True)
