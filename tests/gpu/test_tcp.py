"""The helper's TCP port: which peers are served, what is noticed on the way, what is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from jupyter_gpushare import connections
from jupyter_gpushare.backends.helper_client import HelperClient, NodeAddress
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service import options
from jupyter_gpushare.gpu.service import tcp as tcp_module
from jupyter_gpushare.gpu.service.lines import Lines
from jupyter_gpushare.gpu.service.server import MAX_UNPROVEN
from jupyter_gpushare.gpu.service.tcp import Endpoint, TcpServer
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper_tls import BROKER, HELPER, TlsFiles
from tests.certificates import Authority, broker_and_helper, helper_options
from tests.gpu.machine import Machine
from tests.ports import free_ports
from tests.waiting import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Echo:
    """A server that answers every line with itself, and remembers them."""

    def __init__(self, tls: TlsFiles) -> None:
        self.heard: list[bytes] = []
        endpoint = Endpoint(host="127.0.0.1", port=free_ports(), node="n1", tls=tls)
        self.server = TcpServer(endpoint, self.talk)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def talk(self, lines: Lines) -> None:
        while True:
            line = lines.read()
            self.heard.append(line)
            lines.write(line + b"\n")

    def address(self, broker: TlsFiles, node: str = "n1", port: int = 0) -> NodeAddress:
        return NodeAddress(host="127.0.0.1", port=port or self.server.port, node=node, tls=broker)

    def close(self) -> None:
        self.server.stop()
        self._thread.join()


@pytest.fixture
def broker(authority: Authority) -> TlsFiles:
    return authority.issue(BROKER)


@pytest.fixture
def serve(authority: Authority) -> Iterator[Callable[[TlsFiles], Echo]]:
    """Start servers with a certificate each."""
    with contextlib.ExitStack() as stack:

        def start(files: TlsFiles) -> Echo:
            server = Echo(files)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def echo(authority: Authority, serve: Callable[[TlsFiles], Echo]) -> Echo:
    return serve(authority.issue(HELPER))


async def said(address: NodeAddress, *lines: bytes) -> list[bytes]:
    connection = await address.connect()
    try:
        found = []
        for line in lines:
            await connection.send(line)
            found.append(await connection.receive())
        return found
    finally:
        connection.close()


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
    """What a server answers to these bytes before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as peer:
        found = b""
        with contextlib.suppress(ConnectionError):
            for data in raw:
                peer.sendall(data)
            while more := peer.recv(65536):
                found += more
        return found


async def refused(address: NodeAddress) -> str:
    """Why a request gets no answer."""
    with pytest.raises(HelperError) as error:
        await said(address, b"suspend\n")
    assert error.value.kind == "not_verified"
    return str(error.value)


async def test_lines_pass_in_both_directions(echo: Echo, broker: TlsFiles) -> None:
    long = b"x" * (helper.MAX_LINE_BYTES - 1)
    lines = [b"one\n", b"two\n", long + b"\n"]
    assert await said(echo.address(broker), *lines) == lines
    assert echo.heard == [b"one", b"two", long]


async def test_a_broker_that_reaches_another_node_sends_it_nothing(echo: Echo, broker: TlsFiles) -> None:
    assert "it is the helper of node n1" in await refused(echo.address(broker, node="n2"))
    assert echo.heard == []


async def test_a_helper_with_a_certificate_of_its_own_answers_for_no_other_node(
    authority: Authority, serve: Callable[[TlsFiles], Echo], broker: TlsFiles
) -> None:
    own = serve(authority.issue(f"n1.{HELPER}"))
    assert await said(own.address(broker), b"one\n") == [b"one\n"]
    of_n2 = serve(authority.issue(f"n2.{HELPER}"))  # it says that it is n1
    for other in (of_n2, serve(authority.issue("n1")), serve(broker)):
        assert "has to name gpushare-helper or n1.gpushare-helper" in await refused(other.address(broker))
        assert other.heard == []


async def test_only_the_brokers_certificate_is_served(
    echo: Echo, authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_module, "LOG_EVERY_S", 0.0)
    for name in (HELPER, f"n1.{HELPER}", "n1"):
        why = "the broker's certificate has to name gpushare-broker"
        assert why in await refused(echo.address(authority.issue(name)))
        assert why in caplog.text
        caplog.clear()
    server_only = authority.issue(BROKER, usage=ExtendedKeyUsageOID.SERVER_AUTH)
    why = await refused(echo.address(server_only))
    assert "refuses this certificate" in why
    assert "include client auth for the broker" in why
    assert echo.heard == []


async def test_another_authority_is_believed_by_neither_side(
    echo: Echo, broker: TlsFiles, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other").issue("forged")
    assert "certificate is not accepted" in await refused(
        echo.address(replace(broker, authority=other.authority))
    )
    forged = replace(other, authority=broker.authority)
    assert "unknown ca: the authority (CA) of both sides" in await refused(echo.address(forged))
    assert echo.heard == []


async def test_an_expired_certificate_is_refused_with_advice_until_it_is_renewed(
    authority: Authority, serve: Callable[[TlsFiles], Echo], broker: TlsFiles
) -> None:
    server = serve(authority.issue(HELPER, days=-1))
    assert "certificate has expired: renew it" in await refused(server.address(broker))
    authority.issue(HELPER)
    assert await said(server.address(broker), b"one\n") == [b"one\n"]
    authority.issue(BROKER, days=-1)
    assert "certificate expired: renew it" in await refused(server.address(broker))
    authority.issue(BROKER)
    assert await said(server.address(broker), b"two\n") == [b"two\n"]
    assert server.heard == [b"one", b"two"]


async def test_files_that_cannot_be_used_are_named(
    echo: Echo, broker: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = tmp_path / "empty"
    empty.touch(0o600)
    assert f"{empty}: [X509" in await refused(echo.address(replace(broker, authority=empty)))
    broker.key.chmod(0o640)
    broker.certificate.touch()
    assert f"{broker.key} can be read by others (mode 640)" in await refused(echo.address(broker))
    broker.key.unlink()
    assert f"{broker.key} cannot be read: No such file" in await refused(echo.address(broker))
    echo.server._endpoint.tls.key.unlink()
    await asyncio.to_thread(answered, echo.server.port, [])
    assert "gpushare-helper.key cannot be read: No such file" in caplog.text


async def test_a_helper_that_closes_a_connection_before_tls_has_its_reason_in_its_log(
    echo: Echo, broker: TlsFiles
) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\x16")
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as helper_without_key:
        port = helper_without_key.sockets[0].getsockname()[1]
        with pytest.raises(HelperError, match="closed the connection: its log says why"):
            await said(echo.address(broker, port=port), b"suspend\n")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_peer_without_a_certificate_or_without_tls_is_not_served(
    echo: Echo, broker: TlsFiles, version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=broker.authority)
    context.check_hostname, context.maximum_version = False, version

    def speak() -> None:
        with (
            socket.create_connection(("127.0.0.1", echo.server.port), timeout=30) as peer,
            context.wrap_socket(peer) as encrypted,
        ):
            encrypted.sendall(b"suspend\n")
            encrypted.recv(100)

    with pytest.raises(OSError):
        speak()
    until(lambda: "did not return a certificate" in caplog.text or "unsupported protocol" in caplog.text)
    assert b"node" not in answered(echo.server.port, [b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n".ljust(100)])
    assert echo.heard == []


async def test_a_recorded_connection_is_of_no_use_later(echo: Echo, broker: TlsFiles) -> None:
    async with Wire(echo.server.port) as wire:
        await said(echo.address(broker, port=wire.own_port), b"suspend\n")
    assert echo.heard == [b"suspend"]
    await asyncio.to_thread(answered, echo.server.port, [b"".join(wire.sent)])
    assert echo.heard == [b"suspend"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data + data, id="repeated"),
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data[:8] + bytes([data[8] ^ 1]) + data[9:], id="changed"),
        pytest.param(lambda data: data[:3] + b"\xff" + data[4:], id="longer"),
    ],
)
async def test_a_request_that_was_changed_on_the_way_ends_the_connection(
    echo: Echo, broker: TlsFiles, change: Callable[[bytes], bytes]
) -> None:
    changes = False

    async with Wire(echo.server.port, lambda _, data: change(data) if changes else data) as wire:
        connection = await echo.address(broker, port=wire.own_port).connect()
        changes = True
        await connection.send(b"suspend\n")
        with contextlib.suppress(OSError, TimeoutError):
            assert await asyncio.wait_for(connection.receive(), 1) in (b"", b"suspend\n")
        with contextlib.suppress(OSError):
            await connection.send(b"resume\n")
            assert await connection.receive() == b""
        connection.close()
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
    echo: Echo, broker: TlsFiles
) -> None:
    connection = await echo.address(broker).connect()
    with silent_peers(echo.server.port, 2 * MAX_UNPROVEN):
        assert await said(echo.address(broker), b"one\n") == [b"one\n"]
        await connection.send(b"two\n")
        assert await connection.receive() == b"two\n"
    connection.close()


async def test_a_system_without_threads_refuses_a_connection_and_serves_the_next(
    echo: Echo, broker: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "peer":
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    for _ in range(2 * MAX_UNPROVEN):
        with pytest.raises(HelperError, match="no device helper"):
            await said(echo.address(broker), b"one\n")
    monkeypatch.setattr(threading.Thread, "start", started)
    assert await said(echo.address(broker), b"one\n") == [b"one\n"]


def test_handshakes_are_bounded_over_all_addresses(echo: Echo) -> None:
    with silent_peers(echo.server.port, MAX_UNPROVEN + 24):
        until(lambda: [t.name for t in threading.enumerate()].count("peer") > 0)
        assert [t.name for t in threading.enumerate()].count("peer") <= MAX_UNPROVEN


def test_a_peer_that_sends_byte_by_byte_has_one_deadline(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROOF_S", 0.5)
    with socket.create_connection(("127.0.0.1", echo.server.port), timeout=30) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = b"\x16\x03\x01\x10\x00" + bytes(4096)  # the head of a long record, which never ends
        sent = 0
        with contextlib.suppress(OSError):
            for byte in hello:
                peer.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert sent < len(hello)


async def test_a_helper_whose_connections_all_have_a_request_is_busy_and_not_away(
    authority: Authority, broker: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_module, "MAX_CONNECTIONS", 1)
    server = Echo(authority.issue(HELPER))
    ends = threading.Event()
    server.server._talk = lambda lines: (lines.read(), server.heard.append(b""), ends.wait(30))
    try:
        connection = await server.address(broker).connect()
        await connection.send(b"suspend\n")
        await asyncio.to_thread(until, lambda: server.heard)
        with pytest.raises(HelperError, match="1 connections are open: try again") as refused:
            await server.address(broker).connect()
        assert refused.value.kind == "busy"
        connection.close()
    finally:
        ends.set()
        server.close()


async def test_a_slot_is_free_again_after_each_connection(echo: Echo, broker: TlsFiles) -> None:
    for number in range(50):
        line = b"%d\n" % number
        assert await said(echo.address(broker), line) == [line]


# ---- the helper itself ---------------------------------------------------------


async def test_a_helper_answers_a_broker_of_another_machine(machine: Machine, tmp_path: Path) -> None:
    machine.stop()
    broker, helpers = broker_and_helper(tmp_path)
    port = free_ports()
    machine.start("--listen", f"127.0.0.1:{port}", *helper_options(helpers), "--node", "n1")
    client = HelperClient(NodeAddress(host="127.0.0.1", port=port, node="n1", tls=broker), lambda: 1)
    assert (await client.ask("sample", None, helper.Sample)).leases == ()
    assert (await client.ask("hello", None, helper.Hello)).epoch == 1
    events = client.watch()
    assert await anext(events) is None
    machine.lease("a-1")
    (await asyncio.to_thread(machine.worker, "a-1")).kill()
    ended = await anext(event async for event in events if event and event.kind is helper.EventKind.ENDED)
    assert ended.lease == "a-1"
    client.close()
    assert machine.stop() == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--listen", "7710"], "HOST:PORT"),
        (["--listen", "0.0.0.0:99999"], "HOST:PORT"),
        (["--listen", "[::]:7710"], "needs --tls-certificate, --tls-key and --tls-ca"),
        (["--listen", "[::]:7710", "--tls-certificate", "c", "--tls-key", "k"], "and --tls-ca"),
        (["--tls-ca", "a"], "--listen, which is missing"),
    ],
)
def test_wrong_options_of_the_port_are_refused_with_a_reason(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(["--state-dir", "x", *given])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
