"""`fluxray top`: what is running, from what MLflow answers; a real database stands in test_tracking.py."""

import io
from types import SimpleNamespace

import pytest

from fluxray.config.load import resolve, to_yaml
from fluxray.errors import ConfigError
from fluxray.runtime import top
from fluxray.runtime.outcome import FailedError
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.top import NOTHING, Watch, aligned, places, read_running, show

NOW = 1_000_000.0
PARAMS = {
    "train.num_steps": "400",
    "data.packing": "true",
    "data.max_slice": "512",
    "batch.micro_size": "8",
    "batch.accumulation_steps": "4",
    "resources.num_workers": "2",
}
METRICS = {
    "train/lr": 1e-4,
    "train/loss": 3.21987,
    "perf/tokens_per_s": 32768.0,
    "memory/reserved_gib": 40.04,
    "system/gpu0_percent": 90.0,
    "system/gpu1_percent": 97.0,
    "system/cpu_percent": 5.0,
}


def mlflow_run(name, step=100, started=NOW - 600, age=3.0, tags=None, metrics=METRICS, params=PARAMS):
    """A run as MLflow's client gives it, of which everything was recorded `age` seconds ago."""
    points = [SimpleNamespace(key=key, value=value, step=step, timestamp=(NOW - age) * 1000) for key, value in metrics.items()]
    proto = SimpleNamespace(data=SimpleNamespace(metrics=points))
    data = SimpleNamespace(tags={"fluxray.run": name, **(tags or {})}, params=params)
    return SimpleNamespace(info=SimpleNamespace(start_time=started * 1000), data=data, to_proto=lambda: proto)


class Client:
    def __init__(self, *runs):
        self.runs = runs

    def search_experiments(self):
        return [SimpleNamespace(experiment_id="1"), SimpleNamespace(experiment_id="2")]

    def search_runs(self, experiments, condition, max_results):
        assert experiments == ["1", "2"] and condition == "attributes.status = 'RUNNING'"
        return list(self.runs)


@pytest.fixture
def served(monkeypatch):
    """Let any address be answered by these runs, or by an exception."""

    def serve(**answers):
        def connect(uri):
            if isinstance(answers[uri], Exception):
                raise answers[uri]
            return Client(*answers[uri])

        monkeypatch.setattr(top, "connect", connect)

    return serve


def test_a_row_says_how_far_how_good_how_fast_and_how_long_still(served):
    served(here=[mlflow_run("first")])
    rows, notes = Watch(["here"]).look(NOW)
    assert notes == []
    assert rows == [("first", "100/400", "3.2199", "32,768", "40.0 GiB", "94%", "5:00", "0:03 ago")]
    assert aligned(rows) == [
        "run       step    loss  tokens/s    memory  GPU  left     heard",
        "first  100/400  3.2199    32,768  40.0 GiB  94%  5:00  0:03 ago",
    ]


def test_what_is_not_known_yet_is_a_dash_and_a_longer_run_counts_its_new_steps(served):
    padded = {**PARAMS, "data.packing": "false"}
    longer = mlflow_run("longer", age=1, tags={"resumed.train.num_steps": "800"}, params=padded)
    served(here=[mlflow_run("new", started=NOW - 5, metrics={}), longer])
    rows, _ = Watch(["here"]).look(NOW)
    assert rows[0][:2] == ("longer", "100/800") and rows[0][-2] == "-", (
        "older first; rows that are padded hide the tokens of a step"
    )
    assert rows[1] == ("new", "starting", "-", "-", "-", "-", "-", "0:05 ago")


def test_images_tell_the_time_left_of_a_run_that_learns_them(served):
    metrics = {**METRICS, "perf/images_per_s": 16.0}
    served(here=[mlflow_run("pictures", metrics=metrics, params={**PARAMS, "task.kind": "flow"})])
    rows, _ = Watch(["here"]).look(NOW)
    assert rows[0][-2] == "20:00", "300 steps of 64 images"


def test_the_time_left_follows_what_is_seen_from_then_on(served):
    runs = [mlflow_run("first", step=100, age=3.0)]
    served(here=runs)
    watch = Watch(["here"])
    watch.look(NOW)
    watch._clients["here"].runs = [mlflow_run("first", step=110, age=-17.0)]
    assert watch.look(NOW + 20)[0][0][-2] == "9:40", "290 steps at 10 in 20 s, evaluations and saves included"


def test_silent_runs_and_dead_servers_are_named_beside_what_runs(served):
    served(a=[mlflow_run("first"), mlflow_run("killed", started=NOW - 7200, age=3600)], b=ConnectionError("Connection refused"))
    rows, notes = Watch(["a", "b"]).look(NOW)
    assert [cells[0] for cells in rows] == ["first"]
    assert notes == [
        "MLflow at b does not answer (connection refused)",
        "silent for over 15:00, though MLflow says that they run: killed",
    ]


def test_runs_of_others_are_left_out():
    other = mlflow_run("x")
    del other.data.tags["fluxray.run"]
    assert [run.name for run in read_running(Client(other, mlflow_run("mine")))] == ["mine"]


def test_the_servers_of_the_runs_here_are_asked_and_no_database_is_made(tmp_path):
    where = Home(tmp_path)
    assert places(where, None) == []
    for name, uri in (("a", "http://mlflow:5000"), ("b", "http://mlflow:5000"), ("c", None)):
        run_dir = where.runs / name
        run_dir.mkdir(parents=True)
        (run_dir / CONFIG_FILE).write_text(to_yaml(resolve("cpu", "lm-tiny", {"storage": str(tmp_path), "tracking.uri": uri})))
    assert places(where, None) == ["http://mlflow:5000"]
    where.database.touch()
    assert sorted(places(where, None)) == ["http://mlflow:5000", f"sqlite:///{where.database}"]
    assert places(where, "http://other") == ["http://other"]
    with pytest.raises(ConfigError, match=r"^--tracking: sqlite:////nowhere\.db is not there; "):
        places(where, "sqlite:////nowhere.db")


def test_nothing_running_is_one_line_and_a_server_that_is_down_a_failure(tmp_path, served, capsys):
    show(Home(tmp_path), None, once=False)
    assert capsys.readouterr().out == f"{NOTHING}\n"
    served(**{"http://x": ConnectionError("Connection refused"), "http://y": []})
    with pytest.raises(FailedError, match=r"^MLflow at http://x does not answer \(connection refused\)$"):
        show(Home(tmp_path), "http://x", once=True)
    show(Home(tmp_path), "http://y", once=True)
    assert capsys.readouterr().out == f"{NOTHING}\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_drawn_anew_until_ctrl_c(tmp_path, served, monkeypatch):
    served(**{"http://x": [mlflow_run("first")]})
    monkeypatch.setattr(top.time, "time", lambda: NOW)
    monkeypatch.setenv("COLUMNS", "120")
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    out = Terminal()
    show(Home(tmp_path), "http://x", once=False, to=out)
    assert pauses == [2.0, 2.0, 2.0]
    assert out.getvalue().count("100/400") >= 3 and "Ctrl-C ends this" in out.getvalue()
    once = Terminal()
    show(Home(tmp_path), "http://x", once=True, to=once)
    assert once.getvalue().count("100/400") == 1 and len(pauses) == 3
