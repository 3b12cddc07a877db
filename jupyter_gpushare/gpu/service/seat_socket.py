"""The helper's socket for seats: the open connection is the seat (`protocol.seats`)."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TypeVar

from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.moves.vacate import Evictions
from jupyter_gpushare.gpu.service.exchange import error_answer, request_of
from jupyter_gpushare.gpu.service.lines import Closed, Lines
from jupyter_gpushare.protocol.helper import ErrorKind, EventKind, build, encode
from jupyter_gpushare.protocol.seats import Seated, Sit, Vacate, Vacated

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
        self._tell(sit, "connected")
        vacated = False
        try:
            vacate = _asked(lines, lines.read(), "vacate", Vacate)
            if vacate is not None:
                self._machine.seats.vacate(sit.seat, vacate.left_s)
                self._tell(sit, "leaving")
                lines.write(_answer(self._vacated(lines, sit)))
                vacated = True
        finally:
            if vacated:
                self._machine.seats.forget(sit.seat)
            else:
                self._machine.seats.lose(sit.seat)
            self._tell(sit, "gone" if vacated else "lost")

    def _seated(self, lines: Lines) -> Sit | None:
        sit = _asked(lines, lines.read(), "sit", Sit)
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

    def _tell(self, sit: Sit, state: str) -> None:
        self._machine.events.publish(EventKind.SEAT, fields={"seat": sit.seat, "state": state})


def _asked(lines: Lines, line: bytes, verb: str, kind: type[_Request]) -> _Request | None:
    """Return the request, which has to be this verb; None after another one was refused."""
    try:
        asked, fields = request_of(line)
        if asked != verb:
            raise HelperError(ErrorKind.UNKNOWN_VERB, f"expected {verb}, not {asked[:40]!r}")
        return build(kind, fields)
    except (HelperError, InvalidRequest) as error:
        lines.write(encode(error_answer(error)))
        return None


def _answer(result: Seated | Vacated) -> bytes:
    return encode({"ok": True, "result": asdict(result)})
