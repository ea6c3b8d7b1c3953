import io
import time

import pytest

from fluxray.runtime import progress
from fluxray.runtime.progress import Display, Progress, Snapshot

METRICS = {"train/loss": 3.21987, "perf/tokens_per_s": 12345.6, "memory/host_gib": 1.26}


def test_the_line_names_step_loss_speed_memory_and_time_left():
    shown = Progress(200)
    assert shown.line() == "starting workers"
    shown.update(Snapshot(10, METRICS, ()), 100.0)
    assert shown.line() == "step 10/200  loss 3.2199  12,346 tokens/s  1.3 GiB"
    shown.update(Snapshot(20, {"train/loss": 3.0}, ()), 105.0)
    assert shown.line() == "step 20/200  loss 3.0000  12,346 tokens/s  1.3 GiB  1:30 left"


def test_device_memory_goes_before_host_memory():
    shown = Progress(2)
    shown.update(Snapshot(1, {**METRICS, "memory/reserved_gib": 40.04}, ()), 0.0)
    assert "40.0 GiB" in shown.line()


def test_images_go_before_tokens():
    shown = Progress(2)
    shown.update(Snapshot(1, {**METRICS, "perf/images_per_s": 9.576}, ()), 0.0)
    assert "9.576 images/s" in shown.line() and "tokens/s" not in shown.line()


def test_a_restart_measures_the_speed_anew():
    shown = Progress(100)
    for step, now in ((10, 0.0), (50, 4.0), (20, 60.0)):
        shown.update(Snapshot(step, {}, ()), now)
    assert shown.seconds_left() is None
    shown.update(Snapshot(30, {}, ()), 61.0)
    assert shown.seconds_left() == pytest.approx(7.0)
    assert not shown.update(Snapshot(30, {}, ()), 70.0)


def test_hours_are_shown():
    shown = Progress(10_000)
    shown.update(Snapshot(0, {}, ()), 0.0)
    shown.update(Snapshot(1, {}, ()), 1.0)
    assert shown.line().endswith("2:46:39 left")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def display(out, monkeypatch):
    """Show a run of 8 steps, one a poll, with a notice at steps 2 and 6."""
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    steps = iter(range(1, 9))
    texts = []

    def read(num_seen):
        step = next(steps, 8)
        if step in (2, 6) and f"notice {step}" not in texts:
            texts.append(f"notice {step}")
        return Snapshot(step, {"train/loss": step}, texts[num_seen:]) if step != 4 else None

    with Display(read, 8, out):
        time.sleep(0.5)
    return out.getvalue()


def test_a_log_gets_few_lines_and_always_the_last(monkeypatch):
    lines = display(io.StringIO(), monkeypatch).splitlines()
    assert [line for line in lines if line.startswith("notice")] == ["notice 2", "notice 6"]
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 2
    assert steps[-1].startswith("step 8/8  loss 8.0000")


def test_a_terminal_gets_one_moving_line_and_the_notices_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    text = display(Terminal(), monkeypatch)
    assert text.count("notice 2") == text.count("notice 6") == 1
    assert "step 8/8" in text
    assert "\x1b[2K" in text, "the line is erased and drawn anew"
