"""Optimizer states in CUDA's managed memory, whose pages go to the host when the GPU is full and come back when they are used.

The idea is that of paged optimizers (Dettmers et al., QLoRA, arXiv:2305.14314); allocation and prefetch are bitsandbytes'. It
hands out tensors that PyTorch takes for the host's; here they are seen as what they are, memory of the device, so that every
kernel and copy works on them. PyTorch's allocator does not count them. They are freed when the process ends.
"""

from typing import Any

import torch
from torch import Tensor

from fluxray.errors import ConfigError, one_line

SMALLEST_PAGED = 100_000
"""Elements; the states of a smaller parameter stay on the device, as in bitsandbytes."""


class PagedMemory:
    """Managed memory of one device, piece by piece under a name. Raises ConfigError where bitsandbytes has none to give."""

    def __init__(self, device: torch.device):
        try:
            import bitsandbytes.functional as library
        except ImportError as error:
            raise ConfigError(
                f"optim.kind: 'paged_adam8bit' needs bitsandbytes ({one_line(error)}); install it, or set optim.kind=adam8bit"
            ) from None
        self._library: Any = library
        self._device = device
        self._pages: dict[str, Tensor] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return memory of the device (uint8 [num_bytes]), whatever is in it."""
        try:
            self._pages[name] = self._library.get_paged(num_bytes, dtype=torch.uint8, device=self._device)
        except (AttributeError, RuntimeError) as error:  # a library that was built without CUDA
            raise ConfigError(
                f"optim.kind: 'paged_adam8bit' finds no managed memory in this bitsandbytes ({one_line(error)}); install one for "
                f"this CUDA, or set optim.kind=adam8bit"
            ) from None
        memory = torch.as_tensor(_OnDevice(self._pages[name]), device=self._device)
        assert memory.data_ptr() == self._pages[name].data_ptr(), "PyTorch has copied what it should look at"
        return memory

    def prefetch(self, name: str) -> None:
        """Let what lies on the host of a piece come to the device before what is queued next. Nobody waits."""
        if name in self._pages:
            self._library.prefetch_tensor(self._pages[name])


class _OnDevice:
    """Tells PyTorch that the bytes of a tensor are the device's (CUDA array interface, version 3), and keeps them."""

    def __init__(self, page: Tensor):
        self._page = page
        self.__cuda_array_interface__ = {
            "shape": (page.numel(),),
            "typestr": "|u1",
            "data": (page.data_ptr(), False),
            "version": 3,
        }
