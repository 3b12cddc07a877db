"""Connections to the broker, which is verified before a token is sent.

| address                                                  | verified by                                |
|----------------------------------------------------------|--------------------------------------------|
| ``http+unix://%2Frun%2Fgpushare-api%2Fapi.sock``         | the folder of the socket, and SO_PEERCRED  |
| ``https://host:8004``                                    | the pinned certificate of the broker, or   |
|                                                          | (no certificate given) the system's CAs    |
| ``http://hub``, ``http://hub/base/url``                  | nothing: the Hub's proxy, for users' own   |
|                                                          | tokens; spawners refuse it                 |

`api_url` adds the path of the API.  The broker serves it below `SERVICE_PATH` on all its sockets,
for any base_url of the Hub, and below the path that the Hub's proxy sends.

A loopback TCP port belongs to the process that binds it first, so an address
alone proves nothing.  A path does: only root and the owner of a folder that is
closed to others can put a socket there.  SO_PEERCRED (unix(7)) gives the uid of
the process that called listen(2), which is root's under socket activation.
JupyterHub and its proxy also use the scheme ``http+unix``.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpcore
import httpx

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.peers import socket_uid

UNIX_SCHEME = "http+unix"
SERVICE_PATH = "/services/gpushare"
API_PATH = f"{SERVICE_PATH}/api/v1"
# The pinned certificate (PEM) for GPUSHARE_API_URL, in the environment of servers on other machines.
CERTIFICATE_VARIABLE = "GPUSHARE_API_CERTIFICATE"


class Unverified(httpcore.ConnectError):
    """The process at the address is not proved to be the broker; nothing was sent to it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address of a broker; requests use ``url``, and the other fields verify the broker."""

    url: str
    socket: Path | None = None
    certificate: str = ""

    @property
    def is_verified(self) -> bool:
        """Return whether connections to this address are verified to lead to the broker."""
        return self.socket is not None or self.url.startswith("https://")


def unix_url(path: Path, prefix: str = "") -> str:
    """Return the address of the socket at ``path``, such as ``http+unix://%2Frun%2Fgpushare-api%2Fapi.sock``.

    ``prefix`` is for configurations of older versions, which add it; the API does not need it.
    """
    return f"{UNIX_SCHEME}://{quote(str(path), safe='')}/{prefix.strip('/')}".rstrip("/")


def api_url(url: str) -> str:
    """Return the address of the API, given that of the broker's socket, port or page, or of the Hub."""
    url = url.rstrip("/")
    return url if url.endswith("/api/v1") else url.removesuffix(SERVICE_PATH) + API_PATH


def parse(url: str, certificate: str = "") -> Address:
    """Return the parsed address; over TLS only ``certificate`` (PEM) is accepted, if given.

    Raises:
        InvalidRequest: ``url`` is not an address of a broker.
    """
    url = url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme == UNIX_SCHEME:
        path = Path(unquote(parts.netloc))
        if not path.is_absolute():
            raise InvalidRequest(f"{url!r} does not name a socket: {unix_url(Path('/run/x.sock'))}")
        return Address(f"http://gpushare{parts.path}", socket=path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{url!r} is not of the form http+unix://..., https://... or http://...")
    return Address(url, certificate=certificate if parts.scheme == "https" else "")


def writer_of(path: Path, owners: Set[int]) -> str:
    """Return how a user other than ``owners`` could change or replace the file at ``path``; "" if none can.

    Raises:
        OSError: the file does not exist.
    """
    for each in (path, *path.parents):
        about = each.stat()
        # A user's private group (gid = uid, useradd(8)) has one member.
        group = 0 if about.st_gid in (0, about.st_uid) else stat.S_IWGRP
        # In a sticky folder others can add files, but replace none.
        sticky = each != path and about.st_mode & stat.S_ISVTX
        if about.st_mode & (group | stat.S_IWOTH) and not sticky:
            return f"{each} is writable for other users"
        if about.st_uid not in owners:
            return f"{each} belongs to uid {about.st_uid}"
    return ""


def trusted_uids(path: Path) -> frozenset[int]:
    """Return the uids that can put a socket at ``path``: root's, and its folder's owner's.

    Raises:
        Unverified: other users could put one there, or the folder does not exist.
    """
    try:
        folder = path.parent.resolve(strict=True)
        owner = folder.stat().st_uid
        why = writer_of(folder, {0, owner, os.geteuid()})
    except OSError as error:
        raise Unverified(f"{path}: {error.strerror}") from None
    if why:
        raise Unverified(f"{why}, so {path} proves nothing")
    return frozenset((0, owner))


class _AsyncBackend(httpcore.AnyIOBackend):
    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        trusted = trusted_uids(Path(path))
        stream = await super().connect_unix_socket(path, timeout, socket_options)
        try:
            if (uid := socket_uid(stream.get_extra_info("socket"))) not in trusted:
                raise Unverified(f"uid {uid} listens on {path}, not the broker's user")
        except BaseException:
            await stream.aclose()
            raise
        return stream


class _AsyncUnixTransport(httpx.AsyncHTTPTransport):
    def __init__(self, path: Path) -> None:
        super().__init__(uds=str(path))
        # httpx has no argument for the network backend.
        self._pool = httpcore.AsyncConnectionPool(uds=str(path), network_backend=_AsyncBackend())


def async_transport(address: Address) -> httpx.AsyncBaseTransport:
    """Return a transport that opens verified connections for asyncio."""
    if address.socket is not None:
        return _AsyncUnixTransport(address.socket)
    return httpx.AsyncHTTPTransport(verify=_tls(address), trust_env=False)


def _tls(address: Address) -> ssl.SSLContext:
    if not address.certificate:
        return httpx.create_ssl_context(trust_env=False)
    try:
        context = ssl.create_default_context(cadata=address.certificate)
    except ssl.SSLError as error:
        raise InvalidRequest(f"the broker's certificate cannot be read: {error.reason}") from None
    context.check_hostname = False  # one certificate is accepted, at any host
    return context
