from dataclasses import replace

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from fluxray.optim import adam8bit
from fluxray.optim.adam8bit import AdamConfig, FlatState, adam_step, bias_corrections
from fluxray.optim.formats import code_book, dequantise, join
from tests.optim.helpers import CONFIG, FORMATS, control_of, copy_of, num_different, random_state, state_of

SMALL_LR = 1e-6


@pytest.mark.parametrize("name", ["fp32 weight fp32 moments", "fp32 master fp32 moments"])
def test_twenty_steps_equal_adamw(name: str) -> None:
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(5000))
    state = state_of(weights.detach(), FORMATS[name])
    options = {"betas": (CONFIG.beta1, CONFIG.beta2), "eps": CONFIG.eps, "weight_decay": CONFIG.weight_decay}
    optimizer = torch.optim.AdamW([weights], lr=1e-2, **options)
    for step in range(1, 21):
        gradient = torch.randn(5000) * 10 ** torch.linspace(-6, 2, 5000)
        weights.grad = gradient * 0.5
        optimizer.step()
        adam_step(state, gradient, CONFIG, 1e-2, control_of(step, scale=0.5), noise=step)
    expected = optimizer.state[weights]
    _expect_close(join(state.weight, state.correction), weights.detach())
    _expect_close(state.exp_avg, expected["exp_avg"])
    _expect_close(state.exp_avg_sq, expected["exp_avg_sq"])


def _expect_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_eight_bit_steps_equal_bitsandbytes() -> None:
    torch.manual_seed(0)
    numel = 2**14
    state = state_of(0.02 * torch.randn(numel), FORMATS["fp32 weight 8-bit moments"])
    for step in range(1, 7):
        gradient = torch.randn(numel) * torch.exp(torch.randn(numel))
        theirs, before = copy_of(state), copy_of(state)
        _bitsandbytes_step(theirs, gradient, step)
        adam_step(state, gradient, CONFIG, 1e-3, control_of(step, scale=0.5), noise=0)
        _expect_close(state.weight, theirs.weight)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            _expect_same_moment(name, signed, (before, state, theirs), gradient * 0.5)


def _bitsandbytes_step(state: FlatState, gradient: Tensor, step: int) -> None:
    """Their CPU kernel, whose decay comes first and whose eps stands beside the corrected root, as here."""
    maps = bnb.create_dynamic_map(True), bnb.create_dynamic_map(False)
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        *("adam", gradient, state.weight, state.exp_avg, state.exp_avg_sq, CONFIG.beta1, CONFIG.beta2, 0.0, 0.0, CONFIG.eps),
        *(step, 1e-3, *maps, state.exp_avg_absmax, state.exp_avg_sq_absmax, CONFIG.weight_decay, 0.5, False),
    )


def _expect_same_moment(name: str, signed: bool, states: tuple[FlatState, FlatState, FlatState], gradient: Tensor) -> None:
    """Equal absmax; and equal codes, except where their quantiser misses the nearest one."""
    before, ours, theirs = (_moment(state, name, signed) for state in states)
    exact = before * (CONFIG.beta1 if signed else CONFIG.beta2)
    exact += gradient.double() * (1 - CONFIG.beta1) if signed else gradient.double() ** 2 * (1 - CONFIG.beta2)
    absmax = [getattr(state, f"{name}_absmax") for state in states[1:]]
    torch.testing.assert_close(*absmax, rtol=1e-6, atol=0)
    codes = [getattr(state, name) for state in states[1:]]
    differ = codes[0] != codes[1]
    assert bool(((ours - exact).abs() <= (theirs - exact).abs() + 1e-6 * exact.abs())[differ].all())
    assert differ.double().mean() < (0.02 if signed else 0.25)


def _moment(state: FlatState, name: str, signed: bool) -> Tensor:
    return dequantise(getattr(state, name), getattr(state, f"{name}_absmax"), signed).double()


@pytest.mark.parametrize(
    ("name", "centre"),
    [
        ("fp32 master fp32 moments", 0.0),
        ("split24 fp32 moments", 0.0),
        ("split24 8-bit moments", 0.0),
        ("stochastic fp32 moments", 0.0),
        ("fp32 master fp32 moments", 1.0),
        ("split24 fp32 moments", 1.0),
    ],
)
def test_steps_far_below_the_grid_of_bf16_add_up(name: str, centre: float) -> None:
    moments = name.split(" ", 2 if name.startswith("fp32") else 1)[-1]
    numel = 2**16 if name.startswith("stochastic") else 2**13
    expected = _displacement(f"fp32 weight {moments}", centre, numel)
    assert _displacement(name, centre, numel) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_rounding_to_nearest_bf16_loses_them(centre: float) -> None:
    kept = _displacement("fp32 weight fp32 moments", centre, 2**13)
    assert _displacement("fp32 weight fp32 moments", centre, 2**13, nearest=True) < 0.1 * kept


def _displacement(name: str, centre: float, numel: int, nearest: bool = False) -> float:
    """Return the mean way down the gradient after 100 steps of 1e-6, from weights of 0.02 or gains near 1."""
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(numel, generator=generator) for _ in range(2)]
    start = (centre + 0.02 * normal[0]).bfloat16().float()
    state, config = state_of(start, FORMATS[name]), replace(CONFIG, weight_decay=0.0)
    direction = normal[1].sign()
    gradient = direction + 0.3 * normal[0]
    for step in range(1, 101):
        adam_step(state, gradient, config, SMALL_LR, control_of(step), noise=1000 + step)
        if nearest:
            state.weight.copy_(state.weight.bfloat16())
    return -float(((join(state.weight, state.correction) - start).double() * direction).mean())


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_that_is_withheld_leaves_every_byte(name: str) -> None:
    state, _ = random_state(FORMATS[name], 4096)
    before = copy_of(state)
    adam_step(state, torch.full((4096,), torch.nan), CONFIG, 1e-3, control_of(3, scale=torch.nan, flag=0.0), noise=1)
    assert not any(num_different(state, before).values())


@pytest.mark.parametrize("name", FORMATS)
def test_slices_equal_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, gradient = random_state(FORMATS[name], 8192)
    slices, chunks, other = (copy_of(whole) for _ in range(3))
    control, offset = control_of(3), 2**32 - 5000
    adam_step(whole, gradient, CONFIG, 1e-3, control, 7, offset)
    for start, stop in ((0, 768), (768, 8192)):
        adam_step(slices.slice(start, stop), gradient[start:stop], CONFIG, 1e-3, control, 7, offset + start)
    monkeypatch.setattr(adam8bit, "CHUNK", 1024)
    adam_step(chunks, gradient, CONFIG, 1e-3, control, 7, offset)
    assert not any(num_different(slices, whole).values())
    assert not any(num_different(chunks, whole).values())
    adam_step(other, gradient, CONFIG, 1e-3, control, 8, offset)
    rounded = FORMATS[name].weight == torch.bfloat16 and FORMATS[name].correction != torch.int16
    assert any(num_different(other, whole).values()) == rounded


def test_a_bf16_gradient_is_taken_as_its_values() -> None:
    one, gradient = random_state(FORMATS["split24 8-bit moments"], 4096)
    other = copy_of(one)
    adam_step(one, gradient.bfloat16(), CONFIG, 1e-3, control_of(3), noise=7)
    adam_step(other, gradient.bfloat16().float(), CONFIG, 1e-3, control_of(3), noise=7)
    assert not any(num_different(one, other).values())


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
def test_bias_corrections_are_right_to_the_last_bit(step: int) -> None:
    config = AdamConfig(0.9, 0.9999, 1e-8, 0.0)
    bias1, root2 = bias_corrections(torch.tensor(float(step)), config)
    expected = torch.tensor([1 - 0.9**step, (1 - 0.9999**step) ** 0.5])
    torch.testing.assert_close(torch.stack([bias1, root2]), expected, rtol=1.2e-7, atol=0)


def test_the_unquantised_moments_make_the_update() -> None:
    """A block whose small elements quantise to 0 must still move them."""
    state = state_of(torch.ones(256), FORMATS["fp32 weight 8-bit moments"])
    gradient = torch.full((256,), 1e-6)
    gradient[0] = 1e3
    adam_step(state, gradient, replace(CONFIG, weight_decay=0.0, eps=1e-15), 1e-2, control_of(1), noise=0)
    torch.testing.assert_close(state.weight, torch.full((256,), 0.99), rtol=0, atol=1e-6)
    assert dequantise(state.exp_avg, state.exp_avg_absmax, True)[1:].abs().max() == 0  # type: ignore[arg-type]
    assert len(code_book(True, torch.device("cpu"))) == 256
