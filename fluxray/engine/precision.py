"""In what precision a model computes."""

from typing import Literal

import torch

Precision = Literal["fp32", "amp-bf16", "amp-fp16", "mixed-bf16"]

AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""What autocast casts matrix products to; the other precisions do without autocast."""


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the context in which the model's forward runs on `device`.

    It remembers no casts: a weight is used once in a forward, and remembered ones would hold a 16-bit copy of the whole model, of
    every rank's shards too, beside blocks that are recomputed. The uses of a tied weight have a gradient each, summed in fp32.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)
