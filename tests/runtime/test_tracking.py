import errno
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from PIL import Image

from fluxray.config.load import resolve, to_yaml
from fluxray.errors import ConfigError
from fluxray.runtime import delivery, sender, spool, tracking
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.sender import BusyError, Sender
from fluxray.runtime.tracking import MetricWriter, finish_run, start_run, sync, target_of, tracking_uri

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


def prepared(where, name, **overrides):
    """Return configuration and folder of a run that is about to start."""
    config = resolve("cpu", "lm-tiny", {"name": name, "storage": str(where.root), "tracking.system_metrics_s": 0, **overrides})
    run_dir = where.runs / name
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    return config, run_dir


@pytest.fixture
def run(where, request):
    """A new run's target, configuration and folder; the name is the test's."""
    name = request.node.name.replace("[", "-").replace("]", "")
    config, run_dir = prepared(where, name)
    return start_run(config, where, run_dir, None), config, run_dir


def client(target):
    return MlflowClient(tracking_uri=target.uri)


def runs(target):
    """Return the MLflow runs of a target, newest first."""
    experiment = client(target).get_experiment_by_name(target.experiment)
    found = client(target).search_runs([experiment.experiment_id], f"tags.`fluxray.run` = '{target.run_dir.name}'")
    return [run for run in found if run.data.tags["fluxray.run_dir"] == str(target.run_dir)]


def history(target, key):
    run = runs(target)[0]
    return [(metric.step, metric.value) for metric in client(target).get_metric_history(run.info.run_id, key)]


def send(target):
    """Send all that is spooled, now."""
    courier = Sender(target, lambda text: None)
    while courier.send():
        pass
    courier.close()


def log(target, steps, **metrics):
    """Write what a MetricWriter writes, without its thread."""
    appender = spool.Appender(target.folder)
    for step in steps:
        appender.append({"step": step, "time": int(time.time() * 1000), "metrics": metrics or {"train/loss": float(step)}})
    appender.close()


def test_a_new_run_has_parameters_tags_and_config(where, run):
    target, _, run_dir = run
    (found,) = runs(target)
    assert found.info.status == "RUNNING"
    assert found.data.params["optim.lr"] == "0.001"
    assert found.data.params["model.config.hidden_size"] == "256"
    assert found.data.params["data.source"] == "builtin:topics"
    assert found.data.tags["fluxray.run_dir"] == str(run_dir)
    assert {f"version.{name}" for name in ("fluxray", "torch", "ray", "mlflow", "transformers")} <= set(found.data.tags)
    assert found.info.artifact_uri.startswith(where.artifacts.as_uri())
    assert [file.path for file in client(target).list_artifacts(found.info.run_id)] == ["config.yaml"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_run_ends_as_it_did_and_keeps_its_tokenizer(run, status):
    target, _, run_dir = run
    (run_dir / "tokenizer").mkdir()
    (run_dir / "tokenizer" / "tokenizer.json").write_text("{}")
    assert finish_run(target, status, run_dir) is None
    (found,) = runs(target)
    assert found.info.status == status
    assert [file.path for file in client(target).list_artifacts(found.info.run_id, "tokenizer")] == ["tokenizer/tokenizer.json"]


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(where, run):
    target, config, run_dir = run
    finish_run(target, "KILLED", run_dir)
    assert start_run(config, where, run_dir, {"train.num_steps": 300}) == target
    (found,) = runs(target)
    assert found.info.status == "RUNNING"
    assert found.data.tags["resumed.train.num_steps"] == "300"
    start_run(config, where, run_dir, None)
    assert len(runs(target)) == 2, "a folder that was begun anew is another run"


def test_steps_replayed_after_a_resume_are_logged_once(run):
    target = run[0]
    log(target, (1, 2, 3))
    send(target)
    log(target, (2, 3, 4, 5))
    sink = MetricWriter(target, lambda text: None)
    sink.log(4, {"train/loss": 0.0, "train/lr": 0.1})
    sink.close()
    send(target)
    assert history(target, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert history(target, "train/lr") == [(4, 0.1)]


def test_infinity_stays_apart_from_nan(run):
    target = run[0]
    sink = MetricWriter(target, lambda text: None)
    for step, value in enumerate([math.nan, math.inf, -math.inf, 1.0]):
        sink.log(step, {"train/loss": value})
    sink.close()
    send(target)
    values = [value for _, value in history(target, "train/loss")]
    assert [math.isnan(value) for value in values] == [True, True, True, False]
    assert history(target, "train/loss.infinite") == [(1, 1.0), (2, -1.0)]


def test_the_thread_sends_while_training_goes_on(run):
    target = run[0]
    sink = MetricWriter(target, lambda text: None)
    sink.log(1, {"train/loss": 1.0})
    deadline = time.monotonic() + 30
    while delivery.describe_left(target.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert history(target, "train/loss") == [(1, 1.0)]
    sink.close()


def test_a_file_of_the_run_becomes_an_artifact_as_often_as_it_is_published(run):
    target, _, run_dir = run
    for text in ("first", "second"):
        (run_dir / "plan.txt").write_text(text)
        sink = MetricWriter(target, lambda text: None)
        sink.log(1, {"train/loss": 1.0})
        sink.artifact("plan.txt")
        sink.log(2, {"train/loss": 2.0})
        sink.close()
        send(target)
        path = client(target).download_artifacts(runs(target)[0].info.run_id, "plan.txt")
        assert Path(path).read_text() == text
    assert history(target, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_a_picture_of_a_step_is_where_the_pages_look_for_it_once(run):
    target, _, run_dir = run
    picture = run_dir / "samples" / "step_00000200.png"
    picture.parent.mkdir()
    Image.new("RGB", (2048, 512), "red").save(picture)
    for _ in range(2):
        sink = MetricWriter(target, lambda text: None)
        sink.artifact("samples/step_00000200.png")
        sink.close()
        send(target)
    found = runs(target)[0]
    preview, whole = sorted(file.path for file in client(target).list_artifacts(found.info.run_id, "images"))
    assert found.data.tags["mlflow.loggedImages"] == "true"
    assert re.fullmatch(r"images/samples\+step\+200\+timestamp\+\d+\+[\w-]{36}\.png", whole)
    assert preview == whole.removesuffix(".png") + "+compressed.webp"
    assert Path(client(target).download_artifacts(found.info.run_id, whole)).read_bytes() == picture.read_bytes()
    with Image.open(client(target).download_artifacts(found.info.run_id, preview)) as shown:
        assert shown.size == (1024, 256)


def test_the_machine_is_read_by_the_second_and_a_resume_goes_on(where):
    config, run_dir = prepared(where, "machine", **{"tracking.system_metrics_s": 1})
    target = start_run(config, where, run_dir, None)
    for _ in range(2):
        sink = MetricWriter(target, lambda text: None)
        time.sleep(3.5)
        sink.close()
    send(target)
    steps = [step for step, _ in history(target, "system/memory_gib")]
    assert steps == sorted(set(steps))
    assert len(steps) >= 4
    assert steps[-1] < 60


def test_a_process_killed_between_sending_and_acknowledging_sends_nothing_twice(run):
    target = run[0]
    log(target, range(1, 1501))
    code = f"""
import os, signal
from pathlib import Path
from fluxray.runtime import sender, spool
target = sender.Target({target.uri!r}, {target.experiment!r}, Path({str(target.run_dir)!r}), Path({str(target.home)!r}))
spool.acknowledge = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sender.Sender(target, print).send()
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(history(target, "train/loss")) == 1000
    lines = []
    assert sync([target.run_dir], lines.append) == 0
    assert lines == [f"run {target.run_dir.name}: 1,500 points sent to MLflow at {target.uri}"]
    assert [step for step, _ in history(target, "train/loss")] == list(range(1, 1501))
    assert sync([target.run_dir], lines.append) == 0
    assert len(lines) == 1, "nothing is left, nothing is said"


def test_only_one_process_sends_at_a_time(run):
    target = run[0]
    first = Sender(target, lambda text: None)
    first.send()
    log(target, [1])
    lines = []
    with pytest.raises(BusyError):
        Sender(target, lambda text: None).send()
    assert sync([target.run_dir], lines.append) == 1
    assert lines == [
        f"run {target.run_dir.name}: 1 point left to send: another sender of this run is at work or waits for an answer"
    ]
    first.close()
    assert sync([target.run_dir], lines.append) == 0


def test_a_run_starts_and_ends_without_a_server_and_says_so_once(where, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "RETRY_AFTER_S", 0.1)
    config, run_dir = prepared(where, "alone", **{"tracking.uri": NOWHERE})
    target = start_run(config, where, run_dir, None)
    (line,) = capsys.readouterr().out.splitlines()
    kept = f"its record is kept in {run_dir / 'tracking'} and sent as soon as MLflow answers"
    assert line == f"MLflow at {NOWHERE} does not answer (connection refused): run alone starts without it; {kept}"
    notices = []
    sink = MetricWriter(target, notices.append)
    sink.log(1, {"train/loss": 1.0, "train/lr": 1.0})
    time.sleep(0.5)
    sink.close()
    assert notices == [], "the user knows"
    assert finish_run(target, "FINISHED", run_dir) == (
        f"MLflow at {NOWHERE} has not got 2 points and 2 other records of run alone yet (connection refused); "
        f"`fluxray sync {run_dir}` sends them"
    )
    assert sync([run_dir], notices.append) == 1
    assert notices == ["run alone: 2 points and 2 other records left to send: connection refused"]


def test_an_outage_is_said_once_and_so_is_its_end(run, monkeypatch):
    target = run[0]
    monkeypatch.setattr(tracking, "RETRY_AFTER_S", 0.1)
    monkeypatch.setattr(tracking, "SEND_EVERY_S", 0.1)
    real, down, calls = Sender.send, True, 0

    def flaky(self):
        nonlocal calls
        calls += 1
        if down:
            raise ConnectionError("refused")
        return real(self)

    monkeypatch.setattr(Sender, "send", flaky)
    notices = []
    sink = MetricWriter(target, notices.append)
    for step in range(20):
        sink.log(step, {"train/loss": 1.0})
        time.sleep(0.05)
    assert calls > 3
    assert len(notices) == 1
    assert "does not answer (ConnectionError: refused): training goes on" in notices[0]
    down = False
    deadline = time.monotonic() + 30
    while len(notices) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    sink.close()
    assert notices[1:] == ["MLflow answers again and gets what was kept meanwhile"]
    monkeypatch.undo()
    send(target)
    assert [step for step, _ in history(target, "train/loss")] == list(range(20))


def test_a_folder_that_cannot_be_written_is_said_and_made_up_for(run, monkeypatch):
    target = run[0]
    notices = []
    sink = MetricWriter(target, notices.append)
    append = spool.Appender.append

    def full(self, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool.Appender, "append", full)
    for step in (1, 2):
        sink.log(step, {"train/loss": 1.0})
    monkeypatch.setattr(spool.Appender, "append", append)
    sink.log(3, {"train/loss": 1.0})
    sink.close()
    send(target)
    assert [step for step, _ in history(target, "train/loss")] == [1, 2, 3]
    assert len(notices) == 1
    assert "No space left on device): metrics are kept in memory" in notices[0]


def test_an_artifact_that_cannot_be_stored_does_not_hold_up_what_follows(run, monkeypatch):
    target, _, run_dir = run
    (run_dir / "tokenizer").mkdir()

    def refused(*_):
        raise PermissionError("artifacts are read-only")

    monkeypatch.setattr(MlflowClient, "log_artifacts", refused)
    appender = spool.Appender(target.folder)
    appender.append({"artifact": "tokenizer"})
    appender.close()
    log(target, [1])
    told = []
    courier = Sender(target, told.append)
    while courier.send():
        pass
    courier.close()
    assert history(target, "train/loss") == [(1, 1.0)]
    assert told == [
        f"MLflow at {target.uri} cannot store tokenizer (PermissionError: artifacts are read-only): it stays in {run_dir}"
    ]


@pytest.mark.parametrize(
    ("uri", "in_home"),
    [
        (None, True),
        ("sqlite:////elsewhere/mlflow.db", True),
        ("postgresql://ann@db/mlflow", True),
        ("postgresql+psycopg2://db/mlflow", True),
        ("mysql+pymysql://db/mlflow", True),
        ("http://mlflow:5000", False),
        ("databricks", False),
    ],
)
def test_new_experiments_of_a_database_keep_their_files_in_the_home(where, uri, in_home):
    config = resolve(overrides={} if uri is None else {"tracking.uri": uri})
    target = target_of(config, where, where.runs / "x")
    assert target.artifacts == (where.artifacts / "fluxray" if in_home else None)
    assert (target.home is not None) == (uri is None or uri.startswith("sqlite"))


def test_files_of_a_run_in_a_database_server_do_not_go_where_it_happens_to_run(where, monkeypatch, tmp_path):
    connect = sender.connect
    monkeypatch.setattr(sender, "connect", lambda uri: connect(f"sqlite:///{where.database}"))
    monkeypatch.chdir(tmp_path)
    uri = "postgresql://ann@db/mlflow"
    config, run_dir = prepared(where, "server", **{"tracking.uri": uri, "tracking.experiment": "in-a-server"})
    target = start_run(config, where, run_dir, None)
    send(target)
    location = client(target_of(resolve(), where, run_dir)).get_experiment_by_name("in-a-server").artifact_location
    assert location == (where.artifacts / "in-a-server").as_uri()
    assert [path.name for path in (where.artifacts / "in-a-server").rglob("*.yaml")] == [CONFIG_FILE]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("mysql+aiomysql", r"needs the Python package aiomysql; install it, or drop the key$"),
        ("postgresql+pigeon", r"cannot be used \(NoSuchModuleError: .*pigeon\); correct or drop the key$"),
    ],
)
def test_a_database_whose_driver_is_not_there_is_refused_by_name(where, scheme, reason):
    config, run_dir = prepared(where, scheme.replace("+", "-"), **{"tracking.uri": f"{scheme}://ann@db/mlflow"})
    with pytest.raises(ConfigError, match=r"^tracking\.uri: [a-z+]+://\*\*\*@db/mlflow " + reason):
        start_run(config, where, run_dir, None)


def test_a_password_is_never_shown_or_written_down(where, capsys):
    uri = "http://ann:sesame@127.0.0.1:9"
    config, run_dir = prepared(where, "secret", **{"tracking.uri": uri})
    target = start_run(config, where, run_dir, {"tracking.uri": uri})
    log(target, [1])
    told = str(finish_run(target, "FAILED", run_dir))
    lines = []
    sync([run_dir], lines.append)
    shown = capsys.readouterr().out + told + "".join(lines) + repr(target)
    written = "".join(path.read_text() for path in target.folder.iterdir())
    assert "http://***@127.0.0.1:9" in shown
    assert "http://***@127.0.0.1:9" in written
    assert "sesame" not in shown + written


def test_the_config_that_mlflow_gets_is_masked(run):
    target, _, run_dir = run
    with (run_dir / CONFIG_FILE).open("a") as file:
        file.write("# http://ann:sesame@host/x\n")
    finish = spool.Appender(target.folder)
    finish.append({"artifact": CONFIG_FILE})
    finish.close()
    send(target)
    text = MlflowClient(target.uri).download_artifacts(runs(target)[0].info.run_id, CONFIG_FILE, str(run_dir))
    with open(text) as file:
        assert "# http://***@host/x\n" in file.read()


def test_uris(where):
    assert tracking_uri(resolve(), where) == f"sqlite:///{where.database}"
    assert tracking_uri(resolve(overrides={"tracking.uri": "http://host:1"}), where) == "http://host:1"
    with pytest.raises(ConfigError, match="is relative"):
        tracking_uri(resolve(overrides={"tracking.uri": "sqlite:///mlflow.db"}), where)


def test_the_environment_cannot_point_elsewhere(where, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "deadbeef")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    config, run_dir = prepared(where, "elsewhere")
    target = start_run(config, where, run_dir, None)
    assert runs(target)[0].info.run_name == config.name
    assert "MLFLOW_RUN_ID" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0", "MLflow must not repeat a call by itself"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tracking.experiment": "gone"}, r"^tracking\.experiment: 'gone' has been deleted"),
        ({"tracking.uri": "htp://x"}, r"^tracking\.uri: htp://x cannot be used .*; correct or drop the key$"),
        ({"tracking.uri": "sqlite:////proc/mlflow.db"}, r"^tracking\.uri: sqlite:////proc/mlflow.db cannot be written"),
    ],
    ids=["experiment", "scheme", "database"],
)
def test_what_waiting_does_not_mend_is_refused_at_start(where, run, overrides, message, tmp_path):
    api = client(run[0])
    if api.get_experiment_by_name("gone") is None:
        api.delete_experiment(api.create_experiment("gone"))
    config, run_dir = prepared(where, tmp_path.name, **overrides)
    with pytest.raises(ConfigError, match=message):
        start_run(config, where, run_dir, None)


def test_one_call_takes_what_mlflow_takes(run, monkeypatch):
    target = run[0]
    sizes = []
    real = MlflowClient.log_batch

    def counted(self, run_id, metrics=(), **rest):
        sizes.append(len(metrics))
        return real(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    log(target, range(1, 501), **{"train/loss": 1.0, "train/lr": math.inf, "train/grad_norm": 1.0})
    sizes.clear()
    send(target)
    assert max(sizes, default=0) <= sender.CHUNK["metrics"]
    assert len(history(target, "train/lr.infinite")) == 500


def test_top_shows_a_run_as_its_database_has_it(run, where, capsys):
    from fluxray.runtime.top import show

    target, config, _ = run
    writer = MetricWriter(target, print)
    for step in range(1, 8):
        writer.log(step, {"train/loss": 1 / step, "train/lr": 0.1, "perf/tokens_per_s": 1000.0, "memory/host_gib": 1.5})
    writer.close()
    assert delivery.deliver(target, 60, print) is None
    capsys.readouterr()
    show(where, None, once=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(str(config.name)))
    assert line.split()[1:7] == ["7/200", "0.1429", "1,000", "1.5", "GiB", "-"]
    finish_run(target, "FINISHED", target.run_dir)
    show(where, target.uri, once=True)
    assert str(config.name) not in capsys.readouterr().out
