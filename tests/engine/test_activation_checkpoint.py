"""Every kind of activation checkpointing: no bit of the result changes, and what is computed and kept does, as said."""

import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from fluxray.engine.parallelize import Techniques
from fluxray.memory.checkpointing import segments
from fluxray.memory.live import LiveBytes
from fluxray.memory.operations import Operation
from tests.engine.helpers import OPTIM, EngineCase, cut, expect_close, expect_equal, model_config, sharded_engine, train

pytestmark = pytest.mark.usefixtures("process_group", "one_thread")

LAYERS = 6
SHAPE = {"num_hidden_layers": LAYERS}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
SOME = tuple((Operation("product", 0), Operation("attention", 0)) if i % 2 else (Operation("product", 3),) for i in range(LAYERS))
PRODUCTS_ALONE = ((Operation("product", 0),), *[(Operation("product", 2),)] * (LAYERS - 1))
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sqrt": {},
    "every_n": {"checkpoint_every": 2},
    "selective": {"kept_operations": SOME},
    "offload": {},
}
ENGINES = {
    "resident": sharded_engine,
    "fsdp": lambda case: sharded_engine(case, DeviceMesh("cpu", torch.arange(1))),
}
PRODUCTS = 4
"""Matrix products of one block's forward: qkv, its projection, up, down."""


def checkpointed(case: EngineCase, kind: str, **more: Any) -> EngineCase:
    given = {**KINDS.get(kind, {}), **more}
    return replace(case, techniques=replace(case.techniques, activation_checkpoint=kind, **given))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "mixed-bf16"])
def test_no_bit_changes(engine: str, kind: str, precision: str) -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE), Techniques(precision))
    build = ENGINES[engine]
    expect_equal(train(build(checkpointed(plain, kind)), num_steps=2), train(build(plain), num_steps=2))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_drawn_again_bit_for_bit(engine: str, kind: str) -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE, **DROPOUT), Techniques("amp-bf16"))
    build = ENGINES[engine]
    some = {"kept_operations": PRODUCTS_ALONE} if kind == "selective" else {}
    expect_equal(train(build(checkpointed(plain, kind, **some)), num_steps=2), train(build(plain), num_steps=2))


class Counted(TorchDispatchMode):
    """Counts matrix products and attentions while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.found["product" if name in ("mm", "addmm") else "attention" if "attention" in name else "other"] += 1
        return func(*args, **(kwargs or {}))


def counted(case: EngineCase) -> Counter[str]:
    """Count what one micro-batch's forward and backward runs."""
    engine = sharded_engine(case)
    with Counted() as count:
        engine.train_step(cut(1, 0), OPTIM.lr)
    return count.found


def test_what_is_computed_again() -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE))
    base = counted(plain)
    extra = {kind: counted(checkpointed(plain, kind)) for kind in KINDS}
    products = {kind: found["product"] - base["product"] for kind, found in extra.items()}
    # the last product of a block's forward is never needed again: recomputation ends before it
    assert products["full"] == products["offload"] == LAYERS * (PRODUCTS - 1)
    assert products["every_n"] == LAYERS // 2 * (PRODUCTS - 1)
    again = [block for segment in segments(LAYERS)[:-1] for block in segment]
    assert products["sqrt"] == len(again) * PRODUCTS - len(segments(LAYERS)[:-1])
    assert products["selective"] == LAYERS * (PRODUCTS - 1) - LAYERS // 2
    forward = {kind: found["attention"] - base["attention"] for kind, found in extra.items()}
    assert forward["full"] == LAYERS and forward["selective"] == LAYERS // 2


def held_after_forward(case: EngineCase) -> int:
    """Return the bytes that are alive between the forward and the backward of one micro-batch, besides the model."""
    engine = sharded_engine(case)
    stack = engine._stack
    stack.train()
    known = [*stack.parameters(), *stack.buffers()]
    batch = cut(1, 0)[0]
    with LiveBytes(known) as live:
        output = stack(batch, engine._loss_fn)
        held = live.now
        output.sum.backward()
    return held


def test_what_is_kept() -> None:
    plain = EngineCase(model_config("gpt_neox", **SHAPE))
    held = {kind: held_after_forward(checkpointed(plain, kind)) for kind in ("none", "full", "sqrt", "every_n")}
    carry = 4 * cut(1, 0)[0].num_tokens * 32
    of_block = (held["none"] - held["full"]) // LAYERS + carry
    assert held["none"] - held["every_n"] == pytest.approx(LAYERS // 2 * (of_block - carry), rel=0.02)
    num_again = len(segments(LAYERS)[:-1])
    size = len(segments(LAYERS)[-1])
    assert held["none"] - held["sqrt"] == pytest.approx((LAYERS - size) * of_block - num_again * carry, rel=0.02)
    one = checkpointed(plain, "selective", kept_operations=((Operation("product", 2),), *[()] * (LAYERS - 1)))
    assert held_after_forward(one) - held["full"] == 2 * carry  # the intermediate size is twice the hidden one


@pytest.mark.parametrize(
    ("num_blocks", "sizes"), [(1, [1]), (2, [2]), (3, [1, 2]), (6, [3, 3]), (9, [3, 3, 3]), (44, [2, *[7] * 6])]
)
def test_segments(num_blocks: int, sizes: list[int]) -> None:
    found = segments(num_blocks)
    assert [len(segment) for segment in found] == sizes
    assert [block for segment in found for block in segment] == list(range(num_blocks))


compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: CPU code cannot be compiled")


@compiles
def test_compiled_blocks_keep_what_was_chosen_and_compute_again_what_backward_needs() -> None:
    """Both in one process, since compiling takes seconds: `selective` keeps the first product in half of the blocks."""
    torch._dynamo.reset()  # what another test has compiled may serve more shapes, less well
    eager = EngineCase(model_config("gpt_neox", num_hidden_layers=4))
    compiled = checkpointed(replace(eager, techniques=Techniques("fp32", compile=True)), "full")
    kept = tuple((Operation("product", 0),) if i < 2 else () for i in range(4))
    chosen = checkpointed(compiled, "selective", kept_operations=kept)
    expected = train(sharded_engine(eager), num_steps=2)
    products: list[int] = []
    for case in (compiled, chosen):
        engine = sharded_engine(case)
        expect_close(train(engine, num_steps=2), expected)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.train_step(cut(2, 0), OPTIM.lr)
        products.append(sum(event.name == "aten::addmm" for event in profile.events()))
    # forward, and again qkv and up; eager recomputation would have done the projection behind attention too
    assert products == [2 * 4 * (PRODUCTS + 2), 2 * (4 * (PRODUCTS + 2) - 2)]


@compiles
def test_blocks_that_keep_the_same_share_compiled_code() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    many = EngineCase(model_config("gpt_neox", num_hidden_layers=12), Techniques("fp32", compile=True))
    kept = ((Operation("product", 0),),) * 12
    sharded_engine(checkpointed(many, "selective", kept_operations=kept)).train_step(cut(1, 0), OPTIM.lr)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # block and loss
