"""Resume a lease that is wanted while no broker can record that: it hangs, restarts or cannot store.

A lease that the broker allowed beforehand (`SetLimit.unattended`: a session on capacity of its
own) is resumed by the helper itself while no broker answers, for a counted call (queries alone
are the broker's to judge).  A broker that answers, but whose database takes nothing, asks for it
(`Resume.unrecorded`).  In both cases:

* A lease that has ended gives its part of the devices back, whether the broker could record its
  end or not: it is put to sleep, which moves nothing, is in the journal first, and keeps what
  carries its name from the GPU.  So is a job of which only the runner has begun: the broker
  resumes it.
* The lease is resumed only where `LeaseRegistry.claim` then finds its part of the devices free
  and no borrower on them, and as any other only into memory that the driver shows free
  (`reservations`).  Where one of these is not known, nothing is done.
* The journal says so before it is done, and the broker reads it from the sample
  (`LeaseSample.unconfirmed`).
"""

from __future__ import annotations

import logging
import threading

from jupyter_gpushare.gpu.leases.lease import Lease
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.suspend import UNFINISHED, Mover, refusal
from jupyter_gpushare.protocol.helper import MoveResult, Phase, Refusal

log = logging.getLogger(__name__)

LOOK_S = 1.0
# How long a lease that has ended, and has nothing to move, may take to be put to sleep.
REST_S = 2.0


class UnattendedResumes:
    """Resumes wanted leases while no broker answers, in its own thread: driver calls may hang."""

    def __init__(self, registry: LeaseRegistry, mover: Mover) -> None:
        self._registry = registry
        self._mover = mover
        self._end = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()

    def run(self) -> None:
        """Look every `LOOK_S` until stopped."""
        while not self._end.wait(LOOK_S):
            for lease in self._registry.all():
                try:
                    self.look(lease)
                except Exception:  # the outermost loop: one lease must not keep others suspended
                    log.exception("lease=%s cannot be resumed", lease.name)

    def look(self, lease: Lease) -> None:
        """Resume one lease if it is suspended, wanted, and may be resumed without the broker."""
        is_wanted = lease.phase is Phase.SUSPENDED and lease.wanted and not lease.queries_only
        is_due = is_wanted and lease.asked.unattended and self._registry.is_unattended()
        if not is_due or not lease.moving.acquire(blocking=False):
            return
        try:
            moved = resume_unrecorded(self._registry, self._mover, lease, 0.0, asked=False)
        finally:
            lease.moving.release()
        if not moved.done and lease.stays_for != moved.reason:
            lease.stays_for = moved.reason
            log.warning(
                "lease=%s stays %s while no broker answers: %s", lease.name, lease.phase, moved.reason
            )


def resume_unrecorded(
    registry: LeaseRegistry, mover: Mover, lease: Lease, timeout_s: float, *, asked: bool
) -> MoveResult:
    """Return the result of a resume that no broker has recorded; the caller holds the lease.

    ``asked``: a broker asks for it.
    """
    if lease.unsettled:
        mover.settle(lease)  # here, since what is suspended then has to be claimed
    if lease.unsettled:
        return refusal(Refusal.BUSY, UNFINISHED)
    if lease.phase is not Phase.SUSPENDED:
        return mover.resume(lease, timeout_s)
    kept = [_put_to_sleep(mover, ended) for ended in _ended_beside(registry, lease)]
    if not registry.claim(lease, asked=asked):
        reasons = [reason for reason in kept if reason]
        reason = reasons[0] if reasons else "another lease has its part of the devices, or may get it"
        return refusal(Refusal.NO_MEMORY, reason)
    try:
        moved = mover.resume(lease, timeout_s)
    finally:
        if lease.phase is Phase.SUSPENDED:
            lease.unconfirmed = False
    if moved.done:
        log.warning("lease=%s resumed: no broker has recorded it yet", lease.name)
    return moved


def _ended_beside(registry: LeaseRegistry, lease: Lease) -> list[Lease]:
    """Return leases on its devices that have ended, looked up now; the broker has not dropped them yet.

    Nothing of them lives but, of a job, its runner, which uses no GPU: it reports the end, or the start.

    Raises:
        OSError: no descriptor or memory is left to look.
    """
    living = registry.scan()
    return [
        other
        for other in registry.all()
        if other.phase is Phase.RUNNING
        and other.lived
        and other.limits.keys() & lease.limits.keys()
        and all(process.is_runner for process in living.get(other.name, ()))
        and not registry.has_unread(other.asked.uid)
    ]


def _put_to_sleep(mover: Mover, lease: Lease) -> str:
    """Return why a lease that has ended keeps its part, or ""."""
    if not lease.moving.acquire(blocking=False):
        return f"lease {lease.name} has ended and is being moved"
    try:
        if lease.dropped:
            return ""
        moved = mover.suspend(lease, "", REST_S)
    finally:
        lease.moving.release()
    return "" if moved.done else f"lease {lease.name} has ended and keeps its part: {moved.reason}"
