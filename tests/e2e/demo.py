"""Run a demo hub for a test, with the configuration of `make hub`, and use it as people do.

All requests go through the Hub's proxy, with real kernels and real logins.  The only
shortcut is that tests read the ledger of the simulated driver as a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import websocket

from tests import waiting
from tests.ports import free_ports
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")

# Final states of a job.
ENDED = frozenset({"succeeded", "failed", "cancelled", "timed_out"})


def until(what: str, look: Callable[[], T | None], timeout_s: float = PATIENCE_S) -> T:
    """Return the first true value of ``look``, like `waiting.until`."""
    found = waiting.until(look, what, timeout_s)
    assert found is not None
    return found


class Reached:
    """A Hub at `url`, as people reach it."""

    url: str

    @property
    def service_url(self) -> str:
        """Return the address of the broker's page, without a final slash."""
        return f"{self.url}/services/gpushare"

    def client(self, **options: Any) -> httpx.Client:
        """Return a client that reaches the Hub, the broker's page and the servers as people do."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    @contextlib.contextmanager
    def browser(self, name: str) -> Iterator[tuple[httpx.Client, str]]:
        """Yield a client that is logged in, and the page after the login: the spawn page."""
        with self.client(follow_redirects=True) as http:
            page = http.get("/hub/login").text
            xsrf = re.search(r'name="_xsrf" value="([^"]+)"', page)
            assert xsrf, page
            answer = http.post("/hub/login", data={"username": name, "password": "x", "_xsrf": xsrf.group(1)})
            assert answer.status_code == 200, answer.text
            yield http, answer.text


@dataclass
class DemoHub(Reached):
    """A demo hub that runs in a separate folder."""

    folder: Path
    idle_timeout_s: float = 8.0
    port: int = field(default_factory=lambda: free_ports(4))
    site: str = ""  # what a site adds to jupyterhub_config.py
    simulate: str = "2xH100-80GB,host=512GiB,checkpoint=any-uid"
    tree: Path = ROOT  # whose package its processes import
    _process: subprocess.Popen[bytes] | None = None
    _starts: int = 0
    _people: list[Person] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "hub.log"

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "GPUSHARE_DEMO_PORT": str(self.port),
            "GPUSHARE_DEMO_DIR": str(self.folder / "state"),
            "GPUSHARE_DEMO_IDLE_TIMEOUT": str(self.idle_timeout_s),
            "GPUSHARE_SIMULATE": self.simulate,
            **({} if self.tree == ROOT else {"PYTHONPATH": str(self.tree)}),
        }

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = ROOT / "jupyterhub_config.py"
        if self.site:
            shipped, config = config, self.folder / "jupyterhub_config.py"
            config.write_text(f"c = get_config()\nload_subconfig({str(shipped)!r})\n{self.site}")
        command = [
            "env",
            "--default-signal=INT",
            sys.executable,
            "-m",
            "jupyterhub",
            "-f",
            str(config),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._starts += 1
        until("the hub and its broker answer", self._healthy)

    def _healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.tail()
        # An old proxy may still answer for a while after the Hub was killed.
        if self.log.read_text(errors="replace").count("JupyterHub is now running") < self._starts:
            return False
        return self.is_healthy()

    def is_healthy(self) -> bool:
        """Return whether the Hub, its proxy, the broker and the device helper work."""
        try:
            with self.client() as http:
                answer = http.get(f"{self.service_url}/api/v1/health", timeout=5)
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and answer.json()["status"] == "ok"

    def tail(self, count: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    # ---- ending and killing ----------------------------------------------------

    def stop(self, within_s: float = PATIENCE_S) -> None:
        """End the hub with Ctrl-C, as `make hub` is ended."""
        for person in self._people:
            person.close()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.kill_hub()
                raise

    def kill_hub(self) -> None:
        """Kill only the Hub, with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_broker(self) -> None:
        """Kill the broker that answers, with SIGKILL; its parent restarts it."""
        for process in self.processes():
            command = process.info["cmdline"]
            if "broker" in command and "--respawn" not in command:
                process.kill()

    def kill(self, *verbs: str) -> None:
        """Kill every process of these subcommands with SIGKILL, including parents."""
        for process in self.processes():
            command = process.info["cmdline"]
            if "jupyter_gpushare.cli" in command and set(verbs) & set(command):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Return every process that belongs to this demo hub."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            if process.pid == os.getpid():
                continue
            where = (process.info["environ"] or {}).get("GPUSHARE_DEMO_DIR")
            state = (process.info["environ"] or {}).get("GPUSHARE_SIM_STATE", "")
            if where == str(self.folder / "state") or state.startswith(str(self.folder)):
                found.append(process)
        return found

    def kill_leftovers(self) -> list[str]:
        """Kill the remaining processes; return their command lines."""
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return [" ".join(p.info["cmdline"] or []) for p in left]

    # ---- the judge -------------------------------------------------------------

    def ledger(self) -> list[dict[str, Any]]:
        path = self.folder / "state" / "simulated-gpus.ledger"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def clear(self) -> None:
        """End jobs, servers and connections, undo changed quotas, and wait until each GPU is free."""
        admin = self.person("admin")
        for person in self._people:
            for job in person.ask("jobs")["jobs"]:
                if job["state"] not in ENDED:
                    person.ask(f"jobs/{job['id']}", "DELETE")

        def servers() -> list[str]:
            users = admin.http.get("/hub/api/users").json()
            return [f"{user['name']}/servers/{name}" for user in users for name in user["servers"]]

        def is_free() -> bool:
            devices = admin.ask("devices")["devices"]
            return not admin.ask("leases")["leases"] and not any(each["used_bytes"] for each in devices)

        for server in servers():
            admin.http.delete(f"/hub/api/users/{server}")
        until("no server runs", lambda: not servers())
        until("each GPU is free", is_free)
        for project in admin.ask("projects")["projects"]:
            if project["overridden"]:
                admin.ask(f"projects/{project['name']}", "DELETE")
        while self._people:
            self._people.pop().close()

    def person(self, name: str) -> Person:
        person = Person(self, name)
        self._people.append(person)
        return person


class Refused(Exception):
    """An answer 4xx of the Hub or the broker."""


class Person:
    """A user who logs in with a password and works through the proxy."""

    def __init__(self, hub: DemoHub, name: str) -> None:
        self.hub = hub
        self.name = name
        self._kernels: list[Kernel] = []
        self._terminals: list[Terminal] = []
        with hub.browser(name) as (http, self.first_page):
            hub_path = httpx.URL(hub.url).path.rstrip("/") + "/hub/"
            token = http.post(
                f"/hub/api/users/{name}/tokens",
                json={"note": "test"},
                headers={
                    "X-XSRFToken": http.cookies.get("_xsrf", path=hub_path),
                    "Referer": f"{hub.url}/hub/token",
                },
            )
            assert token.status_code in (200, 201), token.text
        self.token = token.json()["token"]
        self.http = hub.client(headers={"Authorization": f"token {self.token}"})

    # ---- servers ---------------------------------------------------------------

    def start_server(self, **options: Any) -> None:
        def accepted() -> bool:
            answer = self.http.post(f"/hub/api/users/{self.name}/server", json={"gpushare": options})
            if answer.status_code in (201, 202):
                return True
            if "cannot be reached just now" in answer.json()["message"]:
                return False  # on a slow machine people retry
            raise Refused(answer.json()["message"])

        until("the start is accepted", accepted)
        until("the server is ready", self.server_ready)

    def server_ready(self, server: str = "") -> bool:
        answer = self.http.get(f"/hub/api/users/{self.name}")
        return answer.status_code == 200 and bool(answer.json()["servers"].get(server, {}).get("ready"))

    def stop_server(self) -> None:
        self.http.delete(f"/hub/api/users/{self.name}/server")

    # ---- kernels ---------------------------------------------------------------

    def kernel(self, name: str = "python3") -> Kernel:
        answer = self.http.post(f"/user/{self.name}/api/kernels", json={"name": name})
        assert answer.status_code == 201, answer.text
        kernel = Kernel(self, answer.json()["id"])
        self._kernels.append(kernel)
        return kernel

    def terminal(self) -> Terminal:
        """Open a terminal in this person's server, as JupyterLab does."""
        answer = self.http.post(f"/user/{self.name}/api/terminals")
        assert answer.status_code == 200, answer.text
        terminal = Terminal(self, answer.json()["name"])
        self._terminals.append(terminal)
        return terminal

    def close(self) -> None:
        for kernel in self._kernels:
            kernel.disconnect()
        for terminal in self._terminals:
            terminal.disconnect()
        self.http.close()

    # ---- the broker ------------------------------------------------------------

    def ask(self, path: str, method: str = "GET", **options: Any) -> Any:
        answer = self.http.request(method, f"{self.hub.service_url}/api/v1/{path}", **options)
        if answer.status_code >= 400:
            raise Refused(f"{answer.status_code}: {answer.text}")
        return answer.json()

    def lease(self) -> dict[str, Any]:
        """Return the lease of the default server."""
        return next(x for x in self.ask("status")["leases"] if x["kind"] == "build")

    def state(self) -> str:
        return str(self.lease()["state"])

    def job(self, job_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(f"jobs/{job_id}")
        return answer

    def gpushare(
        self, *arguments: str, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line as this user, as if on another machine, with a token."""
        env = {
            **self.hub.environment(),
            "HOME": str(self.hub.folder / "state" / "home" / self.name),
            "GPUSHARE_API_URL": f"{self.hub.service_url}/api/v1",
            "GPUSHARE_API_TOKEN": self.token,
        }
        done = subprocess.run(
            [sys.executable, "-m", "jupyter_gpushare.cli", *arguments],
            env=env,
            cwd=cwd or self.hub.tree,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert not (check and done.returncode), done.stderr
        return done


class Kernel:
    """A real kernel, used as a notebook uses it: over its websocket, through the proxy."""

    def __init__(self, person: Person, kernel_id: str) -> None:
        self.person = person
        self.id = kernel_id
        self._socket: websocket.WebSocket | None = None

    def _connect(self) -> websocket.WebSocket:
        if self._socket is None:
            url = f"ws://127.0.0.1:{self.person.hub.port}/user/{self.person.name}/api/kernels/{self.id}/channels"
            self._socket = websocket.create_connection(
                url, header=[f"Authorization: token {self.person.token}"], timeout=PATIENCE_S
            )
        return self._socket

    def disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def run(self, code: str, timeout_s: float = PATIENCE_S) -> str:
        """Run a cell; return its output and value, or the last line of the traceback if it failed."""
        return self.finish(self.send(code), timeout_s)

    def send(self, code: str, allow_stdin: bool = False) -> str:
        return self._say(
            "shell",
            "execute_request",
            {
                "code": code,
                "silent": False,
                "store_history": True,
                "allow_stdin": allow_stdin,
                "stop_on_error": True,
            },
        )

    def ask_usage(self) -> None:
        """Query the kernel's resource use, as a panel of JupyterLab does every few seconds."""
        self._say("control", "usage_request", {})

    def reply(self, text: str) -> None:
        """Answer `input()` when the kernel requests it."""
        next(m for m in self._messages(PATIENCE_S) if m["header"]["msg_type"] == "input_request")
        self._say("stdin", "input_reply", {"value": text})

    def _say(self, channel: str, kind: str, content: dict[str, Any]) -> str:
        message_id = uuid.uuid4().hex
        header = {
            "msg_id": message_id,
            "msg_type": kind,
            "username": self.person.name,
            "session": "test",
            "version": "5.3",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._connect().send(json.dumps({**message, "channel": channel}))
        return message_id

    def finish(self, message_id: str, timeout_s: float = PATIENCE_S) -> str:
        said: list[str] = []
        for message in self._messages(timeout_s):
            if message.get("parent_header", {}).get("msg_id") != message_id:
                continue
            content, kind = message["content"], message["header"]["msg_type"]
            if kind == "stream":
                said.append(content["text"])
            elif kind == "execute_result":
                said.append(content["data"]["text/plain"])
            elif kind == "error":
                said.append(f"{content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(said).strip()
        raise AssertionError(f"the cell did not end within {timeout_s:.0f} s: {''.join(said)}")

    def _messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        connection = self._connect()
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                yield json.loads(connection.recv())
            except websocket.WebSocketTimeoutException:
                return


class Terminal:
    """A shell in a user's server, used over its websocket."""

    def __init__(self, person: Person, name: str) -> None:
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{person.hub.port}/user/{person.name}/terminals/websocket/{name}",
            header=[f"Authorization: token {person.token}"],
            timeout=PATIENCE_S,
        )

    def run(self, command: str, timeout_s: float = PATIENCE_S) -> str:
        """Run a command, which must end with status 0; return its output without colours."""
        mark = uuid.uuid4().hex
        # The shell echoes what is typed: the mark appears whole only in the answer.
        typed = f"{command}; echo {mark[:8]}''{mark[8:]}:$?\r"
        self._socket.send(json.dumps(["stdin", typed]))
        said, deadline = "", time.monotonic() + timeout_s
        while not (ended := re.search(rf"{mark}:(\d+)", said)):
            left = deadline - time.monotonic()
            assert left > 0, f"not within {timeout_s:.0f} s: {said}"
            self._socket.settimeout(left)
            kind, text = json.loads(self._socket.recv())[:2]
            said += text if kind == "stdout" else ""
        assert ended[1] == "0", said
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said[: ended.start()])
        return plain.replace("\r", "")

    def disconnect(self) -> None:
        self._socket.close()
