"""From a run's spool to MLflow: in order, each point once, whatever is lost on the way."""

import fcntl
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fluxray.errors import ConfigError, one_line
from fluxray.runtime import spool
from fluxray.runtime.identity import DIR_TAG, FOLDER, RUN_TAG, Identity, masked, read_identity
from fluxray.runtime.paths import CONFIG_FILE
from fluxray.runtime.spool import Entry, Position, Record
from fluxray.runtime.step_images import FOLDER as IMAGES
from fluxray.runtime.step_images import TAG as IMAGES_TAG
from fluxray.runtime.step_images import is_of_step, write_step_image

CHUNK = {"metrics": 1000, "params": 100}
"""MLflow's own limits for one call of log_batch."""

TIMEOUT_S = 15
"""How long one call may take, unless MLFLOW_HTTP_REQUEST_TIMEOUT says otherwise."""

CONNECTION_FAULTS = {
    "Connection refused": "connection refused",
    "timed out": "no answer in time",
    "Failed to resolve": "unknown host",
    "RemoteDisconnected": "connection lost",
    "Connection reset": "connection lost",
}
"""What to say for what urllib3 and requests say at length."""

LOCK_FILE, CREATION_LOCK_FILE = "sender.lock", "creation.lock"
PARENT_TAG = "mlflow.parentRunId"


@dataclass(frozen=True)
class Target:
    """Where a run is recorded.

    `home` is the root folder of an embedded database, else None; `artifacts` is where a new experiment keeps its files, None
    where a server decides; `system_metrics_s` are the seconds between two readings of the machine, 0 for none; `is_down` says
    that nothing answered at the start, which the user has been told.
    """

    uri: str = field(repr=False)
    experiment: str
    run_dir: Path
    home: Path | None = None
    artifacts: Path | None = None
    system_metrics_s: int = 0
    is_down: bool = False

    @property
    def shown(self) -> str:
        """The address without user and password."""
        return masked(self.uri)

    @property
    def folder(self) -> Path:
        """The folder of identity and spool."""
        return self.run_dir / FOLDER


class BusyError(Exception):
    """Another process or thread is sending this run's records, or hangs in a call that does."""


class Sender:
    """Sends the records of a run's spool: `metrics` at a `step`, `tags`, an `artifact` of the run's folder, a `status`.

    After a failure the next call begins anew: it finds the MLflow run, or makes it, and leaves out points up to the last step
    that MLflow has of their key, since a call whose answer was lost may have arrived. A point sent again all the same is the very
    same one, down to its time, of which MLflow's databases keep one. `notify` is told what cannot be stored.
    """

    def __init__(self, target: Target, notify: Callable[[str], None]) -> None:
        self._target = target
        self._notify = notify
        self._lock = -1
        self._client: Any = None
        self._run_id = ""
        self._position: Position | None = None
        self._last_step: dict[str, int] = {}

    def send(self) -> int:
        """Send some records and acknowledge them; return how many, 0 if none is left.

        Raises BusyError, ConfigError for what only the user can mend, and whatever MLflow raises.
        """
        self._acquire()
        try:
            batch = self._next_batch()
            if batch:
                if not self._run_id:
                    self._attach()
                self._deliver([entry.record for entry in batch])
                self._position = batch[-1].end
                spool.acknowledge(self._target.folder, self._position)
            return len(batch)
        except BaseException:
            self._run_id, self._position = "", None
            raise

    def close(self) -> None:
        """Let another process send."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire(self) -> None:
        if self._lock >= 0:
            return
        self._target.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._target.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BusyError("another sender of this run is at work or waits for an answer") from None
        except OSError:
            return  # a file system without locks

    def _next_batch(self) -> list[Entry]:
        """Return the next records that go in one call: metrics of many steps, or one record of another kind."""
        if self._position is None:
            self._position = spool.acknowledged(self._target.folder)
        batch: list[Entry] = []
        num_points = 0
        for entry in spool.entries(self._target.folder, self._position):
            if "metrics" not in entry.record:
                return batch or [entry]
            num_points += len(entry.record["metrics"])
            if batch and num_points > CHUNK["metrics"]:
                break
            batch.append(entry)
        return batch

    def _deliver(self, records: Sequence[Record]) -> None:
        match records[0]:
            case {"metrics": _}:
                self._log(records)
            case {"tags": tags}:
                for key, value in tags.items():
                    self._client.set_tag(self._run_id, key, value)
            case {"artifact": name}:
                self._store(name)
            case {"status": "RUNNING"}:
                self._client.update_run(self._run_id, status="RUNNING")
            case {"status": status, "time": time}:
                self._client.set_terminated(self._run_id, status, end_time=time)

    def _log(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        newest: dict[str, int] = {}
        fresh: list[Metric] = []
        for record in records:
            step, time = record["step"], record["time"]
            for key, value in _points(record["metrics"]):
                if step > newest.get(key, self._last_step.get(key, -1)):
                    newest[key] = step
                    fresh.append(Metric(key, value, time, step))
        for start in range(0, len(fresh), CHUNK["metrics"]):
            self._client.log_batch(self._run_id, metrics=fresh[start : start + CHUNK["metrics"]])
        self._last_step.update(newest)

    def _store(self, name: str) -> None:
        """Store a file or folder of the run's folder. One that cannot be stored is left out: points must not wait for it."""
        path = self._target.run_dir / name
        try:
            if path.is_dir():
                self._client.log_artifacts(self._run_id, str(path), name)
            elif name == CONFIG_FILE:
                self._client.log_text(self._run_id, masked(path.read_text(encoding="utf-8")), name)
            else:
                self._client.log_artifact(self._run_id, str(path), name.rpartition("/")[0] or None)
            if is_of_step(name):
                self._show(path, name)
        except Exception as error:
            if _is_temporary(error):
                raise
            self._notify(f"MLflow at {self._target.shown} cannot store {name} ({short(error)}): it stays in {path.parent}")

    def _show(self, path: Path, name: str) -> None:
        """Have a picture of a step among the metrics, too, with a slider for the step."""
        with TemporaryDirectory() as folder:
            write_step_image(path, name, Path(folder))
            self._client.log_artifacts(self._run_id, folder, IMAGES)
        self._client.set_tag(self._run_id, IMAGES_TAG, "true")

    def _attach(self) -> None:
        identity = read_identity(self._target.run_dir)
        if identity is None:
            raise ConfigError(f"run: {self._target.folder} has lost its run.json; start the run again to make another")
        home = self._target.home
        with _locked(home / ".mlflow.lock") if home else nullcontext():
            self._client = connect(self._target.uri)
            artifacts = self._target.artifacts
            experiment = _experiment(self._client, self._target.experiment, artifacts.as_uri() if artifacts else None)
            run = _find_or_create(self._client, experiment, identity, self._target.folder)
        _log_missing_params(self._client, run, identity.params)
        self._last_step = {metric.key: metric.step for metric in run.to_proto().data.metrics}
        self._run_id = run.info.run_id


def connect(uri: str) -> Any:
    """Return a client of `uri` alone: variables that point MLflow elsewhere are dropped, and no call is repeated unasked."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        os.environ.pop(name, None)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # it would show a password
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(TIMEOUT_S))
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check_answer(error: Exception, target: Target) -> None:
    """Raise ConfigError if `error`, met at the start of a run, will not go away by itself."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import ArgumentError

    if isinstance(error, ConfigError):
        raise error
    if "mlflow db upgrade" in str(error):
        raise ConfigError(
            f"tracking.uri: {target.shown} was made by another MLflow; copy the database, then run `mlflow db upgrade` on it"
        )
    if isinstance(error, ImportError):
        raise ConfigError(f"tracking.uri: {target.shown} needs the Python package {error.name}; install it, or drop the key")
    lasting = isinstance(error, ArgumentError) or (isinstance(error, MlflowException) and not _is_temporary(error))
    if target.home is not None or lasting:
        raise ConfigError(f"tracking.uri: {target.shown} cannot be used ({short(error)}); correct or drop the key")


def short(error: BaseException) -> str:
    """Return what went wrong on one line, without secrets."""
    for sign, reason in CONNECTION_FAULTS.items():
        if sign in str(error):
            return reason
    if isinstance(error, (BusyError, TimeoutError)):
        return str(error)
    return f"{type(error).__name__}: {masked(one_line(error))}"


def _is_temporary(error: Exception) -> bool:
    """Return whether the same call may work later: nothing answered, or what answered was not well."""
    from mlflow.exceptions import MlflowException
    from requests import exceptions

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= 500 or status in (408, 429)
    return isinstance(error, (ConnectionError, TimeoutError, exceptions.ConnectionError, exceptions.Timeout))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let only one process at a time create the embedded database, or a run; without locks in the file system, any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _experiment(client: Any, name: str, artifacts: str | None) -> str:
    """Return the experiment's id; a new one keeps its artifacts in `artifacts`."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return client.create_experiment(name, artifact_location=artifacts)
    if found.lifecycle_stage != "active":
        raise ConfigError(f"tracking.experiment: {name!r} has been deleted in MLflow; restore it there or use another name")
    return found.experiment_id


def _find(client: Any, experiment: str, identity: Identity) -> Any:
    wanted = f"tags.`{RUN_TAG}` = '{identity.name}' AND attributes.start_time = {identity.started}"
    runs = client.search_runs([experiment], wanted, max_results=100)
    return next((run for run in runs if run.data.tags.get(DIR_TAG) == identity.run_dir), None)


def _find_or_create(client: Any, experiment: str, identity: Identity, folder: Path) -> Any:
    """Return the MLflow run of the `identity` in `folder`; that of a trial is made under its sweep's, which comes first.

    Several trials may find that their sweep has no run yet: one makes it.
    """
    tags = dict(identity.tags)
    if identity.parent is not None:
        tags[PARENT_TAG] = _parent(client, experiment, Path(identity.parent))
    with _locked(folder / CREATION_LOCK_FILE):
        found = _find(client, experiment, identity)
        return found or client.create_run(experiment, start_time=identity.started, run_name=identity.name, tags=tags)


def _parent(client: Any, experiment: str, sweep_dir: Path) -> str:
    identity = read_identity(sweep_dir)
    if identity is None:
        raise ConfigError(f"sweep: {sweep_dir / FOLDER} has lost its run.json; start the sweep again under another name")
    return _find_or_create(client, experiment, identity, sweep_dir / FOLDER).info.run_id


def _log_missing_params(client: Any, run: Any, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
    for start in range(0, len(missing), CHUNK["params"]):
        client.log_batch(run.info.run_id, params=missing[start : start + CHUNK["params"]])


def _points(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the points of a report. MLflow has no infinity: it becomes NaN, and `KEY.infinite` says 1 or -1."""
    for key, value in metrics.items():
        if math.isinf(value):
            yield key, math.nan
            yield f"{key}.infinite", math.copysign(1.0, value)
        else:
            yield key, value
