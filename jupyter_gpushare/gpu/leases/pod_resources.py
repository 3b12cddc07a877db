"""Pods of this node that have GPUs: what the kubelet's API of pod resources lists.

It is gRPC on a unix socket of the node (k8s.io/kubelet/pkg/apis/podresources/v1/api.proto).  Only what
one call without arguments takes of it is here:

* HTTP/2 (RFC 9113): one stream; header fields without compression (RFC 7541, 6.2.2).  The header
  fields of the answer are not read: an answer is good when its one message is complete.
* gRPC (doc/PROTOCOL-HTTP2.md of grpc/grpc): one byte, the length in four, the message.
* Protocol Buffers: fields by number; a field of another type than expected is refused.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jupyter_gpushare.protocol.seats import GpuPod

log = logging.getLogger(__name__)

LOOK_S = 5.0
# Without an answer for so long, the pods are not known any more.
STALE_S = 30.0
ANSWER_S = 5.0
MAX_BYTES = 4 << 20
MAX_PODS = 256
RESOURCES = "nvidia.com/"

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_INITIAL_WINDOW_SIZE = 4  # a setting
_REQUEST = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/v1.PodResourcesLister/List"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)


class Unreadable(Exception):
    """The kubelet gave no answer that can be read."""


class KubeletPods:
    """Pods with GPUs as the kubelet listed them last; `run` keeps them up to date."""

    def __init__(self, path: Path) -> None:
        """``path``: socket of the kubelet."""
        self._path = path
        self._known: tuple[GpuPod, ...] = ()
        self._at = float("-inf")
        self._failure = ""
        self._end = threading.Event()

    def pods(self) -> tuple[GpuPod, ...] | None:
        """Return the pods that have GPUs; None: the kubelet has not answered for `STALE_S`."""
        return self._known if time.monotonic() - self._at < STALE_S else None

    def run(self) -> None:
        """Look every `LOOK_S` until stopped."""
        while True:
            self.look()
            if self._end.wait(LOOK_S):
                return

    def stop(self) -> None:
        """End `run`."""
        self._end.set()

    def look(self) -> None:
        """Ask the kubelet once; a failure is logged when it is new."""
        try:
            self._known, self._at, self._failure = gpu_pods(listed(self._path)), time.monotonic(), ""
        except (OSError, Unreadable) as error:
            if str(error) != self._failure:
                log.warning("%s does not list the pods with GPUs: %s", self._path, error)
            self._failure = str(error)


def listed(path: Path) -> bytes:
    """Return the kubelet's answer: a ``ListPodResourcesResponse``.

    Raises:
        OSError: the socket cannot be used, or there is no answer within `ANSWER_S`.
        Unreadable: the connection ended before the answer did, or it is too long.
    """
    until = time.monotonic() + ANSWER_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as kubelet:
        kubelet.settimeout(ANSWER_S)
        kubelet.connect(str(path))
        kubelet.sendall(_asked())
        answer = b""
        for kind, flags, payload in _frames(kubelet, until):
            if kind == _SETTINGS and not flags & _ACK:
                kubelet.sendall(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                kubelet.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind in (_RST_STREAM, _GOAWAY):
                break
            elif kind == _DATA:
                answer += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
                if len(answer) > MAX_BYTES:
                    raise Unreadable(f"its answer is longer than {MAX_BYTES} bytes")
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                break
    if len(answer) < 5 or answer[0] or struct.unpack(">I", answer[1:5])[0] != len(answer) - 5:
        raise Unreadable("it refused the call, or ended the connection before its answer was complete")
    return answer[5:]


def _asked() -> bytes:
    """Return all that a client sends: its settings, windows that hold every answer, and the call."""
    fields = b"".join(
        b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in _REQUEST
    )
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 2 * MAX_BYTES)),
            _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 2 * MAX_BYTES)),
            _frame(_HEADERS, _END_HEADERS, 1, fields),
            _frame(_DATA, _END_STREAM, 1, bytes(5)),
        )
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _frames(kubelet: socket.socket, until: float) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and payload of each frame until the connection ends."""
    rest = b""
    while True:
        while len(rest) < 9 or len(rest) < 9 + int.from_bytes(rest[:3], "big"):
            kubelet.settimeout(max(0.01, until - time.monotonic()))
            more = kubelet.recv(65536)
            if not more:
                return
            rest += more
            if len(rest) > 2 * MAX_BYTES:
                raise Unreadable("a frame is too long")
        size = 9 + int.from_bytes(rest[:3], "big")
        yield rest[3], rest[4], rest[9:size]
        rest = rest[size:]


# ---- the message -------------------------------------------------------------


def gpu_pods(message: bytes) -> tuple[GpuPod, ...]:
    """Return the pods with GPUs in a ``ListPodResourcesResponse``, `MAX_PODS` at most.

    Raises:
        Unreadable: it is none.
    """
    found = []
    for pod in _parts(message, 1):
        ids = [
            each
            for container in _parts(pod, 3)
            for devices in _parts(container, 2)
            if _text(devices, 1).startswith(RESOURCES)
            for each in _texts(devices, 2)
        ]
        if ids:
            found.append(GpuPod(namespace=_text(pod, 2), name=_text(pod, 1), devices=tuple(ids)))
    if len(found) > MAX_PODS:
        raise Unreadable(f"more than {MAX_PODS} pods have GPUs")
    return tuple(found)


def _text(message: bytes, number: int) -> str:
    return next(_texts(message, number), "")


def _texts(message: bytes, number: int) -> Iterator[str]:
    return (part.decode(errors="replace") for part in _parts(message, number))


def _parts(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a field that are texts or messages, and pass over every other field.

    Raises:
        Unreadable: the message is cut short, or of another form.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        form = key & 7
        if form == 0:
            _, at = _varint(message, at)
            continue
        size, at = _varint(message, at) if form == 2 else ({1: 8, 5: 4}.get(form, len(message) + 1), at)
        if at + size > len(message):
            raise Unreadable("its answer is not a list of pods")
        if form == 2 and key >> 3 == number:
            yield message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        with contextlib.suppress(IndexError):
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
    raise Unreadable("its answer is not a list of pods")
