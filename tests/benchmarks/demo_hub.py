"""A demo Hub for a benchmark, used through the Hub's REST API.

The configuration is the demo's, with a stub instead of JupyterLab and a service
that may do everything; extra lines make the difference between two Hubs.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e import demo

TOKEN = "0123456789abcdef-benchmark"

CONFIG = f"""
import sys
# -P: else the benchmark fractions.py of this folder stands before Python's module.
c.Spawner.cmd = [sys.executable, "-P", {str(Path(__file__).with_name("stub_server.py"))!r}]
c.JupyterHub.services.append({{"name": "benchmark", "api_token": {TOKEN!r}}})
c.JupyterHub.load_roles.append({{
    "name": "benchmark",
    "services": ["benchmark"],
    "scopes": [
        "admin:users", "admin:groups", "admin:servers", "tokens", "access:services", "custom:gpushare:jobs",
    ],
}})
"""


class Users:
    """The users of a Hub with `CONFIG`, whose broker listens three ports above its proxy."""

    def __init__(self, url: str, port: int) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"token {TOKEN}"}, timeout=60)
        self.broker_url = f"http://127.0.0.1:{port + 3}/services/gpushare/api/v1/"

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Return the Hub's answer (JSON), failing on anything but success."""
        answer = self.http.request(method, f"/hub/api/{path}", **options)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def broker(self, user: str) -> httpx.Client:
        """Return a client of the broker's API as ``user``."""
        scopes = ["access:services!service=gpushare", "custom:gpushare:jobs", "access:servers!user"]
        token = self.ask("POST", f"users/{user}/tokens", json={"scopes": scopes})["token"]
        headers = {"Authorization": f"token {token}"}
        return httpx.Client(base_url=self.broker_url, headers=headers, timeout=60)

    def add(self, user: str, group: str) -> None:
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
        """Return the Hub's model of a user's server, or an empty one without a server."""
        return dict(self.ask("GET", f"users/{user}")["servers"].get("", {}))

    def hold(self, user: str) -> None:
        """Let a user's server take 1 GiB of GPU memory."""
        self.http.get(f"{self.server(user)['url']}hold", params={"bytes": 1 << 30}).raise_for_status()


class DemoHub(Users):
    """The users of a demo Hub, and its processes."""

    def __init__(self, hub: demo.DemoHub) -> None:
        super().__init__(hub.url, hub.port)
        self._hub = hub

    @property
    def process(self) -> psutil.Process:
        """Return the process of the Hub."""
        (found,) = (each for each in self._hub.processes() if "jupyterhub" in each.info["cmdline"])
        return found

    def worker(self, verb: str) -> psutil.Process:
        """Return the working process of a subcommand, not its parent with --respawn."""
        of_verb = [each for each in self._hub.processes() if verb in each.info["cmdline"]]
        (found,) = (each for each in of_verb if "--respawn" not in each.info["cmdline"])
        return found


def until(
    condition: Callable[[], object], what: str, *, pause_s: float = 0.05, patience_s: float = 60
) -> None:
    """Return when ``condition`` is true; end the benchmark if that takes too long."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"gave up waiting: {what}")
        time.sleep(pause_s)


@contextlib.contextmanager
def demo_hub(*, simulate: str, extra: str = "") -> Iterator[DemoHub]:
    """Yield a demo Hub on free ports and in a fresh folder; remove everything afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpushare-benchmark-") as folder:
        hub = demo.DemoHub(Path(folder), idle_timeout_s=900, site=CONFIG + extra, simulate=simulate)
        try:
            hub.start()
            yield DemoHub(hub)
        finally:
            hub.stop()
            hub.kill_leftovers()
