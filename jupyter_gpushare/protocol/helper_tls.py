"""TLS between the broker and a device helper on another machine: one authority signs both certificates.

Each side verifies that the authority signed the other's certificate, and that it has one of these DNS names
(subjectAltName):

| name          | certificate of                       |
|---------------|--------------------------------------|
| `BROKER`      | the broker                           |
| `HELPER`      | helpers that share one certificate   |
| NODE.`HELPER` | the helper of that node              |

A helper that accepts the broker sends the name of its node first.  The broker compares it before it sends a
request, so it notices that it has reached another node even if all helpers share one certificate.
"""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.internal_tls import mutual_tls
from jupyter_gpushare.private_files import read_private

BROKER = "gpushare-broker"
HELPER = "gpushare-helper"
_USAGES = "extended key usages, if it has any, include client auth for the broker, server auth for a helper"
# The remedies, by words in OpenSSL's reason.
_ADVICE = {
    "expired": "renew it",
    "not yet valid": "compare the clocks of both machines",
    "key usage": "the authority's certificate needs keyUsage=critical,keyCertSign",
    "certificate purpose": _USAGES,
    "unsupported certificate": _USAGES,
    "": "the authority (CA) of both sides has to sign both certificates",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The certificate of one side, its private key, and the authority that signs those of both sides."""

    certificate: Path
    key: Path
    authority: Path

    def context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        """Return the context for a new connection; renewed files are read again.

        ``purpose`` is that of the peer's certificate: SERVER_AUTH to connect, CLIENT_AUTH to listen.

        Raises:
            GpuShareError: a file cannot be used, or others can read the key.
        """
        try:
            written = tuple(
                os.stat(path).st_mtime_ns for path in (self.certificate, self.key, self.authority)
            )
        except OSError as error:
            raise GpuShareError(f"{error.filename} cannot be read: {error.strerror}") from None
        return _context(self, purpose, written)


@lru_cache(maxsize=4)
def _context(files: TlsFiles, purpose: ssl.Purpose, written: tuple[int, ...]) -> ssl.SSLContext:
    read_private(files.key, 1)  # refuses a key that others can read
    context = mutual_tls(str(files.certificate), str(files.key), str(files.authority), purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The default of Python 3.13 and later; a site's certificates must not depend on the version.
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # each side reads the `names` itself
    if purpose is ssl.Purpose.CLIENT_AUTH:
        context.num_tickets = 0  # no session is resumed: each connection presents its certificate
    return context


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel end a connection 30 s after its peer has vanished.

    The kernel sends no probes while data waits for an acknowledgement; TCP_USER_TIMEOUT bounds that wait
    (tcp(7)).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def names(certificate: Any) -> set[str]:
    """Return the DNS names in a verified certificate, as `ssl.SSLSocket.getpeercert` returns it."""
    return {value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"}


def reason(error: ssl.SSLError) -> str:
    """Return why the peer's certificate, or that of this side, was refused, and what to change."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why, result = str(error.verify_message), "the peer's certificate is not accepted"
    else:
        why, result = (
            (error.reason or str(error)).replace("_", " ").lower(),
            "the peer refuses this certificate",
        )
        if " alert " not in why:
            return f"TLS failed: {why}"
    advice = next(each for word, each in _ADVICE.items() if word in why)
    return f"{result}: {why}: {advice}"
