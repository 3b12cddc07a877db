"""HTTP servers for tests: JSON in, JSON out, in separate threads."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from tests.ports import free_ports


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query
    headers: Mapping[str, str]
    body: Any

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").partition(" ")[2]


# Status, body, headers.
Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]


class JsonServer(ThreadingHTTPServer):
    """Listens on a loopback port or on a unix socket until it is closed."""

    daemon_threads = True

    def __init__(
        self, at: int | Path, answer: Callable[[Request], Answer], tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer = answer
        if isinstance(at, Path):
            self.address_family = socket.AF_UNIX
        super().__init__(str(at) if isinstance(at, Path) else ("127.0.0.1", at), _Handler)  # type: ignore[arg-type]
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own method looks up a host name

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer

    def log_message(self, *_: Any) -> None:
        pass

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client closed the connection within the body
            self.close_connection = True
            return
        request = Request(self.command, self.path, dict(self.headers), json.loads(body) if body else None)
        status, content, *headers = self.server.answer(request)
        data = b"" if content is None else json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in dict(*headers).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _any


@dataclass
class Receiver:
    """A webhook that records its messages in `told`; it answers only while `answers` is set."""

    port: int = field(default_factory=free_ports)
    told: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    status: int = 200
    moved_to: str = ""
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.answers.set()
        self._server = JsonServer(self.port, self._answer, self.tls)

    def _answer(self, request: Request) -> Answer:
        self.headers.append(request.headers)
        self.told.append(request.body)
        self.answers.wait(60)
        return self.status, None, {"Location": self.moved_to} if self.moved_to else {}

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/hook?key=s3cret"

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.told]

    def close(self) -> None:
        self.answers.set()
        self._server.close()
