import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fluxray.errors import CheckpointError
from fluxray.optim import restore as restore_module
from fluxray.optim.formats import dequantise, join, quantise, split
from fluxray.optim.restore import restore
from fluxray.optim.states import QUANT_BLOCK, Master, StateFormat, state_format

SHAPE = (48, 512)
MASTERS: tuple[Master, ...] = ("fp32", "split24", "stochastic")
FORMATS = {
    "fp32": state_format(SHAPE, False, "fp32", torch.float32),
    "fp32 8-bit": state_format(SHAPE, True, "fp32", torch.float32),
    **{f"{m} {bits}": state_format(SHAPE, bits == "8-bit", m, torch.bfloat16) for m in MASTERS for bits in ("32-bit", "8-bit")},
    "frozen": state_format(SHAPE, True, "split24", torch.bfloat16, trained=False),
}
BITS = {None: 0, torch.int8: 8, torch.int16: 16}


class Saved:
    """A StateReader over tensors in memory."""

    def __init__(self, sections: dict[str, Tensor]) -> None:
        self._sections = sections

    def names(self) -> Sequence[str]:
        return ["p"]

    def shape(self, section: str, name: str, /) -> tuple[int, ...]:
        return tuple(self._sections[section].shape)

    def sections(self, name: str, /) -> Sequence[str]:
        return list(self._sections)

    def read(self, section: str, name: str, offset: int, num_rows: int | None, /) -> Tensor:
        tensor = self._sections[section]
        return tensor if num_rows is None else tensor[offset : offset + num_rows].clone()


@pytest.mark.parametrize(("source", "target"), itertools.product(FORMATS, FORMATS))
def test_any_format_is_restored_into_any_other(source: str, target: str) -> None:
    saved, fmt = sections(FORMATS[source]), FORMATS[target]
    targets = empty(fmt)
    narrowed = restore(Saved(saved), "p", fmt, targets)
    assert narrowed == is_narrower(fmt, FORMATS[source])
    if source == target:
        assert all(torch.equal(targets[name], saved[name]) for name in targets)
    expect_restored(targets, saved, fmt)


def test_rows_of_a_parameter_equal_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_module, "CHUNK", 5 * SHAPE[1])
    fmt, saved = FORMATS["split24 8-bit"], Saved(sections(FORMATS["fp32"]))
    whole, part = empty(fmt), {name: tensor[:17] for name, tensor in empty(fmt).items()}
    restore(saved, "p", fmt, whole)
    restore(saved, "p", fmt, part, offset=30, num_rows=17)
    assert all(torch.equal(part[name], whole[name][30:47]) for name in whole)


@pytest.mark.parametrize("target", [name for name in FORMATS if name != "frozen"])
def test_moments_saved_before_the_first_step_are_zero(target: str) -> None:
    fmt = FORMATS[target]
    targets = empty(fmt)
    restore(Saved({"weights": torch.randn(SHAPE)}), "p", fmt, targets)
    assert not any(moment.any() for moment in moments(targets).values())
    assert not any(tensor.any() for name, tensor in targets.items() if name.endswith("absmax"))


@pytest.mark.parametrize("shape", [(), (7,), (4, 256, 3, 2), (16, 256)])
def test_parameters_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    source, fmt = state_format(shape, False, "fp32", torch.float32), state_format(shape, True, "fp32", torch.bfloat16)
    saved, targets = sections(source, shape), empty(fmt, shape)
    restore(Saved(saved), "p", fmt, targets)
    expect_restored(targets, saved, fmt)


def test_another_models_checkpoint_is_refused() -> None:
    saved = Saved({"weights": torch.randn(1, 512)})
    with pytest.raises(CheckpointError, match=r"weights of p is saved as \[1, 512\], the model has \[48, 512\]"):
        restore(saved, "p", FORMATS["fp32"], empty(FORMATS["fp32"]))


def sections(fmt: StateFormat, shape: tuple[int, ...] = SHAPE) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {"step": torch.tensor(3.0)}
    found["weights"], correction = split(torch.randn(shape), fmt, noise=1)
    if correction is not None:
        found["correction"] = correction
    if not fmt.trained:
        return found
    for name, values in (("exp_avg", torch.randn(shape)), ("exp_avg_sq", torch.rand(shape))):
        found[name] = values
        if fmt.quantised:
            found[name], found[f"{name}_absmax"] = quantise(values, name == "exp_avg")
    return found


def empty(fmt: StateFormat, shape: tuple[int, ...] = SHAPE) -> dict[str, Tensor]:
    numel = torch.Size(shape).numel()
    found = {}
    for name, dtype, count in [fmt.weight_section(numel), *fmt.state_sections(numel)]:
        filled = torch.full((count,), 99).to(dtype)
        found[name] = filled.view(shape if count == numel else (shape[0], numel // shape[0] // QUANT_BLOCK))
    return found


def moments(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name in {"exp_avg", "exp_avg_sq"} & set(state):
        absmax = state.get(f"{name}_absmax")
        values = state[name] if absmax is None else dequantise(state[name].flatten(1), absmax, name == "exp_avg")
        found[name] = values.view(state[name].shape)
    return found


def is_narrower(fmt: StateFormat, source: StateFormat) -> bool:
    bits = [8 * f.weight.itemsize + BITS[f.correction] for f in (fmt, source)]
    moments_narrowed = fmt.trained and source.trained and fmt.quantised and not source.quantised
    return bits[0] < bits[1] or moments_narrowed


def expect_restored(targets: dict[str, Tensor], saved: dict[str, Tensor], fmt: StateFormat) -> None:
    """Masters within half a step of the grid, moments within half a gap of the code book."""
    actual, expected = (join(s["weights"], s.get("correction")) for s in (targets, saved))
    grid = 2.0 ** -(8 * fmt.weight.itemsize + BITS[fmt.correction] - 8)
    assert bool(((actual - expected).abs() <= expected.abs() * grid).all())
    before = moments(saved)
    for name, values in moments(targets).items():
        torch.testing.assert_close(
            values, before.get(name, torch.zeros_like(values)), rtol=0, atol=0.06 if "exp_avg_absmax" in targets else 0
        )
