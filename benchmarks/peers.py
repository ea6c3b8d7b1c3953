"""What a user would train a model with on one GPU instead of the stream engine: blocks of neox-20b's shape, bf16, AdamW.

    python benchmarks/peers.py PEER [--blocks 8] [--micro-batches 2] [--steps 3] [--cap-gb 45]

A peer is not a dependency of fluxray: install deepspeed or torchao for its rows. `stream.py` runs each as a row of its table.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SEQUENCE, MICRO_ROWS, VOCABULARY = 2048, 4, 50432
ADAMW = {"lr": 1e-5, "weight_decay": 0.01, "eps": 1e-6}

Batches = list[torch.Tensor]
Peer = Callable[[int, Batches], tuple[nn.Module, Callable[[], Any]]]


def build(num_blocks: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Return transformers' model with its own activation checkpointing."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        hidden_size=6144, num_attention_heads=64, num_hidden_layers=num_blocks, intermediate_size=24576, vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = GPTNeoXForCausalLM._from_config(config, dtype=dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = model.train().to(device)
    torch.cuda.empty_cache()
    return model


def torchao(num_blocks: int, batches: Batches) -> tuple[nn.Module, Callable[[], Any]]:
    """Weights and gradients on the GPU, AdamW and its states on the host."""
    from torchao.optim import CPUOffloadOptimizer

    model = build(num_blocks, torch.bfloat16, "cuda")
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=len(batches) == 1, fused=True, **ADAMW
    )
    return model, lambda: _step(model, batches, optimizer)


def fsdp2(num_blocks: int, batches: Batches) -> tuple[nn.Module, Callable[[], Any]]:
    """FSDP2 of one rank: fp32 weights, gradients and fused AdamW on the host."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl")
    model: Any = build(num_blocks, torch.float32, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.gpt_neox.layers, model):
        fully_shard(module, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step() -> None:
        for k, ids in enumerate(batches):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(k == len(batches) - 1)
            (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def deepspeed(num_blocks: int, batches: Batches, zero: dict[str, Any]) -> tuple[nn.Module, Callable[[], Any]]:
    """DeepSpeed with the given part of its ZeRO configuration."""
    import deepspeed as library

    model = build(num_blocks, torch.bfloat16, "cpu" if "offload_param" in zero else "cuda")
    engine, *_ = library.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": MICRO_ROWS,
            "gradient_accumulation_steps": len(batches),
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "zero_optimization": {"overlap_comm": True, "contiguous_gradients": True, **zero},
        },
    )

    def step() -> None:
        for ids in batches:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    return model, step


CPU = {"device": "cpu", "pin_memory": True}
STAGE_3 = {"stage": 3, "sub_group_size": int(1e9), "offload_optimizer": CPU}

PEERS: dict[str, Peer] = {
    "torchao CPUOffloadOptimizer": torchao,
    "FSDP2 CPUOffloadPolicy": fsdp2,
    "DeepSpeed ZeRO-3, all offloaded": lambda blocks, batches: deepspeed(blocks, batches, {**STAGE_3, "offload_param": CPU}),
    "DeepSpeed ZeRO-3, optimizer offloaded": lambda blocks, batches: deepspeed(blocks, batches, STAGE_3),
    "DeepSpeed SuperOffload": lambda blocks, batches: deepspeed(
        blocks, batches, {**STAGE_3, "offload_optimizer": {**CPU, "ratio": 0.9, "super_offload": True}}
    ),
}


def _step(model: nn.Module, batches: Batches, optimizer: Any) -> None:
    for ids in batches:
        (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(peer: str, num_blocks: int, num_micro_batches: int, num_steps: int, cap_gb: float) -> dict[str, Any]:
    """Return the peer's row: the median step after the first, memory of device and host."""
    import common

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((cap_gb * 1e9 - (total - free)) / total)
    torch.manual_seed(0)
    batches = [torch.randint(0, VOCABULARY, (MICRO_ROWS, SEQUENCE), device="cuda") for _ in range(num_micro_batches)]
    model, step = PEERS[peer](num_blocks, batches)
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(1 + num_steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens, step_s = MICRO_ROWS * SEQUENCE * num_micro_batches, statistics.median(seconds[1:])
    with open("/proc/self/status", encoding="ascii") as status:
        host_gib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
    return {
        "model": f"neox-20b, {num_blocks} blocks", "engine": peer, "optim": "adamw", "num_gpus": 1, "memory_cap_gb": cap_gb,
        "sequence_length": SEQUENCE, "tokens_per_step": tokens, "tokens_per_s": round(tokens / step_s),
        "step_s": round(step_s, 3), "parameters": num_parameters, "device_gb": round(common.device_gb(), 1),
        "host_gib": round(host_gib, 1), "note": peer,
    }  # fmt: skip


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cap-gb", type=float, default=45)
    given = parser.parse_args()
    print("ROW " + json.dumps(measure(given.peer, given.blocks, given.micro_batches, given.steps, given.cap_gb)), flush=True)


if __name__ == "__main__":
    main()
