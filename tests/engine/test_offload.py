"""Inputs of blocks that wait on the host: copies that come late change no bit, memory is given back and used again."""

from dataclasses import replace

import pytest
import torch

from fluxray.engine import offload as offload_module
from fluxray.engine.clip import Clip
from fluxray.engine.offload import HostPool, Offload, Parcel
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.optim.build import build_sharded
from fluxray.tasks.lm import LmTask
from tests.engine.helpers import OPTIM, EngineCase, build_stack, cut, expect_equal, model_config, sharded_engine, train
from tests.engine.stream_helpers import CPU, LateTransfers

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 4
OFFLOADED = EngineCase(
    model_config("gpt_neox", num_hidden_layers=LAYERS, hidden_dropout=0.2), Techniques("fp32", activation_checkpoint="offload")
)


def late_engine(transfers: LateTransfers) -> ShardedEngine:
    stack = build_stack(OFFLOADED)
    masters = parallelize(stack, OFFLOADED.techniques, CPU, None, transfers)
    clip, runtime = Clip("exact", OFFLOADED.max_norm, CPU), Runtime(CPU, "fp32", None)
    return ShardedEngine(stack, LmTask(0).loss_fn, masters, build_sharded(masters.named, OPTIM), clip, runtime)


def test_late_copies_change_no_bit() -> None:
    transfers = LateTransfers(fetch_s=0.005, write_s=0.005)
    expected = train(sharded_engine(replace(OFFLOADED, techniques=Techniques("fp32"))), num_steps=3)
    expect_equal(train(late_engine(transfers), num_steps=3), expected)
    each = 3 * 2 * (LAYERS - 1)  # steps, micro-batches, blocks but the last
    assert transfers.num_copies == {"fetch": each, "write": each}


def test_places_on_the_host_are_used_again_and_device_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[HostPool] = []
    left: list[int] = []

    class Watched(HostPool):
        def __init__(self, page_locked: bool):
            super().__init__(page_locked)
            pools.append(self)

    def leave(parcel: Parcel) -> None:
        intact(parcel)
        left.append(sum(item.storage.nbytes() for item in parcel.items))

    intact = Parcel.leave
    monkeypatch.setattr(offload_module, "HostPool", Watched)
    monkeypatch.setattr(Parcel, "leave", leave)
    engine = sharded_engine(OFFLOADED)
    taken = []
    for step in range(3):
        engine.train_step(cut(2, step), OPTIM.lr)
        taken.append(pools[0].num_bytes)
    assert left == [0] * (3 * 2 * (LAYERS - 1))
    carry = 4 * cut(2, 0)[0].num_tokens * 32
    assert taken == [(LAYERS - 1) * carry] * 3


def test_an_input_comes_back_while_the_block_behind_it_is_differentiated() -> None:
    order: list[str] = []

    class Noted(LateTransfers):
        def fetch(self, device, host, after):
            order.append("fetch")
            return super().fetch(device, host, after)

        def wait(self, event):
            if event is not None and event.slot is not None:
                order.append("wait")
            super().wait(event)

    late_engine(Noted()).train_step(cut(1, 0), OPTIM.lr)
    backward = order[order.index("fetch") :]
    assert backward == ["fetch", "wait", "fetch", "wait", "fetch", "wait"]
    assert order[: len(order) - len(backward)] == ["wait"] * (LAYERS - 1)


def test_aliases_are_whole_again_and_what_shares_memory_is_sent_once() -> None:
    tensor = torch.arange(6.0)
    alias, other = tensor.view(2, 3), torch.ones(2)
    parcel = Offload(LateTransfers(), CPU).send([tensor, alias, other])
    assert len(parcel.items) == 2
    parcel.leave()
    assert tensor.untyped_storage().nbytes() == 0
    parcel.fetch()
    parcel.arrive()
    assert torch.equal(alias, torch.arange(6.0).view(2, 3)) and torch.equal(other, torch.ones(2))


def test_a_place_is_taken_again_where_it_is_large_enough() -> None:
    pool = HostPool(page_locked=False)
    large, small = pool.take(100), pool.take(10)
    pool.give(large)
    pool.give(small)
    assert pool.take(10) is small and pool.take(10) is large
    assert pool.take(1) not in (small, large) and pool.num_bytes == 111
