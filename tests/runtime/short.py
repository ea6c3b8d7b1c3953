"""Runs that have not the memory: an engine that says so where it is told to, and a sweep with such a trial."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from fluxray import checkpoint
from fluxray.config.schema import TrainConfig
from fluxray.protocols import RunSummary
from fluxray.runtime.context import WorkerContext

SHORT_AT = 12
"""The step that a streamed trial has not the memory for."""


class Short:
    """An engine that has not the memory for each of `faults` (what, at which step), once; otherwise it is the other engine."""

    def __init__(self, engine: Any, faults: list[tuple[str, int]]):
        self._engine, self._faults, self._step = engine, faults, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_items(self, reader: checkpoint.CheckpointReader) -> Sequence[str]:
        self._step = reader.state.step
        return self._engine.load_items(reader)

    def train_step(self, *arguments: Any) -> Any:
        self._step += 1
        output = self._engine.train_step(*arguments)  # the worst moment: everything has been changed
        self._allocate("step")
        return output

    def eval_steps(self, *arguments: Any) -> Any:
        self._allocate("evaluation")
        return self._engine.eval_steps(*arguments)

    def state_items(self) -> Any:
        self._allocate("save")
        return self._engine.state_items()

    def _allocate(self, what: str) -> None:
        if (what, self._step) in self._faults:
            self._faults.remove((what, self._step))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def short_when_streamed(config: TrainConfig, context: WorkerContext) -> RunSummary:
    """Train as a worker does; a streamed run has not the memory for one of its steps."""
    from fluxray.runtime import worker

    build = worker.build_engine
    if config.engine.kind == "stream":
        worker.build_engine = lambda *arguments: Short(build(*arguments), [("step", SHORT_AT)])
    return worker.run_worker(config, context)


def run_short() -> None:
    """In the process of a sweep's driver: let its workers run `short_when_streamed`, which they receive by value."""
    from ray import cloudpickle

    from fluxray.runtime import tune
    from fluxray.runtime.launch import Steps

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    preflight = tune.training().preflight
    tune.training = lambda: Steps(preflight, short_when_streamed)
