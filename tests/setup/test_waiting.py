"""The rules of tests/waiting.py: a wait ends with its condition, with its process, or without progress."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import until


def started(code: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-u", "-c", code], stdout=out, stderr=subprocess.STDOUT)


def test_a_process_that_ends_ends_the_wait_with_what_it_said(tmp_path):
    log = tmp_path / "log"
    process = started("raise SystemExit('no such database')", log)
    with pytest.raises(AssertionError, match="ended before it answers:\nno such database"):
        until(lambda: False, "it answers", process=process, log=log)


def test_a_log_that_grows_extends_the_wait(tmp_path):
    log = tmp_path / "log"
    log.touch()
    began_at = time.monotonic()

    def slow_start() -> bool:
        log.write_text(log.read_text() + ".")
        return time.monotonic() - began_at > 0.5

    assert until(slow_start, "it answers", 0.2, log=log)
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: it answers \(None\)"):
        until(lambda: None, "it answers", 0.1)
