"""Masks of pictures on the way to tokens."""

import torch.nn.functional as F
from torch import Tensor


def token_mask(mask_HW: Tensor, pixels_per_token: int) -> Tensor:
    """Return how much each token's error counts: the mean of a mask in [0, 1] over the token's own pixels.

    The mask [H, W], of the picture as it was encoded, has sides that are multiples of `pixels_per_token`. What is returned is
    fp32 [T], row by row as latents are packed.
    """
    return F.avg_pool2d(mask_HW.float()[None], pixels_per_token).flatten()
