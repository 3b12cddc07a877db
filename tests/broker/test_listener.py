"""Connections have a bound, and idle ones an end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket

import httpx
import pytest
from tornado import web
from tornado.testing import bind_unused_port

from jupyter_gpushare.broker.http import listener
from jupyter_gpushare.broker.http.listener import Listener, connections_allowed
from jupyter_gpushare.broker.http.peers import source_of


class Hello(web.RequestHandler):
    def get(self):
        self.write("hello")


@pytest.fixture
async def port():
    server = Listener(web.Application([("/", Hello)]), max_connections=2, max_per_source=2)
    listening, number = bind_unused_port()
    server.add_socket(listening)
    yield number
    await server.end()


async def test_connections_beyond_the_bound_are_refused_until_others_close(port):
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


async def test_one_source_cannot_take_every_connection(monkeypatch):
    sources = {}
    monkeypatch.setattr(listener, "source_of", lambda connection: sources[connection.getpeername()[1]])
    server = Listener(web.Application([("/", Hello)]), max_connections=12, max_per_source=2)
    listening, port = bind_unused_port()
    server.add_socket(listening)
    opened = contextlib.ExitStack()

    async def answer_to(source):
        """The first bytes that a new connection reads, none when it is refused; and the connection."""
        ours = opened.enter_context(socket.socket())
        ours.setblocking(False)
        ours.bind(("127.0.0.1", 0))
        sources[ours.getsockname()[1]] = source
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(ours, ("127.0.0.1", port))
            await loop.sock_sendall(ours, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return await loop.sock_recv(ours, 12), ours
        except ConnectionError:
            return b"", ours

    good = b"HTTP/1.1 200"
    with opened:
        async with asyncio.timeout(30):
            first, held = await answer_to("ada")
            assert first == good
            assert (await answer_to("ada"))[0] == good
            assert (await answer_to("ada"))[0] == b""
            assert (await answer_to("bo"))[0] == good
            held.close()
            while (await answer_to("ada"))[0] != good:
                await asyncio.sleep(0.05)
    server.stop()
    await server.close_all_connections()


@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
async def test_a_program_of_this_machine_is_known_by_its_user(here):
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with (
        socket.create_server((here, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]),
    ):
        accepted, _ = server.accept()
        with accepted:
            assert source_of(accepted) == f"uid {os.geteuid()}"


async def test_a_connection_that_only_sits_there_is_closed(monkeypatch):
    monkeypatch.setattr(listener, "IDLE_S", 0.1)
    server = Listener(web.Application([("/", Hello)]), max_connections=2, max_per_source=2)
    listening, port = bind_unused_port()
    server.add_socket(listening)
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


async def test_at_its_end_no_long_poll_waits_any_more():
    asked, gone = asyncio.Event(), asyncio.Event()

    class News(web.RequestHandler):
        def on_connection_close(self):
            gone.set()

        async def get(self):
            asked.set()
            await gone.wait()

    server = Listener(web.Application([("/", News)]), max_connections=2, max_per_source=2)
    listening, port = bind_unused_port()
    server.add_socket(listening)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(30):
        await asked.wait()
        await server.end()
        await gone.wait()
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
