"""An HTTP address that keeps what a webhook is told."""

from __future__ import annotations

import json
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.ports import free_ports


@dataclass
class Receiver:
    """What the webhook was told; it answers when `open` is set."""

    port: int = field(default_factory=free_ports)
    told: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    status: int = 200
    moved_to: str = ""
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        receiver = self
        self.answers.set()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.headers.append(dict(self.headers))
                receiver.told.append(json.loads(body))
                receiver.answers.wait(60)
                self.send_response(receiver.status)
                if receiver.moved_to:
                    self.send_header("Location", receiver.moved_to)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/hook?key=s3cret"

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.told]

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
