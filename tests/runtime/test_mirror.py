"""Checkpoints in an object store: moto's S3 server in a process of its own, real uploads, what can go wrong on the way."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from pyarrow import fs

from fluxray import checkpoint, cli
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.errors import CheckpointError, ConfigError, DamagedCheckpointError
from fluxray.objectstore import StoreError, open_store
from fluxray.protocols import Report, RunState, SavedCheckpoint, Schedule, StateItem
from fluxray.ranks import ALONE, Ranks
from fluxray.runtime import mirroring
from fluxray.runtime.context import WorkerContext
from fluxray.runtime.mirror import Mirror
from fluxray.runtime.mirroring import Uploads
from fluxray.runtime.paths import write_text
from fluxray.runtime.prepare import Run, fetch_lost, prepare, save_config
from fluxray.runtime.worker import run_worker
from tests.runtime.test_worker import SMALL, InterruptedRunError, saved_tensors
from tests.stores import SECRET, Server, empty_bucket

pytestmark = pytest.mark.usefixtures("one_thread")

ADDRESS = "s3://bucket/runs"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> fs.S3FileSystem:
    """An empty bucket, and the environment that leads to it."""
    return empty_bucket(server, monkeypatch)


def keys(client: fs.FileSystem) -> list[str]:
    found = client.get_file_info(fs.FileSelector("bucket/runs", recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix("bucket/runs/") for info in found if info.type == fs.FileType.File)


def steps_there(client: fs.FileSystem) -> list[int]:
    """Return the committed steps of the run `first`."""
    return [int(key.split("/")[1][5:]) for key in keys(client) if key.endswith("/checkpoint.json")]


def tensor(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def state(step: int) -> RunState:
    return RunState(0, Schedule("constant", 1e-3, 0, 10, 0.0), step=step)


def by_all(num_ranks: int, action: Callable[[Ranks], None]) -> None:
    """Run `action` on threads that stand for ranks."""
    barrier, slots = threading.Barrier(num_ranks), [None] * num_ranks

    def ranks(rank: int) -> Ranks:
        def gather(value):
            slots[rank] = value
            barrier.wait(30)
            values = list(slots)
            barrier.wait(30)
            return values

        return Ranks(rank, num_ranks, gather, lambda flag: any(gather(flag)))

    with ThreadPoolExecutor(num_ranks) as pool:
        for done in [pool.submit(action, ranks(rank)) for rank in range(num_ranks)]:
            done.result(60)


def save(run_dir: Path, step: int, ranks: Ranks = ALONE) -> SavedCheckpoint:
    rows = tensor(step).chunk(ranks.num_ranks)[ranks.rank]
    items = [StateItem(section, "w", (8, 4), ranks.rank * len(rows), rows) for section in ("weights", "exp_avg")]
    return SavedCheckpoint(checkpoint.save(run_dir, state(step), items, ranks), lambda: 0.0)


def new_run(folder: Path) -> Path:
    run_dir = folder / "first"
    for part in ("model/config.json", "tokenizer/tokenizer.json"):
        write_text(run_dir / part, part)
    write_text(run_dir / "config.yaml", f"name: first\ntracking:\n  uri: http://me:{SECRET}@host/\n")
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return new_run(tmp_path)


@pytest.fixture
def mirror() -> Mirror:
    return Mirror(open_store(ADDRESS), "first")


def uploads(run_dir: Path, notices: list[str], ranks: Ranks = ALONE, keep: int = 2, address: str = ADDRESS) -> Uploads:
    made = Uploads(run_dir, (ranks.rank, ranks.num_ranks), keep, lambda: Mirror(open_store(address), "first"), f"{address}/first")
    made.start(notices.append)
    return made


def finish(made: Uploads, ranks: Ranks = ALONE, stopped: bool = False) -> None:
    made.finish(ranks.any, lambda: False, stopped)


def sent(run_dir: Path, *steps: int, keep: int = 2) -> list[str]:
    """Save and upload these steps, one after the other; return the notices."""
    notices: list[str] = []
    for step in steps:
        made = uploads(run_dir, notices, keep=keep)
        made.follow(save(run_dir, step))
        finish(made)
    return notices


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_uploads_its_own_files_and_the_newest_are_kept(run_dir: Path, bucket: fs.FileSystem, num_ranks: int) -> None:
    notices: list[str] = []

    def work(ranks: Ranks) -> None:
        made = uploads(run_dir, notices, ranks)
        for step in (1, 2, 3):
            made.follow(save(run_dir, step, ranks))
            while ranks.any(ranks.rank == 0 and step not in steps_there(bucket)):
                time.sleep(0.02)
        finish(made, ranks)

    by_all(num_ranks, work)
    assert notices == []
    assert steps_there(bucket) == [2, 3]
    beside = {"config.yaml", "model/config.json", "tokenizer/tokenizer.json"}
    here = {str(path.relative_to(run_dir)) for path in run_dir.glob("step_0000000[23]/*")}
    assert set(keys(bucket)) == {f"first/{path}" for path in beside | here}
    for path in here:
        with bucket.open_input_stream(f"bucket/runs/first/{path}") as file:
            assert file.read() == (run_dir / path).read_bytes()
    with bucket.open_input_stream("bucket/runs/first/config.yaml") as file:
        assert SECRET not in file.read().decode()
    assert not (run_dir / ".mirror").exists()


def test_a_checkpoint_that_training_deletes_is_uploaded_all_the_same(
    run_dir: Path, bucket: fs.FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()
    send = Mirror.send

    def late(*words) -> None:
        begun.set()
        assert gate.wait(30)
        send(*words)

    monkeypatch.setattr(Mirror, "send", late)
    notices: list[str] = []
    made = uploads(run_dir, notices, keep=1)
    start = time.perf_counter()
    made.follow(save(run_dir, 1))
    assert begun.wait(30)
    shutil.rmtree(run_dir / "step_00000001")
    for step in (2, 3):
        made.follow(save(run_dir, step))
    assert time.perf_counter() - start < 10 and steps_there(bucket) == []
    gate.set()
    finish(made)
    assert steps_there(bucket) == [3]
    assert notices == [f"mirror: {ADDRESS}/first does not get step_00000002: newer ones come first"]


def test_what_is_there_already_is_not_sent_again(run_dir: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("sent again")

    sent(run_dir, 1)
    monkeypatch.setattr(type(mirror.store), "upload", refuse)
    mirror.send(run_dir / "step_00000001", "step_00000001", 0, lambda _: None)


def test_other_content_under_the_same_step_is_never_mixed_with_the_old(run_dir: Path, mirror: Mirror) -> None:
    sent(run_dir, 1)
    shutil.rmtree(run_dir / "step_00000001")
    checkpoint.save(run_dir, state(1), [StateItem(s, "w", (8, 4), 0, tensor(9)) for s in ("weights", "exp_avg")])
    directory = run_dir / "step_00000001"
    with pytest.raises(StoreError, match="the files of worker 0 are not there"):
        mirror.commit(directory, directory.name)

    def interrupt(_: int) -> None:
        raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        mirror.send(directory, directory.name, 0, interrupt)
    assert [remote.state for remote in mirror.checkpoints()] == ["is being uploaded, or its upload was interrupted"]
    assert sent(run_dir) == [] and mirror.fetch(run_dir / "elsewhere", pytest.fail) is None
    mirror.send(directory, directory.name, 0, lambda _: None)
    mirror.commit(directory, directory.name)
    assert [remote.state for remote in mirror.checkpoints()] == ["complete"]


def test_what_is_fetched_is_what_was_saved(run_dir: Path, tmp_path: Path, mirror: Mirror) -> None:
    sent(run_dir, 1, 2)
    notices: list[str] = []
    path = mirror.fetch(tmp_path / "other", notices.append)
    assert path == tmp_path / "other" / "step_00000002"
    assert notices == [f"fetched step_00000002 from {ADDRESS}/first"]
    here = {file.name: file.read_bytes() for file in (run_dir / "step_00000002").iterdir()}
    assert {file.name: file.read_bytes() for file in path.iterdir()} == here
    assert torch.equal(checkpoint.CheckpointReader(path).read("weights", "w"), tensor(2))


WEIGHTS = "weights-00000-of-00001.safetensors"
DAMAGE = {
    "truncated": (WEIGHTS, lambda content: content[:-5], f"{WEIGHTS} is truncated"),
    "flipped": (WEIGHTS, lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], "w is not what was written"),
    "vanished": (WEIGHTS, None, f"{WEIGHTS} is missing"),
    "index": ("index-00000-of-00001.json", lambda content: content.replace(b"8", b"9", 1), "is damaged"),
    "head": ("checkpoint.json", lambda content: b"{" + content[1:20], "checkpoint.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_passed_over_for_the_one_before(
    kind: str, run_dir: Path, tmp_path: Path, mirror: Mirror, bucket: fs.FileSystem
) -> None:
    name, change, fault = DAMAGE[kind]
    sent(run_dir, 1, 2)
    for step in (2, 1):
        key = f"bucket/runs/first/step_0000000{step}/{name}"
        if change is None:
            bucket.delete_file(key)
        else:
            with bucket.open_input_stream(key) as file:
                content = file.read()
            with bucket.open_output_stream(key) as file:
                file.write(change(content))
        if step == 2:
            notices: list[str] = []
            assert mirror.fetch(tmp_path / "other", notices.append) == tmp_path / "other" / "step_00000001"
            assert notices[0].startswith(f"checkpoint.mirror: {ADDRESS}/first/step_00000002 is damaged (")
            assert fault in notices[0] and notices[0].endswith("; using step_00000001 instead")
    with pytest.raises(DamagedCheckpointError, match="no earlier one there is complete either; set another name"):
        mirror.fetch(tmp_path / "third", pytest.fail)
    assert not list((tmp_path / "third").glob("*"))


def configure(storage: Path, *overrides: str) -> TrainConfig:
    short = ("train.num_steps=6", "checkpoint.every_steps=2", "optim.warmup_steps=2", "evaluation.max_rows=2")
    return resolve("cpu", "lm-tiny", [*SMALL, *short, "name=first", f"storage={storage}", *overrides])


def started(config: TrainConfig, notices: list[str], report: Callable[[Report], None] = lambda _: None) -> Run:
    """Start or go on with a run as torchrun's rank 0 does, to the end."""
    run = prepare(config, "run")
    fetch_lost(run)
    save_config(run)
    found = checkpoint.committed(run.run_dir)
    run_worker(run.config, WorkerContext(0, 1, 0, run.run_dir, run.home.cache, report, lambda _: False, found, notices.append))
    return run


def test_a_run_that_lost_its_disk_goes_on_to_the_bit(
    tmp_path: Path, bucket: fs.FileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = started(configure(tmp_path / "whole"), [])
    mirrored = configure(tmp_path / "lost", f"checkpoint.mirror={ADDRESS}")

    def until_step_3(report: Report) -> None:
        if report.step == 3:
            while steps_there(bucket) != [2]:
                time.sleep(0.02)
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        started(mirrored, [], until_step_3)
    shutil.rmtree(tmp_path / "lost" / "runs")

    with pytest.raises(ConfigError, match=r"^optim.lr: 1.0, but run first was started with .*; set it back"):
        prepare(configure(tmp_path / "lost", f"checkpoint.mirror={ADDRESS}", "optim.lr=1"), "run")
    assert not (tmp_path / "lost" / "runs").exists()
    capsys.readouterr()
    notices: list[str] = []
    run = started(mirrored, notices)
    assert f"fetched step_00000002 from {ADDRESS}/first\n" in capsys.readouterr().out
    assert notices[0] == "resumed at step 2 from step_00000002" and run.resumed == {}
    actual, wanted = saved_tensors(run.run_dir), saved_tensors(whole.run_dir)
    assert actual.keys() == wanted.keys() and all(torch.equal(actual[key], wanted[key]) for key in wanted)
    assert steps_there(bucket) == [4, 6]

    shutil.rmtree(run.run_dir)
    with pytest.raises(SystemExit) as done:
        cli.main(["export", f"{ADDRESS}/first", str(tmp_path / "exported"), "--storage", str(tmp_path / "third")])
    assert done.value.code == 0 and (tmp_path / "exported" / "model.safetensors").exists()
    with pytest.raises(SystemExit):
        cli.main(["checkpoints", "first", "--storage", str(tmp_path / "third")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == f"in {ADDRESS}/first:"
    assert [line.split()[0] for line in lines[-2:]] == ["6", "4"] and all(line.endswith("complete") for line in lines[-2:])
    with pytest.raises(SystemExit) as refused:
        cli.main(["evaluate", f"{ADDRESS}/first", "--storage", str(tmp_path / "third")])
    assert refused.value.code == 2 and "first is here already" in capsys.readouterr().err


def test_a_server_that_dies_does_not_stop_training_and_the_next_save_tries_again(tmp_path: Path) -> None:
    server = Server()
    try:
        server.client().create_dir("bucket")
        address = f"{ADDRESS}?endpoint_override=127.0.0.1:{server.port}&scheme=http"
        config = configure(tmp_path, f"checkpoint.mirror={address}")
        notices: list[str] = []

        def report(report: Report) -> None:
            if report.step == 1:
                server.kill()
            if report.step == 5:
                while not any("has not got" in notice for notice in notices):
                    time.sleep(0.02)
                server.start()
                server.client().create_dir("bucket")

        run = started(config, notices, report)
        assert checkpoint.committed(run.run_dir)[0].name == "step_00000006"
        assert steps_there(server.client())[-1] == 6
        told = [notice for notice in notices if notice.startswith("mirror: ")]
        assert told[0].startswith(f"mirror: {ADDRESS}/first has not got step_00000002 (NETWORK_CONNECTION: ")
        assert told[0].endswith("tried again with the next one") and all("\n" not in notice for notice in told)

        server.kill()
        assert prepare(config, "run").mirror is None  # it goes on from its own folder
        shutil.rmtree(run.run_dir)
        with pytest.raises(ConfigError, match=r"does not answer .* has no checkpoint here .* or set checkpoint.mirror=null"):
            prepare(config, "run")
    finally:
        server.kill()


def test_a_store_that_stays_away_is_told_at_the_end(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "STOP_LIMIT_S", 0.3)
    address, notices = f"file://{run_dir}/gone", []
    made = uploads(run_dir, notices, address=address)
    hangs = threading.Event()
    monkeypatch.setattr(Mirror, "send_beside", lambda *_: hangs.wait(30))
    made.follow(save(run_dir, 1))
    start = time.perf_counter()
    finish(made, stopped=True)
    assert time.perf_counter() - start < 5
    hangs.set()
    assert notices[-1] == (
        f"mirror: {address}/first lacks step_00000001 (the run did not wait longer than 0 s); "
        f"the same command with name=first sends it"
    )


REFUSED = {
    "ftp://bucket/x": "checkpoint.mirror: 'ftp://bucket/x' has no known scheme; use s3://BUCKET/PREFIX, gs://",
    "bucket/x": "checkpoint.mirror: 'bucket/x' has no known scheme; use s3://BUCKET/PREFIX",
    "s3:///x": "checkpoint.mirror: 's3:///x' names no bucket; use s3://BUCKET/PREFIX",
    "file://x": "checkpoint.mirror: 'file://x' names no absolute folder; use file:///FOLDER",
    "s3://bucket?access_key=a": "checkpoint.mirror: s3:// has no option 'access_key'; it takes endpoint_override, region, scheme",
    f"s3://me:{SECRET}@bucket/x": "checkpoint.mirror: holds credentials; leave them to the environment",
}


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_names_no_store_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["config", f"checkpoint.mirror={address}"])
    told = capsys.readouterr().err
    assert refused.value.code == 2 and told.count("\n") == 1
    assert told.startswith(f"fluxray: error: {REFUSED[address]}") and SECRET not in told


class Forbidding(BaseHTTPRequestHandler):
    """Answers as S3 does to who has no credentials."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")

    def log_message(self, *_: object) -> None:
        pass


def test_a_store_that_refuses_is_refused_before_anything_is_written(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(address: str) -> str:
        with pytest.raises(ConfigError) as refused:
            prepare(configure(tmp_path, f"checkpoint.mirror={address}"), "run")
        assert list(tmp_path.iterdir()) == [] and SECRET not in str(refused.value) and "\n" not in str(refused.value)
        return str(refused.value)

    missing = "checkpoint.mirror: s3://other/runs names a bucket that does not exist; make it, or name another"
    assert told("s3://other/runs") == missing
    assert told(f"file://{tmp_path}/none") == f"checkpoint.mirror: file://{tmp_path}/none is no folder; make it, or name another"
    server.wants_keys(True)
    try:
        remedy = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role"
        assert told(ADDRESS).endswith(remedy)
    finally:
        server.wants_keys(False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with HTTPServer(("127.0.0.1", 0), Forbidding) as amazon:  # moto fails where a request is not signed
        threading.Thread(target=amazon.serve_forever, daemon=True).start()
        unsigned = f"{ADDRESS}?endpoint_override=127.0.0.1:{amazon.server_port}&scheme=http"
        assert told(unsigned) == f"checkpoint.mirror: {ADDRESS} refuses access (ACCESS_DENIED: Access Denied); {remedy}"
        amazon.shutdown()


def test_a_folder_is_a_mirror_too(run_dir: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    notices: list[str] = []
    for step in (1, 2, 3):
        made = uploads(run_dir, notices, address=address)
        made.follow(save(run_dir, step))
        finish(made)
    mirror = Mirror(open_store(address), "first")
    assert [remote.name for remote in mirror.checkpoints()] == ["step_00000003", "step_00000002"] and notices == []
    assert mirror.fetch(tmp_path / "other", notices.append) == tmp_path / "other" / "step_00000003"


def test_a_mirrored_run_is_named_by_mirror_and_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent(run_dir, 1)
    for address, code, told in [
        (f"{ADDRESS}/first", 0, "in s3://bucket/runs/first:"),
        (f"{ADDRESS}/second", 0, "s3://bucket/runs/second has no checkpoint yet"),
        ("s3://first", 2, "RUN: "),
        ("ftp://bucket/first", 2, "RUN: 'ftp://bucket' has no known scheme"),
    ]:
        with pytest.raises(SystemExit) as done:
            cli.main(["checkpoints", address])
        output = capsys.readouterr()
        assert done.value.code == code and told in output.out + output.err and "Traceback" not in output.err


def test_a_disk_without_room_says_so(run_dir: Path, tmp_path: Path, mirror: Mirror) -> None:
    sent(run_dir, 1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^storage: .* cannot be written \(Not a directory\); free space there"):
        mirror.fetch(tmp_path / "file", pytest.fail)


def test_a_store_without_an_answer_is_no_reason_to_start_anew(run_dir: Path, mirror: Mirror) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(NETWORK_CONNECTION: .*\); try again"):
        Mirror(open_store(f"{ADDRESS}?endpoint_override=127.0.0.1:1&scheme=http"), "first").fetch(run_dir, pytest.fail)
