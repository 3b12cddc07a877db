"""Which connections a server keeps: the rules, and the HTTP server that follows them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tornado import iostream, web
from tornado.netutil import bind_sockets

from jupyter_gpushare import listener
from jupyter_gpushare.broker.http import listener as http_listener
from jupyter_gpushare.channel import unix_url
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.connections import IDLE_S, PROOF_S, Connections
from jupyter_gpushare.listener import HUB, UNREAD_S, Gate, Listener, connections_allowed
from jupyter_gpushare.peers import holder_of, source_of
from jupyter_gpushare.protocol import wire
from tests.broker.http_site import PREFIX, SPAWNER, Http
from tests.broker.site import Site
from tests.waiting import becomes


def few(unproven: int = 4, proven: int = 4, reserve: int = 0, cancels: bool = True) -> Connections[str]:
    return Connections(unproven=unproven, proven=proven, reserves={HUB: reserve}, cancels=cancels)


def opened(connections: Connections[str], *keys: str) -> list[str | None]:
    """Open connections, of which the letter is the holder, one a second; return those that gave way."""
    return [connections.admit(key, key[0], float(at)) for at, key in enumerate(keys)]


def proven(connections: Connections[str], *keys: str) -> list[str | None]:
    found = []
    for key in keys:
        assert connections.admit(key, "x", 0.0) is None
        found.append(connections.prove(key, HUB if key.startswith("hub") else key[0]))
    return found


def test_the_oldest_idle_connection_of_the_largest_holder_gives_way():
    connections = few()
    assert opened(connections, "b1", "a1", "a2", "a3", "c1", "c2") == 4 * [None] + ["a1", "a2"]
    assert len(connections) == 4


def test_one_that_was_used_a_moment_ago_gives_way_later():
    connections = few()
    opened(connections, "b1", "a1", "a2", "a3")
    assert connections.busy("a1")
    connections.idle("a1", 5.0)
    assert connections.admit("c1", "c", 6.0) == "a2"


def test_one_with_a_request_in_progress_gives_way_only_where_its_holder_has_no_other():
    connections = few()
    opened(connections, "b1", "a1", "a2", "a3")
    assert connections.busy("a1")
    assert connections.busy("a2")
    assert connections.admit("c1", "c", 6.0) == "a3"
    assert not connections.busy("a3")


@pytest.mark.parametrize(("cancels", "gave_way"), [(True, "a1"), (False, "c1")])
def test_requests_in_progress_give_way_only_in_a_server_that_can_cancel_them(cancels, gave_way):
    connections = few(cancels=cancels)
    opened(connections, "b1", "a1", "a2", "a3")
    for key in ("a1", "a2", "a3"):
        connections.busy(key)
    assert connections.admit("c1", "c", 6.0) == gave_way


def test_a_proven_holder_cuts_no_request_of_its_own_to_begin_another():
    connections = few()
    proven(connections, "a1", "a2", "a3", "a4")
    for key in ("a1", "a2", "a3", "a4"):
        connections.busy(key)
    assert proven(connections, "a5") == ["a5"]


def test_a_crowd_with_requests_in_progress_shuts_no_new_one_out_before_it_can_prove_something():
    connections = few()
    opened(connections, "a1", "a2", "a3", "a4")
    for key in ("a1", "a2", "a3", "a4"):
        connections.busy(key)
    assert connections.admit("a-hub", "a", 6.0) == "a1"
    assert connections.gave_way == "a"
    assert connections.prove("a-hub", HUB) is None


@pytest.mark.parametrize("crowd_is_first", [True, False])
@pytest.mark.parametrize(("users", "each", "hub"), [(300, 5, 0), (248, 4, 600)])
def test_users_with_few_connections_keep_4_beside_one_with_1000(users, each, hub, crowd_is_first):
    connections = few(unproven=500, proven=1_500, reserve=500)
    holders = [f"user {n}" for n in range(users) for _ in range(each)]
    crowd = ["crowd"] * 1_000
    for key, holder in enumerate([HUB] * hub + (crowd + holders if crowd_is_first else holders + crowd)):
        connections.admit(f"{key}", holder, 0.0, is_proven=True)
    assert min(connections.count(holder, is_proven=True) for holder in holders) >= 4
    assert connections.count("crowd", is_proven=True) <= 5
    assert len(connections) == 1_500


def test_requests_of_a_user_are_counted_until_they_end_on_whatever_connection():
    connections = few(unproven=3, proven=2)
    proven(connections, "a1", "a2")
    opened(connections, "b1")
    assert [connections.begin(key, "ada", 2) for key in ("a1", "a1", "a2", "b1")] == [True, True, True, False]
    connections.idle("a1", 1.0)
    assert connections._requests["ada"] == 1
    assert connections.begin("b1", "ada", 2)
    connections.close("b1")
    assert proven(connections, "c1") == ["a2"]
    assert connections._requests["ada"] == 0


def test_what_is_proven_takes_no_place_of_what_is_not_and_the_other_way_round():
    connections = few(unproven=2, proven=2)
    assert proven(connections, "a1", "a2", "a3") == [None, None, "a1"]
    assert opened(connections, "b1", "b2", "b3") == [None, None, "b1"]
    assert connections.count("a", is_proven=True) == 2


def test_the_reserve_of_the_hub_is_counted_for_what_it_proves():
    connections = few(reserve=2)
    assert proven(connections, "hub1", "hub2", "a1", "a2") == 4 * [None]
    # Two of the Hub's are within its reserve, so one of a user's gives way, of whichever user.
    assert proven(connections, "b1", "c1") == ["a1", "a2"]
    # A third is not.
    assert proven(connections, "hub3") == ["hub1"]


def test_a_user_with_one_connection_keeps_it_beside_one_with_many():
    connections = few()
    assert proven(connections, "b1", "a1", "a2", "a3", "a4", "a5") == [None, None, None, None, "a1", "a2"]
    assert connections.of("b1")


def test_an_unproven_connection_has_a_time_for_its_head_and_one_in_all():
    connections = few()
    connections.admit("silent", "a", 0.0)
    connections.admit("shakes", "b", 0.0, shakes_hands=True)
    connections.admit("asks", "c", 0.0)
    connections.admit("proves", "d", 0.0)
    connections.busy("asks")
    connections.prove("proves", "d")
    assert connections.expired(IDLE_S - 0.1) == []
    assert connections.expired(IDLE_S) == ["silent"]
    connections.idle("shakes", 5.0)
    assert connections.expired(5.0 + IDLE_S) == ["shakes"]
    connections.idle("asks", PROOF_S - 0.5)
    assert connections.expired(PROOF_S) == ["asks"]
    assert connections.expired(1e9) == []
    assert len(connections) == 1


def test_one_that_gave_way_proves_nothing_any_more():
    connections = few(unproven=1)
    opened(connections, "a1", "b1")
    assert connections.prove("a1", "ada") == "a1"
    assert not connections.busy("a1")
    connections.close("a1")
    assert len(connections) == 1


@pytest.mark.parametrize(
    ("source", "holder"),
    [
        ("uid 1000", "uid 1000"),
        ("uid 1000 by socket", "uid 1000"),
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:0:7::1", "2001:db8:0:7::/64"),
    ],
)
def test_a_user_is_one_holder_by_each_way_and_a_machine_by_each_of_its_addresses(source, holder):
    assert holder_of(source) == holder


# ---- the HTTP server -----------------------------------------------------------


class Hello(web.RequestHandler):
    def get(self):
        self.write("hello")


def listens(handler: type[web.RequestHandler] = Hello) -> tuple[Listener, int]:
    server = Listener(web.Application([("/", handler)]), Gate())
    (listening,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(listening)
    return server, listening.getsockname()[1]


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


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_connection_that_proves_nothing_is_closed(monkeypatch, sent):
    monkeypatch.setattr(listener, "source_of", lambda _: "203.0.113.7")
    monkeypatch.setattr(listener, "KEEP_S", 600.0)
    server, port = listens()
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await reader.read()
    assert answer.endswith(b"hello") if len(sent) > 1 else answer == b""
    writer.close()
    await server.end()


class Ticking:
    """A gate with one connection, on a clock that `tick` sets forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.now = Gate(), 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        ours, self.peer = socket.socketpair()
        self.stream = iostream.IOStream(ours)

    def tick(self, seconds: float = 0.25) -> None:
        self.gate.stop()
        self.now += seconds
        self.gate._tick()


@pytest.fixture
async def ticking(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ticking]:
    made = Ticking(monkeypatch)
    yield made
    made.stream.close()
    made.peer.close()
    made.gate.stop()


async def test_a_loop_that_was_late_closes_nothing_that_it_has_not_read(ticking):
    ticking.gate.admit(ticking.stream, "a", is_proven=False)
    ticking.tick(60.0)
    assert not ticking.stream.closed()
    for _ in range(int(IDLE_S / 0.25)):
        ticking.tick()
    assert ticking.stream.closed()


async def test_a_loop_that_is_late_each_time_closes_what_proves_nothing_all_the_same(ticking):
    ticking.gate.admit(ticking.stream, "a", is_proven=False)
    for _ in range(2 * int(IDLE_S / 0.25)):
        ticking.tick(1.0)
    assert ticking.stream.closed()


@pytest.mark.parametrize("reads", [True, False])
async def test_an_answer_is_kept_for_a_peer_only_while_it_reads(ticking, reads):
    ticking.gate.admit(ticking.stream, HUB, is_proven=True)
    ticking.gate.busy(ticking.stream)
    sent = ticking.stream.write(bytes(16 << 20))
    for _ in range(4 * int(2 * UNREAD_S)):
        ticking.tick()
        if reads:
            ticking.peer.recv(50_000)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert ticking.stream.closed() is not reads
    assert ticking.stream.writing() is reads
    ticking.stream.close()
    with contextlib.suppress(iostream.StreamClosedError):
        await sent


async def test_a_proxy_takes_nothing_of_the_reserve_of_the_hub_without_its_token(tmp_path: Path, monkeypatch):
    for module in (listener, http_listener):
        monkeypatch.setattr(module, "source_of", lambda _: "203.0.113.7")
    async with Http(Site(tmp_path), proxies=["203.0.113.0/24"]) as http:
        gate = http.service.gate
        assert (await http.by_socket.get("openapi.json")).status_code == 200
        assert gate.connections.count("proxy 203.0.113.7", is_proven=True) == 1
        forwarded = {"X-Forwarded-For": "198.51.100.1"}
        for _ in range(2):
            assert (await http.by_socket.get("openapi.json", headers=forwarded)).status_code == 200
        await becomes(lambda: gate.connections.count("proxy 203.0.113.7", is_proven=True) == 1)
        assert (await http.ask("GET", "spawner/offers?group=nlp", SPAWNER)).status_code == 200
        assert gate.connections.count(HUB, is_proven=True) == 1


async def test_the_form_of_an_administrator_proves_its_connection(http, monkeypatch):
    monkeypatch.setattr(listener, "source_of", lambda _: "203.0.113.7")
    form, token = {"lending": "default"}, {"Authorization": "token root"}
    assert (await http.client.post(f"{http.url}{PREFIX}", data=form, headers=token)).status_code == 303
    assert http.service.gate.connections.count("user root", is_proven=True) == 1


async def test_our_client_goes_on_after_its_idle_connection_gave_way(http):
    client = BrokerClient(unix_url(Path(http.unix), f"{PREFIX}api/v1"), "bo", retry_s=0.0)
    try:
        await client.get("status", wire.Status)
        for stream in list(http.service.gate.connections._entries):
            stream.close()
        job = await client.post("jobs", wire.JobRequest(command=["true"]), wire.Job)
        assert list(http.broker.registry.jobs) == [job.id]
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("limits", "raised_to", "allowed"),
    [
        ((1024, 524_288), 2_128, 2_000),
        ((1024, resource.RLIM_INFINITY), 2_128, 2_000),
        ((1024, 1024), 1024, 896),
        ((100, 100), 100, 4),
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

    server, port = listens(News)
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
