"""Tiny FLUX transformers on the engines: latents and texts, batches, and a plain loop over diffusers' models and pipelines."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from diffusers import Flux2Pipeline, FluxPipeline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fluxray import checkpoint
from fluxray.engine.clip import Clip
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.models.flux_facts import flux_facts
from fluxray.models.flux_stack import build_flux
from fluxray.optim.build import build_sharded
from fluxray.protocols import BatchKey, Engine, FlowBatch, LossOutput, RunState, SampleId, Schedule
from fluxray.ranks import Ranks
from tests.engine.helpers import OPTIM, SEED, EngineCase, Trace, section
from tests.engine.stream_helpers import CPU, stream_of
from tests.models.flux_helpers import built, flux_config

NUM_SAMPLES, CHANNELS, HEIGHT, WIDTH, NUM_TEXT = 8, 2, 4, 6, 4
"""Of a step: samples; channels, rows and columns of unpacked latents, 2 x 2 of whose positions make a token; text tokens."""

FLUX1, FLUX2 = EngineCase(flux_config("flux1 dev")), EngineCase(flux_config("flux2 klein"))
CASES = {"flux1": FLUX1, "flux2": FLUX2}


class Drawn(NamedTuple):
    """The samples of one step. `latents` and `noise` are [B, CHANNELS, HEIGHT, WIDTH]."""

    latents: Tensor
    noise: Tensor
    sigma: Tensor
    weight: Tensor
    text: Tensor
    pooled: Tensor | None
    guidance: Tensor | None


def draw(case: EngineCase, step: int) -> Drawn:
    """Return the samples of a step."""
    facts = flux_facts(case.model)
    generator = torch.Generator().manual_seed(step)

    def normal(*shape: int) -> Tensor:
        return torch.randn(NUM_SAMPLES, *shape, generator=generator)

    def uniform() -> Tensor:
        return torch.rand(NUM_SAMPLES, generator=generator)

    latents, noise = normal(CHANNELS, HEIGHT, WIDTH), normal(CHANNELS, HEIGHT, WIDTH)
    text, pooled = normal(NUM_TEXT, facts.text_width), None if facts.pooled_width is None else normal(facts.pooled_width)
    return Drawn(latents, noise, uniform(), 0.5 + uniform(), text, pooled, 1 + uniform() if facts.embeds_guidance else None)


def flow_cut(case: EngineCase, num_micro_batches: int, step: int, rank: int = 0, num_ranks: int = 1) -> list[FlowBatch]:
    """Return this rank's micro-batches of a step."""
    drawn = draw(case, step)
    size = NUM_SAMPLES // (num_micro_batches * num_ranks)
    starts = [(k * num_ranks + rank) * size for k in range(num_micro_batches)]
    return [flow_batch(drawn, range(start, start + size), step) for start in starts]


def flow_batch(drawn: Drawn, rows: Sequence[int], step: int = 0) -> FlowBatch:
    """Return the given samples as one micro-batch."""
    latents, noise, sigma, weight, text, pooled, guidance = (None if t is None else t[list(rows)] for t in drawn)
    assert latents is not None and noise is not None and sigma is not None and weight is not None and text is not None
    mixed = sigma.view(-1, 1, 1, 1)
    height, width = (size // 2 for size in latents.shape[2:])
    key = BatchKey(SEED, step, tuple(SampleId(0, row) for row in rows))
    noised, target = pack((1 - mixed) * latents + mixed * noise), pack(noise - latents)
    return FlowBatch(noised, target, sigma, weight, text, pooled, guidance, height, width, len(rows), key)


def pack(latents: Tensor) -> Tensor:
    """Return latents [B, c, 2 h, 2 w] as tokens [B, h w, 4 c]: of each channel, 2 x 2 positions."""
    return torch.nn.functional.unfold(latents, 2, stride=2).transpose(1, 2).contiguous()


def weighted_square(output: Tensor, batch: FlowBatch) -> LossOutput:
    """Return the sum over samples of weight times own mean square error."""
    own = (output.float() - batch.target).square().mean(dim=(1, 2))
    return LossOutput((own * batch.weight).sum(), batch.num_valid)


def plain_loss(model: Any, drawn: Drawn, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the loss of a step by diffusers' own forward, latents packed and ids made by its pipelines."""
    mixed = drawn.sigma.view(-1, 1, 1, 1)
    noised, target = (1 - mixed) * drawn.latents + mixed * drawn.noise, drawn.noise - drawn.latents
    count = len(drawn.sigma)
    inputs: dict[str, Any] = {"guidance": drawn.guidance}
    if drawn.pooled is None:
        noised, target = (Flux2Pipeline._patchify_latents(tensor) for tensor in (noised, target))
        ids = Flux2Pipeline._prepare_latent_ids(noised), Flux2Pipeline._prepare_text_ids(drawn.text)
        noised, target = (Flux2Pipeline._pack_latents(tensor) for tensor in (noised, target))
    else:
        height, width = drawn.latents.shape[2:]
        image_ids = FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, CPU, dtype)
        ids = image_ids, torch.zeros(drawn.text.shape[1], 3)
        noised, target = (FluxPipeline._pack_latents(tensor, count, CHANNELS, height, width) for tensor in (noised, target))
        inputs["pooled_projections"] = drawn.pooled
    inputs |= {"img_ids": ids[0], "txt_ids": ids[1], "encoder_hidden_states": drawn.text, "timestep": drawn.sigma}
    output = model(hidden_states=noised, return_dict=False, **inputs)[0]
    return (drawn.weight * (output - target).square().mean(dim=(1, 2))).mean()


def plain_flow(case: EngineCase, num_steps: int = 2) -> Trace:
    """Train diffusers' own model on whole steps by a plain loop: the reference of every engine."""
    model = built(case.model.model_copy(update={"fused_qkv": False}), SEED).model
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, OPTIM.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, foreach=False)
    trace = Trace([], [], {}, {})
    for step in range(num_steps):
        loss = plain_loss(model, draw(case, step))
        loss.backward()
        if step == 0:
            trace.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        trace.losses.append(loss.item())
        trace.norms.append(torch.nn.utils.clip_grad_norm_(parameters, case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def sharded_flow(case: EngineCase, mesh: DeviceMesh | None = None) -> ShardedEngine:
    """Return the sharded engine over `mesh`, or resident for None."""
    stack = build_flux(case.model, SEED, case.kernel)
    masters = parallelize(stack, case.techniques, case.device, mesh)
    runtime = Runtime(case.device, case.techniques.precision, mesh)
    clip = Clip(case.clip, case.max_norm, case.device)
    return ShardedEngine(stack, weighted_square, masters, build_sharded(masters.named, case.optim), clip, runtime)


def stream_flow(case: EngineCase, settings: StreamSettings | None = None, kept_blocks: int = 0) -> StreamEngine:
    """Return the stream engine of a case."""
    return stream_of(build_flux(case.model, SEED, case.kernel), weighted_square, case, settings, kept_blocks=kept_blocks)


FlowEngines: dict[str, Callable[[EngineCase], Engine]] = {
    "resident": sharded_flow,
    "fsdp": lambda case: sharded_flow(case, DeviceMesh("cpu", torch.arange(1))),
    "stream": stream_flow,
}


def train_flow(engine: Engine, case: EngineCase, num_micro_batches: int = 2, num_steps: int = 2, start: int = 0) -> Trace:
    """Train a one-rank engine and return its trace. Gradients come from the first moments: exp_avg = (1 - beta1) g."""
    trace = Trace([], [], {}, {})
    for step in range(start, start + num_steps):
        output = engine.train_step(flow_cut(case, num_micro_batches, step), OPTIM.lr)
        trace.losses.append(output.loss.item())
        trace.norms.append(output.grad_norm.item())
        if step == 0:
            trace.gradients = {name: moment / (1 - OPTIM.beta1) for name, moment in section(engine, "exp_avg").items()}
    trace.weights = section(engine, "weights")
    return trace


RANK_CASES: dict[str, tuple[int, int, EngineCase]] = {
    "flux1, 1 rank": (1, 4, FLUX1),
    "flux1, 2 ranks": (2, 2, replace(FLUX1, techniques=Techniques("fp32", activation_checkpoint="full"))),
    "flux1, 4 ranks": (4, 1, FLUX1),
    "flux2, 1 rank": (1, 4, FLUX2),
    "flux2, 2 ranks": (2, 2, FLUX2),
    "flux2, 4 ranks": (4, 2, replace(FLUX2, techniques=Techniques("fp32", activation_checkpoint="full"))),
    "flux2, 4 ranks, fused, clipped": (4, 1, replace(FLUX2, model=flux_config("flux2 klein", True), max_norm=0.1)),
}
"""Ranks, micro-batches per rank, and the case."""
RANK_STEPS = 2


def run_on_ranks(folder: Path, name: str, mesh: DeviceMesh, rank: int) -> None:
    """Train a case on a mesh and save after the first step and the last."""
    num_ranks, num_micro_batches, case = RANK_CASES[name]
    engine = sharded_flow(case, mesh)
    losses, norms = [], []
    for step in range(RANK_STEPS):
        output = engine.train_step(flow_cut(case, num_micro_batches, step, rank, num_ranks), OPTIM.lr)
        losses.append(output.loss.item())
        norms.append(output.grad_norm.item())
        if step in (0, RANK_STEPS - 1):
            state = RunState(0, Schedule("constant", OPTIM.lr, 0, RANK_STEPS, 0.0), step=step + 1)
            checkpoint.save(folder, state, engine.state_items(), Ranks.of_group(mesh.get_group()))
    dist.barrier(mesh.get_group())
    if rank == 0:
        (folder / "trace.json").write_text(json.dumps({"losses": losses, "norms": norms}))
