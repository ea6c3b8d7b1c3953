"""Pictures while training, on a CPU without Ray: drawn, published, resumed past, and never in the way."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from fluxray.config.schema import TrainConfig
from fluxray.errors import FluxrayError
from fluxray.memory.estimate import Policy, estimate
from fluxray.memory.live import LiveBytes
from fluxray.protocols import Report
from fluxray.runtime.planning import demand, model_spec
from fluxray.runtime.sampling_needs import decode_bytes
from fluxray.runtime.worker import preflight, run_worker
from fluxray.tasks import sampling
from tests.runtime.test_worker import context, saved_tensors
from tests.runtime.test_worker_flow import STREAM, configured

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("train.num_steps=4", "evaluation.max_rows=1", "checkpoint.every_steps=4", "model.config.num_single_layers=1")
PICTURES = ("sample.every_steps=2", "sample.steps=2", "sample.seeds=[1,2,3]", "sample.num_prompts=2", "data.eval_fraction=0.3")
DECODED = ("sample.every_steps=2", "sample.pipeline=path:{p}")


@pytest.fixture(scope="module")
def folders(flux1_pictures: Path, flux2_pictures: Path) -> dict[str, Path]:
    return {"flux1": flux1_pictures, "flux2": flux2_pictures}


def with_pictures(family: str, folders: dict[str, Path], *words: str) -> TrainConfig:
    return configured(family, folders, *QUICK, *PICTURES, f"sample.pipeline=path:{folders[family] / 'pipeline'}", *words)


def train(config: TrainConfig, folder: Path) -> tuple[list[Report], list[str], list[str]]:
    """Run the worker; return reports, notices and names of what was published."""
    reports: list[Report] = []
    notices: list[str] = []
    published: list[str] = []
    run_worker(config, replace(context(folder, folder, reports, notices), publish=published.append))
    return reports, notices, published


@pytest.mark.parametrize(("family", "words"), [("flux1", ("ema.decay=0.9",)), ("flux2", ("ema.decay=0.9", *STREAM))], ids=str)
def test_a_grid_is_drawn_and_training_does_not_notice(
    family: str, words: tuple[str, ...], tmp_path: Path, folders: dict[str, Path]
) -> None:
    config = with_pictures(family, folders, *words)
    preflight(config, tmp_path)
    reports, notices, published = train(config, tmp_path / "drawn")
    names = ["samples/step_00000002.png", "samples/step_00000004.png"]
    assert [name for name in published if name.startswith("samples")] == names and not [n for n in notices if "no pictures" in n]
    grid: Any = Image.open(tmp_path / "drawn" / names[0])
    assert grid.text["step"] == "2" and grid.text["weights"] == "ema" and len(grid.text["prompts"].splitlines()) == 2
    assert grid.width > 3 * 96 and grid.height > 2 * 96
    assert [r.step for r in reports if "sample/seconds" in r.metrics] == [2, 4]
    plain = config.model_copy(update={"sample": TrainConfig().sample})
    train(plain, tmp_path / "plain")
    expect_equal(saved_tensors(tmp_path / "drawn"), saved_tensors(tmp_path / "plain"))


@pytest.mark.parametrize("fault", ["vae", "scheduler", "nan"])
def test_what_fails_is_one_line_and_training_goes_on(
    fault: str, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_pictures("flux1", folders, "train.num_steps=2", *(STREAM if fault == "nan" else ()))
    plain = config.model_copy(update={"sample": TrainConfig().sample})
    train(plain, tmp_path / "plain")
    if fault == "vae":
        monkeypatch.setattr(AutoencoderKL, "decode", broken)
    elif fault == "scheduler":
        monkeypatch.setattr(sampling, "_pipeline", broken)
    else:
        forward = sampling.EngineTransformer.forward
        monkeypatch.setattr(sampling.EngineTransformer, "forward", lambda *a, **k: (forward(*a, **k)[0] * torch.nan,))
    _, notices, published = train(config, tmp_path / "disturbed")
    (told,) = [notice for notice in notices if "no pictures" in notice]
    assert told.startswith("samples/step_00000002.png: no pictures at step 2 (") and told.endswith("); training goes on")
    assert {"vae": "ArithmeticError", "scheduler": "sample.pipeline", "nan": "the latents are not finite"}[fault] in told
    assert not [name for name in published if name.startswith("samples")]
    expect_equal(saved_tensors(tmp_path / "disturbed"), saved_tensors(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("sample.steps=3",), "sample.every_steps: 0, so the other keys of sample have no effect"),
        (("sample.every_steps=2",), "sample.pipeline: null, but model.weights names no pipeline whose VAE could decode"),
        (("sample.every_steps=2", "sample.pipeline=here"), "sample.pipeline: 'here' is neither path:FOLDER nor hf:NAME"),
        (("sample.every_steps=2", "sample.pipeline=path:/no"), "sample.pipeline: path:/no has no vae/config.json"),
        (
            (*DECODED, "sample.weights=ema"),
            "sample.weights: 'ema', but no average is kept",
        ),
        (
            (*DECODED, "sample.height=32"),
            "sample.height: set it together with sample.width",
        ),
        (
            (*DECODED, "sample.height=40", "sample.width=32"),
            "sample.height: 40 is not a mu",
        ),
        (
            (*DECODED, "sample.prompts=[a dog]"),
            "sample.prompts: 'a dog' is no caption whose",
        ),
        (("sample.every_steps=2", "sample.pipeline=path:{other}"), "sample.pipeline: .* has VAE .*, data.cache was encoded by"),
        (
            (*DECODED, "sample.embeddings=no"),
            "sample.embeddings: .* is no file of prompts",
        ),
        (("ema.dtype=bf16",), "ema.dtype: 'bf16' has no effect without ema.decay"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: Sequence[str], told: str, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxray.runtime.learn_images.check_flux_stack", lambda _: None)
    places = {"p": folders["flux1"] / "pipeline", "other": folders["flux2"] / "pipeline"}
    with pytest.raises(FluxrayError, match=told):
        preflight(configured("flux1", folders, *(word.format(**places) for word in words)), tmp_path)


def broken(*_: object, **__: object) -> None:
    raise ArithmeticError


def expect_equal(actual: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key


def test_the_plan_holds_a_grid_and_a_decoded_picture(folders: dict[str, Path]) -> None:
    pipeline = folders["flux1"] / "pipeline"
    words = (
        *STREAM,
        f"sample.pipeline=path:{pipeline}",
        "sample.every_steps=2",
        "sample.seeds=[1,2]",
        "hardware.host_memory=8GB",
    )
    small, wide = (("sample.height=64", "sample.width=64"), ("sample.height=1024", "sample.width=1024"))
    without = demanded(folders, *STREAM)
    assert without.samples is None
    few, many = demanded(folders, *words, *small), demanded(folders, *words, *small, "sample.num_prompts=400")
    decoded = demanded(folders, *words, *wide)
    assert few.samples is not None and many.samples is not None and decoded.samples is not None
    assert many.samples.rows > 50 * few.samples.rows
    assert decoded.samples.decode_bytes > 2 * few.samples.decode_bytes
    validation = [estimate(demand, Policy()).device["validation"] for demand in (without, few, many, decoded)]
    assert validation[0] <= validation[1] < validation[2] and validation[3] > 2**20


def test_what_a_vae_holds_is_counted(folders: dict[str, Path]) -> None:
    vae = AutoencoderKL.from_pretrained(folders["flux1"] / "pipeline", subfolder="vae", use_safetensors=True)
    with torch.no_grad(), LiveBytes(vae.parameters()) as live:
        vae.decode(torch.randn(1, 16, 8, 8))
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    assert decode_bytes(folders["flux1"] / "pipeline", 64) == pytest.approx(weights + live.peak, rel=0.05)


def demanded(folders: dict[str, Path], *words: str) -> Any:
    config = configured("flux1", folders, *words)
    return demand(config, model_spec(config))
