"""A driver whose cluster's head is lost ends by itself and says how to go on; what a raylet has started ends with it."""

import os
import socket
import subprocess
import sys
import time

import pytest

from fluxray.runtime import lost
from fluxray.runtime.lost import patience_s, watched_head

DRIVER = """
import sys, time
from fluxray.runtime.lost import watched_head
with watched_head(sys.argv[1], lambda: "fluxray tune --resume grid goes on"):
    print("trial 0 runs", flush=True)
    time.sleep(60)
"""

RAYLET = """
import subprocess, sys, time
worker = "import time; from fluxray.runtime.lost import end_with_parent as end; end(); end(); print('works', flush=True)"
worker += "; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", worker])
time.sleep(60)
"""


@pytest.fixture
def head():
    """Something that answers as a head does, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_driver_whose_head_is_gone_ends_with_a_line(head):
    listener, address = head
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "12"}
    command = [sys.executable, "-c", DRIVER, address]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None and driver.stdout.readline() == "trial 0 runs\n"
            listener.close()
            out, err = driver.communicate(timeout=40)
        finally:
            driver.kill()
    assert (driver.returncode, out) == (1, "")
    first, last = err.splitlines()
    assert (
        first
        == f"Ray's head at {address} does not answer: unless it comes back, this ends, and fluxray tune --resume grid goes on"
    )
    assert last.startswith(f"fluxray: failed: Ray's head at {address} has not answered for ")
    assert last.endswith(" s; once there is one, fluxray tune --resume grid goes on")


def test_a_head_that_answers_again_in_time_is_not_given_up(head, monkeypatch, capsys):
    listener, address = head
    told = []
    monkeypatch.setattr(lost, "POLL_S", 0.05)
    monkeypatch.setattr(lost, "patience_s", lambda: 0.5)
    monkeypatch.setattr(lost, "end", told.append)
    with watched_head(address, lambda: "try again"):
        time.sleep(0.7)
        listener.close()
        time.sleep(0.2)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            time.sleep(0.7)
            assert not told
            assert [line.split(address)[1].split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
                " does not answer",
                " answers again",
            ]
        time.sleep(1.0)
    assert len(told) == 1
    time.sleep(0.2)
    assert len(told) == 1


@pytest.mark.parametrize(("value", "found"), [(None, 50.0), ("300", 290.0), ("5", 2.0), ("soon", 50.0)])
def test_it_gives_up_sooner_than_ray(monkeypatch, value, found):
    monkeypatch.delenv(lost.RAY_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(lost.RAY_VARIABLE, value)
    assert patience_s() == found


def test_what_a_raylet_has_started_ends_with_it():
    with subprocess.Popen([sys.executable, "-c", RAYLET], stdout=subprocess.PIPE, text=True) as raylet:
        assert raylet.stdout is not None and raylet.stdout.readline() == "works\n"
        time.sleep(1.2)
        assert raylet.poll() is None
        began = time.monotonic()
        raylet.kill()
        assert raylet.stdout.read() == "", "the worker has the other end until it ends"
        assert time.monotonic() - began < 20
