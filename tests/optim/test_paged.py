"""8-bit Adam whose states lie in other memory; that it is CUDA's managed memory is tested in tests/engine/test_gpu.py."""

import sys
import types

import pytest
import torch
from torch import Tensor, nn

from fluxray.config.schema import OptimConfig
from fluxray.errors import ConfigError
from fluxray.optim import sharded
from fluxray.optim.build import build_sharded
from fluxray.optim.paged import SMALLEST_PAGED, PagedMemory
from fluxray.optim.sharded import Adam8bit

SHAPES = {"large": (512, 256), "wide rows": (400, 300), "small": (300, 256), "bias": (256,)}
CPU = torch.device("cpu")
OPTIM = OptimConfig(lr=1e-2, kind="adam8bit")


class Pages:
    """Stands for managed memory: the host's, filled with what must be overwritten; writes down what is asked of it."""

    def __init__(self) -> None:
        self.allocated: dict[str, Tensor] = {}
        self.done: list[str] = []

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        self.allocated[name] = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        return self.allocated[name]

    def prefetch(self, name: str) -> None:
        if name in self.allocated:
            self.done.append(f"prefetch {name}")


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def states(optimizer: Adam8bit) -> dict[tuple[str, str], Tensor]:
    return {(item.section, name): item.tensor for name in SHAPES for item in optimizer.state_items(name)}


def test_steps_are_those_of_8_bit_adam_on_pages_that_are_fetched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, found = Pages(), (parameters(), parameters())
    paged, plain = Adam8bit(found[0], OPTIM, pages), Adam8bit(found[1], OPTIM)  # type: ignore[arg-type]
    intact = sharded.adam_step

    def step(state, *args, **kwargs) -> None:
        pages.done.append(f"step {state.weight.numel()}")
        intact(state, *args, **kwargs)

    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape, generator=generator)
            for each in found:
                each[name].grad = gradient.clone()
        plain.step(1e-2, torch.zeros(()))
        monkeypatch.setattr(sharded, "adam_step", step)
        paged.step(1e-2, torch.zeros(()))
        monkeypatch.undo()
    assert all(torch.equal(found[0][name], found[1][name]) for name in SHAPES)
    expected = states(plain)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in states(paged).items())
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    of_step: list[str] = []
    for name, size in sizes.items():
        of_step += [f"prefetch {name}", f"step {size}"] if size >= SMALLEST_PAGED else [f"step {size}"]
    assert pages.done == of_step * 3


def test_states_of_large_parameters_lie_in_the_pages_and_fill_them() -> None:
    pages = Pages()
    optimizer = Adam8bit(parameters(), OPTIM, pages)  # type: ignore[arg-type]
    assert {name: page.numel() for name, page in pages.allocated.items()} == {
        "large": 512 * 256 * 2 + 2 * 4 * 512,
        "wide rows": 400 * 300 * 8,  # rows that are no multiple of 256 keep fp32 moments
    }
    places = {page.data_ptr(): page.numel() for page in pages.allocated.values()}
    for (section, name), tensor in states(optimizer).items():
        inside = any(start <= tensor.data_ptr() < start + size for start, size in places.items())
        assert inside == (name in pages.allocated and section != "step"), (section, name)


def test_without_cuda_there_is_no_managed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Method 'cget_managed_ptr' not available\nin CPU-only version")

    library = types.ModuleType("bitsandbytes.functional")
    library.get_paged = refuse  # type: ignore[attr-defined]
    package = types.ModuleType("bitsandbytes")
    package.functional = library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", library)
    with pytest.raises(ConfigError) as refused:
        build_sharded(parameters(), OPTIM.model_copy(update={"kind": "paged_adam8bit"}))
    assert str(refused.value) == (
        "optim.kind: 'paged_adam8bit' finds no managed memory in this bitsandbytes (Method 'cget_managed_ptr' not available "
        "in CPU-only version); install one for this CUDA, or set optim.kind=adam8bit"
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match=r"^optim\.kind: 'paged_adam8bit' needs bitsandbytes \(.*\); install it, or set"):
        PagedMemory(CPU)
