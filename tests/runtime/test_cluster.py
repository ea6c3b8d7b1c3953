import os

import pytest

from fluxray.config.load import resolve
from fluxray.config.schema import ResourcesConfig
from fluxray.errors import PlanError
from fluxray.runtime import cluster
from fluxray.runtime.cluster import Node, check_fits, worker_environment

LAPTOP = Node({"CPU": 2, "memory": 1e9}, {"ray.io/node-id": "x"})
A100 = Node({"CPU": 96, "GPU": 8, "accelerator_type:A100": 1}, {"pool": "group"})
A6000 = Node({"CPU": 16, "GPU": 1, "accelerator_type:RTX-A6000": 1}, {"pool": "single"})


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        ({"num_workers": 2, "cpu": 0.9}, [LAPTOP]),
        ({"num_workers": 10, "cpu": 0.2}, [LAPTOP]),
        ({"num_workers": 8, "cpu": 4, "gpu": 1}, [LAPTOP, A100]),
        ({"num_workers": 9, "cpu": 4, "gpu": 1}, [A6000, A100]),
        ({"gpu": 1, "label_selector": {"pool": "in(single, spare)"}}, [A6000, A100]),
        ({"gpu": 1, "label_selector": {"pool": "!group"}, "accelerator": "RTX-A6000"}, [A6000, A100]),
    ],
)
def test_what_fits(asked, nodes):
    check_fits(ResourcesConfig(**asked), nodes)


@pytest.mark.parametrize(
    ("asked", "nodes", "message"),
    [
        (
            {"num_workers": 1000, "gpu": 1},
            [LAPTOP],
            r"^resources\.gpu: 1000 workers .* 0 GPUs and 2 CPUs on 1 node .*profile cpu$",
        ),
        ({"num_workers": 9, "gpu": 1}, [A100], r"^resources\.gpu: 9 workers .* 8 GPUs .*room for 8; set resources.num_workers=8"),
        ({"num_workers": 3, "cpu": 0.9}, [LAPTOP], r"^resources\.num_workers: 3 workers of 0\.9 CPU each .*room for 2"),
        (
            {"num_workers": 1, "cpu": 3},
            [LAPTOP, LAPTOP],
            r"^resources\.cpu: 1 worker of 3 CPU .*4 CPUs on 2 nodes and room for 0",
        ),
        ({"gpu": 1, "accelerator": "A6000"}, [A6000], r"^resources\.accelerator: 'A6000' .*did you mean RTX-A6000\?$"),
        ({"gpu": 1, "accelerator": "H200"}, [A100], r"'H200' is on none .*there: A100"),
        (
            {"label_selector": {"pool": "sinlge"}},
            [A6000, A100],
            r"^resources\.label_selector: .* 2 nodes .*pool=group, pool=",
        ),
        ({"num_workers": 2, "gpu": 1, "label_selector": {"pool": "single"}}, [A6000, A100], "1 GPUs and 16 CPUs on 1 node"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_stock_and_remedy(asked, nodes, message):
    with pytest.raises(PlanError, match=message) as refusal:
        check_fits(ResourcesConfig(**asked), nodes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "local_cores", "threads"),
    [
        ({}, 6, "6"),
        ({}, None, "1"),
        ({"resources.num_workers": 2}, 6, "1"),
        ({"resources.num_workers": 2, "resources.cpu": 3.5}, 6, "3"),
        ({"resources.gpu": 1, "resources.cpu": 4}, 16, "4"),
    ],
)
def test_threads_of_a_worker(overrides, local_cores, threads):
    env = worker_environment(resolve("cpu", "lm-tiny", overrides), local_cores)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == threads


def test_cuda_settings_follow_the_configuration():
    plain = worker_environment(resolve("cpu", "lm-tiny"), None)
    assert not any(name.startswith(("PYTORCH", "CUBLAS", "NCCL", "TORCH")) for name in plain)
    overrides = {"resources.gpu": 1, "allocator": "expandable", "deterministic": True}
    env = worker_environment(resolve("cpu", "lm-tiny", overrides), None)
    assert env["PYTORCH_ALLOC_CONF"] == env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert env["NCCL_NVLS_ENABLE"] == "0"
    asynchronous = worker_environment(resolve("cpu", "lm-tiny", {**overrides, "allocator": "async"}), None)
    assert asynchronous["PYTORCH_ALLOC_CONF"] == "backend:cudaMallocAsync"


def test_a_share_of_a_card_that_mps_serves_limits_the_process():
    half = resolve("cpu", "lm-tiny", {"resources.gpu": 0.5})
    assert not any(name.startswith("CUDA_MPS") for name in worker_environment(half, None))
    env = worker_environment(half, None, served_memory=48 * 2**30)
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={24 * 1024}M"
    third = worker_environment(resolve("cpu", "lm-tiny", {"resources.gpu": 0.33}), None, served_memory=10**9)
    assert (third["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], third["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]) == ("33", "0=314M")


@pytest.mark.parametrize("gpu", [0, 1, 2])
def test_whole_cards_are_not_looked_at_for_mps(gpu, monkeypatch):
    monkeypatch.setattr(cluster.ray, "remote", None)
    assert cluster.find_served_card(ResourcesConfig(gpu=gpu)) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"num_workers": 10_000},
            r"^resources\.num_workers: 10000 workers .* this machine has .* room for \d+; set resources\.num_w",
        ),
        ({"gpu": 1000, "label_selector": {"pool": "x"}}, r"^resources\.gpu: 1 worker of 1000 GPU and 1 CPU .* this machine has"),
    ],
)
def test_what_this_machine_cannot_hold_is_refused_before_ray_is_started(asked, message, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "init", None)
    with pytest.raises(PlanError, match=message):
        cluster.check_machine(ResourcesConfig(**asked))
    cluster.check_machine(ResourcesConfig())
    monkeypatch.setenv("RAY_ADDRESS", "head-node:6379")
    cluster.check_machine(ResourcesConfig(**asked))


@pytest.mark.parametrize(("arrives_after", "outcome"), [(0, "at once"), (3, "waited"), (99, "refused")])
def test_nodes_that_an_autoscaler_may_start_are_asked_for_and_awaited(monkeypatch, capsys, arrives_after, outcome):
    asked = ResourcesConfig(num_workers=8, cpu=4, gpu=1, wait_s=5, label_selector={"pool": "group"})
    looks, requests, clock = [], [], iter(range(100))
    head = {"Alive": True, "Resources": {"CPU": 4}, "Labels": {}}
    group = {"Alive": True, "Resources": {"CPU": 96, "GPU": 8}, "Labels": {"pool": "group"}}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: looks.append(1) or [head] + [group] * (len(looks) > arrives_after))
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"CPU": 100, "GPU": 8})
    monkeypatch.setattr(cluster, "request_resources", lambda **what: requests.append(what))
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(cluster.time, "monotonic", lambda: next(clock))
    if outcome == "refused":
        with pytest.raises(PlanError, match="label_selector"):
            cluster.check_resources(asked)
    else:
        cluster.check_resources(asked)
    if outcome == "at once":
        assert requests == []
        return
    selectors = [{"pool": "group"}] * 8
    assert requests == [{"bundles": [{"CPU": 4, "GPU": 1}] * 8, "bundle_label_selectors": selectors}, {"bundles": []}]
    assert "waiting up to 5 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://head-node:8265", r"^RAY_ADDRESS: an http address is the job server's; submit .*head-node:6379, or unset it"),
        ("127.0.0.1:9", r"^RAY_ADDRESS: '127\.0\.0\.1:9' does not answer \(.*refused\); start that cluster"),
        ("ray://127.0.0.1:9", "does not answer"),
        ("127.0.0.1:99999", "does not answer"),
    ],
)
def test_an_address_where_no_cluster_answers_is_refused_at_once(address, message, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PlanError, match=message), cluster.session(verbose=False):
        pass


def test_variables_are_set_for_a_while_where_the_user_has_not_set_them(monkeypatch):
    monkeypatch.setenv("FLUXRAY_TEST_MINE", "mine")
    with cluster._set_where_missing({"FLUXRAY_TEST_MINE": "other", "FLUXRAY_TEST_NEW": "new"}):
        assert (os.environ["FLUXRAY_TEST_MINE"], os.environ["FLUXRAY_TEST_NEW"]) == ("mine", "new")
    assert os.environ["FLUXRAY_TEST_MINE"] == "mine" and "FLUXRAY_TEST_NEW" not in os.environ
