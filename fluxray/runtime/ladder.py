"""The ladder of `train.on_oom`: a run whose device has not the memory goes on with what takes less, and learns the same.

A rung is a number. 0 is the configuration as it was given; each further one trains the same global batches in the same order,
first cut into smaller micro-batches, then with activations computed again, then with their inputs on the host, then with the
blocks there too. All rungs follow from the configuration alone, so every rank finds the same ones, and there are few: each
halving, one of each other kind.

A new attempt begins at the last committed checkpoint, which every rung can read: a step is either whole or has not been. On which
rung a run stands is said by `ladder.json` in its folder and, where that is lost, by `RunState.rung` of its newest checkpoint.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fluxray.checkpoint import CheckpointReader
from fluxray.config.checks import check_available
from fluxray.config.keys import nested
from fluxray.config.load import build, merge
from fluxray.config.schema import BatchConfig, StreamEngineConfig, TrainConfig
from fluxray.errors import ConfigError, DamagedCheckpointError, OutOfMemory, PlanError
from fluxray.memory.estimate import CONTEXT_BYTES
from fluxray.runtime.figures import is_complete
from fluxray.runtime.outcome import FailedError
from fluxray.runtime.paths import committed_checkpoints, write_text
from fluxray.runtime.prepare import BATCH_KEYS, again
from fluxray.runtime.sharing import budget

FILE = "ladder.json"

FRESH_KEYS = (*BATCH_KEYS, "resources.num_workers", "resources.gpu", "hardware.device_memory")
"""Who changes one of these at a resume has made room, or the cut, by hand: such a run begins on the first rung again."""

SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""What libraries beside torch's own allocator say when they are refused memory."""


MORE = "give it more memory (resources.num_workers, a larger card)"


class Record(NamedTuple):
    """What `ladder.json` holds: the rung on which the run stands, and what the user was told of each descent."""

    rung: int
    told: Sequence[str]


class Rung(NamedTuple):
    """One rung: its configuration, and what that changes of the given one."""

    number: int
    config: TrainConfig
    changes: Mapping[str, Any]

    @property
    def words(self) -> str:
        """The changes as words of the command line."""
        return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.changes.items())


def _fixed(config: TrainConfig) -> Mapping[str, Any] | None:
    """Let memory no longer govern the cut: it has just been wrong about it."""
    keys = ("dynamic", "min_micro_size", "max_micro_size")
    return {f"batch.{key}": BatchConfig.model_fields[key].default for key in keys} if config.batch.dynamic else None


def _ungraphed(config: TrainConfig) -> Mapping[str, Any] | None:
    """Drop the graphs, which hold the memory of every shape."""
    return {"cuda_graph": False} if config.cuda_graph else None


def _finer(config: TrainConfig) -> Mapping[str, Any] | None:
    """Cut micro-batches in two, or by the smallest number that divides them."""
    size, steps = config.batch.micro_size, config.batch.accumulation_steps
    factor = next((factor for factor in range(2, size + 1) if size % factor == 0), None)
    return None if factor is None else {"batch.micro_size": size // factor, "batch.accumulation_steps": steps * factor}


def _recomputed(config: TrainConfig) -> Mapping[str, Any] | None:
    """Compute every block again in backward."""
    if config.activation_checkpoint in ("full", "offload"):
        return None
    keys = ("activation_checkpoint_every", "activation_checkpoint_budget")
    return {"activation_checkpoint": "full", **{key: None for key in keys if getattr(config, key) is not None}}


def _offloaded(config: TrainConfig) -> Mapping[str, Any] | None:
    """Let the inputs of the blocks, too, wait on the host."""
    wants = config.activation_checkpoint != "offload" and config.resources.gpu > 0
    return {"activation_checkpoint": "offload"} if wants else None


def _streamed(config: TrainConfig) -> Mapping[str, Any] | None:
    """Keep the blocks on the host; where every figure of the hardware is given, only if they fit there."""
    if config.engine.kind == "stream" or config.resources.num_workers > 1:
        return None
    changes = {**(_recomputed(config) or {}), "engine.kind": "stream"}
    if config.optim.in_backward:  # as that engine does by itself
        changes["optim.in_backward"] = False
    if config.optim.kind == "paged_adam8bit":  # the same moments, which live on the host anyway
        changes["optim.kind"] = "adam8bit"
    streamed = _changed(config, changes)
    from fluxray.runtime.planning import plan_run  # seconds of imports, for this rung alone

    return None if is_complete(streamed) and plan_run(streamed).shortfalls else changes


def _unkept(config: TrainConfig) -> Mapping[str, Any] | None:
    """Compute again those blocks of a streamed run, too, whose activations the plan would keep."""
    return {"engine.kept_blocks": 0} if isinstance(config.engine, StreamEngineConfig) and config.engine.kept_blocks != 0 else None


KINDS: Sequence[Callable[[TrainConfig], Mapping[str, Any] | None]] = (
    _fixed,
    _ungraphed,
    _finer,
    _recomputed,
    _offloaded,
    _streamed,
    _unkept,
)
"""What is tried, the first that applies: what it changes of a configuration, or None where it changes nothing."""


def rungs(config: TrainConfig) -> Iterator[Rung]:
    """Yield the rungs of a configuration, itself first. What a rung asks for that the rest of it refuses is passed over."""
    rung = Rung(0, config, {})
    yield rung
    for kind in KINDS:
        while (changes := _honoured(rung.config, kind)) is not None:
            rung = Rung(rung.number + 1, _changed(rung.config, changes), {**rung.changes, **changes})
            yield rung


def at_rung(config: TrainConfig, number: int) -> Rung:
    """Return a rung of a configuration; the last where there are not so many."""
    return list(islice(rungs(config), number + 1))[-1]


def saved_rung(checkpoints: Sequence[Path]) -> int:
    """Return the rung of the newest checkpoint (they come newest first) that can be opened; 0 if there is none."""
    for directory in checkpoints:
        try:
            return CheckpointReader(directory).state.rung
        except DamagedCheckpointError:
            continue
    return 0


def begin(config: TrainConfig, run_dir: Path, resumed: Mapping[str, Any] | None) -> Rung:
    """Return the rung on which a start begins, and put it down; `resumed` holds the keys that it changes, None for a new run."""
    record = None if resumed is None else _read(run_dir)
    if resumed is None or any(key in FRESH_KEYS for key in resumed):
        number = 0
    else:
        number = record.rung if record is not None else saved_rung(committed_checkpoints(run_dir))
    rung = at_rung(config, number)
    _write(run_dir, rung.number, record.told if record is not None else [])
    return rung


class Descent(NamedTuple):
    """The next rung, one line for the user, and how often this run has gone down so far."""

    rung: Rung
    told: str
    count: int


def step_down(config: TrainConfig, run_dir: Path, number: int, where: str) -> Descent | None:
    """Go down from rung `number`, where memory did not suffice, and put that down; `where` is an OutOfMemory's message.

    Returns None if another rank has done so already. Raises FailedError with one line if `train.on_oom` is stop or no rung is
    left.
    """
    record = _read(run_dir) or Record(number, [])
    if record.rung > number:
        return None
    found = list(islice(rungs(config), number + 2))
    if config.train.on_oom == "stop":
        hint = f"train.on_oom=ladder would go on with {found[-1].words}; " if len(found) == number + 2 else ""
        raise FailedError(f"run {run_dir.name}: out of memory {where}; {hint}{again(run_dir)}")
    if len(found) < number + 2:
        raise _exhausted(run_dir, found[-1], where)
    newest = next(iter(committed_checkpoints(run_dir)), None)
    start = "the beginning" if newest is None else f"step {int(newest.name.rpartition('_')[2])}"
    told = f"out of memory {where}: goes on from {start} with {found[-1].words}"
    _write(run_dir, number + 1, [*record.told, told])
    return Descent(found[-1], told, len(record.told) + 1)


def refused(config: TrainConfig, run_dir: Path, number: int, error: PlanError) -> Exception:
    """Return how a run ends whose rung `number` is refused by its plan: `error` itself, unless that rung alone streams.

    Then the run stands on the rung before again.
    """
    rung, record = at_rung(config, number), _read(run_dir)
    if "engine.kind" not in rung.changes or record is None or not record.told:
        return error
    _write(run_dir, number - 1, record.told)
    return FailedError(f"run {run_dir.name}: {record.told[-1]}, which does not fit ({error}); {MORE}; {again(run_dir)}")


@contextmanager
def explained(config: TrainConfig, rank: int) -> Iterator[None]:
    """Raise OutOfMemory, which says what was being done and how much was taken, for whatever reports a lack of memory inside."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in SIGNS):
            raise
        doing = next(iter(getattr(error, "__notes__", ())), "before the first step")
        raise OutOfMemory(f"{doing} (rank {rank}{_taken(config)})") from error


def _honoured(config: TrainConfig, kind: Callable[[TrainConfig], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    try:
        changes = kind(config)
        if changes is not None:
            check_available(_changed(config, changes))
    except ConfigError:
        return None
    return changes


def _changed(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    tree = config.model_dump()
    for key, value in changes.items():
        tree = merge(tree, nested(key, value))
    return build(tree)


def _exhausted(run_dir: Path, last: Rung, where: str) -> FailedError:
    tried = f"with {last.words}, the last of {last.number} rungs" if last.number else "and nothing is left that would take less"
    return FailedError(f"run {run_dir.name}: out of memory {where}, {tried}; {MORE}; {again(run_dir)}")


def _taken(config: TrainConfig) -> str:
    """Return what the process has of its share of the card, CUDA context included; nothing on a CPU."""
    if config.resources.gpu == 0 or not torch.cuda.is_initialized():
        return ""
    total = torch.cuda.mem_get_info()[1]
    limit = budget(config.resources.gpu, config.hardware.device_memory, total)
    return f", {(torch.cuda.memory_reserved() + CONTEXT_BYTES) / 1e9:.1f} of {limit / 1e9:.1f} GB"


def _write(run_dir: Path, rung: int, told: Sequence[str]) -> None:
    write_text(run_dir / FILE, json.dumps({"rung": rung, "told": told}))


def _read(run_dir: Path) -> Record | None:
    try:
        record = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        return Record(int(record["rung"]), [str(line) for line in record["told"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None
