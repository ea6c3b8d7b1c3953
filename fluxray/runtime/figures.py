"""What the hardware of a run can do: as `hardware.*` says, and where that is open, read from this machine or measured on it."""

from collections.abc import Callable, Mapping

import psutil
import torch

from fluxray.config.schema import ShardedEngineConfig, TrainConfig
from fluxray.errors import ConfigError
from fluxray.memory import probe
from fluxray.memory.estimate import GIB
from fluxray.memory.speed import Hardware
from fluxray.metrics import measure_matrix_tflops


def hardware(config: TrainConfig) -> Hardware:
    """Return the figures of `hardware.*`, and where they are open this machine's, read or measured.

    Raises ConfigError for a GPU's figures on a machine without one.
    """
    given = config.hardware
    wants_gpu = config.resources.gpu > 0
    missing = _open_keys(config)
    if missing and wants_gpu and not torch.cuda.is_available():
        keys = " ".join(f"hardware.{key}={example}" for key, example in missing.items())
        raise ConfigError(f"hardware.{next(iter(missing))}: is open and torch finds no GPU here to ask; give {keys}")
    device = torch.device("cuda" if wants_gpu else "cpu")
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    sources: dict[str, str] = {}

    def figure(key: str, read: Callable[[], float], unit: tuple[float, str], how: str) -> float:
        value = getattr(given, key)
        found = read() if value is None else value
        sources[key] = f"{found / unit[0]:.4g} {unit[1]}{'' if value is not None else f', {how}'}"
        return found

    host = figure("host_memory", lambda: psutil.virtual_memory().total, (GIB, "GiB"), "read from this machine")
    link, bandwidth = given.link, given.memory_bandwidth
    if wants_gpu:
        share = min(config.resources.gpu, 1)
        total = torch.cuda.get_device_properties
        whole = figure("device_memory", lambda: share * total(device).total_memory, (1e9, "GB"), "read")
        bandwidth = figure("memory_bandwidth", lambda: probe.probe_memory_bandwidth(device), (1e9, "GB/s"), "measured")
    else:
        whole = host
    if wants_gpu and _uses_link(config):
        link = figure("link", lambda: probe.probe_link(device), (1e9, "GB/s each way"), "measured")
    tflops = figure("tflops", lambda: measure_matrix_tflops(device, dtype), (1, "TFLOPS"), "measured")
    return Hardware(int(whole), int(host), given.disk, tflops, link, bandwidth, sources)


def host_bytes(config: TrainConfig) -> int:
    """Return the memory of one host: what `hardware.host_memory` says, or this machine."""
    given = config.hardware.host_memory
    return psutil.virtual_memory().total if given is None else given


def is_complete(config: TrainConfig) -> bool:
    """Return whether `hardware.*` holds every figure of the plan, so that any machine can make it."""
    needed = {"host_memory": "", "tflops": "", **(_open_keys(config) if config.resources.gpu > 0 else {})}
    return all(getattr(config.hardware, key) is not None for key in needed)


def _open_keys(config: TrainConfig) -> Mapping[str, str]:
    examples = {"device_memory": "45GB", "memory_bandwidth": "768GB/s", "tflops": "100"}
    if _uses_link(config):
        examples["link"] = "25GB/s"
    return {key: example for key, example in examples.items() if getattr(config.hardware, key) is None}


def _uses_link(config: TrainConfig) -> bool:
    offloads = isinstance(config.engine, ShardedEngineConfig) and config.engine.cpu_offload
    return config.engine.kind == "stream" or config.activation_checkpoint == "offload" or offloads
