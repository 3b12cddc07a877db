from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub import process
from jupyter_gpushare.hub.broker_access import read_token
from jupyter_gpushare.hub.process import ProcessIdentity, started_for
from tests.hub.conftest import wait_for
from tests.waiting import PATIENCE_S


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "JUPYTERHUB_USER": "ada", "JUPYTERHUB_SERVER_NAME": "x"}
    with subprocess.Popen(["sleep", "600"], env=env) as process:
        yield process
        process.kill()


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = ProcessIdentity.of(process.pid)
    assert found is not None
    return found


def test_a_process_is_known_again(sleeper: subprocess.Popen[bytes]) -> None:
    assert identity(sleeper).alive()


def test_a_process_that_got_the_number_later_is_another_one(sleeper: subprocess.Popen[bytes]) -> None:
    earlier = replace(identity(sleeper), start_ticks=identity(sleeper).start_ticks - 1)
    assert not earlier.alive()
    assert not earlier.signal(signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_process_of_another_boot_is_another_one(sleeper: subprocess.Popen[bytes]) -> None:
    assert not replace(identity(sleeper), boot_id="0" * 36).alive()


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity(sleeper)
    os.kill(sleeper.pid, signal.SIGKILL)
    wait_for(lambda: not known.alive(), "the zombie is taken for dead")
    assert not known.signal(signal.SIGTERM)


def test_a_signal_reaches_the_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert identity(sleeper).signal(signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM


def test_a_server_gets_a_port_that_no_connection_gets(monkeypatch, tmp_path) -> None:
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [process.free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert min(ports) >= 10_000
    assert max(ports) < beyond
    (tmp_path / "range").write_text(f"{10_001}\t60999\n")
    monkeypatch.setattr(process, "_EPHEMERAL_PORTS", tmp_path / "range")
    process._recent_ports.clear()
    with socket.socket() as taken:
        taken.bind(("", 10_000))
        assert process.free_port() == 0
    assert process.free_port() == 10_000
    (tmp_path / "range").write_text("1024\t60999\n")
    assert process.free_port() == 0


def test_no_process_has_pid_0() -> None:
    assert ProcessIdentity.of(0) is None


def test_a_server_without_remembered_start_time_is_known_by_its_environment(
    sleeper: subprocess.Popen[bytes],
) -> None:
    wait_for(lambda: started_for(sleeper.pid, "ada", "x"), "the program is executed")
    assert not started_for(sleeper.pid, "ad", "x")
    assert not started_for(sleeper.pid, "ada", "")


def token_file(folder: Path, text: str = "secret\n") -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_token_that_only_its_owner_can_read_is_used(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path)) == "secret"
    (tmp_path / "token").chmod(0o620)
    with pytest.raises(GpuShareError, match="chmod 600"):
        read_token(tmp_path / "token")


def test_a_token_that_is_not_set_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpuShareError, match="no token"):
        read_token(token_file(tmp_path, text="\n"))
    with pytest.raises(GpuShareError, match="not set"):
        read_token(Path(""))


def test_a_process_that_does_not_answer_is_not_taken_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(process, "ENVIRON_S", 0.1)
    monkeypatch.setattr(process.procfs, "read", lambda *_: answers.wait(PATIENCE_S) and b"")
    assert not process.started_for(1, "ada", "")
    assert not answers.is_set()
    answers.set()
