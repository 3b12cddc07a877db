"""Wake-up: notice that a suspended lease is wanted, and resume it while no broker can.

The preload library counts a call at its entry, before the driver's lock can stop
it.  So if a counter differs from its value at suspension, a call waits.  The counter
stays different until the lease is resumed, so no call is missed.  `EventKind.WANTED`
is repeated every `REPEAT_S` for a broker that was away.

Some runtimes query streams and events for ever in the background.  So queries are counted
separately (``queries_only``), and the broker decides: they wake a lease only while one of its kernels
handles a request.  The sample also says whether a process seems to wait in a call that is
not counted (``stalled``), and the broker decides about that too.

While any lease is suspended, the accounts of suspended leases are compared every `POLL_S`, which
costs one pread and one comparison of bytes each.  Otherwise the thread sleeps.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.suspend import UNFINISHED, Mover, refusal
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import EventKind, MoveResult, Phase, Refusal

log = logging.getLogger(__name__)


# ---- processes of suspended leases that seem to wait in the driver without a counted call
# The library counts the calls that may wait while a process is suspended.  A call that it
# does not count, or that bypasses it, would wait for ever.  So a parked process counts as
# stalled if it has used no CPU time (in any thread) for `STALLED_S` and its main thread is
# in no system call that sleeps, polls, reads, or waits for a child or a connection.  An idle
# kernel polls its sockets, ``input()`` and a slow request poll or read, ``time.sleep`` sleeps.
# The broker wakes a stalled lease only if its kernels have also handled requests for a while.
#
# Sources: /proc/PID/stat and /proc/PID/syscall of proc(5); the numbers are those of
# asm/unistd.h.  If /proc/PID/syscall may not be read, no process is ever stalled.

STALLED_S = 2.0
_SYSCALL_BYTES = 256

# read, poll, pread64, readv, select, pause, nanosleep, connect, accept, recvfrom, recvmsg, wait4,
# rt_sigtimedwait, clock_nanosleep, epoll_wait, waitid, pselect6, ppoll, epoll_pwait, accept4,
# recvmmsg, epoll_pwait2.
_WAITS = {
    "x86_64": frozenset(
        {0, 7, 17, 19, 23, 34, 35, 42, 43, 45, 47, 61, 128, 230, 232, 247, 270, 271, 281, 288, 299, 441}
    ),
    "aarch64": frozenset({22, 63, 65, 67, 72, 73, 95, 101, 115, 137, 202, 203, 207, 212, 242, 243, 260, 441}),
}


class StallDetector:
    """Finds processes that have used no CPU time for a while."""

    def __init__(self) -> None:
        self._since: dict[Key, tuple[int, float]] = {}  # CPU ticks, and the time of their first sample

    def stalled(self, keys: Iterable[Key], now: float) -> list[Key]:
        """Return the processes that have been stalled for `STALLED_S`; call this about every second.

        Raises:
            OSError: no descriptor or memory is free.
        """
        found = []
        for key in keys:
            ticks = _waiting_elsewhere(key)
            before = self._since.get(key)
            if ticks is None:
                self._since.pop(key, None)
            elif before is None or before[0] != ticks:
                self._since[key] = (ticks, now)
            elif now - before[1] >= STALLED_S:
                found.append(key)
        return found

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget all processes except these."""
        kept = set(keys)
        self._since = {key: seen for key, seen in self._since.items() if key in kept}


def _waiting_elsewhere(key: Key) -> int | None:
    """Return the CPU ticks of a process, or None if its main thread runs or is in one of `_WAITS`."""
    fields = procfs.stat_fields(key[0])
    if not fields or int(fields[procfs.START_TICKS]) != key[1] or fields[procfs.STATE] != b"S":
        return None
    # The number comes first; "running" stands instead of it, and without ptrace access the file is empty.
    number = procfs.read(key[0], "syscall", _SYSCALL_BYTES).split(b" ", 1)[0]
    if not number.isdigit() or int(number) in _WAITS.get(platform.machine(), ()):
        return None
    if platform.machine() not in _WAITS:
        return None
    return int(fields[procfs.USER_TICKS]) + int(fields[procfs.SYSTEM_TICKS])


# ---- counters ----------------------------------------------------------------

POLL_S = 0.02
REPEAT_S = 5.0
STALL_POLL_S = 1.0


class WakeDetector:
    """Watches the counters of suspended leases; `run` needs its own thread."""

    def __init__(self, registry: LeaseRegistry, events: Events) -> None:
        self._registry = registry
        self._events = events
        self._stalls = StallDetector()

    def run(self) -> None:
        """Watch for ever."""
        stalls_at = 0.0
        while True:
            suspended = [lease for lease in self._registry.all() if lease.phase is Phase.SUSPENDED]
            if not suspended:
                self._registry.suspended.wait()
                self._registry.suspended.clear()
                continue
            now = time.monotonic()
            stalls_are_due = now >= stalls_at
            if stalls_are_due:
                stalls_at = now + STALL_POLL_S
                self._stalls.keep(key for lease in suspended for key in lease.parked)
            for lease in suspended:
                try:
                    self.compare(lease, now)
                    if stalls_are_due:
                        self.check_stall(lease, now)
                except Exception:  # the outermost loop: one lease must not keep others suspended
                    log.exception("lease=%s cannot be checked for calls", lease.name)
            time.sleep(POLL_S)

    def compare(self, lease: HelperLease, now: float) -> None:
        """Compare the counters of one lease, and publish an event if it is wanted."""
        raw = lease.files.raw_account()
        if raw == lease.compared_account and (not lease.wanted or now - lease.wanted_published_at < REPEAT_S):
            return
        account = lease.files.parse(raw)
        if account is None:
            # Whether a call waits is unknown now, and awake is better than hung.
            called, reason = True, "its account file is broken"
        else:
            counters = account.counters()
            called = counters.calls_since(lease.baseline)
            if not called and not counters.queries_since(lease.baseline) and not lease.wanted:
                lease.compared_account = raw
                return
            reason = "a process entered a CUDA call" if called else "a process queries a stream or event"
        is_new = not lease.wanted or (lease.queries_only and called)
        lease.compared_account = raw
        if is_new or now - lease.wanted_published_at >= REPEAT_S:
            self._publish(lease, reason, now, queries_only=not called)

    def check_stall(self, lease: HelperLease, now: float) -> None:
        """Store whether a process of one lease is stalled now."""
        stalled = self._stalls.stalled(list(lease.parked), now)
        if stalled and not lease.stalled:
            log.info("lease=%s process=%d waits without a counted call", lease.name, stalled[0][0])
        lease.stalled = bool(stalled)

    def _publish(self, lease: HelperLease, reason: str, now: float, *, queries_only: bool) -> None:
        if lease.phase is not Phase.SUSPENDED:
            return  # resumed meanwhile
        lease.wanted, lease.queries_only, lease.wanted_published_at = True, queries_only, now
        self._events.publish(
            EventKind.WANTED,
            lease=lease.name,
            reason=reason,
            fields={"queries_only": "true" if queries_only else "false"},
        )


# ---- resume a wanted lease while no broker can record it, because it hangs, restarts or cannot store
# While no broker answers, the helper itself resumes a lease that the broker allowed beforehand
# (`SetLimit.unattended`: a session on its own capacity).  Only a counted call wakes it; queries
# alone are for the broker to judge.  A broker that answers, but cannot write to its database,
# requests the resume (`Resume.unrecorded`).  In both cases:
#
# * A lease that has ended frees its part of the devices, whether or not the broker could record its
#   end.  It is suspended, which moves nothing and is in the journal first; then no process that
#   carries its name gets the GPU.  A job is suspended too if only its runner has begun; the broker
#   resumes it.
# * The lease is resumed only if `LeaseRegistry.claim` then finds its part of the devices free
#   and no borrower on them, and, like any other lease, only into memory that the driver shows free
#   (`reservations`).  If one of these is unknown, nothing is done.
# * The journal says so before it is done, and the broker reads it from the sample
#   (`LeaseSample.unconfirmed`).

CHECK_S = 1.0
# Suspending a lease that has ended and has nothing to move may take this long.
SUSPEND_ENDED_S = 2.0


class UnattendedResumes:
    """Resumes wanted leases while no broker answers; `run` needs its own thread, as driver calls may hang."""

    def __init__(self, registry: LeaseRegistry, mover: Mover) -> None:
        self._registry = registry
        self._mover = mover

    def run(self) -> None:
        """Check all leases every `CHECK_S`, for ever."""
        while True:
            time.sleep(CHECK_S)
            for lease in self._registry.all():
                try:
                    self.check(lease)
                except Exception:  # the outermost loop: one lease must not keep others suspended
                    log.exception("lease=%s cannot be resumed", lease.name)

    def check(self, lease: HelperLease) -> None:
        """Resume one lease if it is suspended and wanted, and may be resumed without the broker."""
        is_wanted = lease.phase is Phase.SUSPENDED and lease.wanted and not lease.queries_only
        is_due = is_wanted and lease.asked.unattended and self._registry.is_unattended()
        if not is_due or not lease.moving.acquire(blocking=False):
            return
        try:
            moved = resume_unrecorded(self._registry, self._mover, lease, 0.0, by_broker=False)
        finally:
            lease.moving.release()
        if not moved.done and lease.logged_reason != moved.reason:
            lease.logged_reason = moved.reason
            log.warning(
                "lease=%s stays %s while no broker answers: %s", lease.name, lease.phase, moved.reason
            )


def resume_unrecorded(
    registry: LeaseRegistry, mover: Mover, lease: HelperLease, timeout_s: float, *, by_broker: bool
) -> MoveResult:
    """Resume a lease without a record of the broker, and return the result; the caller holds the lease.

    ``by_broker``: a broker requests it.
    """
    if lease.unsettled:
        mover.settle(lease)  # before the claim, because a lease that this suspends has to be claimed
    if lease.unsettled:
        return refusal(Refusal.BUSY, UNFINISHED)
    if lease.phase is not Phase.SUSPENDED:
        return mover.resume(lease, timeout_s)
    kept = [_suspend_ended(mover, ended) for ended in _ended_beside(registry, lease)]
    if not registry.claim(lease, by_broker=by_broker):
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


def _ended_beside(registry: LeaseRegistry, lease: HelperLease) -> list[HelperLease]:
    """Return the leases on its devices that have ended and that the broker has not dropped yet.

    Only the runner of a job may still live; it uses no GPU and reports the end or the start.

    Raises:
        OSError: no descriptor or memory is free.
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


def _suspend_ended(mover: Mover, lease: HelperLease) -> str:
    """Suspend a lease that has ended; return why it keeps its part of the devices, or ""."""
    if not lease.moving.acquire(blocking=False):
        return f"lease {lease.name} has ended and is being moved"
    try:
        if lease.dropped:
            return ""
        moved = mover.suspend(lease, "", SUSPEND_ENDED_S)
    finally:
        lease.moving.release()
    return "" if moved.done else f"lease {lease.name} has ended and keeps its part: {moved.reason}"
