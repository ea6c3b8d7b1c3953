"""Caches and tars in an object store and behind a web server: real servers, ranges counted, faults on the way."""

import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxray.config.schema import BatchConfig
from fluxray.data import folders
from fluxray.data.decode import Quarantined
from fluxray.data.folders import WebFolder, open_remote
from fluxray.data.latent_shards import write_cache
from fluxray.data.latents import LatentCache, load_latents
from fluxray.data.loader import Loader
from fluxray.data.pictures import absolute_pictures, open_pictures
from fluxray.errors import ConfigError, DataError
from fluxray.protocols import RunState, Schedule
from tests.flow_caches import empty_captions, random_facts, random_samples
from tests.stores import Server, Web, empty_bucket, web_on

from .test_latents import NEEDS

BUCKETS = {(64, 64, 6): 7, (32, 64, 6): 5}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two caches, one of each layout, and tars of pictures."""
    root = tmp_path_factory.mktemp("files")
    facts = random_facts()
    samples = random_samples(facts, BUCKETS)
    for layout in ("safetensors", "webdataset"):
        write_cache(root / layout, facts, empty_captions(facts, [6]), iter(samples), layout, shard_bytes=4000)  # type: ignore[arg-type]
    (root / "tars").mkdir()
    for number in range(3):
        with tarfile.open(root / "tars" / f"photos-{number:03d}.tar", "w") as tar:
            for name, content in _members(number):
                (root / "member").write_bytes(content)
                tar.add(root / "member", name)
    return root


def _members(number: int) -> Iterator[tuple[str, bytes]]:
    for index in range(4):
        yield f"{index}.jpg", bytes([number, index]) * (3000 + index)
        yield f"{index}.txt", f"picture {index} of {number}".encode()
    yield "notes.md", b"of no use"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


@pytest.fixture
def web(files: Path) -> Iterator[Web]:
    with web_on(files) as web:
        yield web


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PAUSES_S", (0.01, 0.01))


@pytest.fixture(params=["s3", "http"])
def address(request: pytest.FixtureRequest, files: Path, server: Server, web: Web, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address under which all files are."""
    if request.param == "http":
        return web.address
    client = empty_bucket(server, monkeypatch)
    for path in files.rglob("*"):
        if path.is_file():
            with client.open_output_stream(f"bucket/{path.relative_to(files)}") as out:
                out.write(path.read_bytes())
    return "s3://bucket"


def same_rows(one: LatentCache, other: LatentCache) -> bool:
    def equal(left: Any, right: Any) -> bool:
        return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right

    return len(one) == len(other) and all(equal(*pair) for i in range(len(one)) for pair in zip(one[i], other[i], strict=True))


@pytest.mark.parametrize("layout", ["safetensors", "webdataset"])
def test_rows_of_a_cache_far_away_are_the_local_ones(layout: str, address: str, files: Path) -> None:
    local, remote = LatentCache(files / layout), LatentCache(f"{address}/{layout}")
    assert remote.facts == local.facts and remote.empty[6].text.equal(local.empty[6].text)
    assert same_rows(remote, local) and remote.caption(3) == local.caption(3)
    assert same_rows(pickle.loads(pickle.dumps(remote)), local)


def test_a_sample_is_one_range_of_its_shard_and_no_shard_is_fetched(web: Web, files: Path) -> None:
    cache = LatentCache(f"{web.address}/webdataset")
    assert all(not name.endswith(".tar") for name, _ in web.asked)
    web.asked.clear()
    row = cache[5]
    ((name, one),) = web.asked
    assert one is not None
    size = sum(tensor.nbytes for tensor in (row.latents, row.text, row.pooled) if tensor is not None)
    assert name.endswith(".tar") and size <= one[1] - one[0] <= 2 * size < (files / "webdataset" / name).stat().st_size


def test_batches_are_the_same_by_any_number_of_readers(web: Web, files: Path) -> None:
    def keys(cache: Path | str, num_readers: int) -> list[Any]:
        rows = load_latents(cache, None, 0.1, NEEDS).train
        batch = BatchConfig(micro_size=3, accumulation_steps=2)
        loader = Loader(rows, lambda found, _: [row.key for row in found], batch, 0, 1, num_readers=num_readers)  # type: ignore[arg-type,return-value]
        batches = loader.train_batches(RunState(3, Schedule("constant", 1e-3, 0, 1, 0.0)))
        return [next(batches).batches for _ in range(4)]

    assert keys(f"{web.address}/webdataset", 16) == keys(files / "webdataset", 1)


@pytest.mark.parametrize("glob", [False, True], ids=["numbered", "glob"])
def test_pictures_of_tars_far_away_are_the_local_ones(glob: bool, address: str, files: Path) -> None:
    pattern = "tars/photos-*.tar" if glob else "tars/photos-{000..002}.tar"
    local, remote = (open_pictures(f"tars:{root}/{pattern}") for root in (files, address))
    if glob and address.startswith("http"):
        with pytest.raises(DataError) as refused:
            remote.refs()
        assert str(refused.value) == (
            f"data.source: {address}/tars: a web server does not tell which files it has; write their names, such as {{000..127}}"
        )
        return
    refs = remote.refs()
    assert [(ref.key, ref.caption) for ref in refs] == [(ref.key, ref.caption) for ref in local.refs()] and len(refs) == 12
    expected = [local.load(ref) for ref in local.refs()]
    assert [remote.load(ref) for ref in refs] == expected
    assert [(ref.key, data) for ref, data in remote.stream()] == list(zip((ref.key for ref in refs), expected, strict=True))
    assert remote.ignored() == local.ignored() == {".md": 3}
    assert [pickle.loads(pickle.dumps(remote)).load(ref) for ref in refs[:2]] == expected[:2]


def test_a_picture_is_one_range_and_a_tar_is_listed_once(web: Web) -> None:
    pictures = open_pictures(f"tars:{web.address}/tars/photos-{{000..002}}.tar")
    refs = pictures.refs()
    pictures.ignored()
    assert len(web.asked) == 3
    web.asked.clear()
    data = pictures.load(refs[4])
    assert web.asked == [("photos-001.tar", (refs[4].place.start, (refs[4].place.start or 0) + len(data)))]


def test_a_short_fault_is_waited_for_and_a_long_one_ends_it_in_a_line(web: Web, files: Path) -> None:
    cache = LatentCache(f"{web.address}/webdataset")
    web.faults = 2
    assert cache[1].latents.equal(LatentCache(files / "webdataset")[1].latents)
    web.faults = 3
    shard = f"{web.address}/webdataset/shard-00000.tar"
    with pytest.raises(DataError) as refused:
        cache[1]
    assert str(refused.value) == (
        f"data.cache: {shard} cannot be read (503 Try again); check the network; the same command goes on"
    )
    web.denied = True
    with pytest.raises(DataError, match=r"cannot be read \(403 Forbidden\); check its rights and credentials$"):
        cache[1]
    web.denied = False
    pictures = open_pictures(f"tars:{web.address}/tars/photos-000.tar")
    (first, *_) = pictures.refs()
    web.faults = 3
    with pytest.raises(DataError, match=r"^data\.source: .*photos-000\.tar cannot be read \(503"):  # no fault of the picture
        pictures.load(first)
    web.stop()
    with pytest.raises(DataError, match=r"cannot be read \(.*connect.*\); check the network; the same command goes on$"):
        LatentCache(f"{web.address}/webdataset")


def test_what_is_missing_or_cut_short_is_said(web: Web, files: Path) -> None:
    with pytest.raises(DataError) as refused:
        LatentCache(f"{web.address}/nowhere")
    assert str(refused.value) == f"data.cache: {web.address}/nowhere has no cache.json; encode to the end, or copy it again"
    with pytest.raises(DataError) as refused:
        open_pictures(f"tars:{web.address}/tars/photos-{{002..003}}.tar").refs()
    assert str(refused.value) == (
        f"data.source: tars:{web.address}/tars/photos-003.tar: is no file, and matches none; check the address"
    )
    pictures = open_pictures(f"tars:{web.address}/tars/photos-000.tar")
    ref = pictures.refs()[-1]
    with pytest.raises(Quarantined, match="truncated"):
        pictures.load(replace(ref, place=ref.place._replace(size=10**6)))


def test_a_server_without_ranges_is_refused(files: Path) -> None:
    with web_on(files, serves_ranges=False) as web:
        cache = LatentCache(f"{web.address}/webdataset")
        with pytest.raises(DataError) as refused:
            cache[0]
    assert str(refused.value) == (
        f"data.cache: {web.address}/webdataset/shard-00000.tar: the server does not serve ranges of bytes; use one that does, or "
        f"copy the files to a folder"
    )


def test_addresses_that_cannot_be_are_refused() -> None:
    def refusal(call: Any, *args: Any) -> str:
        with pytest.raises((ConfigError, DataError)) as refused:
            call(*args)
        return str(refused.value)

    assert refusal(LatentCache, "https://me:word@host/cache") == (
        "data.cache: holds credentials, which would be kept with the run; name a place that needs none"
    )
    assert refusal(LatentCache, "https://host/cache?signature=1").startswith("data.cache: holds a query, which would be kept")
    assert refusal(LatentCache, "s3:///cache") == "data.cache: 's3:///cache' names no bucket; use s3://BUCKET/PREFIX"
    assert refusal(absolute_pictures, "folder:s3://bucket/photos") == (
        "data.source: 'folder:s3://bucket/photos': what is far away is read from tars alone; use tars:..., or copy it here"
    )
    assert absolute_pictures("tars:s3://bucket/photos-*.tar") == ("tars:s3://bucket/photos-*.tar",)


def test_a_bucket_that_is_not_there_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_bucket(server, monkeypatch)
    with pytest.raises(DataError) as refused:
        LatentCache("s3://other/cache")
    assert str(refused.value) == "data.cache: s3://other/cache has no cache.json; encode to the end, or copy it again"


def test_the_client_of_a_folder_is_made_where_it_is_read(web: Web) -> None:
    folder = open_remote(f"{web.address}/webdataset", "data.cache")
    assert isinstance(folder, WebFolder) and folder.read("cache.json")
    again = pickle.loads(pickle.dumps(folder))
    assert "_client" not in vars(again) and again.read("cache.json") == folder.read("cache.json")
