"""What `fluxray doctor` says: checks of gathered facts, each a pure function that yields findings."""

import re
from collections.abc import Iterator, Sequence

from fluxray.runtime.doctor_services import SERVICES
from fluxray.runtime.facts import Facts
from fluxray.runtime.finding import Finding

GIB, GB = 2**30, 10**9

RAY_THRESHOLD = 0.95
"""Ray's own value of RAY_memory_usage_threshold."""

OBJECT_STORE_SHARE = 0.3
"""Share of the available memory that Ray takes for its object store, no more than /dev/shm holds."""

LARGE_RUN = 51 * GB
"""Three checkpoints of 1.4 billion parameters at 12 bytes: two kept, one being written."""

LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")
DRIVERS = {13: 580, 12: 525}
"""CUDA of the PyTorch build -> oldest driver; see "Versions that go together" in the README."""

MOST_LINKS = 18
"""NVLinks of one GPU, at most: more than these to all peers together need a switch."""


def examine(facts: Facts) -> list[Finding]:
    """Return all findings, in the order in which one would mend them."""
    checks = (_software, _gpus, _torch, _links, _infiniband, _memory, _shared_memory, _storage)
    checks += (*SERVICES, _files, _compiler)
    return [finding for check in checks for finding in check(facts)]


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines that show the findings, remedies below them."""
    width = max(len(finding.name) for finding in findings)
    for status, found, remedy, name in ((f.status, f.found, f.remedy, f.name) for f in findings):
        yield f"{status:<4}  {name:<{width}}  {found}"
        if remedy:
            yield f"{'':<{width + 8}}-> {remedy}"


def _software(facts: Facts) -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{facts.python} on {facts.system}")
    for package in facts.packages:
        if package.fits:
            continue
        found = f"{package.name} {package.installed or 'is missing'}, wanted {package.wanted}"
        yield Finding("libraries", "fail", found, f"pip install '{package.name}{package.wanted}'")
    if facts.packages and all(package.fits for package in facts.packages):
        yield Finding("libraries", "ok", ", ".join(f"{package.name} {package.installed}" for package in facts.packages))


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.smi == "absent":
        yield Finding("GPUs", "ok", "none; --profile cpu works here")
    elif facts.smi != "ok":
        yield Finding("GPUs", "fail", f"nvidia-smi: {facts.smi}", "load NVIDIA's driver, or reinstall it and reboot")
    for kind in dict.fromkeys((gpu.name, gpu.memory_mib, gpu.compute) for gpu in facts.gpus):
        name, memory, compute = kind
        number = sum((gpu.name, gpu.memory_mib, gpu.compute) == kind for gpu in facts.gpus)
        found = f"{number} x {name}, {memory / 1024:.0f} GiB, sm_{compute * 10:.0f}"
        if compute < 8:
            yield Finding("GPUs", "warn", f"{found}: no bf16 in hardware", "use a card of sm_80 or newer, or precision=fp32")
        else:
            yield Finding("GPUs", "ok", found)
    if len({gpu.name for gpu in facts.gpus}) > 1:
        remedy = "choose alike ones with CUDA_VISIBLE_DEVICES; the slowest sets the pace of a group"
        yield Finding("GPUs", "warn", "of several kinds", remedy)


def _torch(facts: Facts) -> Iterator[Finding]:
    probe = facts.torch or {}
    if "error" in probe:
        yield Finding(
            "PyTorch", "fail", str(probe["error"]), "reinstall PyTorch for this machine; the README has a table of drivers"
        )
        return
    cuda = probe.get("cuda")
    if not facts.gpus:
        yield Finding("PyTorch", "ok", f"built for {f'CUDA {cuda}' if cuda else 'the CPU'}")
        return
    driver = facts.gpus[0].driver
    if cuda is None:
        yield Finding(
            "PyTorch", "fail", "built for the CPU, and there are GPUs", "pip install torch from PyTorch's index for CUDA"
        )
        return
    oldest = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    found = f"built for CUDA {cuda}, driver {driver}"
    if int(driver.partition(".")[0]) < oldest:
        remedy = f"install driver {oldest} or newer, or PyTorch built for an older CUDA"
        yield Finding("PyTorch", "fail", f"{found} is too old for it", remedy)
    elif probe.get("num_devices") != len(facts.gpus):
        remedy = "look at CUDA_VISIBLE_DEVICES, and whether the container was given all GPUs"
        status = "warn" if probe.get("num_devices") else "fail"
        yield Finding("PyTorch", status, f"{found}; sees {probe.get('num_devices')} of {len(facts.gpus)} GPUs", remedy)
    else:
        yield Finding("PyTorch", "ok", found)


def link_kind(topology: str) -> str:
    """Return how the GPUs of `nvidia-smi topo -m` reach each other: NVSwitch, NVLink, or PCIe by its worst crossing; else ""."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    peers = [[cell for cell in row[1 : len(rows) + 1] if cell != "X"] for row in rows]
    cells = [cell for row in peers for cell in row]
    if not cells:
        return ""
    if all(cell.startswith("NV") for cell in cells):
        most = max(sum(int(cell[2:]) for cell in row) for row in peers)
        return "NVSwitch" if most > MOST_LINKS else "NVLink"
    crossings = ("PIX", "PXB", "PHB", "NODE", "SYS")
    worst = max((cell for cell in cells if cell in crossings), key=crossings.index, default="?")
    some = any(cell.startswith("NV") for cell in cells)
    return f"NVLink between some, PCIe ({worst}) between others" if some else f"PCIe ({worst})"


def _links(facts: Facts) -> Iterator[Finding]:
    for index, gpu in enumerate(facts.gpus):
        if 0 < gpu.width_now < gpu.width_max:
            found = f"GPU {index} uses {gpu.width_now} of its {gpu.width_max} PCIe lanes"
            yield Finding("host link", "warn", found, "put it into a slot with all lanes; streaming is bound by this link")
    if facts.gpus and all(gpu.width_now in (0, gpu.width_max) for gpu in facts.gpus):
        gpu = facts.gpus[0]
        yield Finding("host link", "ok", f"PCIe {gpu.pcie_gen} x{gpu.width_max}" if gpu.pcie_gen else "not told")
    if len(facts.gpus) < 2:
        return
    kind = link_kind(facts.topology)
    if "PCIe" in kind:
        remedy = "sharding exchanges all parameters over it: raise batch.micro_size, or use cards joined by NVLink"
        yield Finding("GPU links", "warn", kind, remedy)
    else:
        yield Finding("GPU links", "ok", kind or "nvidia-smi does not tell")


def _infiniband(facts: Facts) -> Iterator[Finding]:
    found = ", ".join(f"{device} {state} ({layer})" for device, state, layer in facts.infiniband)
    if facts.infiniband and not any(state == "ACTIVE" for _, state, _ in facts.infiniband):
        yield Finding("InfiniBand", "warn", f"{found}: no port is active", "connect it, or several nodes exchange over Ethernet")
    elif facts.infiniband:
        yield Finding("InfiniBand", "ok", found)


def _memory(facts: Facts) -> Iterator[Finding]:
    total = min(facts.memory, facts.memory_limit or facts.memory)
    used = facts.memory - facts.memory_available
    env = facts.environment or {}
    limited = f" (of {facts.memory / GIB:.0f}, by the control group)" if total < facts.memory else ""
    found = f"{total / GIB:.1f} GiB{limited}, {facts.memory_available / GIB:.1f} available"
    if env.get("RAY_memory_monitor_refresh_ms") == "0":
        yield Finding("host memory", "ok", f"{found}; Ray does not watch it (RAY_memory_monitor_refresh_ms=0)")
        return
    threshold = _share(env.get("RAY_memory_usage_threshold"))
    if threshold is None:
        remedy = "set it to a share such as 0.98, or unset it"
        yield Finding("host memory", "fail", f"RAY_memory_usage_threshold is {env['RAY_memory_usage_threshold']!r}", remedy)
        return
    found += f"; Ray ends workers above {threshold:.0%}, {threshold * total / GIB:.1f} GiB"
    if not limited and used > threshold * total:
        remedy = "free memory, or set RAY_memory_usage_threshold before Ray starts"
        yield Finding("host memory", "fail", f"{found}, which are in use now", remedy)
    else:
        yield Finding("host memory", "ok", found)


def _share(text: str | None) -> float | None:
    """Return a share between 0 and 1, Ray's own if nothing is set, None for anything else."""
    if not text:
        return RAY_THRESHOLD
    return float(text) if re.fullmatch(r"0?\.\d+|1(\.0*)?|0", text) else None


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    if facts.shm is None:
        return
    store = min(OBJECT_STORE_SHARE * facts.memory_available, facts.shm)
    found = (
        f"/dev/shm {facts.shm / GIB:.1f} GiB; Ray's object store takes up to {store / GIB:.1f} GiB of it unless told otherwise"
    )
    if facts.shm < GIB:
        remedy = "docker run --shm-size=16g, or a memory volume at /dev/shm in Kubernetes; NCCL and Ray need it"
        yield Finding("shared memory", "fail" if len(facts.gpus) > 1 else "warn", found, remedy)
    else:
        yield Finding("shared memory", "ok", found)


def _storage(facts: Facts) -> Iterator[Finding]:
    found = f"{facts.storage} on {facts.storage_type or 'an unknown file system'}, {facts.storage_free / GB:.0f} GB free"
    num_nodes = len((facts.cluster or {}).get("nodes", ()))
    remedy = "set storage, or FLUXRAY_HOME, to a folder with more room"
    if not facts.storage_writable:
        yield Finding("storage", "fail", f"{found}, not writable", "set storage, or FLUXRAY_HOME, to a folder of yours")
    elif num_nodes > 1 and facts.storage_type in LOCAL_FILE_SYSTEMS:
        shared = f"set storage, or FLUXRAY_HOME, to a folder that all {num_nodes} nodes share"
        yield Finding("storage", "warn", f"{found}: on this node alone", shared)
    elif facts.storage_free < GB:
        yield Finding("storage", "fail", found, remedy)
    elif facts.gpus and facts.storage_free < LARGE_RUN:
        yield Finding("storage", "warn", f"{found}; checkpoints of 1.4 billion parameters take {LARGE_RUN / GB:.0f} GB", remedy)
    else:
        yield Finding("storage", "ok", found)


def _files(facts: Facts) -> Iterator[Finding]:
    if facts.num_files_max < 8192:
        remedy = "raise it with `ulimit -Hn 65536`, LimitNOFILE of systemd, or docker run --ulimit nofile=65536"
        yield Finding("open files", "warn", f"at most {facts.num_files_max}; Ray needs thousands", remedy)
    else:
        yield Finding("open files", "ok", f"at most {facts.num_files_max}")


def _compiler(facts: Facts) -> Iterator[Finding]:
    if facts.compiler is not None:
        yield Finding("C++ compiler", "ok", facts.compiler)
    elif facts.gpus:
        yield Finding(
            "C++ compiler", "fail", "none, and the profiles for GPUs compile", "apt-get install g++, or set compile=false"
        )
    else:
        yield Finding("C++ compiler", "ok", "none; compile=true would need one")
