"""The helper's side of its connections: with the broker, including events, and with seats."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import asdict
from typing import Any, TypeVar

from jupyter_gpushare.errors import DeviceError, HelperError, InvalidRequest
from jupyter_gpushare.gpu.events import Events, Watcher
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.moves.vacate import Evictions
from jupyter_gpushare.gpu.service.lines import Closed, Lines
from jupyter_gpushare.gpu.service.requests import Requests
from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES, ErrorKind, EventKind, build, decode, encode
from jupyter_gpushare.protocol.seats import Seated, Sit, Vacate, Vacated

log = logging.getLogger(__name__)

WATCH_CHECK_S = 5.0


class Exchange:
    """Answers the requests of any number of connections, each in its own thread."""

    def __init__(self, requests: Requests, events: Events) -> None:
        self._requests = requests
        self._events = events

    def talk(self, lines: Lines) -> None:
        """Answer requests until the peer closes the connection or sends a line that is too long.

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
                    # Before the sample is taken, so that no event is missed.
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
            event = watcher.get(timeout=WATCH_CHECK_S)
        except queue.Empty:
            if not lines.is_open():
                return
            continue
        if event is None:
            return
        lines.write(encode(event))


def request_of(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return the verb and the fields of a request.

    Raises:
        InvalidRequest: the line is not a request.
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


# ---- the helper's socket for seats; an open connection is a seat (`protocol.seats`)

POLL_S = 0.25

_Request = TypeVar("_Request", Sit, Vacate)


class SeatSocket:
    """Serves connections of seats, each in its own thread."""

    def __init__(self, machine: Machine, evictions: Evictions, node: str) -> None:
        self._machine = machine
        self._evictions = evictions
        self._node = node

    def talk(self, lines: Lines) -> None:
        """Serve one seat until its connection ends.

        Raises:
            Closed: the seat closed it.
            OSError: the seat is gone.
        """
        sit = self._seated(lines)
        if sit is None:
            return
        self._publish(sit, "connected")
        vacated = False
        try:
            vacate = _expect(lines, lines.read(), "vacate", Vacate)
            if vacate is not None:
                self._machine.seats.vacate(sit.seat, vacate.left_s)
                self._publish(sit, "leaving")
                lines.write(_answer(self._vacated(lines, sit)))
                vacated = True
        finally:
            if vacated:
                self._machine.seats.forget(sit.seat)
            else:
                self._machine.seats.lose(sit.seat)
            self._publish(sit, "gone" if vacated else "lost")

    def _seated(self, lines: Lines) -> Sit | None:
        sit = _expect(lines, lines.read(), "sit", Sit)
        if sit is None:
            return None
        try:
            self._machine.seats.sit(sit, self._machine.state.epoch)
        except (HelperError, InvalidRequest) as error:
            lines.write(encode(error_answer(error)))
            return None
        try:
            lines.write(_answer(Seated(node=self._node)))
        except OSError:
            self._machine.seats.lose(sit.seat)
            raise
        return sit

    def _vacated(self, lines: Lines, sit: Sit) -> Vacated:
        while True:
            if (vacated := self._evictions.outcome(sit.lease)) is not None:
                return vacated
            if not lines.is_open():
                raise Closed
            time.sleep(POLL_S)

    def _publish(self, sit: Sit, state: str) -> None:
        self._machine.events.publish(EventKind.SEAT, fields={"seat": sit.seat, "state": state})


def _expect(lines: Lines, line: bytes, verb: str, kind: type[_Request]) -> _Request | None:
    """Return the request in a line; if it is no valid ``verb``, refuse it and return None."""
    try:
        requested, fields = request_of(line)
        if requested != verb:
            raise HelperError(ErrorKind.UNKNOWN_VERB, f"expected {verb}, not {requested[:40]!r}")
        return build(kind, fields)
    except (HelperError, InvalidRequest) as error:
        lines.write(encode(error_answer(error)))
        return None


def _answer(result: Seated | Vacated) -> bytes:
    return encode({"ok": True, "result": asdict(result)})
