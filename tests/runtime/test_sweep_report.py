"""What reports a sweep: pictures and a page, from its table alone."""

import json
import math
import re
from dataclasses import asdict
from html.parser import HTMLParser

import pytest
from PIL import Image

from fluxray.config.space import build_space
from fluxray.config.trials import base_tree
from fluxray.runtime import sweep_pictures
from fluxray.runtime.paths import Home
from fluxray.runtime.sweep_axes import UNSET, axes_of
from fluxray.runtime.sweep_importance import importance
from fluxray.runtime.sweep_pictures import draw
from fluxray.runtime.sweep_report import write_report
from fluxray.runtime.sweep_table import Head, Point, Table, TableWriter, Trial, read_table
from fluxray.runtime.sweeps import PICTURES, Sweep, save_sweep

ALL = ["parallel.png", "pairs.png", "by-tokens.png", "by-seconds.png", "importance.png"]
FAULT = "out of memory: <the device> has 24 GB"


def trial(number, keys, *values, status="ended", num_steps=30):
    history = tuple(Point(10 * i, 1000 * i, float(i), value) for i, value in enumerate(values, 1))
    reason = FAULT if status == "failed" else None
    return Trial(number, f"s-{number:03}", keys, num_steps, status, reason, None, history)


def table(*trials, mode="min", keys=None):
    names = keys or tuple(dict.fromkeys(key for one in trials for key in one.keys))
    return Table(Head("s", "eval/loss", mode, names, "30 steps a trial"), trials)


def grid(*more, mode="min"):
    """Return 9 trials whose loss is decided by the learning rate, and hardly by the batch."""
    pairs = [(rate, batch) for rate in (1e-4, 1e-3, 1e-2) for batch in (4, 8, 16)]
    loss = {1e-4: 6.0, 1e-3: 4.0, 1e-2: 5.0}
    trials = [
        trial(i, {"optim.lr": rate, "batch.micro_size": batch}, 9.0, 7.0, loss[rate] + batch / 100)
        for i, (rate, batch) in enumerate(pairs)
    ]
    return table(*trials, *more, mode=mode)


def test_few_values_are_listed_and_many_are_a_scale():
    few, many = axes_of(table(*(trial(i, {"a": i % 8, "b": 10.0 ** (i - 9), "c": 7}, 1.0) for i in range(9))))
    assert few.ticks()[0] == (0.0, "0") and few.ticks()[-1] == (1.0, "7") and few.num_cells == 8
    assert many.log and [label for _, label in many.ticks()] == ["1e-09", "1e-07", "1e-05", "0.001", "0.1"]
    assert many.place(trial(0, {"a": 0, "b": 1e-5}, 1.0)) == pytest.approx(0.5)
    assert [many.cell(trial(0, {"b": 10.0**-power}, 1.0)) for power in (9, 8, 7, 2, 1)] == [0, 0, 1, 5, 5]


def test_a_key_that_does_not_apply_has_a_place_of_its_own():
    trials = [trial(i, {"kind": "b" if i % 2 else "a", **({"mean": i / 10} if i % 2 else {})}, 1.0) for i in range(20)]
    kind, mean = axes_of(table(*trials))
    assert [label for _, label in kind.ticks()] == ["a", "b"], "what is no number keeps its order"
    assert mean.cell_labels[0] == UNSET and mean.cell(trials[0]) == 0 and mean.place(trials[0]) == 0.0
    assert (mean.cell(trials[1]), mean.place(trials[1])) == (1, pytest.approx(0.2))
    assert (mean.cell(trials[19]), mean.place(trials[19])) == (mean.num_cells - 1, 1.0)


def test_importance_finds_the_key_that_decides():
    found = importance(grid(), axes_of(grid()))
    assert found is not None and (found.num_trials, found.progress) == (9, 1.0)
    assert list(found.shares) == ["optim.lr", "batch.micro_size"]
    assert found.shares["optim.lr"] > 0.7 and sum(found.shares.values()) == pytest.approx(1)


def test_importance_compares_trials_that_were_stopped_where_all_had_come_to():
    trials = [trial(i, {"a": i % 2, "b": i}, 9.0 - i % 2, 1.0 + i, status="ended" if i % 2 else "stopped") for i in range(8)]
    trials[0] = trial(0, {"a": 0, "b": 0}, 9.0, status="stopped")
    found = importance(table(*trials), axes_of(table(*trials)))
    assert found is not None and found.progress == pytest.approx(1 / 3) and found.num_trials == 8
    assert found.shares["a"] > found.shares["b"], "after the first third only `a` decides"


@pytest.mark.parametrize("values", [(4.0, 4.0, 4.0, 4.0, 4.0), (4.0, 5.0, 6.0), (math.nan,) * 6])
def test_of_too_little_nothing_is_said(values):
    found = table(*(trial(i, {"a": i}, value) for i, value in enumerate(values)))
    assert importance(found, axes_of(found)) is None


def test_all_pictures_are_drawn_whatever_became_of_the_trials(tmp_path):
    keys = {"optim.lr": 1e-4, "batch.micro_size": 4}
    more = [
        trial(9, keys, 8.0, status="stopped"),
        trial(10, keys, status="failed"),
        trial(11, keys, 9.0, math.nan, status="failed"),
        trial(12, {"optim.lr": 1.0}, 9.0, 7.0, 1e30),
        trial(13, keys, 9.0, status="running"),
        trial(14, keys, status="waiting"),
    ]
    said: list[str] = []
    found = draw(grid(*more), tmp_path, say=said.append)
    assert said == []
    assert [picture.file for picture in found] == ALL == sorted((path.name for path in tmp_path.iterdir()), key=ALL.index)
    for picture in found:
        with Image.open(tmp_path / picture.file) as image:
            assert min(image.size) > 150
            assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 20, picture.file


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_map_shows_the_best_of_each_pair_and_marks_what_has_no_result(mode):
    found = grid(mode=mode)
    values = sweep_pictures._values(found)
    assert values is not None and (values.best, values.worst) == ((4.04, 6.16) if mode == "min" else (6.16, 4.04))
    best = sweep_pictures._cell(found, values, found.trials[:3])
    assert best == ((6.04, "6.04") if mode == "min" else (6.16, "6.16"))
    stopped = [trial(0, {}, 8.0, status="stopped"), trial(1, {}, status="failed")]
    assert sweep_pictures._cell(found, values, stopped) == (8.0, "(8.00)")
    assert sweep_pictures._cell(found, values, stopped[1:])[1] == "x"
    assert sweep_pictures._cell(found, values, [trial(0, {}, status="waiting")])[1] == ""


def test_one_loss_that_exploded_takes_no_colour_from_the_others():
    found = sweep_pictures._values(grid(trial(9, {"optim.lr": 1.0, "batch.micro_size": 4}, 1e9)))
    assert found is not None and (found.best, found.worst, found.clipped) == (4.04, 6.16, True)
    assert (found.write(5.0), found.write(1e9)) == ("5.00", "1e+09")


def test_without_a_result_there_are_no_pictures_and_none_of_an_earlier_start_stay(tmp_path):
    assert len(draw(grid(), tmp_path)) == 5
    assert draw(table(trial(0, {"a": 1}, status="failed"), trial(1, {"a": 2}, math.nan)), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_drawn_is_said_and_the_others_stay(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr(sweep_pictures, "_draw_pairs", broken)
    said: list[str] = []
    assert [picture.file for picture in draw(grid(), tmp_path, say=said.append)] == [name for name in ALL if name != "pairs.png"]
    assert said == ["a picture of sweep s could not be drawn: RuntimeError: no ink"]


@pytest.fixture
def sweep(tmp_path):
    """A sweep of 9 trials that ended and one that failed."""
    space = build_space({"keys": {"optim.lr": {"grid": [1e-4, 1e-3, 1e-2]}, "batch.micro_size": {"grid": [4, 8, 16]}}})
    words = ["tracking.uri=http://me:secret@host"]
    found = Sweep("s", Home(tmp_path), space, base_tree(space, "cpu", "lm-tiny", words), resumed=False)
    save_sweep(found, [{"CPU": 2.0, "memory": 2.0**33, "node:10.0.0.1": 1.0}])
    writer = TableWriter(found.folder)
    for one in grid(trial(9, {"optim.lr": 0.1, "batch.micro_size": 4}, 8.0, status="failed")).trials:
        fields = {key: value for key, value in asdict(one).items() if key not in ("trial", "history")}
        writer.put(one.trial, **fields)
        for point in one.history:
            writer.point(one.trial, point)
    writer.close()
    return found


class Page(HTMLParser):
    """The text of a page, its elements, and whatever it refers to."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.links, self.rows, self.text = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "data", "action") and value]
        if tag == "tr":
            self.rows.append((dict(attrs).get("class"), []))

    def handle_endtag(self, tag):
        if tag == "table":
            self.rows.append((None, []))

    def handle_data(self, data):
        self.text += data
        if self.rows and data.strip():
            self.rows[-1][1].append(data)


def test_the_page_stands_alone_and_tells_all(sweep):
    path = write_report(sweep)
    assert path == sweep.folder / "report.html"
    html = path.read_text()
    page = Page(html)
    assert len(page.links) == 5 and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "url(" not in html and "@import" not in html and "secret" not in html
    assert sorted(file.name for file in (sweep.folder / PICTURES).iterdir()) == sorted(ALL)
    assert "10 trials: 9 ended, 1 failed" in page.text
    commands = f"fluxray best s --storage {sweep.home.root} --out best.yaml\nfluxray train --profile best.yaml"
    assert commands in page.text
    winner = read_table(sweep.folder).winner
    rows = [(kind, cells) for kind, cells in page.rows if kind]
    assert winner is not None
    assert rows[0] == ("winner", [str(winner.trial), "0.001", "4", "best", "30 / 30", "3,000", "0:03", "4.04"])
    assert rows[-1] == ("failed", ["9", "0.1", "4", "failed", "10 / 30", "1,000", "0:01", "8", FAULT])
    assert len(rows) == 10
    assert re.search(r"torch\s*\d", page.text) and "CPU 2, memory 8.0 GiB" in page.text and "10.0.0.1" not in page.text
    assert json.loads((sweep.folder / "environment.json").read_text())["python"] in page.text
    assert "micro_size" in page.text.partition("Space")[2]


def test_a_page_without_a_result_says_so(sweep):
    writer = TableWriter(sweep.folder)
    for number in range(10):
        writer.put(number, status="failed", reason=FAULT)
    writer.close()
    path = write_report(sweep)
    assert path is not None
    page = Page(path.read_text())
    assert "No trial has a result." in page.text and "fluxray best" not in page.text and "10 failed" in page.text


def test_a_report_that_cannot_be_written_is_one_line(sweep, capsys):
    (sweep.folder / PICTURES).write_text("in the way")
    assert write_report(sweep) is None
    said = capsys.readouterr().out
    assert said.startswith("sweep s has no report: FileExistsError: ") and said.count("\n") == 1
