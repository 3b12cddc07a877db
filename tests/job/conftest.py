"""Run the job runner as a process, with a fake Hub and a fake broker."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from jupyter_gpushare.hub import GPUShareSimpleSpawner
from tests.forks import Forked, Forks, forks
from tests.json_server import JsonServer, Request
from tests.ports import free_ports
from tests.waiting import PATIENCE_S
from tests.waiting import until as wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
SERVER_TOKEN = "token-of-the-server"
OWNER_TOKEN = "token-of-the-owner"
STRANGER_TOKEN = "token-of-a-stranger"
PREFIX = "/user/ada/j0123456789-1/"
RUN = "import sys; from jupyter_gpushare.job.runner import main; sys.exit(main())"
SCOPE = "access:servers!server=ada/j0123456789-1"


@dataclass
class HubAndBroker:
    """Hub and broker on one port: tokens and activity below /hub/api, reports below the broker's prefix."""

    port: int = field(default_factory=free_ports)
    reports: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    activity: list[dict[str, Any]] = field(default_factory=list)
    broker_down: bool = False
    outcome: dict[str, Any] = field(
        default_factory=lambda: {"state": "succeeded", "reason": "It ran to its end."}
    )
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._server = JsonServer(self.port, self.answer, self.tls)

    def close(self) -> None:
        self._server.close()

    def answer(self, request: Request) -> tuple[int, Any]:
        path, body, token = request.path, request.body, request.token
        if path == "/hub/api/user":
            scopes = {OWNER_TOKEN: [SCOPE], STRANGER_TOKEN: ["access:servers!server=bo/"]}.get(token)
            return (
                (200, {"name": "x", "kind": "user", "scopes": scopes}) if scopes else (403, {"message": "no"})
            )
        if path.endswith("/activity"):
            self.activity.append(body)
            return 200, {}
        if self.broker_down or token != SERVER_TOKEN:
            return 503, {"status": 503, "reason": "down", "message": "down"}
        self.paths.append(path)
        self.reports.append(body)
        return (200, self.outcome) if body["state"] in ("stopping", "ended") else (204, None)

    def reported(self, state: str) -> dict[str, Any] | None:
        return next((report for report in self.reports if report["state"] == state), None)


@dataclass
class Job:
    """One runner process."""

    home: Path
    port: int
    others: HubAndBroker
    process: subprocess.Popen[bytes] | Forked
    id: str = "0123456789"

    @property
    def folder(self) -> Path:
        return self.home / ".local/share/gpushare/jobs" / self.id

    @property
    def log(self) -> str:
        path = self.folder / "attempt-1.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "attempt-1.json").read_text()))

    @property
    def state(self) -> str:
        """Return the state in the job's record, or "" without a record."""
        return str(self.record["state"]) if (self.folder / "attempt-1.json").exists() else ""

    def get(self, path: str = "", token: str | None = None) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"token {token}"}
        return httpx.get(f"http://127.0.0.1:{self.port}{PREFIX}{path}", headers=headers, trust_env=False)

    def probe(self) -> None:
        """Send the request that the Hub sends after it started a server."""

        def up() -> bool:
            assert self.process.poll() is None, "the runner ended before the Hub saw it"
            try:
                return self.get("api").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(up, "the runner answers")

    def ended(self) -> dict[str, Any]:
        """Return the final report to the broker; the runner then stays for a moment."""
        report: dict[str, Any] = wait_for(lambda: self.others.reported("ended"), "the end is reported")
        return report

    def exited(self) -> int:
        """Return the exit code of the runner itself."""
        return self.process.wait(PATIENCE_S)

    def printed(self, text: str) -> None:
        wait_for(lambda: text in self.log, f"{text!r} in the log")


Start = Callable[..., Job]


def mounted(mount: str, home: Path) -> list[str]:
    """Return a command prefix that mounts a disk at ``home``; skip the test if no disk can be mounted."""
    script = f'mount --make-rprivate / && {mount} && cd "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(home)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a private mount namespace needs root (CAP_SYS_ADMIN): {tried.stderr[-300:]}")
    return command


@pytest.fixture
def others() -> Iterator[HubAndBroker]:
    both = HubAndBroker()
    yield both
    both.close()


@pytest.fixture(scope="session")
def runners() -> Iterator[Forks]:
    """Yield forks for runners, without the time for imports, which take longer than most tests."""
    with forks("import jupyter_gpushare.job.runner", os.environ) as made:
        yield made


@pytest.fixture
def start(tmp_path: Path, others: HubAndBroker, runners: Forks) -> Iterator[Start]:
    """Start a runner for a command; it ends with the test.

    The runner is a fork, which runs the code ``first`` before; with ``program`` it is the program that the
    Hub starts.  ``mount`` is a script that mounts a disk at the home "$0", in a new mount namespace.
    """
    jobs: list[Job] = []

    def run(
        *command: str,
        probe: bool = True,
        program: bool = False,
        first: str = "",
        mount: str = "",
        runner_env: dict[str, str] | None = None,
        **spec: Any,
    ) -> Job:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        # The helper of another test takes a lease without a folder for its own.
        lease = tmp_path / "lease"
        lease.mkdir(exist_ok=True)
        (lease / "limit").touch()
        port = free_ports()
        address = f"http://127.0.0.1:{others.port}"
        job = {
            "id": "0123456789",
            "attempt": 1,
            "name": "train",
            "command": list(command),
            "cwd": None,
            "env": {},
            "grace_s": 20.0,
            **spec,
        }
        env = {
            "PATH": os.environ["PATH"],
            "GPUSHARE_TEST_RUN": os.environ.get("GPUSHARE_TEST_RUN", ""),
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(home),
            "GPUSHARE_JOB": json.dumps(job),
            "GPUSHARE_API_URL": f"{address}/services/gpushare/api/v1",
            "GPUSHARE_LEASE": "j0123456789-1",
            "GPUSHARE_LEASE_DIR": str(lease),
            "CUDA_VISIBLE_DEVICES": "GPU-1",
            "JUPYTERHUB_API_TOKEN": SERVER_TOKEN,
            "JPY_API_TOKEN": SERVER_TOKEN,
            "JUPYTERHUB_USER": "ada",
            "JUPYTERHUB_SERVER_NAME": "j0123456789-1",
            "JUPYTERHUB_API_URL": f"{address}/hub/api",
            "JUPYTERHUB_ACTIVITY_URL": f"{address}/hub/api/users/ada/activity",
            "JUPYTERHUB_BASE_URL": "/",
            "JUPYTERHUB_CLIENT_ID": "jupyterhub-user-ada-j0123456789-1",
            "JUPYTERHUB_OAUTH_CALLBACK_URL": f"{PREFIX}oauth_callback",
            "JUPYTERHUB_OAUTH_ACCESS_SCOPES": json.dumps([SCOPE, "access:servers!user=ada"]),
            "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port}{PREFIX}",
            **(runner_env or {}),
        }
        process: subprocess.Popen[bytes] | Forked
        if program or mount:
            started_by_hub = GPUShareSimpleSpawner().job_cmd
            if mount:
                started_by_hub = [*mounted(mount, home), *started_by_hub]
            process = subprocess.Popen(started_by_hub, env=env, cwd=home, start_new_session=True)
        else:
            process = runners.start(first + RUN, env=env, cwd=home)
        jobs.append(Job(home, port, others, process, str(job["id"])))
        if probe:
            jobs[-1].probe()
        return jobs[-1]

    yield run
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
