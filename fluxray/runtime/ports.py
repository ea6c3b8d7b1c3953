"""Servers of this machine that other machines reach: Ray's dashboard, which runs whatever it is sent, and MLflow."""

import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

T = TypeVar("T")

RAY = "Ray dashboard"
HTTP_S = 2.0
WANTS_TOKEN = (401, 403)


class Listener(NamedTuple):
    """A server that other machines reach. `guarded` tells whether it wants a token or password."""

    kind: str
    address: str
    port: int
    guarded: bool


def read_listening(table: str) -> dict[str, tuple[str, int]]:
    """Return inode -> (address, port) of the sockets in a /proc/net/tcp or tcp6 that other machines reach."""
    found: dict[str, tuple[str, int]] = {}
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != "0A":
            continue
        raw, port = words[1].split(":")
        packed = b"".join(bytes.fromhex(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8))
        address = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed).removeprefix("::ffff:")
        if not address.startswith("127.") and address != "::1":
            found[words[9]] = (address, int(port, 16))
    return found


def server_kind(command: str) -> str | None:
    """Return what a process serves, judged by its command line: Ray's dashboard, MLflow, or None."""
    if re.search(r"ray/dashboard/dashboard\.py|ray::DashboardHead", command):
        return RAY
    return "MLflow" if re.search(r"\bmlflow\b", command) and re.search(r"server|uvicorn|gunicorn|\bui\b", command) else None


def find_listeners() -> list[Listener]:
    """Return the Ray dashboards and MLflow servers of this machine that other machines reach."""
    sockets: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6"):
        sockets |= read_listening(safely(Path("/proc/net", name).read_text, ""))
    found: dict[tuple[str, int], Listener] = {}
    for process in psutil.process_iter(["cmdline"]):
        kind = server_kind(" ".join(process.info["cmdline"] or ()))
        if kind is None:
            continue
        links = safely(lambda pid=process.pid: [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()], [])
        for inode in {link[8:-1] for link in links if link.startswith("socket:[")} & set(sockets):
            address, port = sockets[inode]
            status = json_status(_address(kind, address, port))
            if status is not None:
                found[kind, port] = Listener(kind, address, port, status in WANTS_TOKEN)
    return list(found.values())


def _address(kind: str, address: str, port: int) -> str:
    """Return a page that only this kind of server has, and that gives away something if no token is wanted."""
    path = "/api/jobs/" if kind == RAY else "/api/2.0/mlflow/experiments/search?max_results=1"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)
    return f"http://{host}:{port}{path}"


def json_status(url: str) -> int | None:
    """Return the status of an answer in JSON, or of one that wants a token; None for any other, and for none in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HTTP_S) as answer:
            return answer.status if "json" in answer.headers.get("Content-Type", "") else None
    except urllib.error.HTTPError as error:
        return error.code if error.code in WANTS_TOKEN else None
    except (OSError, ValueError):
        return None


def safely(read: Callable[[], T], otherwise: T) -> T:
    """Return what `read` returns, or `otherwise` if it raises."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - whatever a machine is like, the doctor goes on
        return otherwise
