import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from fluxray.errors import ConfigError, NonFiniteLossError
from fluxray.metrics import Throughput
from fluxray.optim.schedule import lr_at
from fluxray.protocols import (
    BatchKey,
    LossOutput,
    MicroBatches,
    MicroSize,
    Report,
    RunState,
    SampleId,
    SavedCheckpoint,
    Schedule,
    StepOutput,
)
from fluxray.tasks.lm import text_metrics
from fluxray.trainer import Cadence, Hooks, Trainer, evaluate

TOTAL = 12
START = RunState(seed=3, schedule=Schedule("linear", 1e-2, 4, TOTAL, 0.1))


@dataclass(frozen=True)
class FakeBatch:
    """A micro-batch that knows its loss."""

    num_tokens: int = 8
    num_valid: int = 7
    loss: float = 1.0
    key: BatchKey | None = None

    def to(self, device: torch.device) -> "FakeBatch":
        raise AssertionError(device)


@dataclass
class FakeEngine:
    """Writes down what it is asked to do; step s (counted from 1) has the loss 10 - s, or what `losses` says."""

    done: list[Any]
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    withheld: dict[int, float] = field(default_factory=dict)
    loss_scales: dict[int, float] = field(default_factory=dict)
    step: int = 0

    def train_step(self, micro_batches, lr: float) -> StepOutput:
        self.step += 1
        self.done.append(("step", self.step, lr))
        loss, norm = self.losses.get(self.step, 10.0 - self.step), self.norms.get(self.step, 0.5)
        num_valid = sum(batch.num_valid for batch in micro_batches)
        withheld = self.withheld.get(self.step, 0.0 if math.isfinite(loss) and math.isfinite(norm) else 1.0)
        scale = self.loss_scales.get(self.step)
        scaled = None if scale is None else torch.tensor(scale)
        return StepOutput(*(torch.tensor(float(value)) for value in (loss, norm, num_valid, withheld)), scaled)

    def eval_steps(self, batches) -> list[LossOutput]:
        self.done.append(("eval", self.step))
        return [LossOutput(torch.tensor(batch.loss * batch.num_valid), batch.num_valid) for batch in batches]

    def flush(self) -> None:
        self.done.append(("flush", self.step))

    def forward(self, batch) -> torch.Tensor:
        raise AssertionError

    def state_items(self) -> Iterator[Any]:
        raise AssertionError

    def load_items(self, reader) -> None:
        raise AssertionError


class Broken(dict[int, float]):
    """Stands for a device that goes away in a step."""

    def get(self, *_: Any) -> Any:
        raise OSError("device lost")


class Run:
    """A trainer on fakes, and all that can be seen of it. Step s consumes the data up to position 4 s of epoch 1."""

    def __init__(
        self,
        cadence: tuple[int, int, int] = (3, 0, 100),
        num_ranks: int = 1,
        engine: dict[str, Any] | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        hooks: dict[str, Any] | None = None,
    ):
        self.done: list[Any] = []
        self.engine = FakeEngine(self.done, **(engine or {}))
        self.reports: list[Report] = []
        self.notices: list[str] = []
        self.saved: list[RunState] = []
        self.opened = self.closed = 0
        self.sources: list[Any] = []  # held here, so that only an explicit close ends them
        self.stop_at: int | None = None
        memory = {"memory/host_gib": 1.5}
        called = Hooks(
            self.open,
            self.eval_batches,
            text_metrics,
            self.save,
            lambda step: memory,
            lambda at: at.step == self.stop_at,
            self.reports.append,
            self.notices.append,
            self.adapt,
        )
        called = replace(called, **(hooks or {}))
        throughput = Throughput(lambda batch: 6.0 * batch.num_tokens, 1.0, num_ranks)
        self.trainer = Trainer(self.engine, called, Cadence(*cadence), throughput, on_nonfinite)

    def adapt(self, state: RunState) -> RunState:
        self.done.append(("adapt", state.step))
        return replace(state, micro_size=MicroSize(state.step, 0, 0, 0, 0))

    def open(self, state: RunState) -> Generator[MicroBatches, None, None]:
        self.sources.append(self.batches(state))
        return self.sources[-1]

    def batches(self, state: RunState) -> Generator[MicroBatches, None, None]:
        self.opened += 1
        try:
            position = state.position
            while True:
                position += 4
                rows = tuple(SampleId(1, index) for index in range(position - 4, position))
                first, second = (BatchKey(state.seed, 0, rows[start : start + 2]) for start in (0, 2))
                metrics = {"batch/padding_share": position / 100}
                yield MicroBatches([FakeBatch(key=first), FakeBatch(num_valid=5, key=second)], 1, position, metrics)
        finally:
            self.closed += 1

    def eval_batches(self) -> Iterable[list[FakeBatch]]:
        return iter([[FakeBatch(loss=2.0, num_valid=6), FakeBatch(loss=5.0, num_valid=2)], [FakeBatch(loss=0.0, num_valid=0)]])

    def save(self, state: RunState) -> SavedCheckpoint:
        self.done.append(("save", state.step))
        self.saved.append(state)
        return SavedCheckpoint(Path(f"step_{state.step}"), lambda: self.wait(state.step))

    def wait(self, step: int) -> float:
        self.done.append(("durable", step))
        return 2.5

    def fit(self, state: RunState = START):
        self.engine.step = state.step
        return self.trainer.fit(state)

    def steps_of(self, key: str) -> list[int]:
        return [report.step for report in self.reports if key in report.metrics]

    def did(self, what: str) -> list[int]:
        return [entry[1] for entry in self.done if entry[0] == what]


ALL_STEPS = list(range(1, TOTAL + 1))


def test_every_step_is_reported_once_in_order() -> None:
    for cadence in ((1, 0, 100), (3, 0, 100), (5, 2, 3), (100, 0, 100), (7, 5, 4)):
        run = Run(cadence)
        run.fit()
        assert run.steps_of("train/loss") == ALL_STEPS
        losses = [report.metrics["train/loss"] for report in run.reports if "train/loss" in report.metrics]
        assert losses == [10.0 - step for step in ALL_STEPS]
        steps = [report.step for report in run.reports]
        assert steps == sorted(steps)


def test_report_of_a_step_holds_its_own_values() -> None:
    run = Run((4, 0, 100), engine={"norms": {2: 3.0}})
    run.fit()
    by_step = {report.step: report.metrics for report in run.reports if "train/loss" in report.metrics}
    assert by_step[2]["train/grad_norm"] == 3.0 and by_step[3]["train/grad_norm"] == 0.5
    for step, metrics in by_step.items():
        assert metrics["train/lr"] == lr_at(START.schedule, step - 1)
        assert metrics["train/tokens"] == 12.0 * step
        assert metrics["batch/padding_share"] == 4 * step / 100
    assert [lr for _, _, lr in (e for e in run.done if e[0] == "step")] == [lr_at(START.schedule, s) for s in range(TOTAL)]


def test_logging_follows_its_cadence() -> None:
    run = Run((5, 0, 100))
    run.fit()
    assert run.steps_of("perf/tokens_per_s") == run.steps_of("memory/host_gib") == run.steps_of("perf/mfu") == [5, 10, 12]


@pytest.mark.parametrize(("every", "expected"), [(0, [12]), (5, [5, 10, 12]), (4, [4, 8, 12]), (100, [12]), (1, ALL_STEPS)])
def test_evaluation_follows_its_cadence_and_always_ends_the_run(every: int, expected: list[int]) -> None:
    run = Run((3, every, 100))
    summary = run.fit()
    assert run.steps_of("eval/loss") == expected
    assert len(run.did("eval")) == 2 * len(expected)  # two groups
    assert summary.eval_loss == pytest.approx((2 * 6 + 5 * 2) / 8) and summary.perplexity == pytest.approx(math.exp(2.75))


@pytest.mark.parametrize(("every", "expected"), [(5, [5, 10, 12]), (4, [4, 8, 12]), (100, [12]), (1, ALL_STEPS)])
def test_saving_follows_its_cadence_and_always_ends_the_run(every: int, expected: list[int]) -> None:
    run = Run((3, 0, every))
    summary = run.fit()
    assert [state.step for state in run.saved] == expected
    assert [(report.step, str(report.checkpoint.path)) for report in run.reports if report.checkpoint] == [
        (step, f"step_{step}") for step in expected
    ]
    assert summary.checkpoint == "step_12"


def test_saved_states_say_what_has_been_consumed() -> None:
    run = Run((3, 0, 5))
    run.fit(replace(START, position=2))
    assert [(state.epoch, state.position, state.num_tokens) for state in run.saved] == [(1, 22, 60), (1, 42, 120), (1, 50, 144)]
    assert all(state.seed == START.seed and state.schedule == START.schedule for state in run.saved)


def test_each_step_may_be_adapted_to_before_the_next_is_drawn() -> None:
    run = Run((3, 0, 5))
    run.fit()
    order = [entry[:2] for entry in run.done if entry[0] in ("step", "adapt")]
    assert order == [(what, step) for step in ALL_STEPS for what in ("step", "adapt")]
    assert [state.micro_size.rows for state in run.saved if state.micro_size] == [5, 10, 12]


def test_the_task_says_what_is_reported_of_an_evaluation() -> None:
    def largest(pairs) -> dict[str, float]:
        assert not isinstance(pairs, list)  # one group in memory at a time
        return {"eval/loss": max(float(output.sum) / batch.num_valid for batch, output in pairs if batch.num_valid)}

    run = Run(hooks={"eval_metrics": largest, "terms": "images"})
    summary = run.fit()
    assert [report.metrics["eval/loss"] for report in run.reports if "eval/loss" in report.metrics] == [5.0]
    assert run.steps_of("eval/perplexity") == [] and (summary.eval_loss, summary.perplexity) == (5.0, None)
    assert summary.held_out == "loss 5.0000" and run.steps_of("train/tokens") == []
    assert [report.metrics["train/images"] for report in run.reports if "train/loss" in report.metrics][-1] == 12 * TOTAL
    assert replace(summary, eval_loss=None).held_out == "not evaluated"


def test_the_first_loss_is_judged_once_right_after_its_step() -> None:
    seen: list[Any] = []
    run = Run((100, 1, 1), hooks={"first_loss": lambda batches, loss: seen.append((len(batches), loss, list(run.done)))})
    run.fit()
    assert [entry[:2] for entry in seen] == [(2, 9.0)]
    assert [what[0] for what in seen[0][2]] == ["step", "adapt"], "before anything is evaluated or saved"
    resumed: list[Any] = []
    Run(hooks={"first_loss": lambda *told: resumed.append(told)}).fit(replace(START, step=1))
    assert resumed == []
    silent: list[Any] = []
    faulty = Run(engine={"losses": {1: math.nan}}, on_nonfinite="skip", hooks={"first_loss": lambda *told: silent.append(told)})
    faulty.fit()
    assert silent == []


def test_whoever_judges_the_first_loss_may_end_the_run() -> None:
    def refuse(batches, loss) -> None:
        raise ConfigError(f"task.first_loss: {loss}")

    run = Run((100, 1, 1), hooks={"first_loss": refuse})
    with pytest.raises(ConfigError, match=r"^task\.first_loss: 9\.0"):
        run.fit()
    assert run.saved == [] and run.opened == run.closed == 1


def test_updates_are_flushed_before_evaluating_and_saving() -> None:
    run = Run((3, 4, 6))
    run.fit()
    for index, entry in enumerate(run.done):
        if entry[0] == "save" or (entry[0] == "eval" and run.done[index - 1][0] != "eval"):
            assert run.done[index - 1] == ("flush", entry[1])


def test_pending_steps_are_read_before_a_pause_begins() -> None:
    run = Run((100, 4, 6))
    run.fit()
    assert run.steps_of("perf/tokens_per_s") == [4, 6, 8, 12]  # else their time on the device would fall into the pause
    first = [report.step for report in run.reports if "train/loss" in report.metrics or "eval/loss" in report.metrics]
    assert first[:6] == [1, 2, 3, 4, 4, 5]


def test_finished_run_evaluates_and_says_so() -> None:
    run = Run()
    summary = run.fit(replace(START, step=TOTAL, num_tokens=5))
    assert run.did("step") == [] and run.saved == []
    assert run.steps_of("eval/loss") == [TOTAL]
    assert (summary.step, summary.train_loss, summary.checkpoint) == (TOTAL, None, None)
    assert summary.eval_loss == pytest.approx(2.75)
    assert run.opened == run.closed


def test_run_goes_on_from_where_it_stands() -> None:
    run = Run((3, 0, 100))
    summary = run.fit(replace(START, step=10, position=40, num_tokens=1000))
    assert run.did("step") == [11, 12] and run.steps_of("train/loss") == [11, 12]
    adapted = MicroSize(12, 0, 0, 0, 0)
    assert run.saved == [replace(START, step=12, epoch=1, position=48, num_tokens=1024, micro_size=adapted)]
    assert summary.step == 12 and summary.train_loss == -2.0


def test_state_beyond_the_schedule_is_no_finished_run() -> None:
    with pytest.raises(AssertionError, match="stands at step 13, 12 were planned"):
        Run().fit(replace(START, step=TOTAL + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["losses", "norms"])
def test_what_is_no_number_ends_the_run_before_anything_is_saved(what: str, value: float) -> None:
    run = Run((100, 0, 4), engine={what: {6: value}})
    with pytest.raises(NonFiniteLossError, match=rf"^optim\.lr: .* at step 6 gave .*{value}.*; lower it"):
        run.fit()
    assert [state.step for state in run.saved] == [4]
    assert run.steps_of("train/loss") == [1, 2, 3, 4, 5]
    assert run.opened == run.closed == 1


def test_the_fault_names_the_rows_of_its_batch() -> None:
    with pytest.raises(NonFiniteLossError) as raised:
        Run((100, 0, 100), engine={"losses": {6: math.nan}}).fit()
    assert str(raised.value) == (
        "optim.lr: 0.008875 at step 6 gave loss nan and gradient norm 0.5 on the batch that begins with rows 20, 21, 22, 23 of "
        "epoch 1; lower it and start again, or go on past such steps with train.on_nonfinite=skip"
    )


def test_an_update_withheld_in_part_ends_the_run_as_well() -> None:
    with pytest.raises(NonFiniteLossError, match=r"at step 2 gave loss 8\.0 and gradient norm 0\.5"):
        Run(engine={"withheld": {2: 0.25}}).fit()


def test_skipping_goes_on_and_tells_each_span_once() -> None:
    faults = {"losses": {2: math.nan, 3: math.inf, 11: math.nan, 12: math.nan}, "norms": {2: math.nan, 5: math.inf}}
    run = Run((3, 0, 4), engine=faults, on_nonfinite="skip")
    summary = run.fit(replace(START, num_skipped=7))
    metrics = {report.step: report.metrics for report in run.reports if "train/lr" in report.metrics}
    assert list(metrics) == ALL_STEPS
    assert [metrics[step]["train/skipped_steps"] for step in ALL_STEPS] == [7, 8, 9, 9, 10, 10, 10, 10, 10, 10, 11, 12]
    assert [step for step in ALL_STEPS if "train/loss" not in metrics[step]] == [2, 3, 11, 12]
    assert [step for step in ALL_STEPS if "train/grad_norm" not in metrics[step]] == [2, 5]
    assert all(math.isfinite(value) for of_step in metrics.values() for value in of_step.values())
    assert [(state.step, state.num_skipped, state.num_tokens) for state in run.saved] == [(4, 9, 48), (8, 10, 96), (12, 12, 144)]
    assert run.notices == [
        "step 2: loss nan and gradient norm nan on the batch that begins with rows 4, 5, 6, 7 of epoch 1: "
        "the update was withheld; 2 of the last 3 steps were skipped",
        "step 5: loss 5.0 and gradient norm inf on the batch that begins with rows 16, 17, 18, 19 of epoch 1: "
        "the update was withheld",
        "step 11: loss nan and gradient norm 0.5 on the batch that begins with rows 40, 41, 42, 43 of epoch 1: "
        "the update was withheld; 2 of the last 3 steps were skipped",
    ]
    assert summary.step == TOTAL and summary.train_loss == 0.0


def test_the_share_that_was_withheld_is_told() -> None:
    run = Run(engine={"withheld": {2: 0.25}}, on_nonfinite="skip")
    run.fit()
    assert len(run.notices) == 1 and run.notices[0].endswith(": 25% of the update was withheld")
    assert run.saved[-1].num_skipped == 1


SCALES = {step: 1024.0 if step < 7 else 512.0 for step in range(1, TOTAL + 1)}


def test_a_gradient_that_overflows_under_a_scaled_loss_is_counted_and_no_fault() -> None:
    run = Run(engine={"norms": {6: math.inf}, "loss_scales": SCALES})
    run.fit(replace(START, num_skipped=1))
    metrics = {report.step: report.metrics for report in run.reports if "train/lr" in report.metrics}
    assert {step: of_step["train/loss_scale"] for step, of_step in metrics.items()} == SCALES
    assert [metrics[step]["train/skipped_steps"] for step in (5, 6, 12)] == [1, 2, 2] and "train/grad_norm" not in metrics[6]
    assert run.notices == [] and run.saved[-1].num_skipped == 2


@pytest.mark.parametrize("num", [1, 3])
def test_a_loss_that_is_no_number_is_a_fault_whatever_the_scale(num: int) -> None:
    with pytest.raises(NonFiniteLossError, match=r"^optim\.lr: .* at step 6 gave loss nan"):
        Run((num, 0, 100), engine={"losses": {6: math.nan}, "loss_scales": SCALES}).fit()


def test_a_scale_that_collapses_ends_the_run() -> None:
    halving = {step: 2.0 ** (4 - step) for step in range(1, TOTAL + 1)}
    run = Run((100, 0, 100), engine={"norms": dict.fromkeys(halving, math.inf), "loss_scales": halving})
    with pytest.raises(NonFiniteLossError) as raised:
        run.fit()
    assert str(raised.value) == (
        "precision: 'amp-fp16' has halved the loss scale down to 0.5 by step 5, and the gradient overflows all the same; "
        "set precision=amp-bf16, or lower optim.lr and start again"
    )


def test_last_step_is_checked_before_it_is_saved() -> None:
    run = Run((100, 0, 100), engine={"losses": {TOTAL: math.nan}})
    with pytest.raises(NonFiniteLossError, match=f"at step {TOTAL} "):
        run.fit()
    assert run.saved == [] and run.steps_of("eval/loss") == []


def test_data_is_closed_at_the_end_and_on_any_fault() -> None:
    run = Run()
    run.fit()
    assert run.opened == run.closed == 1
    failing = Run()
    failing.engine.losses = Broken()
    with pytest.raises(OSError, match="device lost") as lost:
        failing.fit()
    assert lost.value.__notes__ == ["in step 1"], "what was being done is told with it"
    assert failing.opened == failing.closed == 1


def test_throughput_counts_all_ranks_and_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fluxray.metrics.time.perf_counter", lambda: clock[0])
    run = Run((4, 4, 4), num_ranks=2)
    engine: Any = run.engine
    step, evaluating, save = engine.train_step, engine.eval_steps, run.trainer._hooks.save

    def slow(call, seconds):
        def timed(*args):
            clock[0] += seconds
            return call(*args)

        return timed

    engine.train_step, engine.eval_steps = slow(step, 2.0), slow(evaluating, 100.0)
    run.trainer._hooks = replace(run.trainer._hooks, save=slow(save, 1000.0))
    run.fit()
    rates = [report.metrics["perf/tokens_per_s"] for report in run.reports if "perf/tokens_per_s" in report.metrics]
    assert rates == [pytest.approx(2 * 16 / 2.0)] * 3


def test_loss_of_an_evaluation_is_the_mean_over_terms_not_over_batches() -> None:
    engine = FakeEngine([])
    assert evaluate(engine, [[FakeBatch(loss=1.0, num_valid=1)], [FakeBatch(loss=4.0, num_valid=3)]], text_metrics)[
        "eval/loss"
    ] == pytest.approx(3.25)


def test_asked_to_stop_it_saves_and_leaves_the_rest() -> None:
    run = Run((100, 1, 100))
    run.stop_at = 5
    summary = run.fit()
    assert run.did("step") == [1, 2, 3, 4, 5] and [state.step for state in run.saved] == [5]
    assert run.saved[0].num_tokens == 12 * 5
    assert (summary.step, summary.eval_loss, summary.perplexity, summary.checkpoint) == (5, None, None, "step_5")
    assert run.steps_of("eval/loss") == [1, 2, 3, 4], "a stop is not held up by an evaluation"
    assert run.opened == run.closed == 1


def test_asked_to_stop_at_the_last_step_it_has_finished() -> None:
    run = Run()
    run.stop_at = TOTAL
    assert run.fit().eval_loss == pytest.approx(2.75)


def test_each_checkpoint_is_durable_before_the_next_and_before_the_end() -> None:
    run = Run((100, 0, 4))
    run.fit()
    order = [entry for entry in run.done if entry[0] in ("save", "durable")]
    assert order == [(what, step) for step in (4, 8, 12) for what in ("save", "durable")]
    assert run.steps_of("checkpoint/durable_s") == [8, 12, 12] and run.steps_of("checkpoint/blocked_s") == [4, 8, 12]
