"""Notice that a suspended lease is wanted: its processes entered a CUDA call.

The preload library counts a call at its entry, before the driver's lock can stop
it, so a counter that differs from the one taken at suspension is a call that
waits.  It stays different until the lease is resumed, so no call is missed, and
`EventKind.WANTED` is repeated every `REPEAT_S` for a broker that was away.

Some runtimes query streams and events for ever in the background, so queries are
counted apart, and the broker decides what they mean (``queries_only``): they wake a
lease only while its kernel is busy.  The sample also says whether a process seems to
wait in a call that is not counted (``stalled``, see `stalls`), again for the broker to
decide.

While a lease is suspended, every account is compared each `POLL_S`, which costs
one pread and one comparison of bytes.  Otherwise the thread sleeps.
"""

from __future__ import annotations

import logging
import time

from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.lease import Lease
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.stalls import StallDetector
from jupyter_gpushare.protocol.helper import EventKind, Phase

log = logging.getLogger(__name__)

POLL_S = 0.02
REPEAT_S = 5.0
STALL_POLL_S = 1.0


class WakeDetector:
    """Watches the counters of suspended leases, in its own thread."""

    def __init__(self, registry: LeaseRegistry, events: Events) -> None:
        self._registry = registry
        self._events = events
        self._stalls = StallDetector()
        self._stopped = False

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._registry.suspended.set()

    def run(self) -> None:
        """Watch until stopped."""
        stalls_at = 0.0
        while not self._stopped:
            suspended = [lease for lease in self._registry.all() if lease.phase is Phase.SUSPENDED]
            if not suspended:
                self._registry.suspended.wait()
                self._registry.suspended.clear()
                continue
            now = time.monotonic()
            look_for_stalls = now >= stalls_at
            if look_for_stalls:
                stalls_at = now + STALL_POLL_S
                self._stalls.keep(key for lease in suspended for key in lease.parked)
            for lease in suspended:
                try:
                    self.compare(lease, now)
                    if look_for_stalls:
                        self.look_for_stalls(lease, now)
                except Exception:  # the outermost loop: one lease must not keep others suspended
                    log.exception("lease=%s cannot be checked for calls", lease.name)
            time.sleep(POLL_S)

    def compare(self, lease: Lease, now: float) -> None:
        """Compare one lease's counters, and publish when it is wanted."""
        raw = lease.files.raw_account()
        if raw == lease.compared_account and (not lease.wanted or now - lease.wanted_published_at < REPEAT_S):
            return
        account = lease.files.parse(raw)
        if account is None:
            # Better awake than hung: whether a call waits is not known any more.
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

    def look_for_stalls(self, lease: Lease, now: float) -> None:
        """Note whether a process of one lease is stalled now."""
        stalled = self._stalls.stalled(list(lease.parked), now)
        if stalled and not lease.stalled:
            log.info("lease=%s process=%d waits without a counted call", lease.name, stalled[0][0])
        lease.stalled = bool(stalled)

    def _publish(self, lease: Lease, reason: str, now: float, *, queries_only: bool) -> None:
        if lease.phase is not Phase.SUSPENDED:
            return  # resumed meanwhile
        lease.wanted, lease.queries_only, lease.wanted_published_at = True, queries_only, now
        self._events.publish(
            EventKind.WANTED,
            lease=lease.name,
            reason=reason,
            fields={"queries_only": "true" if queries_only else "false"},
        )
