"""Events for watchers, published without waiting for a slow reader.

Each watcher has a bounded queue.  A watcher that falls behind is disconnected.  When it
watches again, it starts from a fresh `sample`, so a lost event leaves no reader with old state.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress

from jupyter_gpushare.protocol.helper import Event, EventKind

QUEUE_EVENTS = 256


# The events for one reader; None ends the stream.
Watcher = queue.Queue[Event | None]


class Events:
    """Numbers the events, and queues each event for every watcher."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._seq = 0
        self._watchers: list[Watcher] = []

    def publish(
        self,
        kind: EventKind,
        *,
        lease: str = "",
        device: str = "",
        reason: str = "",
        fields: dict[str, str] | None = None,
    ) -> None:
        """Queue an event for every watcher; a watcher with a full queue is disconnected."""
        with self._guard:
            self._seq += 1
            event = Event(
                seq=self._seq,
                at=time.monotonic(),
                kind=kind,
                lease=lease,
                device=device,
                reason=reason,
                fields=fields or {},
            )
            for watcher in list(self._watchers):
                try:
                    watcher.put_nowait(event)
                except queue.Full:
                    self._cut(watcher)

    def watch(self) -> Watcher:
        """Return a new watcher, which gets every event from now on."""
        watcher = Watcher(QUEUE_EVENTS)
        with self._guard:
            self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Stop watching."""
        with self._guard:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def _cut(self, watcher: Watcher) -> None:
        self._watchers.remove(watcher)
        with suppress(queue.Empty):
            while True:
                watcher.get_nowait()
        watcher.put_nowait(None)
