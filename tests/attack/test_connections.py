"""Connections that prove nothing shut neither the Hub nor a user out of a server of ours."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tornado.netutil import bind_sockets

from jupyter_gpushare import listener
from jupyter_gpushare.backends.helper_client import HelperAddress, NodeAddress, SocketAddress
from jupyter_gpushare.channel import unix_url
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.connections import BACKLOG
from jupyter_gpushare.gpu.leases.seats import MAX_SEATS
from jupyter_gpushare.gpu.service.lines import Lines
from jupyter_gpushare.gpu.service.server import Server
from jupyter_gpushare.gpu.service.tcp import Endpoint, TcpServer
from jupyter_gpushare.job import pages
from jupyter_gpushare.protocol.jobfiles import AttemptRecord, Disk
from tests.attack import crowd
from tests.broker.http_site import PREFIX, SPAWNER, Http
from tests.broker.site import Site
from tests.certificates import broker_and_helper
from tests.ports import free_ports

# Of the broker's listeners, which have 2,000 connections; the others have 200 at most.
COUNT, OTHERS = 2_000, int(os.environ.get("GPUSHARE_TEST_CONNECTIONS", "400"))
# The Hub and a user are answered within this time, where 20 ms are enough without the crowd, on a machine
# with at most two runnable threads per core.
BOUND_S = 5.0
ROUNDS = OTHERS // 200

Call = Callable[[], Awaitable[object]]


def bound_s() -> float:
    """Return `BOUND_S`, longer in proportion where the machine has more to do."""
    return BOUND_S * max(1.0, os.getloadavg()[0] / (2 * len(os.sched_getaffinity(0))))


@dataclass
class Target:
    """A listener, and calls of the Hub and of a user."""

    address: crowd.Address
    calls: dict[str, Call]


def source_of(connection: socket.socket) -> str:
    """As `peers.source_of` on other machines: no peer is root or this process's user, only for its place."""
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        return f"uid {65_530 if pid == os.getpid() else uid if uid else 40_000 + pid} by socket"
    return (
        str(connection.getpeername()[0]).replace("127.0.1.", "203.0.113.").replace("127.0.0.", "198.51.100.")
    )


@asynccontextmanager
async def callers(url: str, certificate: str, hub: tuple[str, str]) -> AsyncIterator[dict[str, Call]]:
    """Calls of the Hub (its token, and a path) and of a user, each over a kept connection and a new one."""
    async with AsyncExitStack() as stack:
        calls: dict[str, Call] = {}

        def add(caller: str, token: str, path: str) -> None:
            kept = BrokerClient(url, token, certificate=certificate)
            stack.push_async_callback(kept.close)

            async def anew() -> None:
                client = BrokerClient(url, token, certificate=certificate)
                try:
                    await client.get(path, dict)
                finally:
                    await client.close()

            calls[f"{caller}, kept"] = lambda: kept.get(path, dict)
            calls[f"{caller}, new"] = anew

        add("the Hub", *hub)
        add("a user", "ada", "status")
        yield calls


@asynccontextmanager
async def broker(tmp_path: Path, way: str) -> AsyncIterator[Target]:
    http = Http(Site(tmp_path))
    await http.open()
    hub = (SPAWNER, "spawner/offers?group=nlp")
    api, certificate = f"{PREFIX}api/v1", ""
    try:
        if way == "unix":
            Path(http.unix).parent.chmod(0o711)
            Path(http.unix).chmod(0o666)
            address: crowd.Address = http.unix
            url = unix_url(Path(http.unix), api)
        elif way == "tls":
            root = http.listen_tls(tmp_path)
            address, url = ("127.0.0.1", int(root.rpartition(":")[2])), root + api
            certificate = (tmp_path / "api-certificate.pem").read_text()
        else:
            address, url = ("127.0.0.1", http.port), http.url + api
            hub = ("root", "status")  # the port takes no spawner's token
        async with callers(url, certificate, hub) as calls:
            yield Target(address, calls)
    finally:
        await http.close()


@asynccontextmanager
async def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Target]:
    for name, value in {
        "JUPYTERHUB_API_TOKEN": "x",
        "JUPYTERHUB_API_URL": "http://127.0.0.1:1/hub/api",
        "JUPYTERHUB_OAUTH_ACCESS_SCOPES": '["access:servers"]',
        "JUPYTERHUB_CLIENT_ID": "x",
        "JUPYTERHUB_OAUTH_CALLBACK_URL": "/user/ada/oauth_callback",
        "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/",
    }.items():
        monkeypatch.setenv(name, value)
    record = AttemptRecord(id="j1", attempt=1, name="x", command=[], state="running", log="")
    server = pages.server(
        "/user/ada/", None, now=lambda: (record, {}), log=lambda: None, disk=Disk(), seen=lambda: None
    )
    (listening,) = bind_sockets(0, "127.0.0.1", backlog=BACKLOG)
    server.add_socket(listening)
    port = listening.getsockname()[1]

    async def probe() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=bound_s()) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/user/ada/api/")).status_code == 200

    try:
        yield Target(("127.0.0.1", port), {"the Hub, new": probe})
    finally:
        await server.end()


def echo(lines: Lines) -> None:
    while True:
        lines.write(lines.read() + b"\n")


@asynccontextmanager
async def helper(tmp_path: Path, way: str) -> AsyncIterator[Target]:
    address: crowd.Address
    server: Server | TcpServer
    client: HelperAddress
    if way in ("unix", "seats"):
        path = tmp_path / "helper.sock"
        is_for_seats = way == "seats"
        server = Server(path, frozenset(), echo, *((MAX_SEATS, None) if is_for_seats else ()))
        for folder in (tmp_path, *tmp_path.parents):
            if not folder.stat().st_mode & 0o001:
                folder.chmod(folder.stat().st_mode | 0o011)
        path.chmod(0o666)
        address, client = str(path), SocketAddress(path)
    else:
        (of_broker, of_helper), port = broker_and_helper(tmp_path), free_ports()
        server = TcpServer(Endpoint(host="127.0.0.1", port=port, node="n1", tls=of_helper), echo)
        address = ("127.0.0.1", port)
        client = NodeAddress(host="127.0.0.1", port=port, node="n1", tls=of_broker)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()

    async def ask() -> None:
        connection = await client.connect()
        try:
            await connection.send(b"one\n")
            assert await connection.receive() == b"one\n"
        finally:
            connection.close()

    try:
        yield Target(address, {"the broker, new": ask})
    finally:
        server.stop()
        thread.join()


@pytest.mark.long_form
@pytest.mark.parametrize(
    "of",
    [
        *("broker unix", "broker port", "broker tls", "job"),
        *("helper unix", "helper tls", "helper seats"),
    ],
)
async def test_connections_that_prove_nothing_keep_neither_the_hub_nor_a_user_waiting(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of in ("helper unix", "helper seats") and os.geteuid() != 0:
        pytest.skip("needs root to speak as another user")
    monkeypatch.setattr(listener, "source_of", source_of)
    program, _, way = of.partition(" ")
    serves = {
        "broker": lambda: broker(tmp_path, way),
        "helper": lambda: helper(tmp_path, way),
        "job": lambda: runner(tmp_path, monkeypatch),
    }[program]
    async with serves() as target:
        for call in target.calls.values():
            await call()
        count = COUNT if program == "broker" else OTHERS
        with crowd.crowd(target.address, count, is_tls=way == "tls") as members:
            for each in members:
                assert each.stdout is not None
                async with asyncio.timeout(60):
                    await asyncio.to_thread(each.stdout.read)
            slow = {}
            for _ in range(ROUNDS):
                for caller, call in target.calls.items():
                    began_at = time.monotonic()
                    await call()
                    slow[caller] = max(slow.get(caller, 0.0), time.monotonic() - began_at)
                await asyncio.sleep(0.2)
            assert max(slow.values()) < bound_s(), slow
