"""The real adapter on a real Ray: what a run is made of is faked, everything between driver and worker is not."""

import io
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

from fluxray import cli
from fluxray.config.load import resolve
from fluxray.errors import DataError, PlanError
from fluxray.protocols import Report, RunSummary, SavedCheckpoint

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    """A Ray on this machine that all tests of this file share; the workers receive this file's functions by value."""
    import ray
    from ray import cloudpickle

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level="ERROR")
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def configure(storage, name, **overrides):
    fixed = {"name": name, "storage": str(storage), "resources.cpu": 0.5, "train.num_steps": 8, "optim.warmup_steps": 2}
    return resolve("cpu", "lm-tiny", {**fixed, "checkpoint.every_steps": 2, **overrides})


def launch(config, work):
    from fluxray.runtime.launch import Steps, train

    return train(config, steps=Steps(lambda *_: None, work))


def say(context, text):
    """Keep a line for the test, whatever happens to this process."""
    with (context.run_dir / "attempts.txt").open("a") as file:
        file.write(f"{text}\n")


def said(storage, name):
    return (storage / "runs" / name / "attempts.txt").read_text().splitlines()


def save(context, step):
    """Write a checkpoint as the trainer does: complete, then renamed, in place of an older one of that step."""
    final = context.run_dir / f"step_{step:08d}"
    partial = final.with_suffix(".partial")
    partial.mkdir()
    (partial / "state.json").write_text(json.dumps({"step": step}))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final


def loop(config, context, start, at_step=lambda step: None):
    """Report each step, save every second one."""
    last = None
    for step in range(start + 1, config.train.num_steps + 1):
        context.report(Report(step, {"train/loss": 1 / step, "perf/tokens_per_s": 100.0}))
        at_step(step)
        if step % config.checkpoint.every_steps == 0:
            last = save(context, step)
            context.report(Report(step, {}, SavedCheckpoint(last, lambda: 0.0)))
            time.sleep(0.3)
    return RunSummary(config.train.num_steps, 0.5, 1.0, 2.71828, str(last))


def newest(context):
    return json.loads((context.checkpoints[0] / "state.json").read_text())["step"] if context.checkpoints else 0


def killed_once(config, context):
    """Be killed at step 5 of the first attempt."""
    start = newest(context)
    say(context, f"{start} {os.environ['OMP_NUM_THREADS']}")
    context.notify(f"resumed at step {start}")

    def at_step(step):
        if step == 5 and start == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

    return loop(config, context, start, at_step)


def without_the_newest(config, context):
    """Find the newest checkpoint damaged, and go on from the one before."""
    say(context, f"{context.checkpoints[1].name}")
    return loop(config, context, int(context.checkpoints[1].name[-8:]))


def mlflow_runs(storage, name):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{storage / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fluxray")
    runs = client.search_runs([experiment.experiment_id], f"tags.`fluxray.run` = '{name}'")
    steps = [[metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] for run in runs]
    return [run.info.status for run in runs], steps


def checkpoints(storage, name):
    from fluxray.runtime.paths import committed_checkpoints

    run_dir = storage / "runs" / name
    on_disk = sorted((path.name for path in run_dir.glob("step_*")), reverse=True)
    assert [path.name for path in committed_checkpoints(run_dir)] == on_disk
    return [int(name[-8:]) for name in on_disk]


def one_rank_hangs(config, context):
    """Fall silent on rank 1 after three steps, which rank 0 waits for in a collective."""
    import torch
    import torch.distributed as dist

    say(context, f"rank {context.rank}")
    for step in range(1, 9):
        if context.rank == 1 and step == 4:
            time.sleep(10_000)
        dist.all_reduce(torch.ones(1))
        context.heartbeat(step)
        time.sleep(1.1)  # a heartbeat is sent once a second
    raise AssertionError("unreachable")


def launch_hanging(storage):
    """Return how a run of which one rank hangs is explained, and the seconds that it took."""
    from fluxray.runtime.outcome import FailedError

    asked = {"resources.num_workers": 2, "resources.max_failures": 0, "resources.collective_timeout_s": 9, "batch.micro_size": 4}
    start = time.monotonic()
    with pytest.raises(
        FailedError, match=r"^run hung: worker 0 failed: .*[Tt]imed out.* \(worker 1 has said nothing since step"
    ) as end:
        launch(configure(storage, "hung", **asked), one_rank_hangs)
    return str(end.value), time.monotonic() - start


@pytest.fixture(scope="module")
def hung(cluster, storage):
    """That run, begun before the others and going on beside them: most of its time is waiting."""
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(launch_hanging, storage)
        attempts = storage / "runs" / "hung" / "attempts.txt"
        while not ended.done() and not (attempts.exists() and len(attempts.read_text().splitlines()) == 2):
            time.sleep(0.1)  # its time limit reaches its workers by the environment of this process
        yield ended


def test_what_the_cluster_cannot_hold_is_refused_at_once(cluster, tmp_path):
    start = time.monotonic()
    with pytest.raises(PlanError, match=r"resources\.gpu: 1000 workers of 1 GPU .* has 0 GPUs and 2 CPUs on 1 node"):
        launch(configure(tmp_path, "huge", **{"resources.num_workers": 1000, "resources.gpu": 1}), killed_once)
    assert time.monotonic() - start < 20, "most of it is the first import"
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("hung")
def test_a_killed_worker_goes_on_from_the_last_commit(cluster, storage, capsys):
    done = launch(configure(storage, "killed", **{"resources.max_failures": 1}), killed_once)
    assert done.summary.step == 8
    starts = [int(line.split()[0]) for line in said(storage, "killed")]
    assert starts[0] == 0
    assert starts[1:] in ([4], [2]), "what was not committed yet is done again"
    assert said(storage, "killed")[0].split()[1] == "1"
    assert checkpoints(storage, "killed") == [8, 6]
    assert mlflow_runs(storage, "killed") == (["FINISHED"], [[1, 2, 3, 4, 5, 6, 7, 8]])
    out = capsys.readouterr().out
    assert f"resumed at step {starts[1]}\n" in out
    assert "step 8/8  loss 0.1250  100 tokens/s" in out


def test_a_finished_run_is_prolonged_in_the_same_folder_and_mlflow_run(cluster, storage):
    """Its newest checkpoint is damaged: written anew, it must keep its one place in Ray's list."""
    done = launch(configure(storage, "killed", **{"train.num_steps": 12, "resources.max_failures": 0}), without_the_newest)
    assert said(storage, "killed")[-1] == "step_00000006"
    assert done.summary.checkpoint == str(storage / "runs" / "killed" / "step_00000012")
    assert checkpoints(storage, "killed") == [12, 10]
    assert mlflow_runs(storage, "killed") == (["FINISHED"], [list(range(1, 13))])


def from_the_newest(config, context):
    say(context, context.checkpoints[0].name)
    return loop(config, context, int(context.checkpoints[0].name[-8:]))


@pytest.fixture(scope="module")
def fetched(cluster, storage):
    """A run whose checkpoint is in its mirror alone, and whose tracking server is not there; and what it said."""
    import torch

    from fluxray import checkpoint
    from fluxray.objectstore import open_store
    from fluxray.protocols import RunState, Schedule, StateItem
    from fluxray.runtime.mirror import Mirror

    (storage / "mirror").mkdir()
    mirror = Mirror(open_store(f"file://{storage}/mirror"), "fetched")
    state = RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=4)
    saved = checkpoint.save(storage / "other", state, [StateItem("weights", "w", (4,), 0, torch.ones(4))])
    mirror.send(saved, saved.name, 0, lambda _: None)
    mirror.commit(saved, saved.name)
    places = {"checkpoint.mirror": f"file://{storage}/mirror", "tracking.uri": "http://127.0.0.1:9"}
    with redirect_stdout(io.StringIO()) as out:
        done = launch(configure(storage, "fetched", **places), from_the_newest)
    return done, out.getvalue()


def test_what_is_fetched_from_the_mirror_counts_for_ray_and_is_pruned_like_the_others(fetched, storage):
    assert f"fetched step_00000004 from file://{storage}/mirror/fetched\n" in fetched[1]
    assert said(storage, "fetched") == ["step_00000004"]
    assert checkpoints(storage, "fetched") == [8, 6], "4 was deleted, so Ray knew it"


def test_a_run_without_its_tracking_server_is_a_run(fetched):
    done, out = fetched
    assert done.summary.step == 8
    assert out.count("does not answer") == 1
    assert "has not got 8 points and 2 other records of run fetched yet (connection refused)" in out


def broken(config, context):
    raise ZeroDivisionError(f"boom at {newest(context)}")


def test_a_failed_evaluation_is_explained_and_leaves_the_run_as_it_is(cluster, storage, capsys):
    from fluxray.runtime.launch import evaluate
    from fluxray.runtime.outcome import FailedError

    run_dir = storage / "runs" / "killed"
    before = {path.relative_to(run_dir) for path in run_dir.rglob("*")}
    with pytest.raises(
        FailedError, match=r"^run killed: worker 0 failed: ZeroDivisionError: boom at 12; .*; try again$"
    ) as failure:
        evaluate(run_dir, run=broken)
    assert "\n" not in str(failure.value)
    assert capsys.readouterr().out.startswith("evaluating killed: starting\n"), "what takes long says so at once"
    assert "Traceback" in (run_dir / "failure.txt").read_text()
    assert {path.relative_to(run_dir) for path in run_dir.rglob("*")} - before == {Path("failure.txt")}
    assert mlflow_runs(storage, "killed")[0] == ["FINISHED"]


def until_asked_to_stop(config, context):
    """Train without end, asking for the stop itself as a signal to the driver would."""
    start = newest(context)
    say(context, str(start))
    for step in range(start + 1, 1000):
        context.report(Report(step, {"train/loss": 1 / step}))
        if step == 3 and start == 0:
            os.kill(int((context.run_dir / "driver.pid").read_text()), signal.SIGTERM)
        if context.heartbeat(step) or (start and step >= config.train.num_steps):
            break
        time.sleep(0 if start else 0.1)
    last = save(context, step)
    context.report(Report(step, {}, SavedCheckpoint(last, lambda: time.sleep(1) or 1.0)))
    stopped = step < config.train.num_steps
    return RunSummary(step, 0.5, None if stopped else 1.0, None if stopped else 2.7, str(last))


def test_a_signal_lets_the_run_save_and_the_same_command_goes_on(cluster, storage, capsys):
    from fluxray.runtime.outcome import StoppedError

    config = configure(storage, "stopped", **{"train.num_steps": 30})
    (storage / "runs" / "stopped").mkdir(parents=True)
    (storage / "runs" / "stopped" / "driver.pid").write_text(str(os.getpid()))
    with pytest.raises(StoppedError, match=r"^run stopped was stopped at step \d+ and saved; the same command with name=stopped"):
        launch(config, until_asked_to_stop)
    assert "\nstopping: " in capsys.readouterr().out
    (saved,) = checkpoints(storage, "stopped")
    assert mlflow_runs(storage, "stopped")[0] == ["KILLED"]
    done = launch(config, until_asked_to_stop)
    assert done.summary.step == 30
    assert said(storage, "stopped") == ["0", str(saved)]
    assert mlflow_runs(storage, "stopped") == (["FINISHED"], [list(range(1, 31))])


def short_of_memory(config, context):
    """Have not the memory on rank 1 at step 5, while rank 0 waits for it."""
    import torch.distributed as dist

    from fluxray.errors import OutOfMemory

    start = newest(context)
    say(context, f"rank {context.rank}, rung {context.rung}, from step {start}")
    for step in range(start + 1, config.train.num_steps + 1):
        if (step, context.rung, context.rank) == (5, 0, 1):
            raise OutOfMemory(f"in step {step} (rank {context.rank})")
        dist.barrier()
        context.report(Report(step, {"train/loss": 1 / step}))
        if step % config.checkpoint.every_steps == 0:
            saved = save(context, step) if context.rank == 0 else context.run_dir / f"step_{step:08d}"
            dist.barrier()
            context.report(Report(step, {}, SavedCheckpoint(saved, lambda: 0.0)))
            time.sleep(0.3)
    return RunSummary(config.train.num_steps, 0.5, 1.0, 2.7, None)


def test_where_one_rank_has_not_the_memory_all_go_on_one_rung_lower(cluster, storage, capsys):
    from mlflow import MlflowClient

    asked = {"resources.num_workers": 2, "resources.max_failures": 0, "batch.micro_size": 4, "batch.accumulation_steps": 1}
    done = launch(configure(storage, "short", **asked), short_of_memory)
    assert done.summary.step == 8
    assert sorted(said(storage, "short")) == [
        f"rank {rank}, rung {rung}, from step {start}" for rank in (0, 1) for rung, start in enumerate((0, 4))
    ]
    told = "out of memory in step 5 (rank 1): goes on from step 4 with batch.micro_size=2 batch.accumulation_steps=2"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("out of memory")] == [told]
    assert mlflow_runs(storage, "short") == (["FINISHED"], [list(range(1, 9))])
    client = MlflowClient(tracking_uri=f"sqlite:///{storage / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fluxray").experiment_id], "tags.`fluxray.run` = 'short'")
    assert run.data.tags["oom.1"] == told and "oom.2" not in run.data.tags


def one_rank_at_fault(config, context):
    """Meet a fault on rank 1 while rank 0 waits for it in a collective."""
    import torch.distributed as dist

    say(context, f"rank {context.rank}")
    if context.rank == 0:
        dist.barrier()
        raise AssertionError("unreachable")
    while "rank 0" not in (context.run_dir / "attempts.txt").read_text():
        time.sleep(0.1)
    raise DataError("data.source: 'x' is empty; name another file")


def test_a_fault_on_one_rank_is_code_2_and_is_not_repeated(cluster, storage, monkeypatch, capsys):
    from fluxray.runtime import launch as module

    steps = module.Steps(lambda *_: None, one_rank_at_fault)
    monkeypatch.setattr(module, "train", partial(module.train, steps=steps))
    words = ["name=fault", f"storage={storage}", "resources.num_workers=2", "resources.cpu=0.5", "batch.micro_size=4"]
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--profile", "cpu", "--model", "lm-tiny", *words])
    assert end.value.code == 2
    assert capsys.readouterr().err == "fluxray: error: data.source: 'x' is empty; name another file\n"
    assert sorted(said(storage, "fault")) == ["rank 0", "rank 1"]
    assert mlflow_runs(storage, "fault") == (["FAILED"], [[]])


def test_a_rank_that_hangs_is_named_once_the_time_of_the_others_is_over(hung, storage):
    told, seconds = hung.result()
    assert "begins anew, there is no checkpoint yet" in told and "\n" not in told
    assert seconds > 9
    assert "Traceback" in (storage / "runs" / "hung" / "failure.txt").read_text()


class Occupant:
    def stays(self):
        return True


def saves_and_ends(config, context):
    """Train as all do here, from the beginning."""
    return loop(config, context, newest(context))


def waiting_for_room(storage, name, should_stop):
    """Carry a run out whose driver has connected, and return how it ended; `should_stop` is a trial's."""
    from fluxray.runtime import launch as module
    from fluxray.runtime.board import Assignment, pack
    from fluxray.runtime.prepare import prepare

    run = prepare(configure(storage, name), "run")
    first = Assignment(pack(saves_and_ends), run.config, run.run_dir, run.home.cache, None, None)
    return module._down_the_ladder(run, first, None, should_stop)


def test_a_trial_without_room_is_told_of_by_ray_and_may_stop(cluster, storage, monkeypatch):
    import ray

    from fluxray.runtime.outcome import StoppedError

    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "0.5")
    occupant = ray.remote(Occupant).options(num_cpus=2).remote()
    assert ray.get(occupant.stays.remote())
    with pytest.raises(StoppedError, match="waited for room"):
        waiting_for_room(storage, "waits", lambda: True)
    ray.kill(occupant)
    assert "worker group startup timed out" in (storage / "runs" / "waits" / "failure.txt").read_text()


def test_a_run_gives_up_where_there_is_no_room_and_a_trial_that_is_to_stop_does(storage, monkeypatch):
    from fluxray.runtime import launch as module
    from fluxray.runtime.outcome import NoRoomError, StoppedError

    def no_room(*_):
        raise NoRoomError("run r: the cluster had no room for its workers")

    monkeypatch.setattr(module, "start_board", lambda: None)
    monkeypatch.setattr(module, "fit", no_room)
    with pytest.raises(NoRoomError):
        waiting_for_room(storage, "alone", None)
    with pytest.raises(StoppedError, match=r"^run asked was stopped while it waited for room; .* begins anew"):
        waiting_for_room(storage, "asked", lambda: True)
    tries = []

    def room_at_last(*given):
        tries.append(given)
        return "it ran" if len(tries) == 3 else no_room()

    monkeypatch.setattr(module, "fit", room_at_last)
    assert waiting_for_room(storage, "patient", lambda: False) == "it ran"
