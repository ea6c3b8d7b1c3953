"""A page in headless Chromium, driven through its DevTools protocol."""

import asyncio
import base64
import io
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
    "--remote-debugging-port=0",
)


@pytest.fixture
def running(tmp_path: Path) -> Callable[..., Any]:
    """A context in which a command runs in a process group of its own; the whole group ends with it, whatever happens."""
    numbers = itertools.count()

    @contextmanager
    def start(command: Sequence[str], **variables: str) -> Iterator[tuple[subprocess.Popen, Path]]:
        log = tmp_path / f"process-{next(numbers)}.log"
        with log.open("w") as out:
            environment = {**os.environ, **variables}
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process, log
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
            process.wait()

    return start


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    """Call a function until what it returns is true, and return that."""

    def wait(look: Callable[[], Any], timeout_s: float = 120) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, f"timed out after {timeout_s} s"
            time.sleep(0.1)
        return found

    return wait


@pytest.fixture
def browse(
    running: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Path
) -> Callable[[str, str], tuple[Any, Image.Image]]:
    """Open a page, wait until a JavaScript expression has a true value; return the value and a picture of the page."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")

    profiles = (tmp_path / f"profile-{number}" for number in itertools.count())

    def open_page(url: str, expression: str) -> tuple[Any, Image.Image]:
        profile = next(profiles)
        with running([CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]) as (process, log):
            port = wait_for(lambda: read_port(profile, process, log))
            value, png = asyncio.run(drive(port, url, expression))
        (tmp_path / "page.png").write_bytes(png)
        return value, Image.open(io.BytesIO(png)).convert("RGB")

    return open_page


@pytest.fixture
def ui(running, wait_for, tmp_path: Path) -> Iterator[str]:
    """The pages of `fluxray ui` on the runs in tmp_path; what it prints must tell their address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-c",
        "from fluxray.cli import main; main()",
        "ui",
        "--storage",
        str(tmp_path),
        "--port",
        str(port),
    ]
    with running(command) as (process, log):

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            return url in log.read_text()

        wait_for(is_up)
        assert urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
        yield url


def read_port(profile: Path, process: subprocess.Popen, log: Path) -> int | None:
    assert process.poll() is None, log.read_text()
    file = profile / "DevToolsActivePort"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(lines[0]) if lines else None


async def drive(port: int, url: str, expression: str, timeout_s: float = 90) -> tuple[Any, bytes]:
    """Load `url` in the first tab, poll `expression`, take a picture. On a time-out the error tells what the page says."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tab = next(target for target in await answer.json() if target["type"] == "page")
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            numbers = itertools.count(1)

            async def ask(method: str, **params: Any) -> dict[str, Any]:
                number = next(numbers)
                await socket.send_json({"id": number, "method": method, "params": params})
                while (message := await socket.receive_json(timeout=timeout_s)).get("id") != number:
                    pass
                return message["result"]

            async def evaluate(code: str) -> Any:
                return (await ask("Runtime.evaluate", expression=code, returnByValue=True))["result"].get("value")

            await ask("Page.navigate", url=url)
            deadline = time.monotonic() + timeout_s
            while not (value := await evaluate(expression)):
                assert time.monotonic() < deadline, await evaluate("document.body.innerText")
                await asyncio.sleep(0.3)
            await asyncio.sleep(1)  # transitions
            return value, base64.b64decode((await ask("Page.captureScreenshot"))["data"])
