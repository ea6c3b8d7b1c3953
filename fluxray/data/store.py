"""Tokens on disk, written once and memory-mapped.

A store is a folder: `tokens.bin` (all documents one after the other, each closed by the eos token; uint16 or uint32),
`offsets.npy` (where each begins, and the end; int64 [documents + 1]), `meta.json` and `tokenizer`. Its name is a hash of all that
decides its content.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from fluxray.data.sources import Source, read_documents
from fluxray.data.tokenizer import num_entries
from fluxray.errors import DataError

STORE_FORMAT = 1
CHARACTERS_AT_ONCE = 1 << 22
DOCUMENTS_AT_ONCE = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """A finished store; pickles as its folder. `num_entries` is the tokenizer's largest id + 1, `pad_id` what fills padding."""

    folder: Path
    dtype: str
    num_tokens: int
    num_documents: int
    num_entries: int
    pad_id: int

    @classmethod
    def open(cls, folder: Path) -> "TokenStore":
        """Open what `ensure_store` wrote; DataError if its files have been tampered with."""
        try:
            store = cls(folder, **json.loads((folder / "meta.json").read_text()))
            whole = (folder / "tokens.bin").stat().st_size == store.num_tokens * np.dtype(store.dtype).itemsize
        except (OSError, ValueError, TypeError):
            whole = False
        if not whole:
            raise DataError(f"storage: {folder} is damaged; remove this folder and start again")
        return store

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, memory-mapped: uint16 or uint32 [num_tokens]."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each document begins in `tokens`, and the end: int64 [num_documents + 1]."""
        return np.load(self.folder / "offsets.npy")

    @property
    def tokenizer_dir(self) -> Path:
        """Folder that `AutoTokenizer.from_pretrained` loads."""
        return self.folder / "tokenizer"

    def __reduce__(self) -> tuple:
        return TokenStore.open, (self.folder,)


def ensure_store(
    cache: Path, sources: Sequence[Source], identity: str, build_tokenizer: Callable[[], PreTrainedTokenizerFast]
) -> TokenStore:
    """Return the store of `sources` under the tokenizer that `build_tokenizer` gives, written now if it is not there.

    `identity` names the tokenizer: whatever can change it must show in there. Of several processes one writes, the others wait.
    Raises DataError for faulty text.
    """
    parts = (STORE_FORMAT, identity, *(source.fingerprint() for source in sources))
    folder = cache.absolute() / hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    write_once(folder, lambda partial: _write_store(partial, sources, build_tokenizer()))
    return TokenStore.open(folder)


def write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` by `write`, unless it exists. It appears whole or not at all, whatever dies on the way.

    `write` fills a folder beside it, under a lock that its process's death releases; what a dead writer left is dropped.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            write(partial)
            _flush_to_disk(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _write_store(folder: Path, sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast) -> None:
    entries = num_entries(tokenizer)
    dtype = "uint16" if entries <= 1 << 16 else "uint32"
    tokenizer.save_pretrained(folder / "tokenizer")
    lengths: list[np.ndarray] = []
    with (folder / "tokens.bin").open("wb") as file:
        for encoded in _encode(_batches(read_documents(sources)), tokenizer):
            lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            np.fromiter(chain.from_iterable(encoded), dtype, int(lengths[-1].sum())).tofile(file)
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    np.save(folder / "offsets.npy", offsets)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    meta = {
        "dtype": dtype,
        "num_tokens": int(offsets[-1]),
        "num_documents": len(offsets) - 1,
        "num_entries": entries,
        "pad_id": pad_id,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    log.info("tokenised %d documents to %d tokens", meta["num_documents"], meta["num_tokens"])


def _encode(batches: Iterable[list[str]], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[list[int]]]:
    """Yield for each batch the token ids of its documents, with eos appended. Special tokens that a text spells out count."""
    backend, eos = tokenizer.backend_tokenizer, cast(int, tokenizer.eos_token_id)
    backend.no_truncation()
    backend.no_padding()
    for texts in batches:
        yield [[*encoding.ids, eos] for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= CHARACTERS_AT_ONCE or len(batch) == DOCUMENTS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _flush_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
