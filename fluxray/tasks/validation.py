"""The held-out loss of flow matching: fixed timesteps and fixed noise, so that only the weights change it.

Every sample is noised with GRID's shares of noise; `eval/loss` is the mean over samples and grid, `eval/loss_t0.125` that at one
share. The ends are left out: at 0 the noise is not to be seen, and nothing but its variance would be counted; at 1 the image is
not. `eval/loss_mlperf` is the definition of MLPerf Training's benchmark of FLUX.1: sample number i, from 0, is noised with the
share (i mod 8) / 8 alone, and the mean is over samples. No weight, shift, or caption dropout applies. The noise of a sample
follows from its name alone: runs over the same held-out samples are judged by the same numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from fluxray.data.latents import FlowRow, LatentRows
from fluxray.data.loader import Loader
from fluxray.protocols import Batch, FlowBatch, LossOutput
from fluxray.tasks.flow import FlowTask, draw_noise

GRID = tuple(i / 8 for i in range(1, 8))
"""Shares of noise of `eval/loss`."""

MLPERF_SHARES = 8


@dataclass(frozen=True)
class FlowValidation:
    """The held-out batches of one rank: of the first `max_rows` of `rows`, shared out by the rank's `loader`."""

    task: FlowTask
    loader: Loader
    rows: LatentRows
    max_rows: int

    def groups(self) -> Iterator[list[FlowBatch]]:
        """Yield the batches in groups of as many as a step has micro-batches; the last may be smaller."""
        batches = self.batches()
        while group := list(islice(batches, self.loader.batch.accumulation_steps)):
            yield group

    def batches(self) -> Iterator[FlowBatch]:
        """Yield batches of `micro_size` rows: the same rows at each share of GRID, then at those of MLPerf.

        Batches of all ranks at one place have one `timestep` (None: MLPerf's) and bucket. Over all ranks each row counts once for
        each of these.
        """
        for places, rows in self.loader.eval_shares(self.rows, self.max_rows):
            noise_BTC = torch.stack([draw_noise(tuple(row.latents.shape), "held-out noise", row.key) for row in rows])
            for timestep in GRID:
                yield replace(self._at(rows, noise_BTC, torch.full((len(rows),), timestep)), timestep=timestep)
            filled = places + [0] * (len(rows) - len(places))
            yield self._at(rows, noise_BTC, torch.tensor([place % MLPERF_SHARES / MLPERF_SHARES for place in filled]))

    def _at(self, rows: Sequence[FlowRow], noise_BTC: Tensor, sigma_B: Tensor) -> FlowBatch:
        return self.task.noised(rows, rows, noise_BTC, sigma_B, torch.ones_like(sigma_B))


def flow_metrics(pairs: Iterable[tuple[Batch, LossOutput]]) -> dict[str, float]:
    """Return the held-out losses of batches of `FlowValidation.batches` and their outputs over all ranks."""
    outputs: dict[float | None, list[LossOutput]] = {}
    for batch, output in pairs:
        assert isinstance(batch, FlowBatch)
        outputs.setdefault(batch.timestep, []).append(output)
    losses = {timestep: _mean(found) for timestep, found in outputs.items()}
    metrics = {"eval/loss": sum(losses[timestep] for timestep in GRID) / len(GRID), "eval/loss_mlperf": losses[None]}
    return metrics | {f"eval/loss_t{timestep:g}": losses[timestep] for timestep in GRID}


def _mean(outputs: Sequence[LossOutput]) -> float:
    return sum(float(output.sum) for output in outputs) / sum(float(output.num_valid) for output in outputs)
