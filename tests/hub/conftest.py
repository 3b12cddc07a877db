"""A real JupyterHub as a process, with a broker and single-user servers that the tests control.

No proxy runs: `MemoryProxy` only stores routes, and the tests send requests directly to the Hub
and to the servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jupyterhub
import pytest

from tests.forks import Forked
from tests.hub.fake_broker import SPAWNER_TOKEN, FakeBroker
from tests.hub.forked_hubs import fork_hub, hubs_are_forks
from tests.ports import free_ports
from tests.waiting import PATIENCE_S
from tests.waiting import until as wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ADMIN_TOKEN = "admin-token-of-the-tests"
HUB_6 = jupyterhub.version_info[0] >= 6


__all__ = ["hubs_are_forks"]  # a fixture


# ---- the Hub -----------------------------------------------------------------

CONFIG = """
import os, sys
sys.path.insert(0, {here!r})
from memory_proxy import MemoryProxy
c = get_config()
c.JupyterHub.proxy_class = MemoryProxy
c.JupyterHub.bind_url = "http://127.0.0.1:{public_port}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.allow_named_servers = True
c.JupyterHub.cleanup_servers = True
c.JupyterHub.load_groups = {{"vision": {{"users": ["ada", "cy"]}}, "nlp": {{"users": ["cy"]}}}}
c.JupyterHub.custom_scopes = {{"custom:gpushare:jobs": {{"description": "Submit jobs"}}}}
user_scopes = ["custom:gpushare:jobs", "access:services!service=gpushare"]
c.JupyterHub.extra_user_scopes = set(user_scopes)
c.JupyterHub.services = [
    {{"name": "tests", "api_token": "{admin_token}"}},
    {{"name": "gpushare", "api_token": "token-of-the-broker"}},
]
c.JupyterHub.load_roles = [
    {{
        "name": "tests",
        "services": ["tests"],
        "scopes": ["admin:users", "admin:servers", "tokens", "access:servers"],
    }}
]
import jupyterhub
if jupyterhub.version_info[0] < 6:  # knows no extra_user_scopes
    c.JupyterHub.load_roles.append({{"name": "user", "scopes": ["self", *user_scopes]}})
c.JupyterHub.spawner_class = "{spawner}"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/home/{{username}}"
c.Spawner.cmd = [{python!r}, {stub!r}]
c.Spawner.poll_interval = 1
c.Spawner.start_timeout = 20
c.Spawner.http_timeout = 20
c.Spawner.consecutive_failure_limit = 2
c.LocalProcessSpawner.interrupt_timeout = 2
c.Spawner.environment = {{"PYTHONPATH": {repository!r}}}
c.GPUShareMixin.broker_url = {broker_url!r}
c.GPUShareMixin.broker_token_file = "{folder}/spawner-token"
c.GPUShareMixin.broker_timeout_s = 3
c.GPUShareMixin.offers_timeout_s = 1
"""


@dataclass
class Hub:
    folder: Path
    port: int
    broker: FakeBroker
    config: Path
    process: subprocess.Popen[bytes] | Forked | None = None
    tls: ssl.SSLContext | None = None  # for requests to the Hub's internal TLS
    interpreter: Sequence[str] = (sys.executable,)  # what runs the Hub's module
    may_fork: bool = True  # False: always a separate program (forked_hubs.py)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.launch()
        wait_for(self._answers, "the Hub answers", log=self.folder / "hub.log")

    def launch(self, tracing: Sequence[str] = ()) -> None:
        """Start the Hub and do not wait; ``tracing`` is a prefix of its command and keeps its pid."""
        # Another JupyterHub on PYTHONPATH (test_hub_5_5.py) is the one of the test and of its Hub.
        path = os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
        env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        # A test runner in the background of a script ignores SIGINT.
        command = [*("env", "--default-signal=INT"), *self.interpreter, "-m", "jupyterhub", "-f", self.config]
        with (self.folder / "hub.log").open("ab") as log:
            if not tracing and self.may_fork and self.interpreter == (sys.executable,):
                self.process = fork_hub(self.config, env, self.folder, log)
                if self.process is not None:
                    return
            self.process = subprocess.Popen(
                [*tracing, *command], cwd=self.folder, env=env, stdout=log, stderr=log
            )

    def _answers(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            pytest.fail(f"the Hub ended:\n{self.log()[-3000:]}")
        try:
            answer = httpx.get(f"{self.url}/hub/api/", trust_env=False, verify=self.tls or True)
            return answer.status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return (self.folder / "hub.log").read_text(errors="replace")

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def api(self, method: str, path: str, body: Any = None, token: str = ADMIN_TOKEN) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.url}/hub/api/{path}",
            json=body,
            headers={"Authorization": f"token {token}"},
            timeout=PATIENCE_S,
            trust_env=False,
            verify=self.tls or True,
        )

    def start_server(
        self, user: str, gpushare: Any = None, name: str = "", token: str = ADMIN_TOKEN
    ) -> httpx.Response:
        options = {} if gpushare is None else {"gpushare": gpushare}
        # JupyterHub 5.5 takes the body itself for the options.
        body = {"user_options": options} if HUB_6 else options
        return self.api("POST", self._server(user, name), body, token)

    def _server(self, user: str, name: str) -> str:
        return f"users/{user}/servers/{name}" if name else f"users/{user}/server"

    def stop_server(self, user: str, name: str = "", remove: bool = False) -> None:
        # 400: it is being started or stopped just now.
        def asked() -> bool:
            return self.api(
                "DELETE", self._server(user, name), {"remove": True} if remove else None
            ).status_code in (202, 204, 404)

        what = f"the server {name!r} of {user}"
        wait_for(asked, f"the Hub stops {what}")
        wait_for(lambda: not self.server(user, name), f"{what} is gone")

    def stop_servers(self) -> None:
        """Stop all servers and reset the broker's answers for the next test."""
        self.broker.reset()
        for user in self.api("GET", "users?include_stopped_servers").json():
            for name, server in user["servers"].items():
                if not server.get("stopped"):
                    self.stop_server(user["name"], name, remove=bool(name))

    def server(self, user: str, name: str = "") -> dict[str, Any] | None:
        """Return the Hub's model of a server that is not stopped."""
        model = self.api("GET", f"users/{user}?include_stopped_servers").json()
        found: dict[str, Any] | None = model.get("servers", {}).get(name)
        return found if found is not None and not found.get("stopped") else None

    def wait_ready(self, user: str, name: str = "") -> dict[str, Any]:
        def ready() -> dict[str, Any] | None:
            found = self.server(user, name)
            return found if found is not None and found["ready"] else None

        return dict(wait_for(ready, f"the server {name!r} of {user} is ready"))

    def environment(self, user: str) -> dict[str, str]:
        """Return the environment with which the running server of a user was started."""
        pid = self.state(user)["pid"]
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    def state(self, user: str, name: str = "") -> dict[str, Any]:
        """Return the state that the Hub stores for a running server."""
        state, _ = self._stored(user, name)
        return dict(json.loads(state)) if state else {}

    def port_of(self, user: str, name: str) -> int:
        """Return the port of a running server."""
        _, port = self._stored(user, name)
        return int(port)

    def _stored(self, user: str, name: str) -> tuple[Any, Any]:
        """Return state and port of a server from the Hub's database, or None without a server."""
        with contextlib.closing(sqlite3.connect(self.folder / "hub.sqlite")) as db:
            row = db.execute(
                "select s.state, servers.port from spawners s join users u on u.id = s.user_id"
                " left join servers on servers.id = s.server_id where u.name = ? and s.name = ?",
                (user, name),
            ).fetchone()
        return row or (None, None)

    def set_state(self, user: str, state: dict[str, Any]) -> None:
        """Change the state that a stopped Hub stores for a default server."""
        with contextlib.closing(sqlite3.connect(self.folder / "hub.sqlite")) as db:
            db.execute(
                "update spawners set state = ? where name = ''"
                " and user_id = (select id from users where name = ?)",
                (json.dumps(state), user),
            )
            db.commit()

    def ensure_user(self, user: str) -> None:
        self.api("POST", f"users/{user}", {})

    def made_at(self, user: str) -> str:
        """Return when the Hub created a user; its spawner sends the same time without a zone."""
        return str(self.api("GET", f"users/{user}").json()["created"]).removesuffix("Z")

    def user_token(self, user: str) -> str:
        self.ensure_user(user)
        return str(self.api("POST", f"users/{user}/tokens", {}).json()["token"])

    @contextlib.contextmanager
    def browser(self, user: str) -> Iterator[httpx.Client]:
        """Yield a client that is logged in."""
        with httpx.Client(
            base_url=self.url, timeout=PATIENCE_S, follow_redirects=True, trust_env=False
        ) as client:
            page = client.get("/hub/login")
            xsrf = re.search(r'name="_xsrf"\s+value="([^"]+)"', page.text)
            assert xsrf is not None
            fields = {"username": user, "password": "x", "_xsrf": xsrf[1]}
            # The page after a login would start a server.
            assert client.post("/hub/login", data=fields, follow_redirects=False).status_code == 302
            yield client

    def submit_form(self, client: httpx.Client, user: str, fields: dict[str, str]) -> httpx.Response:
        page = client.get(f"/hub/spawn/{user}")
        action = re.search(r'action="([^"]+)"\s+method="post"', page.text)
        assert action is not None, page.text
        return client.post(action[1].replace("&amp;", "&"), data=fields, follow_redirects=False)


@contextlib.contextmanager
def running_hub(
    spawner: str,
    folder: Path,
    python: str = sys.executable,
    extra: str = "",
    interpreter: Sequence[str] = (sys.executable,),
    user: str = "",
    may_fork: bool = True,
) -> Iterator[Hub]:
    """Yield a working Hub; ``user`` owns the files that the Hub reads and writes."""
    # A job's runner trusts no socket below a folder of another user.
    broker = FakeBroker((folder.parent if user else folder) / "broker" / "api.sock")
    token = folder / "spawner-token"
    token.write_text(SPAWNER_TOKEN)
    token.chmod(0o600)
    stub = folder / "stub_server.py"
    shutil.copy(HERE / "stub_server.py", stub)
    port = free_ports()
    config = folder / "config.py"
    text = CONFIG.format(
        here=str(HERE),
        folder=folder,
        port=port,
        public_port=free_ports(),
        broker_url=broker.url,
        admin_token=ADMIN_TOKEN,
        spawner=spawner,
        python=python,
        stub=str(stub),
        repository=str(REPOSITORY),
    )
    config.write_text(text + extra)
    hub = Hub(folder, port, broker, config, interpreter=interpreter, may_fork=may_fork)
    broker.up()
    for path in (folder, token, config) if user else ():
        shutil.chown(path, user)
    try:
        hub.start()
        yield hub
    finally:
        hub.stop()
        broker.down()


@pytest.fixture(scope="session")
def shared_hub() -> Iterator[Hub]:
    with (
        tempfile.TemporaryDirectory(prefix="gpushare-hub-") as folder,
        running_hub(SIMPLE, Path(folder)) as hub,
    ):
        yield hub


@pytest.fixture
def hub(shared_hub: Hub) -> Iterator[Hub]:
    """Yield a Hub without servers, with a broker that has its usual answers; tests share it for speed."""
    shared_hub.broker.reset()
    if not shared_hub.alive():
        shared_hub.start()
    yield shared_hub
    shared_hub.stop_servers()


SIMPLE = "jupyter_gpushare.hub.GPUShareSimpleSpawner"
LOCAL = "jupyter_gpushare.hub.GPUShareLocalSpawner"
