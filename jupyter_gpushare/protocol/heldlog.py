"""The output of a running job that its disk did not take, for the same user on the same machine.

The runner holds the newest bytes of a log in memory (`jobfiles.BoundedLog`).  `HeldLog` serves them at
an abstract Unix socket, which needs no file; `held_of` requests them.  Each end gets the uid of the
other from the kernel (SO_PEERCRED, unix(7)), because another user may take the socket's name.  It also
refuses a peer with pid 0, which is in another container (pid_namespaces(7)).

Each connection gets one answer: a line of JSON (`attempt`, `offset`, `left_out_bytes`, `why`), then
the bytes from ``offset`` on.  There are no bytes while the files have all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.jobfiles import RECENT_BYTES, SILENT, BoundedLog, Piece, read_log

# Both ends give up after this time.
ANSWER_S = 2.0
MAX_READERS = 16
_HEAD_BYTES = 2048
_MAX_BYTES = _HEAD_BYTES + 2 * RECENT_BYTES
_WHY_CHARS = 200
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7))


@dataclass(frozen=True, slots=True)
class Held:
    """The end of the log of a running attempt, whose files lack `left_out_bytes`."""

    attempt: int
    left_out_bytes: int
    why: str  # the reason
    piece: Piece


def read_kept(path: Path, held: Held | None, offset: int, max_bytes: int) -> Piece:
    """Read a log like `read_log`, with the bytes that its files lack and the runner ``held``."""
    is_silent = held is not None and held.why == SILENT  # reading its files may block
    piece = Piece(offset, b"") if is_silent else read_log(path, offset, max_bytes)
    if held is None:
        return piece
    skipped = max(0, offset - held.piece.offset)
    data = held.piece.data[skipped:][:max_bytes]
    known = Piece(held.piece.offset + skipped, data)
    return known if data and (not piece.data or known.offset < piece.offset) else piece


@dataclass(frozen=True, slots=True)
class _Head:
    attempt: int
    offset: int
    left_out_bytes: int
    why: str


def _address(job: str) -> str:
    return f"\0gpushare-log-{job}"


def _is_own(connection: socket.socket) -> bool:
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(given)
    return bool(pid and uid == os.getuid())


class HeldLog:
    """The runner's end of the socket, while its command runs."""

    def __init__(self, job: str, attempt: int, log: BoundedLog) -> None:
        self._job = job
        self._attempt = attempt
        self._log = log
        self._readers = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> None:
        with contextlib.suppress(OSError):  # the name is taken, and readers use the files only
            self._server = await asyncio.start_unix_server(self._answer, _address(self._job))

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._readers += 1
        try:
            if self._readers <= MAX_READERS and _is_own(writer.get_extra_info("socket")):
                writer.write(self._answer_bytes())
                async with asyncio.timeout(ANSWER_S):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (TimeoutError, OSError):
            writer.transport.abort()
        finally:
            self._readers -= 1
            writer.close()

    def _answer_bytes(self) -> bytes:
        left_out = self._log.left_out_bytes
        piece = self._log.recent() if left_out else Piece(self._log.end, b"")
        head = _Head(self._attempt, piece.offset, left_out, self._log.why[:_WHY_CHARS])
        return json.dumps(asdict(head)).encode() + b"\n" + piece.data


def held_of(job: str) -> Held | None:
    """Return the bytes that the runner of a job has and its files lack.

    Return None if there are none, or if no runner of the job is on this machine.  Blocks for at most
    `ANSWER_S`.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(_address(job))
            return _decoded(_read(connection)) if _is_own(connection) else None
    except (OSError, InvalidRequest):
        return None


def _read(connection: socket.socket) -> bytes:
    until = time.monotonic() + ANSWER_S
    answer = bytearray()
    while len(answer) < _MAX_BYTES and (more := connection.recv(_MAX_BYTES - len(answer))):
        answer += more
        connection.settimeout(max(0.001, until - time.monotonic()))
    return bytes(answer)


def _decoded(answer: bytes) -> Held | None:
    line, _, data = answer.partition(b"\n")
    head = wire.decode(line[:_HEAD_BYTES], _Head)
    why = "".join(c for c in head.why[:_WHY_CHARS] if " " <= c <= "~")
    is_any = head.attempt > 0 and head.offset >= 0 and head.left_out_bytes > 0
    return Held(head.attempt, head.left_out_bytes, why, Piece(head.offset, data)) if is_any else None
