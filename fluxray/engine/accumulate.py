"""Adding a gradient to an fp32 sum, or beginning one with it."""

import torch
from torch import Tensor


def begin_sum(total: Tensor, gradient: Tensor) -> None:
    """Replace `total` by `gradient`, which has its shape and may have another dtype."""
    if _is_fused(total, gradient):
        from fluxray.engine import accumulate_kernel

        accumulate_kernel.launch(total, gradient, begins=True)
    else:
        total.copy_(gradient)


def add_to_sum(total: Tensor, gradient: Tensor) -> None:
    """Add `gradient`, of the same shape and any dtype, to `total`."""
    if _is_fused(total, gradient):
        from fluxray.engine import accumulate_kernel

        accumulate_kernel.launch(total, gradient, begins=False)
    else:
        total.add_(gradient)


def _is_fused(total: Tensor, gradient: Tensor) -> bool:
    """Return whether the kernel takes them: it pays on a GPU between two dtypes, where PyTorch converts element by element."""
    return (
        total.is_cuda
        and total.dtype == torch.float32
        and gradient.dtype in (torch.bfloat16, torch.float16)
        and type(gradient) is Tensor
        and total.is_contiguous()
        and gradient.is_contiguous()
        and torch.version.hip is None
    )
