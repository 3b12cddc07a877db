"""The user or machine at the other end of a connection, according to the kernel.

For TCP on this machine, netlink returns the uid of the peer's socket (sock_diag(7),
linux/inet_diag.h); the look-up is exact and needs no privilege.  For unix sockets,
SO_PEERCRED returns it (unix(7)).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from typing import Any

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST = 1  # NLM_F_REQUEST
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: len, type, flags, seq, pid
_QUERY = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_PORTS = struct.Struct("!HH")  # inet_diag_sockid: ports of the socket to find, and of its peer
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface, INET_DIAG_NOCOOKIE
_UID_AT = _HEADER.size + 4 + 48 + 12  # inet_diag_msg: idiag_uid
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ANSWER_BYTES = 4096
_WAIT_S = 1.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address | None
_LOOPBACK = "127.0.0.0/8"
# The prefix of an IPv6 address that a site assigns to a machine, which chooses the rest (RFC 6177).
_IPV6_BITS = 64
_BY_SOCKET = " by socket"


def source_of(connection: socket.socket) -> str:
    """Return the peer of a connection: ``uid 1000``, ``uid 1000 by socket``, or another machine's address."""
    if (uid := socket_uid(connection)) is not None:
        return f"uid {uid}{_BY_SOCKET}"
    peer = connection.getpeername()
    with suppress(OSError, struct.error):
        return f"uid {_uid_of(connection.family, peer, connection.getsockname())}"
    return str(peer[0])


def our_users() -> frozenset[str]:
    """Return the names of root and of this process's user, as from `holder_of`."""
    return frozenset(f"uid {uid}" for uid in (0, os.geteuid()))


def holder_of(source: str) -> str:
    """Return the user or machine for which a connection from ``source`` is counted, over any socket."""
    address = address_of(source)
    return source.removesuffix(_BY_SOCKET) if address is None else machine_of(address)


def address_of(text: str) -> Address:
    """Return the address in a text, or None; an IPv4 address may be written as IPv6."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # Node writes IPv4 clients of a socket for both families as ::ffff:203.0.113.7.
    return getattr(address, "ipv4_mapped", None) or address


def machine_of(address: Address) -> str:
    """Return one name for all addresses of a machine."""
    if address is None:
        return "unknown"
    if address.is_loopback:
        return _LOOPBACK
    if address.version == 6:
        return str(ipaddress.ip_network((address, _IPV6_BITS), strict=False))
    return str(address)


def socket_uid(connection: socket.socket) -> int | None:
    """Return the uid of the process that opened a unix socket; None for other kinds of connections."""
    if connection.family != socket.AF_UNIX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def _uid_of(family: int, peer: tuple[Any, ...], here: tuple[Any, ...]) -> int:
    """Return the uid of the socket that is bound to ``peer`` and connected to ``here``.

    Raises:
        OSError: there is no such socket on this machine, or the kernel refuses.
    """
    # A link-local address has its interface after a "%".
    ends = (socket.inet_pton(family, each[0].partition("%")[0]).ljust(16, b"\0") for each in (peer, here))
    body = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    body += _PORTS.pack(peer[1], here[1]) + b"".join(ends) + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as netlink:
        netlink.settimeout(_WAIT_S)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = netlink.recv(_ANSWER_BYTES)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        raise OSError("no such socket on this machine")
    uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return uid
