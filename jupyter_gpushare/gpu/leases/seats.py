"""Seats of this node (`protocol.seats`), and the deadlines of leases without a seat.

A seat counts for an attempt of its lease if it has all devices of the attempt.  On a node of a unit pool,
where the broker chooses the devices of leases, it counts if it has at least as many devices.

========================  ==================================================================
seat of a lease           the lease
========================  ==================================================================
connected                 may have device memory
lost for less than        keeps it, gets none back
`LOST_S`
lost for longer, or       is suspended; from `MARGIN_S` before the end of the seat's grace on
asked to vacate           processes that still hold memory are ended
none                      the same, as if lost when the helper noticed it, with `UNKNOWN_GRACE_S`
========================  ==================================================================

A helper that has just started waits `START_S` for the seats of the leases that it adopted.
All times are on `time.monotonic()`, so that a change of the wall clock moves no deadline.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.leases.files import check_lease
from jupyter_gpushare.protocol.helper import ErrorKind
from jupyter_gpushare.protocol.seats import SeatSample, Sit

LOST_S = 5.0
START_S = 10.0
MARGIN_S = 10.0
# Grace of a lease without a known seat: the seat may have ended long ago and given its GPU to another.
UNKNOWN_GRACE_S = 30.0
MAX_SEATS = 256
MAX_DEVICES = 16
_MAX_GRACE_S = 3600.0
_NAME = re.compile(r"[a-z0-9-]{1,63}")


@dataclass(slots=True)
class _Seat:
    """One seat.  If both times are set, the request to vacate counts."""

    sit: Sit
    lost_at: float | None = None  # when it lost its connection; None: it is connected
    grace_ends_at: float | None = None  # when it is killed, once it has asked to vacate


class SeatTable:
    """All seats of this node; safe to use from several threads."""

    def __init__(
        self,
        required: bool = False,
        clock: Callable[[], float] = time.monotonic,
        file: Path | None = None,
    ) -> None:
        """``required``: leases need seats here; ``file`` exists while seats count by number."""
        self.required = required
        self._clock = clock
        self._file = file
        self.by_number = file is not None and file.exists()
        self._guard = threading.Lock()
        self._seats: dict[str, _Seat] = {}
        self._missed: dict[str, float] = {}  # by handle of a lease without a seat: since when
        self._started_at = clock()

    def count(self, by_number: bool) -> None:
        """Have seats count by the number of their devices, or by their devices; the choice is stored.

        Raises:
            HelperError: it cannot be written.
        """
        with self._guard:
            try:
                if self._file is not None and by_number:
                    self._file.touch(mode=0o600)
                elif self._file is not None:
                    self._file.unlink(missing_ok=True)
            except OSError as error:
                raise HelperError(ErrorKind.STATE, f"{self._file} cannot be written: {error}") from None
            self.by_number = by_number

    def sit(self, request: Sit, epoch: int) -> None:
        """Connect a seat; ``epoch`` is the highest of a broker that the helper has seen.

        Raises:
            InvalidRequest: a field is invalid.
            HelperError: a newer broker is at work, the seat is connected already, or `MAX_SEATS` exist.
        """
        _check(request)
        if request.epoch < epoch and not request.returns:
            raise HelperError(
                ErrorKind.STALE_EPOCH, f"epoch {request.epoch} of the seat is stale: {epoch} has been seen"
            )
        with self._guard:
            before = self._seats.get(request.seat)
            if before is not None and before.lost_at is None:
                raise HelperError(ErrorKind.CONFLICT, f"seat {request.seat} is connected already")
            if before is None and len(self._seats) >= MAX_SEATS:
                raise HelperError(ErrorKind.BUSY, f"{MAX_SEATS} seats are connected: try again")
            seat = self._seats[request.seat] = _Seat(request)
            if request.leaving:
                ends_at = self._clock() + request.grace_s
                earlier = before.grace_ends_at if before is not None else None
                seat.grace_ends_at = ends_at if earlier is None else min(ends_at, earlier)

    def vacate(self, seat: str, left_s: float) -> None:
        """Note that a seat leaves, and will be killed after ``left_s`` seconds."""
        with self._guard:
            if (found := self._seats.get(seat)) is not None:
                found.grace_ends_at = self._clock() + max(0.0, min(left_s, found.sit.grace_s))

    def lose(self, seat: str) -> None:
        """Note that a seat has lost its connection."""
        with self._guard:
            if (found := self._seats.get(seat)) is not None:
                found.lost_at = self._clock()

    def forget(self, seat: str) -> None:
        """Forget a seat after its lease has given its memory back."""
        with self._guard:
            self._seats.pop(seat, None)

    def forget_if_lost(self, seat: str, lost_at: float) -> None:
        """Forget a seat that has not been connected since ``lost_at``."""
        with self._guard:
            if (found := self._seats.get(seat)) is not None and found.lost_at == lost_at:
                del self._seats[seat]

    def may_gain(self, handle: str, devices: Collection[str]) -> bool:
        """Return whether a lease may get memory of these devices now."""
        with self._guard:
            return not self.required or any(
                seat.lost_at is None and seat.grace_ends_at is None for seat in self._of(handle, devices)
            )

    def may_keep(self, handle: str, devices: Collection[str]) -> bool:
        """Return whether a lease may keep the memory that it has of these devices."""
        with self._guard:
            now, seats = self._clock(), self._of(handle, devices)
            if not self.required or any(
                seat.grace_ends_at is None and (seat.lost_at is None or now - seat.lost_at < LOST_S)
                for seat in seats
            ):
                self._missed.pop(handle, None)
                return True
            return not seats and now - self._started_at < START_S

    def ends_at(self, handle: str, devices: Collection[str]) -> float:
        """Return when the processes of a lease that keeps memory without a seat must be ended."""
        with self._guard:
            seats = self._of(handle, devices)
            if not seats:
                missed_at = self._missed.setdefault(handle, self._clock())
                return missed_at + UNKNOWN_GRACE_S - MARGIN_S
            return max(_grace_end(seat) for seat in seats) - MARGIN_S

    def lost(self) -> list[tuple[str, float, str]]:
        """Return each seat that lost its connection: its name, when that was, and the id of its lease."""
        with self._guard:
            return [
                (name, seat.lost_at, seat.sit.lease)
                for name, seat in self._seats.items()
                if seat.lost_at is not None
            ]

    def keep_missed(self, handles: list[str]) -> None:
        """Forget the leases without a seat, except these."""
        with self._guard:
            self._missed = {name: at for name, at in self._missed.items() if name in handles}

    def sample(self) -> tuple[SeatSample, ...]:
        """Return all seats for the broker's sample."""
        with self._guard:
            return tuple(
                SeatSample(
                    seat=name,
                    lease=seat.sit.lease,
                    devices=seat.sit.devices,
                    connected=seat.lost_at is None,
                    leaving=seat.grace_ends_at is not None,
                )
                for name, seat in self._seats.items()
            )

    def _of(self, handle: str, devices: Collection[str]) -> list[_Seat]:
        name, wanted = lease_id(handle), set(devices)
        return [
            seat for seat in self._seats.values() if seat.sit.lease == name and self._stands_for(seat, wanted)
        ]

    def _stands_for(self, seat: _Seat, wanted: set[str]) -> bool:
        if self.by_number:
            return len(wanted) <= len(seat.sit.devices)
        return wanted <= set(seat.sit.devices)


def lease_id(handle: str) -> str:
    """Return the id of the lease of which ``handle`` (``<id>-<number>``) is an attempt."""
    return handle.rpartition("-")[0]


def _grace_end(seat: _Seat) -> float:
    if seat.grace_ends_at is not None:
        return seat.grace_ends_at
    return (seat.lost_at or 0.0) + seat.sit.grace_s


def _check(request: Sit) -> None:
    check_lease(request.lease)
    if not _NAME.fullmatch(request.seat):
        raise InvalidRequest("the name of a seat has 1 to 63 of [a-z0-9-]")
    if not 0 <= request.epoch < 1 << 63:
        raise InvalidRequest("an epoch is a whole number of at least 0")
    if not MARGIN_S < request.grace_s <= _MAX_GRACE_S:
        raise InvalidRequest(f"a grace is more than {MARGIN_S:.0f} and at most {_MAX_GRACE_S:.0f} seconds")
    devices = request.devices
    if not 1 <= len(devices) <= MAX_DEVICES or len(set(devices)) != len(devices):
        raise InvalidRequest(f"a seat has 1 to {MAX_DEVICES} different devices")
    if any(not 1 <= len(uuid) <= 128 for uuid in devices):
        raise InvalidRequest("a device is named by its UUID")
