"""The units of docs/units under a real systemd: the port is never free, and a broker that hangs is replaced.

The broker runs as root there: the interpreter of the tests may be in a folder that no other user
reaches.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ports import free_ports
from tests.systemd import Systemd
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

UNITS = Path(__file__).parents[2] / "docs" / "units"
HEALTH = "/services/gpushare/api/v1/health"
BROKER = "gpushare-broker.service"
_CONFIG = """
c.GPUShareBroker.helper_socket = "/run/gpushare/helper.sock"
c.GPUShareBroker.api_socket = "/run/gpushare-api/api.sock"
"""


class Broker(Systemd):
    """A systemd with the broker's units."""

    api_socket = Path("run/gpushare-api/api.sock")

    def __init__(self, folder: Path) -> None:
        self.port = free_ports()
        super().__init__(folder)

    def write_units(self, units: Path) -> None:
        super().write_units(units)
        for name in (BROKER, "gpushare-broker.socket"):
            shutil.copy(UNITS / name, units)
            (units / f"{name}.d").mkdir()
        (self.folder / "broker_config.py").write_text(_CONFIG)
        (units / f"{BROKER}.d" / "test.conf").write_text(
            "[Service]\nUser=root\nGroup=root\nProtectHome=no\nEnvironmentFile=\nExecStartPre=\nExecStart=\n"
            f"ExecStart={sys.executable} -m jupyter_gpushare.cli broker"
            " --config /run/gpushare-test/broker_config.py\n"
            f"Environment=JUPYTERHUB_API_TOKEN=token JUPYTERHUB_SERVICE_URL=http://127.0.0.1:{self.port}\n"
            f"StandardError=append:{self.folder}/broker.log\n"
        )
        (units / "gpushare-broker.socket.d" / "test.conf").write_text(
            f"[Socket]\nListenStream=\nListenStream=/{self.api_socket}\nListenStream=127.0.0.1:{self.port}\n"
        )

    def of(self, *names: str) -> list[str]:
        """Properties of the broker's unit."""
        return self.properties(BROKER, *names)

    @property
    def broker_pid(self) -> int:
        """The broker's pid, as this process knows it; 0: it does not run."""
        try:
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.pids(BROKER)}
        except OSError:
            return 0
        return next((pid for pid, command in commands.items() if b"\0broker\0" in command), 0)

    def health(self) -> dict[str, object]:
        """The broker's answer over TCP; the request waits for a broker that restarts."""
        url = f"http://127.0.0.1:{self.port}{HEALTH}"
        return httpx.get(url, trust_env=False, timeout=PATIENCE_S).json()

    def health_by_socket(self) -> dict[str, object]:
        path = Path(f"/proc/{self.pid}/root") / self.api_socket
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE_S) as client:
            return client.get(f"http://localhost{HEALTH}").json()

    def said(self) -> str:
        """The broker's log."""
        return (self.folder / "broker.log").read_text()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Broker]:
    with Broker.booted(tmp_path) as made:
        yield made


def cannot_be_taken(port: int) -> None:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))


def test_the_first_request_starts_the_broker_and_the_port_is_never_free_again(systemd: Broker) -> None:
    systemd.run("start", "gpushare-broker.socket")
    assert systemd.of("ActiveState") == ["inactive"]
    cannot_be_taken(systemd.port)
    assert systemd.health()["sockets_inherited"] is True
    assert systemd.health_by_socket()["sockets_inherited"] is True
    assert systemd.of("ActiveState", "SubState", "Type") == ["active", "running", "notify"]
    epochs = [systemd.health()["epoch"]]
    for end in ("restart", "SIGKILL", "SIGTERM"):
        before = systemd.broker_pid
        if end == "restart":
            systemd.run("restart", "--no-block", BROKER)
        else:
            os.kill(before, signal.Signals[end])
        while systemd.broker_pid in (0, before):
            cannot_be_taken(systemd.port)
            time.sleep(0.005)
        cannot_be_taken(systemd.port)
        health = systemd.health()
        assert health["sockets_inherited"] is True
        epochs.append(health["epoch"])
    assert epochs == [1, 2, 3, 4]
    assert systemd.of("NRestarts") == ["2"]
    assert "bound its port itself" not in systemd.said()


def test_start_returns_once_the_broker_answers_and_stop_keeps_the_port(systemd: Broker) -> None:
    systemd.run("start", BROKER)  # Type=notify; its Requires= starts the sockets
    assert systemd.of("ActiveState", "StatusErrno") == ["active", "0"]
    assert systemd.health()["epoch"] == 1
    systemd.run("stop", BROKER)
    assert systemd.of("Result", "ExecMainStatus") == ["success", "0"]
    cannot_be_taken(systemd.port)


def test_a_broker_that_hangs_is_killed_and_replaced(systemd: Broker) -> None:
    systemd.run("start", BROKER)
    hung = systemd.broker_pid
    os.kill(hung, signal.SIGSTOP)
    until(lambda: systemd.broker_pid not in (0, hung), "systemd replaces it")
    cannot_be_taken(systemd.port)
    assert systemd.health()["epoch"] == 2
    assert systemd.of("NRestarts") == ["1"]
