"""The broker's listening sockets: inherited from a parent that keeps them open, or bound by the broker.

While a port is free between two brokers, any process can bind it, and the Hub's
proxy would then send cookies and tokens to that process.  So a parent that
outlives the broker holds the sockets and passes them on:

* systemd: ``LISTEN_PID`` and ``LISTEN_FDS``, descriptors from 3 (sd_listen_fds(3));
* ``gpushare broker --respawn``: ``GPUSHARE_LISTEN_FDS``, numbers of descriptors.

A broker that must bind its sockets itself reports that in ``health``.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tornado.netutil import bind_sockets, bind_unix_socket

from jupyter_gpushare.connections import BACKLOG
from jupyter_gpushare.errors import StoreError

# The parent that bound the descriptors; only its own child takes them.
PARENT_VARIABLE = "GPUSHARE_PARENT_PID"
FDS_VARIABLE = "GPUSHARE_LISTEN_FDS"
_FIRST_FD = 3  # SD_LISTEN_FDS_START, systemd/sd-daemon.h
_MAX_FDS = 16
_MAX_PATH_BYTES = 107  # sun_path of struct sockaddr_un, less the NUL: unix(7)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the broker listens."""

    host: str
    port: int  # for the Hub's proxy
    path: Path  # unix socket for the Hub, servers, jobs and command line of this machine
    tls: tuple[str, int] | None = None  # for servers and Hubs of other machines


@dataclass(frozen=True, slots=True)
class Sockets:
    """Listening sockets, by the kind of their callers."""

    unix: tuple[socket.socket, ...]
    http: tuple[socket.socket, ...]  # for the Hub's proxy; encrypted too with internal TLS
    tls: tuple[socket.socket, ...]
    inherited: bool

    @classmethod
    def take(cls, addresses: Addresses, environment: MutableMapping[str, str]) -> Self:
        """Return the inherited sockets, and bind the missing ones.

        Raises:
            StoreError: an address is in use, or cannot be listened on.
        """
        found = inherited(environment)
        kinds = {_kind(each, addresses) for each in found}
        sockets = [*found, *bind(addresses, kinds)]
        by_kind = {
            kind: tuple(each for each in sockets if _kind(each, addresses) == kind)
            for kind in ("unix", "http", "tls")
        }
        return cls(**by_kind, inherited={"unix", "http"} <= kinds)


def _kind(listening: socket.socket, addresses: Addresses) -> str:
    if listening.family == socket.AF_UNIX:
        return "unix"
    port = listening.getsockname()[1]
    return "tls" if addresses.tls is not None and port == addresses.tls[1] else "http"


def inherited(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the listening sockets that the parent passed on, and remove the variables.

    Raises:
        StoreError: a descriptor is no socket.
    """
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "0")
    environment.pop("LISTEN_FDNAMES", None)
    numbers = environment.pop(FDS_VARIABLE, "")
    fds: Iterable[int] = ()
    if numbers and environment.get(PARENT_VARIABLE) == str(os.getppid()):
        fds = [int(fd) for fd in numbers.split(",")]
    elif pid == str(os.getpid()) and count.isdigit():
        fds = range(_FIRST_FD, _FIRST_FD + min(int(count), _MAX_FDS))
    sockets = []
    for fd in fds:
        try:
            listening = socket.socket(fileno=fd)
        except OSError as error:
            raise StoreError(f"the inherited descriptor {fd} is no socket: {error.strerror}") from None
        listening.setblocking(False)
        listening.set_inheritable(False)
        sockets.append(listening)
    return sockets


def bind(addresses: Addresses, without: Iterable[str] = ()) -> list[socket.socket]:
    """Return new listening sockets for ``addresses``, except the kinds in ``without``.

    Raises:
        StoreError: an address is in use, or cannot be listened on.
    """
    sockets: list[socket.socket] = []
    skipped = frozenset(without)
    try:
        # TCP first, so that a second broker fails before it takes the path from the first.
        if "http" not in skipped:
            sockets += _bind_tcp(addresses.host, addresses.port)
        if addresses.tls is not None and "tls" not in skipped:
            sockets += _bind_tcp(*addresses.tls)
        if "unix" not in skipped:
            sockets.append(_bind_unix(addresses.path))
    except StoreError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    try:
        return bind_sockets(port, host, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} on {host} is in use: stop what listens there, or"
        else:
            problem = f"cannot listen on port {port} of {host} ({error.strerror}):"
        raise StoreError(f"{problem} change the url of the service gpushare") from None


def _bind_unix(path: Path) -> socket.socket:
    """Listen on ``path``; every user may connect, and tokens decide on their rights."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise StoreError(f"the path of a socket has at most {_MAX_PATH_BYTES} bytes: {path} is too long")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o711)
        folder = path.parent.stat()
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                f"{path.parent} is writable for others, who could replace {path.name}: chmod go-w"
            )
        return bind_unix_socket(str(path), mode=0o666, backlog=BACKLOG)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be listened on: {error}") from None


def pass_on(sockets: Sequence[socket.socket], environment: MutableMapping[str, str]) -> tuple[int, ...]:
    """Name ``sockets`` in the environment of a child; return the descriptors to pass to it."""
    fds = tuple(each.fileno() for each in sockets)
    environment[FDS_VARIABLE] = ",".join(map(str, fds))
    environment[PARENT_VARIABLE] = str(os.getpid())
    return fds
