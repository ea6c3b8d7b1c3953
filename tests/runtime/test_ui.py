import os
import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest

from fluxray.config.load import resolve
from fluxray.errors import ConfigError
from fluxray.runtime.paths import Home
from fluxray.runtime.tracking import finish_run, start_run
from fluxray.runtime.ui import serve


@pytest.fixture
def where(tmp_path):
    where = Home(tmp_path)
    config = resolve("cpu", "lm-tiny", {"name": "r", "storage": str(tmp_path)})
    run_dir = where.runs / "r"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    finish_run(start_run(config, where, run_dir, None), "FINISHED", run_dir)
    return where


def test_a_taken_port_is_refused(where):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--port: {port} cannot be used \(.*\); try --port {port + 1}$"):
            serve(where, port)


def test_it_serves_until_asked_to_end_and_leaves_no_process(where):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from fluxray.cli import main; main()", "ui", "--port", str(port)]
    env = {**os.environ, "FLUXRAY_HOME": str(where.root)}
    ui = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert ui.stdout is not None
        assert f"http://127.0.0.1:{port}" in ui.stdout.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
            assert b"MLflow" in page.read()
        children = psutil.Process(ui.pid).children(recursive=True)
        assert children
        ui.send_signal(signal.SIGTERM)
        assert ui.wait(timeout=20) == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    finally:
        if ui.poll() is None:
            ui.send_signal(signal.SIGTERM)
            ui.wait(timeout=20)
