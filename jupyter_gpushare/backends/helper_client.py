"""Requests to one device helper, on this machine or another.

The protocol is `protocol.helper`: one line of JSON in each direction, and one request at a time per
connection.  Requests in parallel use several connections, so a slow suspension does not delay a sample.
A connection is a unix socket on this machine, or TLS (`protocol.helper_tls`) to another one.
"""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jupyter_gpushare.errors import DeviceError, GpuShareError, HelperError
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper_tls import HELPER, TlsFiles, keep_alive, names, reason

T = TypeVar("T")

# The helper answers from memory; if it takes longer, it hangs.
_QUICK_S = 5.0
# Above the helper's own limits for moves: copies of tens of GB take minutes.
MOVE_S = 600.0
# Limit for a connection and the certificates of both sides.
_CONNECT_S = 5.0
# Maximum age of a kept connection, so that both sides show their certificates again.
KEEP_S = 60.0
# Verbs that only read, so that a broker may send them twice.
_READS = frozenset({"hello", "inventory", "sample"})


class Connection:
    """An open connection to a helper."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._opened_at = asyncio.get_running_loop().time()

    @property
    def is_old(self) -> bool:
        """Whether it is older than `KEEP_S`."""
        return asyncio.get_running_loop().time() - self._opened_at > KEEP_S

    async def send(self, line: bytes) -> None:
        """Send one line, which includes its newline."""
        self._writer.write(line)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next line; empty if the helper has closed the connection."""
        return await self._reader.readline()

    def close(self) -> None:
        """Close it at once, without a TLS shutdown, which would need another answer of the helper."""
        self._writer.transport.abort()


class HelperAddress(abc.ABC):
    """Where a helper listens."""

    @abc.abstractmethod
    async def connect(self) -> Connection:
        """Return a new connection.

        Raises:
            HelperError: no helper answers at the address, or it is another helper.
        """


@dataclass(frozen=True, slots=True)
class SocketAddress(HelperAddress):
    """A unix socket of this machine."""

    path: Path

    async def connect(self) -> Connection:
        """Return a new connection to the socket.

        Raises:
            HelperError: no helper listens on it.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self.path, limit=helper.MAX_LINE_BYTES)
        except OSError as error:
            raise HelperError("unreachable", f"no device helper at {self.path}: {error.strerror}") from None
        return Connection(reader, writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress(HelperAddress):
    """A TCP port of a node."""

    host: str
    port: int
    node: str
    tls: TlsFiles  # of the broker

    async def connect(self) -> Connection:
        """Return a new connection on which both sides have shown their certificates.

        Raises:
            HelperError: no answer within `_CONNECT_S`, or the helper is another node's or busy.
        """
        peer = f"node {self.node} at {self.host} port {self.port}"
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await self._open()
        except ssl.SSLError as error:
            refused = reason(error)
        except TimeoutError:
            raise HelperError("unreachable", f"no device helper of {peer}: no answer in time") from None
        except OSError as error:
            why = error.strerror or str(error) or "it closed the connection: its log says why"
            raise HelperError("unreachable", f"no device helper of {peer}: {why}") from None
        except (GpuShareError, ValueError) as error:
            if isinstance(error, HelperError) and error.kind == helper.ErrorKind.BUSY:
                raise
            refused = str(error)
        raise HelperError("not_verified", f"the device helper of {peer} is not accepted: {refused}")

    async def _open(self) -> Connection:
        reader, writer = await asyncio.open_connection(
            self.host,
            self.port,
            limit=helper.MAX_LINE_BYTES,
            ssl=self.tls.context(ssl.Purpose.SERVER_AUTH),
        )
        connection = Connection(reader, writer)
        try:
            keep_alive(writer.get_extra_info("socket"))
            self._verify(names(writer.get_extra_info("peercert")), await connection.receive())
        except BaseException:
            connection.close()
            raise
        return connection

    def _verify(self, peer_names: set[str], greeting: bytes) -> None:
        """Check that the peer is the helper of this node.

        Raises:
            HelperError: it is not, or does not accept this broker.
        """
        if not peer_names & {HELPER, f"{self.node}.{HELPER}"}:
            raise HelperError("not_verified", f"its certificate has to name {HELPER} or {self.node}.{HELPER}")
        node = _result(greeting, "connect", dict).get("node")
        if node != self.node:
            raise HelperError("not_verified", f"it is the helper of node {node}")


class HelperClient:
    """Connections to the device helper; each request has the broker's epoch at that time.

    The client keeps one connection for the verbs of `_READS`, because a TLS handshake costs the broker more
    than ten requests.  If the helper has closed that connection, the client repeats the request on a new one.
    """

    def __init__(self, address: HelperAddress, epoch: Callable[[], int]) -> None:
        self._address = address
        self._epoch = epoch
        self._kept: Connection | None = None  # has no request in progress
        self._closed = False

    async def ask(self, verb: str, request: Any, kind: type[T], timeout_s: float = _QUICK_S) -> T:
        """Return the helper's answer to one request.

        Raises:
            HelperError: the helper refused (``kind`` says why), or does not answer.
            DeviceError: the driver refused.
        """
        plain = {} if request is None else msgspec.to_builtins(request)
        if verb != "hello":  # the only verb that the helper answers at any epoch
            plain["epoch"] = self._epoch()
        message = helper.encode({"verb": verb, **plain})
        line = b""
        if verb in _READS and (kept := self._take()) is not None:
            line = await self._answer(kept, verb, message, timeout_s)
        if not line:
            line = await self._answer(await self._address.connect(), verb, message, timeout_s)
        return _result(line, verb, kind)

    def close(self) -> None:
        """Close the kept connection; later requests use connections of their own."""
        self._closed = True
        if (kept := self._take()) is not None:
            kept.close()

    def _take(self) -> Connection | None:
        kept, self._kept = self._kept, None
        if kept is not None and kept.is_old:
            kept.close()
            return None
        return kept

    async def _answer(self, connection: Connection, verb: str, message: bytes, timeout_s: float) -> bytes:
        """Return the helper's answer, or an empty line if it has closed the connection."""
        line = b""
        try:
            async with asyncio.timeout(timeout_s):
                await connection.send(message)
                line = await connection.receive()
        except ConnectionError:
            pass
        except (OSError, TimeoutError, ValueError) as error:
            raise HelperError("silent", f"the device helper did not answer {verb}: {error!r}") from None
        finally:
            if line and verb in _READS and self._kept is None and not self._closed:
                self._kept = connection
            else:
                connection.close()
        return line

    async def watch(self) -> AsyncIterator[helper.Event | None]:
        """Yield None when the helper has accepted, then events until the connection ends.

        Raises:
            HelperError: no connection, the connection broke, or the helper refused.
        """
        connection = await self._address.connect()
        try:
            await connection.send(helper.encode({"verb": "watch", "epoch": self._epoch()}))
            while line := await connection.receive():
                message = msgspec.json.decode(line)
                if isinstance(message, dict) and message.get("kind") in tuple(helper.EventKind):
                    yield msgspec.convert(message, helper.Event)
                elif isinstance(message, dict) and "ok" in message:
                    _result(line, "watch", dict)
                    yield None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise HelperError("silent", f"the device helper's events ended: {error!r}") from None
        finally:
            connection.close()


def _result(line: bytes, verb: str, kind: type[T]) -> T:
    if not line:
        raise HelperError("silent", f"the device helper closed the connection during {verb}")
    try:
        answer = msgspec.json.decode(line)
        if answer["ok"]:
            return msgspec.convert(answer.get("result"), kind)
        error = answer["error"]
        reason_kind, text, call, code = error["kind"], error["message"], error.get("call"), error.get("code")
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise HelperError(
            "garbled", f"the device helper's answer to {verb} is not understood: {error}"
        ) from None
    if call:
        raise DeviceError(str(call), int(code or 0), str(text))
    raise HelperError(str(reason_kind), str(text))
