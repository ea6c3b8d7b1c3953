"""A sweep in a real browser: its report, and MLflow's comparison of its trials."""

import json
import math
from pathlib import Path

import pytest

from fluxray.config.load import to_yaml
from fluxray.config.space import build_space
from fluxray.config.trials import base_tree, plan_trials
from fluxray.runtime.identity import Part, param
from fluxray.runtime.paths import CONFIG_FILE, Home
from fluxray.runtime.sweep_report import write_report
from fluxray.runtime.sweep_table import Point, TableWriter, read_table
from fluxray.runtime.sweep_tracking import SweepRecord
from fluxray.runtime.sweeps import Sweep, save_sweep
from fluxray.runtime.tracking import MetricWriter, finish_run, start_run
from fluxray.runtime.tune_trial import SWEEP_TAG

SPACE = {
    "keys": {"optim.lr": {"grid": [3e-4, 1e-3, 3e-3]}, "batch.micro_size": {"grid": [4, 8]}},
    "budget": {"tokens": 40960, "evaluations": 4},
}

DRAWN = """
(() => {
    const images = [...document.images];
    if (!images.length || !images.every(image => image.complete)) return false;
    const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
    return {
        sizes: images.map(image => [image.naturalWidth, image.getBoundingClientRect().width]),
        fetched: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
        rows: document.querySelectorAll("tbody tr[class]").length,
        wide,
    };
})()
"""

COMPARED = """
(() => {
    const text = document.body.innerText;
    const lines = document.querySelectorAll(".parcoords path, .parcoords canvas").length;
    return lines && text.includes("eval/loss") && text.includes("optim.lr") && text;
})()
"""

pytestmark = pytest.mark.browser


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Sweep, list[str]]:
    """A sweep as its driver and its trials leave it, and MLflow's ids of the trials."""
    space = build_space(SPACE)
    found = Sweep("grid", Home(tmp_path), space, base_tree(space, "cpu", "lm-tiny", ()), resumed=False)
    save_sweep(found, [{"CPU": 2.0}])
    record, writer = SweepRecord(found), TableWriter(found.folder)
    configs = {}
    for number, trial in enumerate(plan_trials(space, found.base).trials):
        assert trial.config is not None
        config = configs[number] = found.named(trial.config, number)
        _train(found, number, config, dict(trial.keys), writer)
        record.trial_ended(config, "ended", None, killed=False)
    writer.close()
    assert write_report(found) is not None
    ids = record.finish(read_table(found.folder), configs, "FINISHED")
    return found, [ids[found.run_name(number)] for number in configs]


def _train(sweep, number, config, keys, writer):
    run_dir = sweep.run_dir(number)
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    tags = {SWEEP_TAG: sweep.name, **{f"sweep.{key}": param(value) for key, value in keys.items()}}
    target = start_run(config, sweep.home, run_dir, None, Part(sweep.folder, tags))
    metrics = MetricWriter(target, lambda _: None)
    steps = config.train.num_steps
    writer.put(number, run=sweep.run_name(number), keys=keys, num_steps=steps, status="ended")
    for part in (1, 2, 3, 4):
        loss = 4 + abs(math.log10(keys["optim.lr"] / 1e-3)) + keys["batch.micro_size"] / 40 + 4 * math.exp(-part)
        metrics.log(steps * part // 4, {"eval/loss": loss})
        writer.point(number, Point(steps * part // 4, 10240 * part, 2.0 * part, loss))
    metrics.close()
    assert finish_run(target, "FINISHED", run_dir) is None


def test_the_report_is_drawn_whole_and_fetches_nothing(sweep, browse):
    found, _ = browse(f"file://{sweep[0].folder / 'report.html'}", DRAWN)
    assert len(found["sizes"]) == 5
    assert all(natural > 500 and shown > 500 for natural, shown in found["sizes"])
    assert found["fetched"] == []
    assert (found["rows"], found["wide"]) == (6, False)


def test_mlflow_compares_the_trials_of_a_sweep(sweep, ui, browse):
    runs = json.dumps(sweep[1])
    text, picture = browse(f'{ui}/#/compare-runs?runs={runs}&experiments=["1"]', COMPARED)
    assert "Comparing 6 Runs" in text
    assert len(picture.getcolors(1 << 24)) > 50
