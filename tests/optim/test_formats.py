import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from fluxray.optim.formats import code_book, code_bounds, dequantise, join, quantise, random_bits, split, zero_code
from fluxray.optim.states import StateFormat

CPU = torch.device("cpu")
INT16 = StateFormat(torch.bfloat16, torch.int16, False, True)
INT8 = StateFormat(torch.bfloat16, torch.int8, False, True)
NONE = StateFormat(torch.bfloat16, None, False, True)
FP32 = StateFormat(torch.float32, None, False, True)


def floats(bits: int | list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def finite_masters(count: int) -> Tensor:
    """Every exponent, and the edges."""
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    edges = floats([0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F808000, 0x3F807FFF, 0x7F7F0000])
    masters = torch.cat([edges, patterns.view(torch.float32)])
    return masters[masters.abs() < 3.38e38]  # above, the nearest bf16 is infinity


def lowbias32(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("offset", [0, 7, 2**34 - 3, 5 * 2**34 + 1])
@pytest.mark.parametrize("noise", [0, 1, 0x9ABCDEF012345678, 2**63 - 1])
def test_random_bits_are_parts_of_the_hash_of_a_counter(bits: int, offset: int, noise: int) -> None:
    expected = []
    for place in range(offset, offset + 9):
        word, part = divmod(place, 32 // bits)
        key = lowbias32(lowbias32((word >> 32) ^ (noise >> 32)) ^ (noise % 2**32))
        expected.append(lowbias32((word % 2**32) ^ key) >> part * bits & (1 << bits) - 1)
    assert random_bits(noise, offset, 9, bits, CPU).tolist() == expected


def test_neighbouring_keys_draw_anew() -> None:
    draws = torch.stack([random_bits(1000 + key, 0, 4096, 16, CPU) for key in range(64)]).view(64, -1, 2)
    words = draws[..., 0] | draws[..., 1] << 16
    assert len(words.unique()) > 0.999 * words.numel()
    correlations = torch.corrcoef(draws.flatten(1).double()) - torch.eye(64)
    assert correlations.abs().max() < 5 / 4096**0.5


@pytest.mark.parametrize("bits", [8, 16])
def test_random_bits_are_even_and_differ_between_keys(bits: int) -> None:
    first, second = (random_bits(noise, 0, 2**16, bits, CPU) for noise in (3, 3 + 2**32))
    for byte in (first & 0xFF, first >> bits - 8, (first ^ second) & 0xFF):
        counts = torch.bincount(byte, minlength=256).double()
        assert float(((counts - 256) ** 2 / 256).sum()) < 350  # chi-squared, 255 degrees of freedom: one in 25,000 is above


@pytest.mark.parametrize("bits", [8, 16])
def test_random_bits_of_neighbours_do_not_correlate(bits: int) -> None:
    draws = (random_bits(77, 2**40, 2**18, bits, CPU).double() + 0.5) / 2**bits - 0.5
    assert draws.mean().abs() < 4 * (1 / 12) ** 0.5 / 2**9
    for lag in (*range(1, 9), 256, 4096):
        assert (draws[lag:] * draws[:-lag]).mean().abs() < 4 / 12 / 2**9


@pytest.mark.parametrize("noise", [None, 5])
def test_an_fp32_master_is_kept_whole(noise: int | None) -> None:
    masters = finite_masters(2**16)
    weight, correction = split(masters, INT16, noise)
    assert torch.equal(join(weight, correction).view(torch.int32), masters.view(torch.int32))
    own, nearest = ((w.double() - masters.double()).abs() for w in (weight, masters.bfloat16()))
    assert torch.equal(own, nearest)
    assert split(masters, FP32, noise)[0] is masters


def test_a_correction_of_8_bits_keeps_the_nearer_neighbour_on_a_grid_of_24_bits() -> None:
    masters = finite_masters(2**16)
    weight, correction = split(masters, INT8, None)
    kept = join(weight, correction)
    below, above = (floats_at(masters, step) for step in (0, 1))
    nearest = torch.minimum((below - masters.double()).abs(), (above - masters.double()).abs())
    assert torch.equal((kept.double() - masters.double()).abs(), nearest)
    assert bool(((weight.double() - kept.double()).abs() <= (kept.bfloat16().double() - kept.double()).abs()).all())


def floats_at(masters: Tensor, step: int) -> Tensor:
    return ((masters.view(torch.int32) >> 8) + step << 8).view(torch.float32).double()


@pytest.mark.parametrize("fmt", [INT8, NONE])
def test_what_lies_on_the_grid_stays_whatever_the_noise(fmt: StateFormat) -> None:
    masters = join(*split(finite_masters(2**12), fmt, None))
    for noise in range(50):
        assert torch.equal(join(*split(masters, fmt, noise)).view(torch.int32), masters.view(torch.int32))


@pytest.mark.parametrize("fmt", [INT8, NONE])
@pytest.mark.parametrize("value", [0.0123456, -0.987654, 1.0000001, 3e-41])
def test_stochastic_rounding_keeps_the_mean(fmt: StateFormat, value: float) -> None:
    masters = torch.full((2**18,), value)
    kept = join(*split(masters, fmt, noise=11)).double()
    grid = sorted(set(kept.tolist()))
    assert len(grid) <= 2 and min(grid) <= masters[0] <= max(grid)
    error = abs(float(kept.mean() - masters[0].double()))
    assert error <= 5 * (max(grid) - min(grid)) / 2 / 2**9


@pytest.mark.parametrize("fmt", [INT16, INT8, NONE, FP32])
def test_what_is_not_finite_stays_so(fmt: StateFormat) -> None:
    infinite = floats([0x7F800000, 0xFF800000]).repeat(500)
    nan = floats([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001]).repeat(500)
    for noise in (None, 1):
        for part in split(infinite, fmt, noise)[0], join(*split(infinite, fmt, noise)):
            assert torch.equal(part.float(), infinite)
        for part in split(nan, fmt, noise)[0], join(*split(nan, fmt, noise)):
            assert bool(part.isnan().all())


@pytest.mark.parametrize("fmt", [INT8, NONE])
def test_a_slice_is_rounded_as_in_the_whole(fmt: StateFormat) -> None:
    masters = torch.randn(4096)
    whole, part = split(masters, fmt, 9, offset=2**32 - 2000), split(masters[1000:3000], fmt, 9, offset=2**32 - 1000)
    assert all(torch.equal(a[1000:3000], b) for a, b in zip(whole, part, strict=True) if a is not None and b is not None)
    assert not torch.equal(join(*whole), join(*split(masters, fmt, 9)))


@pytest.mark.parametrize("signed", [True, False])
def test_code_book_is_bitsandbytes(signed: bool) -> None:
    book = code_book(signed, CPU)
    assert torch.equal(book, bnb.create_dynamic_map(signed))
    assert book[zero_code(signed)] == 0


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_bitsandbytes(signed: bool) -> None:
    values = moments(signed)
    codes, absmax = quantise(values, signed)
    # bitsandbytes' compiled CPU quantiser is not exact; its torch one is.
    exact = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    operator = torch.ops.bitsandbytes.quantize_blockwise.default
    expected, expected_absmax = operator.redispatch(exact, values, bnb.create_dynamic_map(signed), 256)
    assert torch.equal(codes, expected) and torch.equal(absmax.flatten(), expected_absmax)
    restored = bnb.dequantize_blockwise(codes, absmax=absmax.flatten(), code=code_book(signed, CPU), blocksize=256)
    assert torch.equal(dequantise(codes, absmax, signed), restored)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed: bool) -> None:
    values = moments(signed)[:4]
    codes, absmax = quantise(values, signed)
    restored = dequantise(codes, absmax, signed)
    every = code_book(signed, CPU).double() * absmax.repeat_interleave(256, -1).unsqueeze(-1)
    nearest = (values.double().unsqueeze(-1) - every).abs().amin(-1)
    excess = (values.double() - restored).abs() - nearest
    assert bool((excess <= 1e-6 * absmax.repeat_interleave(256, -1)).all())


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_the_code_book_and_blocks_of_zero_survive(signed: bool) -> None:
    values = torch.cat([code_book(signed, CPU) * 3.0, torch.zeros(256)]).view(2, 256)
    codes, absmax = quantise(values, signed)
    assert codes[0].tolist() == list(range(256))
    assert set(codes[1].tolist()) == {zero_code(signed)} and absmax[1] == 0
    assert torch.equal(dequantise(codes, absmax, signed), values)
    assert quantise(values[:0], signed)[0].shape == (0, 256)
    assert len(code_bounds(signed, CPU)) == 255


def moments(signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(16, 1024, generator=generator) * torch.exp(4 * torch.randn(16, 1024, generator=generator))
    return values if signed else values.square()
