"""Notice that a suspended lease is wanted: its processes entered a CUDA call.

The preload library counts a call at its entry, before the driver's lock can stop
it, so a counter that differs from the one taken at suspension is a call that
waits.  It stays different until the lease is resumed: nothing can be missed, and
`EventKind.WANTED` is repeated every `REPEAT_S` for a broker that was away.

Queries of streams and events are counted apart.  Some runtimes ask for ever in
the background, so whether they mean anything is left to the broker
(``queries_only``).

While something is suspended every account is compared each `POLL_S`, which costs
one pread and one comparison of bytes.  While nothing is, the thread sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from .events import Events
from .isolation import parse_account
from .lease import ASLEEP, Lease
from .verbs import EventKind

log = logging.getLogger(__name__)

POLL_S = 0.02
REPEAT_S = 5.0


class Waker:
    """Watches the counters of suspended leases, in a thread of its own."""

    def __init__(self, leases: Callable[[], Iterable[Lease]], events: Events) -> None:
        self._leases = leases
        self._events = events
        self._kicked = threading.Event()
        self._stopped = False

    def kick(self) -> None:
        """Something was suspended."""
        self._kicked.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._kicked.set()

    def run(self) -> None:
        """Watch until stopped."""
        while not self._stopped:
            asleep = [lease for lease in self._leases() if lease.phase in ASLEEP]
            if not asleep:
                self._kicked.wait()
                self._kicked.clear()
                continue
            for lease in asleep:
                try:
                    self.look(lease, time.monotonic())
                except Exception:  # the outermost loop: one lease must not keep others asleep
                    log.exception("lease=%s cannot be looked at", lease.name)
            time.sleep(POLL_S)

    def look(self, lease: Lease, now: float) -> None:
        """Compare one lease's counters, and tell when it is wanted."""
        raw = lease.files.raw_account()
        if raw == lease.looked_at and (not lease.wanted or now - lease.told_at < REPEAT_S):
            return
        account = parse_account(raw)
        if account is None:
            # Rather awake than hung: nobody can tell any more whether a call waits.
            called, reason = True, "its account file is broken"
        else:
            counters = account.counters()
            called = counters.calls_since(lease.baseline)
            if not called and not counters.queries_since(lease.baseline):
                lease.looked_at = raw
                return
            reason = "a process entered a CUDA call" if called else "a process queries a stream or event"
        news = not lease.wanted or (lease.queries_only and called)
        lease.looked_at = raw
        if not news and now - lease.told_at < REPEAT_S:
            return
        if lease.phase not in ASLEEP:
            return  # resumed meanwhile
        lease.wanted, lease.queries_only, lease.told_at = True, not called, now
        self._events.publish(
            EventKind.WANTED,
            lease=lease.name,
            reason=reason,
            fields={"queries_only": "false" if called else "true"},
        )
