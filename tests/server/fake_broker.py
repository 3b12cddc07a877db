"""A broker with the answers that a test sets, on a free port, in a separate thread.

``FakeBroker.answers`` maps "METHOD path" to (HTTP status, JSON text); ``seen``
has the requests.  ``GET status?after=`` is a real long poll: it answers when
`say_status` was called with a higher ``seq``, or when ``wait`` is over.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from tests.waiting import PATIENCE_S, until

GOLDEN = Path(__file__).parents[1] / "wire" / "golden"
PREFIX = "/services/gpushare/api/v1/"
TOKEN = "token-of-ada"


def golden(name: str) -> dict[str, Any]:
    """Return a copy of a golden message, which the caller may change."""
    return json.loads((GOLDEN / f"{name}.json").read_bytes())


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeBroker:
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    seen: deque[Request] = field(default_factory=lambda: deque(maxlen=10_000))
    port: int = 0
    status: dict[str, Any] = field(default_factory=lambda: golden("status_active"))
    polls_open: int = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.origin + PREFIX.rstrip("/")

    def answer(self, what: str, body: Any, status: int = 200) -> None:
        """Answer "METHOD path" with ``body`` from now on."""
        self.answers[what] = (status, json.dumps(body))

    def say_status(self, status: dict[str, Any]) -> None:
        """Make this the answer of GET status, and end long polls that wait for it."""
        self.status = status
        self._loop.call_soon_threadsafe(self._changed.set)

    def asked(self, what: str) -> list[Request]:
        """Return the requests "METHOD path" so far."""
        return [r for r in list(self.seen) if f"{r.method} {r.path}" == what]

    def start(self) -> None:
        """Listen; the port stays the same over `stop` and `start`."""
        sockets = bind_sockets(self.port, "127.0.0.1")
        self.port = sockets[0].getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(sockets, ready)), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)

    def stop(self) -> None:
        """Close every connection and the port."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def _serve(self, sockets: list[Any], ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        server = HTTPServer(Application([(r"/.*", _Handler, {"broker": self})]))
        server.add_sockets(sockets)
        ready.set()
        await self._stop.wait()
        server.stop()
        self._changed.set()
        await server.close_all_connections()


class _Handler(RequestHandler):
    SUPPORTED_METHODS = ("GET", "POST", "PUT", "DELETE")

    def initialize(self, broker: FakeBroker) -> None:
        self.broker = broker
        self._gone = False

    def on_connection_close(self) -> None:
        self._gone = True
        self.broker._changed.set()

    def check_xsrf_cookie(self) -> None:
        pass

    async def _any(self) -> None:
        path = self.request.path.removeprefix(PREFIX)
        query = {key: values[-1].decode() for key, values in self.request.query_arguments.items()}
        method = str(self.request.method)
        self.broker.seen.append(
            Request(method, path, query, dict(self.request.headers), bytes(self.request.body))
        )
        self.set_header("Content-Type", "application/json")
        what = f"{method} {path}"
        if path != "health" and self.request.headers.get("Authorization") != f"token {TOKEN}":
            self.set_status(403)
            self.finish(
                json.dumps({"status": 403, "reason": "not_allowed", "message": "This token may not."})
            )
        elif what in self.broker.answers:
            status, body = self.broker.answers[what]
            self.set_status(status)
            self.finish(body if status != 204 else None)
        elif what == "GET status":
            await self._status(query)
        elif what == "POST servers/activity":
            self.set_status(204)
        else:
            self.set_status(404)
            self.finish(json.dumps({"status": 404, "reason": "not_found", "message": f"No {path}."}))

    get = post = put = delete = _any

    async def _status(self, query: dict[str, str]) -> None:
        broker = self.broker
        until = time.monotonic() + float(query.get("wait", 0))
        broker.polls_open += 1
        try:
            while "after" in query and broker.status["seq"] <= int(query["after"]) and not self._gone:
                broker._changed.clear()
                try:
                    await asyncio.wait_for(broker._changed.wait(), until - time.monotonic())
                except TimeoutError:
                    break
        finally:
            broker.polls_open -= 1
        if not self._gone:
            self.finish(json.dumps(broker.status))


def eventually(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """Return the first true value of ``condition``; fail the test if there is none in time."""
    return until(condition, patience_s=within_s)
