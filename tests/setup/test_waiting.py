"""The rules of tests/waiting.py: a wait ends with its condition, its process, or when nothing happens."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import hanging, waiting
from tests.waiting import becomes, marked_processes, until

BUSY = "while True: pass"


STARTED: list[int] = []


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short waits, which see no process that another test of this worker has started."""
    monkeypatch.setattr(waiting, "QUIET_S", 1.0)
    monkeypatch.setattr(waiting, "_SAMPLE_S", 0.1)
    used_s = waiting._used_s
    monkeypatch.setattr(waiting, "_used_s", lambda: {p: s for p, s in used_s().items() if p in STARTED})
    yield
    STARTED.clear()


def started(code: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=out, stderr=subprocess.STDOUT)
    STARTED.append(process.pid)
    return process


def after(seconds: float):
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def test_a_process_that_ends_ends_the_wait_with_what_it_said(tmp_path):
    log = tmp_path / "log"
    process = started("raise SystemExit('no such database')", log)
    with pytest.raises(AssertionError, match=r"ended before it answers \(False\):\nno such database"):
        until(lambda: False, "it answers", process=process, log=log)


def test_a_log_that_grows_extends_the_wait_until_it_no_longer_does(tmp_path):
    log, goes_on = tmp_path / "log", after(2.0)
    log.touch()

    def slow_start() -> bool:
        if not goes_on():
            log.write_text(log.read_text() + ".")
        return False

    began_at = time.monotonic()
    with pytest.raises(AssertionError, match=r"it answers \(False\); last, 1 s ago: the log grew:\n\.\.\."):
        until(slow_start, "it answers", log=log)
    assert time.monotonic() - began_at > 2.5


@pytest.mark.parametrize("wait", ["in a thread", "in a loop"])
async def test_a_process_that_works_extends_the_wait_until_it_ends(tmp_path, wait):
    process = started(BUSY, tmp_path / "log")
    try:
        if wait == "in a thread":
            assert until(after(3.0))
        else:
            assert await becomes(after(3.0))
    finally:
        process.kill()
        process.wait()
    with pytest.raises(
        AssertionError, match=r"last, \d s ago: process(es \[\d+\] started or ended| \d+ was busy)"
    ):
        until(lambda: None)


def test_a_wait_ends_whatever_happens(tmp_path):
    process = started(BUSY, tmp_path / "log")
    try:
        with pytest.raises(AssertionError, match=rf"last, 0 s ago: process {process.pid} was busy"):
            until(lambda: None, "it answers", 2.0)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(bool(hanging.why_not()), reason=f"needs root to mount: {hanging.why_not()}")
def test_a_process_whose_memory_is_locked_hangs_no_wait_and_no_search(tmp_path):
    mark = {"MARK": "of-the-hanging-process"}
    with hanging.hanging_process(65534, mark):
        with pytest.raises(AssertionError, match="it happens"):
            until(lambda: None, patience_s=0.5)
        assert marked_processes(mark["MARK"]) == {}
