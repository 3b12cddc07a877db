"""A sealed connection between two processes that share a secret, without any I/O of its own.

    hello      client -> server   MAGIC, 32 random bytes
    challenge  server -> client   32 random bytes, HMAC(secret, "server", transcript)
    proof      client -> server   HMAC(secret, "client", transcript)
    frame      both               length, payload, HMAC(key, number, length, payload)

* The transcript is MAGIC, both random parts and the name of the server that the client asked
  for, so that one side's answer is of no use on another connection or at another server with the
  same secret.  The secret itself never crosses the wire.
* The keys are HMAC(secret, direction, transcript): one for each direction of each connection.
* Frames are numbered from 0 in each direction and the number is part of the MAC: a frame that is
  repeated, left out, reordered, changed or sent back is not accepted, and after it none is.
* Every message before the first frame has a fixed size, a frame has at most `MAX_PAYLOAD_BYTES`.
* Contents can be read on the way: TLS below it keeps them confidential.

HMAC is RFC 2104 with SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from pathlib import Path

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.private_files import read_private
from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES

MAGIC = b"gpushr1\n"
NONCE_BYTES = 32
MAC_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + MAC_BYTES
PROOF_BYTES = MAC_BYTES
HEADER_BYTES = 4
MAX_PAYLOAD_BYTES = MAX_LINE_BYTES + 1  # a line and its end
# A secret that can be guessed could be found from a recorded challenge.
LEAST_SECRET_BYTES = 32
_MOST_SECRET_BYTES = 4096

_HEADER = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class SealError(GpuShareError):
    """The peer has not shown that it knows the secret, or a frame is not the next one of this connection."""


class Session:
    """Seals and opens the frames of one connection after its handshake."""

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._sent = 0
        self._received = 0
        self._broken = False

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame to send.

        Raises:
            SealError: more than `MAX_PAYLOAD_BYTES`.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise SealError(f"a frame has at most {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}")
        header = _HEADER.pack(len(payload))
        mac = _frame_mac(self._sending_key, self._sent, header, payload)
        self._sent += 1
        return header + payload + mac

    def rest_bytes(self, header: bytes) -> int:
        """Return how many bytes follow the `HEADER_BYTES` of a frame.

        Raises:
            SealError: the frame is longer than allowed.
        """
        (length,) = _HEADER.unpack(header)
        if self._broken or length > MAX_PAYLOAD_BYTES:
            raise self._break(f"a frame has at most {MAX_PAYLOAD_BYTES} bytes")
        return int(length) + MAC_BYTES

    def open(self, header: bytes, rest: bytes) -> bytes:
        """Return the payload of the next frame that was received.

        Raises:
            SealError: not what the peer sent next; no later frame is opened.
        """
        payload, mac = rest[:-MAC_BYTES], rest[-MAC_BYTES:]
        expected = _frame_mac(self._receiving_key, self._received, header, payload)
        if self._broken or not hmac.compare_digest(mac, expected):
            raise self._break("a frame is not what the peer sent next on this connection")
        self._received += 1
        return payload

    def _break(self, reason: str) -> SealError:
        self._broken = True
        return SealError(reason)


class ClientHandshake:
    """The side that connects: send `hello`, read a challenge, send what `prove` returns."""

    def __init__(self, secret: bytes, server: str) -> None:
        """``server`` is the name of the server that shall answer."""
        self._secret = secret
        self._server = server
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = b""

    def hello(self) -> bytes:
        """Return the first message."""
        return MAGIC + self._nonce

    def prove(self, challenge: bytes) -> bytes:
        """Return the proof that answers a challenge of `CHALLENGE_BYTES`.

        Raises:
            SealError: the server does not know the secret, or is another one.
        """
        nonce, mac = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        transcript = _transcript(self._nonce, nonce, self._server)
        if not hmac.compare_digest(mac, _mac(self._secret, b"server", transcript)):
            raise SealError(f"the peer is not {self._server}, or has another secret")
        self._transcript = transcript
        return _mac(self._secret, b"client", transcript)

    def session(self) -> Session:
        """Return the session; only after `prove`.

        Raises:
            SealError: the server has not been verified.
        """
        if not self._transcript:
            raise SealError("the server has not been verified")
        to_server, to_client = _keys(self._secret, self._transcript)
        return Session(to_server, to_client)


class ServerHandshake:
    """The side that accepts: read a hello, send what `challenge` returns, read a proof."""

    def __init__(self, secret: bytes, name: str) -> None:
        """``name`` is that of this server, which clients ask for."""
        self._secret = secret
        self._name = name
        self._transcript = b""

    def challenge(self, hello: bytes) -> bytes:
        """Return the answer to a hello of `HELLO_BYTES`.

        Raises:
            SealError: another protocol.
        """
        magic, theirs = hello[: len(MAGIC)], hello[len(MAGIC) :]
        if magic != MAGIC or len(theirs) != NONCE_BYTES:
            raise SealError("the peer speaks another protocol")
        ours = secrets.token_bytes(NONCE_BYTES)
        self._transcript = _transcript(theirs, ours, self._name)
        return ours + _mac(self._secret, b"server", self._transcript)

    def accept(self, proof: bytes) -> Session:
        """Return the session of a client that knows the secret, from its proof of `PROOF_BYTES`.

        Raises:
            SealError: it does not.
        """
        expected = _mac(self._secret, b"client", self._transcript)
        if not self._transcript or not hmac.compare_digest(proof, expected):
            raise SealError("the peer has another secret")
        to_server, to_client = _keys(self._secret, self._transcript)
        return Session(to_client, to_server)


def read_secret(path: Path) -> bytes:
    """Return the secret in a file that no other user can read, without white space around it.

    Raises:
        GpuShareError: others can read it, it is too short or too long, or it cannot be read.
    """
    raw = read_private(path, _MOST_SECRET_BYTES + 1)
    secret = raw.strip()
    if len(secret) < LEAST_SECRET_BYTES or len(raw) > _MOST_SECRET_BYTES:
        raise GpuShareError(
            f"the secret in {path} has to have {LEAST_SECRET_BYTES} to {_MOST_SECRET_BYTES} bytes: "
            "write one with openssl rand -hex 32"
        )
    return secret


def _transcript(client_nonce: bytes, server_nonce: bytes, server: str) -> bytes:
    return MAGIC + client_nonce + server_nonce + server.encode()


def _keys(secret: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    return _mac(secret, b"to server", transcript), _mac(secret, b"to client", transcript)


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, hashlib.sha256)


def _frame_mac(key: bytes, number: int, header: bytes, payload: bytes) -> bytes:
    mac = hmac.new(key, _NUMBER.pack(number) + header, hashlib.sha256)
    mac.update(payload)
    return mac.digest()
