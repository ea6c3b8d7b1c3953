"""`adam8bit.adam_step` as one Triton kernel: every byte of the state is read and written once.

The arithmetic is that of `adam_step_plain`, operation by operation, with IEEE division and square root and without fused
multiply-add, so both give the same bits.

A program takes NUM_ROWS quantisation blocks, and a block lies in one warp, so its absmax never leaves the registers. The nearest
code is found without a search. Inside a decade a code book is linear, so the place of |x| among the codes is, but for 0.2 of a
code at the decades' joints,

    position(x) = 2^d (10^(6-d) |x| + 0.8) / 0.9        in decade d = 0 ... 6, which ends at 10^(d-6); unsigned: twice that

These lines meet, each a fifth as steep as the one before, so the position is the least of the seven. Rounded it leaves two
codes, and one comparison with the bound between them decides exactly.
"""

# Inside a kernel Python is Triton's, whose constants and loops pyright does not know.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxray.optim.adam8bit import AdamConfig, FlatState
from fluxray.optim.formats import INFINITY, QUIET_NAN, SMALLEST_ABSMAX, code_book, code_bounds, signed32
from fluxray.optim.states import QUANT_BLOCK

NUM_ROWS = 4
"""Quantisation blocks of a program: one a warp."""

OPTIONS: dict[str, Any] = {"num_warps": NUM_ROWS, "enable_fp_fusion": False}
"""How the kernel is compiled."""

_BLOCK = tl.constexpr(QUANT_BLOCK)
_NAN = tl.constexpr(QUIET_NAN)
_INFINITY = tl.constexpr(INFINITY)
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
def _random(first, index, key_low, key_high):
    """Return `formats.random_bits` (uint32) of the counters first + index; `first` is an int64 scalar, the keys are int32."""
    low, high = first.to(tl.uint32), (first >> 32).to(tl.uint32)
    key_low, key_high = key_low.to(tl.uint32, bitcast=True), key_high.to(tl.uint32, bitcast=True)
    key = _lowbias32(_lowbias32(high ^ key_high) ^ key_low)
    next_key = _lowbias32(_lowbias32((high + 1) ^ key_high) ^ key_low)
    counter = low + index.to(tl.uint32)
    return _lowbias32(counter ^ tl.where(counter < low, next_key, key))


@triton.jit
def _codes(values, absmax, bounds, signed: tl.constexpr):
    """Return the codes (int32) of `values` [rows, 256] over their absmax [rows]; `bounds` points to the 255 bounds."""
    smallest = tl.full([1], _SMALLEST, tl.float32)  # as a literal it would be fp64, being subnormal
    x = values * tl.div_rn(1.0, tl.maximum(absmax, smallest))[:, None]
    magnitude = tl.abs(x)
    unit = (1.0 if signed else 2.0) / 0.9
    position = tl.fma(magnitude, unit * 1e6, unit * 0.8)
    for decade in tl.static_range(1, 7):
        position = tl.minimum(position, tl.fma(magnitude, unit * 1e6 * 0.2**decade, unit * 0.8 * 2.0**decade))
    rank = (position + (_ROUND - 1.0)).to(tl.int32, bitcast=True) & 0xFF
    # Complementing the rank mirrors it: below 0 the bound in question is 126 - rank, and there is none under the lowest code.
    lower = tl.maximum((rank ^ (x.to(tl.int32, bitcast=True) >> 31)) + 127, 0) if signed else rank - 1
    return lower + (x > tl.load(bounds + lower)).to(tl.int32)


@triton.jit
def _read_moment(places, absmax_places, tables, mask, row_mask, quantised: tl.constexpr):
    """Return a moment [rows, 256] in fp32; `tables` points to its code book."""
    values = tl.load(places, mask=mask, other=0)
    if quantised:
        absmax = tl.load(absmax_places, mask=row_mask, other=0.0)
        values = tl.load(tables + values.to(tl.int32)) * absmax[:, None]
    return values


@triton.jit
def _write_moment(places, absmax_places, tables, values, mask, row_mask, quantised: tl.constexpr, signed: tl.constexpr):  # noqa: PLR0913, PLR0917
    """Store a moment [rows, 256]; `tables` points to its code book, and the bounds stand behind it."""
    if quantised:
        absmax = tl.max(tl.abs(values), axis=1)
        tl.store(absmax_places, absmax, mask=row_mask)
        tl.store(places, _codes(values, absmax, tables + 256, signed).to(tl.uint8), mask=mask)
    else:
        tl.store(places, values, mask=mask)


@triton.jit
def _read_master(places, correction_places, mask, correction_bits: tl.constexpr):
    """Return the masters in fp32; a bf16 weight is read as int16."""
    stored = tl.load(places, mask=mask, other=0)
    if places.dtype.element_ty == tl.float32:
        return stored
    bits = stored.to(tl.int32) << 16
    if correction_bits > 0:
        bits += tl.load(correction_places, mask=mask, other=0).to(tl.int32) << (16 - correction_bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_master(places, correction_places, master, random, mask, correction_bits: tl.constexpr):
    """Store the masters, rounded as `formats.split` does with `random` bits."""
    if places.dtype.element_ty == tl.float32:
        tl.store(places, master, mask=mask)
        return
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > _INFINITY, _NAN, bits)
    if correction_bits < 16:
        lost = 16 - correction_bits
        bits = (bits + (random & (0xFFFF >> correction_bits)).to(tl.int32)) >> lost
    if correction_bits == 0:
        high = bits
    else:
        high = (bits + (1 << (correction_bits - 1))) >> correction_bits
        rest = bits - (high << correction_bits)
        tl.store(correction_places, rest.to(correction_places.dtype.element_ty), mask=mask)
    tl.store(places, high.to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["numel", "offset", "key_low", "key_high"])
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
    offset,
    key_low,
    key_high,
    lr,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    correction_bits: tl.constexpr,
    quantised: tl.constexpr,
    whole_rows: tl.constexpr,
    num_rows: tl.constexpr,
):
    """Step num_rows * 256 elements. A bf16 weight comes as int16; `tables` are those of `_tables`, the rest is `adam_step`'s."""
    if tl.load(control + 1) == 0.0:
        return
    program = tl.program_id(0).to(tl.int64)
    start = program * (num_rows * _BLOCK)
    left = tl.minimum(numel - start, num_rows * _BLOCK).to(tl.int32)
    rows = tl.arange(0, num_rows)
    index = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    row = program * num_rows + rows
    row_mask = rows * _BLOCK < left
    # One flag a row keeps the accesses wide; only a run that ends inside a row needs one an element.
    mask = row_mask[:, None] if whole_rows else index < left
    absmax1 = exp_avg_absmax + row if quantised else None
    absmax2 = exp_avg_sq_absmax + row if quantised else None
    low = correction + start + index if correction_bits > 0 else None

    g = tl.load(gradient + start + index, mask=mask, other=0.0).to(tl.float32) * tl.load(control)
    m = _read_moment(exp_avg + start + index, absmax1, tables, mask, row_mask, quantised)
    v = _read_moment(exp_avg_sq + start + index, absmax2, tables + 512, mask, row_mask, quantised)
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * rest2) * g
    denominator = tl.sqrt_rn(v) * tl.div_rn(1.0, tl.load(control + 3)) + eps
    update = tl.div_rn(m, denominator) * (tl.div_rn(1.0, tl.load(control + 2)) * lr)
    master = _read_master(weight + start + index, low, mask, correction_bits) * decay - update

    _write_moment(exp_avg + start + index, absmax1, tables, m, mask, row_mask, quantised, True)
    _write_moment(exp_avg_sq + start + index, absmax2, tables + 512, v, mask, row_mask, quantised, False)
    random = _random(offset + start, index, key_low, key_high)
    _write_master(weight + start + index, low, master, random, mask, correction_bits)


@lru_cache
def _tables(device: torch.device) -> Tensor:
    """Return code book and bounds, signed and then unsigned: fp32 [4, 256]; the last bound is never looked at."""
    parts = [part for signed in (True, False) for part in (code_book(signed, device), code_bounds(signed, device))]
    return torch.stack([torch.nn.functional.pad(part, (0, 256 - len(part))) for part in parts])


def flags(state: FlatState) -> dict[str, Any]:
    """Return the constants that the kernel is compiled for."""
    return {
        "correction_bits": 0 if state.correction is None else 8 * state.correction.itemsize,
        "quantised": state.exp_avg_absmax is not None,
        "whole_rows": state.weight.numel() % QUANT_BLOCK == 0,
        "num_rows": NUM_ROWS,
    }


def arguments(  # noqa: PLR0913, PLR0917 - those of `adam_step`
    state: FlatState, gradient: Tensor, config: AdamConfig, lr: float, control: Tensor, noise: int, offset: int
) -> dict[str, Any]:
    """Return the kernel's arguments, in order."""
    weight = state.weight if state.weight.dtype == torch.float32 else state.weight.view(torch.int16)
    return state._replace(weight=weight)._asdict() | {
        "gradient": gradient,
        "control": control,
        "tables": _tables(weight.device),
        "numel": weight.numel(),
        "offset": offset,
        "key_low": signed32(noise),
        "key_high": signed32(noise >> 32),
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
        kernel[grid](**arguments(state, gradient, config, lr, control, noise, offset), **flags(state), **OPTIONS)
