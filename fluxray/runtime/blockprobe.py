"""How fast a device computes the model's own blocks, as the stream engine will run them: measured in some seconds."""

import statistics
import time

import torch

from fluxray.config.schema import TrainConfig
from fluxray.engine.parallelize import prepare_stream
from fluxray.engine.stream_compute import Computation
from fluxray.memory.spec import ModelSpec
from fluxray.models.causal_lm import build_causal_lm
from fluxray.protocols import BatchKey, SampleId, TextBatch

WARM_UP, REPEATS = 2, 3
SMALLEST_VOCABULARY = 512


def probe_block(config: TrainConfig, spec: ModelSpec, device: torch.device) -> float:
    """Return the FLOP/s of forward, recomputation and backward of one block with one micro-batch, as `spec` counts FLOPs.

    A model with several kinds of block is measured by its first. Takes the memory of one block and its activations; raises
    torch.OutOfMemoryError where that is not there.
    """
    stack = build_causal_lm(config.model, config.seed, config.data.vocab_size or SMALLEST_VOCABULARY)
    prepare_stream(stack, config.compile)
    dtype = torch.bfloat16 if config.precision == "mixed-bf16" else torch.float32
    for block in (stack.blocks[0], None):
        stack.materialise(device, block)
        (stack.model if block is None else stack.blocks[0].module).to(dtype)
    rows, length = config.batch.micro_size, spec.row_tokens
    tokens = torch.randint(0, SMALLEST_VOCABULARY // 2, (rows, length), device=device)
    places = torch.arange(length, device=device).expand(rows, -1).contiguous()
    key = BatchKey(config.seed, 0, tuple(SampleId(0, row) for row in range(rows)))
    batch = TextBatch(tokens, places, torch.zeros_like(tokens), tokens, not config.data.packing, rows * length, key)
    model = Computation(stack, lambda *_: None, device, config.precision == "amp-bf16", 1)  # type: ignore[arg-type]
    with torch.no_grad():
        state = model.prologue(batch)
    parameters = list(stack.blocks[0].module.parameters())

    def once() -> float:
        _synchronize(device)
        start = time.perf_counter()
        graph = model.differentiable_block(0, state, ())
        torch.autograd.backward(graph.carry, [torch.full_like(tensor, 1e-3) for tensor in graph.carry])
        _synchronize(device)
        seconds = time.perf_counter() - start
        for parameter in parameters:
            parameter.grad = None
        return seconds

    seconds = statistics.median([once() for _ in range(WARM_UP + REPEATS)][WARM_UP:])
    kind = spec.kinds[spec.blocks[0].kind]
    again = 0.0
    if len(stack.blocks) > 1:
        again = kind.again_flops if config.compile and not stack.has_dropout else kind.forward_flops
    return rows * (3 * kind.forward_flops + again) / seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
