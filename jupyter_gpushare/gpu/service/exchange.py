"""The helper's side of a connection of the broker: requests in, answers and events out."""

from __future__ import annotations

import logging
import queue
from dataclasses import asdict
from typing import Any

from jupyter_gpushare.errors import DeviceError, HelperError, InvalidRequest
from jupyter_gpushare.gpu.events import Events, Watcher
from jupyter_gpushare.gpu.service.lines import Lines
from jupyter_gpushare.gpu.service.requests import Requests
from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES, ErrorKind, decode, encode

log = logging.getLogger(__name__)

WATCH_CHECK_S = 5.0


class Exchange:
    """Answers the requests of any number of connections, each in its own thread."""

    def __init__(self, requests: Requests, events: Events) -> None:
        self._requests = requests
        self._events = events

    def talk(self, lines: Lines) -> None:
        """Answer requests until the peer closes the connection, or has sent a line that is too long.

        Raises:
            Closed: the peer closed it.
            OSError: the peer was too slow, or is gone.
        """
        while True:
            line = lines.read()
            watcher: Watcher | None = None
            try:
                verb, fields = request_of(line)
                if verb == "watch":
                    # The sample is taken after this, so no event is missed.
                    watcher = self._events.watch()
                answer: dict[str, Any] = {"ok": True, "result": asdict(self._requests.answer(verb, fields))}
            except Exception as error:  # the outermost loop of this thread
                answer = error_answer(error)
            try:
                lines.write(encode(answer))
                if watcher is not None and answer["ok"]:
                    _stream(lines, watcher)
                    return
            finally:
                if watcher is not None:
                    self._events.leave(watcher)
            if len(line) > MAX_LINE_BYTES:
                return


def _stream(lines: Lines, watcher: Watcher) -> None:
    while True:
        try:
            event = watcher.events.get(timeout=WATCH_CHECK_S)
        except queue.Empty:
            if not lines.is_open():
                return
            continue
        if event is None or watcher.cut:
            return
        lines.write(encode(event))


def request_of(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return the verb and the fields of a request.

    Raises:
        InvalidRequest: it is none.
    """
    fields = decode(line)
    verb = fields.pop("verb", None)
    if not isinstance(verb, str):
        raise InvalidRequest("a request needs a verb")
    return verb, fields


def error_answer(error: Exception) -> dict[str, Any]:
    """Return the answer to a request that failed."""
    call, code, message = "", 0, str(error)
    if isinstance(error, InvalidRequest):
        kind: str = ErrorKind.BAD_REQUEST
    elif isinstance(error, HelperError):
        kind = error.kind
    elif isinstance(error, DeviceError):
        kind, call, code, message = ErrorKind.DEVICE, error.call, error.code, error.name
    else:
        log.error("a request failed", exc_info=error)
        kind, message = ErrorKind.INTERNAL, f"{type(error).__name__}: {error}"
    return {"ok": False, "error": {"kind": str(kind), "message": message, "call": call, "code": code}}
