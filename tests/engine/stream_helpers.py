"""The stream engine on tiny models, comparison of states, and lanes that copy late."""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fluxray.engine.clip import Clip, ClipMode
from fluxray.engine.parallelize import Techniques, parallelize, prepare_stream
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.engine.stream import StreamEngine
from fluxray.engine.stream_store import StreamSettings
from fluxray.engine.stream_transfers import Transfers
from fluxray.optim.build import build_sharded
from fluxray.optim.formats import dequantise, join
from fluxray.protocols import BlockStack, Engine
from fluxray.tasks.lm import LmTask
from tests.engine.helpers import EIGHT_BIT, OPTIM, EngineCase, averages_of, build_stack, cut, model_config

Sections = dict[tuple[str, str], Tensor]
CPU = torch.device("cpu")
CLIP_MODES: tuple[ClipMode, ...] = ("exact", "previous", "block")
CLIPPED = 0.1
"""Max norm below every norm of these models."""

SMALL = model_config("gpt_neox", num_hidden_layers=4)
WIDE = model_config("gpt_neox", num_hidden_layers=2, hidden_size=256, intermediate_size=64)
"""Has 8-bit moments."""

FORMATS: dict[str, EngineCase] = {
    "fp32": EngineCase(SMALL),
    "fp32, 8-bit moments": EngineCase(WIDE, optim=EIGHT_BIT),
    "fp32 master": EngineCase(WIDE, Techniques("mixed-bf16"), optim=EIGHT_BIT),
    "split24": EngineCase(WIDE, Techniques("mixed-bf16"), optim=EIGHT_BIT.model_copy(update={"master": "split24"})),
    "stochastic": EngineCase(WIDE, Techniques("mixed-bf16"), optim=EIGHT_BIT.model_copy(update={"master": "stochastic"})),
}


def stream_engine(
    case: EngineCase, settings: StreamSettings | None = None, transfers: Transfers | None = None, kept_blocks: int = 0
) -> StreamEngine:
    """Return the stream engine of a case. It recomputes activations whatever the case says, but for what is kept of blocks."""
    return stream_of(build_stack(case), LmTask(0).loss_fn, case, settings, transfers, kept_blocks)


def stream_of(
    stack: BlockStack,
    loss_fn: Any,
    case: EngineCase,
    settings: StreamSettings | None = None,
    transfers: Transfers | None = None,
    kept_blocks: int = 0,
) -> StreamEngine:
    """Return the stream engine on a stack; model of `case` is of no matter."""
    prepare_stream(stack, case.techniques.compile, kept_blocks, case.techniques.kept_operations)
    clip = Clip(case.clip, case.max_norm, case.device)
    settings = settings or StreamSettings()
    precision = case.techniques.precision
    return StreamEngine(stack, loss_fn, case.optim, clip, settings, precision, case.device, transfers, case.ema)


def sharded_of(stack: BlockStack, loss_fn: Any, case: EngineCase) -> ShardedEngine:
    """Return the resident sharded engine on a stack; model of `case` is of no matter."""
    masters = parallelize(stack, case.techniques, case.device, None)
    clip, runtime = Clip(case.clip, case.max_norm, case.device), Runtime(case.device, case.techniques.precision, None)
    averages = averages_of(masters, case)
    return ShardedEngine(stack, loss_fn, masters, build_sharded(masters.named, case.optim), clip, runtime, averages=averages)


def freeze(stack: BlockStack, prefixes: Sequence[str]) -> None:
    """Freeze the parameters whose names begin so."""
    for name, parameter in stack.model.named_parameters():
        if name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)


def state_of(engine: Engine) -> Sections:
    """Return copies of everything that an engine would save, by section and name."""
    engine.flush()
    return {(item.section, item.name): item.tensor.detach().clone() for item in engine.state_items()}


def masters_of(state: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Return the fp32 master weights of a state."""
    return {
        name: join(weight, state.get(("correction", name))) for (section, name), weight in state.items() if section == "weights"
    }


def moments_of(state: Mapping[tuple[str, str], Tensor], moment: str) -> dict[str, Tensor]:
    """Return the fp32 values of `exp_avg` or `exp_avg_sq` of a state."""
    found = {}
    for (section, name), values in state.items():
        if section == moment:
            absmax = state.get((f"{moment}_absmax", name))
            flat = values if absmax is None else dequantise(values.flatten(1), absmax, moment == "exp_avg")
            found[name] = flat.view(values.shape)
    return found


def expect_same(actual: Sections, expected: Sections) -> None:
    """Assert that two states are equal bit for bit."""
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), f"{key} differs"


def run_steps(engine: Engine, num_steps: int = 3, start: int = 0, num_micro_batches: int = 2) -> list[tuple[float, ...]]:
    """Train on the text batches and return what each step put out."""
    outputs = [engine.train_step(cut(num_micro_batches, step), OPTIM.lr) for step in range(start, start + num_steps)]
    return [tuple(value.item() for value in output if value is not None) for output in outputs]


class Reached:
    """What a lane or the computation has reached.

    `follows` counts the uses of the device by the computation that come before, `slot` is the memory that a lane copies.
    """

    def __init__(self, future: "Future[None]", follows: int, slot: int | None):
        self.future, self.follows, self.slot = future, follows, slot


class LateTransfers:
    """Two threads that copy some time after they may, at most `fetch_s` and `write_s` seconds.

    From when a fetch begins until it ends its slot holds 0xFF bytes, which are no number in any dtype. The computation of a CPU
    never lags behind, so that a copy does not wait for it cannot show in a number: it raises an AssertionError.
    """

    def __init__(self, fetch_s: float = 0.001, write_s: float = 0.001, seed: int = 0):
        self._longest = {"fetch": fetch_s, "write": write_s}
        self._lanes = {name: ThreadPoolExecutor(1, name) for name in self._longest}
        self._behind = dict.fromkeys(self._longest, 0)
        self._random = random.Random(seed)
        self._clock = 0
        self._used: dict[int, int] = {}
        self.num_copies = dict.fromkeys(self._longest, 0)

    def fetch(self, device: Tensor, host: Tensor, after: Sequence[Reached | None]) -> Reached:
        """Queue a copy."""
        return self._queue("fetch", device, device, host, after)

    def write(self, host: Tensor, device: Tensor, after: Sequence[Reached | None]) -> Reached:
        """Queue a copy."""
        return self._queue("write", device, host, device, after)

    def mark(self) -> Reached:
        """Return an event that has happened."""
        self._clock += 1
        done: Future[None] = Future()
        done.set_result(None)
        return Reached(done, self._clock, None)

    def wait(self, event: Reached | None) -> None:
        """Wait, and take the slot of the copy as used from now on."""
        if event is not None:
            event.future.result(60)
            self._clock += 1
            if event.slot is not None:
                self._used[event.slot] = self._clock

    def synchronize(self) -> None:
        """Wait for both threads."""
        for lane in self._lanes.values():
            lane.submit(lambda: None).result(60)

    def read_waits(self) -> tuple[float, float]:
        """Nothing is measured."""
        return 0.0, 0.0

    def _queue(self, name: str, device: Tensor, target: Tensor, source: Tensor, after: Sequence[Reached | None]) -> Reached:
        events = [event for event in after if event is not None]
        follows = max([self._behind[name], *(event.follows for event in events)])
        slot = device.data_ptr()
        assert follows >= self._used.get(slot, 0), f"a {name} does not wait for the computation that uses its slot"
        self._behind[name] = follows
        self.num_copies[name] += 1
        late = self._random.random() * self._longest[name]
        futures = [event.future for event in events]
        return Reached(self._lanes[name].submit(_copy, target, source, futures, late, name == "fetch"), follows, slot)


def _copy(target: Tensor, source: Tensor, after: Sequence["Future[None]"], late_s: float, poison: bool) -> None:
    for future in after:
        future.result(60)
    if poison:
        target.fill_(0xFF)
    time.sleep(late_s)
    target.copy_(source)
