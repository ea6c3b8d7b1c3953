"""FLUX from configuration to export on a CPU, without Ray: real pictures, both engines, resumed to the bit, published weights."""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from fluxray import checkpoint
from fluxray.config.load import resolve
from fluxray.config.schema import TrainConfig
from fluxray.data.latent_shards import write_cache
from fluxray.errors import FluxrayError
from fluxray.export import export_run
from fluxray.protocols import Report
from fluxray.runtime import checkpoints, ladder, torchrun
from fluxray.runtime.prepare import prepare, save_config
from fluxray.runtime.worker import preflight, run_evaluation, run_worker
from tests.flow_pictures import pictures, tiny_encoders
from tests.runtime.forked import fork
from tests.runtime.test_worker import context, deterministic_metrics, run, saved_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

BRIEF = (
    "model.config.num_layers=1",
    "model.config.num_single_layers=2",
    "model.config.num_attention_heads=2",
    "batch.micro_size=2",
    "batch.accumulation_steps=2",
    "optim.warmup_steps=2",
    "train.num_steps=8",
    "train.log_every=1",
    "checkpoint.every_steps=3",
    "evaluation.max_rows=4",
    "hardware.tflops=1",
)
STREAM = ("engine.kind=stream", "activation_checkpoint=full")
WIDE = ("model.config.num_attention_heads=4", "model.config.num_single_layers=1")
NARROW = (*STREAM, *WIDE, "precision=mixed-bf16", "optim.kind=adam8bit", "optim.master=split24", "clip.mode=previous")
"""As a large card trains: hidden size 256, so that there are 8-bit moments."""
FAMILIES = ("flux1", "flux2")


@pytest.fixture(scope="module")
def folders(flux1_pictures: Path, flux2_pictures: Path) -> dict[str, Path]:
    return {"flux1": flux1_pictures, "flux2": flux2_pictures}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> dict[str, tuple[Path, list[Report]]]:
    """A run of each family that nothing has disturbed, as `fluxray train` leaves it."""
    home = tmp_path_factory.mktemp("home")
    found: dict[str, tuple[Path, list[Report]]] = {}
    for family in FAMILIES:
        prepared = prepare(configured(family, folders, f"storage={home}", f"name={family}"), family)
        save_config(prepared)
        reports, _ = run(prepared.config, prepared.run_dir, home)
        found[family] = prepared.run_dir, reports
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path], whole: Any) -> Path:
    """A pipeline of FLUX.1 around the trained transformer, whose VAE and text encoders have encoded the cache."""
    folder = tmp_path_factory.mktemp("published") / "pipeline"
    export_run(whole["flux1"][0], folder, notify=lambda _: None)
    shutil.copytree(folders["flux1"] / "pipeline", folder, dirs_exist_ok=True)
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def configured(family: str, folders: dict[str, Path], *words: str) -> TrainConfig:
    return resolve("cpu", f"{family}-tiny", [f"data.cache={folders[family] / 'cache'}", *BRIEF, *words])


def losses(reports: Sequence[Report]) -> list[float]:
    return [report.metrics["train/loss"] for report in reports if "train/loss" in report.metrics]


def held_out(reports: Sequence[Report]) -> dict[str, float]:
    return [{k: v for k, v in r.metrics.items() if k.startswith("eval/")} for r in reports if "eval/loss" in r.metrics][-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_and_sharded_runs_learn_the_same(family: str, tmp_path: Path, folders: dict[str, Path], whole: Any) -> None:
    expected = whole[family][1]
    notices: list[str] = []
    reports: list[Report] = []
    config = configured(family, folders, *STREAM, "engine.resident_blocks=1", "task.first_loss=stop")
    run_worker(config, context(tmp_path, tmp_path, reports, notices))
    assert len(losses(expected)) == 8 and losses(reports) == pytest.approx(losses(expected), rel=1e-6)
    assert held_out(reports) == pytest.approx(held_out(expected), rel=1e-5)
    assert "activations of" in notices[0] and "logits" not in notices[0]
    assert "training 14 pictures, held out 1; " in " ".join(notices)
    speeds = [report.metrics for report in reports if "perf/images_per_s" in report.metrics]
    assert all(0 < found["perf/images_per_s"] < found["perf/tokens_per_s"] / 40 for found in speeds)
    assert [report.metrics["train/images"] for report in reports if "train/images" in report.metrics] == list(range(4, 33, 4))
    told = "an image          an image of 64x64 px and 32 tokens of text, the largest of 3 sizes in data.cache"
    assert told in (tmp_path / "plan.txt").read_text()


@pytest.mark.parametrize(("family", "words"), [("flux1", ()), ("flux1", STREAM), ("flux2", NARROW)], ids=str)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    family: str, words: tuple[str, ...], tmp_path: Path, folders: dict[str, Path]
) -> None:
    config = configured(family, folders, *words, "train.num_steps=4", "evaluation.max_rows=1")
    expected, _ = run(config, tmp_path / "whole", tmp_path)
    before: list[Report] = []
    stopped = run_worker(config, replace(context(tmp_path / "parts", tmp_path, before), heartbeat=lambda step: step == 2))
    assert (stopped.step, stopped.eval_loss) == (2, None)
    resumed, _ = run(config, tmp_path / "parts", tmp_path)
    assert deterministic_metrics(before) + deterministic_metrics(resumed) == deterministic_metrics(expected)
    actual, wanted = saved_tensors(tmp_path / "parts"), saved_tensors(tmp_path / "whole")
    assert actual.keys() == wanted.keys() and all(torch.equal(actual[key], wanted[key]) for key in wanted)
    assert ("exp_avg_absmax" in {section for section, _ in actual}) == (words == NARROW)


@pytest.mark.parametrize("family", FAMILIES)
def test_overfitting_8_pictures_more_than_halves_the_held_out_loss(family: Any, tmp_path: Path) -> None:
    cache = one_size(family, tmp_path)
    words = ("batch.micro_size=8", "batch.accumulation_steps=1", "optim.lr=4e-3", "optim.warmup_steps=10")
    rare = ("evaluation.max_rows=8", "checkpoint.every_steps=1000", "train.log_every=50", f"data.eval_cache={cache}")
    config = configured(family, {family: tmp_path}, *words, *rare, "model.config.num_single_layers=1", "train.num_steps=100")
    untrained, _ = run(
        config.model_copy(update={"train": config.train.model_copy(update={"num_steps": 0})}), tmp_path / "0", tmp_path
    )
    _, summary = run(config, tmp_path / "run", tmp_path)
    assert summary.eval_loss is not None and summary.eval_loss < 0.5 * held_out(untrained)["eval/loss"]
    assert summary.perplexity is None


def one_size(family: Any, folder: Path) -> Path:
    """Write a cache of 8 pictures of one size."""
    encoders = tiny_encoders(family, folder / "pipeline")
    samples = (encoders.sample(picture, (64, 64)) for picture in pictures()[:8])
    write_cache(folder / "cache", encoders.facts(), [encoders.embed("")], samples)
    return folder / "cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_from_exported_weights_starts_where_the_first_one_ended(
    family: str, tmp_path: Path, folders: dict[str, Path], whole: Any
) -> None:
    run_dir, reports = whole[family]
    assert run_evaluation(configured(family, folders), context(run_dir, tmp_path, [])).eval_loss == held_out(reports)["eval/loss"]
    copied = checkpoints.copy(run_dir, tmp_path / "elsewhere").parent
    export_run(copied, tmp_path / "model", notify=lambda _: None)
    single = export_run(run_dir, tmp_path / "single", form="bfl")
    for weights in (tmp_path / "model" / "transformer", single):
        config = configured(family, folders, f"model.weights=path:{weights}", "train.num_steps=0")
        preflight(config, tmp_path)
        again, _ = run(config, tmp_path / f"from-{weights.name}", tmp_path)
        assert held_out(again) == held_out(reports)


def test_a_published_pipeline_brings_its_shape_and_comes_out_again(
    tmp_path: Path, folders: dict[str, Path], published: Path, whole: Any
) -> None:
    cache = f"data.cache={folders['flux1'] / 'cache'}"
    brief = [word for word in BRIEF if not word.startswith("model.")]
    words = [cache, *brief, "task.kind=flow", "train.num_steps=1", f"storage={tmp_path}", "name=tuned"]
    prepared = prepare(resolve("cpu", f"path:{published}", words), "tuned")
    preflight(prepared.config, tmp_path)
    save_config(prepared)
    notices: list[str] = []
    reports: list[Report] = []
    run_worker(prepared.config, context(prepared.run_dir, tmp_path, reports, notices))
    assert any(told.startswith("task.first_loss: the loss of step 1 is ") for told in notices), "they have hardly been trained"
    random, _ = run(configured("flux1", folders, "train.num_steps=1"), tmp_path / "random", tmp_path)
    assert losses(reports)[0] < losses(random)[0], "weights that have learned something"
    export_run(prepared.run_dir, tmp_path / "out")
    pipeline: Any = diffusers.FluxPipeline.from_pretrained(tmp_path / "out")
    trained = saved_tensors(prepared.run_dir)
    for name, parameter in pipeline.transformer.named_parameters():
        assert torch.equal(parameter, trained["weights", name])
    assert json.loads((prepared.run_dir / "model" / "config.json").read_text())["num_layers"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.cache={flux2}/cache",), "data.cache: the family of the cache is flux2, the model's flux1; "),
        (("data.cache={flux1}/nothing",), "data.cache: {flux1}/nothing: no such folder; "),
        (("data.eval_cache={flux2}/cache",), "data.eval_cache: the family of the cache is flux2, the model's flux1; "),
        (("model.config.joint_attention_dim=80",), "data.cache: text width of the cache is 64, the model's 80; "),
        (("model.config.in_channels=32",), "data.cache: latent channels per token of the cache is 64, the model's 32; "),
        (("model.config._class_name=SD3Transformer2DModel",), "model.config._class_name: 'SD3Transformer2DModel' is no FLUX"),
        (
            ("optim.in_backward=true", "clip.mode=previous", "batch.accumulation_steps=1"),
            "optim.in_backward: true wants one micro-batch a step, and the 3 sizes of images and texts in data.cache make ",
        ),
        (("attention=efficient",), "attention: 'efficient'; torch cannot train with it on a CPU; set attention=flash or math"),
    ],
)
def test_preflight_refuses_in_one_line(words: tuple[str, ...], message: str, tmp_path: Path, folders: dict[str, Path]) -> None:
    places = {family: str(folder) for family, folder in folders.items()}
    with pytest.raises(FluxrayError) as refused:
        preflight(configured("flux1", folders, *(word.format(**places) for word in words)), tmp_path)
    assert message.format(**places) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("part", ["vae", "text_encoder", "shift", "channels"])
def test_parts_that_do_not_belong_together_are_refused_with_both_values(
    part: str, tmp_path: Path, folders: dict[str, Path], published: Path
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(published, folder)
    config_file = folder / "vae" / "config.json"
    keys = json.loads(config_file.read_text())
    if part in ("vae", "text_encoder"):
        (file,) = (folder / part).glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-64:] = bytes(64)
        header = int.from_bytes(content[:8], "little")
        content[8 + header : 8 + header + 64] = bytes(64)
        file.write_bytes(content)
    elif part == "shift":
        config_file.write_text(json.dumps({**keys, "shift_factor": keys["shift_factor"] + 1}))
    else:
        config_file.write_text(json.dumps({**keys, "latent_channels": 32}))
    messages = {
        "vae": r"^data\.cache: encoded by VAE \w{16}, the model's is \w{16}; ",
        "text_encoder": r"^data\.cache: text_encoder of the cache is \w{16}, the model's \w{16}; ",
        "shift": r"^data\.cache: latent shift is [-.\d]+, the model's [.\d]+; ",
        "channels": r"^model\.weights: the VAE of path:\S+ has 128 latent channels per token, its transformer 64; ",
    }
    with pytest.raises(FluxrayError, match=messages[part]) as refused:
        preflight(configured("flux1", folders, f"model.weights=path:{folder}"), tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ("activation_checkpoint=offload",),
        ("activation_checkpoint=selective", "activation_checkpoint_budget=200KB"),
        ("model.fused_qkv=true",),
        (*STREAM, "activation_checkpoint=offload", "engine.kept_blocks=0", "batch.micro_size=1", "batch.accumulation_steps=4"),
    ],
    ids=str,
)
def test_techniques_change_no_loss(words: tuple[str, ...], tmp_path: Path, folders: dict[str, Path], whole: Any) -> None:
    reports, _ = run(configured("flux1", folders, *words, "train.num_steps=3", "evaluation.max_rows=1"), tmp_path, tmp_path)
    assert losses(reports) == pytest.approx(losses(whole["flux1"][1])[:3], rel=1e-6)


def test_steps_in_backward_are_those_after_it_where_pictures_have_one_size(tmp_path: Path) -> None:
    one_size("flux1", tmp_path)
    found = []
    for words in ((), ("optim.in_backward=true",)):
        brief = ("clip.mode=previous", "batch.accumulation_steps=1", "train.num_steps=3", "evaluation.max_rows=1")
        config = configured("flux1", {"flux1": tmp_path}, *brief, *words)
        preflight(config, tmp_path)
        found.append(losses(run(config, tmp_path / "-".join(words or ["plain"]), tmp_path)[0]))
    assert found[0] == found[1] and len(found[0]) == 3


def test_the_ladder_goes_down_to_streaming(folders: dict[str, Path]) -> None:
    config = configured("flux2", folders, "precision=mixed-bf16")
    words = list(ladder.rungs(config))[-1].words
    assert words.startswith("batch.micro_size=1 batch.accumulation_steps=4 activation_checkpoint=full engine.kind=stream")


def _rank_of_torchrun(rank: int, port: int, words: list[str], said: Path) -> None:
    """Run the worker as torchrun starts it; what rank 0 says goes into a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if rank == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
    sys.exit(torchrun.main(words))


def test_two_ranks_learn_what_one_does(tmp_path: Path, folders: dict[str, Path], whole: Any) -> None:
    words = [f"data.cache={folders['flux1'] / 'cache'}", *BRIEF, "train.num_steps=3", "evaluation.max_rows=1"]
    words += ["resources.num_workers=2", "batch.accumulation_steps=1", "name=two", f"storage={tmp_path}"]
    words = ["--profile", "cpu", "--model", "flux1-tiny", *words]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [fork(_rank_of_torchrun, rank, port, words, tmp_path / "said") for rank in range(2)]
    for process in ranks:
        process.join(200)
    assert [process.exitcode for process in ranks] == [0, 0]
    told = [float(loss) for loss in re.findall(r"step \d/3  loss (\S+)  \S+ images/s", (tmp_path / "said").read_text())]
    assert told == pytest.approx(losses(whole["flux1"][1])[:3], abs=6e-5)
    export_run(checkpoint.committed(tmp_path / "runs" / "two")[0].parent, tmp_path / "out", notify=lambda _: None)
    assert (tmp_path / "out" / "transformer" / "config.json").exists()
