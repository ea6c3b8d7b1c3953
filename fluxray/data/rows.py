"""Rows of tokens, computed from a store when they are asked for.

The tokens of one part (training or held-out) form a stream of pieces: a piece is a document, or the share of one that belongs to
the part. A row is a span of that stream, of at most `max_slice` positions. Packed, the spans tile the stream; otherwise each
piece is tiled by itself. Either way every position but the last of its piece has the next token as its target: no target is lost
at the end of a row, and none reaches into another piece.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fluxray.data.store import TokenStore
from fluxray.protocols import IGNORE_INDEX
from fluxray.seeding import generator


class TextRow(NamedTuple):
    """One row: int64 arrays [S'], S' <= max_slice. Documents are numbered from 0; positions count from 0 in each of them.

    A document that a row cuts goes on in the next one as its document 0, with positions from 0.
    """

    input_ids: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray


class TextRows(Sequence[TextRow]):
    """The rows of one part of a store; pickles without the tokens.

    Piece i of the stream is `store.tokens[begins[i] : begins[i] + lengths[i]]`; pieces without tokens are dropped.
    """

    buckets: np.ndarray | None = None  # any rows share a micro-batch

    def __init__(self, store: TokenStore, begins: np.ndarray, lengths: np.ndarray, max_slice: int, packed: bool) -> None:
        begins, lengths = begins[lengths > 0], lengths[lengths > 0]
        self.max_slice = max_slice
        self._store = store
        self._bounds = _cumulative(lengths)  # piece -> where it begins in the stream
        self._shift = begins - self._bounds[:-1]  # stream position -> token of the store
        tiles = np.array([lengths.sum()]) if packed else lengths
        self._tile_bounds = _cumulative(tiles)
        # the last token of a tile is a target, never an input that begins a row
        self._tile_rows = _cumulative(-(-np.maximum(tiles - 1, 0) // max_slice))

    @property
    def num_documents(self) -> int:
        """Number of pieces."""
        return len(self._shift)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, eos included."""
        return int(self._bounds[-1])

    @property
    def num_targets(self) -> int:
        """Number of predicted tokens over all rows: every token but the first of its piece."""
        return self.num_tokens - self.num_documents

    @property
    def row_lengths(self) -> np.ndarray:
        """Number of positions of each row: int64 [rows]."""
        begins, ends = self._spans(np.arange(len(self)))
        return ends - begins

    def __len__(self) -> int:
        return int(self._tile_rows[-1])

    def __getitem__(self, index: int) -> TextRow:  # type: ignore[override]  # rows have no slices
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin, end = map(int, self._spans(np.array(index)))
        stream = np.arange(begin, end)
        piece = np.searchsorted(self._bounds, stream, side="right") - 1
        source = stream + self._shift[piece]
        has_next = stream + 1 < self._bounds[piece + 1]
        tokens = self._store.tokens
        return TextRow(
            input_ids=tokens[source].astype(np.int64),
            targets=np.where(has_next, tokens[source + has_next].astype(np.int64), IGNORE_INDEX),
            document_ids=piece - piece[0],
            position_ids=stream - np.maximum(self._bounds[piece], begin),
        )

    def _spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the given rows begin and end in the stream."""
        tile = np.searchsorted(self._tile_rows, rows, side="right") - 1
        begins = self._tile_bounds[tile] + (rows - self._tile_rows[tile]) * self.max_slice
        return begins, np.minimum(begins + self.max_slice, self._tile_bounds[tile + 1])


def training_lengths(lengths: np.ndarray, held_out_share: float) -> np.ndarray:
    """Return how many leading units of each document are for training; the rest of it is held out.

    Whole documents, in an order that only their number decides, are held out until `held_out_share` of all units is reached; of
    the one that crosses it, the tail is. `lengths` counts tokens, or any other unit. All runs over the same documents share it.
    """
    order = generator("held-out").permutation(len(lengths))
    ordered = lengths[order]
    wanted = round(held_out_share * int(lengths.sum()))
    training = np.empty_like(lengths)
    training[order] = ordered - np.clip(wanted - (ordered.cumsum() - ordered), 0, ordered)
    return training


def _cumulative(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), counts.astype(np.int64)]).cumsum()
