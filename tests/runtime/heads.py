"""Ray heads of one node, as `ray start` makes them, on free loopback ports, which leave nothing behind."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
MARK = "FLUXRAY_TEST_HEAD"
"""A variable that every process of a head and of its clients inherits, whoever its parent is by then."""

PORTS = (
    "--port",
    "--ray-client-server-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)


@dataclass
class Head:
    """A Ray head of one node, and a client of it in a folder of its own. `jobs` is its job server's address."""

    mode: str
    folder: Path
    address: str
    jobs: str
    client: dict[str, str]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def start(self, command: Sequence[str], **changes: str) -> "subprocess.Popen[str]":
        """Start a command as a user of this head would from elsewhere."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.client, **changes},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.1)


def answers(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), 1).close()
        return True
    return False


@contextlib.contextmanager
def running(mode: str) -> Iterator[Head]:
    """Start a head on free loopback ports; end every process that came of it, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="fluxray-", dir="/tmp"))  # Ray's sockets lie below it, and their paths must be short
    dashboard, *ports = free_ports(1 + len(PORTS))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLUXRAY_"))}
    environment |= {"HOME": str(folder), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": mode}
    if mode == "token":
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    jobs = f"http://127.0.0.1:{dashboard}"
    client = {**environment, "RAY_API_SERVER_ADDRESS": jobs, MARK: str(folder)}
    head = Head(mode, folder, f"127.0.0.1:{ports[0]}", jobs, client)
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--temp-dir={folder / 'ray'}", *(f"{option}={port}" for option, port in zip(PORTS, ports, strict=True))]
    settings = {"RAY_JOB_STOP_WAIT_TIME_S": "100", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", MARK: str(folder)}
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**environment, **settings}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield head
    finally:
        while left := marked(folder, process.pid):  # again, for what was being started meanwhile
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            process.poll()
            time.sleep(0.1)
        process.wait(10)
        until(lambda: not remaining(folder), "end of the head's files", 20)


def remaining(folder: Path) -> bool:
    """Delete the folder; return whether a process that was just ending has written into it meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder.exists()


def marked(folder: Path, session: int) -> list[int]:
    """Return the ids of the processes that came of the head in `folder`, which began a session of its own.

    Ray's daemons stay in the session; clients and jobs do not, but daemons write their titles over parts of their environment.
    """
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"{MARK}={folder}".encode() in (place / "environ").read_bytes().split(b"\0")
            status, _, _, of_session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if status != "Z" and (ours or int(of_session) == session):
                found.append(int(place.name))
    return found
