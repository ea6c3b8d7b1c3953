"""What `engine.cpu_offload` goes with: one line for what it does not."""

import pytest

from fluxray.config.load import resolve
from fluxray.config.schema import ShardedEngineConfig
from fluxray.errors import ConfigError

OFFLOADED = "engine.cpu_offload=true"
REFUSED = {
    ("cpu", OFFLOADED): (
        "engine.cpu_offload: true copies between a GPU and its host, and resources.gpu is 0; set engine.cpu_offload=false, or "
        "resources.gpu=1"
    ),
    ("a6000", OFFLOADED): "engine.cpu_offload: has no effect with engine.kind stream; drop it or set engine.kind=sharded",
    ("fsdp8", OFFLOADED, "optim.kind=adam8bit"): (
        "optim.kind: 'adam8bit' has a kernel for GPUs alone, and engine.cpu_offload steps on the host, where it would take "
        "hundreds of times as long as AdamW; set optim.kind=adamw, or engine.cpu_offload=false"
    ),
    ("fsdp8", OFFLOADED, "optim.in_backward=true", "clip.mode=block", "batch.accumulation_steps=1"): (
        "optim.in_backward: true would make backward wait for a step on the host in each block, where engine.cpu_offload has the "
        "gradients anyway; set optim.in_backward=false"
    ),
    ("fsdp8", OFFLOADED, "cuda_graph=true", "resources.num_workers=1"): (
        "cuda_graph: true cannot hold what engine.cpu_offload does on the host; set cuda_graph=false, or engine.cpu_offload=false"
    ),
    ("fsdp8", OFFLOADED, "ema.decay=0.99", "ema.dtype=bf16"): (
        "ema.dtype: 'bf16' is rounded by a hash of each element, for which engine.cpu_offload leaves only the host's cores; set "
        "ema.dtype=fp32, or engine.cpu_offload=false"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_offloading_does_not_go_with_is_one_line(words: tuple[str, ...]) -> None:
    profile, *overrides = words
    with pytest.raises(ConfigError) as raised:
        resolve(profile, None, overrides)
    assert str(raised.value) == REFUSED[words]


@pytest.mark.parametrize("words", [(), ("resources.num_workers=1",), ("precision=amp-fp16",), ("ema.decay=0.99",)])
def test_it_goes_with_the_rest(words: tuple[str, ...]) -> None:
    engine = resolve("fsdp8", None, [OFFLOADED, *words]).engine
    assert isinstance(engine, ShardedEngineConfig) and engine.cpu_offload
