"""`fluxray ui` in a real browser: the loss of a run is drawn, and its samples are shown."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from mlflow import MlflowClient
from PIL import Image

from fluxray.config.load import resolve, to_yaml
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.tracking import MetricWriter, finish_run, start_run

LINE_RGB = (34, 114, 180)
"""The colour that MLflow gives the first run of a chart."""

CURVE = """
(() => {
    const line = document.querySelector("path.js-line")?.getAttribute("d") ?? "";
    return document.body.innerText.includes("train/loss") && line.split("L").length > 10 && line;
})()
"""
"""The path of the curve, once the page names the metric and draws it."""

SAMPLE, SAMPLE_RGB = "samples/step_00000200.png", (200, 60, 20)
SHOWN = "[...document.querySelectorAll('img')].some(image => image.naturalWidth === 300)"

pytestmark = pytest.mark.browser


@pytest.fixture
def run_page(tmp_path: Path) -> str:
    """Record a run in tmp_path as the driver and rank 0 do; return the path of its pages."""
    run_dir = tmp_path / "runs" / "curve"
    run_dir.mkdir(parents=True)
    config = resolve("cpu", "lm-tiny", {"name": "curve", "storage": str(tmp_path)})
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    target = start_run(config, Home(tmp_path), run_dir, None)
    complaints: list[str] = []
    writer = MetricWriter(target, complaints.append)
    for step in range(10, 210, 10):
        writer.log(step, {"train/loss": 2 + 8.3 * math.exp(-step / 100)})
    (run_dir / SAMPLE).parent.mkdir()
    Image.new("RGB", (300, 200), SAMPLE_RGB).save(run_dir / SAMPLE)
    writer.artifact(SAMPLE)
    writer.close()
    assert finish_run(target, "FINISHED", run_dir) is None
    assert complaints == []
    (run,) = MlflowClient(target.uri).search_runs(["1"])
    return f"#/experiments/1/runs/{run.info.run_id}"


def test_the_ui_draws_the_loss_of_a_run_and_shows_its_samples(run_page: str, ui: str, browse):
    curve, picture = browse(f"{ui}/{run_page}/model-metrics?workflowType=machine_learning", CURVE)
    corners = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+),([\d.]+)", curve)]  # pixels from the top left
    assert all(left < right and above < below for (left, above), (right, below) in pairwise(corners)), "the loss does not fall"
    coloured = sum(count for count, rgb in picture.getcolors(1 << 24) if math.dist(rgb, LINE_RGB) < 10)
    assert coloured > 500, "the picture shows no curve"
    _, picture = browse(f"{ui}/{run_page}/artifacts/{SAMPLE}?workflowType=machine_learning", SHOWN)
    assert sum(count for count, rgb in picture.getcolors(1 << 24) if math.dist(rgb, SAMPLE_RGB) < 10) > 10_000
