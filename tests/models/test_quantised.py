import sys

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from fluxray.config.adapter import LoraConfig
from fluxray.errors import ConfigError
from fluxray.models.flux_stack import build_flux
from fluxray.models.quantised import Nf4Linear, opened, quantise, rounded
from tests.models.flux_helpers import flux_config

NUM_OUTPUTS, NUM_INPUTS = 6, 128


def layer_of(bias: bool = True) -> tuple[Nf4Linear, torch.Tensor]:
    """Return a layer of 4 bits and the weight that its bits stand for."""
    torch.manual_seed(0)
    plain = nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias).requires_grad_(False)
    layer = Nf4Linear(plain)
    layer.take(plain.weight)
    return layer, rounded(plain.weight)


def test_codes_are_bitsandbytes_and_can_be_cut_by_rows() -> None:
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS)
    codes, absmax = quantise(weight)
    theirs, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(codes.flatten(), theirs.flatten()) and torch.equal(absmax.view(torch.float32).flatten(), state.absmax)
    assert torch.equal(rounded(weight), bnb.dequantize_4bit(theirs, state))
    for part, found in zip(quantise(weight[2:5]), (codes, absmax), strict=True):
        assert torch.equal(part, found[2:5])
    assert codes.nbytes + absmax.nbytes == weight.numel() * 9 // 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_what_the_bits_stand_for(dtype: torch.dtype, bias: bool) -> None:
    layer, weight = layer_of(bias)
    layer.to(dtype)
    inputs = torch.randn(2, 3, NUM_INPUTS, dtype=dtype)
    given, expected = (inputs.clone().requires_grad_() for _ in range(2))
    made, wanted = layer(given), F.linear(expected, weight.to(dtype), layer.bias)
    assert made.dtype == dtype and torch.equal(made, wanted)
    gradient = torch.randn_like(made)
    made.backward(gradient)
    wanted.backward(gradient)
    assert given.grad is not None and expected.grad is not None
    torch.testing.assert_close(given.grad, expected.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
    assert layer.weight.dtype == layer.absmax.dtype == torch.uint8 and layer.weight.grad is None


def test_under_autocast_products_have_16_bits() -> None:
    layer, weight = layer_of()
    inputs = torch.randn(3, NUM_INPUTS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        made, wanted = layer(inputs), F.linear(inputs, weight, layer.bias)
    assert made.dtype == torch.bfloat16 and torch.equal(made, wanted)
    made.float().sum().backward()
    assert inputs.grad is not None and inputs.grad.dtype == torch.float32


def test_backward_keeps_the_bits_alone() -> None:
    layer, _ = layer_of()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(3, NUM_INPUTS, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr(), layer.absmax.data_ptr()]


def test_a_layer_is_opened_whole_and_takes_what_it_was_given() -> None:
    layer, weight = layer_of()
    before = layer.weight.clone()
    with opened(layer) as whole:
        assert isinstance(whole, nn.Linear) and whole.weight.shape == (NUM_OUTPUTS, NUM_INPUTS) and whole.bias is layer.bias
        whole.weight.copy_(2 * weight)
    assert torch.equal(layer.weight, before)
    plain = nn.Linear(2, 2)
    with opened(plain) as same:
        assert same is plain


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nf4 = LoraConfig(base="nf4")
    with pytest.raises(ConfigError) as refused:
        build_flux(flux_config("flux1 dev", attention_head_dim=10, axes_dims_rope=[2, 4, 4]), 0, adapter=nf4)
    assert str(refused.value) == (
        "adapter.base: 'nf4' is for linear layers whose inputs are a multiple of 64, and the model's blocks have none; "
        "set adapter.base=full"
    )
    layer, weight = layer_of()
    with monkeypatch.context() as patched:
        patched.setattr("fluxray.models.quantised.quantise", lambda _: (_ for _ in ()).throw(AttributeError("no symbol")))
        with pytest.raises(ConfigError) as refused:
            layer.take(weight)
    assert str(refused.value) == (
        "adapter.base: 'nf4' finds nothing in this bitsandbytes that quantises on cpu (no symbol); install one for it, or set "
        "adapter.base=full"
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ConfigError, match=r"^adapter\.base: 'nf4' needs bitsandbytes \(.*\); install it, or set adapter\.base=full$"
    ):
        build_flux(flux_config("flux1 dev"), 0, adapter=nf4)
