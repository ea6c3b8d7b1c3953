"""The kernel against the plain step, in every format. As a program it runs in Triton's interpreter and prints what differs:

TRITON_INTERPRET=1 python -m tests.optim.kernel_cases
"""

import json
from collections.abc import Iterator

import torch

from fluxray.optim import adam8bit_kernel
from fluxray.optim.adam8bit import adam_step_plain
from fluxray.optim.formats import code_bounds
from fluxray.optim.states import StateFormat
from tests.optim.helpers import CONFIG, FORMATS, control_of, copy_of, num_different, random_state, state_of


def differences(device: str, num_blocks: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each case and, for each tensor, how many elements differ in any bit from the plain step's on `device`."""
    for name, fmt in FORMATS.items():
        for numel in {256 * num_blocks, 256 * num_blocks + (0 if fmt.quantised else 37)}:
            for dtype in (torch.float32, torch.bfloat16):
                state, gradient = random_state(fmt, numel)
                arguments = (
                    gradient.to(device, dtype),
                    CONFIG,
                    1e-3,
                    control_of(3, scale=0.7).to(device),
                    2**62 + 12345,
                    2**34 - 700,
                )
                plain, fused = copy_of(state, device), copy_of(state, device)
                adam_step_plain(plain, *arguments)
                adam8bit_kernel.launch(fused, *arguments)
                yield f"{name}, {numel} elements, {dtype} gradient", num_different(fused, plain)
                withheld = (
                    torch.full_like(gradient, torch.nan).to(device),
                    CONFIG,
                    1e-3,
                    control_of(3, flag=0.0).to(device),
                    1,
                    0,
                )
                adam8bit_kernel.launch(fused, *withheld)
                yield f"{name}, withheld", num_different(fused, plain)
        if fmt.weight == torch.bfloat16 and fmt.correction != torch.int16:
            yield f"{name}, offset inside a word", _odd_offset(device, fmt)
        if fmt.weight == torch.bfloat16:
            yield f"{name}, weights that are not finite", _not_finite(device, fmt)
    for signed in (True, False):
        yield f"at the bounds of the codes, signed {signed}", _at_the_bounds(device, signed)


def _odd_offset(device: str, fmt: StateFormat) -> dict[str, int]:
    state, gradient = random_state(fmt, 2560)
    arguments = (gradient.to(device), CONFIG, 1e-3, control_of(3).to(device), 5, 2**33 - 1001)
    plain, fused = copy_of(state, device), copy_of(state, device)
    adam_step_plain(plain, *arguments)
    adam8bit_kernel.launch(fused, *arguments)
    return num_different(fused, plain)


def _not_finite(device: str, fmt: StateFormat) -> dict[str, int]:
    state, gradient = random_state(fmt, 256)
    state.weight[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan])
    arguments = (gradient.to(device), CONFIG, 1e-3, control_of(3).to(device), 5, 0)
    plain, fused = copy_of(state, device), copy_of(state, device)
    adam_step_plain(plain, *arguments)
    adam8bit_kernel.launch(fused, *arguments)
    assert fused.weight[:2].isinf().all() and fused.weight[2:4].isnan().all()
    return num_different(fused, plain)


def _at_the_bounds(device: str, signed: bool) -> dict[str, int]:
    """Moments that end on the bounds between codes, and on the floats beside them: where a search may go wrong."""
    bounds = code_bounds(signed, torch.device("cpu"))
    beside = [torch.nextafter(bounds, torch.full_like(bounds, way)) for way in (-2.0, 2.0)]
    values = torch.stack([torch.cat([part, torch.ones(1)]) for part in (bounds, *beside)]).flatten()
    state = state_of(torch.ones_like(values), FORMATS["fp32 weight 8-bit moments"])
    beta = {"beta1": 0.0, "beta2": 0.0}
    config = type(CONFIG)(**beta, eps=CONFIG.eps, weight_decay=0.0)
    gradient = values if signed else values.sqrt()
    arguments = (gradient.to(device), config, 1e-3, control_of(1, config=config).to(device), 1, 0)
    plain, fused = copy_of(state, device), copy_of(state, device)
    adam_step_plain(plain, *arguments)
    adam8bit_kernel.launch(fused, *arguments)
    return num_different(fused, plain)


if __name__ == "__main__":
    print(json.dumps(dict(differences("cpu", num_blocks=5))))
