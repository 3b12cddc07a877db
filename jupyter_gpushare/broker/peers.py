"""Whose program is at the other end of a connection: the kernel knows it for programs of this machine.

Asked by netlink (sock_diag(7), linux/inet_diag.h): one exact look-up, without rights.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST = 1  # NLM_F_REQUEST
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: len, type, flags, seq, pid
_ASKED = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_PORTS = struct.Struct("!HH")  # inet_diag_sockid: of the socket that is looked for, and of its peer
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface, INET_DIAG_NOCOOKIE
_UID_AT = _HEADER.size + 4 + 48 + 12  # inet_diag_msg: idiag_uid
_ANSWER_BYTES = 4096
_WAIT_S = 1.0


def source_of(connection: socket.socket) -> str:
    """Return who is at the other end: ``uid 1000`` on this machine, else the address."""
    peer = connection.getpeername()
    if connection.family != socket.AF_INET:
        return str(peer[0] if isinstance(peer, tuple) else peer)
    with suppress(OSError, struct.error):
        return f"uid {_uid_of(peer, connection.getsockname())}"
    return str(peer[0])


def _uid_of(peer: tuple[str, int], here: tuple[str, int]) -> int:
    """Return the user of the socket that is bound to ``peer`` and connected to ``here``.

    Raises:
        OSError: there is none on this machine, or the kernel does not say.
    """
    ends = (socket.inet_aton(address).ljust(16, b"\0") for address, _ in (peer, here))
    body = _ASKED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    body += _PORTS.pack(peer[1], here[1]) + b"".join(ends) + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _SOCK_DIAG) as netlink:
        netlink.settimeout(_WAIT_S)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = netlink.recv(_ANSWER_BYTES)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        raise OSError("no such socket on this machine")
    uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return uid
