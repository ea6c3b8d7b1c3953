"""MLflow's pages on the embedded database, on this machine only."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from fluxray.errors import ConfigError
from fluxray.runtime.outcome import FailedError
from fluxray.runtime.paths import Home

HOST = "127.0.0.1"

TRAINING_PAGES = "#/experiments?workflowType=machine_learning"
"""MLflow's pages for training runs; its default is those for applications of language models."""
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 5.0


def serve(where: Home, port: int) -> None:
    """Serve the runs of `where` until SIGINT or SIGTERM, then end every process of the server.

    Raises ConfigError if there are no runs or the port is taken, FailedError if the server does not start.
    """
    if not where.database.exists():
        raise ConfigError(f"--storage: {where.root} holds no tracked run yet; `fluxray train` makes one")
    _require_free(port)
    log = where.root / "mlflow-ui.log"
    signal.signal(signal.SIGTERM, _interrupt)
    server = _start(where, port, log)
    try:
        _wait_until_up(server, port, log)
        print(f"MLflow on the runs of {where.root}: http://{HOST}:{port}/{TRAINING_PAGES} (Ctrl-C ends it)", flush=True)
        server.wait()
        raise FailedError(f"the MLflow server ended by itself; its log is {log}")
    except KeyboardInterrupt:
        return
    finally:
        _end(server)


def _start(where: Home, port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{where.database}", "--default-artifact-root", where.artifacts.as_uri()]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise FailedError(f"the MLflow server did not start; its log is {log}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server's whole process group: asked first, then not."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, signum)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + END_TIMEOUT_S
        while _group_lives(server) and time.monotonic() < deadline:
            time.sleep(0.1)


def _group_lives(server: subprocess.Popen[bytes]) -> bool:
    server.poll()
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"--port: {port} cannot be used ({error.strerror}); try --port {port % 65535 + 1}") from None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
