"""A real MLflow server that dies, hangs, dawdles, loses its answers, and comes back."""

import re
import threading
import time

import pytest
from mlflow import MlflowClient

from fluxray import cli
from fluxray.config.load import resolve, to_yaml
from fluxray.runtime import delivery, spool, tracking
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.tracking import MetricWriter, finish_run, start_run, sync
from tests.runtime.servers import Proxy, Server

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server)
    yield proxy
    proxy.listener.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Wait for shorter than users do."""
    monkeypatch.setattr(tracking, "RETRY_AFTER_S", 0.5)
    monkeypatch.setattr(tracking, "SEND_EVERY_S", 0.1)
    monkeypatch.setattr(tracking, "CLOSE_S", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXRAY_HOME", str(tmp_path))
    return Home(tmp_path)


def begin(where, uri, name="r"):
    keys = {"name": name, "storage": str(where.root), "tracking.uri": uri, "tracking.system_metrics_s": 0}
    config = resolve("cpu", "lm-tiny", {**keys, "tracking.experiment": where.root.name})
    run_dir = where.runs / name
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    return start_run(config, where, run_dir, None)


def log_quickly(writer, steps):
    """Log and return the seconds that it took the caller."""
    start = time.perf_counter()
    for step in steps:
        writer.log(step, {"train/loss": 1 / step, "train/lr": 0.1})
    return time.perf_counter() - start


def wait_until_sent(target):
    deadline = time.monotonic() + TIMEOUT_S
    while delivery.describe_left(target.folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def recorded(server, target):
    """Return the run as the server has it, and the steps of its two keys."""
    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name(target.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`fluxray.run` = '{target.run_dir.name}'")
    keys = ("train/loss", "train/lr")
    return run, [[metric.step for metric in client.get_metric_history(run.info.run_id, key)] for key in keys]


def test_a_hung_server_costs_training_nothing_and_the_end_little(server, where, monkeypatch):
    monkeypatch.setattr(delivery, "PATIENCE_S", 1.0)
    target = begin(where, server.uri)
    notices = []
    writer = MetricWriter(target, notices.append)
    log_quickly(writer, range(1, 11))
    with server.hung():
        writer.log(11, {"train/loss": 1.0, "train/lr": 0.1})
        assert log_quickly(writer, range(12, 1012)) < 2
        deadline = time.monotonic() + TIMEOUT_S
        while not notices and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(notices) == 1
        assert "does not answer (no answer in time)" in notices[0]
        start = time.monotonic()
        writer.close()
        told = finish_run(target, "KILLED", target.run_dir)
        assert time.monotonic() - start < 8
        assert re.search(r"points and 1 other record of run r yet \((no answer in 1 s|another sender .*)\); ", str(told))
    for thread in threading.enumerate():  # calls that hung end, and let another sender have its turn
        if thread.name.startswith("fluxray-"):
            thread.join(10)
    assert recorded(server, target)[0].info.status == "RUNNING"
    with pytest.raises(SystemExit) as end:
        cli.main(["sync", "r"])
    assert end.value.code == 0
    run, steps = recorded(server, target)
    assert run.info.status == "KILLED"
    assert steps == [list(range(1, 1012))] * 2


def test_a_server_that_dies_and_comes_back_has_every_point_once(server, where, capsys):
    before = begin(where, server.uri, "before")
    notices = []
    writer = MetricWriter(before, notices.append)
    log_quickly(writer, range(1, 101))
    server.kill()
    capsys.readouterr()
    meanwhile = begin(where, server.uri, "meanwhile")
    assert capsys.readouterr().out.count("\n") == 1
    other = MetricWriter(meanwhile, notices.append)
    assert log_quickly(other, range(1, 101)) < 2
    other.close()
    ended = time.time()
    assert "has not got 200 points and 2 other records of run meanwhile yet" in str(
        finish_run(meanwhile, "FAILED", meanwhile.run_dir)
    )
    assert log_quickly(writer, range(101, 1101)) < 2
    with pytest.raises(SystemExit) as end:
        cli.main(["sync"])
    assert end.value.code == 1
    shown = capsys.readouterr()
    assert "run meanwhile: 200 points and 2 other records left to send: connection refused" in shown.out
    assert shown.err == "fluxray: failed: MLflow lacks something of 2 runs; once it answers, sync again\n"
    server.start()
    server.wait()
    wait_until_sent(before)
    writer.close()
    assert finish_run(before, "FINISHED", before.run_dir) is None
    assert len(notices) == 2
    assert "answers again" in notices[1]
    run, steps = recorded(server, before)
    assert run.info.status == "FINISHED"
    assert steps == [list(range(1, 1101))] * 2
    with pytest.raises(SystemExit) as end:
        cli.main(["sync"])
    assert end.value.code == 0
    assert (
        capsys.readouterr().out
        == f"run meanwhile: 200 points and 2 other records sent to MLflow at {server.uri}\nMLflow has everything\n"
    )
    run, steps = recorded(server, meanwhile)
    assert run.info.status == "FAILED"
    assert abs(run.info.end_time / 1000 - ended) < 5, "it ended then, not when it was told"
    assert run.data.params["optim.lr"] == "0.001"
    assert [file.path for file in MlflowClient(server.uri).list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert steps == [list(range(1, 101))] * 2


def test_a_slow_server_gets_everything_in_its_own_time(proxy, server, where, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "6")
    monkeypatch.setattr(delivery, "PATIENCE_S", 2.0)
    target = begin(where, proxy.uri)
    notices = []
    proxy.delay = 2.0
    writer = MetricWriter(target, notices.append)
    assert log_quickly(writer, range(1, 401)) < 2
    wait_until_sent(target)
    proxy.delay = 0.0
    writer.close()
    assert finish_run(target, "FINISHED", target.run_dir) is None
    run, steps = recorded(server, target)
    assert notices == []
    assert run.info.status == "FINISHED"
    assert steps == [list(range(1, 401))] * 2


def test_lost_answers_double_nothing(proxy, server, where):
    target = begin(where, proxy.uri)
    writer = MetricWriter(target, lambda text: None)
    writer.log(1, {"train/loss": 1.0, "train/lr": 0.1})
    wait_until_sent(target)
    proxy.loses, proxy.num_answers = True, 0
    log_quickly(writer, range(2, 402))
    deadline = time.monotonic() + TIMEOUT_S
    while proxy.num_answers < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    proxy.loses = False
    wait_until_sent(target)
    writer.close()
    assert recorded(server, target)[1] == [list(range(1, 402))] * 2


def test_a_spool_of_20_000_points_is_replayed(server, where):
    target = begin(where, server.uri)
    appender = spool.Appender(target.folder)
    for step in range(1, 10_001):
        appender.append({"step": step, "time": step, "metrics": {"train/loss": 1 / step, "train/lr": 0.1}})
    appender.close()
    with next(target.folder.glob("00000002.jsonl")).open("ab") as file:
        file.write(b'{"step":10001,"time":1,"met')  # the machine failed here
    lines = []
    assert sync([target.run_dir], lines.append) == 0
    assert lines == [f"run r: 20,000 points sent to MLflow at {server.uri}"]
    assert recorded(server, target)[1] == [list(range(1, 10_001))] * 2


def test_top_asks_the_server_of_the_runs_here(server, where, capsys):
    target = begin(where, server.uri, "seen")
    writer = MetricWriter(target, print)
    log_quickly(writer, range(1, 6))
    wait_until_sent(target)
    writer.close()
    capsys.readouterr()
    for words in (["top"], ["top", "--once", f"--tracking={server.uri}", "--storage=/nowhere"]):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 0
        assert re.search(r"^seen +5/200 +0\.2000 ", capsys.readouterr().out, re.MULTILINE)
    finish_run(target, "FINISHED", target.run_dir)
