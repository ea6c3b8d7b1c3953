"""The same pictures from every form of source are the same references and bytes; what is wrong with a source is one line."""

import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow.parquet import write_table

from fluxray.config.encode import EncodeConfig, holds_pictures
from fluxray.data.decode import Quarantined
from fluxray.data.picture_tars import expand_braces, tar_samples
from fluxray.data.pictures import absolute_pictures, open_pictures
from fluxray.data.prepared import prepare_picture
from fluxray.errors import DataError
from tests.data.hostile import alpha, jpeg, rgb, saved

CAPTIONS = {"a.png": "one", "b.jpg": "two \u00e4", "deep/c.webp": "three", "deep/d.v2.png": None}


def contents() -> dict[str, bytes]:
    return {
        "a.png": saved(rgb(), "PNG"),
        "b.jpg": jpeg(),
        "deep/c.webp": saved(rgb(), "WEBP", lossless=True),
        "deep/d.v2.png": saved(rgb().rotate(180), "PNG"),
    }


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def as_folder(folder: Path) -> str:
    write(folder / "photos", contents())
    write(folder / "photos", {f"{n.rpartition('.')[0]}.txt": c.encode() for n, c in CAPTIONS.items() if c})
    return f"folder:{folder}/photos"


def as_jsonl(folder: Path) -> str:
    write(folder / "photos", contents())
    lines = [json.dumps({"file_name": name, "text": caption, "x": 1}) for name, caption in CAPTIONS.items()]
    (folder / "photos" / "metadata.jsonl").write_text("\ufeff" + "\r\n".join(lines) + "\n\n", encoding="utf-8")
    return f"folder:{folder}/photos"


def as_parquet(folder: Path) -> str:
    pictures = [{"bytes": data, "path": name} for name, data in contents().items()]
    write_table(pyarrow.table({"text": list(CAPTIONS.values()), "image": pictures}), folder / "x.parquet", row_group_size=3)
    return f"parquet:{folder}/x.parquet"


def tar_members() -> dict[str, bytes]:
    members = {}
    for name, data in contents().items():
        members[name] = data
        caption = CAPTIONS[name]
        if caption is not None:
            members[f"{name.rpartition('.')[0]}.txt"] = caption.encode()
    return members


def as_tar(folder: Path) -> str:
    write_tar(folder / "x.tar", tar_members())
    return f"tars:{folder}/x.tar"


def as_tars(folder: Path) -> str:
    members = list(tar_members().items())
    write_tar(folder / "x-00.tar", dict(members[:2]))
    write_tar(folder / "x-01.tar", dict(members[2:]))
    return f"tars:{folder}/x-{{00..01}}.tar"


def as_tar_with_json(folder: Path) -> str:
    members = {}
    for name, data in contents().items():
        members[f"{name.rpartition('.')[0]}.json"] = json.dumps({"caption": CAPTIONS[name]}).encode()
        members[name] = data
    write_tar(folder / "x.tar", members)
    return f"tars:{folder}/*.tar"


FORMS = [as_folder, as_jsonl, as_parquet, as_tar, as_tars, as_tar_with_json]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_same(form, tmp_path):
    pictures = pickle.loads(pickle.dumps(open_pictures(form(tmp_path))))
    refs = pictures.refs()
    assert {ref.key: ref.caption for ref in refs} == CAPTIONS and [ref.key for ref in refs] == list(CAPTIONS)
    assert {ref.key: pictures.load(ref) for ref in refs} == contents()
    assert {ref.key: pictures.load(ref) for ref in reversed(pickle.loads(pickle.dumps(refs)))} == contents()
    assert [(ref, data) for ref, data in pictures.stream()] == [(ref, contents()[ref.key]) for ref in refs]
    assert pictures.ignored() == {} and all(ref.fault is None and ref.notes == () for ref in refs)


def test_rows_of_the_hub_are_the_same(tmp_path, monkeypatch):
    from datasets import Dataset, Features, Image, Value

    rows = {"caption": list(CAPTIONS.values()), "image": [{"bytes": d, "path": n} for n, d in contents().items()]}
    dataset = Dataset.from_dict(rows, features=Features({"caption": Value("string"), "image": Image()}))
    dataset.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(
        "fluxray.data.picture_rows.hub_dataset", lambda reference, _: Dataset.load_from_disk(str(tmp_path / "saved"))
    )
    pictures = open_pictures("hf:org/name:config:train")
    assert {ref.key: (ref.caption, pictures.load(ref)) for ref in pictures.refs()} == {
        Path(name).name: (CAPTIONS[name], data) for name, data in contents().items()
    }, "the library keeps no folders"


def test_a_row_without_a_path_is_named_by_file_and_number(tmp_path):
    write_table(pyarrow.table({"jpg": list(contents().values()), "caption": list("abcd"), "n": range(4)}), tmp_path / "p.parquet")
    pictures = open_pictures(f"parquet:{tmp_path}")
    assert [(ref.key, ref.caption) for ref in pictures.refs()] == [(f"p-{n:07d}", c) for n, c in enumerate("abcd")]
    assert [pictures.load(ref) for ref in pictures.refs()] == list(contents().values())


def test_a_tar_is_read_once_from_a_pipe(tmp_path):
    as_tar(tmp_path)

    class Pipe(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.rest = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            return self.rest.read(size)

    pipe = Pipe((tmp_path / "x.tar").read_bytes())
    found = [(ref.key, ref.caption, data) for ref, data in tar_samples(pipe, "pipe", None, False, with_bytes=True)]  # type: ignore[arg-type]
    assert found == [(name, CAPTIONS[name], data) for name, data in contents().items()]


@pytest.mark.parametrize("with_bytes", [False, True])
def test_a_tar_that_breaks_off_gives_what_comes_before(with_bytes, tmp_path):
    as_tar(tmp_path)
    whole = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "y.tar").write_bytes(b"no tar at all" * 100)
    pictures = open_pictures(f"tars:{tmp_path}/*.tar")
    found = list(pictures.stream()) if with_bytes else [(ref, None) for ref in pictures.refs()]
    faults = {ref.key: ref.fault for ref, _ in found if ref.fault}
    assert found[0][0].key == "a.png" and "y.tar" in faults and "is no uncompressed tar" in faults["y.tar"]
    assert any("breaks off" in fault for fault in faults.values())
    with pytest.raises(Quarantined):
        prepare_picture(pictures, found[-1][0], EncodeConfig())


def test_members_of_one_name_in_several_tars_get_their_own_keys(tmp_path):
    for name in ("p", "q"):
        write_tar(tmp_path / f"{name}.tar", {"0.png": contents()["a.png"], "0.cls": b"7"})
    refs = open_pictures(f"tars:{tmp_path}/*.tar").refs()
    assert [(ref.key, ref.caption) for ref in refs] == [("0.png", "7"), ("q/0.png", "7")]


def test_several_sources_are_one(tmp_path):
    one, two = as_folder(tmp_path / "one"), as_folder(tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    pictures = open_pictures((one, two, f"folder:{tmp_path}/three/photos"))
    keys = [ref.key for ref in pictures.refs()]
    assert len(set(keys)) == 12 and keys[4] == "photos/a.png" and keys[8] == "photos/a.png#2"
    (tmp_path / "two" / "photos" / "a.png").write_bytes(b"other")
    assert [pictures.load(ref) for ref in pictures.refs() if ref.key.endswith("photos/a.png")] == [b"other"]


def test_metadata_may_lie_deeper_name_a_picture_twice_or_one_that_is_not_there(tmp_path):
    write(tmp_path, contents())
    rows = [
        {"file_name": "c.webp", "text": "first"},
        {"file_name": "c.webp", "text": "second"},
        {"file_name": "gone.png", "text": "x"},
        {"file_name": "../../out.png", "text": "x"},
        {"file_name": "d.v2.png", "text": ["no", "text"]},
    ]
    (tmp_path / "deep" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.txt").write_text("beside")
    pictures = open_pictures(f"folder:{tmp_path}")
    refs = {ref.key: ref for ref in pictures.refs()}
    assert {key: ref.caption for key, ref in refs.items() if ref.caption} == {
        "a.png": "beside",
        "deep/c.webp": "first",
        "deep/c.webp#2": "second",
        "deep/gone.png": "x",
    }
    assert pictures.load(refs["deep/c.webp#2"]) == contents()["deep/c.webp"]
    faults = {key: ref.fault for key, ref in refs.items() if ref.fault}
    assert faults == {"../out.png": "its path leads out of the folder", "deep/d.v2.png": "list, not text"}
    with pytest.raises(Quarantined, match="missing: the file is not there"):
        pictures.load(refs["deep/gone.png"])


def test_hidden_files_other_files_and_loops_of_links(tmp_path):
    as_folder(tmp_path)
    photos = tmp_path / "photos"
    write(photos, {".a.png": b"x", "._b.jpg": b"x", ".hidden/c.png": b"x", "notes.md": b"", "stray.txt": b"", "m.mp4": b""})
    (photos / "deep" / "loop").symlink_to(photos)
    pictures = open_pictures(f"folder:{photos}")
    assert [ref.key for ref in pictures.refs()] == list(CAPTIONS)
    assert pictures.ignored() == {".md": 1, "captions without a picture": 1, ".mp4": 1}


@pytest.mark.parametrize("form", [as_folder, as_tar])
def test_masks_lie_beside_their_pictures(form, tmp_path):
    mask = saved(__import__("PIL.Image").Image.fromarray(alpha()), "PNG")
    source = form(tmp_path)
    if source.startswith("folder"):
        write(tmp_path / "photos", {"a.mask.png": mask})
    else:
        members = tar_members()
        write_tar(tmp_path / "x.tar", {"a.png": members.pop("a.png"), "a.mask.png": mask, **members})
    config = EncodeConfig(mask="file", resolution=64, bucket_step=16, no_caption="empty")
    pictures = open_pictures(source, config=config)
    refs = pictures.refs()
    assert [ref.key for ref in refs] == list(CAPTIONS) and [ref.mask is not None for ref in refs] == [True, False, False, False]
    assert pictures.load_mask(refs[0]) == mask and pictures.ignored() == {}
    ready = prepare_picture(pictures, refs[0], config)
    assert ready.mask is not None and ready.mask.shape == ready.pixels.shape[:2]
    assert ready.mask[:, :30].max() == 0 and ready.mask[:, -30:].min() == 255
    other = prepare_picture(pictures, refs[1], config)
    assert other.mask is None and other.notes == ("no mask: counts in full",)
    without = open_pictures(source)
    assert [ref.key for ref in without.refs()] == list(CAPTIONS), "a mask is never taken for a picture"
    assert without.ignored() == {"masks, with encode.mask none": 1}


def test_a_missing_caption_is_the_empty_one_where_that_is_asked_for(tmp_path):
    pictures = open_pictures(as_folder(tmp_path))
    config = EncodeConfig(resolution=64, bucket_step=16)
    ref = pictures.refs()[-1]
    with pytest.raises(Quarantined, match="no caption: missing"):
        prepare_picture(pictures, ref, config)
    assert prepare_picture(pictures, ref, config.model_copy(update={"no_caption": "empty"})).caption == ""


def write_jsonl(folder: Path, text: str) -> str:
    write(folder, {"a.png": b"x"})
    (folder / "metadata.jsonl").write_text(text)
    return f"folder:{folder}"


def table(folder: Path, **columns) -> str:
    write_table(pyarrow.table(columns), folder / "x.parquet")
    return f"parquet:{folder}/x.parquet"


FAULTS = {
    "no form": (lambda at: "photos", ["'photos' is no source of pictures; use folder:DIR"]),
    "a folder": (str, ["is no source of pictures; write folder:"]),
    "text": (lambda at: "builtin:topics", ["'builtin:topics' is no source of pictures"]),
    "nothing": (lambda at: "folder:", ["'folder:' is no source of pictures"]),
    "no folder": (lambda at: f"folder:{at}/none", ["none: does not exist; check the path"]),
    "no pictures": (lambda at: f"folder:{at}", ["holds no pictures; they end in jpg"]),
    "no tar": (lambda at: f"tars:{at}/x-{{00..03}}.tar", ["x-00.tar: is no file, and matches none"]),
    "no parquet": (lambda at: f"parquet:{at}/*.parquet", ["matches no file"]),
    "not json": (lambda at: write_jsonl(at, '{"file_name": "a.png", "text": "x"}\n{'), ["metadata.jsonl: line 2: is not JSON"]),
    "no file_name": (lambda at: write_jsonl(at, '{"text": "x"}'), ["metadata.jsonl: line 1: has no file_name"]),
    "no text": (
        lambda at: write_jsonl(at, '{"file_name": "a.png", "c": 1}'),
        ["has no field 'text' or 'caption' but: file_name, c"],
    ),
    "no image column": (lambda at: table(at, text=["x"]), ["has no column that alone holds pictures but: text"]),
    "two image columns": (
        lambda at: table(at, text=["x"], a=[b""], b=[b""]),
        ["holds pictures but: text, a, b; set encode.image_key"],
    ),
    "no caption column": (lambda at: table(at, a=[b""], t=["x"]), ["has no column 'text' or 'caption' but: a, t"]),
    "not parquet": (lambda at: (write(at, {"x.parquet": b"x"}), f"parquet:{at}")[1], ["is not a readable parquet file"]),
    "no hub name": (lambda at: "hf:/some/folder", ["hf:/some/folder", "not a hub name", "parquet:"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_source_is_one_line(name, tmp_path):
    make, words = FAULTS[name]
    with pytest.raises(DataError) as error:
        open_pictures(make(tmp_path)).refs()
    message = str(error.value)
    assert message.startswith("data.source: ") and "\n" not in message and all(word in message for word in words), message


def test_columns_are_named_by_keys(tmp_path):
    source = table(tmp_path, text=["x"], words=["y"], a=[b"1"], b=[b"2"])
    pictures = open_pictures(source, config=EncodeConfig(caption_key="words", image_key="b"))
    assert [(ref.caption, pictures.load(ref)) for ref in pictures.refs()] == [("y", b"2")]


def test_a_parquet_file_that_vanishes_costs_its_own_rows(tmp_path):
    pictures = open_pictures(as_parquet(tmp_path))
    refs = pictures.refs()
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(Quarantined):
        pictures.load(refs[0])


def test_braces_and_absolute_paths(tmp_path, monkeypatch):
    assert expand_braces("a-{008..010}-{x,y}.tar") == [f"a-{n}-{c}.tar" for n in ("008", "009", "010") for c in "xy"]
    monkeypatch.chdir(tmp_path)
    assert absolute_pictures(["folder:a", "hf:a/b:c", "tars:/y"]) == (f"folder:{tmp_path}/a", "hf:a/b:c", "tars:/y")
    assert holds_pictures("folder:x") and holds_pictures(("tars:x", "hf:y")) and not holds_pictures(("tars:x", "path:y"))
    assert not holds_pictures("folder") and not holds_pictures(())
