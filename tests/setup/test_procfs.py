"""A process is known by pid and start time, and is never taken for another or for ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from jupyter_gpushare import procfs


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_the_boot_id_stays_the_same_within_a_boot() -> None:
    assert procfs.boot_id() == procfs.boot_id()
    assert len(procfs.boot_id()) == 36


def test_a_process_with_another_start_time_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    started = procfs.start_ticks(sleeper.pid)
    assert procfs.is_running(sleeper.pid, started)
    assert not procfs.is_running(sleeper.pid, started - 1)
    assert not procfs.send_signal(sleeper.pid, started - 1, signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_signal_reaches_the_process_and_a_zombie_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    started = procfs.start_ticks(sleeper.pid)
    pidfd = procfs.open_pidfd(sleeper.pid, started)
    assert pidfd is not None
    try:
        assert not procfs.has_ended(pidfd)
        assert procfs.send_signal(sleeper.pid, started, signal.SIGKILL)
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert procfs.has_ended(pidfd)
        assert not procfs.is_running(sleeper.pid, started)
    finally:
        os.close(pidfd)


def test_a_process_that_is_gone_has_no_start_time() -> None:
    assert procfs.start_ticks(1 << 22) == -1
    assert procfs.stat_fields(1 << 22) == []
    assert procfs.open_pidfd(1 << 22, 1) is None


def test_a_name_full_of_brackets_does_not_shift_the_fields() -> None:
    script = "import ctypes,sys; ctypes.CDLL(None).prctl(15, b'a) R 1 (b'); print('x', flush=True); input()"
    with subprocess.Popen(
        ["python3", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert int(procfs.stat_fields(child.pid)[procfs.PARENT]) == os.getpid()
        child.kill()


def test_no_descriptor_left_is_not_taken_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        procfs.start_ticks(os.getpid())
