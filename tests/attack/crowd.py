"""Processes that hold many unauthenticated connections to one address.  Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator

Address = str | tuple[str, int]

# No process of a crowd lives longer.
LIFE_S = 120
HANDSHAKE_S = 10.0
# Bytes of a request head that never ends; every second connection sends one each `BYTE_S`.
HEAD, BYTE_S = b"GET / HTTP/1.1\r\nX: " + b"x" * 1000, 1.0
# The number of closed connections that a process reopens per second.
AGAIN_PER_S = 200
FIRST_UID = 65_520


class _Member:
    """One process: connections of one account or address, reopened when they are closed."""

    def __init__(self, address: Address, source: str, count: int, is_tls: bool) -> None:
        self._address = address
        self._source = source
        self._count = count
        self._tls = ssl.create_default_context() if is_tls else None
        if self._tls is not None:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._open: dict[int, tuple[socket.socket, bool]] = {}
        self._poll = select.epoll()
        self._opened = 0

    def run(self) -> None:
        """Hold the connections until the process is killed; close standard output when all are open."""
        allowed, byte_at, sent = float(self._count), time.monotonic(), 0
        before = time.monotonic()
        while True:
            now = time.monotonic()
            allowed, before = allowed + AGAIN_PER_S * (now - before), now
            while len(self._open) < self._count and allowed >= 1:
                allowed -= 1
                self._connect()
                if self._opened == self._count:
                    os.close(1)
            for fd, _ in self._poll.poll(0.05):
                self._read(fd)
            if now - byte_at >= BYTE_S:
                byte_at, sent = now, (sent + 1) % len(HEAD)
                for peer, is_slow in self._open.values():
                    with contextlib.suppress(OSError):
                        if is_slow:
                            peer.send(HEAD[sent : sent + 1])

    def _connect(self) -> None:
        family = socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET
        peer = socket.socket(family)
        try:
            if family == socket.AF_INET:
                peer.bind((self._source, 0))
            # No timeout: with one, a full queue of a unix socket is an error (EAGAIN).
            peer.connect(self._address)
            is_slow = self._opened % 2 == 1
            if is_slow and self._tls is not None:  # the others are silent before it
                peer.settimeout(HANDSHAKE_S)
                peer = self._tls.wrap_socket(peer)
            peer.setblocking(False)
        except OSError:
            peer.close()
        else:
            self._open[peer.fileno()] = (peer, is_slow)
            self._poll.register(peer, select.EPOLLIN | select.EPOLLHUP)
        self._opened += 1

    def _read(self, fd: int) -> None:
        peer, _ = self._open[fd]
        try:
            if peer.recv(65536):
                return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            pass
        self._poll.unregister(peer)
        del self._open[fd]
        peer.close()


@contextlib.contextmanager
def crowd(
    address: Address, count: int, members: int = 3, *, is_tls: bool = False
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield processes that together hold ``count`` connections; they end with the block.

    Each has a separate address of 127.0.1.0/24 and, as root, a separate uid.  Each closes its standard
    output once it has opened all its connections.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(members):
            arguments = json.dumps([address, number, count // members, is_tls])
            process = stack.enter_context(
                subprocess.Popen([sys.executable, __file__, arguments], stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def _main() -> None:
    address, number, count, is_tls = json.loads(sys.argv[1])
    signal.alarm(LIFE_S)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(FIRST_UID + number)
        os.setuid(FIRST_UID + number)
    address = address if isinstance(address, str) else tuple(address)
    _Member(address, f"127.0.1.{number + 1}", count, is_tls).run()


if __name__ == "__main__":
    _main()
