"""Connections have a bound, and idle ones an end."""

from __future__ import annotations

import asyncio
import resource

import httpx
import pytest
from tornado import web
from tornado.testing import bind_unused_port

from jupyter_gpushare.broker import listener
from jupyter_gpushare.broker.listener import Listener, connections_allowed


class Hello(web.RequestHandler):
    def get(self):
        self.write("hello")


@pytest.fixture
async def port():
    server = Listener(web.Application([("/", Hello)]), max_connections=2)
    socket, number = bind_unused_port()
    server.add_socket(socket)
    yield number
    server.stop()
    await server.close_all_connections()


async def test_connections_beyond_the_bound_are_refused_and_room_comes_back(port):
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    for reader, writer in held:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await reader.readline()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    for _, each in (*held, (reader, writer)):
        each.close()
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.05)
    assert answer.text == "hello"


async def test_a_connection_that_only_sits_there_is_closed(monkeypatch):
    monkeypatch.setattr(listener, "IDLE_S", 0.1)
    server = Listener(web.Application([("/", Hello)]), max_connections=2)
    socket, port = bind_unused_port()
    server.add_socket(socket)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
    writer.close()
    server.stop()
    await server.close_all_connections()


@pytest.mark.parametrize(
    ("limits", "raised_to", "allowed"),
    [
        ((1024, 524_288), 2_128, 2_000),
        ((1024, resource.RLIM_INFINITY), 2_128, 2_000),
        ((1024, 1024), 1024, 896),
        ((100, 100), 100, 1),
        ((524_288, 524_288), None, 2_000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 2_000),
    ],
)
def test_connections_leave_files_to_the_database_and_the_helper(monkeypatch, limits, raised_to, allowed):
    new = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: new.append(pair))
    assert connections_allowed() == allowed
    assert new == ([(raised_to, limits[1])] if raised_to else [])
