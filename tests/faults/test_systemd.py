"""The units of docs/units under a real systemd: the port is never free, and a broker that hangs is replaced.

systemd runs as process 1 of namespaces of its own, in a cgroup (v2) of its own, and knows these units
only; it shares the network.  The broker runs as root there: the interpreter of the tests may be in a
folder that no other user reaches.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

SYSTEMD = Path("/lib/systemd/systemd")
UNITS = Path(__file__).parents[2] / "docs" / "units"
HEALTH = "/services/gpushare/api/v1/health"
BROKER = "gpushare-broker.service"
# Of the machine's own units none is known here, so these stand for what ours name.
TARGETS = ("default", "basic", "sysinit", "sockets", "shutdown", "network", "multi-user")
_BOOT = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
umount --lazy /sys/fs/cgroup || true
mount -t cgroup2 none /sys/fs/cgroup
mkdir /run/gpushare-test
cp "$1"/broker_config.py /run/gpushare-test/
exec env -i PATH=/usr/bin:/bin container=test SYSTEMD_UNIT_PATH="$1"/units \
    "$2" --system --unit=default.target --log-target=kmsg --show-status=0
"""
_CONFIG = """
c.GPUShareBroker.helper_socket = "/run/gpushare/helper.sock"
c.GPUShareBroker.api_socket = "/run/gpushare-api/api.sock"
"""


class Systemd:
    """A systemd with the broker's units in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports()
        self.api_socket = Path("run/gpushare-api/api.sock")
        self._folder = folder
        self._cgroup = _cgroup2() / f"gpushare-test-{os.getpid()}"
        self._write_units()
        self._cgroup.mkdir()
        join = 'echo $$ > "$1"/cgroup.procs; shift; exec "$@"'
        own = ("unshare", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--fork", "--mount-proc")
        self._log = folder / "boot.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("bash", "-c", join, "bash", self._cgroup, *own, "--kill-child"),
                    *("bash", "-c", _BOOT, "bash", folder, SYSTEMD),
                ],
                stdout=log,
                stderr=log,
            )
        self._pid = 0

    def _write_units(self) -> None:
        units = self._folder / "units"
        units.mkdir()
        for name in TARGETS:
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
        for name in (BROKER, "gpushare-broker.socket"):
            shutil.copy(UNITS / name, units)
            (units / f"{name}.d").mkdir()
        (self._folder / "broker_config.py").write_text(_CONFIG)
        (units / f"{BROKER}.d" / "test.conf").write_text(
            "[Service]\nUser=root\nGroup=root\nProtectHome=no\nEnvironmentFile=\nExecStartPre=\nExecStart=\n"
            f"ExecStart={sys.executable} -m jupyter_gpushare.cli broker"
            " --config /run/gpushare-test/broker_config.py\n"
            f"Environment=JUPYTERHUB_API_TOKEN=token JUPYTERHUB_SERVICE_URL=http://127.0.0.1:{self.port}\n"
            f"StandardError=append:{self._folder}/broker.log\n"
        )
        (units / "gpushare-broker.socket.d" / "test.conf").write_text(
            f"[Socket]\nListenStream=\nListenStream=/{self.api_socket}\nListenStream=127.0.0.1:{self.port}\n"
        )

    def start(self) -> None:
        """Wait until it takes orders; the test is skipped where systemd cannot run."""
        until(lambda: self._process.poll() is not None or self._is_up(), "systemd takes orders")
        if self._process.poll() is not None:
            kernel = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
            said = [line for line in kernel.splitlines() if "systemd[1]" in line][-3:]
            pytest.skip(f"systemd does not run here: {self._log.read_text()[-500:]}{' / '.join(said)}")

    def _is_up(self) -> bool:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._pid = int(children[0]) if children else 0
        return bool(children) and self.run("list-units", check=False).returncode == 0

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """systemctl, beside this systemd."""
        inside = ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--cgroup", "--uts", "--ipc"]
        return subprocess.run(
            [*inside, "systemctl", "--no-pager", *arguments], capture_output=True, text=True, check=check
        )

    def of(self, *names: str) -> list[str]:
        """Properties of the broker's unit."""
        shown = self.run("show", BROKER, *(f"--property={name}" for name in names)).stdout.splitlines()
        values = dict(line.split("=", 1) for line in shown)
        return [values[name] for name in names]

    @property
    def broker_pid(self) -> int:
        """The broker's pid, as this process knows it; 0: it does not run."""
        try:
            tasks = (self._cgroup / "system.slice" / BROKER / "cgroup.procs").read_text().split()
            started = [pid for pid in tasks if b"\0broker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:
            return 0
        return int(started[0]) if started else 0

    def health(self) -> dict[str, object]:
        """The broker's answer over TCP; the request waits for a broker that restarts."""
        url = f"http://127.0.0.1:{self.port}{HEALTH}"
        return httpx.get(url, trust_env=False, timeout=PATIENCE_S).json()

    def health_by_socket(self) -> dict[str, object]:
        path = Path(f"/proc/{self._pid}/root") / self.api_socket
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE_S) as client:
            return client.get(f"http://localhost{HEALTH}").json()

    def said(self) -> str:
        """The broker's log."""
        return (self._folder / "broker.log").read_text()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # and with it process 1, and with that all others
        self._process.wait()
        until(lambda: _removed(self._cgroup), "its cgroups are removed")


def _removed(cgroup: Path) -> bool:
    for path in sorted(cgroup.rglob("*"), reverse=True):
        if path.is_dir():
            try:
                path.rmdir()
            except OSError:
                return False
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


def _cgroup2() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    pytest.skip("no cgroup (v2) is mounted here")


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    if os.geteuid() != 0:
        pytest.skip("needs root: systemd is process 1 of a namespace")
    if not SYSTEMD.exists():
        pytest.skip(f"{SYSTEMD} is not installed")
    made = Systemd(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def cannot_be_taken(port: int) -> None:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))


def test_the_first_request_starts_the_broker_and_the_port_is_never_free_again(systemd: Systemd) -> None:
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


def test_start_returns_once_the_broker_answers_and_stop_keeps_the_port(systemd: Systemd) -> None:
    systemd.run("start", BROKER)  # Type=notify; its Requires= starts the sockets
    assert systemd.of("ActiveState", "StatusErrno") == ["active", "0"]
    assert systemd.health()["epoch"] == 1
    systemd.run("stop", BROKER)
    assert systemd.of("Result", "ExecMainStatus") == ["success", "0"]
    cannot_be_taken(systemd.port)


def test_a_broker_that_hangs_is_killed_and_replaced(systemd: Systemd) -> None:
    systemd.run("start", BROKER)
    hung = systemd.broker_pid
    os.kill(hung, signal.SIGSTOP)
    until(lambda: systemd.broker_pid not in (0, hung), "systemd replaces it")
    cannot_be_taken(systemd.port)
    assert systemd.health()["epoch"] == 2
    assert systemd.of("NRestarts") == ["1"]
