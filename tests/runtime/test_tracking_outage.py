"""A real MLflow server that dies, hangs, dawdles, loses its answers, and comes back."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from mlflow import MlflowClient

from fluxray import cli
from fluxray.config.load import resolve, to_yaml
from fluxray.runtime import delivery, spool, tracking
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.tracking import MetricWriter, finish_run, start_run, sync

START_TIMEOUT_S = 120
TIMEOUT_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`mlflow server` on a database of its own, in a process group of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text()[-3000:])

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def hung(self):
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)


class Proxy:
    """Hands each request on over a connection of its own, keeps the answer back for `delay` seconds, or loses it."""

    def __init__(self, server):
        self.server = server
        self.delay = 0.0
        self.loses = False
        self.num_answers = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self.handle, args=(connection,), daemon=True).start()

    def handle(self, connection):
        with connection, socket.create_connection(("127.0.0.1", self.server.port)) as upstream:
            request = self.read_request(connection)
            upstream.sendall(request.replace(b"Connection: keep-alive", b"Connection: close", 1))
            answer = b"".join(iter(lambda: upstream.recv(65536), b""))
            time.sleep(self.delay)
            self.num_answers += 1
            if not self.loses:
                connection.sendall(answer)

    @staticmethod
    def read_request(connection):
        data = b""
        while b"\r\n\r\n" not in data and (part := connection.recv(65536)):
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(headers.get(b"content-length", 0))
        while len(body) < length:
            body += connection.recv(65536)
        return head + b"\r\n\r\n" + body


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
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    target = begin(where, proxy.uri)
    notices = []
    proxy.delay = 5.0
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
