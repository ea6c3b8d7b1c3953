"""Files far away: moto's S3 server in a process of its own, and a web server that serves ranges of bytes."""

import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

SECRET = "moto-secret-key"


class Server:
    """moto's server on one port; what it holds is lost when it is killed."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("moto's server has not started")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def client(self) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            region="us-east-1", scheme="http", endpoint_override=f"127.0.0.1:{self.port}", allow_bucket_creation=True
        )

    def wants_keys(self, wanted: bool) -> None:
        self.post("reset-auth", b"0" if wanted else b"inf")

    def post(self, action: str, body: bytes = b"") -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/moto-api/{action}", body, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=30).close()


def empty_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> fs.S3FileSystem:
    """Return a client of an empty `bucket`, and set the environment that leads to it."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server.post("reset")
    client = server.client()
    client.create_dir("bucket")
    return client


class Web:
    """A web server on a folder. `asked` are the ranges that were asked for, by file; the next `faults` requests get 503."""

    def __init__(self, folder: Path, serves_ranges: bool = True) -> None:
        self.asked: list[tuple[str, tuple[int, int] | None]] = []
        self.faults, self.denied = 0, False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self, serves_ranges, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, web: Web, serves_ranges: bool, *args: Any, **keys: Any) -> None:
        self._web, self._serves_ranges = web, serves_ranges
        super().__init__(*args, **keys)

    def log_message(self, *_: Any) -> None: ...

    def end_headers(self) -> None:
        if self._serves_ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def do_HEAD(self) -> None:
        if not self._refused():
            super().do_HEAD()

    def do_GET(self) -> None:
        if self._refused():
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        one = (int(found[1]), int(found[2]) + 1) if found else None
        self._web.asked.append((Path(self.path).name, one))
        path = Path(self.translate_path(self.path))
        if one is None or not self._serves_ranges or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        part = content[slice(*one)]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {one[0]}-{one[0] + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def _refused(self) -> bool:
        if not self._web.faults and not self._web.denied:
            return False
        self._web.faults = max(self._web.faults - 1, 0)
        self.send_response(403 if self._web.denied else 503, "Forbidden" if self._web.denied else "Try again")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True


@contextmanager
def web_on(folder: Path, serves_ranges: bool = True) -> Iterator[Web]:
    """Serve a folder."""
    web = Web(folder, serves_ranges)
    try:
        yield web
    finally:
        web.stop()
