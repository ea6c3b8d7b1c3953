"""Adapted models on the engines: flux1, flux2 and llama, a plain loop over peft's model, and ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fluxray import checkpoint
from fluxray.config.adapter import LoraConfig
from fluxray.engine.clip import Clip
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.models import quantised
from fluxray.models.causal_lm import build_causal_lm
from fluxray.models.flux_stack import build_flux
from fluxray.optim.build import build_sharded
from fluxray.protocols import IGNORE_INDEX, BlockStack, RunState, Schedule
from fluxray.ranks import Ranks
from fluxray.tasks.lm import LmTask
from tests.engine.flux_cases import FLUX1, FLUX2, draw, flow_cut, plain_loss, weighted_square
from tests.engine.helpers import NUM_ROWS, OPTIM, SEED, EngineCase, cut, make_batch, model_config
from tests.engine.stream_helpers import expect_same, state_of, stream_of
from tests.models.flux_helpers import flux_config

LORA = LoraConfig(rank=4, alpha=8)
LLAMA = EngineCase(model_config("llama"))
CASES = {"flux1": FLUX1, "flux2": FLUX2, "llama": LLAMA}

NF4 = LoraConfig(rank=4, alpha=8, base="nf4")
WIDE_CASES = {
    "flux1 wide": EngineCase(flux_config("flux1 dev", attention_head_dim=32, axes_dims_rope=[8, 8, 16])),
    "flux2 wide": EngineCase(flux_config("flux2 klein", attention_head_dim=32, axes_dims_rope=[8] * 4)),
    "llama wide": EngineCase(model_config("llama", hidden_size=64)),
}
"""Families whose hidden size is a multiple of 64, as 4 bits want it."""


@dataclass(frozen=True)
class Adapted:
    """A family on an engine; `differing` lie over its case."""

    family: str
    adapter: LoraConfig | None = LORA
    seed: int = SEED

    @property
    def is_text(self) -> bool:
        return self.family.startswith("llama")

    @property
    def base(self) -> EngineCase:
        return {**CASES, **WIDE_CASES}[self.family]

    def case(self, **differing: Any) -> EngineCase:
        return replace(self.base, **differing)

    def stack(self, **differing: Any) -> BlockStack:
        case = self.case(**differing)
        if self.is_text:
            return build_causal_lm(case.model, self.seed, kernel=case.kernel, adapter=self.adapter)
        return build_flux(case.model, self.seed, case.kernel, adapter=self.adapter)

    def loss_fn(self) -> Any:
        return LmTask(0).loss_fn if self.is_text else weighted_square

    def batches(self, num_micro_batches: int, step: int, rank: int = 0, num_ranks: int = 1) -> Sequence[Any]:
        if self.is_text:
            return cut(num_micro_batches, step, rank, num_ranks)
        return flow_cut(self.base, num_micro_batches, step, rank, num_ranks)

    def sharded(self, mesh: DeviceMesh | None = None, **differing: Any) -> ShardedEngine:
        case, stack = self.case(**differing), self.stack(**differing)
        masters = parallelize(stack, case.techniques, case.device, mesh)
        runtime = Runtime(case.device, case.techniques.precision, mesh)
        clip = Clip(case.clip, case.max_norm, case.device)
        return ShardedEngine(stack, self.loss_fn(), masters, build_sharded(masters.named, case.optim), clip, runtime)

    def streamed(self, settings: StreamSettings | None = None, transfers: Any = None, **differing: Any) -> StreamEngine:
        return stream_of(self.stack(**differing), self.loss_fn(), self.case(**differing), settings, transfers)

    def train(self, engine: Any, num_steps: int = 3, start: int = 0, num_micro_batches: int = 2) -> list[tuple[float, float]]:
        """Return losses and norms."""
        steps = range(start, start + num_steps)
        outputs = [engine.train_step(self.batches(num_micro_batches, step), OPTIM.lr) for step in steps]
        return [(output.loss.item(), output.grad_norm.item()) for output in outputs]

    def plain(self, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
        """Train the library's model with peft's layers on whole steps by a plain loop; return losses and adapters.

        A base of 4 bits is whole weights that have been rounded.
        """
        model = self.reference().model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        settings = {"lr": OPTIM.lr, "betas": (OPTIM.beta1, OPTIM.beta2), "eps": OPTIM.eps}
        optimizer = torch.optim.AdamW(trained.values(), weight_decay=OPTIM.weight_decay, foreach=False, **settings)
        losses = []
        for step in range(num_steps):
            loss = self._text_loss(model, step) if self.is_text else plain_loss(model, draw(self.base, step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: p.detach() for name, p in trained.items()}

    def reference(self) -> BlockStack:
        """Return the stack with whole weights in its base, those that 4 bits stand for where it has such."""
        assert self.adapter is not None
        stack = materialised(replace(self, adapter=self.adapter.model_copy(update={"base": "full"})).stack())
        for path, module in self.stack().model.named_modules() if self.adapter.base == "nf4" else ():
            if isinstance(module, quantised.Nf4Linear):
                layer = stack.model.get_submodule(path)
                layer.weight.data = quantised.rounded(layer.weight.detach())
        return stack

    @staticmethod
    def _text_loss(model: Any, step: int) -> Tensor:
        batch = make_batch(range(NUM_ROWS), step)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX)


def materialised(stack: BlockStack) -> BlockStack:
    """Give every tensor of a stack memory and values, and return it."""
    for block in (*stack.blocks, None):
        stack.materialise(torch.device("cpu"), block)
    return stack


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the frozen parameters of a model that has memory, by the library's names."""
    return {n.replace(".base_layer.", "."): p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def saved(engine: Any, folder: Path, step: int = 2) -> checkpoint.CheckpointReader:
    """Save an engine, and return the reader."""
    engine.flush()
    state = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=step)
    return checkpoint.CheckpointReader(checkpoint.save(folder, state, engine.state_items()))


RANK_CASES = {
    "flux2": (Adapted("flux2"), {}),
    "llama": (Adapted("llama"), {}),
    "flux2 in 4 bits": (Adapted("flux2 wide", NF4), {}),
    "llama in 4 bits, bf16": (Adapted("llama wide", NF4), {"techniques": Techniques("mixed-bf16")}),
}
RANK_STEPS = 2


def expect_resumed(adapted: Adapted, streamed: bool, folder: Path) -> checkpoint.CheckpointReader:
    """Check that a checkpoint holds adapters alone and that from it training goes on bit for bit; return it."""
    build = adapted.streamed if streamed else adapted.sharded
    engine = build()
    adapted.train(engine, 2)
    reader = saved(engine, folder)
    assert reader.names() and all(".lora_" in name for name in reader.names())
    expected = adapted.train(engine, 2, 2)
    resumed = build()
    adapted.train(resumed, 1, 9)
    assert list(resumed.load_items(reader)) == []
    assert adapted.train(resumed, 2, 2) == expected
    expect_same(state_of(resumed), state_of(engine))
    return reader


def run_on_ranks(folder: Path, name: str, mesh: DeviceMesh, rank: int) -> None:
    """Train a case on a mesh, and save."""
    (adapted, differing), num_ranks = RANK_CASES[name], mesh.size()
    engine = adapted.sharded(mesh, **differing)
    outputs = [engine.train_step(adapted.batches(2, step, rank, num_ranks), OPTIM.lr) for step in range(RANK_STEPS)]
    state = RunState(0, Schedule("constant", OPTIM.lr, 0, RANK_STEPS, 0.0), step=RANK_STEPS)
    checkpoint.save(folder, state, engine.state_items(), Ranks.of_group(mesh.get_group()))
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps([output.loss.item() for output in outputs]))
