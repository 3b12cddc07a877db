"""A session's start on a cluster: its seat, from the creation until it is connected.

=====================================  ============  =====================  ==============================
KAI and the node say                   phase         the start waits        then it is refused
=====================================  ============  =====================  ==============================
nothing                                `PLACING`     ``place_s``            there is no capacity
KAI cannot place it                    `PLACING`     ``stands_s``           with KAI's reason
KAI evicts others for it, or promised  `FREEING`     ``seat_s`` from the    its capacity is being freed;
it what leaves anyway                                decision on, in all    its seat stays until then
KAI has chosen its node, and reserves  `RESERVING`                          a GPU is out of order
a GPU that is to be shared
it is bound to a node                  `CONNECTING`                         a GPU is out of order
it is connected, its units are in use  `FREEING`                            there is no capacity
=====================================  ============  =====================  ==============================

KAI says that it cannot place a seat at the end of a cycle, in which it has also tried to evict, of every
seat that waits then; one that is promised capacity does not wait (v0.16.8,
``pkg/scheduler/framework/session.go:473-482``, ``pkg/scheduler/api/podgroup_info/job_info.go:388-390``).
So a refusal comes within a cycle and not after ``place_s`` only.  It is not taken at once: the next
cycle may evict where this one did not, as minimum run times end, and as KAI adds fractions up in random
order.  And it is never taken back (`PodGroup.refusals`): after the decision it says nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from jupyter_gpushare.backends.kubernetes.api_server import KubeError
from jupyter_gpushare.backends.kubernetes.seats import KubeSeats
from jupyter_gpushare.broker.engine.contract import StartPhase, StartProgress
from jupyter_gpushare.core.kube.follow import evicted_for
from jupyter_gpushare.core.kube.seats import Demand, Seat, Seating
from jupyter_gpushare.core.model import Device, Why

log = logging.getLogger("gpushare.broker")

# Looks again at least so often, for what no news tell of.
ROUND_S = 5.0


class Start:
    """One start.  ``until`` is when it is refused, in the time of the event loop."""

    def __init__(
        self, seats: KubeSeats, *, place_s: float, seat_s: float, stands_s: float, within_s: float
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._seats = seats
        self._seat_s, self._stands_s = seat_s, stands_s
        self._latest = now + within_s
        self.until = min(now + place_s, self._latest)
        self._name = ""
        self._is_decided = False

    async def place(self, demand: Demand, devices: Iterable[Device]) -> Seat | Why:
        """Create the seat and return it once it is connected, or why the start is refused."""
        try:
            async with asyncio.timeout_at(self.until):
                self._name = await self._seats.create(demand, devices)
                seat = await self._answered()
        except TimeoutError:
            if (found := self._seats.seat(self._name)) is None or not self._is_promised(found):
                return Why.NO_CAPACITY
            seat = found
        except KubeError as error:
            log.warning("lease=%s has no seat: %s", demand.lease, error)
            return Why.NO_CAPACITY
        if not self._is_answered(seat) and seat.why is not None:
            return seat.why
        self._is_decided = True
        self.until = min(asyncio.get_running_loop().time() + self._seat_s, self._latest)
        try:
            async with asyncio.timeout_at(self.until):
                return await self._wait_for(_is_settled)
        except TimeoutError:
            return self._too_late()

    def progress(self) -> StartProgress:
        """Return how far it is."""
        seat = self._seats.seat(self._name)
        if seat is None or not (self._is_decided or self._is_answered(seat)):
            return StartProgress(StartPhase.PLACING)
        if seat.seating is not Seating.WAITING:
            return StartProgress(StartPhase.FREEING if seat.devices else StartPhase.CONNECTING)
        if seat.is_binding:
            return StartProgress(StartPhase.RESERVING)
        ends_at = max((s.ends_at for s in evicted_for(self._seats.seats(), seat)), default=0.0)
        return StartProgress(StartPhase.FREEING, max(0.0, ends_at - time.time()) if ends_at else None)

    async def _answered(self) -> Seat:
        """Wait until KAI has decided for the seat, or its refusal has stood for ``stands_s``."""
        while True:
            seat = await self._wait_for(lambda s: self._is_answered(s) or s.why)
            if self._is_answered(seat):
                return seat
            try:
                async with asyncio.timeout(self._stands_s):
                    return await self._wait_for(self._is_answered)
            except TimeoutError:
                if (seat := self._seats.seat(self._name) or seat).why:
                    return seat

    def _is_answered(self, seat: Seat) -> bool:
        """Return whether KAI does something for the seat."""
        is_chosen = seat.seating is not Seating.WAITING or seat.is_binding
        return is_chosen or bool(evicted_for(self._seats.seats(), seat))

    def _is_promised(self, seat: Seat) -> bool:
        """Return whether KAI does something for it, or can only have promised it what seats leave behind."""
        return self._is_answered(seat) or (seat.why is None and self._do_others_leave())

    def _do_others_leave(self) -> bool:
        every = (s for mine in self._seats.seats().values() for s in mine)
        return any(s.seating is Seating.LEAVING and s.node for s in every)

    def _too_late(self) -> Why:
        seat = self._seats.seat(self._name)
        if seat is None or seat.seating is not Seating.WAITING or seat.is_binding:
            return Why.DEVICE_BROKEN
        return Why.AWAITING_RELEASE if self._do_others_leave() else Why.NO_CAPACITY

    async def _wait_for(self, until: Callable[[Seat], object]) -> Seat:
        while True:
            seat = self._seats.seat(self._name)
            if seat is not None and until(seat):
                return seat
            await self._seats.wait(ROUND_S)


def _is_settled(seat: Seat) -> bool:
    """Return whether a seat is connected, or will never be; a node may be faster than the news of its pod."""
    if seat.seating is Seating.PLACED:
        return bool(seat.devices)
    return seat.seating is not Seating.WAITING
