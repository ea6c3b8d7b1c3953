"""Which attention kernel a configuration means: on the driver before anything starts, and on the device."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from fluxray.config.schema import Kernel, TrainConfig
from fluxray.models.flux_facts import FluxFacts
from fluxray.models.kernels import Setting, candidates, choose

DTYPES = {"fp32": torch.float32, "amp-fp16": torch.float16, "amp-bf16": torch.bfloat16, "mixed-bf16": torch.bfloat16}
"""What attention computes in, by `precision`."""


def setting_of(
    config: TrainConfig, model: PretrainedConfig | FluxFacts, device: torch.device | None = None, length: int | None = None
) -> Setting:
    """Return what decides which kernels can serve the run; without a device the GPU is not known yet.

    `length` is that of the longest row where `data.max_slice` does not say it: of images with their texts.
    """
    on_gpu = config.resources.gpu > 0 if device is None else device.type == "cuda"
    common: dict[str, Any] = {
        "device": "cuda" if on_gpu else "cpu",
        "capability": None if device is None or not on_gpu else torch.cuda.get_device_capability(device),
        "dtype": DTYPES[config.precision],
        "length": length or config.data.max_slice,
        "deterministic": config.deterministic,
    }
    if isinstance(model, FluxFacts):
        return Setting.of_flux(model, **common)
    return Setting.of(model, packed=config.data.packing, **common)


def expected_kernel(config: TrainConfig, model: PretrainedConfig | FluxFacts, device: torch.device | None = None) -> Kernel:
    """Return the kernel that the run will have if nothing fails; raises ConfigError for one that cannot serve it."""
    return candidates(config.attention, setting_of(config, model, device))[0]


def choose_kernel(
    config: TrainConfig,
    model: PretrainedConfig | FluxFacts,
    device: torch.device,
    notify: Callable[[str], None] | None,
    length: int | None = None,
) -> Kernel:
    """Return the kernel of the run, proven on the device (see `fluxray.models.kernels.choose`)."""
    return choose(config.attention, setting_of(config, model, device, length), device, notify or (lambda _: None))
