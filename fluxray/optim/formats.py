"""The arithmetic of kept state: master weights as two integers, stochastic rounding, 8-bit moments. Plain torch, on any device.

A fp32 master, read as an int32 `bits`, is kept as (all shifts are arithmetic, r is the random number, k bits of it):

    correction int16    hi = (bits + 0x8000) >> 16                              correction = bits - (hi << 16)
    correction int8     bits24 = (bits + r8) >> 8, hi = (bits24 + 0x80) >> 8    correction = bits24 - (hi << 8)
    none, bf16 weight   hi = (bits + r16) >> 16

where `hi` is the bit pattern of the bf16 weight. Adding to the bits adds to the magnitude, so a carry into the exponent is right,
and a value that lies on the coarser grid is kept as it is whatever r is. A NaN is made the quiet one first, and infinity lies on
every grid, so what is not finite stays so.

The random numbers are parts of hashes, the low bits first: four consecutive elements share the 32 bits of one hash where r has 8
bits, two where it has 16. What is hashed is the number of the word, the element's place divided by 4 or 2, keyed by 64 bits:
nothing else counts, so any slice can be computed by itself. The hash is lowbias32 (Chris Wellons, "Prospecting for Hash
Functions", https://nullprogram.com/blog/2018/07/31/, public domain): the high halves of number and key are hashed into the key of
the low ones.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fluxray.optim.states import QUANT_BLOCK, StateFormat

QUIET_NAN = 0x7FC00000
INFINITY = 0x7F800000
SMALLEST_ABSMAX = 2.0**-120
"""An absmax below it is taken for it in divisions."""

SMALLEST_SQUARE = 2.0**-100
"""A second moment below it is taken for it where its root is drawn."""


def signed32(value: int) -> int:
    """Return the int32 with the low 32 bits of `value`."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def random_bits(noise: int, offset: int, numel: int, bits: int, device: torch.device) -> Tensor:
    """Return random numbers of 8 or 16 `bits` (int32 [numel]) for the places offset, offset + 1, ..., keyed by `noise`."""
    parts = 32 // bits
    first, last = offset // parts, (offset + numel - 1) // parts
    word = torch.arange(first, last + 1, dtype=torch.int64, device=device)
    keys = [signed32(mix(noise, high)) for high in (first >> 32, last >> 32)]
    assert last >> 32 <= (first >> 32) + 1
    hashed = word.to(torch.int32)
    hashed ^= keys[0] if keys[0] == keys[1] else torch.where(word >> 32 == first >> 32, *keys).to(torch.int32)
    # lowbias32 once more, on signed numbers: products wrap, and masking makes an arithmetic shift a logical one.
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= 0x7FEB352D
    hashed ^= (hashed >> 15) & 0x1FFFF
    hashed *= signed32(0x846CA68B)
    hashed ^= (hashed >> 16) & 0xFFFF
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=device)
    skipped = offset - first * parts
    return ((hashed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten()[skipped : skipped + numel]


def mix(noise: int, high: int) -> int:
    """Mix the high half of a word's number into the key of its low half; hashed, or neighbouring keys would only shuffle it."""
    return _lowbias32(_lowbias32((high ^ (noise >> 32)) & 0xFFFFFFFF) ^ (noise & 0xFFFFFFFF))


def _lowbias32(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D & 0xFFFFFFFF
    bits ^= bits >> 15
    bits = bits * 0x846CA68B & 0xFFFFFFFF
    return bits ^ bits >> 16


def join(weight: Tensor, correction: Tensor | None) -> Tensor:
    """Return the fp32 master of a bf16 or fp32 `weight` and its int8 or int16 `correction` of the same shape."""
    if correction is None:
        return weight.float()
    bits = weight.view(torch.int16).to(torch.int32) << 16
    low = correction.to(torch.int32)
    return bits.add_(low << 8 if correction.dtype == torch.int8 else low).view(torch.float32)


def split(master: Tensor, fmt: StateFormat, noise: int | None, offset: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return weight and correction of the fp32 `master`, of its shape. What does not fit is rounded stochastically.

    `noise` keys the random numbers and `offset` is the counter of the first element; None rounds to nearest.
    """
    if fmt.weight == torch.float32:
        return master, None
    bits = master.contiguous().view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > INFINITY, QUIET_NAN, bits)
    if fmt.correction == torch.int16:
        high = (bits + 0x8000) >> 16
        return _bf16(high), bits.sub_(high << 16).to(torch.int16)
    kept = 8 if fmt.correction == torch.int8 else 16
    if noise is None:
        bits += 1 << (kept - 1)
    else:
        bits += random_bits(noise, offset, bits.numel(), kept, bits.device).view(bits.shape)
    bits >>= kept
    if fmt.correction is None:
        return _bf16(bits), None
    high = (bits + 0x80) >> 8
    return _bf16(high), bits.sub_(high << 8).to(torch.int8)


def _bf16(high: Tensor) -> Tensor:
    return high.to(torch.int16).view(torch.bfloat16)


@lru_cache
def code_book(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the codes, ascending (fp32 [256]): signed for exp_avg, from 0 on for exp_avg_sq.

    The dynamic map of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561, as bitsandbytes'
    `functional.create_dynamic_map` computes it: seven decades below 1, the i-th cut into 2^i (unsigned 2^(i+1)) equal parts,
    whose middles are the values; and 0 and 1.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32)
        middles = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache
def code_bounds(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 midpoints between neighbouring values of the code book (fp32); a midpoint itself gets the lower code."""
    book = code_book(signed, device)
    return (book[:-1] + book[1:]) / 2


def quantise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes (uint8 [..., n]) and absmax (fp32 [..., n / 256]) of fp32 `values` [..., n].

    Each block of 256 is divided by its largest magnitude and gets the nearest codes.
    """
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // QUANT_BLOCK, QUANT_BLOCK)
    absmax = blocks.abs().amax(-1)
    scaled = blocks * (1.0 / absmax.clamp(min=SMALLEST_ABSMAX)).unsqueeze(-1)
    codes = torch.bucketize(scaled.clamp_(-1, 1), code_bounds(signed, values.device), out_int32=True)
    return codes.to(torch.uint8).view(values.shape), absmax


def dequantise(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Return the fp32 values [..., n] of codes (uint8 [..., n]) and absmax (fp32 [..., n / 256])."""
    values = code_book(signed, codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    return values.view(*absmax.shape, QUANT_BLOCK).mul_(absmax.unsqueeze(-1)).view(codes.shape)


def zero_code(signed: bool) -> int:
    """Return the code of 0."""
    return 127 if signed else 0
