import json
import threading
import time
from itertools import islice

import numpy as np
import pytest

from fluxray.config.schema import BatchConfig, DataConfig
from fluxray.data.batching import collate_text
from fluxray.data.loader import PREFETCHED_STEPS, Loader, prefetch
from fluxray.data.sources import Topics
from fluxray.data.text import prepare_text
from fluxray.errors import DataError
from fluxray.protocols import IGNORE_INDEX, RunState, Schedule

STATE = RunState(seed=3, schedule=Schedule("constant", 1e-3, 0, 10, 0.0))


def prepare(rows, key):
    return collate_text(rows, key, pad_id=0)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not prefetch_threads()


@pytest.fixture
def rows(make_rows):
    return make_rows([9] * 20, max_slice=8, packed=False)  # a document a row


def loader(rows, num_ranks=1, rank=0, micro=2, accumulation=3, **keys):
    return Loader(rows, prepare, BatchConfig(micro_size=micro, accumulation_steps=accumulation), rank, num_ranks, **keys)


def steps(source, state, count) -> list:
    batches = source.train_batches(state)
    taken = list(islice(batches, count))
    batches.close()
    return taken


def keys(taken):
    return [[batch.key for batch in step.batches] for step in taken]


def test_batches_are_keyed_by_step_and_samples(rows):
    for step, (batches, *_) in enumerate(steps(loader(rows), STATE, 3)):
        assert len(batches) == 3
        for batch in batches:
            assert batch.key.seed == 3 and batch.key.step == step
            assert batch.input_ids[:, 0].tolist() == [9 * sample.index for sample in batch.key.samples]


def test_resume_continues_where_the_consumed_batches_ended(rows):
    whole = steps(loader(rows), STATE, 8)
    _, epoch, position, _ = whole[3]
    resumed = RunState(STATE.seed, STATE.schedule, step=4, epoch=epoch, position=position)
    rest = steps(loader(rows), resumed, 4)
    assert [step[1:] for step in rest] == [step[1:] for step in whole[4:]]
    assert keys(rest) == keys(whole[4:])


@pytest.mark.parametrize(("num_ranks", "micro", "accumulation"), [(1, 6, 1), (2, 3, 1), (3, 1, 2), (6, 1, 1)])
def test_any_shape_draws_the_same_samples(rows, num_ranks, micro, accumulation):
    def drawn(*shape):
        ranks = [steps(loader(rows, shape[0], rank, *shape[1:]), STATE, 5) for rank in range(shape[0])]
        micro_batches = [(step, k, rank) for step in range(5) for k in range(shape[2]) for rank in ranks]
        return [sample for step, k, rank in micro_batches for sample in rank[step].batches[k].key.samples]

    assert drawn(num_ranks, micro, accumulation) == drawn(1, 2, 3)


def test_seed_of_the_state_decides_the_order(rows):
    other = RunState(seed=4, schedule=STATE.schedule)
    first, second = (steps(loader(rows), state, 1)[0].batches[0].key.samples for state in (STATE, other))
    assert first != second


def test_fault_in_the_thread_is_raised_in_the_consumer(rows):
    def failing(raw, key):
        if key.step == 2:
            raise OSError("disk gone")
        return prepare(raw, key)

    batches = Loader(rows, failing, BatchConfig(micro_size=2), 0, 1).train_batches(STATE)
    next(batches)
    next(batches)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_thread_ends_when_the_generator_is_closed_or_dropped(rows):
    batches = loader(rows).train_batches(STATE)
    next(batches)
    assert prefetch_threads()
    batches.close()
    assert not prefetch_threads()
    for _ in loader(rows).train_batches(STATE):
        break
    assert not prefetch_threads()


def test_thread_is_bounded_ahead_of_the_consumer():
    made = []

    def numbers():
        for number in range(100):
            made.append(number)
            yield number

    ahead = prefetch(numbers(), PREFETCHED_STEPS)
    for consumed in range(3):
        assert next(ahead) == consumed
        deadline = time.monotonic() + 5
        while len(made) < consumed + 1 + PREFETCHED_STEPS and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(made) == consumed + 1 + PREFETCHED_STEPS
    ahead.close()


def test_prefetch_ends_with_its_items():
    assert list(prefetch(iter(range(7)), 2)) == list(range(7))


def test_training_without_rows_is_refused():
    with pytest.raises(DataError, match=r"data\.source: has no row"):
        loader([]).train_batches(STATE)


@pytest.fixture(scope="module")
def paragraphs(tmp_path_factory):
    """The paragraphs of English help texts, a document each, as rows of one document."""
    folder = tmp_path_factory.mktemp("paragraphs")
    texts = [part for text in Topics().documents() for part in text.split("\n\n") if part.strip()]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(source=f"path:{folder / 'text.jsonl'}", packing=False)
    return prepare_text(config, folder, None, 400).train


def test_grouping_leaves_little_padding_in_real_text(paragraphs):
    shares = {}
    for grouped in (False, True):
        taken = steps(loader(paragraphs, micro=8, accumulation=4, grouped=grouped), STATE, len(paragraphs) // 32)
        batches = [batch for step in taken for batch in step.batches]
        num_real = sum(len(paragraphs[sample.index].input_ids) for batch in batches for sample in batch.key.samples)
        shares[grouped] = 1 - num_real / sum(batch.num_tokens for batch in batches)
        per_step = [step.metrics["batch/padding_share"] for step in taken]
        sizes = [sum(batch.num_tokens for batch in step.batches) for step in taken]
        assert shares[grouped] == pytest.approx(np.average(per_step, weights=sizes))
    assert shares[True] < 0.05 < 0.5 < shares[False]


def test_grouping_draws_each_row_once_and_resumes_on_any_number_of_ranks(paragraphs):
    def drawn(num_ranks, count, state=STATE):
        ranks = [steps(loader(paragraphs, num_ranks, r, 8, 8 // num_ranks, grouped=True), state, count) for r in range(num_ranks)]
        assert len({step.position for rank in ranks for step in rank[-1:]}) == 1
        assert len({tuple(step.metrics["batch/padding_share"] for step in rank) for rank in ranks}) == 1
        return [sample for rank in ranks for step in rank for batch in step.batches for sample in batch.key.samples], ranks[0]

    num_steps = len(paragraphs) // 64
    whole, taken = drawn(1, num_steps)
    assert len(set(whole)) == len(whole) == 64 * num_steps
    middle = RunState(STATE.seed, STATE.schedule, step=7, epoch=taken[6].epoch, position=taken[6].position)
    rest, _ = drawn(2, num_steps - 7, middle)
    assert sorted(rest) == sorted(whole[64 * 7 :])


def test_micro_batches_have_as_many_tokens_as_the_size_of_their_step_allows(paragraphs):
    size_of = {0: 4, 1: 4, 2: 8, 3: 16}
    keys = {"grouped": True, "micro_rows": lambda step: size_of[step]}
    ranks: list[list] = [steps(loader(paragraphs, 3, rank, 8, 2, **keys), STATE, 3) for rank in range(3)]
    still: list[list] = [steps(loader(paragraphs, 3, rank, 8, 2, grouped=True), STATE, 3) for rank in range(3)]
    for step in range(3):
        shares = [[batch.key.samples for batch in rank[step].batches] for rank in ranks]
        rounds = list(zip(*shares, strict=True))  # as many on every rank
        fixed = zip(*([batch.key.samples for batch in rank[step].batches] for rank in still), strict=True)
        assert [s for of_ranks in rounds for share in of_ranks for s in share] == [
            s for of_ranks in fixed for share in of_ranks for s in share
        ]
        for rank in ranks:
            assert rank[step].metrics["batch/micro_size"] == size_of[step]
            for batch in rank[step].batches:
                assert batch.num_tokens <= size_of[step] * 512 and len(batch.input_ids) <= 16
                assert (batch.num_valid == 0) == (not batch.key.samples)
    assert max(len(rank[0].batches) for rank in ranks) <= 3, "short rows come together, up to 16"


def test_a_packed_step_is_cut_as_by_hand(make_rows):
    packed = make_rows([900], max_slice=8)
    by_hand = [steps(loader(packed, 2, rank, 4, 2), STATE, 3) for rank in range(2)]
    governed = [steps(loader(packed, 2, rank, 8, 1, micro_rows=lambda step: 4), STATE, 3) for rank in range(2)]
    assert [keys(rank) for rank in governed] == [keys(rank) for rank in by_hand]


def test_a_size_is_asked_for_no_further_ahead_than_batches_are_prepared(rows):
    asked = []

    def micro_rows(step):
        asked.append(step)
        return 2

    batches = loader(rows, micro_rows=micro_rows).train_batches(STATE)
    for step in range(4):
        next(batches)
        time.sleep(0.02)
        assert max(asked) <= step + PREFETCHED_STEPS
    batches.close()


@pytest.mark.parametrize(("num_ranks", "micro", "max_rows"), [(1, 3, 100), (4, 2, 100), (3, 4, 7), (8, 3, 5)])
def test_evaluation_counts_each_row_once_in_equally_many_batches(rows, num_ranks, micro, max_rows):
    ranks: list[list] = [list(loader(rows, num_ranks, rank, micro).eval_batches(rows, max_rows)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in ranks}) == 1
    firsts = []
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.key is None and len(batch.input_ids) == micro
        weighted = (batch.targets != IGNORE_INDEX).any(dim=1)
        firsts.extend(batch.input_ids[weighted, 0].tolist())
    assert sorted(firsts) == [9 * index for index in range(min(max_rows, 20))]


def test_evaluation_groups_as_many_batches_as_a_step_has(rows):
    one = loader(rows, micro=3, accumulation=3)
    batches, groups = list(one.eval_batches(rows, 100)), list(one.eval_groups(rows, 100))
    assert [len(group) for group in groups] == [3, 3, 1]
    flat = [batch for group in groups for batch in group]
    assert all(a.input_ids.equal(b.input_ids) for a, b in zip(flat, batches, strict=True))
