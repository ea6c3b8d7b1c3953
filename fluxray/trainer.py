"""The training loop: next global batch, engine step, metrics, evaluation, checkpoint.

It knows an engine and callables, no model, data set, process group or tracker, so a test drives it with a list for a reporter.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from fluxray.errors import NonFiniteLossError
from fluxray.metrics import Throughput
from fluxray.optim.schedule import lr_at
from fluxray.protocols import Batch, BatchSource, Engine, MicroBatches, Report, RunState, RunSummary, StepOutput


@dataclass(frozen=True)
class Cadence:
    """After how many steps the loop reads the device and reports, evaluates (0: only at the end) and saves."""

    log_every: int
    eval_every: int
    save_every: int


@dataclass(frozen=True)
class Hooks:
    """What the loop calls. `eval_batches` gives the held-out batches anew each time; `save` writes a checkpoint of the state and
    returns its directory; `memory` returns the memory metrics; `report` receives every Report, on every rank.
    """

    batches: BatchSource
    eval_batches: Callable[[], Iterable[Batch]]
    save: Callable[[RunState], Path]
    memory: Callable[[], dict[str, float]]
    report: Callable[[Report], None]


class Trainer:
    """Trains to the end of the schedule from wherever `state` stands."""

    def __init__(self, engine: Engine, hooks: Hooks, cadence: Cadence, throughput: Throughput, num_ranks: int):
        self._engine = engine
        self._hooks = hooks
        self._cadence = cadence
        self._throughput = throughput
        self._num_ranks = num_ranks
        self._pending: list[tuple[int, float, StepOutput]] = []
        self._loss: float | None = None

    def fit(self, state: RunState) -> RunSummary:
        """Run the steps that are left, evaluate, save, and return how it ended. Raises NonFiniteLossError."""
        total = state.schedule.total_steps
        checkpoint: Path | None = None
        eval_loss: float | None = None
        self._throughput.read()
        with closing(self._hooks.batches(state)) as source:
            while state.step < total:
                state = self._step(state, next(source))
                cadence, is_last = self._cadence, state.step == total
                logs, evaluates, saves = (
                    is_last or self._is_due(every, state.step)
                    for every in (cadence.log_every, cadence.eval_every, cadence.save_every)
                )
                if logs or evaluates or saves:  # also so that a pause never swallows the time of pending steps
                    state = self._log(state)
                if evaluates:
                    eval_loss = self._evaluate(state)
                if saves:
                    checkpoint = self._save(state)
        assert state.step == total, f"the run stands at step {state.step}, {total} were planned"
        if eval_loss is None:
            eval_loss = self._evaluate(state)
        return RunSummary(state.step, self._loss, eval_loss, perplexity(eval_loss), str(checkpoint) if checkpoint else None)

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _step(self, state: RunState, data: MicroBatches) -> RunState:
        lr = lr_at(state.schedule, state.step)
        output = self._engine.train_step(data.batches, lr)
        self._throughput.add(self._num_ranks * sum(batch.num_tokens for batch in data.batches))
        self._pending.append((state.step + 1, lr, output))
        return replace(state, step=state.step + 1, epoch=data.epoch, position=data.position)

    def _log(self, state: RunState) -> RunState:
        """Read the pending steps from the device, report each, and return the state with their tokens counted."""
        num_tokens = state.num_tokens
        for index, (step, lr, output) in enumerate(self._pending):
            loss, grad_norm = output.loss.item(), output.grad_norm.item()
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise NonFiniteLossError(
                    f"optim.lr: {lr:g} at step {step} gave loss {loss} and gradient norm {grad_norm}; lower it and start again"
                )
            num_tokens += int(output.num_valid.item())
            metrics = {"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr, "train/tokens": float(num_tokens)}
            if index == len(self._pending) - 1:
                metrics |= self._throughput.read() | self._hooks.memory()
            self._loss = loss
            self._hooks.report(Report(step, metrics))
        self._pending.clear()
        return replace(state, num_tokens=num_tokens)

    def _evaluate(self, state: RunState) -> float:
        with self._throughput.pause():
            self._engine.flush()
            loss = evaluate(self._engine, self._hooks.eval_batches())
        self._hooks.report(Report(state.step, {"eval/loss": loss, "eval/perplexity": perplexity(loss)}))
        return loss

    def _save(self, state: RunState) -> Path:
        with self._throughput.pause():
            self._engine.flush()
            checkpoint = self._hooks.save(state)
            self._hooks.report(Report(state.step, {}, checkpoint))
        return checkpoint


def evaluate(engine: Engine, batches: Iterable[Batch]) -> float:
    """Return the mean loss over the valid terms of `batches` on all ranks."""
    outputs = [engine.eval_step(batch) for batch in batches]
    return sum(float(output.sum) for output in outputs) / sum(float(output.num_valid) for output in outputs)


def perplexity(loss: float) -> float:
    """Return e to the mean loss in nats; infinity where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)
