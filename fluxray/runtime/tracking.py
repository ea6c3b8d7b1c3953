"""MLflow: the driver begins and ends a run's record, rank 0 adds its metrics. Nothing here waits long for it or fails with it.

Everything goes to the run's spool first. Rank 0 sends from a thread of its own, the driver at the start and the end, and
`sync` whatever is left.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fluxray.config.load import from_yaml
from fluxray.config.schema import TrainConfig
from fluxray.errors import ConfigError, FluxrayError
from fluxray.runtime import spool
from fluxray.runtime.delivery import deliver, describe_left
from fluxray.runtime.identity import FOLDER, Part, masked, param, read_identity, write_identity
from fluxray.runtime.paths import CONFIG_FILE, Home, home
from fluxray.runtime.sender import BusyError, Sender, Target, check_answer, short
from fluxray.runtime.system import SystemMetrics

__all__ = ["MetricWriter", "Status", "Target", "finish_run", "start_run", "sync", "tracking_uri"]

MAX_PENDING = 100_000
"""Reports kept in memory while the run's folder cannot be written; the oldest go first."""

SEND_EVERY_S = 1.0
RETRY_AFTER_S = 10.0
"""Pauses of rank 0's thread: usually, and while MLflow fails."""

TOLD_FAILURES = 2
"""The user is told of this many failures in a row; one alone may be a connection that was closed for its age."""

MAX_START_S, MAX_END_S = 10.0, 60.0
"""How long the driver goes on sending where records do get through."""

CLOSE_S = 2.0
"""How long rank 0 waits at its end for the call that is under way."""

DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:")
"""Addresses that MLflow's client opens itself: it would keep artifacts in the folder that it happens to run in."""

Status = Literal["FINISHED", "FAILED", "KILLED"]
Notify = Callable[[str], None]


def tracking_uri(config: TrainConfig, where: Home) -> str:
    """Return `tracking.uri`, else the embedded database's; ConfigError if it means another file in another folder."""
    uri = config.tracking.uri
    if uri is None:
        return f"sqlite:///{where.database}"
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise ConfigError(f"tracking.uri: {uri!r} is relative, and workers run in other folders; write sqlite:////absolute/path")
    return uri


def target_of(config: TrainConfig, where: Home, run_dir: Path) -> Target:
    """Return where the run in `run_dir` is recorded."""
    uri = tracking_uri(config, where)
    experiment = config.tracking.experiment
    return Target(
        uri,
        experiment,
        run_dir,
        home=where.root if uri.startswith("sqlite:") else None,
        artifacts=where.artifacts / experiment if DATABASE.match(uri) else None,
        system_metrics_s=config.tracking.system_metrics_s,
    )


def start_run(
    config: TrainConfig, where: Home, run_dir: Path, resumed: Mapping[str, Any] | None, part: Part | None = None
) -> Target:
    """Begin the record of `config.name`, or go on with that of an earlier start: parameters, tags, config.yaml.

    `resumed` is None for a new run, else the keys whose values differ from the earlier start's. With `part` the run is nested
    under its sweep's, whose record must have been begun. Creates the embedded database.
    A server that does not answer is told to the user and gets everything later; ConfigError for what waiting does not mend.
    """
    target = target_of(config, where, run_dir)
    if target.home is not None:
        _check_writable(target.uri)
    changes: list[spool.Record] = []
    if resumed is None:
        _discard(target.folder)
    if read_identity(run_dir) is None:
        write_identity(config, run_dir, part)
    if resumed is not None:
        changes = [{"status": "RUNNING"}, {"tags": {f"resumed.{key}": param(value) for key, value in resumed.items()}}]
    _write(target, [*changes, {"artifact": CONFIG_FILE}])
    problem = deliver(target, MAX_START_S, _say)
    if problem is None or isinstance(problem, BusyError):
        return target
    check_answer(problem, target)
    _say(
        f"MLflow at {target.shown} does not answer ({short(problem)}): run {run_dir.name} starts without it; "
        f"its record is kept in {target.folder} and sent as soon as MLflow answers"
    )
    return replace(target, is_down=True)


def note(target: Target, tags: Mapping[str, str]) -> None:
    """Have MLflow keep tags of a run that is going on; whoever sends next sends them."""
    _write(target, [{"tags": {key: param(value) for key, value in tags.items()}}])


def keep(target: Target, names: Iterable[str]) -> None:
    """Have MLflow keep files of a run's folder; whoever sends next sends them."""
    _write(target, [{"artifact": name} for name in names])


def end(target: Target, status: Status) -> None:
    """Have MLflow end a run's record now; whoever sends next sends that."""
    _write(target, [{"status": status, "time": _now()}])


def send(target: Target) -> Exception | None:
    """Send what a run's spool holds, in bounded time. Returns what stood in the way. Never raises."""
    try:
        return deliver(target, MAX_END_S, _say)
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, others have their turn
        return error


def finish_run(target: Target, status: Status, run_dir: Path) -> str | None:
    """End the record truthfully and add the run's tokenizer. Returns None, or one line on what MLflow has not got yet."""
    try:
        tokenizer = [{"artifact": "tokenizer"}] if (run_dir / "tokenizer").is_dir() else []
        _write(target, [{"status": status, "time": _now()}, *tokenizer])
        problem = deliver(target, MAX_END_S, _say)
        left = describe_left(target.folder)
    except Exception as error:  # noqa: BLE001 - the run has ended; how it ended must not depend on MLflow
        return f"MLflow at {target.shown} was not told that run {run_dir.name} is {status} ({short(error)})"
    if not left:
        return None
    reason = short(problem) if problem is not None else f"not done in {MAX_END_S:g} s"
    lacks = f"MLflow at {target.shown} has not got {left} of run {run_dir.name} yet"
    return f"{lacks} ({reason}); `fluxray sync {run_dir}` sends them"


def sync(run_dirs: Iterable[Path], say: Notify) -> int:
    """Send what MLflow has not got of these runs, saying for each what was sent; return for how many something is left."""
    num_left = 0
    for run_dir in run_dirs:
        before = describe_left(run_dir / FOLDER)
        if not before:
            continue
        try:
            config = from_yaml(run_dir / CONFIG_FILE)
            target = target_of(config, home(config.storage), run_dir)
            _send_all(target, say)
        except Exception as error:  # noqa: BLE001 - whatever stands in the way of one run, others have their turn
            num_left += 1
            reason = masked(str(error)) if isinstance(error, FluxrayError) else short(error)
            say(f"run {run_dir.name}: {describe_left(run_dir / 'tracking')} left to send: {reason}")
        else:
            say(f"run {run_dir.name}: {before} sent to MLflow at {target.shown}")
    return num_left


class MetricWriter:
    """Logs metrics by step from rank 0. Never raises, and never waits for MLflow: one thread sends what the spool holds.

    MLflow gets a step of a key once, whatever is replayed after a resume. NaN is logged as NaN. MLflow has no infinity: it
    becomes NaN, and `KEY.infinite` says 1 or -1 at that step. Another thread reads the machine's load every `system_metrics_s`
    seconds; the step of `system/...` is the number of seconds since the run first started. `notify` is told once per outage.
    """

    def __init__(self, target: Target, notify: Notify) -> None:
        identity = read_identity(target.run_dir)
        self._target = target
        self._notify = notify
        self._started = identity.started if identity else _now()
        self._appender = spool.Appender(target.folder)
        self._pending: deque[spool.Record] = deque(maxlen=MAX_PENDING)
        self._writing = threading.Lock()
        self._told_disk = False
        self._num_failures = TOLD_FAILURES if target.is_down else 0
        self._stop = threading.Event()
        self._sending = threading.Thread(target=self._send_on, name="fluxray-tracking", daemon=True)
        self._sending.start()
        if every := target.system_metrics_s:
            threading.Thread(target=self._sample_on, args=(every,), name="fluxray-system", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all `metrics` at `step` to the spool."""
        self._append({"step": step, "time": _now(), "metrics": {key: float(value) for key, value in metrics.items()}})

    def artifact(self, name: str) -> None:
        """Have MLflow keep a file of the run's folder, as it is when its turn comes."""
        self._append({"artifact": name})

    def flush(self) -> None:
        """Make what was logged durable: a run that goes on from a checkpoint does not repeat the steps before it."""
        self._write(durably=True)

    def close(self) -> None:
        """End the threads, at the latest after CLOSE_S, and leave the rest to whoever ends the run."""
        self._stop.set()
        self._write(durably=True)
        self._sending.join(CLOSE_S)

    def _append(self, record: spool.Record) -> None:
        self._pending.append(record)
        self._write()

    def _write(self, durably: bool = False) -> None:
        """Write what is pending; a folder that cannot be written is said once."""
        try:
            with self._writing:
                while self._pending:
                    self._appender.append(self._pending[0])
                    self._pending.popleft()
                if durably:
                    self._appender.sync()
        except OSError as error:
            if not self._told_disk:
                self._notify(f"{self._target.folder} cannot be written ({short(error)}): metrics are kept in memory meanwhile")
            self._told_disk = True
        else:
            self._told_disk = False

    def _send_on(self) -> None:
        sender = Sender(self._target, self._notify)
        pause = 0.0
        while not self._stop.wait(pause):
            pause = self._send(sender)
        sender.close()

    def _sample_on(self, every: int) -> None:
        system = SystemMetrics()
        while not self._stop.wait(every):
            self._sample(system)

    def _sample(self, system: SystemMetrics) -> None:
        try:
            metrics = system.read()
        except Exception:  # noqa: BLE001 - a card or driver that does not answer now
            return
        now = _now()
        self._append({"step": (now - self._started) // 1000, "time": now, "metrics": metrics})

    def _send(self, sender: Sender) -> float:
        """Send one piece; return the seconds until the next may be sent."""
        try:
            more = sender.send()
        except BusyError:
            return SEND_EVERY_S
        except Exception as error:  # noqa: BLE001 - whatever MLflow raises, training goes on
            self._num_failures += 1
            if self._num_failures == TOLD_FAILURES:
                self._notify(
                    f"MLflow at {self._target.shown} does not answer ({short(error)}): training goes on, "
                    f"its record is kept in {self._target.folder}"
                )
            return SEND_EVERY_S if self._num_failures < TOLD_FAILURES else RETRY_AFTER_S
        if more:
            if self._num_failures >= TOLD_FAILURES:
                self._notify("MLflow answers again and gets what was kept meanwhile")
            self._num_failures = 0
        return 0.0 if more else SEND_EVERY_S


def _write(target: Target, records: Iterable[spool.Record]) -> None:
    appender = spool.Appender(target.folder)
    for record in records:
        appender.append(record)
    appender.close()


def _send_all(target: Target, notify: Notify) -> None:
    sender = Sender(target, notify)
    try:
        while sender.send():
            pass
    finally:
        sender.close()


def _check_writable(uri: str) -> None:
    """Raise ConfigError at once for a database file that cannot be; MLflow would try for minutes."""
    path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"tracking.uri: {uri} cannot be written ({error.strerror}); correct or drop the key") from None


def _discard(folder: Path) -> None:
    """Delete what an earlier run of that folder left."""
    for path in folder.glob("*.json*"):
        path.unlink()


def _now() -> int:
    return int(time.time() * 1000)


def _say(text: str) -> None:
    print(text, flush=True)
