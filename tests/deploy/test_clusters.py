"""Cluster files against Ray's own schema, and what they promise: pools, labels, scale to zero, no open port, no secret."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
from sqlalchemy.engine import make_url

from fluxray.config.load import resolve
from fluxray.config.schema import ResourcesConfig
from fluxray.runtime.cluster import Node, check_fits

ROOT = Path(__file__).resolve().parents[2]
AWS, ONPREM, RAYJOB = ROOT / "cluster.yaml", ROOT / "deploy" / "cluster-onprem.yaml", ROOT / "deploy" / "rayjob.yaml"
FILES = [AWS, *sorted((ROOT / "deploy").iterdir()), ROOT / ".dockerignore"]

RAYJOB_SPEC = {"entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"}
GROUP = {"labels", "resources", "rayStartParams", "template"}
KUBERAY = {
    "RayJobSpec": {*RAYJOB_SPEC, "rayClusterSpec", "runtimeEnvYAML", "activeDeadlineSeconds", "suspend", "metadata"},
    "RayClusterSpec": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"},
    "AuthOptions": {"mode", "secretName"},
    "HeadGroupSpec": {"serviceType", "labels", "resources", "rayStartParams", "template"},
    "WorkerGroupSpec": {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "labels",
        "resources",
        "rayStartParams",
        "template",
    },
}
"""Field names of KubeRay's v1 API, from https://ray-project.github.io/kuberay/reference/api/ (those used here and their kin)."""


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def commands(config: dict[str, Any]) -> list[str]:
    return [line for key in config if key.endswith("_ray_commands") for line in config[key]]


def ray_starts(config: dict[str, Any]) -> list[str]:
    return [line for line in commands(config) if "ray start" in line]


@pytest.mark.parametrize("path", [AWS, ONPREM], ids=lambda path: path.name)
def test_ray_accepts_the_cluster(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = prepare_config(load(path))
    validate_config(config)
    assert all(isinstance(line, str) for key in config if key.endswith("commands") for line in config[key])


@pytest.mark.parametrize("path", [AWS, ONPREM], ids=lambda path: path.name)
def test_every_option_is_one_of_ray_start(path: Path) -> None:
    known = {option for parameter in start.params for option in parameter.opts}
    for line in ray_starts(load(path)):
        used = set(re.findall(r"--[a-z-]+", line[line.index("ray start") :]))
        assert used and used <= known


@pytest.mark.parametrize("path", [AWS, ONPREM], ids=lambda path: path.name)
def test_every_process_wants_the_token_and_shows_no_port(path: Path) -> None:
    config = load(path)
    assert len(ray_starts(config)) == 2
    for line in ray_starts(config):
        assert "RAY_AUTH_MODE=token" in line
        assert "--head" not in line or "--dashboard-host=127.0.0.1" in line
        assert "--head" not in line or "RAY_JOB_STOP_WAIT_TIME_S=600" in line, "a stopped job has time to save"
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    servers = [line for line in commands(config) if "mlflow server" in line]
    assert len(servers) == 1 and "--host 127.0.0.1" in servers[0] and "MLFLOW_BACKEND_URI" in servers[0]
    assert "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false" in servers[0]


def test_the_driver_that_a_postgresql_address_means_is_installed() -> None:
    driver = make_url("postgresql://host/mlflow").get_dialect().driver
    for path in (AWS, ONPREM, ROOT / "deploy" / "Dockerfile"):
        assert f"{driver}[binary]" in path.read_text()


@pytest.mark.parametrize("path", [AWS, ONPREM], ids=lambda path: path.name)
def test_a_streamed_run_is_not_ended_for_its_memory(path: Path) -> None:
    worker = ray_starts({"worker_start_ray_commands": load(path)["worker_start_ray_commands"]})[0]
    assert "RAY_memory_usage_threshold=0.98" in worker
    assert "--object-store-memory=2000000000" in worker


@pytest.mark.parametrize(
    ("profile", "pool", "overrides"),
    [("fsdp8", "group", {}), ("a6000", "single", {}), ("a6000", "group", {"resources.num_workers": 1})],
)
def test_a_pool_chosen_by_its_label_holds_the_profile_and_scales_to_zero(profile: str, pool: str, overrides: dict) -> None:
    config = load(AWS)
    kinds = config["available_node_types"]
    nodes = [Node(kind["resources"], kind["labels"]) for kind in kinds.values()]
    asked = resolve(profile, None, {**overrides, "resources.label_selector": {"fluxray.io/pool": pool}}).resources
    check_fits(asked, nodes)
    assert all(kind["min_workers"] == 0 for name, kind in kinds.items() if name != config["head_node_type"])
    assert kinds["head"]["resources"] == {"CPU": 0}
    assert config["max_workers"] >= sum(kind.get("max_workers", 0) for kind in kinds.values())


@pytest.mark.parametrize("profile", ["cpu", "a6000", "fsdp8"])
def test_profiles_ask_for_no_label_so_that_a_lone_workstation_works(profile: str) -> None:
    assert resolve(profile).resources.label_selector == ResourcesConfig().label_selector == {}


def test_kuberay_knows_every_field() -> None:
    job = load(RAYJOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec.keys() <= KUBERAY["RayJobSpec"]
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
    assert cluster.keys() <= KUBERAY["RayClusterSpec"]
    assert cluster["authOptions"].keys() <= KUBERAY["AuthOptions"] and cluster["authOptions"]["mode"] == "token"
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert groups[0].keys() <= KUBERAY["HeadGroupSpec"] and groups[0]["serviceType"] == "ClusterIP"
    options = {parameter.opts[0].removeprefix("--") for parameter in start.params}
    for group in groups:
        assert all(isinstance(value, str) for value in [*group["rayStartParams"].values(), *group["labels"].values()])
        assert group["rayStartParams"].keys() <= options
    for group in groups[1:]:
        assert group.keys() <= KUBERAY["WorkerGroupSpec"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_rayjob_gives_its_run_what_the_run_asks_for() -> None:
    spec = load(RAYJOB)["spec"]
    words = spec["entrypoint"].split()
    overrides = [word.strip("'") for word in re.findall(r"[\w.]+='[^']*'|[\w.]+=\S+", spec["entrypoint"])]
    asked = resolve(words[words.index("--profile") + 1], None, [word.replace("'", "") for word in overrides]).resources
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    container = pod["containers"][0]
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"]
    check_fits(asked, [Node({"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}, group["labels"])])
    assert {"name": "RAY_memory_usage_threshold", "value": "0.98"} in container["env"]
    for template in (pod, spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]):
        assert template["securityContext"]["runAsNonRoot"] is True
        mounted = {mount["name"] for mount in template["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["volumes"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_here_is_a_secret_or_an_open_port(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"AKIA[0-9A-Z]{16}|-----BEGIN|://[^/\s:@]+:[^/\s@]+@|hf_[A-Za-z0-9]{20}|[0-9a-f]{32}", text)
    assert not re.search(r"(?i)(password|secret|token)\w*\s*[:=]\s*['\"]?[A-Za-z0-9+/]{16,}", text)
    assert "0.0.0.0" not in text
