"""What every benchmark shares: the record of machine and versions, the card's own matrix rate, and the result file."""

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fluxray.metrics import measure_matrix_tflops

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "diffusers", "bitsandbytes", "ray", "triton", "fluxray")


def machine() -> dict[str, Any]:
    """Return the card, its driver and the host."""
    found: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
        found |= {"card": name, "driver": driver, "cuda": torch.version.cuda, "num_cards": torch.cuda.device_count()}
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python and the libraries that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str:
    """Return the revision that is measured; GIT_REVISION where the tree has been copied without its history."""
    given = os.environ.get("GIT_REVISION")
    if given:
        return given
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def repeatable_command() -> str:
    """Return the command as a reader would type it from the project's root; where the result went is left out."""
    words = iter(sys.argv[1:])
    kept = [word for word in words if word != "--out" or not next(words)]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept])


def card_matrix_tflops() -> float:
    """Return the rate of a large bf16 matrix product, measured now."""
    return measure_matrix_tflops(torch.device("cuda", 0), torch.bfloat16)


def device_gb() -> float:
    """Return the peak of device memory in 10^9 bytes as nvidia-smi counts it: torch's peak reserved and everything else."""
    free, total = torch.cuda.mem_get_info()
    beside_torch = total - free - torch.cuda.memory_reserved()
    return (torch.cuda.max_memory_reserved() + beside_torch) / 1e9


def write(name: str, rows: list[dict[str, Any]], out_dir: Path = RESULTS, prints: bool = True) -> Path:
    """Write `NAME.json` with everything a reader needs to repeat the rows, and print a short table if `prints`."""
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "command": repeatable_command(),
        "git": git_revision(),
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows if prints else ():
        print(json.dumps(row), flush=True)
    return path
