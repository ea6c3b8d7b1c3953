"""Units of the stream engine: where autograd finds weights that have moved since the forward pass."""

import torch
from torch import nn

from fluxray.engine.stream_store import Unit
from tests.engine.helpers import OPTIM


def test_a_graph_finds_weights_in_the_slot_where_they_lie_when_backward_comes() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    parameters, values = dict(layer.named_parameters()), torch.randn(3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(values).square().sum(), values)
    unit = Unit("", parameters, OPTIM, torch.float32)
    sizes = (unit.layout.weight_bytes, unit.layout.state_bytes)
    unit.memory = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)  # type: ignore[assignment]
    unit.fill(parameters)
    first, second = unit.memory[0].clone(), unit.memory[0].clone()
    unit.bind(first)
    with unit.saving_places():
        loss = layer(values).square().sum()
    unit.bind(second)
    first.fill_(0xFF)
    (gradient,) = torch.autograd.grad(loss, values)
    assert torch.equal(gradient, expected)
