"""Sharded equals single: 1, 2 and 8 ranks, their checkpoints read by other numbers of ranks. One spawned group has all ranks."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from fluxray import checkpoint
from fluxray.config.schema import ModelConfig
from fluxray.engine.parallelize import Techniques
from fluxray.engine.scaler import INITIAL_SCALE
from fluxray.errors import ConfigError
from fluxray.models.causal_lm import library_config
from fluxray.protocols import IGNORE_INDEX, RunState, Schedule, TextBatch
from fluxray.ranks import Ranks
from tests.engine import flux_cases, lora_cases
from tests.engine.helpers import (
    EIGHT_BIT,
    OPTIM,
    EngineCase,
    Trace,
    broken,
    build_stack,
    cut,
    expect_close,
    expect_close_values,
    make_batch,
    model_config,
    sharded_engine,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WORLD = 8
PUBLISHED = "published weights"
ONE_BROKEN = "one broken rank"
ONE_OVERFLOWS = "the gradient of one rank overflows"
IN_BACKWARD = OPTIM.model_copy(update={"in_backward": True})
UNEVEN = "2 ranks, one without rows in the last round"
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1 rank, 4 micro-batches": (1, 4, {}),
    "2 ranks, 1 micro-batch": (2, 1, {}),
    "2 ranks, 2 micro-batches": (2, 2, {}),
    "2 ranks, 4 micro-batches": (2, 4, {}),
    "8 ranks, 1 micro-batch": (8, 1, {}),
    "2 ranks, checkpointing": (2, 2, {"techniques": Techniques("fp32", activation_checkpoint="full")}),
    "2 ranks, segments checkpointed": (2, 2, {"techniques": Techniques("fp32", activation_checkpoint="sqrt")}),
    "2 ranks, inputs on the host": (2, 2, {"techniques": Techniques("fp32", activation_checkpoint="offload")}),
    "2 ranks, parameters kept after forward": (2, 2, {"techniques": Techniques("fp32", reshard_after_forward=False)}),
    "2 ranks, amp-bf16": (2, 2, {"techniques": Techniques("amp-bf16")}),
    "2 ranks, amp-fp16": (2, 2, {"techniques": Techniques("amp-fp16")}),
    "8 ranks, mixed-bf16": (8, 1, {"techniques": Techniques("mixed-bf16")}),
    "2 ranks, clipped": (2, 2, {"max_norm": 0.1}),
    "2 ranks, clipped by block": (2, 2, {"max_norm": 0.1, "clip": "block"}),
    "2 ranks, clipped by the norms before": (2, 2, {"max_norm": 0.1, "clip": "previous"}),
    "2 ranks, stepping in backward": (2, 1, {"max_norm": 0.1, "clip": "block", "optim": IN_BACKWARD}),
    "2 ranks, llama": (2, 2, {"model": model_config("llama")}),
    "2 ranks, qwen3 tied": (2, 2, {"model": model_config("qwen3 tied")}),
}
"""Ranks, micro-batches per rank, and what differs from the plain case."""

WIDE = model_config("gpt_neox", hidden_size=256, num_hidden_layers=1, intermediate_size=256)
EIGHT_BIT_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 ranks, 8-bit moments": (2, 2, {"model": WIDE, "optim": EIGHT_BIT}),
    "8 ranks, 8-bit moments": (8, 1, {"model": WIDE, "optim": EIGHT_BIT}),
}

RESUMED = {"from 2 ranks to 1": (2, 1), "from 1 rank to 8": (1, 8), "from 8 ranks to 2": (8, 2)}
NEOX = EngineCase(model_config("gpt_neox"))
SPLIT_STEP, LAST_STEP = 2, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every case once, in one group of WORLD processes, and return where each left its losses and checkpoints."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_fork_ranks, (str(folder),), 1, start_method="spawn")
    return folder


def _fork_ranks(_: int, folder: str) -> None:
    """Fork the ranks from a process that has imported what they need and computed nothing: eight times the imports less."""
    torch.set_num_threads(1)
    for case in (NEOX, *(replace(NEOX, **differing) for _, _, differing in CASES.values() if "model" in differing)):
        build_stack(case)  # on the meta device; the libraries import a model's module when it is first built
    for adapted, _ in lora_cases.RANK_CASES.values():
        adapted.stack()
    mp.start_processes(_rank_main, (folder,), WORLD, start_method="fork")


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_splits_do_not_matter(folder: Path, name: str) -> None:
    _, _, differing = CASES[name]
    case = replace(NEOX, **{**differing, "optim": OPTIM})
    actual, expected = _trace(folder / name), train(sharded_engine(case))
    if case.techniques.precision == "fp32":
        unclipped = case.max_norm > 1
        expect_close(actual, expected, gradient=1e-6 if unclipped else 1e-5)
    else:  # partial sums are rounded to 16 bits at other places
        expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses), 1e-3, "losses")


@pytest.mark.parametrize("name", lora_cases.RANK_CASES)
def test_adapters_on_two_ranks_equal_those_on_one(folder: Path, name: str) -> None:
    (adapted, differing), directory = lora_cases.RANK_CASES[name], folder / f"lora {name}"
    engine = adapted.sharded(**differing)
    losses = [loss for loss, _ in adapted.train(engine, lora_cases.RANK_STEPS)]
    assert json.loads((directory / "losses.json").read_text()) == pytest.approx(losses, rel=1e-3 if differing else 1e-6)
    reader = checkpoint.CheckpointReader(checkpoint.committed(directory)[0])
    weights = {item.name: item.tensor.detach() for item in engine.state_items() if item.section == "weights"}
    assert set(reader.names()) == weights.keys()
    for parameter, value in weights.items():
        found = reader.read("weights", parameter)
        if differing:  # sums of 16 bits: where a gradient is about 0, its first step may go either way
            assert (found - value).norm() <= 0.1 * value.norm() + 1e-3, parameter
        else:
            expect_close_values(found, value, 1e-4, parameter)
    assert list(adapted.sharded(**differing).load_items(reader)) == []


@pytest.mark.parametrize("name", flux_cases.RANK_CASES)
def test_flux_on_any_number_of_ranks_equals_a_plain_loop(folder: Path, name: str) -> None:
    case = flux_cases.RANK_CASES[name][2]
    actual, expected = _trace(folder / name), flux_cases.plain_flow(case, flux_cases.RANK_STEPS)
    if case.max_norm < 1:  # moments are of clipped gradients
        actual.gradients = {key: moment * (expected.norms[0] / case.max_norm) for key, moment in actual.gradients.items()}
    expect_close(actual, expected, loss=2e-6, gradient=2e-6 if case.max_norm > 1 else 1e-5)


def test_a_rank_without_rows_in_a_round_does_not_matter(folder: Path) -> None:
    expect_close(_trace(folder / UNEVEN), train(sharded_engine(NEOX)))


def test_ranks_learn_the_highest_number_of_any(folder: Path) -> None:
    assert json.loads((folder / UNEVEN / "highest.json").read_text()) == [2.0**40 + 1] * 2


@pytest.mark.parametrize("name", EIGHT_BIT_CASES)
def test_8_bit_moments_do_not_depend_on_the_number_of_ranks(folder: Path, name: str) -> None:
    """Sums of gradients differ in their last bits, so a value in the middle between two codes may get the one or the other."""
    engine = sharded_engine(replace(NEOX, **EIGHT_BIT_CASES[name][2]))
    actual, expected = _trace(folder / name), train(engine, num_steps=1)
    first = checkpoint.CheckpointReader(folder / name / checkpoint.directory_name(1))
    codes = {(item.section, item.name): item.tensor for item in engine.state_items() if item.tensor.dtype == torch.uint8}
    assert codes
    for (section, parameter), tensor in codes.items():
        differing = (first.read(section, parameter).int() - tensor.int()).abs()
        assert differing.max() <= 1 and (differing > 0).float().mean() < 1e-3, f"{section} of {parameter}"
    rest = train(engine, num_steps=LAST_STEP - 1, start=1)
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses + rest.losses), 1e-5, "losses")
    expect_close_values(torch.tensor(actual.norms), torch.tensor(expected.norms + rest.norms), 1e-5, "norms")
    for parameter, weight in rest.weights.items():
        expect_close_values(actual.weights[parameter], weight, 5e-3, parameter)


@pytest.mark.parametrize("name", EIGHT_BIT_CASES)
def test_8_bit_moments_are_loaded_on_another_number_of_ranks_bit_for_bit(folder: Path, name: str) -> None:
    reader = checkpoint.CheckpointReader(checkpoint.committed(folder / name)[0])
    engine = sharded_engine(replace(NEOX, **EIGHT_BIT_CASES[name][2]))
    assert list(engine.load_items(reader)) == []
    assert all(torch.equal(item.tensor, reader.read(item.section, item.name)) for item in engine.state_items())


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_resumes_on_another_number_of_ranks(folder: Path, name: str) -> None:
    actual, expected = _trace(folder / name), train(sharded_engine(NEOX))
    expect_close_values(torch.tensor(actual.losses), torch.tensor(expected.losses[SPLIT_STEP:]), 1e-6, "losses")
    for parameter, weight in expected.weights.items():
        expect_close_values(actual.weights[parameter], weight, 1e-4, parameter)


def test_each_rank_holds_its_share_of_weights_and_moments(folder: Path) -> None:
    sizes = json.loads((folder / "8 ranks, 1 micro-batch" / "bytes.json").read_text())
    total = 3 * 4 * sum(p.numel() for p in train(sharded_engine(NEOX), num_steps=1).weights.values())
    assert sum(sizes) == total
    assert max(sizes) <= total / WORLD * 1.1


def _trace(directory: Path) -> Trace:
    """Read what a case left behind; the first moments after one step give the gradients."""
    record = json.loads((directory / "trace.json").read_text())
    last = checkpoint.CheckpointReader(checkpoint.committed(directory)[0])
    trace = Trace(record["losses"], record["norms"], {}, {name: last.read("weights", name) for name in last.names()})
    first = directory / checkpoint.directory_name(1)
    if first.is_dir():
        reader = checkpoint.CheckpointReader(first)
        trace.gradients = {name: reader.read("exp_avg", name) / (1 - OPTIM.beta1) for name in reader.names()}
    return trace


def test_published_weights_reach_every_rank(folder: Path) -> None:
    reader = checkpoint.CheckpointReader(folder / PUBLISHED / "run" / checkpoint.directory_name(0))
    published = AutoModelForCausalLM.from_pretrained(folder / PUBLISHED / "model", dtype=torch.float32).state_dict()
    assert set(reader.names()) <= set(published)
    assert all(torch.equal(reader.read("weights", name), published[name]) for name in reader.names())


def test_a_fault_of_rank_0_in_reading_weights_is_raised_on_every_rank(folder: Path) -> None:
    faults = json.loads((folder / PUBLISHED / "faults.json").read_text())
    assert faults == [faults[0]] * WORLD
    assert faults[0].startswith("model.weights:") and "broken" in faults[0]


def test_a_loss_that_is_not_finite_on_one_rank_is_withheld_on_every_rank(folder: Path) -> None:
    assert json.loads((folder / ONE_BROKEN / "outcome.json").read_text()) == [[1.0, True]] * 2


def test_a_gradient_that_overflows_on_one_rank_halves_the_scale_on_every_rank(folder: Path) -> None:
    outcome = json.loads((folder / ONE_OVERFLOWS / "outcome.json").read_text())
    assert outcome == [[1.0, INITIAL_SCALE, INITIAL_SCALE / 2, True]] * 2


def _overflow_one(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    """Train a step in fp16 whose gradient overflows on the last rank alone, and one more.

    Write each rank's `withheld`, the scales of both steps, and whether the first one left the weights as they were.
    """
    engine = sharded_engine(replace(NEOX, techniques=Techniques("amp-fp16")), mesh)
    before = {item.name: item.tensor.clone() for item in engine.state_items() if item.section == "weights"}
    with broken(engine, "gradient") if rank == mesh.size() - 1 else nullcontext():
        first = engine.train_step(cut(1, 0, rank, mesh.size()), OPTIM.lr)
    weights = {item.name: item.tensor for item in engine.state_items() if item.section == "weights"}
    same = all(torch.equal(weights[name], old) for name, old in before.items())
    second = engine.train_step(cut(1, 1, rank, mesh.size()), OPTIM.lr)
    assert first.loss_scale is not None and second.loss_scale is not None
    outcome: list[Any] = [None] * mesh.size()
    found = (first.withheld.item(), first.loss_scale.item(), second.loss_scale.item(), same)
    dist.all_gather_object(outcome, found, mesh.get_group())
    if rank == 0:
        folder.mkdir()
        (folder / "outcome.json").write_text(json.dumps(outcome))


def _break_one(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    """Train a step whose loss is no number on the last rank alone; write each rank's `withheld`, and whether nothing changed."""
    engine = sharded_engine(NEOX, mesh)
    engine.train_step(cut(1, 0, rank, mesh.size()), OPTIM.lr)
    before = [item.tensor.clone() for item in engine.state_items()]
    intact = engine._loss_fn
    factor = torch.nan if rank == mesh.size() - 1 else 1.0
    engine._loss_fn = lambda output, batch: intact(output * factor, batch)
    output = engine.train_step(cut(1, 1, rank, mesh.size()), OPTIM.lr)
    same = all(torch.equal(item.tensor, old) for item, old in zip(engine.state_items(), before, strict=True))
    outcome: list[Any] = [None] * mesh.size()
    dist.all_gather_object(outcome, (output.withheld.item(), same), mesh.get_group())
    if rank == 0:
        folder.mkdir()
        (folder / "outcome.json").write_text(json.dumps(outcome))


def _load_published(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    """Save a model on rank 0, build engines from its weights on all ranks, once more after damaging the file."""
    if rank == 0:
        model = AutoModelForCausalLM.from_config(library_config(NEOX.model))
        model.save_pretrained(folder / "model")
        shutil.copytree(folder / "model", folder / "broken")
        (file,) = (folder / "broken").glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:500])
    dist.barrier(mesh.get_group())
    engine = sharded_engine(replace(NEOX, model=ModelConfig(weights=f"path:{folder / 'model'}")), mesh)
    state = RunState(0, Schedule("constant", OPTIM.lr, 0, LAST_STEP, 0.0))
    checkpoint.save(folder / "run", state, engine.state_items(), Ranks.of_group(mesh.get_group()))
    with pytest.raises(ConfigError) as raised:
        sharded_engine(replace(NEOX, model=ModelConfig(weights=f"path:{folder / 'broken'}")), mesh)
    faults: list[str] = [""] * mesh.size()
    dist.all_gather_object(faults, str(raised.value), mesh.get_group())
    if rank == 0:
        (folder / "faults.json").write_text(json.dumps(faults))


def _rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    meshes = {n: DeviceMesh("cpu", torch.arange(n)) for n in (1, 2, 4, WORLD)}
    for name, (num_ranks, num_micro_batches, differing) in {**CASES, **EIGHT_BIT_CASES}.items():
        if rank < num_ranks:
            _run(Path(folder, name), replace(NEOX, **differing), meshes[num_ranks], num_micro_batches, (0, LAST_STEP))
    for name, (num_ranks, _, _) in flux_cases.RANK_CASES.items():
        if rank < num_ranks:
            flux_cases.run_on_ranks(Path(folder, name), name, meshes[num_ranks], rank)
    for name in lora_cases.RANK_CASES if rank < 2 else ():
        lora_cases.run_on_ranks(Path(folder, f"lora {name}"), name, meshes[2], rank)
    for name, (before, after) in RESUMED.items():
        for num_ranks, steps in ((before, (0, SPLIT_STEP)), (after, (SPLIT_STEP, LAST_STEP))):
            if rank < num_ranks:
                _run(Path(folder, name), NEOX, meshes[num_ranks], 1, steps)
            dist.barrier()
    if rank < 2:
        _run(Path(folder, UNEVEN), NEOX, meshes[2], 2, (0, LAST_STEP), cut_unevenly)
        _agree(Path(folder, UNEVEN), meshes[2], rank)
        _break_one(Path(folder, ONE_BROKEN), meshes[2], rank)
        _overflow_one(Path(folder, ONE_OVERFLOWS), meshes[2], rank)
    _load_published(Path(folder, PUBLISHED), meshes[WORLD], rank)
    dist.destroy_process_group()


def cut_unevenly(num_micro_batches: int, step: int, rank: int, num_ranks: int) -> list[TextBatch]:
    """Return rank 0's or rank 1's micro-batches of all rows in two rounds; in the second, rank 0 has a zero-weight row."""
    if rank == 1:
        return [make_batch(range(4, 7), step), make_batch([7], step)]
    weightless = make_batch([0], step)
    targets = torch.full_like(weightless.targets, IGNORE_INDEX)
    return [make_batch(range(4), step), replace(weightless, targets=targets, num_valid=0)]


def _agree(folder: Path, mesh: DeviceMesh, rank: int) -> None:
    """Write what both ranks find to be the highest number."""
    found: list[float] = [0.0] * mesh.size()
    dist.all_gather_object(found, Ranks.of_group(mesh.get_group()).highest(2**40 + rank), mesh.get_group())
    if rank == 0:
        (folder / "highest.json").write_text(json.dumps(found))


def _run(
    directory: Path,
    case: EngineCase,
    mesh: DeviceMesh,
    num_micro_batches: int,
    steps: tuple[int, int],
    cutting: Callable[[int, int, int, int], list[TextBatch]] = cut,
) -> None:
    """Train from step to step on one mesh, resuming if a checkpoint stands there, and save after the first and the last."""
    rank, num_ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    engine = sharded_engine(case, mesh)
    if steps[0] > 0:
        engine.load_items(checkpoint.CheckpointReader(directory / checkpoint.directory_name(steps[0])))
    losses, norms = [], []
    for step in range(*steps):
        output = engine.train_step(cutting(num_micro_batches, step, rank, num_ranks), OPTIM.lr)
        losses.append(output.loss.item())
        norms.append(output.grad_norm.item())
        if step + 1 in (1, steps[1]):
            state = RunState(0, Schedule("constant", OPTIM.lr, 0, LAST_STEP, 0.0), step=step + 1)
            checkpoint.save(directory, state, engine.state_items(), Ranks.of_group(group))
    items = [item for item in engine.state_items() if item.section != "step"]
    sizes: list[int] = [0] * num_ranks
    dist.all_gather_object(sizes, sum(item.tensor.numel() * 4 for item in items), group)
    if rank == 0:
        (directory / "trace.json").write_text(json.dumps({"losses": losses, "norms": norms}))
        (directory / "bytes.json").write_text(json.dumps(sizes))
