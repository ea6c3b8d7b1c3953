"""A real MLflow server that can die, hang and come back, and a proxy before it that dawdles or loses answers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

START_TIMEOUT_S = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`mlflow server` on a database of its own, in a process group of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text()[-3000:])

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def hung(self):
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)


class Proxy:
    """Hands each request on over a connection of its own, keeps the answer back for `delay` seconds, or loses it."""

    def __init__(self, server):
        self.server = server
        self.delay = 0.0
        self.loses = False
        self.num_answers = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self.handle, args=(connection,), daemon=True).start()

    def handle(self, connection):
        with suppress(OSError), connection, socket.create_connection(("127.0.0.1", self.server.port)) as upstream:
            request = self.read_request(connection)
            upstream.sendall(request.replace(b"Connection: keep-alive", b"Connection: close", 1))
            answer = b"".join(iter(lambda: upstream.recv(65536), b""))
            time.sleep(self.delay)
            self.num_answers += 1
            if not self.loses:
                connection.sendall(answer)

    @staticmethod
    def read_request(connection):
        data = b""
        while b"\r\n\r\n" not in data and (part := connection.recv(65536)):
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(headers.get(b"content-length", 0))
        while len(body) < length:
            body += connection.recv(65536)
        return head + b"\r\n\r\n" + body
