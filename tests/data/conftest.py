"""Stores built by hand, so that a row's tokens say where they come from."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fluxray.data.rows import TextRows
from fluxray.data.store import TokenStore

MakeStore = Callable[[list[int]], TokenStore]
MakeRows = Callable[..., TextRows]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Return a function that writes a store of documents of the given lengths; token t of the store has the id t."""

    def make(lengths: list[int]) -> TokenStore:
        folder = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        total = sum(lengths)
        np.arange(total, dtype="uint16").tofile(folder / "tokens.bin")
        np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
        meta = {"dtype": "uint16", "num_tokens": total, "num_documents": len(lengths), "num_entries": total, "pad_id": 0}
        (folder / "meta.json").write_text(json.dumps(meta))
        return TokenStore.open(folder)

    return make


@pytest.fixture
def make_rows(make_store: MakeStore) -> MakeRows:
    """Return a function that gives the rows over all documents of the given lengths."""

    def make(lengths: list[int], max_slice: int, packed: bool = True) -> TextRows:
        store = make_store(lengths)
        return TextRows(store, store.offsets[:-1], np.diff(store.offsets), max_slice, packed)

    return make
