"""Resume a lease that is wanted while no broker answers: one that hangs, restarts or lacks its database.

Only a lease that the broker allowed beforehand (`SetLimit.unattended`: a session on capacity
of its own), for a counted call (queries alone are the broker's to judge), and only where
`LeaseRegistry.claim` finds its part of the devices free and no borrower on them.  The restore itself
goes, as any other, only into memory that the driver shows free (`reservations`).  Where one
of these is not known, nothing is done: the broker that comes back resumes it.

The broker reads from the sample what was resumed without it (`LeaseSample.unconfirmed`).
"""

from __future__ import annotations

import logging
import threading

from jupyter_gpushare.gpu.leases.lease import Lease
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.protocol.helper import Phase

log = logging.getLogger(__name__)

LOOK_S = 1.0


class UnattendedResumes:
    """Resumes wanted leases while no broker answers, in its own thread: driver calls may hang."""

    def __init__(self, registry: LeaseRegistry, mover: Mover) -> None:
        self._registry = registry
        self._mover = mover
        self._end = threading.Event()
        self._refused = ("", "")  # lease and reason, as last logged

    def stop(self) -> None:
        """End the thread."""
        self._end.set()

    def run(self) -> None:
        """Look every `LOOK_S` until stopped."""
        while not self._end.wait(LOOK_S):
            if not self._registry.is_unattended():
                continue
            for lease in self._registry.all():
                try:
                    self.look(lease)
                except Exception:  # the outermost loop: one lease must not keep others suspended
                    log.exception("lease=%s cannot be resumed", lease.name)

    def look(self, lease: Lease) -> None:
        """Resume one lease if it is suspended, wanted, and may be resumed without the broker."""
        is_wanted = lease.phase is Phase.SUSPENDED and lease.wanted and not lease.queries_only
        if not is_wanted or not lease.moving.acquire(blocking=False):
            return
        try:
            if not self._registry.claim(lease):
                return
            moved = self._mover.resume(lease, 0.0)
        finally:
            if lease.phase is Phase.SUSPENDED:
                lease.unconfirmed = False
            lease.moving.release()
        if moved.done:
            log.warning("lease=%s resumed while no broker answers", lease.name)
        elif self._refused != (lease.name, moved.reason):
            self._refused = (lease.name, moved.reason)
            log.warning(
                "lease=%s stays %s while no broker answers: %s", lease.name, lease.phase, moved.reason
            )
