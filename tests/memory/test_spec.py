import pytest
import torch

from fluxray.memory.live import BlockMemory
from fluxray.memory.spec import KindSpec, read_spec
from fluxray.metrics import count_forward_flops
from fluxray.models.causal_lm import build_causal_lm
from fluxray.protocols import TextBatch
from tests.memory.helpers import spec_of
from tests.models.helpers import CASES, model_config

SIZES = {"neox-20b": 20.555e9, "flux1-dev": 11.901e9, "flux2-dev": 32.223e9, "flux2-klein-4b": 3.876e9}
BLOCKS = {
    "neox-20b": {"GPTNeoXLayer": (44, 453.06e6)},
    "flux1-dev": {"FluxTransformerBlock": (19, 339.83e6), "FluxSingleTransformerBlock": (38, 141.59e6)},
    "flux2-dev": {"Flux2TransformerBlock": (8, 981.47e6), "Flux2SingleTransformerBlock": (48, 490.73e6)},
    "flux2-klein-4b": {"Flux2TransformerBlock": (5, 245.4e6), "Flux2SingleTransformerBlock": (20, 122.7e6)},
}


@pytest.mark.parametrize("model", SIZES)
def test_the_published_sizes(model):
    spec = spec_of(model)
    assert spec.num_parameters == pytest.approx(SIZES[model], abs=5e5)
    for kind, (num, size) in BLOCKS[model].items():
        sizes = [block.num_parameters for block in spec.blocks if block.kind == kind]
        assert (len(sizes), sizes[0]) == (num, pytest.approx(size, rel=3e-4))


def read(case: str, length: int = 16, **keys):
    stack = build_causal_lm(model_config(case, **keys), seed=0)

    def forward(num_rows):
        tokens = torch.zeros(num_rows, length, dtype=torch.int64, device="meta")
        return stack(TextBatch(tokens, tokens, tokens, tokens, single_document=True, num_valid=0), lambda logits, _: logits)

    return stack, forward, read_spec(stack.model, [block.name for block in stack.blocks], forward, length)


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_flops_are_the_models(case):
    twice = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2} if "gemma3" in case else {}
    stack, forward, spec = read(case, **twice)
    assert spec.num_parameters == sum(parameter.numel() for parameter in stack.parameters())
    assert spec.forward_flops == count_forward_flops(lambda: forward(1))
    assert len(spec.blocks) == len(stack.blocks)
    assert spec.num_outputs == stack.model.config.vocab_size
    hidden = stack.model.config.hidden_size
    assert {block.carry_bytes for block in spec.blocks} == {4 * 16 * hidden}


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_without_a_mask_no_byte_grows_with_the_square_of_the_length(kernel):
    words = ("data.packing=true", "precision=mixed-bf16")
    plain = spec_of("lm-tiny", *words, "attention=math", "data.max_slice=512")
    short, found = (spec_of("lm-tiny", *words, f"attention={kernel}", f"data.max_slice={n}") for n in (256, 512))
    assert plain.shared_bytes - found.shared_bytes > 0.9 * 512 * 512  # a bool mask [1, 1, S, S] a row
    assert found.shared_bytes <= 2.1 * short.shared_bytes
    (kind,), (masked,) = found.kinds.values(), plain.kinds.values()
    assert masked.kept(8) - kind.kept(8) == 8 * 2 * 512 * 512  # and what the kernel makes of it
    assert kind.forward_flops == masked.forward_flops


def test_a_tied_parameter_counts_once():
    _, _, tied = read("llama", tie_word_embeddings=True)
    _, _, untied = read("llama", tie_word_embeddings=False)
    assert tied.tied == ("model.embed_tokens.weight",) and untied.tied == ()
    assert untied.num_parameters - tied.num_parameters == tied.outside[0].numel


def test_what_the_flux_blocks_hand_on_is_image_and_text():
    spec = spec_of("flux1-dev")
    assert spec.row_tokens == 1024 // 16 * 1024 // 16 + 512
    assert {block.carry_bytes for block in spec.blocks} == {2 * spec.row_tokens * 3072}


def test_between_and_beyond_what_was_measured_lie_lines():
    kind = KindSpec(1, 1, {1: BlockMemory(10, 30), 2: BlockMemory(20, 40), 4: BlockMemory(40, 80)})
    assert [kind.kept(n) for n in (1, 2, 3, 8)] == [10, 20, 30, 80]
    assert [kind.peak(n) for n in (1, 2, 3, 8)] == [30, 40, 60, 160]
