import pytest
import torch
from torch import nn

from fluxray.config.schema import OptimConfig
from fluxray.models.causal_lm import build_causal_lm
from fluxray.optim.build import build_adamw
from tests.models.helpers import CASES, model_config

CONFIG = OptimConfig(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.3)


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (6, 5), "bias": (5,), "kernel": (2, 3, 1, 2), "scale": (), "gain": (1,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def test_matrices_decay_and_vectors_do_not() -> None:
    parameters = make_parameters()
    decayed, others = build_adamw(parameters, CONFIG).param_groups
    assert [id(p) for p in decayed["params"]] == [id(parameters["matrix"]), id(parameters["kernel"])]
    assert [id(p) for p in others["params"]] == [id(parameters[name]) for name in ("bias", "scale", "gain")]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    for group in (decayed, others):
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.95), 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_norms_and_biases_of_the_models_are_the_undecayed_ones(case: str) -> None:
    parameters = dict(build_causal_lm(model_config(case), seed=0).model.named_parameters())
    undecayed = {
        id(p) for group in build_adamw(parameters, CONFIG).param_groups if not group["weight_decay"] for p in group["params"]
    }
    for name, parameter in parameters.items():
        assert (id(parameter) in undecayed) == (name.endswith("bias") or "norm" in name), name


@pytest.mark.parametrize("names", [["matrix"], ["bias"]])
def test_a_group_without_parameters_is_left_out(names: list[str]) -> None:
    parameters = {name: make_parameters()[name] for name in names}
    assert len(build_adamw(parameters, CONFIG).param_groups) == 1


def step(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_steps_equal_those_of_the_plain_optimizer() -> None:
    fused, plain = make_parameters(), make_parameters()
    optimizer = build_adamw(fused, CONFIG)
    groups = [
        {"params": [plain["matrix"], plain["kernel"]], "weight_decay": 0.3},
        {"params": [plain["bias"], plain["scale"], plain["gain"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-4, foreach=False, fused=False)
    for seed in range(5):
        step(optimizer, fused, seed)
        step(reference, plain, seed)
    for name, parameter in plain.items():
        assert torch.allclose(fused[name], parameter, rtol=1e-6, atol=1e-7), name


def test_first_step_written_out() -> None:
    parameters = {name: parameter for name, parameter in make_parameters().items() if name in ("matrix", "bias")}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    step(build_adamw(parameters, CONFIG), parameters, seed=0)
    for name, decay in (("matrix", 0.3), ("bias", 0.0)):
        grad = parameters[name].grad
        assert grad is not None
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * grad / (grad.abs() + 1e-4)
        assert torch.allclose(parameters[name], expected, rtol=1e-5, atol=1e-6), name
