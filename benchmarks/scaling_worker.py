"""One rank of a row of `scaling.py`, started with the environment that torchrun gives its processes."""

import argparse
import json
import os
import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import scaling_cases
import scaling_trace
import torch
import torch.distributed as dist
from scaling_cases import CASES, Case

from fluxray import checkpoint
from fluxray.memory.table import reason
from fluxray.optim.schedule import build_schedule, lr_at
from fluxray.protocols import RunState, StepOutput
from fluxray.ranks import Ranks
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.planning import plan_run
from fluxray.runtime.saver import Saver
from fluxray.runtime.worker import Parts, build_parts

WARM_UP, TRACED, COMPARED, AFTERWARDS = 3, 2, 20, 4
"""Steps: before the rates, in the trace, whose losses are compared, and behind a checkpoint."""

TOLERATED = 1.05
"""Times the device's memory that an upper bound may foresee of what is tried all the same."""


class Group:
    """The parts of one rank, and its steps; data is in `folder`."""

    def __init__(self, config: Any, folder: Path):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.config = config
        self.folder = folder
        self.began = time.perf_counter()
        context = WorkerContext(rank, num_ranks, rank, folder, folder / "tokens", print, lambda _: False, (), self._say)
        self.parts: Parts = build_parts(config, context)
        self.device = self.parts.device
        self.state = RunState(config.seed, build_schedule(config.optim, 1000))
        self._batches = self.parts.learned.loader.train_batches(self.state)
        self.last: Any = None

    def step(self) -> StepOutput:
        """Queue one more step."""
        self.last = next(self._batches).batches
        return self.parts.engine.train_step(self.last, lr_at(self.state.schedule, 0))

    def losses(self, num_steps: int) -> list[float]:
        """Return the losses of so many steps."""
        return [self.step().loss.item() for _ in range(num_steps)]

    def skip(self, num_steps: int) -> None:
        """Pass over the data of so many steps."""
        for _ in range(num_steps):
            next(self._batches)

    def synchronize(self) -> None:
        """Wait for this rank's device, then for the others."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def close(self) -> None:
        """End what prepares the data."""
        self._batches.close()

    @staticmethod
    def _say(text: str) -> None:
        print(text, flush=True)


def speed(group: Group, case: Case, num_steps: int) -> dict[str, Any]:
    """Return rates, memory and where the time goes."""
    first_loss = group.step().loss.item()
    first_step_s = time.perf_counter() - group.began
    ends = [time.perf_counter()]
    for _ in range(WARM_UP - 1 + num_steps):
        group.step().loss.item()
        ends.append(time.perf_counter())
    lasted = [later - earlier for earlier, later in pairwise(ends)][WARM_UP - 1 :]
    seconds, rows = statistics.median(lasted), group.config.global_batch_size
    flops = sum(map(group.parts.learned.flops_of, group.last))
    found: dict[str, Any] = {
        "step_s": round(seconds, 4), "slowest_step_s": round(max(lasted), 4), "first_step_s": round(first_step_s, 1),
        "first_loss": round(first_loss, 4), "last_loss": round(group.step().loss.item(), 4),
    }  # fmt: skip
    if case.side:
        found |= {"images_per_step": rows, "images_per_s": round(rows / seconds, 3), "resolution": case.side}
    else:
        length = group.config.data.max_slice
        model, tokens = group.config.model.config, rows * length
        attention = 6 * model["num_hidden_layers"] * model["hidden_size"] * length  # the half that no causal kernel computes
        flops -= attention * tokens / group.config.resources.num_workers
        found |= {"tokens_per_step": tokens, "tokens_per_s": round(tokens / seconds), "sequence_length": length}
    found["model_tflops"] = round(flops / seconds / 1e12, 4)
    return found | _memory(group) | _trace(group) | _matrix_rate(group, flops / seconds / 1e12)


def _memory(group: Group) -> dict[str, Any]:
    """Return the most that any rank holds between steps and inside one, beside its share of all, and what the plan says."""
    group.synchronize()
    num = sum(p.numel() for p in group.parts.learned.stack.model.parameters())
    found: dict[str, Any] = {"parameters": num, "share_gib": round(12 * num / dist.get_world_size() / 2**30, 3)}
    plan = group.parts.plan
    if plan is not None:
        planned = {
            "planned_device_gb": round(plan.device_bytes / 1e9, 1), "planned_host_gib": round(plan.host_bytes / 2**30, 1),
            "gathered_gib": round(plan.bytes.device["gathered blocks"] / 2**30, 3),
            "kept_results_gb": round(plan.policy.checkpoint_budget / 1e9, 2),
        }  # fmt: skip
        found |= planned
    if group.device.type == "cuda":
        import common

        own = (
            torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30, common.device_gb(),
            torch.cuda.max_memory_reserved() / 2**30,
        )  # fmt: skip
        most = [round(max(values), 2) for values in zip(*group.parts.ranks.gather(own), strict=True)]
        found |= dict(zip(("held_gib", "peak_allocated_gib", "device_gb", "peak_reserved_gib"), most, strict=True))
    return found


def _trace(group: Group) -> dict[str, Any]:
    """Return seconds a step by what rank 0 spends them on. All ranks record, so that none waits for another."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if group.device.type == "cuda" else kinds.CPU]) as profile:
        for _ in range(TRACED):
            group.step()
        group.synchronize()
    path = group.folder / f"trace-{dist.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    found = scaling_trace.parts(scaling_trace.kernels_of(json.loads(path.read_text())), TRACED)
    path.unlink()
    parts = {kind: round(seconds, 4) for kind, seconds in found.items()}
    if not found:
        return {"parts_s": parts}
    whole = sum(found[kind] for kind in ("computing", "exposed", "idle"))
    return {"parts_s": parts, "exposed_share": round(found["exposed"] / whole, 4)}


def _matrix_rate(group: Group, tflops: float) -> dict[str, float]:
    if group.device.type != "cuda":
        return {}
    from fluxray.metrics import measure_matrix_tflops

    group.synchronize()
    rate = measure_matrix_tflops(group.device, torch.bfloat16)
    return {"card_matrix_tflops": round(rate, 1), "share_of_matrix_rate": round(tflops / rate, 3)}


def losses(group: Group, case: Case, num_steps: int) -> dict[str, Any]:
    """Return the first losses of global batches that are the same on any number of GPUs."""
    return {"losses": group.losses(COMPARED)}


def save(group: Group, case: Case, num_steps: int) -> dict[str, Any]:
    """Return how long a checkpoint stops training and until it is durable, and the losses of the steps behind it."""
    group.losses(2)
    needed = sum(item.tensor.nbytes for item in group.parts.engine.state_items()) * dist.get_world_size()
    free = shutil.disk_usage(group.folder).free
    if needed > 0.9 * free:
        raise SystemExit(f"disk: a checkpoint takes {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free; use --scratch")
    own = dist.new_group(backend="gloo")
    assert isinstance(own, dist.ProcessGroup)
    saver = Saver(group.folder / "run", Ranks.of_group(own), asynchronous=True)
    found: dict[str, Any] = {"checkpoint_gb": round(needed / 1e9, 2)}
    state = group.state
    for step, key in ((2, "first_blocked_s"), (3, "blocked_s")):
        if step == 3:
            group.losses(1)
            group.synchronize()
            if dist.get_rank() == 0:
                shutil.rmtree(group.folder / "run")  # the disk need hold one
            dist.barrier()
        group.synchronize()
        start = time.perf_counter()
        saved = saver.save(RunState(state.seed, state.schedule, step), group.parts.engine.state_items())
        found[key] = round(time.perf_counter() - start, 3)
        if step == 2:
            saved.wait()
    after = group.losses(1)
    found["durable_s"] = round(saved.wait(), 2)
    return {**found, "losses": after + group.losses(AFTERWARDS - 1)}


def resume(group: Group, case: Case, num_steps: int) -> dict[str, Any]:
    """Return the losses of the steps behind a checkpoint that another number of GPUs wrote."""
    reader = checkpoint.CheckpointReader(checkpoint.committed(group.folder / "run")[0])
    start = time.perf_counter()
    group.parts.engine.load_items(reader)
    loaded_s = time.perf_counter() - start
    group.skip(3)
    return {"load_s": round(loaded_s, 1), "losses": group.losses(AFTERWARDS)}


PURPOSES = {"speed": speed, "losses": losses, "save": save, "resume": resume}


def main() -> None:
    """Measure one row and print it on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--purpose", choices=PURPOSES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--set", nargs="*", default=[])
    given = parser.parse_args()
    case, rank, num_ranks = CASES[given.row], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1 if given.rehearse else max(torch.get_num_threads() // num_ranks, 1))
    config = scaling_cases.resolved(case, num_ranks, given.folder, given.rehearse, given.set)
    dist.init_process_group("gloo" if given.rehearse else "nccl")
    if config.resources.gpu > 0:
        torch.cuda.set_device(rank)
        _refuse_misfit(config)
    group = Group(config, given.folder)
    found = PURPOSES[given.purpose or case.purpose](group, case, given.steps)
    if rank == 0:
        shape = {
            "model": case.model, "note": given.row, "num_gpus": num_ranks, "engine": config.engine.kind,
            "precision": config.precision, "optim": config.optim.kind, "master": config.optim.master, "clip": config.clip.mode,
        }  # fmt: skip
        print("ROW " + json.dumps(shape | found), flush=True)
    group.close()
    dist.barrier()
    dist.destroy_process_group()


def _refuse_misfit(config: Any) -> None:
    """Say in time what no device has the memory for. The plan is an upper bound, so what it misses by a little is tried."""
    plan = plan_run(config)
    for short in plan.shortfalls:
        if short.place == "device" and short.needed > TOLERATED * short.limit:
            raise SystemExit(f"does not fit: {reason(plan)}")


if __name__ == "__main__":
    main()
