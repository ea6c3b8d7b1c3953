"""Pictures on two ranks: equal forwards, equal averages, and a rank that fails takes the other along. One group of processes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh

from fluxray.config.sampling import EmaConfig
from fluxray.engine.average import Averages
from fluxray.engine.clip import Clip
from fluxray.engine.parallelize import Techniques, parallelize
from fluxray.engine.sharded import Runtime, ShardedEngine
from fluxray.optim.build import build_sharded
from fluxray.protocols import FlowBatch, LossOutput
from fluxray.ranks import Ranks
from fluxray.runtime.pictures import Pictures, Sampling
from fluxray.tasks import sampling as parts
from fluxray.tasks.flow import squared_error
from tests.engine.helpers import OPTIM
from tests.flow_pictures import tiny_encoders
from tests.models.flux_helpers import draw_for
from tests.runtime.forked import fork
from tests.sampling_helpers import RECIPE, Scene, scene

CPU = torch.device("cpu")
WORLD = 2
FAULTS = ("none", "rank 1 has no pipeline", "rank 0 cannot decode", "rank 1 fails between forwards")
AVERAGE = EmaConfig(decay=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, sample with every fault, and train on, on two ranks and on one."""
    folder = tmp_path_factory.mktemp("ranks")
    found = scene("flux1 dev", tiny_encoders("flux1", folder / "pipeline"))
    ranks = [fork(_rank_main, rank, str(folder), found, preload=[__name__]) for rank in range(WORLD)]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * WORLD
    return folder


def test_ranks_stay_in_step_whatever_fails(folder: Path) -> None:
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    for fault in FAULTS:
        assert told[0][fault]["forwards"] == told[1][fault]["forwards"], fault
        drawn = (folder / f"samples/step_{FAULTS.index(fault):08d}.png").exists()
        assert drawn == (fault == "none") == (told[0][fault]["published"] == 1)
        assert len(told[0][fault]["notices"]) == (0 if fault == "none" else 1)
    assert told[0]["none"]["forwards"] == RECIPE.steps
    assert "another rank has failed" in told[0]["rank 1 has no pipeline"]["notices"][0]
    assert told[0]["weights"] == told[1]["weights"] == pytest.approx(told[0]["undisturbed"], abs=0)


def test_pictures_of_two_ranks_are_those_of_one(folder: Path) -> None:
    found = scene("flux1 dev", tiny_encoders("flux1", folder / "again"))
    engine = _engine(found, None)
    _train(found, engine, 0)
    alone = folder / "alone" / folder.name  # the name is on the grid
    _pictures(found, engine, alone, Ranks(), [], []).at(0)
    one, other = (np.array(Image.open(place / "samples/step_00000000.png"), dtype=int) for place in (folder, alone))
    assert np.abs(one - other).max() <= 2


def _rank_main(rank: int, folder: str, found: Scene) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    ranks, told = Ranks.of_group(group), dict[str, Any]()
    engine, undisturbed = (_engine(found, DeviceMesh("cpu", torch.arange(WORLD))) for _ in range(2))
    for each in (engine, undisturbed):
        _train(found, each, 0)
    for step, fault in enumerate(FAULTS):
        notices, published, calls = list[str](), list[str](), list[int]()
        pictures = _pictures(found, engine, Path(folder), ranks, notices, published)
        with pytest.MonkeyPatch.context() as patch:
            _break(patch, fault, rank, calls)
            pictures.at(step)
        told[fault] = {"forwards": len(calls), "notices": notices, "published": len(published)}
    for each in (engine, undisturbed):
        _train(found, each, 1)
    told |= {"weights": _sums(engine), "undisturbed": _sums(undisturbed)}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _break(patch: pytest.MonkeyPatch, fault: str, rank: int, calls: list[int]) -> None:
    forward, pipeline = ShardedEngine.forwards, parts._pipeline

    def counted(self: ShardedEngine, batches: Any) -> Any:
        calls.append(0)
        return forward(self, batches)

    def failing(*_: object, **__: object) -> None:
        raise OSError(fault)

    def no_decoder(*args: Any) -> Any:
        made = pipeline(*args)
        made.vae.decode = failing
        return made

    def breaks_down(*args: Any) -> Any:
        made = pipeline(*args)
        step = made.scheduler.step

        def second(*given: Any, **keys: Any) -> Any:
            return failing() if len(calls) == 2 else step(*given, **keys)

        made.scheduler.step = second
        return made

    patch.setattr(ShardedEngine, "forwards", counted)
    own: dict[tuple[str, int], Any] = {(FAULTS[1], 1): failing, (FAULTS[2], 0): no_decoder, (FAULTS[3], 1): breaks_down}
    patch.setattr(parts, "_pipeline", own.get((fault, rank), pipeline))


def _engine(found: Scene, mesh: DeviceMesh | None) -> ShardedEngine:
    stack = found.stack()
    masters = parallelize(stack, Techniques("fp32"), CPU, mesh)
    optimizer = build_sharded(masters.named, OPTIM)
    averages = Averages(masters, AVERAGE)
    return ShardedEngine(stack, _loss, masters, optimizer, Clip("exact", 1.0, CPU), Runtime(CPU, "fp32", mesh), averages=averages)


def _loss(output: torch.Tensor, batch: FlowBatch) -> LossOutput:
    return LossOutput(squared_error(output, batch.target, batch.weight), batch.num_valid)


def _train(found: Scene, engine: ShardedEngine, step: int) -> None:
    """Take a step of the same two samples, shared out or not."""
    rank, num_ranks = (dist.get_rank(), WORLD) if dist.is_initialized() else (0, 1)
    whole = draw_for(found.model, step=step)
    engine.train_step([list(whole.split(2 // num_ranks))[rank]], 1e-3)


def _pictures(
    found: Scene, engine: ShardedEngine, folder: Path, ranks: Ranks, notices: list[str], published: list[str]
) -> Pictures:
    sampling = Sampling(found.prompts, RECIPE, found.folder, found.keys, None, averaged=True, rows=8)
    return Pictures(sampling, engine, CPU, ranks, folder, notices.append, published.append)


def _sums(engine: ShardedEngine) -> list[float]:
    """Return a sum of each piece of state, over all ranks."""
    sums = [item.tensor.double().abs().sum() for item in engine.state_items() if item.section in ("weights", "ema")]
    total = torch.stack(sums)
    dist.all_reduce(total)
    return total.tolist()
