"""A demo Hub of its own for a benchmark, asked through the Hub's REST API.

The configuration is the demo's, with a stub in place of JupyterLab and a service
that may do everything; what differs between two Hubs is given as lines of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef-benchmark"
STARTS_S = 90.0

CONFIG = f"""
load_subconfig({str(ROOT / "jupyterhub_config.py")!r})
c.Spawner.cmd = [{sys.executable!r}, {str(Path(__file__).with_name("stub_server.py"))!r}]
c.JupyterHub.log_level = "WARN"
c.JupyterHub.services.append({{"name": "benchmark", "api_token": {TOKEN!r}}})
c.JupyterHub.load_roles.append({{
    "name": "benchmark",
    "services": ["benchmark"],
    "scopes": [
        "admin:users", "admin:groups", "admin:servers", "tokens", "access:services", "custom:gpushare:jobs",
    ],
}})
"""


@dataclass(slots=True)
class DemoHub:
    """A running Hub and what is needed to ask it."""

    process: psutil.Process
    http: httpx.Client
    port: int
    folder: Path

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Return the Hub's answer (JSON), failing on anything but success."""
        answer = self.http.request(method, f"/hub/api/{path}", **options)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def token_of(self, user: str) -> str:
        """Return a new token with which the broker takes us for ``user``."""
        scopes = ["access:services!service=gpushare", "custom:gpushare:jobs", "access:servers!user"]
        made = self.ask("POST", f"users/{user}/tokens", json={"scopes": scopes})
        return str(made["token"])

    def broker(self, user: str) -> httpx.Client:
        """Return a client of the broker's API as ``user``."""
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port + 3}/services/gpushare/api/v1/",
            headers={"Authorization": f"token {self.token_of(user)}"},
            timeout=60,
        )

    def add_user(self, user: str, group: str) -> None:
        """Make a user and a member of a project."""
        self.ask("POST", f"users/{user}")
        self.ask("POST", f"groups/{group}/users", json={"users": [user]})

    def start(self, user: str, options: dict[str, Any]) -> float:
        """Start a server; returns the seconds until it was ready."""
        before = time.perf_counter()
        self.ask("POST", f"users/{user}/server", json={"user_options": options})
        until(lambda: self.server(user).get("ready"), f"{user}'s server is ready", pause_s=0.005)
        return time.perf_counter() - before

    def stop(self, user: str) -> None:
        """Stop a server and wait until it is gone."""
        self.ask("DELETE", f"users/{user}/server")
        until(lambda: not self.server(user), f"{user}'s server is gone")

    def server(self, user: str) -> dict[str, Any]:
        """Return what the Hub says about a user's server; empty: there is none."""
        return dict(self.ask("GET", f"users/{user}")["servers"].get("", {}))

    def processes(self, word: str) -> list[psutil.Process]:
        """Return the processes below this Hub with ``word`` in their command line."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    found.append(process)
        return found


def until(
    condition: Callable[[], object], what: str, *, pause_s: float = 0.05, patience_s: float = 60
) -> None:
    """Return when ``condition`` is true; ends the benchmark when that takes too long."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"gave up waiting: {what}")
        time.sleep(pause_s)


@contextlib.contextmanager
def demo_hub(*, simulate: str, idle_timeout_s: float = 900, extra: str = "") -> Iterator[DemoHub]:
    """A demo Hub on ports and in a folder of its own; everything is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpushare-benchmark-") as name:
        folder, port = Path(name), free_ports(4)
        config = folder / "jupyterhub_config.py"
        # The broker reads the demo's own file; the helper's and broker's folders follow from the environment.
        config.write_text(CONFIG + extra)
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GPUSHARE_DEMO_PORT": str(port),
            "GPUSHARE_DEMO_DIR": str(folder / "state"),
            "GPUSHARE_DEMO_IDLE_TIMEOUT": str(idle_timeout_s),
            "GPUSHARE_SIMULATE": simulate,
        }
        with (folder / "log").open("wb") as log:
            hub = subprocess.Popen(
                ["env", "--default-signal=INT", sys.executable, "-m", "jupyterhub", "-f", str(config)],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
            http = httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"token {TOKEN}"}, timeout=60
            )
            running = DemoHub(psutil.Process(hub.pid), http, port, folder)
            try:
                until(
                    lambda: _healthy(running) or hub.poll() is not None,
                    "the Hub answers",
                    patience_s=STARTS_S,
                )
                if hub.poll() is not None:
                    raise SystemExit((folder / "log").read_text())
                yield running
            finally:
                hub.send_signal(signal.SIGINT)
                hub.wait(60)


def _healthy(hub: DemoHub) -> bool:
    broker = f"http://127.0.0.1:{hub.port + 3}/services/gpushare/api/v1/health"
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(broker).status_code == 200 and hub.http.get("/hub/api/").status_code == 200
    return False
