"""The Ray cluster as a run needs it: connected, large enough, and with the settings that must precede torch in a worker."""

import difflib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

import fluxray
from fluxray.config.schema import ResourcesConfig, TrainConfig
from fluxray.errors import PlanError
from fluxray.objectstore import PLACE_VARIABLES
from fluxray.runtime.allocator import allocator_environment
from fluxray.runtime.lost import watched_head
from fluxray.runtime.sharing import mps_limits, served_card
from fluxray.runtime.stopping import interrupt_on_sigterm

FREE_TIMEOUT_S = 10.0
"""How long resources that an ended run still holds may take to come back."""

POLL_S = 2.0
CONNECT_TIMEOUT_S = 5.0
"""Ray itself goes on for many minutes trying to reach a cluster that is not there."""

PROBE_S = 60.0
"""How long a look at a worker's card may take, the start of a process included."""

GRAIN = 1e-4
"""Ray counts resources in steps of this size."""

ACCELERATOR_PREFIX = "accelerator_type:"
ALONE = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_worker_maximum_startup_concurrency": "16"}
"""Of a Ray that is started for one run or sweep: nobody takes its node away, which a process of each run would watch for; and a
few processes are started at once, of which Ray warns on a machine of few cores."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Node:
    """One machine of the cluster: all that it has, free or not."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]


@contextmanager
def session(verbose: bool, again: Callable[[], str] = lambda: "try again") -> Iterator[int | None]:
    """Connect to the cluster of RAY_ADDRESS, else start Ray on this machine for as long as the context lasts.

    Yields this machine's number of cores if Ray runs here alone, else None. A Ray that is already connected is used and left on.
    With `verbose`, what workers print is shown. `again` returns what goes on where the cluster's head is lost meanwhile.
    """
    if ray.is_initialized():
        yield None
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    _check_address(address)
    with _importable_in_workers(), _set_where_missing(ALONE if address == "local" else {}):
        try:
            ray.init(address=address, log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR)
        except (ConnectionError, ValueError) as error:
            raise PlanError(f"RAY_ADDRESS: {address!r} cannot be reached ({_first_line(error)}); unset it to run here") from None
    interrupt_on_sigterm()  # Ray has put a handler of its own in its place
    try:
        with watched_head(ray.get_runtime_context().gcs_address, again):
            yield len(os.sched_getaffinity(0)) if address == "local" else None
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise PlanError for the job server's address and for one where nothing answers."""
    if address.startswith(("http://", "https://")):
        raise PlanError(
            "RAY_ADDRESS: an http address is the job server's; submit the run with `ray job submit -- python jobs/train.py ...`, "
            "set the cluster's own address, such as head-node:6379, or unset it to run here"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise PlanError(
            f"RAY_ADDRESS: {address!r} does not answer ({_first_line(error)}); start that cluster, correct the address, "
            f"or unset it to run here"
        ) from None


def check_machine(asked: ResourcesConfig) -> None:
    """Raise PlanError for more than this machine has where no cluster is named, before Ray takes its time to start here."""
    here = machine_alone()
    if here is not None:
        check_fits(asked.model_copy(update={"label_selector": {}, "accelerator": None}), [here], owner="this machine")


def alive_nodes() -> list[Node]:
    """Return the nodes of the connected cluster."""
    return [Node(node["Resources"], node.get("Labels", {})) for node in ray.nodes() if node["Alive"]]


def machine_alone() -> Node | None:
    """Return this machine as the only node, where Ray would be started here; None where a cluster is named or connected."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):
        return None
    import torch

    return Node({"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}, {})


def check_resources(asked: ResourcesConfig) -> None:
    """Raise PlanError for what the cluster cannot hold, at once or after `wait_s`, and soon for what others are using."""
    _await_nodes(asked)
    nodes = alive_nodes()
    check_fits(asked, nodes)
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while (taken := _taken(asked, ray.available_resources())) and time.monotonic() < deadline:
        time.sleep(0.5)
    if taken:
        raise PlanError(f"{taken} on a cluster of {_inventory(nodes)}; wait for other runs to end, or ask for less")


def _await_nodes(asked: ResourcesConfig) -> None:
    """Ask the cluster's autoscaler for nodes, and return when the workers fit or `wait_s` are over."""
    if asked.wait_s == 0 or _fits(asked):
        return
    print(f"waiting up to {asked.wait_s} s for nodes that hold {asked.num_workers} workers", flush=True)
    kind = {ACCELERATOR_PREFIX + asked.accelerator: 0.001} if asked.accelerator is not None else {}
    bundle = {"CPU": asked.cpu, **({"GPU": asked.gpu} if asked.gpu > 0 else {}), **kind}
    selectors = [dict(asked.label_selector)] * asked.num_workers if asked.label_selector else None
    request_resources(bundles=[bundle] * asked.num_workers, bundle_label_selectors=selectors)
    try:
        deadline = time.monotonic() + asked.wait_s
        while not _fits(asked) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        request_resources(bundles=[])  # what is asked for otherwise stays up for ever


def _fits(asked: ResourcesConfig) -> bool:
    try:
        check_fits(asked, alive_nodes())
    except PlanError:
        return False
    return True


def check_fits(asked: ResourcesConfig, nodes: Sequence[Node], owner: str = "the cluster") -> None:
    """Raise PlanError if `nodes`, all free, could not hold the workers: what is asked, what `owner` has, which key to change."""
    labelled = [node for node in nodes if _matches(node.labels, asked.label_selector)]
    if not labelled:
        labels = sorted(
            {f"{key}={value}" for node in nodes for key, value in node.labels.items() if not key.startswith("ray.io/")}
        )
        raise PlanError(
            f"resources.label_selector: {dict(asked.label_selector)} matches none of the cluster's {_nodes(nodes)} "
            f"(labels there: {', '.join(labels) or 'none'}); start nodes with `ray start --labels`, or change the key"
        )
    fitting = matching(nodes, asked)
    if not fitting:
        found = {key for node in labelled for key in node.resources if key.startswith(ACCELERATOR_PREFIX)}
        names = sorted(key.removeprefix(ACCELERATOR_PREFIX) for key in found)
        close = difflib.get_close_matches(str(asked.accelerator), names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there: {', '.join(names) or 'none'}; drop the key or change it"
        raise PlanError(f"resources.accelerator: {asked.accelerator!r} is on none of the cluster's {_nodes(labelled)}; {hint}")
    places = sum(room(node, asked) for node in fitting)
    if places < asked.num_workers:
        raise PlanError(_too_small(asked, fitting, places, owner))


def matching(nodes: Sequence[Node], asked: ResourcesConfig) -> list[Node]:
    """Return the nodes that have the labels and the kind of GPU that are asked for."""
    labelled = [node for node in nodes if _matches(node.labels, asked.label_selector)]
    return [node for node in labelled if asked.accelerator is None or ACCELERATOR_PREFIX + asked.accelerator in node.resources]


def room(node: Node, asked: ResourcesConfig) -> int:
    """Return for how many workers a node that is all free has room. A share of a GPU is one of one card."""
    places = math.floor((node.resources.get("CPU", 0) + GRAIN) / asked.cpu)
    if asked.gpu > 0:
        cards = node.resources.get("GPU", 0) + GRAIN
        of_cards = math.floor(cards) * math.floor(1 / asked.gpu + GRAIN) if asked.gpu < 1 else math.floor(cards / asked.gpu)
        places = min(places, of_cards)
    return places


def find_served_card(asked: ResourcesConfig) -> int | None:
    """Return the memory (bytes) of a card that a worker would share under NVIDIA's MPS; None for whole cards and without MPS."""
    if not 0 < asked.gpu < 1:
        return None
    selector = dict(asked.label_selector) or None
    probe = ray.remote(served_card).options(
        num_cpus=0, num_gpus=asked.gpu, accelerator_type=asked.accelerator, label_selector=selector
    )
    try:
        return ray.get(probe.remote(), timeout=PROBE_S)
    except (RayError, TimeoutError) as error:
        print(f"whether MPS serves the card is not known ({_first_line(error)}): its limits are not set", flush=True)
        return None


def _reads_a_store(config: TrainConfig) -> bool:
    data = config.data
    sources = (data.source,) if isinstance(data.source, str) else data.source
    return any("s3://" in (reference or "") for reference in (*sources, data.cache, data.eval_cache, data.prior_cache))


def worker_environment(config: TrainConfig, local_cores: int | None, served_memory: int | None = None) -> dict[str, str]:
    """Return the environment of each worker, which must be set before torch is imported there.

    `local_cores` is the number of cores that a lone CPU worker may use all of; None on a cluster shared with others.
    `served_memory` is the memory (bytes) of a card that MPS shares out; None without MPS.
    """
    resources = config.resources
    alone = resources.num_workers == 1 and resources.gpu == 0 and local_cores is not None
    threads = str(local_cores if alone else max(1, int(resources.cpu)))
    env = {"TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(THREAD_VARIABLES, threads)}
    if config.checkpoint.mirror is not None or _reads_a_store(config):
        env |= {name: os.environ[name] for name in PLACE_VARIABLES if name in os.environ}
    env |= allocator_environment(config)
    if config.deterministic:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if resources.gpu > 0:
        env |= {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if served_memory is not None:
        env |= mps_limits(resources.gpu, served_memory)
    return env


@contextmanager
def _importable_in_workers() -> Iterator[None]:
    """Let the workers of a local Ray import this fluxray, installed or not, wherever the driver was started."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(fluxray.__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else root
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _set_where_missing(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment that the user has not set."""
    missing = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Apply Ray's label selectors: `v`, `!v`, `in(a,b)`, `!in(a,b)`."""
    for key, wanted in selector.items():
        positive = not wanted.startswith("!")
        text = wanted.removeprefix("!")
        values = [v.strip() for v in text[3:-1].split(",")] if text.startswith("in(") and text.endswith(")") else [text]
        if (labels.get(key) in values) != positive:
            return False
    return True


def _too_small(asked: ResourcesConfig, nodes: Sequence[Node], room: int, owner: str) -> str:
    workers = asked.num_workers
    shares = [f"{share:g} {name}" for name, share in (("GPU", asked.gpu), ("CPU", asked.cpu)) if share > 0]
    key = "resources.num_workers" if room else "resources.cpu"
    if asked.gpu > sum(node.resources.get("GPU", 0) for node in nodes) / workers + GRAIN:
        key = "resources.gpu"
    remedy = f"set resources.num_workers={room}, or ask less for each" if room else "ask for less"
    if key == "resources.gpu" and not any(node.resources.get("GPU") for node in nodes):
        remedy = "set RAY_ADDRESS to a cluster with GPUs, or use --profile cpu"
    return (
        f"{key}: {workers} {'worker' if workers == 1 else 'workers'} of {' and '.join(shares)} each are asked for, "
        f"{owner} has {_inventory(nodes)} and room for {room}; {remedy}"
    )


def _taken(asked: ResourcesConfig, free: Mapping[str, float]) -> str:
    for key, name, share in (("resources.gpu", "GPU", asked.gpu), ("resources.cpu", "CPU", asked.cpu)):
        wanted = share * asked.num_workers
        if wanted > free.get(name, 0) + GRAIN:
            return f"{key}: {wanted:g} {name}s are asked for, {free.get(name, 0):g} are free"
    return ""


def _inventory(nodes: Sequence[Node]) -> str:
    total = {name: sum(node.resources.get(name, 0) for node in nodes) for name in ("GPU", "CPU")}
    return f"{total['GPU']:g} GPUs and {total['CPU']:g} CPUs on {_nodes(nodes)}"


def _nodes(nodes: Sequence[Node]) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
