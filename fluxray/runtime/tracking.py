"""MLflow: the driver makes and ends the run, rank 0 logs metrics into it. Explicit URIs, no global state."""

import fcntl
import json
import logging
import math
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import fluxray
from fluxray.config.load import flatten
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError
from fluxray.runtime.paths import CONFIG_FILE, Home

MAX_PENDING = 100_000
"""Points kept while the server does not answer; the oldest go first."""

SEND_EVERY_S = 1.0
"""Reports of many steps come at once and are sent together."""

RETRY_AFTER_S = 30.0
"""Pause after a failed call, so that a hung server does not slow every report."""

CHUNK = {"metrics": 1000, "params": 100}
"""MLflow's own limits for one call of log_batch."""

MAX_PARAM_LENGTH = 6000
VERSIONED = ("torch", "transformers", "ray", "mlflow")
RUN_TAG, DIR_TAG = "fluxray.run", "fluxray.run_dir"
Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Target:
    """The MLflow run that metrics go to."""

    uri: str
    run_id: str


def tracking_uri(config: TrainConfig, where: Home) -> str:
    """Return `tracking.uri`, else the embedded database's; ConfigError if it means another file in another folder."""
    uri = config.tracking.uri
    if uri is None:
        return f"sqlite:///{where.database}"
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise ConfigError(f"tracking.uri: {uri!r} is relative, and workers run in other folders; write sqlite:////absolute/path")
    return uri


def start_run(config: TrainConfig, where: Home, run_dir: Path, resumed: Mapping[str, Any] | None) -> Target:
    """Make the MLflow run of `config.name`, or go on with that of an earlier start; log parameters, tags and config.yaml.

    `resumed` is None for a new run, else the keys whose values differ from the earlier start's. Creates the embedded database.
    Raises ConfigError if MLflow cannot be reached.
    """
    uri = tracking_uri(config, where)
    where.root.mkdir(parents=True, exist_ok=True)
    with _locked(where.root / ".mlflow.lock"), _reachable(uri):
        client = _client(uri)
        experiment = _experiment(client, config.tracking.experiment, where if uri.startswith("sqlite:") else None)
        found = _find(client, experiment, str(config.name), run_dir) if resumed is not None else None
        if found is None:
            tags = {RUN_TAG: str(config.name), DIR_TAG: str(run_dir), **_origin_tags()}
            found = client.create_run(experiment, run_name=config.name, tags=tags).info.run_id
            _log_params(client, found, config)
        else:
            client.update_run(found, status="RUNNING")
            for key, value in (resumed or {}).items():
                client.set_tag(found, f"resumed.{key}", _param(value))
        client.log_artifact(found, str(run_dir / CONFIG_FILE))
    return Target(uri, found)


def finish_run(target: Target, status: Status, run_dir: Path) -> str | None:
    """End the run truthfully and add its tokenizer. Returns None, or one line that says why MLflow could not be told."""
    try:
        client = _client(target.uri)
        client.set_terminated(target.run_id, status)
        if (run_dir / "tokenizer").is_dir():
            client.log_artifacts(target.run_id, str(run_dir / "tokenizer"), "tokenizer")
    except Exception as error:  # noqa: BLE001 - the run has ended; how it ended must not depend on MLflow
        return f"MLflow at {target.uri} was not told that the run is {status} ({_short(error)})"
    return None


class MetricWriter:
    """Logs metrics by step from rank 0. Never raises and never logs a step of a key twice, whatever was replayed after a resume.

    While the server fails, points are kept (at most MAX_PENDING) and sent with a later call; `notify` is told once per outage.
    NaN is logged as NaN. MLflow has no infinity: it becomes NaN, and `KEY.infinite` says 1 or -1 at that step.
    """

    def __init__(self, target: Target, notify: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._target = target
        self._notify = notify
        self._clock = clock
        self._client: Any = None
        self._pending: deque[tuple[str, float, int, int]] = deque(maxlen=MAX_PENDING)
        self._last_step: dict[str, int] = {}
        self._send_at = 0.0
        self._failing = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all `metrics` at `step`: now, or with the next call or `flush` if the last was a moment ago."""
        for key, value in metrics.items():
            for name, number in _without_infinity(key, value):
                self._pending.append((name, number, int(self._clock() * 1000), step))
        if self._clock() >= self._send_at:
            self.flush()

    def flush(self) -> None:
        """Send what is pending; on failure keep it."""
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 - whatever MLflow raises, training goes on
            self._send_at = self._clock() + RETRY_AFTER_S
            if not self._failing:
                self._notify(f"MLflow at {self._target.uri} does not answer ({_short(error)}): training goes on, points are kept")
            self._failing = True
            return
        self._send_at = self._clock() + SEND_EVERY_S
        if self._failing:
            self._notify("MLflow answers again; the points kept meanwhile are logged")
        self._failing = False

    def _send(self) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            self._client = _client(self._target.uri)
        while self._pending:
            batch = list(islice(self._pending, CHUNK["metrics"]))
            newest: dict[str, int] = {}
            fresh = []
            for name, value, stamp, step in batch:
                if step > newest.get(name, self._last_logged(name)):
                    newest[name] = step
                    fresh.append(Metric(name, value, stamp, step))
            if fresh:
                self._client.log_batch(self._target.run_id, metrics=fresh)
            self._last_step.update(newest)
            for _ in batch:
                self._pending.popleft()

    def _last_logged(self, key: str) -> int:
        if key not in self._last_step:
            history = self._client.get_metric_history(self._target.run_id, key)
            self._last_step[key] = max((metric.step for metric in history), default=-1)
        return self._last_step[key]


def _client(uri: str) -> Any:
    """Return a client of `uri` alone: variables that point MLflow elsewhere are dropped, a dead server is given up on soon."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        os.environ.pop(name, None)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def _reachable(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if "mlflow db upgrade" in str(error):
            raise ConfigError(
                f"tracking.uri: {uri} was made by another MLflow; copy the database, then run `mlflow db upgrade {uri}`"
            ) from None
        raise ConfigError(f"tracking.uri: {uri} cannot be used ({_short(error)}); start the server or drop the key") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let only one process at a time create the embedded database."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _experiment(client: Any, name: str, local: Home | None) -> str:
    """Return the experiment's id; with `local`, a new one keeps its artifacts in that home."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return client.create_experiment(name, artifact_location=(local.artifacts / name).as_uri() if local else None)
    if found.lifecycle_stage != "active":
        raise ConfigError(f"tracking.experiment: {name!r} has been deleted in MLflow; restore it there or use another name")
    return found.experiment_id


def _find(client: Any, experiment: str, name: str, run_dir: Path) -> str | None:
    wanted = f"tags.`{RUN_TAG}` = '{name}'"
    for run in client.search_runs([experiment], wanted, max_results=100, order_by=["attributes.start_time DESC"]):
        if run.data.tags.get(DIR_TAG) == str(run_dir):
            return run.info.run_id
    return None


def _log_params(client: Any, run_id: str, config: TrainConfig) -> None:
    from mlflow.entities import Param

    flat: dict[str, Any] = {}
    for key, value in flatten(config).items():
        flat.update({f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value})
    params = [Param(key, _param(value)) for key, value in flat.items()]
    for start in range(0, len(params), CHUNK["params"]):
        client.log_batch(run_id, params=params[start : start + CHUNK["params"]])


def _param(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:MAX_PARAM_LENGTH]


def _origin_tags() -> dict[str, str]:
    tags = {"version.fluxray": fluxray.__version__}
    for package in VERSIONED:
        try:
            tags[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    folder = Path(fluxray.__file__).resolve().parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py"):
        tags["mlflow.source.git.commit"] = _git(folder, "rev-parse", "HEAD")
        tags["fluxray.git_dirty"] = str(bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "."))).lower()
    return tags


def _git(folder: Path, *words: str) -> str:
    """Return git's answer, or nothing where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _without_infinity(key: str, value: float) -> Sequence[tuple[str, float]]:
    if math.isinf(value):
        return [(key, math.nan), (f"{key}.infinite", math.copysign(1.0, value))]
    return [(key, float(value))]


def _short(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:150]}" if text else type(error).__name__
