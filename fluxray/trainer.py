"""The training loop: next global batch, engine step, metrics, evaluation, checkpoint.

It knows an engine and callables, no model, data set, process group or tracker, so a test drives it with a list for a reporter.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fluxray.errors import NonFiniteLossError
from fluxray.metrics import Throughput
from fluxray.optim.schedule import lr_at
from fluxray.protocols import (
    Batch,
    BatchSource,
    Engine,
    LossOutput,
    MicroBatches,
    Report,
    RunState,
    RunSummary,
    SampleId,
    SavedCheckpoint,
    StepOutput,
)

NUM_NAMED = 4
"""Rows of a bad batch that are named."""

EvalMetrics = Callable[[Iterable[tuple[Batch, LossOutput]]], Mapping[str, float]]
"""Makes metrics of batches and their losses over all ranks, which come one by one, so that no more than a group is in memory."""

SMALLEST_LOSS_SCALE = 1.0
"""A gradient that overflows in fp16 at a smaller one is not mended by making it smaller still."""


@dataclass(frozen=True)
class Cadence:
    """After how many steps the loop reports, evaluates (0: only at the end), saves and samples (0: never)."""

    log_every: int
    eval_every: int
    save_every: int
    sample_every: int = 0


@dataclass(frozen=True)
class Hooks:
    """What the loop calls.

    `eval_batches` gives the held-out batches anew each time, in the groups that go through the model together; `eval_metrics`
    makes metrics of them and their outputs over all ranks, `eval/loss` among them. `save` starts to write a checkpoint of the
    state; the one before is durable when it is called. `memory` returns the memory metrics after a step that the device has
    finished. `should_stop` is asked after each step, on every rank, and gives the same answer on all. `report` receives every
    Report, on every rank; `notify` one line for the user. `adapt` is called once a step has been queued, and returns its state
    with what it has decided for later ones. `first_loss` gets the rank's micro-batches and the loss of a run's very first step,
    if it is finite, before anything is saved, on every rank. `sample` draws pictures after a step. `terms` is what the terms of a
    loss are called.
    """

    batches: BatchSource
    eval_batches: Callable[[], Iterable[Sequence[Batch]]]
    eval_metrics: EvalMetrics
    save: Callable[[RunState], SavedCheckpoint]
    memory: Callable[[int], dict[str, float]]
    should_stop: Callable[[RunState], bool]
    report: Callable[[Report], None]
    notify: Callable[[str], None]
    adapt: Callable[[RunState], RunState] = lambda state: state
    first_loss: Callable[[Sequence[Batch], float], None] | None = None
    sample: Callable[[RunState], None] | None = None
    terms: str = "tokens"


class _Pending(NamedTuple):
    """A step that has not been read from the device yet, the first rows of its batch, and what is known of it on the host."""

    step: int
    lr: float
    output: StepOutput
    rows: list[SampleId]
    metrics: Mapping[str, float]


class _Fault(NamedTuple):
    """What was not finite in a step."""

    pending: _Pending
    loss: float
    grad_norm: float
    withheld: float

    def __str__(self) -> str:
        rows = ", ".join(f"{row.index}" for row in self.pending.rows)
        batch = f" on the batch that begins with rows {rows} of epoch {self.pending.rows[0].epoch}" if rows else ""
        return f"loss {self.loss} and gradient norm {self.grad_norm}{batch}"


class Trainer:
    """Trains to the end of the schedule from wherever `state` stands.

    A step of which the engine has withheld the update counts as a step; at its logging `stop` ends the run and `skip` goes on.
    Where the loss is scaled, a gradient that overflows under a finite loss is how the scale is found: it is counted, no fault.
    """

    def __init__(
        self,
        engine: Engine,
        hooks: Hooks,
        cadence: Cadence,
        throughput: Throughput,
        on_nonfinite: Literal["stop", "skip"] = "stop",
    ):
        self._engine = engine
        self._hooks = hooks
        self._cadence = cadence
        self._throughput = throughput
        self._on_nonfinite = on_nonfinite
        self._pending: list[_Pending] = []
        self._loss: float | None = None
        self._saved: SavedCheckpoint | None = None

    def fit(self, state: RunState) -> RunSummary:
        """Run the steps that are left, evaluate, save, and return how it ended; asked to stop, save and return at once.

        What has been saved is durable when this returns. Raises NonFiniteLossError.
        """
        total = state.schedule.total_steps
        evaluated: Mapping[str, float] | None = None
        stops = False
        self._throughput.read()
        with closing(self._hooks.batches(state)) as source:
            while state.step < total and not stops:
                data = next(source)
                state = self._step(state, data)
                stops = self._hooks.should_stop(state)
                logs, evaluates, saves, samples = self._due(state.step, state.step == total, stops)
                if logs or evaluates or saves or samples:  # also so that a pause never swallows the time of pending steps
                    state = self._log(state)
                if state.step == 1:
                    self._judge_first(data.batches)
                if evaluates:
                    evaluated = self._evaluate(state)
                if samples:
                    self._sample(state)
                if saves:
                    self._save(state)
        assert stops or state.step == total, f"the run stands at step {state.step}, {total} were planned"
        if state.step < total:
            evaluated = {}  # an earlier one is not of these weights
        elif evaluated is None:
            evaluated = self._evaluate(state)
        self._settle(state)
        path = str(self._saved.path) if self._saved else None
        return RunSummary(state.step, self._loss, evaluated.get("eval/loss"), evaluated.get("eval/perplexity"), path)

    def _due(self, step: int, is_last: bool, stops: bool) -> tuple[bool, bool, bool, bool]:
        """Return whether to log, evaluate, save and sample after `step`."""
        cadence = self._cadence
        return (
            is_last or self._is_due(cadence.log_every, step) or (step == 1 and self._hooks.first_loss is not None),
            is_last or (not stops and self._is_due(cadence.eval_every, step)),
            is_last or stops or self._is_due(cadence.save_every, step),
            cadence.sample_every > 0 and (is_last or (not stops and self._is_due(cadence.sample_every, step))),
        )

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _step(self, state: RunState, data: MicroBatches) -> RunState:
        lr = lr_at(state.schedule, state.step)
        with _doing(f"in step {state.step + 1}"):
            output = self._engine.train_step(data.batches, lr)
        self._throughput.add(data.batches)
        rows = [row for batch in data.batches if batch.key is not None for row in batch.key.samples][:NUM_NAMED]
        self._pending.append(_Pending(state.step + 1, lr, output, rows, data.metrics))
        return self._hooks.adapt(replace(state, step=state.step + 1, epoch=data.epoch, position=data.position))

    def _log(self, state: RunState) -> RunState:
        """Read the pending steps from the device, report each, and return the state with their tokens counted."""
        num_tokens, num_skipped = state.num_tokens, state.num_skipped
        faults: list[_Fault] = []
        for index, pending in enumerate(self._pending):
            output = pending.output
            loss, grad_norm, num_valid, withheld = (value.item() for value in output[:4])
            loss_scale = None if output.loss_scale is None else output.loss_scale.item()
            if withheld > 0 or not (math.isfinite(loss) and math.isfinite(grad_norm)):
                num_skipped += 1
                if loss_scale is not None and math.isfinite(loss):
                    self._check_scale(pending, loss_scale)
                else:
                    faults.append(_Fault(pending, loss, grad_norm, withheld))
                    self._check_goes_on(faults[-1])
            num_tokens += int(num_valid)
            finite = {"train/loss": loss, "train/grad_norm": grad_norm}
            metrics = {key: value for key, value in finite.items() if math.isfinite(value)}
            metrics |= {"train/lr": pending.lr, f"train/{self._hooks.terms}": float(num_tokens), **pending.metrics}
            metrics["train/skipped_steps"] = float(num_skipped)
            metrics |= {} if loss_scale is None else {"train/loss_scale": loss_scale}
            if index == len(self._pending) - 1:
                metrics |= self._throughput.read(num_tokens - state.num_tokens) | self._hooks.memory(pending.step)
            self._loss = loss if math.isfinite(loss) else self._loss
            self._hooks.report(Report(pending.step, metrics))
        self._tell_skipped(faults)
        self._pending.clear()
        return replace(state, num_tokens=num_tokens, num_skipped=num_skipped)

    def _check_goes_on(self, fault: _Fault) -> None:
        if self._on_nonfinite == "stop":
            raise NonFiniteLossError(
                f"optim.lr: {fault.pending.lr:g} at step {fault.pending.step} gave {fault}; lower it and start again, or go on "
                f"past such steps with train.on_nonfinite=skip"
            )

    @staticmethod
    def _check_scale(pending: _Pending, loss_scale: float) -> None:
        if loss_scale < SMALLEST_LOSS_SCALE:
            raise NonFiniteLossError(
                f"precision: 'amp-fp16' has halved the loss scale down to {loss_scale:g} by step {pending.step}, and the "
                f"gradient overflows all the same; set precision=amp-bf16, or lower optim.lr and start again"
            )

    def _tell_skipped(self, faults: Sequence[_Fault]) -> None:
        if faults:
            first, span = faults[0], len(self._pending)
            whole = "the update" if first.withheld >= 1 else f"{first.withheld:.0%} of the update"
            others = f"; {len(faults)} of the last {span} steps were skipped" if len(faults) > 1 else ""
            self._hooks.notify(f"step {first.pending.step}: {first}: {whole} was withheld{others}")

    def _judge_first(self, batches: Sequence[Batch]) -> None:
        """Show the loss of the run's first step, which has been read, to who judges it."""
        if self._hooks.first_loss is not None and self._loss is not None:
            self._hooks.first_loss(batches, self._loss)

    def _evaluate(self, state: RunState) -> Mapping[str, float]:
        with _doing(f"in the evaluation after step {state.step}"), self._throughput.pause():
            self._engine.flush()
            metrics = evaluate(self._engine, self._hooks.eval_batches(), self._hooks.eval_metrics)
        self._hooks.report(Report(state.step, metrics))
        return metrics

    def _sample(self, state: RunState) -> None:
        assert self._hooks.sample is not None
        start = time.perf_counter()
        with _doing(f"in the pictures after step {state.step}"), self._throughput.pause():
            self._engine.flush()
            self._hooks.sample(state)
        self._hooks.report(Report(state.step, {"sample/seconds": time.perf_counter() - start}))

    def _save(self, state: RunState) -> None:
        start = time.perf_counter()
        with _doing(f"in the save after step {state.step}"), self._throughput.pause():
            self._settle(state)
            self._engine.flush()
            self._saved = self._hooks.save(state)
            blocked = time.perf_counter() - start
            self._hooks.report(Report(state.step, {"checkpoint/blocked_s": blocked}, self._saved))

    def _settle(self, state: RunState) -> None:
        """Wait until the last checkpoint is durable, and report how long that took from its beginning."""
        if self._saved is not None:
            self._hooks.report(Report(state.step, {"checkpoint/durable_s": self._saved.wait()}))


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Note on whatever is raised inside what was being done."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def evaluate(engine: Engine, groups: Iterable[Sequence[Batch]], metrics_of: EvalMetrics) -> Mapping[str, float]:
    """Return what `metrics_of` makes of the batches of `groups`, each with its summed loss and valid count over all ranks."""
    return metrics_of(pair for group in groups for pair in zip(group, engine.eval_steps(group), strict=True))
