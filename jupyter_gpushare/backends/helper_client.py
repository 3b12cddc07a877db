"""Requests to one device helper, on this machine or another.

The helper's protocol is `protocol.helper`: one line of JSON each way, one connection per request (a
slow suspension must not delay a sample).  On this machine a line is one line of a unix socket; over
TCP it is one frame of `protocol.sealed`, below which TLS can be.
"""

from __future__ import annotations

import abc
import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from jupyter_gpushare.errors import DeviceError, HelperError
from jupyter_gpushare.protocol import helper, sealed

T = TypeVar("T")

# The helper answers from memory; a later answer means that it hangs.
_QUICK_S = 5.0
# Above the helper's own limits for moves: copies of tens of GB take minutes.
MOVE_S = 600.0
# For a connection and the proofs of both sides.
_CONNECT_S = 5.0
_KEEPALIVE = (  # a node that is gone is noticed after half a minute
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class Connection(Protocol):
    """An open connection to a helper."""

    async def send(self, line: bytes) -> None:
        """Send one line, with its end."""

    async def receive(self) -> bytes:
        """Return the next line; empty when the helper closed the connection."""

    def close(self) -> None:
        """Close it."""


class Address(abc.ABC):
    """Where a helper listens."""

    @abc.abstractmethod
    async def connect(self) -> Connection:
        """Return a new connection.

        Raises:
            HelperError: no helper answers there, or it is not the one that was asked for.
        """


@dataclass(frozen=True, slots=True)
class SocketAddress(Address):
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
        return _Plain(reader, writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress(Address):
    """A TCP port of a node; helper and broker share the secret."""

    host: str
    port: int
    node: str
    secret: bytes
    tls: ssl.SSLContext | None = None  # None: the connection is sealed, and can be read on the way
    tls_name: str = ""  # in the helper's certificate; empty: the node

    async def connect(self) -> Connection:
        """Return a new connection after both sides have shown that they know the secret.

        Raises:
            HelperError: no answer within `_CONNECT_S`, or not the helper of this node.
        """
        where = f"node {self.node} at {self.host} port {self.port}"
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self.host,
                    self.port,
                    limit=helper.MAX_LINE_BYTES,
                    ssl=self.tls,
                    server_hostname=(self.tls_name or self.node) if self.tls else None,
                )
                return await self._prove(reader, writer)
        except sealed.SealError as error:
            _close(writer)
            raise HelperError(
                "not_verified", f"the device helper of {where} is not accepted: {error}"
            ) from None
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            _close(writer)
            why = getattr(error, "strerror", "") or str(error) or "no answer in time"
            raise HelperError("unreachable", f"no device helper of {where}: {why}") from None
        except asyncio.CancelledError:
            _close(writer)
            raise

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
        if (raw := writer.get_extra_info("socket")) is not None:
            for level, option, value in _KEEPALIVE:
                raw.setsockopt(level, option, value)
        handshake = sealed.ClientHandshake(self.secret, self.node)
        writer.write(handshake.hello())
        writer.write(handshake.prove(await reader.readexactly(sealed.CHALLENGE_BYTES)))
        await writer.drain()
        return _Sealed(reader, writer, handshake.session())


class _Plain:
    """Lines as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, line: bytes) -> None:
        self._writer.write(line)
        await self._writer.drain()

    async def receive(self) -> bytes:
        return await self._reader.readline()

    def close(self) -> None:
        self._writer.close()


class _Sealed:
    """Lines of which each is one frame."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: sealed.Session
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session

    async def send(self, line: bytes) -> None:
        self._writer.write(self._session.seal(line))
        await self._writer.drain()

    async def receive(self) -> bytes:
        try:
            header = await self._reader.readexactly(sealed.HEADER_BYTES)
            rest = await self._reader.readexactly(self._session.rest_bytes(header))
            return self._session.open(header, rest)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise ConnectionResetError("the connection ended within a frame") from None
            return b""
        except sealed.SealError as error:
            raise ConnectionResetError(str(error)) from None

    def close(self) -> None:
        self._writer.close()


def _close(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.close()


class HelperClient:
    """Connections to the device helper, each with the epoch that the broker has at that moment."""

    def __init__(self, address: Address, epoch: Callable[[], int]) -> None:
        self._address = address
        self._epoch = epoch

    async def ask(self, verb: str, request: Any, kind: type[T], timeout_s: float = _QUICK_S) -> T:
        """Return the helper's answer to one request.

        Raises:
            HelperError: it refused (``kind`` says why), or does not answer.
            DeviceError: the driver refused.
        """
        plain = {} if request is None else msgspec.to_builtins(request)
        if verb != "hello":  # the one verb that the helper answers to any epoch
            plain["epoch"] = self._epoch()
        connection = await self._address.connect()
        try:
            async with asyncio.timeout(timeout_s):
                await connection.send(helper.encode({"verb": verb, **plain}))
                line = await connection.receive()
        except (OSError, TimeoutError, ValueError) as error:
            raise HelperError("silent", f"the device helper did not answer {verb}: {error!r}") from None
        finally:
            connection.close()
        return _result(line, verb, kind)

    async def watch(self) -> AsyncIterator[helper.Event | None]:
        """Yield None once the helper has accepted, then events as they happen, until the connection ends.

        Raises:
            HelperError: no connection, it broke, or the helper refused.
        """
        connection = await self._address.connect()
        try:
            await connection.send(helper.encode({"verb": "watch", "epoch": self._epoch()}))
            while line := await connection.receive():
                said = msgspec.json.decode(line)
                if isinstance(said, dict) and said.get("kind") in tuple(helper.EventKind):
                    yield msgspec.convert(said, helper.Event)
                elif isinstance(said, dict) and "ok" in said:
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
        said = msgspec.json.decode(line)
        if said["ok"]:
            return msgspec.convert(said.get("result"), kind)
        error = said["error"]
        word, text, call, code = error["kind"], error["message"], error.get("call"), error.get("code")
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise HelperError(
            "garbled", f"the device helper's answer to {verb} is not understood: {error}"
        ) from None
    if call:
        raise DeviceError(str(call), int(code or 0), str(text))
    raise HelperError(str(word), str(text))
