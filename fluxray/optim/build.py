"""The optimizer of a run."""

from collections.abc import Mapping

import torch
from torch import nn

from fluxray.config.schema import OptimConfig
from fluxray.optim.paged import PagedMemory
from fluxray.optim.sharded import Adam8bit, FusedAdamW, ShardedOptimizer
from fluxray.optim.units import UnitOptimizers


def build_sharded(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> ShardedOptimizer:
    """Return the optimizer of fp32 masters, which may be DTensors."""
    match config.kind:
        case "adamw":
            return FusedAdamW(parameters, build_adamw(parameters, config))
        case "adam8bit":
            return Adam8bit(parameters, config)
        case "paged_adam8bit":
            return Adam8bit(parameters, config, PagedMemory(next(iter(parameters.values())).device))


def build_by_unit(parameters: Mapping[str, nn.Parameter], config: OptimConfig, units: Mapping[str, str]) -> UnitOptimizers:
    """Return an optimizer for each unit (`units` names that of each parameter), so that units can step one by one."""
    return UnitOptimizers(parameters, units, lambda own: build_sharded(own, config))


def build_adamw(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Return fused AdamW (Loshchilov and Hutter, arXiv:1711.05101) over named parameters, which may be DTensors.

    Weight decay is decoupled and is not applied to 1-D parameters: gains and biases are no measure of complexity.
    """
    numbers = [p for p in parameters.values() if p.is_floating_point()]  # fused=True refuses codes, frozen or not
    decayed = [p for p in numbers if p.ndim > 1]
    others = [p for p in numbers if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
