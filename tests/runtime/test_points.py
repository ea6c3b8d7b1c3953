"""The history of a trial's metric: whole after a crash, each step once."""

import math

from fluxray.runtime.points import FILE, PointWriter, read_points


def test_points_are_picked_out_of_reports(tmp_path):
    writer = PointWriter(tmp_path, "eval/loss")
    writer.see(1, {"train/loss": 3.0, "train/tokens": 100.0})
    writer.see(1, {"eval/loss": 2.5})
    writer.see(2, {"train/tokens": 200.0})
    writer.see(2, {"eval/loss": math.nan})
    writer.see(3, {"train/tokens": 300.0, "eval/loss": 2.25})
    writer.sync()
    writer.close()
    assert [(point.step, point.tokens, point.value) for point in read_points(tmp_path)] == [(1, 100, 2.5), (3, 300, 2.25)]


def test_a_resume_goes_on_with_time_and_repeats_nothing(tmp_path):
    first = PointWriter(tmp_path, "eval/loss")
    first.see(4, {"eval/loss": 2.0})
    with (tmp_path / FILE).open("a") as file:
        file.write("\n[8, 1")
    second = PointWriter(tmp_path, "eval/loss")
    for step in (2, 4, 8):
        second.see(step, {"eval/loss": 9.0})
    points = read_points(tmp_path)
    assert [(point.step, point.value) for point in points] == [(4, 2.0), (8, 9.0)]
    assert points[1].seconds >= points[0].seconds


def test_a_run_without_points_has_none(tmp_path):
    assert read_points(tmp_path) == []
