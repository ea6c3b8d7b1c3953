"""`make train-images` from end to end in seconds: few steps, in this process in the place of Ray's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fluxray import cli
from fluxray.config.checks import check_available
from fluxray.data.latents import LatentCache
from fluxray.data.shipped import CAPTIONS
from fluxray.errors import FluxrayError
from fluxray.models.small_encoders import small_vae
from fluxray.runtime import first_images
from fluxray.runtime.encode import prepare
from fluxray.runtime.launch import FinishedRun
from fluxray.runtime.worker import preflight, run_worker
from fluxray.tasks.autoencode import reconstructed, train_vae
from tests.encode_helpers import encode_here
from tests.runtime.test_worker import context

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    "train.num_steps=2",
    "sample.every_steps=2",
    "sample.steps=1",
    "sample.seeds=[0]",
    "model.config.num_layers=1",
    "model.config.num_single_layers=1",
    "batch.micro_size=2",
    "evaluation.max_rows=1",
    "hardware.tflops=1",
    "optim.warmup_steps=1",
]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.source=folder:/x", "data.source=folder:/x: these pictures are their own; drop it"),
        ("resources.num_workers=1000", "resources."),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_made(tmp_path: Path, word: str, told: str) -> None:
    with pytest.raises(FluxrayError) as raised:
        first_images.train_images([f"storage={tmp_path}", word])
    assert str(raised.value).startswith(told) and not (tmp_path / "train-images").exists()


def test_pictures_encoders_cache_run_and_grid_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def encode_ahead(config: Any) -> Any:
        encoded.append(encode_here(prepare(config)))
        return encoded[-1]

    def train(config: Any, label: str) -> FinishedRun:
        run_dir = tmp_path / "runs" / label
        run_dir.mkdir(parents=True, exist_ok=True)
        check_available(config)
        preflight(config, tmp_path)
        return FinishedRun(label, run_dir, "", run_worker(config, context(run_dir, tmp_path, [])))

    monkeypatch.setattr(first_images, "encode_ahead", encode_ahead)
    monkeypatch.setattr(first_images, "train", train)
    said: list[str] = []
    words = [*SMALL, f"storage={tmp_path}"]
    done = first_images.train_images(words, vae_steps=2, show=said.append)
    folder = tmp_path / "train-images"
    assert done.summary.step == 2 and encoded[0].pictures == encoded[0].num_samples == len(CAPTIONS)
    cache = LatentCache(folder / "cache")
    assert cache.facts.resolutions == ((128, 128),) and {cache.caption(i) for i in range(len(cache))} == set(CAPTIONS.values())
    with Image.open(folder / "reconstructions.png") as pairs, Image.open(tmp_path / said[-1].split()[-1]) as grid:
        assert pairs.size == (10 * 128, 4 * 128) and grid.text["step"] == "2"  # type: ignore[attr-defined]
    assert f"writing {len(CAPTIONS)} pictures" in said[0] and said[2].startswith("VAE step 2/2  error")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.suffix in (".png", ".safetensors", ".tar")}
    said.clear()
    again = first_images.train_images(words, vae_steps=2, show=said.append)
    assert again.summary.step == 2 and encoded[1].pictures == 0 and len(said) == 4
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_the_vae_learns_to_give_pictures_back() -> None:
    rows = torch.linspace(-1, 1, 32)
    pictures = torch.stack([rows[:, None].expand(32, 32), rows[None].expand(32, 32), rows.flip(0)[None].expand(32, 32)])[None]
    before, vae = (small_vae(0) for _ in range(2))
    steps: list[int] = []
    train_vae(vae, pictures, 24, 0, lambda step, _: steps.append(step))
    assert steps == list(range(1, 25))
    errors = [(reconstructed(model, pictures) - pictures).abs().mean() for model in (before, vae)]
    assert errors[1] < 0.5 * errors[0]


def test_a_wrong_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["train-images", "train.num_step=2"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "fluxray: error: train.num_step: unknown key; did you mean train.num_steps?\n"
