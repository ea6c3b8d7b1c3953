"""The addition kernel against the plain sum. As a program it runs in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.engine.accumulate_cases
"""

import torch

from fluxray.engine import accumulate_kernel


def check(device: str) -> None:
    """Raise AssertionError unless kernel and plain sum agree in every bit."""
    for dtype in (torch.bfloat16, torch.float16):
        for numel in (1, 255, 2048, 5000):
            generator = torch.Generator().manual_seed(numel)
            total, first, second = (torch.randn(numel + 4, generator=generator)[4:].to(device) for _ in range(3))
            gradients = [gradient.to(dtype) for gradient in (first, second)]
            gradients[1][0] = torch.inf
            plain = gradients[0].float() + gradients[1]
            for gradient, begins in zip(gradients, (True, False), strict=True):
                accumulate_kernel.launch(total, gradient, begins)
            assert torch.equal(total, plain), (dtype, numel)


if __name__ == "__main__":
    check("cpu")
