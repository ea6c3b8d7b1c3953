"""Tiny models, fixed batches and the engines that the conformance suite runs on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fluxray.config.sampling import EmaConfig
from fluxray.config.schema import Kernel, ModelConfig, OptimConfig
from fluxray.engine.average import Averages
from fluxray.engine.clip import Clip, ClipMode, clip_units
from fluxray.engine.masters import Masters
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.models.causal_lm import CausalLMStack, build_causal_lm
from fluxray.optim.build import build_by_unit, build_sharded
from fluxray.protocols import IGNORE_INDEX, BatchKey, Engine, LossOutput, SampleId, TextBatch
from fluxray.tasks.lm import LmTask

VOCABULARY, LENGTH, NUM_ROWS, SEED = 128, 16, 8, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"model_type": "gpt_neox"},
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
    "qwen3 tied": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
}
FAMILIES["gemma3"] = {
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
OPTIM = OptimConfig(lr=1e-3, eps=1e-6)
EIGHT_BIT = OPTIM.model_copy(update={"kind": "adam8bit"})
NO_CLIP = 1e9


def model_config(family: str, **keys: Any) -> ModelConfig:
    """Return the configuration of a tiny model of the family."""
    return ModelConfig(config={**SIZES, **FAMILIES[family], **keys})


def fused(model: ModelConfig) -> ModelConfig:
    """Return the same model with fused projections."""
    return model.model_copy(update={"fused_qkv": True})


@dataclass(frozen=True)
class EngineCase:
    """What an engine is built from; `max_norm` far above any norm means that nothing is clipped.

    `kernel` computes attention; None is the library's own function, which the plain loop always uses.
    """

    model: ModelConfig
    techniques: Techniques = field(default_factory=lambda: Techniques("fp32"))
    max_norm: float = NO_CLIP
    clip: ClipMode = "exact"
    optim: OptimConfig = OPTIM
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernel: Kernel | None = None
    ema: EmaConfig = EmaConfig()


def averages_of(masters: Masters, case: EngineCase) -> Averages | None:
    """Return the moving averages that the case keeps."""
    return Averages(masters, case.ema) if case.ema.decay else None


def build_stack(case: EngineCase) -> CausalLMStack:
    """Return the stack that every engine of the case starts from, on the meta device."""
    return build_causal_lm(case.model, SEED, kernel=case.kernel)


def sharded_engine(
    case: EngineCase, mesh: DeviceMesh | None = None, chunk_tokens: int | None = None, graphs: bool = False
) -> ShardedEngine:
    """Return the sharded engine over `mesh`, or resident for None; with `graphs` micro-batches run as CUDA graphs."""
    stack = build_stack(case)
    masters = parallelize(stack, case.techniques, case.device, mesh)
    loss_fn = LmTask(0, case.techniques.compile).loss_fn
    runtime = Runtime(case.device, case.techniques.precision, mesh, print if graphs else None, case.techniques.cpu_offload)
    clip = Clip(case.clip, case.max_norm, runtime.step_device)
    if case.optim.in_backward:
        optimizer = build_by_unit(masters.named, case.optim, clip_units(stack))
    else:
        optimizer = build_sharded(masters.named, case.optim)
    return ShardedEngine(stack, loss_fn, masters, optimizer, clip, runtime, chunk_tokens, averages_of(masters, case))


EngineFactory = Callable[[EngineCase], Engine]


def make_rows() -> list[tuple[torch.Tensor, ...]]:
    """Return NUM_ROWS rows (ids, positions, documents, targets), packed with documents of uneven length."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in range(NUM_ROWS):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        cut = 3 + row
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
        documents = (torch.arange(LENGTH) >= cut).long()
        targets = torch.roll(ids, -1)
        targets[[cut - 1, LENGTH - 1]] = IGNORE_INDEX
        targets[LENGTH - 1 - row // 2 :] = IGNORE_INDEX
        rows.append((ids, positions, documents, targets))
    return rows


def make_batch(indices: Sequence[int], step: int = 0) -> TextBatch:
    """Return the micro-batch of the given rows."""
    rows = make_rows()
    ids, positions, documents, targets = (torch.stack([rows[i][field] for i in indices]) for field in range(4))
    key = BatchKey(SEED, step, tuple(SampleId(0, i) for i in indices))
    return TextBatch(ids, positions, documents, targets, False, int((targets != IGNORE_INDEX).sum()), key)


def cut(num_micro_batches: int, step: int, rank: int = 0, num_ranks: int = 1) -> list[TextBatch]:
    """Return this rank's micro-batches of the global batch of all rows."""
    size = NUM_ROWS // (num_micro_batches * num_ranks)
    starts = [(k * num_ranks + rank) * size for k in range(num_micro_batches)]
    return [make_batch(range(start, start + size), step) for start in starts]


@dataclass
class Trace:
    """What a few steps left behind: per-step losses and norms, first-step gradients, last weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train(engine: Engine, num_micro_batches: int = 2, num_steps: int = 5, start: int = 0) -> Trace:
    """Train a one-rank engine and return its trace. Gradients come from the first moments: exp_avg = (1 - beta1) g."""
    trace = Trace([], [], {}, {})
    for step in range(start, start + num_steps):
        output = engine.train_step(cut(num_micro_batches, step), OPTIM.lr)
        trace.losses.append(output.loss.item())
        trace.norms.append(output.grad_norm.item())
        if step == 0:
            trace.gradients = {name: moment / (1 - OPTIM.beta1) for name, moment in section(engine, "exp_avg").items()}
    trace.weights = section(engine, "weights")
    return trace


def section(engine: Engine, name: str) -> dict[str, torch.Tensor]:
    """Return copies of one section of a one-rank engine's state, nothing pending."""
    engine.flush()
    return {item.name: item.tensor.detach().clone().float().cpu() for item in engine.state_items() if item.section == name}


def plain_trace(case: EngineCase, num_steps: int = 5) -> Trace:
    """Train the library's own model on the whole batch by a plain loop: the reference of every engine."""
    stack = build_causal_lm(case.model.model_copy(update={"fused_qkv": False}), SEED)
    for block in (*stack.blocks, None):
        stack.materialise(torch.device("cpu"), block)
    model = stack.model
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, foreach=False)
    trace = Trace([], [], {}, {})
    for step in range(num_steps):
        batch = make_batch(range(NUM_ROWS), step)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        if step == 0:
            trace.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        trace.losses.append(loss.item())
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def expect_close(actual: Trace, expected: Trace, loss: float = 1e-6, gradient: float = 1e-6, weight: float = 1e-4) -> None:
    """Compare two traces; tolerances are relative to the largest value of each tensor."""
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), loss, "losses")
    expect_close_values(torch.tensor(actual.norms), torch.tensor(expected.norms), max(gradient, 1e-5), "norms")
    scale = max(g.abs().max() for g in expected.gradients.values())
    for name, reference in expected.gradients.items():
        error = (actual.gradients[name] - reference).abs().max() / scale
        assert error <= gradient, f"gradient of {name}: off by {error:.2e}"
    assert actual.weights.keys() == expected.weights.keys()
    for name, reference in expected.weights.items():
        expect_close_values(actual.weights[name], reference, weight, name)


def expect_close_values(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    """Assert that the largest difference is at most `tolerance` times the largest expected value."""
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"{name}: off by {error:.2e}"


def expect_equal(actual: Trace, expected: Trace) -> None:
    """Assert that two traces are equal bit for bit."""
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert actual.weights.keys() == expected.weights.keys()
    assert all(torch.equal(actual.weights[name], expected.weights[name]) for name in expected.weights)


@contextmanager
def broken(engine: Engine, what: str) -> Iterator[None]:
    """Make the engine's loss, or the gradient of a finite loss, no number meanwhile."""

    class Overflowing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss: torch.Tensor) -> torch.Tensor:
            return loss * torch.nan if what == "loss" else loss.clone()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * torch.inf

    stack = engine._stack
    intact = stack.epilogue

    def epilogue(*args) -> LossOutput:
        result = intact(*args)
        return result._replace(sum=Overflowing.apply(result.sum))

    stack.epilogue = epilogue
    yield
    del stack.epilogue
