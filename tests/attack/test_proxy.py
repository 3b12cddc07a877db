"""Clients behind the Hub's proxy are counted each for itself, whatever they say of themselves."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from traitlets import TraitError

from jupyter_gpushare.broker.http import listener
from jupyter_gpushare.broker.http.listener import Proxies
from jupyter_gpushare.hub.spawner import GPUShareMixin
from tests.broker.http_site import PREFIX, SPAWNER, Http
from tests.broker.site import Site
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, becomes, until

PROXY = Path(sys.executable).parent / "configurable-http-proxy"
# Documentation addresses (RFC 5737).
MALLORY, ADA = "203.0.113.66", "203.0.113.7"
# Of the broker in these tests: requests in progress of a client behind a proxy.
PER_CLIENT = 4
# Needs no token, and is 200 however old the last measurement of the GPUs is (`health` is not).
FREE = "openapi.json"


@pytest.fixture(autouse=True)
def few_per_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_PER_CLIENT", PER_CLIENT)


@asynccontextmanager
async def proxied(tmp_path: Path, *proxies: str) -> AsyncIterator[tuple[Http, httpx.AsyncClient]]:
    """A broker that trusts ``proxies``, behind the proxy that JupyterHub uses, and its clients."""
    http = Http(Site(tmp_path), proxies)
    await http.open()
    port, log = free_ports(2), tmp_path / "proxy.log"
    with log.open("wb") as output:
        proxy = subprocess.Popen(
            [
                *(PROXY, "--ip=127.0.0.1", f"--port={port}", f"--default-target={http.url}"),
                *("--api-ip=127.0.0.1", f"--api-port={port + 1}"),
            ],
            env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": "secret"},
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}{PREFIX}api/v1/",
            trust_env=False,
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_connections=None),
        ) as client:
            await asyncio.to_thread(until, lambda: listens(port), process=proxy, log=log)
            yield http, client
    finally:
        proxy.terminate()
        proxy.wait()
        http.hub_goes_on.set()
        await http.close()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def waits(client: httpx.AsyncClient, address: str) -> asyncio.Task[httpx.Response]:
    """A request that waits for the Hub, before its caller is known."""
    headers = {"X-Forwarded-For": address, "Authorization": "token hub-waits"}
    return asyncio.create_task(client.get("status", headers=headers))


async def answered(requests: list[asyncio.Task[httpx.Response]], number: int) -> list[int]:
    """The statuses of the first ``number`` requests that are answered."""
    await becomes(lambda: sum(each.done() for each in requests) >= number)
    return [each.result().status_code for each in requests if each.done()]


async def closed(http: Http, left: int = 0) -> None:
    """Wait until the broker has at most ``left`` connections: it closes one a moment after its answer."""
    await becomes(lambda: len(http.listener._connections) <= left)


async def test_a_users_own_token_reaches_the_broker_through_the_hubs_proxy_and_no_other_secret_does(tmp_path):
    async with proxied(tmp_path, "127.0.0.1") as (http, client):

        async def ask(method: str, path: str, token: str, **body: object) -> httpx.Response:
            return await client.request(
                method, path, headers={"Authorization": f"token {token}"}, **({"json": body} if body else {})
            )

        assert (await ask("GET", "status", "bo")).status_code == 200
        assert (await ask("GET", "status", "unknown")).status_code in (401, 403)
        start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": None}
        refused = await ask("POST", "spawner/start", SPAWNER, **start)
        assert (refused.status_code, refused.json()["reason"]) == (403, "unverified_channel")
        # Neither the Hub nor a server is given this way: their tokens go to a verified broker.
        for name in ("broker_url", "server_broker_url"):
            with pytest.raises(TraitError, match="could be any process"):
                getattr(GPUShareMixin, name)._validate(GPUShareMixin(), f"{http.url}{PREFIX}".rstrip("/"))


async def test_slow_requests_of_one_machine_keep_no_other_behind_the_proxy_from_an_answer(tmp_path):
    async with proxied(tmp_path, "127.0.0.1") as (http, client):
        slow = [waits(client, MALLORY) for _ in range(20 * PER_CLIENT)]
        refused = await answered(slow, len(slow) - PER_CLIENT)
        assert set(refused) <= {429, 503}
        await closed(http, PER_CLIENT)
        for path, token, status in ((FREE, "no", 200), ("status", "bo", 200), ("status", "no", 401)):
            headers = {"X-Forwarded-For": ADA, "Authorization": f"token {token}"}
            assert (await client.get(path, headers=headers)).status_code == status
        one_more = await client.get(FREE, headers={"X-Forwarded-For": MALLORY})
        assert (one_more.status_code, one_more.headers["Retry-After"]) == (429, "1")
        assert one_more.json()["message"].startswith("at most 4 requests of one machine")
        assert "frame-ancestors 'none'" in one_more.headers["Content-Security-Policy"]
        http.hub_goes_on.set()
        # One that is answered is no longer counted, though the proxy keeps its connection.
        assert (await answered(slow, len(slow))).count(401) == PER_CLIENT
        await closed(http, PER_CLIENT)
        assert (await client.get(FREE, headers={"X-Forwarded-For": MALLORY})).status_code == 200


async def test_a_machine_that_forges_the_header_behind_the_proxy_stays_one_machine(tmp_path):
    async with proxied(tmp_path) as (http, client):
        slow = [waits(client, f"203.0.113.{n}") for n in range(20 * PER_CLIENT)]
        await answered(slow, len(slow) - PER_CLIENT)
        await closed(http, PER_CLIENT)
        forged = await client.get(FREE, headers={"X-Forwarded-For": "198.51.100.1"})
        assert forged.status_code == 429
        http.hub_goes_on.set()
        await answered(slow, len(slow))


async def test_a_header_that_no_proxy_sent_changes_nothing(http):
    slow = [waits(http.by_socket, ADA) for _ in range(PER_CLIENT + 1)]
    answer = await http.by_socket.get(FREE, headers={"X-Forwarded-For": ADA})
    assert answer.status_code == 200
    http.hub_goes_on.set()
    assert await answered(slow, len(slow)) == [401] * len(slow)


async def test_a_body_of_a_request_that_has_none_is_refused_before_it_is_read(http):
    for header in ("Content-Length: 9", "Transfer-Encoding: chunked"):
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(f"GET {PREFIX}api/v1/health HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"has no body" in answer


@pytest.mark.parametrize(
    ("source", "forwarded", "client"),
    [
        ("uid 0", "203.0.113.7", "203.0.113.7"),
        ("uid 0", "198.51.100.1, 203.0.113.7", "203.0.113.7"),
        ("uid 0", "203.0.113.7, 10.0.1.9", "203.0.113.7"),
        ("uid 0", "198.51.100.1, 203.0.113.7, 10.0.1.9", "203.0.113.7"),
        ("uid 0", "10.0.1.8, 10.0.1.9", "10.0.1.8"),
        ("uid 0", "", ""),
        ("uid 0", "::ffff:203.0.113.7", "203.0.113.7"),
        ("uid 0", "127.0.0.9", "127.0.0.0/8"),
        ("uid 0", "::1", "127.0.0.0/8"),
        ("uid 0", "2001:db8:0:7::1", "2001:db8:0:7::/64"),
        ("uid 0", "203.0.113.7, <script>", "unknown"),
        ("uid 0 by socket", "203.0.113.7", ""),
        ("uid 1000", "203.0.113.7", ""),
        ("198.51.100.1", "203.0.113.7", ""),
        ("10.0.1.9", "203.0.113.7", "203.0.113.7"),
        ("10.0.1.9", "", ""),
    ],
)
def test_the_header_is_believed_from_proxies_and_read_from_its_end(source, forwarded, client):
    proxies = Proxies(Proxies.at(["10.0.1.0/24"]).networks, frozenset({"uid 0"}))
    assert proxies.client(source, forwarded) == client
