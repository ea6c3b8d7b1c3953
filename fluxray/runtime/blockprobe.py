"""How fast a device computes the blocks of a model, and what they hold meanwhile: measured as the stream engine runs them."""

import gc
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from fluxray.config.schema import TrainConfig
from fluxray.engine.parallelize import prepare_stream
from fluxray.engine.stream_compute import Computation
from fluxray.memory.live import BlockMemory
from fluxray.memory.spec import ModelSpec
from fluxray.protocols import Batch, BlockStack, State
from fluxray.runtime.stacks import Known, example, model_of

WARM_UP, REPEATS = 2, 3


def probe_blocks(config: TrainConfig, spec: ModelSpec, device: torch.device, known: Known = None) -> tuple[float, ModelSpec]:
    """Run a block of each kind on `device`, one micro-batch forward and backward.

    Returns the FLOP/s of forward, recomputation and backward, as `spec` counts FLOPs, and on a GPU the spec with the bytes that a
    block really holds, which are fewer than counted where a compiler has fused it. Takes the memory of one block and its
    activations; raises torch.OutOfMemoryError where that is not there.
    """
    flops = seconds = 0.0
    kinds = dict(spec.kinds)
    for name, kind in spec.kinds.items():
        of_kind = [index for index, block in enumerate(spec.blocks) if block.kind == name]
        index = of_kind[(len(of_kind) - 1) // 2]  # the first may join what the others get joined
        part = kind.again_flops if computes_partly_again(config, spec) else kind.forward_flops
        again = 0 if index == len(spec.blocks) - 1 else part
        with _Bench(config, known, index, 0, device) as bench:
            each, peak, _ = bench.measure()
        flops += len(of_kind) * bench.rows * (kind.forward_flops + kind.backward_flops + again)
        seconds += len(of_kind) * each
        if device.type == "cuda":
            kept = kind.kept(bench.rows)
            if name == spec.blocks[-1].kind:  # these blocks keep everything; others do where memory abounds, and a count will do
                with _Bench(config, known, index, len(spec.blocks) - 1, device) as bench:
                    _, peak_of_kept, kept = bench.measure()
                peak = max(peak, peak_of_kept)
            kinds[name] = replace(kind, memory={0: BlockMemory(0, 0), bench.rows: BlockMemory(kept, peak)})
    return flops / seconds, replace(spec, kinds=kinds)


def computes_partly_again(config: TrainConfig, spec: ModelSpec) -> bool:
    """Return whether backward computes again only what it needs of a block (see `BlockStack.is_whole_again`)."""
    return config.compile and not hides_operations(config, spec.has_dropout)


def hides_operations(config: TrainConfig, has_dropout: bool) -> bool:
    """Return whether compiled blocks are computed again as a whole, so that no operation of theirs can be spared."""
    return config.compile and (has_dropout or config.attention == "flex")


class _Bench:
    """One block on the device with one micro-batch of inputs; `num_kept` blocks before the last keep their activations."""

    def __init__(self, config: TrainConfig, known: Known, index: int, num_kept: int, device: torch.device):
        self.rows = config.batch.micro_size
        self._config, self._index, self._device = config, index, device
        self._modelled = model_of(config, known, device)
        self._stack = self._modelled.stack
        with torch.no_grad():
            self._shapes = _carry_at(self._stack, index, example(config, self._modelled, self.rows, torch.device("meta")))
        prepare_stream(self._stack, config.compile, num_kept)

    def __enter__(self) -> "_Bench":
        config, device, stack = self._config, self._device, self._stack
        dtype = torch.bfloat16 if config.precision == "mixed-bf16" else torch.float32
        block = stack.blocks[self._index]
        for part, module in ((block, block.module), (None, stack.model)):
            stack.materialise(device, part)
            nn.Module.to(module, dtype)
        for parameter in (p for p in block.module.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(_free_gradient)
        self._model = Computation(stack, lambda *_: None, device, config.precision, 1)  # type: ignore[arg-type]
        with torch.enable_grad():
            state = self._model.prologue(example(config, self._modelled, self.rows, device, keyed=True))
        shared = {name: tensor for name, tensor in state.shared.items() if tensor is not None}
        self._trained = [name for name, tensor in shared.items() if tensor.requires_grad]
        state = state._replace(shared={**state.shared, **{name: tensor.detach() for name, tensor in shared.items()}})
        dtype, (into, behind) = state.carry[0].dtype, self._shapes
        self._state = state._replace(carry=tuple(torch.randn(shape, device=device).to(dtype) for shape in into))
        self._above = [torch.full(shape, 1e-3, dtype=dtype, device=device) for shape in behind]
        return self

    def __exit__(self, *_: object) -> None:
        del self._model, self._state, self._above, self._stack, self._modelled
        gc.collect()  # wrapped forwards are cycles, and what they hold would stay on the device for the whole run
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self) -> tuple[float, int, int]:
        """Return seconds of forward and backward, and bytes: the most during both, and what forward leaves. 0 on a CPU."""
        found = [self._once() for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        return statistics.median(seconds for seconds, _, _ in found), found[-1][1], found[-1][2]

    def _once(self) -> tuple[float, int, int]:
        before = self._allocated()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        start = time.perf_counter()
        graph = self._model.differentiable_block(self._index, self._state, self._trained)
        kept = self._allocated() - before
        torch.autograd.backward(graph.carry, self._above)
        if self._device.type != "cuda":
            return time.perf_counter() - start, 0, 0
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start, torch.cuda.max_memory_allocated(self._device) - before, kept

    def _allocated(self) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)


def _carry_at(stack: BlockStack, index: int, batch: Batch) -> tuple[list[torch.Size], list[torch.Size]]:
    """Return the shapes of what goes into a block of a stack on the meta device, and of what comes out."""
    state: State = stack.prologue(batch)
    for block in stack.blocks[:index]:
        state = block(state)
    behind = stack.blocks[index](state)
    return [tensor.shape for tensor in state.carry], [tensor.shape for tensor in behind.carry]


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None
