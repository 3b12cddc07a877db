"""A whole site of real processes that tests may kill: broker, device helper, Hub, servers, jobs.

Only the GPUs are simulated, and the Hub has no proxy.  `Site.look` restarts each process that has
ended, as its parent would do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from jupyter_gpushare.channel import unix_url
from tests.hub.conftest import ADMIN_TOKEN, CONFIG, Hub
from tests.hub.fake_broker import FakeBroker
from tests.ports import free_ports
from tests.simulator import Simulator
from tests.waiting import PATIENCE_S, until

HERE = Path(__file__).resolve().parent
CLI = [sys.executable, "-m", "jupyter_gpushare.cli"]
PREFIX = "/services/gpushare/"
SPEC = "2xH100-80GB,host=512GiB,checkpoint=any-uid"
# Of each GPU's 80 GiB: two that hold so much do not fit on one.
SESSION_MIB = 44 * 1024

# System calls with effects outside the process, or that wait; Python's imports make few of them.
SYSTEM_CALLS = (
    "write writev pwrite64 fsync fdatasync ftruncate rename renameat2 unlink unlinkat mkdir rmdir connect "
    "bind listen accept4 sendto sendmsg recvfrom recvmsg epoll_wait epoll_pwait poll pselect6 clone3 flock "
    "pidfd_open pidfd_send_signal"
)
# Not every architecture has all of them ("?").
_TRACED = ",".join(f"?{name}" for name in SYSTEM_CALLS.split())

HUB = """
c.JupyterHub.cleanup_servers = False
c.JupyterHub.load_roles.append({{
    "name": "gpushare-broker",
    "services": ["gpushare"],
    "scopes": ["list:users", "read:users", "read:groups", "read:servers", "servers", "delete:servers"],
}})
c.JupyterHub.load_roles.append({{
    "name": "gpushare-admin",
    "users": ["root"],
    "scopes": ["custom:gpushare:admin", "access:services!service=gpushare"],
}})
c.JupyterHub.load_groups = {{"vision": {{"users": ["ada"]}}, "nlp": {{"users": ["bo"]}}}}
c.JupyterHub.custom_scopes["custom:gpushare:admin"] = {{"description": "See all"}}
c.JupyterHub.active_server_limit = c.JupyterHub.concurrent_spawn_limit = 0
c.Spawner.cmd = [sys.executable, {session!r}, "{mib}"]
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
c.Spawner.consecutive_failure_limit = 0
c.Spawner.environment = {driver!r}
c.GPUShareMixin.broker_timeout_s = 60
"""
BROKER = """
c.GPUShareBroker.state_dir = {state!r}
c.GPUShareBroker.projects = {{
    "vision": {{"quota": 1, "groups": ["vision"]}},
    "nlp": {{"quota": 1, "groups": ["nlp"]}},
}}
c.GPUShareBroker.idle_timeout = 1
c.GPUShareBroker.grace = 5
"""


class Trace:
    """Kills a process at a system call, with strace, which writes a line for each call to ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size, self._grew_at = 0, 0.0

    def command(self, die_at: int, *follow: str) -> list[str]:
        """Return the prefix for a command that is killed at the ``die_at``-th system call of a thread.

        ``follow`` is ``-f`` for any of its threads and children, or ``-D`` for its first thread, without
        strace as the parent.  There is no ``--seccomp-bpf``: strace 6.1 delivers no signal with it.
        """
        self._path.write_bytes(b"")
        self._size, self._grew_at = 0, time.monotonic()
        kill = f"inject={_TRACED}:signal=KILL:when={die_at}"
        return ["strace", *follow, "-qq", "-o", str(self._path), "-e", f"trace={_TRACED}", "-e", kill]

    def check(self) -> None:
        """Fail after `PATIENCE_S` without a system call; while calls arrive, the fatal one may still come."""
        if (size := self._path.stat().st_size) != self._size:
            self._size, self._grew_at = size, time.monotonic()
        assert time.monotonic() < self._grew_at + PATIENCE_S, f"no system call for {PATIENCE_S:g} s"


@dataclass
class Service:
    """A process that is restarted whenever it has ended."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    trace: Trace | None = None  # of the running process, if it has to die at a system call

    def start(self, die_at: int = 0) -> None:
        """Start the process; it is killed at the ``die_at``-th system call of one of its threads."""
        self.trace = Trace(self.log.with_name(f"calls-{self.name}")) if die_at else None
        tracing = self.trace.command(die_at, "-f") if self.trace else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*tracing, *self.command], env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)

    def has_ended(self) -> bool:
        """Return whether the process ended since the last call; broker and helper may end only by SIGKILL."""
        if self.process is None or self.process.poll() is None:
            return False
        status, self.process = self.process.returncode, None
        assert status in (-signal.SIGKILL, 128 + signal.SIGKILL), (
            f"{self.name} ended: {status}\n{self.tail()}"
        )
        return True

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Site:
    """The processes, and the folder that outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sim = Simulator(folder, SPEC)
        state = folder / "broker"
        state.mkdir(mode=0o700)
        self.api_socket = state / "api.sock"
        driver = {k: v for k, v in self.sim.env().items() if k.startswith(("GPUSHARE_", "LD_", "PYTHONPATH"))}
        (folder / "spawner-token").write_text("spawner-secret")
        (folder / "spawner-token").chmod(0o600)
        shutil.copy(folder / "spawner-token", state / "spawner-token")
        config = folder / "config.py"
        hub_port, port = free_ports(), free_ports()
        config.write_text(
            CONFIG.format(
                here=str(HERE.parent / "hub"),
                folder=folder,
                port=hub_port,
                public_port=free_ports(),
                broker_url=unix_url(self.api_socket, "services/gpushare"),
                admin_token=ADMIN_TOKEN,
                spawner="jupyter_gpushare.hub.GPUShareSimpleSpawner",
                python=sys.executable,
                stub="",
                repository=str(HERE.parents[1]),
            )
            + HUB.format(session=str(HERE / "session.py"), mib=SESSION_MIB, driver=driver)
        )
        self.hub = Hub(folder, hub_port, FakeBroker(folder / "no-broker"), config)
        broker_config = folder / "broker.py"
        broker_config.write_text(BROKER.format(state=str(state)))
        service = {
            "JUPYTERHUB_SERVICE_NAME": "gpushare",
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port}",
            "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
            "JUPYTERHUB_API_URL": f"http://127.0.0.1:{hub_port}/hub/api",
            "JUPYTERHUB_API_TOKEN": "token-of-the-broker",
            "JUPYTERHUB_CLIENT_ID": "service-gpushare",
            "JUPYTERHUB_HOST": "",
            "JUPYTERHUB_BASE_URL": "/",
            "JUPYTERHUB_OAUTH_ACCESS_SCOPES": json.dumps(["access:services!service=gpushare"]),
        }
        log = folder / "log"
        helper = ["helper", "--state-dir", f"{state}/helper", "--socket", f"{state}/helper.sock"]
        self.services = {
            "helper": Service("helper", [*CLI, *helper, "--sample-s", "0.5"], self.sim.env(), log),
            "broker": Service(
                "broker",
                [*CLI, "broker", "--config", str(broker_config)],
                os.environ | service,
                log,
            ),
        }
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}{PREFIX}api/v1/", trust_env=False, timeout=30
        )
        self.tokens: dict[str, str] = {}

    def start(self) -> None:
        """Start all processes, and the session of ada."""
        for service in self.services.values():
            service.start()
        self.hub.start()
        self.tokens = {user: self.hub.user_token(user) for user in ("ada", "bo", "root")}
        until(self.is_healthy, "the devices are examined", log=self.services["broker"].log)

    def is_healthy(self) -> bool:
        answer = self.ask("GET", "health")
        return answer is not None and answer.status_code == 200 and answer.json()["status"] == "ok"

    def ask(self, method: str, path: str, user: str = "root", **options: Any) -> httpx.Response | None:
        """Return the broker's answer, or None without one."""
        headers = {"Authorization": f"token {self.tokens.get(user, '')}"} | options.pop("headers", {})
        try:
            return self.http.request(method, path, headers=headers, **options)
        except httpx.TransportError:
            return None

    def answer(self, method: str, path: str, user: str = "root", status: int = 200, **options: Any) -> Any:
        """Return the broker's answer as JSON; it must have this status."""
        found = self.ask(method, path, user, **options)
        assert found is not None, self.services["broker"].tail()
        assert found.status_code == status, found.text
        return found.json()

    def close(self) -> None:
        self.http.close()
        for service in self.services.values():
            service.kill()
        self.hub.stop()
        # Servers and jobs outlive the Hub.
        for pid in self.processes_of(""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes_of(self, lease: str) -> list[int]:
        """Return the pids of the living processes of a lease, or of all servers and jobs for ""."""
        mark = f"GPUSHARE_SIM_STATE={self.sim.state_path}".encode()
        wanted = f"GPUSHARE_LEASE={lease}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                if mark in environment and (not lease or wanted in environment):
                    found.append(int(folder.name))
        return found


SomeSite = TypeVar("SomeSite", bound=Site)


@contextlib.contextmanager
def running(make: Callable[[Path], SomeSite]) -> Iterator[SomeSite]:
    """Yield a working site in a fresh folder; print the end of its broker's log afterwards."""
    # The path of a socket has at most 107 bytes; a path in pytest's folders may be longer.
    with tempfile.TemporaryDirectory(prefix="gpushare-faults-") as folder:
        site = make(Path(folder))
        try:
            site.start()
            yield site
        finally:
            site.close()
            print(site.services["broker"].tail())
