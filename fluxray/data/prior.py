"""Prior preservation: a regularisation set beside pictures that are learned, so that the model keeps what it knew.

Ruiz et al., "DreamBooth" (arXiv:2208.12242). Half of each global batch comes from the set (`batching.with_prior`). The loss of
its samples is multiplied by a weight, and that of the batch is the mean over all of its samples.
"""

from collections.abc import Sequence

import numpy as np

from fluxray.data.latents import FlowRow, LatentRows


class RowsWithPrior(Sequence[FlowRow]):
    """The rows that are learned, and behind them those of the regularisation set, whose loss has the `weight`."""

    def __init__(self, own: LatentRows, prior: LatentRows, weight: float) -> None:
        self._own, self._prior, self._weight = own, prior, weight
        sizes = np.concatenate([rows.cache.sizes[rows.indexes] for rows in (own, prior)])
        self._buckets = np.unique(sizes, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def __len__(self) -> int:
        return len(self._own) + len(self._prior)

    def __getitem__(self, index: int) -> FlowRow:  # type: ignore[override]  # rows have no slices
        if index < len(self._own):
            return self._own[index]
        row = self._prior[index - len(self._own)]
        return row._replace(weight=row.weight * self._weight)

    @property
    def buckets(self) -> np.ndarray:
        """The bucket of each row, numbered over both sets: int64 [rows]."""
        return self._buckets

    @property
    def row_lengths(self) -> np.ndarray:
        """Number of positions of each row: int64 [rows]."""
        return np.concatenate([self._own.row_lengths, self._prior.row_lengths])

    @property
    def max_slice(self) -> int:
        """Positions of the longest row."""
        return max(self._own.max_slice, self._prior.max_slice)
