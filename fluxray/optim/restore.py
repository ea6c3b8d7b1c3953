"""A parameter's kept state from a checkpoint of either engine, whatever format it was saved in.

Where the formats are the same the bytes are copied. Otherwise values pass through fp32: exactly into an equal or wider format,
rounded to nearest into a narrower one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxray.errors import CheckpointError
from fluxray.optim.formats import dequantise, join, quantise, split, zero_code
from fluxray.optim.states import AVERAGE, StateFormat
from fluxray.protocols import StateReader

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name of a moment -> whether it has a sign."""

CHUNK = 2**22
"""Elements that are converted at a time, which bounds the temporaries."""


@dataclass(frozen=True)
class _Saved:
    """The wanted rows of one saved parameter."""

    reader: StateReader
    name: str
    offset: int
    num_rows: int | None

    def read(self, section: str, like: Tensor | None = None) -> Tensor:
        """Return the rows of a section, which must have the shape of `like`."""
        found = self.reader.read(section, self.name, self.offset, self.num_rows)
        if like is not None and found.shape != like.shape:
            raise CheckpointError(
                f"{section} of {self.name} is saved as {list(found.shape)}, the model has {list(like.shape)}; "
                f"the checkpoint is of another model"
            )
        return found


def restore(
    reader: StateReader,
    name: str,
    fmt: StateFormat,
    targets: Mapping[str, Tensor],
    offset: int = 0,
    num_rows: int | None = None,
) -> bool:
    """Fill the sections of one parameter, or of its rows [offset, offset + num_rows), and return whether anything was narrowed.

    `targets` holds what `fmt` has: `weights`, `correction`, `exp_avg` and `exp_avg_sq` shaped like the parameter, the moments'
    absmax [rows, elements of a row / 256]. Moments that were not saved (nothing has been stepped yet) become zero, an average
    begins with the master. Raises CheckpointError if a shape differs.
    """
    saved = _Saved(reader, name, offset, num_rows)
    sections = frozenset(reader.sections(name))
    narrowed = _restore_master(saved, "correction" in sections, fmt, targets)
    if fmt.trained:
        for moment in MOMENTS:
            narrowed |= _restore_moment(saved, moment, sections, fmt.quantised, targets)
    if fmt.average is not None:
        master = [targets["weights"], targets.get("correction")]
        narrowed |= restore_average(reader, name, targets[AVERAGE], *master, offset=offset, num_rows=num_rows)
    return narrowed


@torch.no_grad()
def restore_average(  # noqa: PLR0913 - rows of three tensors
    reader: StateReader,
    name: str,
    average: Tensor,
    weight: Tensor | None,
    correction: Tensor | None = None,
    *,
    offset: int = 0,
    num_rows: int | None = None,
) -> bool:
    """Fill the moving average of a parameter, or of its rows, and return whether it was narrowed.

    Where none was saved it begins with the master, which must be there already: `weight` and its `correction`.
    """
    if AVERAGE in reader.sections(name):
        values = _Saved(reader, name, offset, num_rows).read(AVERAGE, average)
        average.copy_(values)
        return values.dtype.itemsize > average.dtype.itemsize
    assert weight is not None
    for rows in _chunks(weight):
        average[rows].copy_(join(weight[rows], None if correction is None else correction[rows]))
    return False


@torch.no_grad()
def _restore_master(saved: _Saved, corrected: bool, fmt: StateFormat, targets: Mapping[str, Tensor]) -> bool:
    weight = saved.read("weights", targets["weights"])
    correction = saved.read("correction", targets["weights"]) if corrected else None
    wanted = [targets["weights"]] if fmt.correction is None else [targets["weights"], targets["correction"]]
    if weight.dtype == fmt.weight and (None if correction is None else correction.dtype) == fmt.correction:
        _copy([weight] if correction is None else [weight, correction], wanted)
        return False
    for rows in _chunks(weight):
        master = join(weight[rows], None if correction is None else correction[rows])
        parts = [part for part in split(master, fmt, noise=None) if part is not None]
        _copy(parts, [target[rows] for target in wanted])
    return _num_bits(weight, correction) > 8 * (fmt.weight.itemsize + (fmt.correction.itemsize if fmt.correction else 0))


@torch.no_grad()
def _restore_moment(saved: _Saved, moment: str, sections: frozenset[str], quantised: bool, targets: Mapping[str, Tensor]) -> bool:
    signed, scale = MOMENTS[moment], f"{moment}_absmax"
    wanted = [targets[moment], targets[scale]] if quantised else [targets[moment]]
    if moment not in sections:
        wanted[0].fill_(zero_code(signed) if quantised else 0)
        for absmax in wanted[1:]:
            absmax.zero_()
        return False
    values = saved.read(moment, targets[moment])
    absmax = saved.read(scale, targets.get(scale)) if scale in sections else None
    if quantised == (absmax is not None):
        _copy([values] if absmax is None else [values, absmax], wanted)
        return False
    for rows in _chunks(values):
        if absmax is None:
            _copy(quantise(values[rows].flatten(1), signed), [target[rows] for target in wanted])
        else:
            _copy([dequantise(values[rows].flatten(1), absmax[rows], signed)], [wanted[0][rows]])
    return quantised


def _num_bits(weight: Tensor, correction: Tensor | None) -> int:
    return 8 * (weight.itemsize + (0 if correction is None else correction.itemsize))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.view_as(target))


def _chunks(tensor: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield ranges of rows of at most CHUNK elements, or one row; everything for a scalar."""
    if not tensor.ndim:
        yield ()
        return
    step = max(CHUNK // max(tensor[:1].numel(), 1), 1)
    for start in range(0, len(tensor), step):
        yield (slice(start, start + step),)
