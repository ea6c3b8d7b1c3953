import subprocess
import sys

import numpy as np
import pytest

from fluxray.data.sources import open_sources
from fluxray.data.store import TokenStore, ensure_store, write_once
from fluxray.data.tokenizer import num_entries, train_tokenizer
from fluxray.errors import DataError

TOKENIZER = train_tokenizer(["one two three"], 270)


def store_of(folder, texts, identity="test"):
    """Return the store of some texts, and what it was built from."""
    (folder / "text").mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / "text" / f"{number}.txt").write_text(text)
    return ensure_store(folder / "cache", open_sources(f"path:{folder}/text", "text", "data.source"), identity, lambda: TOKENIZER)


def test_store_holds_every_document_closed_by_eos(tmp_path):
    texts = ["one two", "three " * 50, "x"]
    store = store_of(tmp_path, texts)
    assert store.num_documents == 3
    for text, begin, end in zip(texts, store.offsets[:-1], store.offsets[1:], strict=True):
        assert store.tokens[begin:end].tolist() == [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    assert store.tokens.dtype == np.uint16 and len(store.tokens) == store.num_tokens
    assert store.num_entries == num_entries(TOKENIZER) and store.pad_id == TOKENIZER.pad_token_id


def test_store_follows_content_and_tokenizer(tmp_path):
    first, again = store_of(tmp_path, ["one"]), store_of(tmp_path, ["one"])
    other_text, other_tokenizer = store_of(tmp_path, ["two"]), store_of(tmp_path, ["two"], "other")
    assert first.folder == again.folder
    assert len({first.folder, other_text.folder, other_tokenizer.folder}) == 3


def test_second_opening_neither_reads_nor_trains(tmp_path):
    first = store_of(tmp_path, ["one"])
    sources = open_sources(f"path:{tmp_path}/text", "text", "data.source")
    assert ensure_store(tmp_path / "cache", sources, "test", lambda: pytest.fail("built again")) == first


def test_faulty_text_leaves_nothing_behind(tmp_path):
    with pytest.raises(DataError):
        store_of(tmp_path, ["good", "bad \0"])
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_damaged_store_is_refused_with_its_folder(tmp_path):
    store = store_of(tmp_path, ["one two three"])
    with (store.folder / "tokens.bin").open("r+b") as file:
        file.truncate(2)
    with pytest.raises(DataError, match=f"{store.folder} is damaged; remove this folder"):
        TokenStore.open(store.folder)


def test_token_ids_beyond_two_bytes_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("fluxray.data.store.num_entries", lambda tokenizer: 1 << 17)
    assert store_of(tmp_path, ["one"]).tokens.dtype == np.uint32


DIE_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from fluxray.data.store import write_once

def write(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

write_once(Path(sys.argv[1]), write)
"""


def test_folder_of_a_killed_writer_is_rebuilt(tmp_path):
    folder = tmp_path / "store"
    writer = subprocess.run([sys.executable, "-c", DIE_WHILE_WRITING, str(folder)], timeout=60, check=False)
    assert writer.returncode == -9
    assert (tmp_path / "store.partial" / "half").exists() and not folder.exists()
    write_once(folder, lambda partial: (partial / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not (tmp_path / "store.partial").exists()


BUILD_TOGETHER = """
import sys, time
from pathlib import Path
from fluxray.data.sources import open_sources
from fluxray.data.store import ensure_store
from fluxray.data.tokenizer import train_tokenizer

folder = Path(sys.argv[1])

def build():
    with (folder / "builds").open("a") as file:
        file.write("x")
    time.sleep(0.5)
    return train_tokenizer(["document"], 270)

(folder / f"ready-{sys.argv[2]}").touch()
while len(list(folder.glob("ready-*"))) < 3:
    time.sleep(0.01)
store = ensure_store(folder / "cache", open_sources(f"path:{folder}/*.txt", "text", "data.source"), "test", build)
print(store, store.tokens.tolist(), store.offsets.tolist())
"""


def test_processes_at_the_same_time_write_once_and_read_the_same(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    commands = [[sys.executable, "-c", BUILD_TOGETHER, str(tmp_path), str(number)] for number in range(3)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1 and "num_documents=4" in outputs.pop()
    assert (tmp_path / "builds").read_text() == "x"
