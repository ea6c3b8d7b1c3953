import pytest

from fluxray.engine.stream_timeline import Point, StreamBytes
from fluxray.runtime import picture
from fluxray.runtime.picture import draw

GIB = 2**30
POINTS = [
    Point("begin", -1, -1, 0, 0),
    Point("prologue", -1, -1, 1 * GIB, 1 * GIB),
    Point("forward", 0, 0, 2 * GIB, 3 * GIB),
    Point("forward", 1, 0, 3 * GIB, 3 * GIB),
    Point("backward", 1, 0, 2 * GIB, 7 * GIB),
    Point("step", 1, -1, 2 * GIB, 2 * GIB),
    Point("backward", 0, 0, 1 * GIB, 5 * GIB),
    Point("step", 0, -1, 1 * GIB, 1 * GIB),
    Point("prologue again", -1, 0, 1 * GIB, 1 * GIB),
    Point("end", -1, -1, 0, 1 * GIB),
]
HELD = StreamBytes(50 * GIB, 1 * GIB, 2 * GIB, 0, 0, 3 * GIB, 4 * GIB)


def test_the_layers_add_up_to_the_peak_of_every_point():
    layers = picture._layers(POINTS, HELD, GIB // 2)
    assert "resident blocks" not in layers and next(iter(layers)) == "CUDA context"
    totals = [sum(values) for values in zip(*layers.values(), strict=True)]
    assert totals == [GIB // 2 + HELD.device + point.peak for point in POINTS]


@pytest.mark.parametrize("limit", [None, 19 * GIB, 400 * GIB])
def test_a_picture_shows_the_limit_unless_it_is_out_of_sight(limit, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    lines: list[float] = []
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **_: lines.append(y))
    draw(POINTS, HELD, GIB // 2, limit, tmp_path / "memory.png", "a run")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert lines == ([19.0] if limit == 19 * GIB else [])


def test_sections_and_places_are_named():
    assert [picture._section(point, POINTS) for point in POINTS] == [
        "prologue", "prologue", "forward", "turn", "turn", "turn", "backward", "backward",
        "prologue again, step", "prologue again, step",
    ]  # fmt: skip
    assert picture._words(POINTS[4]) == "backward of block 1" and picture._words(POINTS[-1]) == "end"
