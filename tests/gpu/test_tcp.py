"""The helper's TCP port: which peers are served, what is noticed on the way, what is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare import connections
from jupyter_gpushare.backends.helper_client import Connection, HelperClient, NodeAddress
from jupyter_gpushare.broker.http.certificate import tls_context
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service import options
from jupyter_gpushare.gpu.service import tcp as tcp_module
from jupyter_gpushare.gpu.service.lines import Lines
from jupyter_gpushare.gpu.service.peers import MAX_UNPROVEN
from jupyter_gpushare.gpu.service.tcp import Endpoint, TcpServer
from jupyter_gpushare.protocol import helper, sealed
from tests.gpu.machine import Machine
from tests.ports import free_ports
from tests.waiting import until

SECRET = b"s" * 32


class Echo:
    """A server that answers every line with itself, and remembers them."""

    def __init__(self, certificate: Path | None = None, key: Path | None = None) -> None:
        self.heard: list[bytes] = []
        endpoint = Endpoint(
            host="127.0.0.1", port=free_ports(), node="n1", secret=SECRET, certificate=certificate, key=key
        )
        self.server = TcpServer(endpoint, self.talk)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def talk(self, lines: Lines) -> None:
        while True:
            line = lines.read()
            self.heard.append(line)
            lines.write(line + b"\n")

    def address(self, secret: bytes = SECRET, node: str = "n1", port: int = 0) -> NodeAddress:
        return NodeAddress(host="127.0.0.1", port=port or self.server.port, node=node, secret=secret)

    def close(self) -> None:
        self.server.stop()
        self._thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


async def close(connection: Connection) -> None:
    """Close a connection and wait for its end: that of TLS takes a few turns of the loop."""
    connection.close()
    with contextlib.suppress(OSError):
        await connection._writer.wait_closed()  # type: ignore[attr-defined]


async def said(address: NodeAddress, *lines: bytes) -> list[bytes]:
    connection = await address.connect()
    try:
        found = []
        for line in lines:
            await connection.send(line)
            found.append(await connection.receive())
        return found
    finally:
        await close(connection)


class Wire:
    """A man in the middle: passes bytes on, as ``change`` leaves those of the client."""

    def __init__(self, port: int, change: object = None) -> None:
        self.port = port
        self.change = change
        self.sent: list[bytes] = []  # by the client
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.own_port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.port)

        async def passing(source: asyncio.StreamReader, to: asyncio.StreamWriter, note: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    if note:
                        self.sent.append(data)
                        data = self.change(self, data) if callable(self.change) else data
                    to.write(data)
            to.close()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(passing(reader, ours, True))
                group.create_task(passing(theirs, writer, False))
        finally:
            ours.close()
            writer.close()


def answered(port: int, raw: list[bytes]) -> bytes:
    """What a server answers to these bytes before it closes the connection, after the challenge."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as peer:
        for data in raw:
            peer.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while more := peer.recv(65536):
                found += more
        return found[sealed.CHALLENGE_BYTES :]


async def test_lines_pass_in_both_directions(echo: Echo) -> None:
    long = b"x" * (helper.MAX_LINE_BYTES - 1)
    assert await said(echo.address(), b"one\n", b"two\n", long + b"\n") == [b"one\n", b"two\n", long + b"\n"]
    assert echo.heard == [b"one", b"two", long]


@pytest.mark.parametrize(("secret", "node"), [(b"t" * 32, "n1"), (SECRET, "n2")])
async def test_a_server_that_is_not_the_one_asked_for_gets_no_request(
    echo: Echo, secret: bytes, node: str
) -> None:
    with pytest.raises(HelperError, match="is not accepted") as refused:
        await said(echo.address(secret, node), b"suspend\n")
    assert refused.value.kind == "not_verified"
    assert echo.heard == []


def test_a_peer_without_the_secret_is_not_served(echo: Echo) -> None:
    client = sealed.ClientHandshake(SECRET, "n1")
    assert answered(echo.server.port, [client.hello(), bytes(sealed.PROOF_BYTES), b"suspend\n"]) == b""
    assert answered(echo.server.port, [b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n".ljust(100)]) == b""
    assert echo.heard == []


async def test_a_recorded_connection_is_of_no_use_later(echo: Echo) -> None:
    async with Wire(echo.server.port) as wire:
        await said(echo.address(port=wire.own_port), b"suspend\n")
    assert echo.heard == [b"suspend"]
    assert await asyncio.to_thread(answered, echo.server.port, [b"".join(wire.sent)]) == b""
    assert echo.heard == [b"suspend"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data + data, id="repeated"),
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data[:5] + b"X" + data[6:], id="changed"),
        pytest.param(lambda data: b"\xff" + data[1:], id="longer"),
    ],
)
async def test_a_frame_that_was_changed_on_the_way_ends_the_connection(echo: Echo, change: object) -> None:
    proved = sealed.HELLO_BYTES + sealed.PROOF_BYTES

    def first_frame(wire: Wire, data: bytes) -> bytes:
        is_first = sum(map(len, wire.sent)) - len(data) == proved
        return change(data) if is_first else data  # type: ignore[operator,no-any-return]

    async with Wire(echo.server.port, first_frame) as wire:
        connection = await echo.address(port=wire.own_port).connect()
        while sum(map(len, wire.sent)) < proved:
            await asyncio.sleep(0.01)
        await connection.send(b"suspend\n")
        with contextlib.suppress(OSError, TimeoutError):
            assert await asyncio.wait_for(connection.receive(), 1) in (b"", b"suspend\n")
        with contextlib.suppress(OSError):
            await connection.send(b"resume\n")
            assert await connection.receive() == b""
        await close(connection)
    assert echo.heard in ([], [b"suspend"])  # never changed, never twice, and nothing after it


@contextlib.contextmanager
def silent_peers(port: int, count: int) -> Iterator[None]:
    """Peers of as many addresses that are connected and send nothing."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            peer = stack.enter_context(socket.socket())
            peer.bind((f"127.0.{1 + number // 200}.{1 + number % 200}", 0))
            peer.connect(("127.0.0.1", port))
        yield


async def test_a_connection_that_is_served_gives_way_to_none_that_is_not(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await echo.address().connect()
    with silent_peers(echo.server.port, 2 * MAX_UNPROVEN):
        assert await said(echo.address(), b"one\n") == [b"one\n"]
        await connection.send(b"two\n")
        assert await connection.receive() == b"two\n"
    await close(connection)


async def test_a_system_without_threads_refuses_a_connection_and_serves_the_next(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "peer":
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    for _ in range(2 * MAX_UNPROVEN):
        with pytest.raises(HelperError, match="no device helper"):
            await said(echo.address(), b"one\n")
    monkeypatch.setattr(threading.Thread, "start", started)
    assert await said(echo.address(), b"one\n") == [b"one\n"]


def test_handshakes_are_bounded_over_all_addresses(echo: Echo) -> None:
    idle = []
    try:
        for number in range(MAX_UNPROVEN + 24):
            peer = socket.socket()
            peer.bind((f"127.0.{1 + number // 200}.{1 + number % 200}", 0))
            peer.connect(("127.0.0.1", echo.server.port))
            idle.append(peer)
        until(lambda: [t.name for t in threading.enumerate()].count("peer") > 0)
        assert [t.name for t in threading.enumerate()].count("peer") <= MAX_UNPROVEN
    finally:
        for peer in idle:
            peer.close()


def test_a_peer_that_sends_byte_by_byte_has_one_deadline(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.5)
    with socket.create_connection(("127.0.0.1", echo.server.port), timeout=30) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = 0
        with contextlib.suppress(OSError):
            for byte in sealed.MAGIC * 1000:
                peer.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert sent < len(sealed.MAGIC) * 1000


async def test_a_slot_is_free_again_after_each_connection(echo: Echo) -> None:
    for number in range(50):
        line = b"%d\n" % number
        assert await said(echo.address(), line) == [line]


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[Echo, ssl.SSLContext]]:
    """A server with TLS, and what trusts it."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    tls_context(certificate, key)  # makes them
    server = Echo(certificate, key)
    trusted = ssl.create_default_context(cafile=certificate)
    trusted.check_hostname = False
    yield server, trusted
    server.close()


def test_a_peer_that_is_slow_in_tls_has_one_deadline_for_tls_and_challenge(
    tls: tuple[Echo, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, trusted = tls
    deadlines: list[float] = []
    lines = tcp_module.SealedLines

    def recorded(peer: socket.socket, secret: bytes, name: str, hello_by: float, deadline: float) -> Lines:
        deadlines.append(deadline)
        return lines(peer, secret, name, hello_by, deadline)

    monkeypatch.setattr(tcp_module, "SealedLines", recorded)
    monkeypatch.setattr(connections, "PROOF_S", 600.0)
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=30) as peer:
        until(lambda: len(server.server._peers._connections), "it was accepted")
        began_tls_at = time.monotonic()
        with trusted.wrap_socket(peer):
            until(lambda: deadlines, "TLS is done")
    assert deadlines[0] <= began_tls_at + 600.0


async def test_tls_below_it_verifies_the_certificate(tls: tuple[Echo, ssl.SSLContext]) -> None:
    server, trusted = tls
    address = NodeAddress(host="127.0.0.1", port=server.server.port, node="n1", secret=SECRET, tls=trusted)
    assert await said(address, b"one\n") == [b"one\n"]
    stranger = NodeAddress(
        host="127.0.0.1",
        port=server.server.port,
        node="n1",
        secret=SECRET,
        tls=ssl.create_default_context(),
    )
    with pytest.raises(HelperError, match="certificate"):
        await stranger.connect()
    with pytest.raises(HelperError):
        await said(server.address(), b"plain\n")


# ---- the helper itself ---------------------------------------------------------


async def test_a_helper_answers_a_broker_of_another_machine(machine: Machine, tmp_path: Path) -> None:
    machine.stop()
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    port = free_ports()
    machine.start("--listen", f"127.0.0.1:{port}", "--secret-file", str(secret), "--node", "n1")
    client = HelperClient(NodeAddress(host="127.0.0.1", port=port, node="n1", secret=SECRET), lambda: 1)
    assert (await client.ask("sample", None, helper.Sample)).leases == ()
    assert (await client.ask("hello", None, helper.Hello)).epoch == 1
    events = client.watch()
    assert await anext(events) is None
    machine.lease("a-1")
    (await asyncio.to_thread(machine.worker, "a-1")).kill()
    ended = await anext(event async for event in events if event and event.kind is helper.EventKind.ENDED)
    assert ended.lease == "a-1"
    assert machine.stop() == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--listen", "7710"], "HOST:PORT"),
        (["--listen", "0.0.0.0:99999"], "HOST:PORT"),
        (["--listen", "0.0.0.0:7710"], "needs --secret-file"),
        (["--secret-file", "s"], "--listen, which is missing"),
        (["--listen", "0.0.0.0:7710", "--secret-file", "none"], "cannot be read"),
        (["--listen", "[::]:7710", "--secret-file", "s", "--tls-key", "k"], "belong together"),
    ],
)
def test_wrong_options_of_the_port_are_refused_with_a_reason(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(["--state-dir", "x", *given])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
