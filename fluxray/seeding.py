"""Random streams keyed by what they are for, never by rank or by call order.

A stream is named by a tuple such as `(seed, "order", epoch)` or `(seed, "dropout", step, samples, block)`. Equal names give equal
numbers on any number of ranks, under any split into micro-batches and after any resume.
"""

import hashlib
from typing import TypeAlias

import numpy as np

KeyPart: TypeAlias = int | str | tuple["KeyPart", ...]


def derive_seed(*key: KeyPart) -> int:
    """Return the 63-bit seed of the stream named `key` (blake2b of its canonical text)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: KeyPart) -> np.random.Generator:
    """Return a numpy generator (Philox, counter-based) at the start of the stream named `key`."""
    return np.random.Generator(np.random.Philox(key=derive_seed(*key)))
