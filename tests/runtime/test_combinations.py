"""Every pair of techniques trains as with one of the two alone, or is refused; docs/combinations.md says which."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.combinations import DOCUMENT, TECHNIQUES, Pair, document, pairs, words_of
from fluxray.config.load import resolve
from fluxray.optim.schedule import build_schedule, lr_at
from fluxray.protocols import RunState
from fluxray.runtime.worker import WorkerContext, build_parts

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 2
RUN = [pair for pair in pairs() if pair.refusal is None and not pair.has_several_workers]

_losses: dict[tuple[str, ...], list[float]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("combinations")
    (found / "text.txt").write_text((Path(__file__).parents[1] / "golden" / "corpus.txt").read_text()[:20_000])
    return found


def losses(words: list[str], folder: Path) -> list[float]:
    """Return the losses of the first steps of a run; each run is made once."""
    key = tuple(words)
    if key not in _losses:
        config = resolve("cpu", "lm-tiny", [f"data.source=path:{folder / 'text.txt'}", "data.vocab_size=384", *words])
        parts = build_parts(config, WorkerContext(0, 1, 0, folder, folder / "cache", print, lambda _: False, (), print))
        state = RunState(config.seed, build_schedule(config.optim, NUM_STEPS))
        source = parts.learned.loader.train_batches(state)
        outputs = [parts.engine.train_step(next(source).batches, lr_at(state.schedule, step)) for step in range(NUM_STEPS)]
        source.close()
        _losses[key] = [output.loss.item() for output in outputs]
    return _losses[key]


def expect_as_alone(pair: Pair, folder: Path) -> None:
    """Compare the pair with the one of the two that leaves the lesser difference."""
    names = sorted((pair.first, pair.second), key=lambda name: TECHNIQUES[name].tolerance or math.inf)
    replaced, kept = names
    tolerance = TECHNIQUES[replaced].tolerance
    assert tolerance is not None
    actual = losses(words_of(pair.first, pair.second), folder)
    expected = losses(words_of(kept, plain=replaced), folder)
    if TECHNIQUES[kept].tolerance != 1e-5:  # sums in another order, rounded to 16 or 8 bits
        tolerance = max(tolerance, 2e-3)
    assert actual == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("pair", [pair for pair in RUN if not pair.needs_gpu], ids=lambda pair: f"{pair.first} {pair.second}")
def test_a_pair_trains_as_one_of_them_alone(pair: Pair, folder: Path) -> None:
    expect_as_alone(pair, folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pair", [pair for pair in RUN if pair.needs_gpu], ids=lambda pair: f"{pair.first} {pair.second}")
def test_a_pair_trains_as_one_of_them_alone_on_a_gpu(pair: Pair, folder: Path) -> None:
    if any(name.startswith("allocator=") for name in (pair.first, pair.second)):
        pytest.skip("an allocator is chosen before CUDA starts: tests/runtime/test_profiling.py")
    expect_as_alone(pair, folder)


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python benchmarks/combinations.py"
