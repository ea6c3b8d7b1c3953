"""Some steps looked at closely on request: a trace of what runs when, or a history of device memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from fluxray.config.schema import ProfileConfig

MOST_EVENTS = 500_000
"""Of allocations and frees that a history keeps: the last ones."""


class StepRecorder:
    """Records the steps that `profile` names, on one rank, into files of `run_dir` that `publish` is told of.

    `pause` gives a context whose time is not the training's; `discard` drops the reading of throughput so far, since recorded
    steps are slower than others.
    """

    def __init__(
        self,
        profile: ProfileConfig,
        device: torch.device,
        run_dir: Path,
        publish: Callable[[str], None],
        pause: Callable[[], AbstractContextManager[object]],
        discard: Callable[[], object],
    ):
        self._profile = profile
        self._device = device
        self._run_dir = run_dir
        self._publish = publish
        self._pause = pause
        self._discard = discard
        self._trace: torch.profiler.profile | None = None

    def at(self, step: int) -> None:
        """Learn that `step` steps are done: begin, or end and write, where that is the place to."""
        first = self._profile.first_step
        if first is None:
            return
        if step == first - 1:
            with self._pause():
                self._synchronize()
                self._begin()
        elif step == first - 1 + self._profile.num_steps and (self._trace is not None or self._profile.record == "memory"):
            with self._pause():
                self._synchronize()
                self._end(first)
            self._discard()

    def _begin(self) -> None:
        if self._profile.record == "memory":
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
            return
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if self._device.type == "cuda" else [kinds.CPU]
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.__enter__()

    def _end(self, first: int) -> None:
        last = first + self._profile.num_steps - 1
        if self._trace is None:
            name = f"memory_steps_{first}_{last}.snapshot"
            torch.cuda.memory._dump_snapshot(str(self._run_dir / name))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            name = f"trace_steps_{first}_{last}.json.gz"
            self._trace.__exit__(None, None, None)
            self._trace.export_chrome_trace(str(self._run_dir / name))
            self._trace = None
        self._publish(name)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
