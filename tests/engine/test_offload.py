"""Inputs of blocks that wait on the host: copies that come late change no bit, memory is given back and used again."""

from dataclasses import replace

import pytest
import torch

from fluxray.engine import offload as offload_module
from fluxray.engine.clip import Clip, ClipMode
from fluxray.engine.offload import HostPool, Offload, Parcel
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.memory.live import Operations
from fluxray.memory.operations import Operation
from fluxray.optim.build import build_sharded
from fluxray.tasks.lm import LmTask
from tests.engine.helpers import OPTIM, EngineCase, build_stack, cut, expect_equal, model_config, sharded_engine, train
from tests.engine.stream_helpers import CLIPPED, CPU, LateTransfers, expect_same, run_steps, state_of, stream_engine

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


STREAMED = EngineCase(model_config("gpt_neox", num_hidden_layers=LAYERS, hidden_dropout=0.2), Techniques("mixed-bf16"))
AWAY = StreamSettings(offload_inputs=True)


@pytest.mark.parametrize("mode", ["exact", "previous"])
@pytest.mark.parametrize("kept_blocks", [0, 1])
def test_inputs_of_streamed_blocks_wait_on_the_host_and_no_bit_changes(mode: ClipMode, kept_blocks: int) -> None:
    case = replace(STREAMED, clip=mode, max_norm=CLIPPED)
    transfers = LateTransfers(fetch_s=0.003, write_s=0.003)
    away, plain = stream_engine(case, AWAY, transfers, kept_blocks), stream_engine(case)
    assert run_steps(away) == run_steps(plain)
    expect_same(state_of(away), state_of(plain))
    inputs = 3 * 2 * (LAYERS - 1)  # steps, micro-batches, blocks but the last
    assert transfers.num_copies["write"] >= inputs and transfers.num_copies["fetch"] >= inputs


def test_between_forward_and_backward_streamed_inputs_take_no_device_memory() -> None:
    engine = stream_engine(STREAMED, AWAY)
    found: list[list[int]] = []

    def look(phase: str, block: int, micro_batch: int) -> None:
        if phase == "backward" and block == LAYERS - 1 and micro_batch == 0:
            step = frames[-1]
            found.append([sum(i.storage.nbytes() for parcel in sent for i in parcel.items) for sent in step.sent])

    frames = []
    intact = engine._begin

    def begin(*args):
        frames.append(intact(*args))
        return frames[-1]

    engine._begin = begin
    for step in range(2):
        engine.watch(look)
        engine.train_step(cut(2, step), OPTIM.lr)
    both = 2 * 2 * cut(2, 0)[0].num_tokens * 32  # bf16, two micro-batches
    assert found == [[0, 0, both]] * 2  # the last of them is on its way back
    assert engine._offload is not None and engine._offload.pool.num_bytes == (LAYERS - 1) * both


def test_what_a_streamed_block_keeps_of_its_operations_is_not_computed_again() -> None:
    kept = ((Operation("product", 0), Operation("product", 2)),) * (LAYERS - 1)
    chosen = replace(STREAMED, techniques=replace(STREAMED.techniques, kept_operations=kept))
    outputs, products = [], []
    for case in (STREAMED, chosen):
        engine = stream_engine(case)
        outputs.append(run_steps(engine))
        with Operations() as operations:
            engine.train_step(cut(2, 3), OPTIM.lr)
        products.append(sum(flops > 0 for flops, _, _ in operations.found))
    assert outputs[0] == outputs[1]
    assert products[0] - products[1] == 2 * 2 * (LAYERS - 1)  # micro-batches, operations
