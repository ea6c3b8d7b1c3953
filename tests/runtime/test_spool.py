import os
import time

import pytest

from fluxray.runtime import spool
from fluxray.runtime.spool import Appender, Position, acknowledge, acknowledged, entries, left

START = Position(0, 0)


def numbers(folder, start=START):
    return [entry.record["n"] for entry in entries(folder, start)]


def fill(folder, values):
    appender = Appender(folder)
    for value in values:
        appender.append({"n": value})
    return appender


def test_records_come_back_in_order_from_any_position(tmp_path):
    appender = fill(tmp_path, range(5))
    third = list(entries(tmp_path, START))[2]
    assert numbers(tmp_path, third.end) == [3, 4]
    appender.append({"n": float("inf")})
    assert numbers(tmp_path, third.end) == [3, 4, float("inf")], "what is open is read too"


def test_every_writer_has_a_segment_of_its_own_after_the_others(tmp_path):
    first = fill(tmp_path, [1])
    fill(tmp_path, [2]).close()
    first.append({"n": 1.5})
    fill(tmp_path, [3]).close()
    assert numbers(tmp_path) == [1, 1.5, 2, 3]
    assert len(list(tmp_path.glob("*.jsonl"))) == 3


def test_what_is_acknowledged_is_forgotten_and_its_place_not_used_again(tmp_path):
    fill(tmp_path, [1, 2]).close()
    fill(tmp_path, [3]).close()
    acknowledge(tmp_path, list(entries(tmp_path, START))[1].end)
    assert [record["n"] for record in left(tmp_path)] == [3]
    acknowledge(tmp_path, next(entries(tmp_path, acknowledged(tmp_path))).end)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["00000002.jsonl"]
    next(tmp_path.glob("*.jsonl")).unlink()
    fill(tmp_path, [4]).close()
    assert [record["n"] for record in left(tmp_path)] == [4]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_torn_last_line_is_no_record_and_joins_no_other(tmp_path, cut):
    fill(tmp_path, [1, 2]).close()
    path = tmp_path / "00000001.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    assert numbers(tmp_path) == [1]
    fill(tmp_path, [3]).close()
    assert numbers(tmp_path) == [1, 3]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[1]", b'{"n": ', b""])
def test_a_damaged_line_is_passed_over(tmp_path, damage):
    fill(tmp_path, [1]).close()
    with (tmp_path / "00000001.jsonl").open("ab") as file:
        file.write(damage + b"\n" + b'{"n":2}\n')
    assert numbers(tmp_path) == [1, 2]


@pytest.mark.parametrize("text", ["", "{", "[1]", '["a", 2]'])
def test_a_damaged_position_means_from_the_start(tmp_path, text):
    fill(tmp_path, [1]).close()
    (tmp_path / spool.POSITION_FILE).write_text(text)
    assert [record["n"] for record in left(tmp_path)] == [1]


def test_a_disk_that_is_full_for_a_while_leaves_no_half_line(tmp_path, monkeypatch):
    appender = fill(tmp_path, [1])
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    with pytest.raises(OSError, match="No space left"):
        appender.append({"n": 2})
    monkeypatch.undo()
    appender.append({"n": 2})
    assert numbers(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_segment_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 100)
    fill(tmp_path, range(100)).close()
    assert numbers(tmp_path) == list(range(100))
    assert max(path.stat().st_size for path in tmp_path.glob("*.jsonl")) < 120
    *_, last = entries(tmp_path, START)
    acknowledge(tmp_path, last.end)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_appending_and_reading_are_fast(tmp_path):
    start = time.perf_counter()
    fill(tmp_path, range(20_000))
    assert time.perf_counter() - start < 5, "0.25 ms each"
    start = time.perf_counter()
    assert len(numbers(tmp_path)) == 20_000
    assert time.perf_counter() - start < 5
