"""The table of a sweep: what is written is read, whatever a crash leaves of it."""

import json
from dataclasses import asdict

import pytest

from fluxray.runtime.sweep_table import HEAD_FILE, TRIALS_FILE, Head, Point, TableWriter, Trial, read_table

HEAD = Head("s", "eval/loss", "min", ("optim.lr",), "steps: 20")


@pytest.fixture
def sweep_dir(tmp_path):
    (tmp_path / HEAD_FILE).write_text(json.dumps({**asdict(HEAD), "more": 1}))
    return tmp_path


def write(sweep_dir, *values, status="ended"):
    writer = TableWriter(sweep_dir)
    for number, value in enumerate(values):
        writer.put(number, run=f"s-{number}", keys={"optim.lr": 1e-3}, num_steps=20, status="running")
        for step in (10, 20):
            writer.point(number, Point(step, 100 * step, step / 10, value + 1 / step))
        writer.put(number, status=status)
    writer.close()


def test_what_is_written_is_read(sweep_dir):
    write(sweep_dir, 3.0)
    table = read_table(sweep_dir)
    history = (Point(10, 1000, 1.0, 3.1), Point(20, 2000, 2.0, 3.05))
    assert table.head == HEAD
    assert table.trials == (Trial(0, "s-0", {"optim.lr": 1e-3}, 20, "ended", history=history),)
    assert (table.trials[0].value, table.trials[0].best("min"), table.trials[0].best("max")) == (3.05, 3.05, 3.1)


def test_a_step_that_is_done_again_counts_once_and_history_is_in_order(sweep_dir):
    write(sweep_dir, 3.0)
    writer = TableWriter(sweep_dir)
    writer.point(0, Point(20, 2000, 9.0, 3.05))
    writer.point(0, Point(5, 500, 0.5, 4.0))
    assert [point[:3] for point in read_table(sweep_dir).trials[0].history] == [(5, 500, 0.5), (10, 1000, 1.0), (20, 2000, 2.0)]


def test_a_torn_line_takes_no_other_with_it(sweep_dir):
    write(sweep_dir, 3.0)
    with (sweep_dir / TRIALS_FILE).open("a") as file:
        file.write('{"trial": 0, "status": "fai')
    writer = TableWriter(sweep_dir)
    writer.put(1, run="s-1", keys={}, num_steps=20)
    assert [trial.status for trial in read_table(sweep_dir).trials] == ["ended", "waiting"]


def test_the_winner_has_ended_and_is_best_at_its_end(sweep_dir):
    write(sweep_dir, 3.0, 2.0, 2.5)
    writer = TableWriter(sweep_dir)
    assert (winner := read_table(sweep_dir).winner) is not None and winner.trial == 1
    writer.put(1, status="stopped")
    assert (winner := read_table(sweep_dir).winner) is not None and winner.trial == 2
    (sweep_dir / HEAD_FILE).write_text(json.dumps({**asdict(HEAD), "mode": "max"}))
    assert (winner := read_table(sweep_dir).winner) is not None and winner.trial == 0
    assert [trial.trial for trial in read_table(sweep_dir).with_status("stopped")] == [1]


def test_without_a_trial_that_ended_there_is_no_winner(sweep_dir):
    assert read_table(sweep_dir).winner is None
    write(sweep_dir, 3.0, status="failed")
    assert read_table(sweep_dir).winner is None
