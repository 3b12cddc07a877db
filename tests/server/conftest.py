from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.forks import Forked, Forks, forks
from tests.ports import free_ports
from tests.server import fake_broker
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
SECRET = "secret-of-this-server"


@dataclass
class JupyterServer:
    """A real Jupyter Server with our extension, in a separate process."""

    process: Forked
    url: str
    log: Path

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"token {SECRET}"} | options.pop("headers", {})
        return httpx.request(
            method, f"{self.url}/{path}", headers=headers, timeout=PATIENCE_S, trust_env=False, **options
        )

    def get(self, path: str) -> Any:
        return self.request("GET", path).json()

    @asynccontextmanager
    async def socket(self, path: str) -> AsyncIterator[WebSocketClientConnection]:
        """Yield a websocket of the server, with the token."""
        url = f"{self.url}/{path}".replace("http", "ws", 1)
        request = HTTPRequest(url, headers={"Authorization": f"token {SECRET}"}, connect_timeout=PATIENCE_S)
        connection = await websocket_connect(request)
        try:
            yield connection
        finally:
            connection.close()
            async with asyncio.timeout(PATIENCE_S):
                while await connection.read_message() is not None:
                    pass  # until the other side has closed too

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


IMPORTS = """
import jupyter_gpushare.server.extension, jupyter_server.serverapp, jupyter_server_terminals
import jupyter_client.ioloop, jupyter_server.auth.login, terminado
from jupyter_server.services.contents import handlers, filemanager, largefilemanager
for service in "api config events kernels kernelspecs nbconvert security sessions".split():
    __import__(f"jupyter_server.services.{service}.handlers")
"""
RUN = "import sys; from jupyter_server.serverapp import main; sys.exit(main())"


@pytest.fixture(scope="session")
def servers() -> Iterator[Forks]:
    """Yield forks for Jupyter servers, without the time for imports, which take longer than most tests."""
    with forks(IMPORTS, os.environ) as made:
        yield made


def start_server(servers: Forks, folder: Path, environment: dict[str, str]) -> JupyterServer:
    """Start a server below ``folder`` and wait until it answers."""
    port = free_ports()
    for name in ("config", "data", "runtime", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("GPUSHARE_API", "GPUSHARE_LEASE", "JUPYTER"))
    }
    log = folder / "server.log"
    with log.open("wb") as out:
        process = servers.start(
            RUN,
            [
                *[f"--port={port}", "--no-browser", "--allow-root"],
                "--ServerApp.jpserver_extensions={'jupyter_gpushare.server': True}",
                "--ServerApp.reraise_server_extension_failures=True",
                "--ServerApp.allow_unauthenticated_access=False",
                "--ServerApp.port_retries=0",
                f"--IdentityProvider.token={SECRET}",
                f"--ServerApp.root_dir={folder / 'work'}",
            ],
            env=inherited
            | {
                "JUPYTER_CONFIG_DIR": str(folder / "config"),
                "JUPYTER_DATA_DIR": str(folder / "data"),
                "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
                "JUPYTER_PLATFORM_DIRS": "1",
                "PYTHONPATH": str(ROOT),
                "HOME": str(folder),
            }
            | environment,
            stdout=out,
            stderr=out,
            cwd=folder,
        )
    server = JupyterServer(process, f"http://127.0.0.1:{port}", log)

    def answers() -> bool:
        try:
            return server.request("GET", "api/status").status_code == 200
        except httpx.TransportError:
            return False

    until(answers, "the server answers", process=process, log=log)
    return server


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return fake_broker.eventually


@pytest.fixture
def golden() -> Callable[[str], dict[str, Any]]:
    return fake_broker.golden


@contextmanager
def _start_both(servers: Forks, folder: Path, **more: str) -> Iterator[tuple[Any, JupyterServer]]:
    """Start a broker, and ada's default server with its address and ``more`` in its environment."""
    broker = fake_broker.FakeBroker()
    broker.start()
    environment = {"GPUSHARE_API_URL": broker.url, "JUPYTERHUB_API_TOKEN": fake_broker.TOKEN}
    server = start_server(servers, folder, environment | more)
    yield broker, server
    if server.process.poll() is None:
        server.stop()
    broker.stop()


@pytest.fixture(scope="session")
def start_both(servers) -> Callable[..., AbstractContextManager[tuple[Any, JupyterServer]]]:
    return partial(_start_both, servers)


@pytest.fixture
def running(start_both, tmp_path) -> Iterator[tuple[Any, JupyterServer]]:
    with start_both(tmp_path) as both:
        yield both


@pytest.fixture
def broker(running) -> Any:
    return running[0]


@pytest.fixture
def server(running) -> JupyterServer:
    return running[1]


@pytest.fixture
def lonely_server(servers, tmp_path) -> Iterator[JupyterServer]:
    """Yield a server without the address of a broker."""
    server = start_server(servers, tmp_path, {})
    yield server
    if server.process.poll() is None:
        server.stop()


def message(channel: str, msg_type: str, content: dict[str, Any]) -> str:
    """Return a message as a page sends it over its websocket."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": msg_type,
        "session": uuid.uuid4().hex,
        "username": "",
        "version": "5.3",
    }
    return json.dumps(
        {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "buffers": [],
            "channel": channel,
        }
    )


def execute_request(code: str) -> str:
    """Return the websocket message that runs ``code``."""
    content = {
        "code": code,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
    }
    return message("shell", "execute_request", content)


@pytest.fixture(name="execute_request")
def _execute_request() -> Callable[[str], str]:
    return execute_request


@pytest.fixture(name="message")
def _message() -> Callable[[str, str, dict[str, Any]], str]:
    return message
