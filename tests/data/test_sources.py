import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow.parquet import write_table

from fluxray.data.sources import absolute_reference, absolute_sources, open_sources, read_documents
from fluxray.errors import DataError


def documents(references, text_key="text"):
    return list(read_documents(open_sources(references, text_key, "data.source")))


def fingerprints(references, text_key="text"):
    return [source.fingerprint() for source in open_sources(references, text_key, "data.source")]


def test_topics_are_documents():
    texts = documents("builtin:topics")
    assert len(texts) > 50 and sum(map(len, texts)) > 100_000


def test_whole_file_is_one_document_without_bom_and_crlf(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc3\xa4\r\n")
    assert documents(f"path:{tmp_path}/a.txt") == ["one\ntwo ä\n"]


def test_other_extensions_are_text(tmp_path):
    (tmp_path / "a.md").write_text("# head")
    assert documents(f"path:{tmp_path}/a.md") == ["# head"]


def test_jsonl_line_is_a_document(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n\r\n{"body": " ", "x": 1}\n{"body": "t\\u00e4"}')
    assert documents(f"path:{tmp_path}/a.jsonl", "body") == ["one", "tä"]


def test_parquet_row_is_a_document(tmp_path):
    write_table(pyarrow.table({"text": [str(i) for i in range(2500)], "x": range(2500)}), tmp_path / "a.parquet")
    assert documents(f"path:{tmp_path}/a.parquet") == [str(i) for i in range(2500)]


def test_folders_globs_and_lists_are_read_in_the_order_of_names(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden"):
        (tmp_path / name).write_text(name)
    assert documents(f"path:{tmp_path}") == ["a.txt", "b.txt", "deep/c.txt"]
    assert documents(f"path:{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert documents([f"path:{tmp_path}/b.txt", f"path:{tmp_path}/a.txt"]) == ["b.txt", "a.txt"]


def test_file_name_with_glob_characters_is_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    assert documents(f"path:{tmp_path}/a[1].txt") == ["one"]


def test_fingerprint_follows_content_and_not_place(tmp_path):
    for name, text in (("a.txt", "one"), ("b.txt", "one"), ("c.txt", "two"), ("a.jsonl", "one")):
        (tmp_path / name).write_text(text)
    same, copy, other, lines = (fingerprints(f"path:{tmp_path}/{name}")[0] for name in ("a.txt", "b.txt", "c.txt", "a.jsonl"))
    assert same == copy
    assert len({same, other, lines}) == 3
    assert fingerprints(f"path:{tmp_path}/a.jsonl", "body") != fingerprints(f"path:{tmp_path}/a.jsonl", "text")


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_sources("path:x/*.txt") == (f"path:{tmp_path}/x/*.txt",)
    assert absolute_sources(["builtin:topics", "hf:a/b:c", "path:/y"]) == ("builtin:topics", "hf:a/b:c", "path:/y")
    assert absolute_reference("path:tok") == f"path:{tmp_path}/tok"
    assert absolute_reference("path:~/tok") == f"path:{Path.home()}/tok"
    assert absolute_reference("hf:a/b") == "hf:a/b"


def table(**columns):
    sink = pyarrow.BufferOutputStream()
    write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


FAULTS = {
    "missing": ("path:{dir}/no.txt", None, ["does not exist", "check the path", "no.txt"]),
    "empty glob": ("path:{dir}/*.nothing", None, ["matches no file", "*.nothing"]),
    "empty file": ("path:{dir}/a.txt", b"", ["a.txt", "is empty", "leave it out"]),
    "binary": ("path:{dir}/a.txt", b"PNG\0\xff", ["a.txt", "binary", "byte 3", "convert"]),
    "bad utf-8": ("path:{dir}/a.txt", b"\xef\xbb\xbfgood \xff", ["a.txt", "not UTF-8", "byte 8", "0xff"]),
    "bad utf-8 in a line": ("path:{dir}/a.jsonl", b'{"text": ""}\n"\xfc"\n', ["a.jsonl", "not UTF-8", "byte 14"]),
    "no json": ("path:{dir}/a.jsonl", b'{"text": "x"}\n\n{"text": \n', ["a.jsonl: line 3", "not JSON", "column"]),
    "huge number": ("path:{dir}/a.jsonl", b"1" * 5000, ["a.jsonl: line 1", "not JSON"]),
    "no object": ("path:{dir}/a.jsonl", b"[1]", ["a.jsonl: line 1", "'text'", "list", "data.text_key"]),
    "no field": ("path:{dir}/a.jsonl", b'{"body": "x"}', ["a.jsonl: line 1", "'text'", "body", "data.text_key"]),
    "no string": ("path:{dir}/a.jsonl", b'{"text": 3}', ["a.jsonl: line 1", "'text'", "int", "data.text_key"]),
    "lone surrogate": ("path:{dir}/a.jsonl", b'{"text": "ab\\ud800"}', ["a.jsonl: line 1", "surrogate", "character 2"]),
    "no parquet": ("path:{dir}/a.parquet", b"nonsense", ["a.parquet", "not a readable parquet file"]),
    "no column": ("path:{dir}/a.parquet", table(body=["x"]), ["a.parquet", "'text'", "body", "data.text_key"]),
    "null in a column": ("path:{dir}/a.parquet", table(text=["x", None]), ["a.parquet: row 1", "NoneType", "data.text_key"]),
    "bare path": ("corpus.txt", None, ["'corpus.txt'", "write path:corpus.txt"]),
    "unknown builtin": ("builtin:nothing", None, ["'builtin:nothing'", "builtin:topics", "path:"]),
    "unknown form": ("s3:bucket", None, ["'s3:bucket'", "path:"]),
    "nothing after the colon": ("path:", None, ["'path:'", "path:FILE"]),
    "no hub name": ("hf:/some/folder", None, ["hf:/some/folder", "not a hub name", "path:"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_told_in_one_line(tmp_path, fault):
    reference, content, parts = FAULTS[fault]
    reference = reference.format(dir=tmp_path)
    if content is not None:
        Path(reference.removeprefix("path:")).write_bytes(content)
    with pytest.raises(DataError) as raised:
        documents(reference)
        fingerprints(reference)
    message = str(raised.value)
    assert "\n" not in message and message.startswith("data.source: ")
    assert all(part in message for part in parts), message


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no files"):
        documents(f"path:{tmp_path}")


def test_wrong_form_is_refused_before_the_launch():
    with pytest.raises(DataError, match=r"^data.eval_source: 'corpus.txt' is no source; write path:corpus.txt$"):
        absolute_sources(["builtin:topics", "corpus.txt"], "data.eval_source")


READ_FROM_HUB = """
import json, sys
from fluxray.data.sources import open_sources
from fluxray.errors import DataError
for reference in sys.argv[1:]:
    try:
        (source,) = open_sources(reference, "text", "data.source")
        print(json.dumps([list(source.documents()), source.fingerprint()]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


DATASET_CARD = """---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/train.parquet}
  - {split: test, path: small/test.parquet}
---
"""


def test_hub_data_sets_are_read_from_the_hub_cache_without_the_hub(tmp_path):
    sha = "0123456789" * 4
    repository = tmp_path / "hub" / "datasets--org--tiny"
    snapshot = repository / "snapshots" / sha
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(sha)
    (snapshot / "small").mkdir(parents=True)
    (snapshot / "README.md").write_text(DATASET_CARD)
    write_table(pyarrow.table({"text": ["one", "two"]}), snapshot / "small" / "train.parquet")
    write_table(pyarrow.table({"text": ["three"]}), snapshot / "small" / "test.parquet")
    names = ["org/tiny", "org/tiny:small:test", "org/tiny:small", "org/tiny:small:none", "org/tiny:big", "org/none"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment = {name: value for name, value in environment.items() if name not in ("HF_HUB_CACHE", "HF_DATASETS_CACHE")}
    command = [sys.executable, "-c", READ_FROM_HUB, *(f"hf:{name}" for name in names)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    default, test, train, no_split, no_config, no_name = map(json.loads, found.splitlines())
    assert default[0] == train[0] == ["one", "two"] and test[0] == ["three"]
    assert len({default[1], test[1]}) == 2
    assert no_split.startswith("data.source: hf:org/tiny:small:none: cannot be loaded") and "test" in no_split
    assert no_config.startswith("data.source: hf:org/tiny:big: cannot be loaded") and "small" in no_config
    assert no_name.startswith("data.source: hf:org/none: is not in the hub's cache") and "HF_HOME" in no_name
