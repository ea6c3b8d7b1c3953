"""How a trial's training ends is put down in one line, whatever it was."""

import pytest
from ray.exceptions import RpcError

from fluxray.errors import ConfigError, NonFiniteLossError, PlanError
from fluxray.runtime.outcome import FailedError, LostError, StoppedError
from fluxray.runtime.prepare import again
from fluxray.runtime.sweeps import Outcome, ask_to_stop, read_outcome, stop_step, write_outcome
from fluxray.runtime.tune_trial import _judged, _train


def ended_by(tmp_path, error):
    def carry():
        if error is not None:
            raise error

    return _train(tmp_path, 3, tmp_path / "run", carry)


@pytest.mark.parametrize(
    "error",
    [ConfigError("optim.lr: 0"), PlanError("plan: too large"), NonFiniteLossError("loss nan"), FailedError("run r: lost")],
)
def test_a_fault_is_the_reason(tmp_path, error):
    assert ended_by(tmp_path, error) == Outcome("failed", str(error))


@pytest.mark.parametrize("error", [LostError("run r: Ray's controller died"), RpcError("WrongClusterID")])
def test_a_lost_part_of_ray_is_no_end_of_a_trial(tmp_path, error):
    with pytest.raises(type(error)):
        ended_by(tmp_path, error)
    assert read_outcome(tmp_path, 3) is None


def test_one_that_had_not_the_memory_names_its_plan(tmp_path):
    error = FailedError("run r: out of memory in step 1 (rank 0, 44.9 of 45.0 GB); try again")
    assert ended_by(tmp_path, error) == Outcome("failed", str(error))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.txt").write_text("device 46 GB")
    assert ended_by(tmp_path, error) == Outcome("failed", f"{error}; its plan: {tmp_path / 'run' / 'plan.txt'}")


def test_what_the_same_command_would_do_is_said_of_a_run_alone(tmp_path):
    error = FailedError(f"run r: worker 0 failed: lost; {again(tmp_path / 'run')}")
    assert "begins anew" in str(error)
    assert ended_by(tmp_path, error) == Outcome("failed", "run r: worker 0 failed: lost")


def test_a_fault_of_ours_is_kept_whole_beside_it(tmp_path):
    found = ended_by(tmp_path, ZeroDivisionError("division by zero"))
    assert found is not None and found.status == "failed"
    assert found.reason == "ZeroDivisionError: division by zero; the whole story is in outcomes/00003.txt"
    assert "Traceback" in (tmp_path / "outcomes" / "00003.txt").read_text()


def test_one_that_was_stopped_is_to_go_on_and_another_has_ended(tmp_path):
    assert ended_by(tmp_path, StoppedError("run r was stopped")) is None
    assert ended_by(tmp_path, None) == Outcome("ended")


def test_one_that_never_reported_its_metric_has_failed():
    assert _judged(Outcome("ended"), 1, "perf/mfu") == Outcome("ended")
    found = _judged(Outcome("ended"), 0, "perf/of_floor")
    assert found == Outcome("failed", "metric: 'perf/of_floor' was not reported once; choose another metric")


def test_one_that_was_asked_to_stop_counts_as_stopped_unless_it_said_otherwise(tmp_path):
    assert stop_step(tmp_path, 3) is None
    ask_to_stop(tmp_path, 3, 40)
    assert (stop_step(tmp_path, 3), read_outcome(tmp_path, 3)) == (40, Outcome("stopped"))
    write_outcome(tmp_path, 3, Outcome("failed", "loss nan"))
    assert read_outcome(tmp_path, 3) == Outcome("failed", "loss nan")
