"""The part of Docker's engine API that DockerSpawner uses; a "container" is a process of this machine.

Paths, bodies and answers are those of the Docker Engine API v1.43 (docs.docker.com/reference/api/engine).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.json_server import JsonServer, Request
from tests.ports import free_ports


@dataclass
class Container:
    name: str
    created: dict[str, Any]  # the body of the request that made it
    port: int
    process: subprocess.Popen[bytes] | None = None
    stopped_after_s: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.created["Env"])

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def inspected(self) -> dict[str, Any]:
        bound = [{"HostIp": "127.0.0.1", "HostPort": str(self.port)}]
        state = {"Running": self.running, "ExitCode": 0, "Error": "", "FinishedAt": "0001-01-01T00:00:00Z"}
        return {
            "Id": f"id-{self.name}",
            "Name": f"/{self.name}",
            "State": state,
            "Config": {"Env": self.created["Env"]},
            "NetworkSettings": {"Ports": {f"{self.inner_port}/tcp": bound}},
        }

    @property
    def inner_port(self) -> int:
        return int(next(iter(self.created["ExposedPorts"])).partition("/")[0])


@dataclass
class FakeDocker:
    """The engine; ``made`` has every container ever created."""

    stub: Path
    port: int = field(default_factory=free_ports)
    made: list[Container] = field(default_factory=list)
    there: dict[str, Container] = field(default_factory=dict)

    def answer(self, request: Request) -> tuple[int, Any]:
        method, parts, body = request.method, urlsplit(request.path), request.body
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = [each for each in parts.path.split("/") if each]
        if path and path[0].startswith("v1."):
            path = path[1:]
        match method, path:
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.43", "MinAPIVersion": "1.24"}
            case "GET", ["images", *_, "json"]:
                return 200, {"Id": "sha256:0", "Config": {"Cmd": ["start-notebook.py"]}}
            case "POST", ["containers", "create"]:
                name = query["name"]
                if name in self.there:
                    return 409, {"message": f'Conflict. The container name "/{name}" is already in use'}
                container = Container(name, body, free_ports())
                self.there[name] = container
                self.made.append(container)
                return 201, {"Id": f"id-{name}", "Warnings": []}
            case _, ["containers", name, *rest]:
                container = self.there.get(name.removeprefix("id-"))
                if container is None:
                    return 404, {"message": f"No such container: {name}"}
                return self._of(container, method, rest, query)
        return 404, {"message": f"page not found: {method} {parts.path}"}

    def _of(
        self, container: Container, method: str, rest: list[str], query: dict[str, str]
    ) -> tuple[int, Any]:
        match method, rest:
            case "GET", ["json"]:
                return 200, container.inspected()
            case "POST", ["start"]:
                env = {
                    **container.environment,
                    "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{container.port}/",
                }
                env.pop("LD_PRELOAD", None)
                container.process = subprocess.Popen([sys.executable, self.stub], env=env)
                return 204, None
            case "POST", ["stop"]:
                container.stopped_after_s = int(query["t"]) if "t" in query else None
                self._end(container)
                if container.created["HostConfig"].get("AutoRemove"):
                    self.there.pop(container.name)
                return 204, None
            case "DELETE", []:
                self._end(container)
                self.there.pop(container.name)
                return 204, None
        return 404, {"message": f"page not found: {method} {rest}"}

    def _end(self, container: Container) -> None:
        if container.process is not None:
            container.process.kill()
            container.process.wait()

    @contextlib.contextmanager
    def running(self):
        server = JsonServer(self.port, self.answer)
        try:
            yield self
        finally:
            server.close()
            for container in self.made:
                self._end(container)
