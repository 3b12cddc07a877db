"""A fake broker that gives the Hub the answers that a test sets, and records the requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jupyter_gpushare.channel import unix_url
from tests.json_server import JsonServer, Request

API_PREFIX = "/services/gpushare/api/v1/"
SPAWNER_TOKEN = "spawner-secret"


@dataclass
class Asked:
    method: str
    path: str
    query: dict[str, list[str]]
    body: Any
    token: str


def project_use(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "quota_milli": 1000,
        "weight": 1,
        "limit_milli": None,
        "in_use_milli": 500,
        "borrowed_milli": 0,
        "lent_milli": 250,
        "fair_share_milli": 1000,
        "waiting": 0,
    }


def offers(project: str, projects: list[str]) -> dict[str, Any]:
    return {
        "project": project,
        "projects": projects,
        "offers": [
            {
                "label": "1/2 GPU",
                "options": {"fraction": "1/2"},
                "memory_bytes": 40 << 30,
                "starts": "now",
                "guaranteed": True,
                "device": "H100-80GB",
            },
            {
                "label": "2 GPUs",
                "options": {"gpus": 2},
                "memory_bytes": 160 << 30,
                "starts": "no",
                "guaranteed": False,
                "reason": "Only 1 GPU is free.",
                "waits": True,
                "device": "H100-80GB",
            },
        ],
        "use": project_use(project),
        "free_milli": 1000,
        "total_milli": 2000,
        "idle_timeout_s": 900.0,
    }


GRANT: dict[str, Any] = {
    "lease": "abc-1",
    "kind": "build",
    "env": {
        "GPUSHARE_LEASE": "abc-1",
        "GPUSHARE_LEASE_DIR": "/run/gpushare/abc-1",
        "GPUSHARE_MEMORY_LIMIT": "40000000000",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LD_PRELOAD": "/nowhere/libgpushare_preload.so",
    },
    "devices": ["GPU-1"],
    "memory_limit_bytes": 40 << 30,
    "message": "Your half GPU (40 GiB of an H100) is ready.",
}
JOB_NAME = "j0123456789-1"
JOB = {"id": "0123456789", "attempt": 1, "name": "n", "command": ["sleep", "600"], "cwd": None, "env": {}}
NO_GPU: dict[str, Any] = {"lease": None, "kind": "build", "env": {}, "message": ""}


@dataclass
class FakeBroker:
    """Gives the answers that a test sets, and records the requests."""

    path: Path  # of its unix socket
    asked: list[Asked] = field(default_factory=list)
    grant: dict[str, Any] | None = None  # None: by whether a GPU is asked for
    refuse: tuple[int, str, str] | None = None  # starts: status, reason, message
    hang_s: float = 0.0
    is_free: bool = False  # whether the other size is free as well
    place: dict[str, Any] | None = None  # of a session that waits; None: 409
    projects: list[str] = field(default_factory=lambda: ["vision"])
    token: str = SPAWNER_TOKEN  # the only one that it accepts
    prefix: str = API_PREFIX  # below which it answers
    _server: JsonServer | None = None

    @property
    def url(self) -> str:
        return unix_url(self.path)

    def of(self, path: str) -> list[Asked]:
        return [each for each in self.asked if each.path == path]

    def reset(self) -> None:
        self.asked.clear()
        self.grant = self.refuse = None
        self.hang_s = 0.0
        self.place = None
        self.is_free = False
        self.projects = ["vision"]
        self.token = SPAWNER_TOKEN
        self.prefix = API_PREFIX
        self.up()

    def grant_with(self, **env: str) -> None:
        """Grant a GPU with these variables in addition to the usual ones."""
        self.grant = {**GRANT, "env": {**GRANT["env"], **env}}

    def grant_job(self, **job: Any) -> None:
        """From now on, give the current grant to a job."""
        self.grant = {**(self.grant or GRANT), "kind": "train", "job": {**JOB, "grace_s": 60.0, **job}}

    def up(self) -> None:
        if self._server is not None:
            return
        self.path.parent.mkdir(mode=0o711, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._server = JsonServer(self.path, self.answer)
        self.path.chmod(0o666)

    def down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def answer(self, request: Request) -> tuple[int, Any]:
        parts, body, token = urlsplit(request.path), request.body, request.token
        path = parts.path.removeprefix(API_PREFIX)
        query = parse_qs(parts.query)
        self.asked.append(Asked(request.method, path, query, body, token))
        time.sleep(self.hang_s)
        if not parts.path.startswith(self.prefix):
            return 404, {
                "status": 404,
                "reason": "no_such_path",
                "message": "there is no such path: see openapi.json",
            }
        if path.startswith("spawner/") and path != "spawner/fault" and token != self.token:
            return 403, {"status": 403, "reason": "not_the_spawner", "message": "only the Hub's spawner"}
        if path == "spawner/offers":
            answer = offers(query.get("project", self.projects)[0], self.projects)
            if self.is_free:
                answer["offers"][1] |= {"starts": "now", "reason": "", "waits": False}
                answer["free_milli"] = 2000
            return 200, answer
        if path == "spawner/wait" and body["options"] is not None:
            refusal = {"status": 409, "reason": "no_capacity", "message": "the queue is closed"}
            return (409, refusal) if self.place is None else (200, self.place)
        if path == "spawner/start":
            if self.refuse is not None:
                status, reason, message = self.refuse
                return status, {"status": status, "reason": reason, "message": message}
            wants = body.get("options") is not None
            return 200, self.grant if self.grant is not None else GRANT if wants else NO_GPU
        return 204, None
