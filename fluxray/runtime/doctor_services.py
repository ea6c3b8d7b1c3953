"""What `fluxray doctor` says of services: Ray's cluster and job server, what a job would upload, MLflow, open ports."""

from collections.abc import Iterator, Sequence

from fluxray.runtime.facts import Facts
from fluxray.runtime.finding import Finding
from fluxray.runtime.ports import RAY, WANTS_TOKEN
from fluxray.runtime.upload import LIMIT, MIB, REMEDY


def _ray(facts: Facts) -> Iterator[Finding]:
    address = (facts.environment or {}).get("RAY_ADDRESS")
    cluster = facts.cluster
    if address and address.startswith(("http://", "https://")):
        remedy = "name it in RAY_API_SERVER_ADDRESS, for `ray job submit`; unset RAY_ADDRESS, or set it to such as head-node:6379"
        yield Finding("Ray cluster", "fail", f"RAY_ADDRESS is a job server's, {address}: `fluxray train` refuses it", remedy)
    elif not address or cluster is None:
        yield Finding("Ray cluster", "ok", "none named by RAY_ADDRESS; a run starts Ray on this machine")
    elif "error" in cluster:
        remedy = "start it, correct RAY_ADDRESS, or unset it to run on this machine"
        yield Finding("Ray cluster", "fail", f"{address}: {cluster['error']}", remedy)
    else:
        yield Finding("Ray cluster", "ok", f"{address}: {_inventory(cluster['nodes'])}")


def _job_server(facts: Facts) -> Iterator[Finding]:
    environment = facts.environment or {}
    address, status = environment.get("RAY_API_SERVER_ADDRESS"), facts.job_server
    if not address:
        return
    if status is None:
        remedy = "open the way to it (`ray dashboard cluster.yaml`), correct RAY_API_SERVER_ADDRESS, or unset it"
        yield Finding("job server", "fail", f"{address} does not answer as a Ray dashboard does", remedy)
    elif status not in WANTS_TOKEN:
        remedy = "start its head with RAY_AUTH_MODE=token"
        yield Finding("job server", "warn", f"{address} takes jobs from anyone who reaches it", remedy)
    elif environment.get("RAY_AUTH_MODE") != "token":
        remedy = "export RAY_AUTH_MODE=token and have its token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        yield Finding("job server", "warn", f"{address} wants a token: `ray job submit` sends none", remedy)
    else:
        yield Finding("job server", "ok", f"{address} takes jobs, with a token")


def _working_directory(facts: Facts) -> Iterator[Finding]:
    upload = facts.upload
    if upload is None:
        return
    found = f"`ray job submit --working-dir .` would upload {upload}; the job server takes {LIMIT // MIB} MiB"
    if upload.is_too_large or not upload.complete:
        yield Finding("working directory", "warn", found, REMEDY)
    else:
        yield Finding("working directory", "ok", found)


def _inventory(nodes: Sequence[tuple[dict[str, float], dict[str, str]]]) -> str:
    kinds: dict[str, int] = {}
    for resources, labels in nodes:
        own = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()) if not key.startswith("ray.io/"))
        kind = f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs{f' ({own})' if own else ''}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _mlflow(facts: Facts) -> Iterator[Finding]:
    if facts.database == "none":
        yield Finding("MLflow", "ok", "no database yet; the first run makes it")
    elif facts.database == "ok":
        yield Finding("MLflow", "ok", f"database {facts.storage}/mlflow.db can be read")
    else:
        remedy = "move the file away for a new one, or put a copy of it back"
        yield Finding("MLflow", "fail", f"database {facts.storage}/mlflow.db: {facts.database}", remedy)


def _ports(facts: Facts) -> Iterator[Finding]:
    for server in facts.listeners:
        found = f"{server.kind} listens on {server.address}:{server.port}"
        if server.guarded:
            yield Finding("open ports", "ok", f"{found}, with authentication")
        elif server.kind == RAY:
            remedy = "start Ray with RAY_AUTH_MODE=token, or --dashboard-host=127.0.0.1"
            yield Finding("open ports", "fail", f"{found}, and runs what anyone sends it", remedy)
        else:
            yield Finding("open ports", "warn", f"{found}, open to anyone", "start it with --host 127.0.0.1, or behind a login")
    if not facts.listeners:
        yield Finding("open ports", "ok", "no Ray dashboard and no MLflow that other machines reach")


SERVICES = (_ray, _job_server, _working_directory, _mlflow, _ports)
"""In the order in which one would mend them."""
