"""What `fluxray doctor` knows of this machine and its cluster. Every reading has a time limit, and none raises."""

import json
import os
import platform
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from fluxray.memory.host import container_limit
from fluxray.runtime.identity import masked
from fluxray.runtime.paths import Home
from fluxray.runtime.ports import Listener, find_listeners, json_status, safely
from fluxray.runtime.upload import ENTRY_POINT, Upload, measure

SMI_S, PROBE_S = 5.0, 8.0
"""Time limits of nvidia-smi and of a Python of its own."""

QUERY = "name,memory.total,driver_version,compute_cap,pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current"

TORCH = """
import json, torch
found = torch.cuda.is_available()
if found:
    torch.zeros(1, device="cuda")
print(json.dumps({"cuda": torch.version.cuda, "num_devices": torch.cuda.device_count() if found else 0}))
"""
CLUSTER = """
import json, logging, os, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.CRITICAL)
nodes = [[n["Resources"], n.get("Labels", {})] for n in ray.nodes() if n["Alive"]]
print(json.dumps({"nodes": nodes}))
"""


class Gpu(NamedTuple):
    """A GPU as nvidia-smi tells it; widths and generation are of its PCIe link, 0 where it does not say."""

    name: str
    memory_mib: int
    driver: str
    compute: float
    pcie_gen: int
    width_max: int
    width_now: int


class Package(NamedTuple):
    """A library that fluxray needs: installed version or None, and what is wanted."""

    name: str
    installed: str | None
    wanted: str
    fits: bool


@dataclass(frozen=True)
class Facts:
    """All readings; None, or nothing, where there is none. Sizes are bytes.

    `torch` and `cluster` are what the probes above print, or {"error": why}; `job_server` is the status with which that of
    RAY_API_SERVER_ADDRESS answers; `upload` is what a job submitted from this folder would send, if it is a checkout;
    `database` is "none", "ok" or why it cannot be read.
    """

    python: str = platform.python_version()
    system: str = ""
    packages: Sequence[Package] = ()
    smi: str = "absent"
    gpus: Sequence[Gpu] = ()
    topology: str = ""
    torch: dict[str, Any] | None = None
    infiniband: Sequence[tuple[str, str, str]] = ()
    memory: int = 0
    memory_available: int = 0
    memory_limit: int | None = None
    shm: int | None = None
    storage: str = ""
    storage_writable: bool = True
    storage_free: int = 0
    storage_type: str = ""
    environment: dict[str, str] | None = None
    cluster: dict[str, Any] | None = None
    job_server: int | None = None
    upload: Upload | None = None
    database: str = "none"
    num_files_max: int = 0
    compiler: str | None = None
    listeners: Sequence[Listener] = ()


def gather(where: Home) -> Facts:
    """Read everything, side by side."""
    env = {name: masked(value) for name, value in os.environ.items() if name.startswith("RAY_") and "TOKEN" not in name}
    with ThreadPoolExecutor(8) as pool:
        smi = pool.submit(
            safely, lambda: read_gpus(_run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"])), ("", ())
        )
        topology = pool.submit(safely, lambda: _run(["nvidia-smi", "topo", "-m"]), "")
        torch = pool.submit(_probe, TORCH, 4 * PROBE_S)
        cluster = pool.submit(safely, _cluster, {"error": "cannot be asked"})
        job_server = pool.submit(safely, _job_server, None)
        upload = pool.submit(safely, _upload, None)
        listeners = pool.submit(safely, find_listeners, [])
        packages = pool.submit(safely, _packages, [])
        there = next(path for path in (where.root, *where.root.parents) if path.exists())
        state, gpus = smi.result()
        return Facts(
            system=f"{platform.system()} {platform.release()}, {platform.machine()}",
            packages=packages.result(),
            smi=state,
            gpus=gpus,
            topology=topology.result() if len(gpus) > 1 else "",
            torch=torch.result(),
            infiniband=safely(_infiniband, ()),
            memory=psutil.virtual_memory().total,
            memory_available=psutil.virtual_memory().available,
            memory_limit=safely(container_limit, None),
            shm=safely(lambda: shutil.disk_usage("/dev/shm").total, None),
            storage=str(where.root),
            storage_writable=os.access(there, os.W_OK),
            storage_free=safely(lambda: shutil.disk_usage(there).free, 0),
            storage_type=safely(lambda: _file_system(there), ""),
            environment=env,
            cluster=cluster.result(),
            job_server=job_server.result(),
            upload=upload.result(),
            database=safely(lambda: _database(where.database), "cannot be read"),
            num_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            compiler=next(
                (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (path := shutil.which(name))), None
            ),
            listeners=listeners.result(),
        )


def read_gpus(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Return "ok" and the GPUs of nvidia-smi's answer, or "absent" or its complaint, and none."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == QUERY.count(",")]
    if not rows:
        return (" ".join(text.split())[:150] or "absent"), ()
    return "ok", tuple(
        Gpu(name, int(_number(memory)), driver, _number(compute), int(_number(gen)), int(_number(most)), int(_number(now)))
        for name, memory, driver, compute, gen, most, now in rows
    )


def _cluster() -> dict[str, Any] | None:
    address = os.environ.get("RAY_ADDRESS")
    return _probe(CLUSTER, PROBE_S) if address and not address.startswith(("http://", "https://")) else None


def _job_server() -> int | None:
    address = os.environ.get("RAY_API_SERVER_ADDRESS")
    return json_status(f"{address.rstrip('/')}/api/jobs/") if address else None


def _upload() -> Upload | None:
    return measure(Path.cwd()) if Path(ENTRY_POINT).is_file() else None


def _probe(code: str, seconds: float) -> dict[str, Any]:
    """Return the last line that `code` prints in a Python of its own, read as JSON, or {"error": why}."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:g} s"}
    except OSError as error:
        return {"error": str(error)}
    lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    if done.returncode == 0 and lines:
        return safely(lambda: json.loads(lines[-1]), {"error": "no answer"})
    return {"error": masked(lines[-1].strip()[:200]) if lines else f"no answer (ended with {done.returncode})"}


def _run(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} gave no answer within {SMI_S:g} s"
    return done.stdout or done.stderr


def _packages() -> list[Package]:
    from packaging.requirements import Requirement

    found: list[Package] = []
    for line in requires("fluxray") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(wanted.name)
        except PackageNotFoundError:
            installed = None
        fits = installed is not None and wanted.specifier.contains(installed, prereleases=True)
        found.append(Package(wanted.name, installed, str(wanted.specifier), fits))
    return found


def _infiniband() -> list[tuple[str, str, str]]:
    """Return device, state and link layer of each port."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [
        (port.parts[-3], *((port / name).read_text().strip().rpartition(": ")[2] for name in ("state", "link_layer")))  # type: ignore[misc]
        for port in ports
    ]


def _file_system(path: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


def _database(path: Path) -> str:
    if not path.exists():
        return "none"
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)
    try:
        connection.execute("select version_num from alembic_version").fetchone()
    except sqlite3.Error as error:
        return str(error)
    finally:
        connection.close()
    return "ok"


def _number(text: str) -> float:
    found = re.search(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0
