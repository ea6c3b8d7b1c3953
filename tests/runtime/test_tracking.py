import math
import os

import pytest
from mlflow import MlflowClient

from fluxray.config.load import resolve
from fluxray.errors import ConfigError
from fluxray.runtime import tracking
from fluxray.runtime.paths import Home
from fluxray.runtime.tracking import MetricWriter, Target, finish_run, start_run, tracking_uri


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def run(where, request):
    """A new run's target, configuration and folder; the name is the test's."""
    name = request.node.name.replace("[", "-").replace("]", "")
    config = resolve("cpu", "lm-tiny", {"name": name, "storage": str(where.root)})
    run_dir = where.runs / name
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("name: x\n")
    return start_run(config, where, run_dir, None), config, run_dir


def client(target):
    return MlflowClient(tracking_uri=target.uri)


def history(target, key):
    return [(metric.step, metric.value) for metric in client(target).get_metric_history(target.run_id, key)]


def writer(target, notices=None, clock=None):
    return MetricWriter(target, (notices if notices is not None else []).append, clock or Clock())


def test_a_new_run_has_parameters_tags_and_config(where, run):
    target, _, run_dir = run
    found = client(target).get_run(target.run_id)
    assert found.info.status == "RUNNING"
    assert found.data.params["optim.lr"] == "0.001"
    assert found.data.params["model.config.hidden_size"] == "256"
    assert found.data.params["data.source"] == "builtin:topics"
    assert found.data.tags["fluxray.run_dir"] == str(run_dir)
    assert {f"version.{name}" for name in ("fluxray", "torch", "ray", "mlflow", "transformers")} <= set(found.data.tags)
    assert found.info.artifact_uri.startswith(where.artifacts.as_uri())
    assert [file.path for file in client(target).list_artifacts(target.run_id)] == ["config.yaml"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_run_ends_as_it_did_and_keeps_its_tokenizer(run, status):
    target, _, run_dir = run
    (run_dir / "tokenizer").mkdir()
    (run_dir / "tokenizer" / "tokenizer.json").write_text("{}")
    assert finish_run(target, status, run_dir) is None
    assert client(target).get_run(target.run_id).info.status == status
    assert [file.path for file in client(target).list_artifacts(target.run_id, "tokenizer")] == ["tokenizer/tokenizer.json"]


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(where, run):
    target, config, run_dir = run
    finish_run(target, "KILLED", run_dir)
    again = start_run(config, where, run_dir, {"train.num_steps": 300})
    assert again == target
    found = client(target).get_run(target.run_id)
    assert found.info.status == "RUNNING"
    assert found.data.tags["resumed.train.num_steps"] == "300"
    assert start_run(config, where, run_dir, None) != target, "a folder that was begun anew is another run"


def test_steps_replayed_after_a_resume_are_logged_once(run):
    target = run[0]
    first = writer(target)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    first.flush()
    second = writer(target)
    for step in (2, 3, 4):
        second.log(step, {"train/loss": float(step), "train/lr": 0.1})
    second.flush()
    assert history(target, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [step for step, _ in history(target, "train/lr")] == [2, 3, 4]


def test_many_points_are_sent_in_pieces(run):
    target = run[0]
    sink = writer(target)
    sink.log(1, {"train/loss": 1.0})
    for step in range(2, 1503):
        sink.log(step, {"train/loss": 1.0, "train/lr": 2.0})
    sink.flush()
    assert [step for step, _ in history(target, "train/loss")] == list(range(1, 1503))


def test_infinity_stays_apart_from_nan(run):
    target = run[0]
    sink = writer(target)
    for step, value in enumerate([math.nan, math.inf, -math.inf, 1.0]):
        sink.log(step, {"train/loss": value})
    sink.flush()
    values = [value for _, value in history(target, "train/loss")]
    assert [math.isnan(value) for value in values] == [True, True, True, False]
    assert history(target, "train/loss.infinite") == [(1, 1.0), (2, -1.0)]


class Flaky:
    """A client whose log_batch fails while `down`."""

    def __init__(self, real):
        self.real, self.down, self.calls = real, True, 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def log_batch(self, *args, **kwargs):
        self.calls += 1
        if self.down:
            raise ConnectionError("refused")
        return self.real.log_batch(*args, **kwargs)


def test_an_outage_is_said_once_loses_nothing_and_is_not_waited_for(run, monkeypatch):
    target = run[0]
    flaky = Flaky(tracking._client(target.uri))
    monkeypatch.setattr(tracking, "_client", lambda uri: flaky)
    clock, notices = Clock(), []
    sink = writer(target, notices, clock)
    for step in range(1, 101):
        clock.now += 1
        sink.log(step, {"train/loss": 1.0})
    assert flaky.calls == 4, "one attempt every 30 s"
    assert len(notices) == 1
    assert "refused" in notices[0]
    flaky.down = False
    clock.now += 31
    sink.log(101, {"train/loss": 1.0})
    assert [step for step, _ in history(target, "train/loss")] == list(range(1, 102))
    assert notices[1:] == ["MLflow answers again; the points kept meanwhile are logged"]


def test_points_kept_are_bounded(run, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_PENDING", 10)
    target = run[0]
    clock = Clock()
    sink = MetricWriter(target, lambda text: None, clock)
    sink._send_at = clock.now + 1e6
    for step in range(100):
        sink.log(step, {"train/loss": 0.0})
    sink.flush()
    assert [step for step, _ in history(target, "train/loss")] == list(range(90, 100))


def test_a_server_that_is_not_there_is_refused_at_start_and_tolerated_later(where, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = resolve("cpu", "lm-tiny", {"name": "r", "tracking.uri": "http://127.0.0.1:9"})
    with pytest.raises(ConfigError, match=r"^tracking\.uri: http://127\.0\.0\.1:9 cannot be used .*drop the key$"):
        start_run(config, where, tmp_path, None)
    notices = []
    sink = writer(Target("http://127.0.0.1:9", "x"), notices)
    sink.log(1, {"train/loss": 1.0})
    assert len(notices) == 1
    assert "was not told that the run is FINISHED" in str(finish_run(Target("http://127.0.0.1:9", "x"), "FINISHED", tmp_path))


def test_uris(where):
    assert tracking_uri(resolve(), where) == f"sqlite:///{where.database}"
    assert tracking_uri(resolve(overrides={"tracking.uri": "http://host:1"}), where) == "http://host:1"
    with pytest.raises(ConfigError, match="is relative"):
        tracking_uri(resolve(overrides={"tracking.uri": "sqlite:///mlflow.db"}), where)


def test_the_environment_cannot_point_elsewhere(where, run, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "deadbeef")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    _, config, run_dir = run
    target = start_run(config, where, run_dir, None)
    assert client(target).get_run(target.run_id).info.run_name == config.name
    assert "MLFLOW_RUN_ID" not in os.environ


def test_a_deleted_experiment_is_named(where, run):
    target, config, run_dir = run
    api = client(target)
    experiment = api.create_experiment("gone")
    api.delete_experiment(experiment)
    config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"experiment": "gone"})})
    with pytest.raises(ConfigError, match=r"^tracking\.experiment: 'gone' has been deleted"):
        start_run(config, where, run_dir, None)
