"""A broker that hangs is replaced."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpushare.broker import respawn
from tests.waiting import until

# Hangs after its first sign of life.
_CHILD = """
import os, sys, time
pipe = int(os.environ["GPUSHARE_HEARTBEAT_FD"])
open(sys.argv[1], "a").write("x")
os.write(pipe, b".")
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    monkeypatch.setattr(respawn, "HANGS_S", 1.0)
    children = []

    def start():
        children.append(
            respawn._Child(
                [sys.executable, "-c", _CHILD, str(tmp_path / "starts")],
                own_session=False,
                is_watched=True,
            )
        )
        return children[-1]

    yield start
    for each in children:
        each.stop()


def starts(tmp_path: Path) -> int:
    path = tmp_path / "starts"
    return len(path.read_text()) if path.exists() else 0


def test_a_child_that_hangs_is_killed_and_started_again(tmp_path, child):
    hanging = child()
    until(lambda: hanging.keep_running() or starts(tmp_path) == 3, "it is replaced twice")


def test_each_sign_of_life_puts_the_limit_off(monkeypatch):
    monkeypatch.setattr(respawn, "HANGS_S", 0.2)
    monitor = respawn.Monitor()
    for _ in range(3):
        os.write(monitor.writing, b".")
        time.sleep(0.25)  # longer than the limit: what was sent meanwhile counts
        assert not monitor.hangs()
    until(monitor.hangs, "no further sign comes")
    monitor.close()


def test_a_child_that_never_gives_a_sign_is_replaced_after_its_time_to_start(tmp_path, monkeypatch):
    monkeypatch.setattr(respawn, "STARTS_S", 0.2)
    monitor = respawn.Monitor()
    until(monitor.hangs, "the time to start is over")
    monitor.close()


@pytest.mark.parametrize("abstract", [False, True])
def test_a_broker_tells_systemd_that_it_is_ready_and_that_its_loop_turns(brokers, abstract):
    name = f"gpushare-test-{os.getpid()}-{brokers.port}"
    path = brokers.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}" if abstract else str(path))
        systemd.settimeout(30)
        broker = brokers.start(NOTIFY_SOCKET=f"@{name}" if abstract else str(path), WATCHDOG_USEC="10000000")
        assert [systemd.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        assert brokers.answers(broker), "it was ready"


@pytest.mark.long
def test_a_broker_that_hangs_is_replaced_under_its_parent(brokers):
    parent = brokers.start("--respawn")
    until(lambda: brokers.answers(parent), "it answers")
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    first = int(children.read_text().split()[0])
    os.kill(first, signal.SIGSTOP)
    until(lambda: (found := children.read_text().split()) and int(found[0]) != first, "it is replaced")
    until(lambda: brokers.answers(parent), "it answers again")
