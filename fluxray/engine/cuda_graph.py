"""Forward and backward of a micro-batch as one CUDA graph: the host launches it whole instead of kernel by kernel.

A graph replays the very kernels that it has seen, on the very addresses. So what goes in is copied to where it went in when the
graph was captured, and gradients are added up in buffers that live as long as the run. Each shape of a micro-batch has a graph of
its own, all of them in one pool of memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluxray.protocols import Batch

MAX_GRAPHS = 8
"""Shapes that get a graph; what has yet another one runs kernel by kernel."""

WARM_UP = 3
"""Runs before the capture, in which compilers and libraries choose their kernels."""

UNREAD = ("key", "num_valid")
"""What differs from batch to batch and forward and backward do not read, where there is no dropout."""

Body = Callable[[Any, Tensor], Tensor]
"""Runs forward and backward of a batch on the device, its loss divided by a tensor; returns the summed loss."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Any
    divisor: Tensor
    loss: Tensor


class CudaGraphs:
    """Runs `body` on micro-batches through graphs, with the gradients of `parameters` in buffers that stay.

    The body must give its gradients to the `grad` of `parameters`, wait for nothing, and read nothing of a batch but its tensors
    and what is part of its signature. `notify` is told once if there are more shapes than graphs.
    """

    def __init__(self, body: Body, parameters: Mapping[str, nn.Parameter], device: torch.device, notify: Callable[[str], None]):
        self._body = body
        self._parameters = parameters
        self._device = device
        self._notify = notify
        self._graphs: dict[object, _Graph] = {}
        self._gradients: dict[str, Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._told = False

    def begin(self) -> None:
        """Begin the sum of a step's gradients at zero."""
        for name, buffer in self._gradients.items():
            self._parameters[name].grad = buffer
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))

    def __call__(self, batch: Batch, divisor: Tensor) -> Tensor:
        """Run forward and backward of a batch; return its summed loss (fp32 scalar), which the next call may overwrite."""
        signature = _signature(batch)
        found = self._graphs.get(signature)
        if found is None:
            if len(self._graphs) == MAX_GRAPHS:
                return self._without_graph(batch, divisor)
            found = self._graphs[signature] = self._capture(batch, divisor)
        for static, given in zip(_tensors(found.batch), _tensors(batch), strict=True):
            static.copy_(given, non_blocking=True)
        found.divisor.copy_(divisor)
        found.graph.replay()
        return found.loss

    def _without_graph(self, batch: Batch, divisor: Tensor) -> Tensor:
        if not self._told:
            self._told = True
            shape = tuple(_tensors(batch)[0].shape)
            self._notify(
                f"cuda_graph: {MAX_GRAPHS} shapes have a graph each, and now comes {shape}; further shapes run without one. "
                f"Texts have one shape with data.packing=true, images in a cache of one size"
            )
        return self._body(batch.to(self._device), divisor)

    def _capture(self, batch: Batch, divisor: Tensor) -> _Graph:
        static, divisor, graph = batch.to(self._device), divisor.clone(), torch.cuda.CUDAGraph()
        for _ in range(WARM_UP):
            for parameter in self._parameters.values():
                parameter.grad = None  # the buffers keep what earlier micro-batches of this step have left in them
            self._body(static, divisor)
        self._give_buffers()
        stream = torch.cuda.current_stream(self._device)
        # what the loader's thread does meanwhile is none of the graph's business
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            loss = self._body(static, divisor)
        return _Graph(graph, static, divisor, loss)

    def _give_buffers(self) -> None:
        """Give each parameter that has got a gradient the buffer for it."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and name not in self._gradients:
                self._gradients[name] = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad = self._gradients.get(name)


def use_own_stream(device: torch.device) -> None:
    """Make all further work of this thread go to a stream of its own: the default one cannot be captured.

    Autograd remembers the stream on which a parameter was first used, so this comes before the model has its tensors.
    """
    torch.cuda.set_stream(torch.cuda.Stream(device))


def _signature(batch: Any) -> object:
    """Return what must be equal for a graph to fit: shapes and dtypes of tensors, and every other value that is read."""
    assert is_dataclass(batch)
    return tuple(_of(name, value) for name, value in _items(batch))


def _of(name: str, value: Any) -> object:
    return (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (name, value)


def _items(batch: Any) -> Iterator[tuple[str, Any]]:
    yield from ((field.name, getattr(batch, field.name)) for field in fields(batch) if field.name not in UNREAD)


def _tensors(batch: Any) -> list[Tensor]:
    return [value for _, value in _items(batch) if isinstance(value, Tensor)]
