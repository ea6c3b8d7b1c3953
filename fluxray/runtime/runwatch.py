"""What is read beside the losses at each log: memory of device, process and host, once next to the plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_timeline import StreamBytes, Timeline
from fluxray.memory.estimate import CONTEXT_BYTES, GIB
from fluxray.memory.plan import MemoryPlan
from fluxray.memory.table import comparison
from fluxray.metrics import StepMemory, memory_metrics
from fluxray.protocols import Engine
from fluxray.runtime.hostmemory import HostWatch
from fluxray.runtime.picture import draw

WARM_UP = 2
"""Steps after which memory is what it will be."""

PICTURE = "memory.png"


@dataclass
class RunWatch:
    """Reads memory at each log; after warm-up compares it with the plan, and draws one step of a streamed model.

    `run_dir` gets the picture, `publish` is told of it, `pause` gives a context whose time is not the training's. `traces`: a
    step may be watched tensor by tensor; compiled code of a CPU may not. `peaks` has the allocator's, if others start them anew.
    """

    engine: Engine
    plan: MemoryPlan | None
    device: torch.device
    run_dir: Path
    notify: Callable[[str], None]
    publish: Callable[[str], None]
    pause: Callable[[], AbstractContextManager[object]]
    traces: bool
    peaks: StepMemory | None = None
    _num_steps: int = field(default=0, init=False)
    _timeline: Timeline | None = field(default=None, init=False)
    _compared: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._host = HostWatch("stream" if isinstance(self.engine, StreamEngine) else "sharded", self.notify)
        self._host.look()

    def stepped(self) -> None:
        """Learn that one more step has been queued."""
        self._num_steps += 1
        if self._num_steps == WARM_UP and isinstance(self.engine, StreamEngine) and self.traces:
            self._timeline = Timeline(self.engine.held_bytes(), self.engine.held_tensors(), self.device)
            self.engine.watch(self._timeline)

    def memory(self, step: int) -> dict[str, float]:
        """Return the memory metrics after a step that the device has finished."""
        self._host.look()
        metrics = memory_metrics(self.device, self.peaks)
        if self.plan is not None and self._num_steps > WARM_UP and not self._compared:
            self._compared = True
            with self.pause():
                metrics |= self._compare(self.plan)
                if self._timeline is not None:
                    self._draw(self._timeline, self.plan, step)
            self._timeline = None
        return metrics

    def _compare(self, plan: MemoryPlan) -> dict[str, float]:
        measured: dict[str, int] = {}
        if self.device.type == "cuda":
            before = self._timeline.reserved_before if self._timeline is not None else 0
            measured["device"] = self._context() + max(before, torch.cuda.max_memory_reserved(self.device))
        if isinstance(self.engine, StreamEngine):
            held = self.engine.held_bytes()
            if self.device.type != "cuda" and self._timeline is not None:
                measured["device"] = held.device + max(point.peak for point in self._timeline.points)
            measured |= _by_category(held)
        for line in comparison(plan, measured):
            self.notify(line)
        planned = plan.by_name
        return {f"memory/planned_{_key(name)}": planned[name] / GIB for name in measured} | {
            f"memory/measured_{_key(name)}": count / GIB for name, count in measured.items()
        }

    def _draw(self, timeline: Timeline, plan: MemoryPlan, step: int) -> None:
        name, blocks = self.run_dir.name, len(plan.demand.blocks)
        title = f"{name}: one step of {plan.demand.num_micro_batches} micro-batches through {blocks} blocks"
        try:
            path = self.run_dir / PICTURE
            draw(timeline.points, timeline.allocated, self._context(), plan.hardware.device_bytes, path, title)
        except Exception as error:  # noqa: BLE001 - whatever drawing meets, training goes on
            self.notify(f"{PICTURE}: not drawn at step {step} ({type(error).__name__}: {error})")
        else:
            self.publish(PICTURE)

    def _context(self) -> int:
        """Return the bytes of the CUDA context; what others have on the card looks like it, so no more than twice the usual."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return min(max(0, total - free - torch.cuda.memory_reserved(self.device)), 2 * CONTEXT_BYTES)


def _by_category(held: StreamBytes) -> dict[str, int]:
    """Return what is allocated for good by the plan's names."""
    return {
        "device weights": held.outside_weights + held.resident_weights,
        "device optimizer": held.outside_states + held.resident_states,
        "device gradients": held.gradients,
        "device slots": held.slots,
        "host blocks": held.host_blocks,
    }


def _key(name: str) -> str:
    return f"{name.replace(' ', '_')}_gib"
