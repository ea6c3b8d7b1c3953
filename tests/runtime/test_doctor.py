import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fluxray import cli
from fluxray.runtime import facts as gathering
from fluxray.runtime.doctor import GB, GIB, examine, lines, link_kind
from fluxray.runtime.facts import Facts, Package, gather, read_gpus
from fluxray.runtime.paths import Home
from fluxray.runtime.ports import RAY, Listener, json_status, read_listening, server_kind
from fluxray.runtime.upload import MIB, Upload

SMI_A6000 = "NVIDIA RTX A6000, 49140 MiB, 580.95.05, 8.6, 4, 16, 16\n"
SMI_A100 = "NVIDIA A100-SXM4-40GB, 40960 MiB, 580.95.05, 8.0, 4, 16, 16\n" * 8
SMI_FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"

LAPTOP = Facts(
    system="Linux 6.8, x86_64",
    packages=(Package("torch", "2.13.0", ">=2.11", True),),
    torch={"cuda": None, "num_devices": 0},
    memory=16 * GIB,
    memory_available=12 * GIB,
    shm=8 * GIB,
    storage="/home/you/.fluxray",
    storage_free=80 * GB,
    storage_type="ext4",
    environment={},
    num_files_max=524288,
)
A6000 = replace(
    LAPTOP,
    smi="ok",
    gpus=read_gpus(SMI_A6000)[1],
    torch={"cuda": "13.0", "num_devices": 1},
    memory=128 * GIB,
    memory_available=120 * GIB,
    shm=64 * GIB,
    storage_free=500 * GB,
    compiler="/usr/bin/c++",
)


def matrix(*rows: str) -> str:
    heading = "\t\x1b[4m" + "\t".join(f"GPU{index}" for index in range(len(rows))) + "\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    body = "".join(f"GPU{index}\t{row}\t0-15\t0\n" for index, row in enumerate(rows))
    return f"{heading}{body}\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"


def square(number: int, cell: str) -> str:
    return matrix(*("\t".join("X" if column == row else cell for column in range(number)) for row in range(number)))


GROUP = replace(
    A6000,
    gpus=read_gpus(SMI_A100)[1],
    torch={"cuda": "13.0", "num_devices": 8},
    topology=square(8, "NV12"),
    infiniband=(("mlx5_0", "ACTIVE", "InfiniBand"),),
)


@pytest.mark.parametrize("facts", [LAPTOP, A6000, GROUP], ids=["laptop", "a6000", "group"])
def test_a_sound_machine_gets_no_warning(facts):
    assert [finding for finding in examine(facts) if finding.status != "ok" or finding.remedy] == []


def test_the_facts_that_matter_are_said():
    said = {finding.name: finding.found for finding in examine(GROUP)}
    assert said["GPUs"] == "8 x NVIDIA A100-SXM4-40GB, 40 GiB, sm_80"
    assert said["PyTorch"] == "built for CUDA 13.0, driver 580.95.05"
    assert said["host link"] == "PCIe 4 x16"
    assert said["GPU links"] == "NVSwitch"
    assert said["InfiniBand"] == "mlx5_0 ACTIVE (InfiniBand)"
    assert said["host memory"] == "128.0 GiB, 120.0 available; Ray ends workers above 95%, 121.6 GiB"
    assert "object store takes up to 36.0 GiB" in said["shared memory"]


OLD, TURING = read_gpus(SMI_A6000.replace("580.95.05", "570.86"))[1], read_gpus(SMI_A6000.replace("8.6", "7.5"))[1]
NARROW, MIXED = read_gpus(SMI_A6000.replace("16, 16", "16, 8"))[1], read_gpus(SMI_A6000 + SMI_A100)[1][:2]
TWO_NODES = {"nodes": [[{"CPU": 4}, {"fluxray.io/pool": "head", "ray.io/node-id": "x"}], [{"CPU": 96, "GPU": 8}, {}]]}
SEES_TWO = {"torch": {"cuda": "13.0", "num_devices": 2}, "topology": square(2, "NV4")}
NO_MLFLOW, OLD_RAY = Package("mlflow", None, ">=3.17", False), Package("ray", "2.9", ">=2.60", False)
AT = {"RAY_ADDRESS": "head:6379"}
JOBS_AT = {"RAY_API_SERVER_ADDRESS": "http://head:8265"}

FAULTS = {
    "library missing": (
        LAPTOP,
        {"packages": (NO_MLFLOW,)},
        "libraries",
        "fail",
        "mlflow is missing",
    ),
    "library old": (
        LAPTOP,
        {"packages": (OLD_RAY,)},
        "libraries",
        "fail",
        "ray 2.9, wanted >=2.60",
    ),
    "driver does not answer": (LAPTOP, {"smi": read_gpus(SMI_FAILED)[0]}, "GPUs", "fail", "couldn't communicate"),
    "torch broken": (LAPTOP, {"torch": {"error": "ImportError: libcudart"}}, "PyTorch", "fail", "libcudart"),
    "torch for the CPU": (A6000, {"torch": {"cuda": None, "num_devices": 0}}, "PyTorch", "fail", "built for the CPU"),
    "driver too old": (A6000, {"gpus": OLD, "torch": {"cuda": "13.0", "num_devices": 0}}, "PyTorch", "fail", "is too old"),
    "torch sees none": (A6000, {"torch": {"cuda": "13.0", "num_devices": 0}}, "PyTorch", "fail", "sees 0 of 1"),
    "torch sees some": (GROUP, {"torch": {"cuda": "13.0", "num_devices": 4}}, "PyTorch", "warn", "sees 4 of 8"),
    "no bf16": (A6000, {"gpus": TURING}, "GPUs", "warn", "no bf16"),
    "several kinds": (GROUP, {"gpus": MIXED, **SEES_TWO}, "GPUs", "warn", "several kinds"),
    "narrow slot": (A6000, {"gpus": NARROW}, "host link", "warn", "8 of its 16 PCIe lanes"),
    "group over PCIe": (GROUP, {"topology": square(8, "SYS")}, "GPU links", "warn", "PCIe (SYS)"),
    "idle InfiniBand": (GROUP, {"infiniband": (("mlx5_0", "DOWN", "InfiniBand"),)}, "InfiniBand", "warn", "no port is active"),
    "host full": (LAPTOP, {"memory_available": GIB // 2}, "host memory", "fail", "which are in use now"),
    "threshold no number": (LAPTOP, {"environment": {"RAY_memory_usage_threshold": "98%"}}, "host memory", "fail", "'98%'"),
    "small shm, laptop": (LAPTOP, {"shm": 64 * 2**20}, "shared memory", "warn", "/dev/shm 0.1 GiB"),
    "small shm, group": (GROUP, {"shm": 64 * 2**20}, "shared memory", "fail", "/dev/shm 0.1 GiB"),
    "storage of another": (LAPTOP, {"storage_writable": False}, "storage", "fail", "not writable"),
    "disk full": (LAPTOP, {"storage_free": GB // 2}, "storage", "fail", "0 GB free"),
    "disk small for GPUs": (A6000, {"storage_free": 50 * GB}, "storage", "warn", "take 51 GB"),
    "storage of one node": (A6000, {"cluster": TWO_NODES}, "storage", "warn", "on this node alone"),
    "cluster away": (LAPTOP, {"environment": AT, "cluster": {"error": "no answer"}}, "Ray cluster", "fail", "no answer"),
    "cluster by its job server": (
        LAPTOP,
        {"environment": {"RAY_ADDRESS": "http://head:8265"}},
        "Ray cluster",
        "fail",
        "http://head:8265: `fluxray train` refuses it",
    ),
    "job server away": (LAPTOP, {"environment": JOBS_AT}, "job server", "fail", "http://head:8265 does not answer"),
    "job server open": (LAPTOP, {"environment": JOBS_AT, "job_server": 200}, "job server", "warn", "from anyone"),
    "token not sent": (
        LAPTOP,
        {"environment": JOBS_AT, "job_server": 401},
        "job server",
        "warn",
        "`ray job submit` sends none",
    ),
    "checkout too large": (
        LAPTOP,
        {"upload": Upload(100 * MIB, "data", 99 * MIB)},
        "working directory",
        "warn",
        "would upload 100.0 MiB (most in data: 99.0); the job server takes 100 MiB",
    ),
    "checkout with too many files": (
        LAPTOP,
        {"upload": Upload(9 * MIB, "data", 8 * MIB, complete=False)},
        "working directory",
        "warn",
        "more than 9.0 MiB",
    ),
    "database damaged": (LAPTOP, {"database": "file is not a database"}, "MLflow", "fail", "not a database"),
    "dashboard open": (LAPTOP, {"listeners": (Listener(RAY, "0.0.0.0", 8265, False),)}, "open ports", "fail", "0.0.0.0:8265"),
    "MLflow open": (LAPTOP, {"listeners": (Listener("MLflow", "::", 5000, False),)}, "open ports", "warn", ":::5000"),
    "few files": (LAPTOP, {"num_files_max": 4096}, "open files", "warn", "at most 4096"),
    "no compiler": (A6000, {"compiler": None}, "C++ compiler", "fail", "none"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_alone_and_has_a_remedy(fault):
    machine, change, name, status, found = FAULTS[fault]
    bad = [finding for finding in examine(replace(machine, **change)) if finding.status != "ok"]
    assert [(finding.name, finding.status) for finding in bad] == [(name, status)]
    assert found in bad[0].found and bad[0].remedy
    assert any(line.strip() == f"-> {bad[0].remedy}" for line in lines(bad))


@pytest.mark.parametrize(
    ("change", "name", "found"),
    [
        ({"environment": {"RAY_memory_usage_threshold": "0.98"}}, "host memory", "above 98%, 15.7 GiB"),
        ({"environment": {"RAY_memory_monitor_refresh_ms": "0"}}, "host memory", "Ray does not watch it"),
        ({"memory_limit": 8 * GIB}, "host memory", "8.0 GiB (of 16, by the control group)"),
        ({"listeners": (Listener(RAY, "10.0.0.1", 8265, True),)}, "open ports", "with authentication"),
        ({"environment": {**JOBS_AT, "RAY_AUTH_MODE": "token"}, "job_server": 401}, "job server", "takes jobs, with a token"),
        ({"upload": Upload(MIB // 2, "fluxray", MIB // 4)}, "working directory", "would upload 0.5 MiB (most in fluxray: 0.2)"),
        (
            {"environment": AT, "cluster": TWO_NODES, "storage_type": "nfs4"},
            "Ray cluster",
            "(fluxray.io/pool=head)",
        ),
        ({"database": "ok"}, "MLflow", "can be read"),
    ],
)
def test_what_is_no_fault_is_said_without_a_warning(change, name, found):
    findings = examine(replace(LAPTOP, **change))
    assert all(finding.status == "ok" and not finding.remedy for finding in findings)
    assert any(finding.name == name and found in finding.found for finding in findings)


@pytest.mark.parametrize(
    ("topology", "kind"),
    [
        ("", ""),
        (matrix("X"), ""),
        (square(8, "NV12"), "NVSwitch"),
        (square(8, "NV18"), "NVSwitch"),
        (square(4, "NV4"), "NVLink"),
        (square(2, "NV18"), "NVLink"),
        (square(2, "PHB"), "PCIe (PHB)"),
        (matrix("X\tPIX\tSYS", "PIX\tX\tSYS", "SYS\tSYS\tX"), "PCIe (SYS)"),
        (
            matrix("X\tNV4\tSYS\tSYS", "NV4\tX\tSYS\tSYS", "SYS\tSYS\tX\tNV4", "SYS\tSYS\tNV4\tX"),
            "NVLink between some, PCIe (SYS) between others",
        ),
    ],
)
def test_the_topology_is_read(topology, kind):
    assert link_kind(topology) == kind


def test_gpus_are_read_with_fields_that_the_card_does_not_know():
    state, gpus = read_gpus("NVIDIA H200, 143771 MiB, 580.159.04, 9.0, [N/A], [N/A], [N/A]\n")
    assert state == "ok" and gpus[0].compute == 9.0 and gpus[0].width_max == 0
    findings = examine(replace(A6000, gpus=gpus))
    assert {"host link": "not told"}.items() <= {finding.name: finding.found for finding in findings}.items()
    assert read_gpus("") == ("absent", ())


def test_listening_sockets_that_others_reach_are_read():
    heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rest = "00000000:00000000 00:00000000 00000000     0        0"
    table = heading + "".join(
        f"   {number}: {local} 00000000:0000 {state} {rest} {inode} 1\n"
        for number, (local, state, inode) in enumerate(
            [
                ("00000000:2049", "0A", "11"),
                ("0100007F:2049", "0A", "12"),
                ("0A0000C0:1388", "0A", "13"),
                ("00000000:2049", "01", "14"),
                ("00000000000000000000000000000000:2049", "0A", "15"),
                ("00000000000000000000000001000000:2049", "0A", "16"),
                ("0000000000000000FFFF00000100007F:2049", "0A", "17"),
            ]
        )
    )
    assert read_listening(table) == {"11": ("0.0.0.0", 8265), "13": ("192.0.0.10", 5000), "15": ("::", 8265)}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python3 /x/site-packages/ray/dashboard/dashboard.py --host=0.0.0.0", RAY),
        ("python -m mlflow server --host 0.0.0.0", "MLflow"),
        ("python -m uvicorn mlflow.server.fastapi_app:app", "MLflow"),
        ("vim mlflow.md", None),
        ("", None),
    ],
)
def test_servers_are_known_by_their_command_lines(command, kind):
    assert server_kind(command) == kind


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, kind = {"/open": (200, "application/json"), "/token": (401, "text/plain")}.get(self.path, (200, "text/plain"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_open_server_is_told_from_a_guarded_and_from_another_one(server):
    assert json_status(f"{server}/open") == 200
    assert json_status(f"{server}/token") == 401
    assert json_status(f"{server}/metrics") is None
    assert json_status("http://127.0.0.1:1/") is None
    assert json_status("nonsense") is None


def test_an_address_of_a_job_server_is_no_cluster_and_is_not_asked_as_one(monkeypatch, server):
    monkeypatch.setenv("RAY_ADDRESS", f"{server}/open")
    assert gathering._cluster() is None
    monkeypatch.setattr(gathering, "json_status", lambda url: [url])
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265/")
    assert gathering._job_server() == ["http://head:8265/api/jobs/"]


def test_a_hung_server_and_a_hung_probe_end_in_time(monkeypatch):
    monkeypatch.setattr("fluxray.runtime.ports.HTTP_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.perf_counter()
        assert json_status(f"http://127.0.0.1:{silent.getsockname()[1]}/") is None
    assert gathering._probe("import time; time.sleep(60)", 0.3) == {"error": "no answer within 0.3 s"}
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('noise'); print('{\"a\": 1}')", {"a": 1}),
        ("raise ValueError('x')", {"error": "ValueError: x"}),
        ("print('no json')", {"error": "no answer"}),
        ("import os; os.abort()", {"error": "no answer (ended with -6)"}),
    ],
)
def test_a_probe_that_fails_says_why(code, answer):
    assert gathering._probe(code, 20) == answer


def test_a_machine_where_nothing_can_be_read_is_still_examined(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise OSError("broken")

    for name in ("shutil.disk_usage", "psutil.disk_partitions", "psutil.process_iter", "subprocess.run", "sqlite3.connect"):
        monkeypatch.setattr(name, broken)
    monkeypatch.setattr(gathering, "requires", broken)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (tmp_path / "mlflow.db").touch()
    said = {finding.name: finding for finding in examine(gather(Home(tmp_path)))}
    assert said["PyTorch"].found == "broken" and said["Ray cluster"].status == "fail" and said["MLflow"].status == "fail"


def test_the_command_is_quick_without_a_gpu_and_says_nothing_wrong(tmp_path):
    start = time.perf_counter()
    command = [sys.executable, "-c", "from fluxray.cli import main; main()", "doctor", "--json"]
    command += ["--storage", str(tmp_path / "home")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert time.perf_counter() - start < 10
    findings = json.loads(done.stdout)
    assert {finding["name"] for finding in findings} >= {"Python", "GPUs", "PyTorch", "host memory", "storage", "MLflow"}
    assert done.returncode == int(any(finding["status"] == "fail" for finding in findings))
    assert not (tmp_path / "home").exists()


def test_a_failure_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(gathering, "gather", lambda where: replace(LAPTOP, storage_writable=False))
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == 1
    assert "fail  storage" in capsys.readouterr().out


def test_secrets_of_the_environment_are_not_gathered(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "tell-no-one")
    monkeypatch.setenv("RAY_ADDRESS", "http://me:hidden@127.0.0.1:9")
    gathered = str(gather(Home(tmp_path)))
    assert "tell-no-one" not in gathered and "hidden" not in gathered and "127.0.0.1:9" in gathered
