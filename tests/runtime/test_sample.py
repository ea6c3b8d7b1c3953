"""`fluxray sample`: pictures by a run, by an exported pipeline, streamed, from prompts encoded before."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from fluxray.cli import main
from fluxray.config.load import to_yaml
from fluxray.export import export_run
from fluxray.runtime import sample as sampling
from fluxray.runtime.inference import load_forwards
from tests.models.flux_helpers import draw_for
from tests.runtime.test_pictures import QUICK, train
from tests.runtime.test_worker_flow import configured

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "a pink water lily"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, flux1_pictures: Path) -> tuple[Path, Path]:
    """Return the folder of a run, and a whole pipeline around its transformer."""
    folder = tmp_path_factory.mktemp("sampled")
    config = configured("flux1", {"flux1": flux1_pictures}, *QUICK, "train.num_steps=2", "ema.decay=0.5", "optim.lr=0.01")
    train(config, folder / "run")
    (folder / "run" / "config.yaml").write_text(to_yaml(config))
    export_run(folder / "run", folder / "pipeline", notify=lambda _: None)
    shutil.copytree(flux1_pictures / "pipeline", folder / "pipeline", dirs_exist_ok=True)
    index = json.loads((folder / "pipeline" / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (folder / "pipeline" / "model_index.json").write_text(json.dumps(index))
    return folder / "run", folder / "pipeline"


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sample", *map(str, words)])
    return int(ended.value.code or 0)


def pixels(path: Path) -> Any:
    return np.array(Image.open(path))


def test_pictures_of_a_run_are_those_of_its_exported_pipeline(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, pipeline = trained
    common = ("--prompt", PROMPT, "--seed", 4, "--steps", 2, "--size", "32x48", "--guidance", 2)
    assert run(run_dir, *common, "--seed", 9, "--pipeline", f"path:{pipeline}", "--out", tmp_path / "run") == 0
    names = ["000-a-pink-water-lily-seed4.png", "000-a-pink-water-lily-seed9.png", "grid.png"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    told: Any = Image.open(tmp_path / "run" / names[0])
    assert told.text["prompt"] == PROMPT and told.text["seed"] == "4" and told.text["step"] == "2" and told.text["run"] == "run"
    whole = diffusers.FluxPipeline.from_pretrained(pipeline)
    whole.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in (4, 9)]
    keys: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 2, "guidance_scale": 2.0, "max_sequence_length": 32}
    expected: Any = whole([PROMPT, PROMPT], **keys, generator=generators)
    assert pixels(tmp_path / "run" / names[0]).shape == (32, 48, 3)
    for name, picture in zip(names, expected.images, strict=False):
        assert np.abs(pixels(tmp_path / "run" / name).astype(int) - np.array(picture, dtype=int)).max() <= 1
    assert run(run_dir, *common, "--ema", "--pipeline", f"path:{pipeline}", "--out", tmp_path / "averages") == 0
    assert not np.array_equal(pixels(tmp_path / "averages" / names[0]), pixels(tmp_path / "run" / names[0]))


def test_prompts_encoded_before_give_the_same_pictures(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, pipeline = trained
    words = ("--pipeline", f"path:{pipeline}", "--steps", 1)
    (tmp_path / "prompts.txt").write_text(f"\ufeff{PROMPT}\n\n a temple \n", encoding="utf-8")
    assert run(run_dir, *words, "--grid", tmp_path / "prompts.txt", "--embed", tmp_path / "file.safetensors") == 0
    assert run(run_dir, *words, "--grid", tmp_path / "prompts.txt", "--out", tmp_path / "one") == 0
    assert run(run_dir, *words, "--grid", tmp_path / "file.safetensors", "--out", tmp_path / "other") == 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["000-a-pink-water-lily-seed0.png", "001-a-temple-seed0.png", "grid.png"]
    for name in names:
        assert np.array_equal(pixels(tmp_path / "one" / name), pixels(tmp_path / "other" / name))
    assert pixels(tmp_path / "one" / names[0]).shape == (48, 80, 3)  # as a third of the images that the run was trained on


def test_streamed_and_published_weights_are_the_resident_ones(trained: tuple[Path, Path]) -> None:
    run_dir, pipeline = trained
    origins = [sampling.of_run(run_dir, False, None, print), sampling.of_pipeline(f"path:{pipeline}", None)]
    batch = draw_for(origins[0].model)
    outputs = []
    for origin in origins:
        for streamed in (False, True):
            forwards, is_streamed = load_forwards(origin.model, origin.weights, CPU, streamed)
            assert is_streamed == streamed
            outputs.append(forwards([batch])[0])
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_run_of_adapters_is_sampled_merged(tmp_path: Path, flux1_pictures: Path) -> None:
    words = (*QUICK, "train.num_steps=2", "adapter.kind=lora", "adapter.rank=2", "optim.lr=0.1", "ema.decay=0.5")
    config = configured("flux1", {"flux1": flux1_pictures}, *words)
    train(config, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    outputs = []
    for averaged in (False, True):
        folder = tmp_path / f"merged-{averaged}"
        export_run(tmp_path / "run", folder, notify=lambda _: None, averaged=averaged, merge=True)
        origin = sampling.of_run(tmp_path / "run", averaged, None, print)
        batch = draw_for(origin.model)
        published = load_forwards(origin.model, f"path:{folder}", CPU)[0]([batch])[0]
        for streamed in (False, True):
            outputs.append(load_forwards(origin.model, origin.weights, CPU, streamed)[0]([batch])[0])
            assert torch.equal(outputs[-1], published)
    assert not torch.equal(outputs[0], outputs[-1])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--pipeline: run began from none; name one"),
        (("--pipeline", "path:{p}"), "--prompt: is missing"),
        (("--prompt", "a", "--size", "20x32"), "--size: 20x32 is no multiple of 16"),
        (("--prompt", "a", "--size", "big"), "--size: 'big' is not HxW"),
        (("--prompt", "a", "--pipeline", "path:/no"), "'path:/no' is no folder"),
        (("--grid", "/no/prompts.txt", "--pipeline", "path:{p}"), "--grid: /no/prompts.txt cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: tuple[str, ...], told: str, trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = () if "--prompt" in words or "--pipeline" in words else ("--prompt", "a")
    assert run(trained[0], *prompt, *(word.format(p=trained[1]) for word in words)) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.splitlines()) == 1


def test_a_pipeline_has_no_averages(trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trained[1], "--prompt", "a", "--ema") == 2
    assert "is a pipeline, which keeps no average" in capsys.readouterr().err
