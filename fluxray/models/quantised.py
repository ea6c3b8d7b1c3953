"""Frozen linear layers whose weights have 4 bits: what adapters lie beside, as in QLoRA (Dettmers et al., arXiv:2305.14314).

Codes and their absmax are bitsandbytes' NF4, in blocks of 64 consecutive inputs of one output, so that a weight can be cut by
rows anywhere. Both are bytes, absmax those of fp32 numbers: no cast policy touches them, and engines move and share them as any
frozen parameter. Each product makes the weight anew in the dtype that it computes with, and backward makes it once more instead
of keeping it.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fluxray.errors import ConfigError, one_line

BLOCK = 64
"""Weights that share one absmax."""

KIND = "nf4"
"""bitsandbytes' name of the codes."""


def require_library() -> None:
    """Let bitsandbytes register its operators; ConfigError where it is not there."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # what it lacks is for inference in 4 bits
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            f"adapter.base: 'nf4' needs bitsandbytes ({one_line(error)}); install it, or set adapter.base=full"
        ) from None


class Nf4Linear(nn.Linear):
    """A frozen linear layer of O outputs and I inputs, a multiple of 64.

    `weight` uint8 [O, I / 2]: two codes a byte; `absmax` uint8 [O, I / 16]: the bytes of fp32 [O, I / 64]; `bias` as it was.
    """

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        device = layer.weight.device
        self.weight = _bytes(self.out_features, self.in_features // 2, device)
        self.absmax = _bytes(self.out_features, 4 * self.in_features // BLOCK, device)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the product [..., O] in the dtype of the inputs [..., I], or in that of autocast."""
        device = input.device.type
        casts = device != "meta" and torch.is_autocast_enabled(device)
        inputs = input.to(torch.get_autocast_dtype(device)) if casts else input
        return _Product.apply(inputs, self.weight, self.absmax, self.bias)

    def whole(self) -> nn.Linear:
        """Return the layer with a weight of its own, fp32 and empty, and this one's bias."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta").to_empty(device=self.weight.device)
        layer.bias = self.bias
        return layer.requires_grad_(False)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantise a weight [O, I]; ConfigError where bitsandbytes has nothing that does it on its device."""
        try:
            codes, absmax = quantise(weight)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, NotImplementedError, RuntimeError) as error:  # a library that was built without CUDA
            raise ConfigError(
                f"adapter.base: 'nf4' finds nothing in this bitsandbytes that quantises on {weight.device} ({one_line(error)}); "
                f"install one for it, or set adapter.base=full"
            ) from None
        self.weight.copy_(codes)
        self.absmax.copy_(absmax)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, absmax)
        return F.linear(inputs, dequantise(codes, absmax, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, absmax = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ dequantise(codes, absmax, gradient.dtype), None, None, None


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [O, I / 2] and absmax uint8 [O, I / 16] of a weight [O, I] (see `Nf4Linear`)."""
    num_rows = weight.shape[0]
    codes, absmax = torch.ops.bitsandbytes.quantize_4bit.default(weight.contiguous(), BLOCK, KIND, torch.uint8)
    return codes.view(num_rows, -1), absmax.view(num_rows, -1).view(torch.uint8)


def dequantise(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, I] of codes and absmax: a product in fp32, rounded to `dtype`."""
    assert codes.dtype == absmax.dtype == torch.uint8, "something has cast codes"
    shape = (codes.shape[0], 2 * codes.shape[1])
    scales = absmax.view(torch.float32).flatten()
    return torch.ops.bitsandbytes.dequantize_4bit.default(codes, scales, BLOCK, KIND, shape, dtype)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight [O, I] as it is behind 4 bits (fp32)."""
    return dequantise(*quantise(weight), torch.float32)


def layer_paths(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the paths of the layers that 4 bits are for: the linear ones inside blocks whose inputs are a multiple of 64."""
    inside = tuple(f"{block}." for block in blocks)
    return [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear and module.in_features % BLOCK == 0 and path.startswith(inside)
    ]


def quantise_layers(model: nn.Module, paths: Collection[str]) -> None:
    """Put layers of 4 bits in the place of frozen ones of a meta model; ConfigError if there are none."""
    if not paths:
        raise ConfigError(
            f"adapter.base: 'nf4' is for linear layers whose inputs are a multiple of {BLOCK}, and the model's blocks have none; "
            f"set adapter.base=full"
        )
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(parent), leaf, Nf4Linear(layer))


def is_quantised(model: nn.Module) -> bool:
    """Return whether some layer has 4 bits."""
    return any(isinstance(module, Nf4Linear) for module in model.modules())


@contextmanager
def opened(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module for what gives it values: a layer of 4 bits as a whole one, which it takes the values of afterwards."""
    if not isinstance(module, Nf4Linear):
        yield module
        return
    layer = module.whole()
    yield layer
    module.take(layer.weight)


def _bytes(num_rows: int, width: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(num_rows, width, dtype=torch.uint8, device=device), requires_grad=False)
