from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fluxray.config.schema import BatchConfig, FlowTaskConfig
from fluxray.data.latent_facts import CacheNeeds
from fluxray.data.latents import LatentRows, load_latents
from fluxray.data.loader import Loader
from fluxray.protocols import FlowBatch, LossOutput
from fluxray.tasks.flow import FlowTask
from fluxray.tasks.validation import GRID, FlowValidation, flow_metrics
from tests.flow_caches import random_cache
from tests.tasks.flow_helpers import facts_of

BUCKETS = {(64, 64, 6): 9, (32, 64, 6): 5}
MAX_ROWS = 11


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> LatentRows:
    train, held_out = (tmp_path_factory.mktemp(name) for name in ("train", "held-out"))
    random_cache(train, {(32, 32, 6): 2})
    random_cache(held_out, BUCKETS, seed=1)
    return load_latents(train, held_out, 0.05, CacheNeeds("flux1", 8, 12, 10)).evaluation


def validation(rows: LatentRows, rank: int = 0, num_ranks: int = 1, micro_size: int = 2, **keys) -> FlowValidation:
    task = FlowTask(FlowTaskConfig(**keys), facts_of(), rows.cache.empty)
    batch = BatchConfig(micro_size=micro_size, accumulation_steps=3)
    return FlowValidation(task, Loader(rows, task.prepare, batch, rank, num_ranks), rows, MAX_ROWS)


def samples_of(batches: Iterable[FlowBatch]) -> dict[tuple[float | None, bytes], tuple[Tensor, ...]]:
    """Return what each sample that counts is shown, by timestep and text, which names it."""
    found: dict[tuple[float | None, bytes], tuple[Tensor, ...]] = {}
    for batch in batches:
        for place in torch.nonzero(batch.weight).flatten().tolist():
            name = (batch.timestep, batch.text[place].numpy().tobytes())
            assert name not in found
            found[name] = (batch.noised[place], batch.target[place], batch.sigma[place])
    return found


def same(actual: dict, expected: dict) -> bool:
    return actual.keys() == expected.keys() and all(
        all(map(torch.equal, actual[name], values)) for name, values in expected.items()
    )


def error_of_nothing(batch: FlowBatch) -> LossOutput:
    """The loss of a model whose prediction is 0."""
    return LossOutput(torch.dot(batch.weight, batch.target.square().flatten(1).mean(1)), batch.num_valid)


def test_each_sample_is_seen_once_at_each_share_of_noise(rows: LatentRows) -> None:
    batches = list(validation(rows).batches())
    assert [batch.timestep for batch in batches[:8]] == [*GRID, None] and len(samples_of(batches)) == MAX_ROWS * 8
    for batch in batches:
        assert batch.timestep is None or batch.sigma.tolist() == [batch.timestep] * 2
        latents = batch.noised - batch.sigma[:, None, None] * batch.target
        noise = latents + batch.target
        assert torch.allclose(
            batch.noised, (1 - batch.sigma)[:, None, None] * latents + batch.sigma[:, None, None] * noise, atol=1e-6
        )
        assert batch.key is None and batch.num_valid == (batch.weight == 1).sum()


def test_mlperf_gives_each_sample_one_share_by_its_number(rows: LatentRows) -> None:
    shown = samples_of(batch for batch in validation(rows).batches() if batch.timestep is None)
    for number in range(MAX_ROWS):
        row = rows[number]
        noised, _, sigma = shown[None, row.text.numpy().tobytes()]
        assert sigma.item() == number % 8 / 8
        assert number % 8 != 0 or torch.equal(noised, row.latents), "with no noise the image itself is shown"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("micro_size", [1, 2, 4])
def test_any_cut_over_ranks_shows_the_same(rows: LatentRows, num_ranks: int, micro_size: int) -> None:
    expected = samples_of(validation(rows).batches())
    ranks = [list(validation(rows, rank, num_ranks, micro_size).batches()) for rank in range(num_ranks)]
    shown = [samples_of(batches) for batches in ranks]
    assert sum(map(len, shown)) == len(expected)
    assert same({name: values for of_rank in shown for name, values in of_rank.items()}, expected)
    for together in zip(*ranks, strict=True):
        assert len({(batch.timestep, batch.height, batch.width, len(batch.sigma)) for batch in together}) == 1


def test_nothing_but_the_weights_changes_a_held_out_loss(rows: LatentRows) -> None:
    expected = samples_of(validation(rows).batches())
    assert same(samples_of(validation(rows).batches()), expected), "each time"
    changed = {"timesteps": "mode", "shift": "resolution", "weighting": "sigma_sqrt", "caption_dropout": 1.0}
    assert same(samples_of(validation(rows, **changed).batches()), expected), "under any law of training"


def test_samples_are_judged_by_their_names(rows: LatentRows, tmp_path: Path) -> None:
    chosen = LatentRows(rows.cache, rows.indexes[:4].copy()[::-1])
    few = FlowValidation(validation(rows).task, validation(rows).loader, chosen, 4)
    shown, expected = samples_of(few.batches()), samples_of(validation(rows).batches())
    on_grid = {name: values for name, values in shown.items() if name[0] is not None}
    assert len(on_grid) == 4 * len(GRID) and same(on_grid, {name: expected[name] for name in on_grid})


def test_groups_are_as_large_as_a_step(rows: LatentRows) -> None:
    groups = list(validation(rows).groups())
    batches = list(validation(rows).batches())
    assert [len(group) for group in groups[:-1]] == [3] * (len(groups) - 1) and 0 < len(groups[-1]) <= 3
    assert [batch.timestep for group in groups for batch in group] == [batch.timestep for batch in batches]


def test_metrics_are_means_over_samples(rows: LatentRows) -> None:
    batches = list(validation(rows).batches())
    metrics = flow_metrics((batch, error_of_nothing(batch)) for batch in batches)
    assert list(metrics) == ["eval/loss", "eval/loss_mlperf", *(f"eval/loss_t{i / 8:g}" for i in range(1, 8))]
    targets = {name[1]: values[1] for name, values in samples_of(batches).items()}
    mean = sum(target.square().mean().item() for target in targets.values()) / MAX_ROWS
    assert list(metrics.values()) == pytest.approx([mean] * 9, rel=1e-6)


def test_metrics_keep_timesteps_apart() -> None:
    def output(timestep: float | None, loss: float, num: int) -> tuple[FlowBatch, LossOutput]:
        zero = torch.zeros(num)
        return FlowBatch(zero, zero, zero, zero, zero, None, None, 1, 1, num, None, timestep), LossOutput(
            torch.tensor(loss * num), num
        )

    pairs = [output(timestep, 8 * timestep, num) for num in (1, 2) for timestep in GRID]
    pairs += [output(None, 1.0, 1), output(None, 4.0, 2), output(GRID[0], 5.0, 3)]
    metrics = flow_metrics(pairs)
    assert metrics["eval/loss_mlperf"] == pytest.approx(3.0)
    assert metrics["eval/loss_t0.125"] == pytest.approx(3.0) and metrics["eval/loss_t0.875"] == pytest.approx(7.0)
    assert metrics["eval/loss"] == pytest.approx((3 + 2 + 3 + 4 + 5 + 6 + 7) / 7)
