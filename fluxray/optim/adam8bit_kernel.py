"""`adam8bit.adam_step` as one Triton kernel: every byte of the state is read and written once.

The arithmetic is that of `adam_step_plain`, operation by operation and without fused multiply-add, so both give the same bits:
square root and reciprocal are correctly rounded, in the range that a finite step stays in.

On a fast card instructions are what limits such a kernel, so few are spent on an element, about 100 on a Hopper. A program
takes NUM_ROWS quantisation blocks, and a block lies in one warp, so its absmax never leaves the registers. Code books and bounds
are looked up in shared memory. The nearest code is found without a search. Inside a decade a code book is linear, so the place
of |x| among the codes is, but for 0.2 of a code at the decades' joints,

    position(x) = 2^d (10^(6-d) |x| + 0.8) / 0.9        in decade d = 0 ... 6, which ends at 10^(d-6); unsigned: twice that

Then position(x) = position(10^k x) / 2^k, so two multiplications that depend on x, by 10^4 and by 10^2, bring it into the
decades 5 and 6. Their two lines meet, and the second is a fifth as steep, so the position is the lesser of both. Rounded it
leaves two codes, and one comparison with the bound between them decides exactly.
"""

# Inside a kernel Python is Triton's, whose constants and loops pyright does not know.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalSubscript=false

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from fluxray.optim.adam8bit import AdamConfig, FlatState
from fluxray.optim.formats import QUIET_NAN, SMALLEST_ABSMAX, SMALLEST_SQUARE, code_book, code_bounds, mix, signed32
from fluxray.optim.states import QUANT_BLOCK

INTERPRETED = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no PTX."""

NUM_ROWS = 4
"""Quantisation blocks of a program: one a warp."""

OPTIONS: dict[str, Any] = {"num_warps": NUM_ROWS, "enable_fp_fusion": False}
"""How the kernel is compiled."""

_BLOCK = tl.constexpr(QUANT_BLOCK)
_NAN = tl.constexpr(QUIET_NAN)
_SMALLEST_SQUARE = tl.constexpr(SMALLEST_SQUARE)
_SMALLEST = tl.constexpr(SMALLEST_ABSMAX)
_ROUND = tl.constexpr(8388608.0)  # 2^23: the integer nearest to x stands in the low bits of x + 2^23


@triton.jit
def _lowbias32(bits):
    """Hash uint32, as `formats` does."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    return bits


@triton.jit
def _random(first, start, key, next_key, numel: tl.constexpr, bits: tl.constexpr, skipped: tl.constexpr):  # noqa: PLR0913, PLR0917
    """Return `formats.random_bits` (int32 [numel]) of a program that begins at element `start` of the launch.

    `first` is the low half of the number of the launch's first word, whose first `skipped` parts are not used; after a wrap of
    the low half `next_key` is the key.
    """
    parts: tl.constexpr = 32 // bits
    first, key, next_key = _unsigned(first), _unsigned(key), _unsigned(next_key)
    if skipped == 0:
        word = first + (start // parts).to(tl.uint32) + tl.arange(0, numel // parts).to(tl.uint32)
        hashed = _lowbias32(word ^ tl.where(word < first, next_key, key))
        # A word's parts go to neighbours in one thread, so this moves nothing.
        found = (hashed[:, None] >> (tl.arange(0, parts) * bits).to(tl.uint32)[None, :]).reshape([numel])
    else:
        place = tl.arange(0, numel) + skipped
        word = first + (start // parts).to(tl.uint32) + (place // parts).to(tl.uint32)
        found = _lowbias32(word ^ tl.where(word < first, next_key, key)) >> (place % parts * bits).to(tl.uint32)
    return (found & ((1 << bits) - 1)).to(tl.int32, bitcast=True)


@triton.jit
def _unsigned(value):
    return value.to(tl.uint32, bitcast=True)


_ROOT_PTX = tl.constexpr("""{
    .reg .f32 inverse, root, half, rest;
    rsqrt.approx.ftz.f32 inverse, $1;
    mul.f32 root, $1, inverse;
    mul.f32 half, inverse, 0f3F000000;
    neg.f32 rest, root;
    fma.rn.f32 rest, rest, root, $1;
    fma.rn.f32 $0, rest, half, root;
}""")
_RECIPROCAL_PTX = tl.constexpr("""{
    .reg .f32 inverse, rest;
    rcp.approx.ftz.f32 inverse, $1;
    neg.f32 rest, $1;
    fma.rn.f32 rest, rest, inverse, 0f3F800000;
    fma.rn.f32 $0, rest, inverse, inverse;
}""")
_BYTES_PTX = tl.constexpr("""
    prmt.b32 $0, $4, 0, 0x4440;
    prmt.b32 $1, $4, 0, 0x4441;
    prmt.b32 $2, $4, 0, 0x4442;
    prmt.b32 $3, $4, 0, 0x4443;
""")
_LESS_ONE_PTX = tl.constexpr("""{
    .reg .pred below;
    setp.le.f32 below, $2, $3;
    mov.b32 $0, $1;
    @below add.s32 $0, $0, -1;
}""")


@triton.jit
def _root(value, native: tl.constexpr):
    """Return the square root, rounded right for normal numbers from 2^-101 on: as ptxas does it, without its rare branch."""
    if native:
        return tl.inline_asm_elementwise(_ROOT_PTX, "=f,f", [value], tl.float32, True, 1)
    return tl.sqrt_rn(value)


@triton.jit
def _reciprocal(value, native: tl.constexpr):
    """Return 1 / value, rounded right between 2^-125 and 2^125: as ptxas does it, without its rare branch."""
    if native:
        return tl.inline_asm_elementwise(_RECIPROCAL_PTX, "=f,f", [value], tl.float32, True, 1)
    return tl.div_rn(1.0, value)


@triton.jit
def _widen(codes, native: tl.constexpr):
    """Return uint8 as int32."""
    if native:
        return tl.inline_asm_elementwise(_BYTES_PTX, "=r,=r,=r,=r,r", [codes], tl.int32, True, 4)
    return codes.to(tl.int32)


@triton.jit
def _look_up(table, places):
    """Return table[places], of the shape of `places`, through shared memory."""
    flat: tl.constexpr = places.shape[0] * places.shape[1]
    return tl.gather(table, places.reshape([flat]), 0).reshape(places.shape)


@triton.jit
def _codes(values, absmax, bounds, signed: tl.constexpr, native: tl.constexpr):
    """Return the codes (int32) of `values` [rows, 256] over their absmax [rows]; `bounds` are the 255 behind an infinity."""
    x = values * _reciprocal(tl.maximum(absmax, _SMALLEST), native)[:, None]
    magnitude = tl.maximum(tl.abs(x), 1e-7) if signed else x
    small = magnitude < 1e-4
    magnitude = tl.where(small, magnitude * 1e4, magnitude)
    middle = magnitude < 1e-2
    magnitude = tl.where(middle, magnitude * 1e2, magnitude)
    unit = (1.0 if signed else 2.0) / 0.9
    position = tl.minimum(tl.fma(magnitude, unit * 64.0, unit * 51.2), tl.fma(magnitude, unit * 320.0, unit * 25.6))
    position = tl.where(middle, position * 0.25, position)
    position = tl.where(small, position * 0.0625, position)
    if signed:
        # Complementing mirrors: below 0 the bound in question is 126 - rank.
        rank = _mirrored((position + (_ROUND + 127.0)).to(tl.int32, bitcast=True), x.to(tl.int32, bitcast=True) >> 31, native)
    else:
        rank = (position + (_ROUND - 1.0)).to(tl.int32, bitcast=True) & 0xFF
    bound = _look_up(bounds, rank)
    if native:
        return tl.inline_asm_elementwise(_LESS_ONE_PTX, "=&r,r,f,f", [rank, x, bound], tl.int32, True, 1)
    return rank - (x <= bound).to(tl.int32)


@triton.jit
def _mirrored(rank, sign, native: tl.constexpr):
    """Return the low byte of `rank`, complemented where `sign` is -1: ptxas would do it in two instructions."""
    if native:
        return tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, 255, 0x28;", "=r,r,r", [rank, sign], tl.int32, True, 1)
    return (rank ^ sign) & 0xFF


@triton.jit
def _read_moment(places, absmax_places, book, factor, mask, row_mask, quantised: tl.constexpr, native: tl.constexpr):  # noqa: PLR0913, PLR0917
    """Return a moment [rows, 256] times `factor` in fp32."""
    values = tl.load(places, mask=mask, other=None if mask is None else 0)
    if quantised:
        absmax = tl.load(absmax_places, mask=row_mask, other=None if row_mask is None else 0.0)
        return _look_up(book, _widen(values, native)) * (absmax * factor)[:, None]
    return values * factor


@triton.jit
def _write_moment(  # noqa: PLR0913, PLR0917
    places, absmax_places, bounds, values, mask, row_mask, quantised: tl.constexpr, signed: tl.constexpr, native: tl.constexpr
):
    """Store a moment [rows, 256]."""
    if quantised:
        absmax = tl.max(tl.abs(values) if signed else values, axis=1)
        tl.store(absmax_places, absmax, mask=row_mask)
        tl.store(places, _codes(values, absmax, bounds, signed, native).to(tl.uint8), mask=mask)
    else:
        tl.store(places, values, mask=mask)


@triton.jit
def _read_master(places, correction_places, mask, correction_bits: tl.constexpr):
    """Return the masters in fp32; a bf16 weight is read as int16."""
    stored = tl.load(places, mask=mask, other=None if mask is None else 0)
    if places.dtype.element_ty == tl.float32:
        return stored
    bits = stored.to(tl.int32) << 16
    if correction_bits > 0:
        bits += tl.load(correction_places, mask=mask, other=None if mask is None else 0).to(tl.int32) << (16 - correction_bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_master(places, correction_places, master, random, mask, correction_bits: tl.constexpr):
    """Store the masters, rounded as `formats.split` does with `random` numbers."""
    if places.dtype.element_ty == tl.float32:
        tl.store(places, master, mask=mask)
        return
    bits = tl.where(master == master, master.to(tl.int32, bitcast=True), _NAN)
    if correction_bits < 16:
        bits += random
    if correction_bits > 0:
        # The correction is signed: what it takes off the weight, or adds to it, is what is left in the low bits.
        rest = bits >> (16 - correction_bits)
        tl.store(correction_places, rest.to(correction_places.dtype.element_ty), mask=mask)
        bits += 0x8000
    tl.store(places, (bits >> 16).to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["numel", "first", "key", "next_key"])
def kernel(  # noqa: PLR0913, PLR0917 - a launch has no structures
    weight,
    correction,
    exp_avg,
    exp_avg_sq,
    exp_avg_absmax,
    exp_avg_sq_absmax,
    gradient,
    control,
    tables,
    numel,
    first,
    key,
    next_key,
    lr,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    correction_bits: tl.constexpr,
    quantised: tl.constexpr,
    whole: tl.constexpr,
    num_rows: tl.constexpr,
    skipped: tl.constexpr,
    native: tl.constexpr,
):
    """Step num_rows * 256 elements. A bf16 weight comes as int16; `tables` are those of `_tables`, the rest is `adam_step`'s."""
    if tl.load(control + 1) == 0.0:
        return
    program = tl.program_id(0).to(tl.int64)
    start = program * (num_rows * _BLOCK)
    rows = tl.arange(0, num_rows)
    index = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    row = program * num_rows + rows
    left = tl.minimum(numel - start, num_rows * _BLOCK).to(tl.int32)
    row_mask = None if whole == num_rows * _BLOCK else rows * _BLOCK < left
    # One flag a row keeps the accesses wide; only a run that ends inside a row needs one an element.
    mask = None if whole == num_rows * _BLOCK else row_mask[:, None] if whole == _BLOCK else index < left
    low = correction + start + index if correction_bits > 0 else None
    absmax1, absmax2, book1, book2, bounds1, bounds2 = None, None, None, None, None, None
    if quantised:
        absmax1, absmax2 = exp_avg_absmax + row, exp_avg_sq_absmax + row
        places = tables + tl.arange(0, 256)
        book1, bounds1, book2, bounds2 = tl.load(places), tl.load(places + 256), tl.load(places + 512), tl.load(places + 768)

    g = tl.load(gradient + start + index, mask=mask, other=None if mask is None else 0.0).to(tl.float32) * tl.load(control)
    m = _read_moment(exp_avg + start + index, absmax1, book1, beta1, mask, row_mask, quantised, native) + g * rest1
    v = _read_moment(exp_avg_sq + start + index, absmax2, book2, beta2, mask, row_mask, quantised, native) + (g * rest2) * g
    denominator = _root(tl.maximum(v, _SMALLEST_SQUARE), native) * _reciprocal(tl.load(control + 3), native) + eps
    update = m * _reciprocal(denominator, native) * (_reciprocal(tl.load(control + 2), native) * lr)
    master = _read_master(weight + start + index, low, mask, correction_bits) * decay - update

    _write_moment(exp_avg + start + index, absmax1, bounds1, m, mask, row_mask, quantised, True, native)
    _write_moment(exp_avg_sq + start + index, absmax2, bounds2, v, mask, row_mask, quantised, False, native)
    random = 0
    if correction_bits < 16 and weight.dtype.element_ty != tl.float32:
        lost: tl.constexpr = 16 - correction_bits
        random = _random(first, start, key, next_key, num_rows * _BLOCK, lost, skipped).reshape([num_rows, _BLOCK])
    _write_master(weight + start + index, low, master, random, mask, correction_bits)


@lru_cache
def _tables(device: torch.device) -> Tensor:
    """Return code book and bounds, signed and then unsigned: fp32 [4, 256]; before the bounds stands minus infinity."""
    infinity = torch.tensor([-torch.inf], device=device)
    parts = [
        part
        for signed in (True, False)
        for part in (code_book(signed, device), torch.cat([infinity, code_bounds(signed, device)]))
    ]
    return torch.stack(parts)


def flags(state: FlatState, offset: int) -> dict[str, Any]:
    """Return the constants that the kernel is compiled for."""
    return {
        "correction_bits": 0 if state.correction is None else 8 * state.correction.itemsize,
        "quantised": state.exp_avg_absmax is not None,
        "whole": next(size for size in (NUM_ROWS * QUANT_BLOCK, QUANT_BLOCK, 1) if state.weight.numel() % size == 0),
        "num_rows": NUM_ROWS,
        "skipped": offset % _parts(state),
        "native": not INTERPRETED,
    }


def _parts(state: FlatState) -> int:
    """Return how many elements share a hash."""
    return 2 if state.correction is None else 4


def arguments(  # noqa: PLR0913, PLR0917 - those of `adam_step`
    state: FlatState, gradient: Tensor, config: AdamConfig, lr: float, control: Tensor, noise: int, offset: int
) -> dict[str, Any]:
    """Return the kernel's arguments, in order."""
    word = offset // _parts(state)
    weight = state.weight if state.weight.dtype == torch.float32 else state.weight.view(torch.int16)
    return state._replace(weight=weight)._asdict() | {
        "gradient": gradient,
        "control": control,
        "tables": _tables(weight.device),
        "numel": weight.numel(),
        "first": signed32(word),
        "key": signed32(mix(noise, word >> 32)),
        "next_key": signed32(mix(noise, (word >> 32) + 1)),
        "lr": lr,
        "decay": 1.0 - lr * config.weight_decay,
        "beta1": config.beta1,
        "rest1": 1.0 - config.beta1,
        "beta2": config.beta2,
        "rest2": 1.0 - config.beta2,
        "eps": config.eps,
    }


def launch(  # noqa: PLR0913, PLR0917
    state: FlatState, gradient: Tensor, config: AdamConfig, lr: float, control: Tensor, noise: int, offset: int
) -> None:
    """Do `adam_step` on a GPU."""
    grid = (triton.cdiv(state.weight.numel(), NUM_ROWS * QUANT_BLOCK),)
    with torch.cuda.device_of(state.weight):
        kernel[grid](**arguments(state, gradient, config, lr, control, noise, offset), **flags(state, offset), **OPTIONS)
