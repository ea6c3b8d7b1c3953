"""FLUX.1 and FLUX.2 on both engines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxray import checkpoint
from fluxray.config.schema import CheckpointKind, Kernel
from fluxray.engine.clip import ClipMode
from fluxray.engine.parallelize import Precision, Techniques
from fluxray.engine.stream_compute import with_leaves
from fluxray.engine.stream_store import StreamSettings
from fluxray.optim.adam8bit import AdamConfig, FlatState, adam_step, bias_corrections
from fluxray.optim.formats import split
from fluxray.optim.states import state_format
from fluxray.protocols import Engine, FlowBatch, RunState, Schedule
from tests.engine.flux_cases import (
    CASES,
    FlowEngines,
    draw,
    flow_batch,
    flow_cut,
    plain_flow,
    plain_loss,
    sharded_flow,
    stream_flow,
    train_flow,
    weighted_square,
)
from tests.engine.helpers import EIGHT_BIT, OPTIM, SEED, EngineCase, expect_close, expect_close_values, expect_equal, section
from tests.engine.stream_helpers import CLIP_MODES, CLIPPED, expect_same, masters_of, moments_of, state_of
from tests.models.flux_helpers import built, output_of

pytestmark = pytest.mark.usefixtures("process_group")
Build = Callable[[EngineCase], Engine]


@pytest.fixture(params=FlowEngines)
def build(request: pytest.FixtureRequest) -> Build:
    return FlowEngines[request.param]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> EngineCase:
    return CASES[request.param]


def with_techniques(case: EngineCase, precision: Precision = "fp32", **keys: Any) -> EngineCase:
    return replace(case, techniques=Techniques(precision, **keys))


def run_flow(engine: Engine, case: EngineCase, num_steps: int = 2) -> list[tuple[float, ...]]:
    """Train and return what each step put out."""
    outputs = [engine.train_step(flow_cut(case, 2, step), OPTIM.lr) for step in range(num_steps)]
    return [tuple(value.item() for value in output if value is not None) for output in outputs]


def test_equals_a_plain_loop_over_the_librarys_model_and_pipelines(build: Build, case: EngineCase) -> None:
    """Gradients of the first step among it: of what makes temb and shared modulation, too."""
    expected = plain_flow(case, 4)
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    expect_close(train_flow(build(case), case, num_steps=4), expected, loss=2e-6, gradient=2e-6)


def test_split_into_micro_batches_does_not_matter(build: Build, case: EngineCase) -> None:
    actual, expected = (train_flow(build(case), case, count) for count in (1, 8))
    expect_close(actual, expected, loss=2e-6, gradient=2e-6)


def test_micro_batches_of_other_resolutions_and_texts_in_one_step(build: Build, case: EngineCase) -> None:
    drawn = [draw(case, step) for step in range(3)]
    shapes = [drawn[0], drawn[1]._replace(text=drawn[1].text[:, :2]), drawn[2]._replace(latents=drawn[2].latents[..., :2, :])]
    shapes[2] = shapes[2]._replace(noise=shapes[2].noise[..., :2, :])
    model = built(case.model, SEED).model
    expected = torch.stack([plain_loss(model, each) for each in shapes]).mean()
    expected.backward()
    engine = build(case)
    output = engine.train_step([flow_batch(each, range(8)) for each in shapes], OPTIM.lr)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    scale = max(p.grad.abs().max() for p in model.parameters())
    for name, moment in section(engine, "exp_avg").items():
        assert (moment / (1 - OPTIM.beta1) - model.get_parameter(name).grad).abs().max() <= 2e-6 * scale, name


@pytest.mark.parametrize("kind", ["full", "sqrt", "every_n", "offload"])
def test_checkpointing_changes_no_bit(case: EngineCase, kind: CheckpointKind) -> None:
    plain, other = (with_techniques(case, "mixed-bf16", activation_checkpoint=each) for each in ("none", kind))
    expect_equal(train_flow(sharded_flow(other), case), train_flow(sharded_flow(plain), case))


@pytest.mark.parametrize("precision", ["amp-bf16", "mixed-bf16"])
def test_16_bits_stay_close_to_fp32(build: Build, case: EngineCase, precision: Precision) -> None:
    reduced, exact = train_flow(build(with_techniques(case, precision)), case), train_flow(build(case), case)
    expect_close_values(torch.tensor(reduced.losses), torch.tensor(exact.losses), 1e-2, "losses")
    assert reduced.losses != exact.losses


def test_mixed_bf16_rounds_noise_levels_as_the_library_does(case: EngineCase) -> None:
    model = built(case.model, SEED).model.to(torch.bfloat16)
    drawn = draw(case, 0)
    held = {name: None if t is None else t.bfloat16() for name, t in drawn._asdict().items() if name in ("text", "pooled")}
    batch = flow_batch(drawn, range(8))
    engine = stream_flow(with_techniques(case, "mixed-bf16"))
    expected: list[Tensor] = []
    model.register_forward_hook(lambda _, args, output: expected.append(output[0]))
    with torch.no_grad():
        loss = plain_loss(_Cast(model), drawn._replace(**held))
    assert loss.isfinite() and torch.equal(engine.forward(batch), expected[0])


class _Cast:
    """Casts noised latents as a pipeline in bf16 has them."""

    def __init__(self, model: Any):
        self._model = model

    def __call__(self, hidden_states: Tensor, **inputs: Any) -> Any:
        return self._model(hidden_states=hidden_states.bfloat16(), **inputs)


def test_forward_and_evaluation(build: Build, case: EngineCase) -> None:
    engine, batches = build(case), flow_cut(case, 4, 0)
    stack = built(case.model, SEED)
    with torch.no_grad():
        assert torch.equal(engine.forward(batches[0]), output_of(stack, batches[0]))
    losses = engine.eval_steps(batches)
    mean = sum(loss.sum for loss in losses) / sum(loss.num_valid for loss in losses)
    assert engine.train_step(flow_cut(case, 2, 0), OPTIM.lr).loss.item() == pytest.approx(mean.item(), rel=1e-6)


def test_a_sample_that_stands_in_changes_nothing(build: Build, case: EngineCase) -> None:
    spare = flow_cut(case, 4, 9)[0]
    spare = replace(spare, weight=torch.zeros_like(spare.weight), num_valid=0)
    alone, beside = build(case), build(case)
    first = alone.train_step(flow_cut(case, 2, 0), OPTIM.lr)
    second = beside.train_step([*flow_cut(case, 2, 0), spare], OPTIM.lr)
    assert torch.equal(first.loss, second.loss)
    for name, weight in section(alone, "weights").items():
        assert torch.equal(weight, section(beside, "weights")[name])


@pytest.mark.parametrize(("kernel", "fused_qkv"), [("flash", True), ("math", False)])
def test_kernels_and_fused_projections_train_alike(build: Build, case: EngineCase, kernel: Kernel, fused_qkv: bool) -> None:
    other = replace(case, kernel=kernel, model=case.model.model_copy(update={"fused_qkv": fused_qkv}))
    expect_close(train_flow(build(other), case), plain_flow(case), loss=2e-6, gradient=2e-6)


@pytest.mark.parametrize("engine", ["resident", "stream"])
def test_compiled_blocks_train_alike(engine: str, case: EngineCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced and differentiated; no code is generated."""
    intact = torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(intact, backend="aot_eager", fullgraph=True))
    compiled = with_techniques(case, compile=True, activation_checkpoint="full")
    build = FlowEngines[engine]
    expect_close(train_flow(build(compiled), case), plain_flow(case), loss=2e-6, gradient=2e-6)


@pytest.mark.parametrize(
    ("master", "mode"), [*(("fp32", mode) for mode in CLIP_MODES), ("split24", "previous"), ("stochastic", "block")]
)
def test_streamed_equals_resident_bit_for_bit(case: EngineCase, master: Any, mode: ClipMode) -> None:
    optim = OPTIM if master == "fp32" else EIGHT_BIT.model_copy(update={"master": master})
    case = with_techniques(case, "fp32" if master == "fp32" else "mixed-bf16")
    case = replace(case, clip=mode, max_norm=CLIPPED, optim=optim)
    found = []
    for settings, kept in ((StreamSettings(), 0), (StreamSettings(resident_blocks=2), 1), (StreamSettings(1, 1, 9), 9)):
        engine = stream_flow(case, settings, kept)
        outputs = run_flow(engine, case)
        found.append((outputs, state_of(engine)))
    for outputs, state in found[1:]:
        assert outputs == found[0][0]
        expect_same(state, found[0][1])
    assert {name for section, name in found[0][1] if section == "exp_avg"} >= {"norm_out.linear.weight", "x_embedder.weight"}


class _MicroBatchMajor:
    """The whole model for one micro-batch after the other, block by block; gradients of weights and shared tensors in fp32."""

    def __init__(self, case: EngineCase):
        self.stack = built(case.model, SEED)
        weight = torch.bfloat16 if case.techniques.precision == "mixed-bf16" else torch.float32
        self.named = dict(self.stack.model.named_parameters())
        self.states: dict[str, FlatState] = {}
        for name, parameter in self.named.items():
            master, fmt = parameter.detach().clone().flatten(), state_format(parameter.shape, False, "fp32", weight)
            exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
            self.states[name] = FlatState(*split(master, fmt, None), exp_avg, exp_avg_sq, None, None)
            parameter.data = self.states[name].weight.view(parameter.shape)

    def step(self, batches: Sequence[FlowBatch], number: int) -> float:
        sums: dict[str, Tensor] = {}
        divisor, loss_sum = sum(batch.num_valid for batch in batches), torch.zeros(())
        for batch in batches:
            loss_sum += self._differentiate(batch, divisor)
            for name, parameter in self.named.items():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.float()
                parameter.grad = None
        for name, gradient in sums.items():
            decay = OPTIM.weight_decay if gradient.ndim > 1 else 0.0
            config = AdamConfig(OPTIM.beta1, OPTIM.beta2, OPTIM.eps, decay)
            control = torch.stack([torch.ones(()), torch.ones(()), *bias_corrections(torch.tensor(float(number)), config)])
            adam_step(self.states[name], gradient.flatten(), config, OPTIM.lr, control, 0)
        return (loss_sum / divisor).item()

    def _differentiate(self, batch: FlowBatch, divisor: int) -> Tensor:
        first = self.stack.prologue(batch)
        names = [name for name, tensor in first.shared.items() if tensor is not None and tensor.requires_grad]
        inputs = [with_leaves(first, names)]
        outputs = []
        for block in self.stack.blocks:
            outputs.append(block(inputs[-1]))
            inputs.append(with_leaves(outputs[-1]._replace(shared=first.shared), names))
        loss = self.stack.epilogue(inputs[-1], batch, weighted_square).sum
        (loss / divisor).backward()
        shared = {name: _gradient(inputs[-1].shared[name]) for name in names}
        for output, leaves, behind in zip(outputs[::-1], inputs[-2::-1], inputs[:0:-1], strict=True):
            torch.autograd.backward(output.carry, [_gradient(leaf, leaf.dtype) for leaf in behind.carry])
            for name in names:
                shared[name] = shared[name] + _gradient(leaves.shared[name])
        pairs = [(tensor, _gradient(leaf)) for tensor, leaf in zip(first.carry, inputs[0].carry, strict=True)]
        pairs += [(tensor, shared[name]) for name in names if (tensor := first.shared[name]) is not None]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient.to(tensor.dtype) for tensor, gradient in pairs])
        return loss.detach()


def _gradient(leaf: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    assert leaf is not None
    return torch.zeros_like(leaf, dtype=dtype) if leaf.grad is None else leaf.grad.to(dtype)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_layer_by_layer_equals_one_micro_batch_after_the_other_bit_for_bit(
    case: EngineCase, precision: Precision, num_micro_batches: int
) -> None:
    case = replace(with_techniques(case, precision), clip="block")
    engine, plain = stream_flow(case), _MicroBatchMajor(case)
    for step in range(2):
        batches = flow_cut(case, num_micro_batches, step)
        assert engine.train_step(batches, OPTIM.lr).loss.item() == plain.step(batches, step + 1)
    state = state_of(engine)
    for name, flat in plain.states.items():
        assert torch.equal(state["weights", name].flatten(), flat.weight), name
        assert torch.equal(state["exp_avg", name].flatten(), flat.exp_avg), name


@pytest.mark.parametrize("mode", CLIP_MODES)
def test_stream_equals_the_sharded_engine(case: EngineCase, mode: ClipMode) -> None:
    case = replace(case, clip=mode, max_norm=CLIPPED)
    streamed, sharded = stream_flow(case), sharded_flow(case)
    outputs, expected = run_flow(streamed, case), run_flow(sharded, case)
    for (loss, norm, *counts), (other_loss, other_norm, *others) in zip(outputs, expected, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6) and counts == others
        assert norm == pytest.approx(other_norm, rel=1e-5) and norm > CLIPPED
    actual, reference = state_of(streamed), state_of(sharded)
    masters, moments = masters_of(actual), moments_of(actual, "exp_avg")
    for name, weight in masters_of(reference).items():
        expect_close_values(masters[name], weight, 1e-4, name)
    others = moments_of(reference, "exp_avg")
    scale = max(value.abs().max() for value in others.values())
    assert all((moments[name] - value).abs().max() <= 1e-5 * scale for name, value in others.items())


@pytest.mark.parametrize(("writer", "reader", "fused_qkv"), [("resident", "stream", False), ("stream", "fsdp", True)])
def test_a_checkpoint_of_one_engine_is_read_by_the_other(
    case: EngineCase, writer: str, reader: str, fused_qkv: bool, tmp_path: Path
) -> None:
    """And with fused projections by a run without them."""
    first = FlowEngines[writer](replace(case, model=case.model.model_copy(update={"fused_qkv": fused_qkv})))
    train_flow(first, case)
    checkpoint.save(tmp_path, RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=2), first.state_items())
    second = FlowEngines[reader](case)
    assert not second.load_items(checkpoint.CheckpointReader(tmp_path / "step_00000002"))
    expect_same(state_of(second), state_of(first))
    assert {name for section, name in state_of(second) if section == "weights"} == set(
        dict(built(case.model).model.named_parameters())
    )
    actual, expected = (train_flow(engine, case, num_steps=2, start=2) for engine in (second, first))
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 2e-6, "losses")
    for name, weight in expected.weights.items():
        expect_close_values(actual.weights[name], weight, 1e-4, name)
