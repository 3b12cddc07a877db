"""Signs of life of the broker's event loop, for the parent that replaces a broker that hangs.

* systemd (``Type=notify``, ``WatchdogSec=``): ``READY=1`` once the broker answers, then
  ``WATCHDOG=1`` every `EVERY_S` to the socket ``NOTIFY_SOCKET`` (sd_notify(3)).
* ``gpushare broker --respawn``: a byte every `EVERY_S` into the pipe ``GPUSHARE_HEARTBEAT_FD``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import MutableMapping

from jupyter_gpushare.notify import Notifier

EVERY_S = 1.0
# A broker without a sign of life for so long hangs.  Before the first one it opens its database.
HANGS_S = 10.0
STARTS_S = 60.0
FD_VARIABLE = "GPUSHARE_HEARTBEAT_FD"
_DRAIN_BYTES = 4096


class Heartbeat:
    """The broker's end."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take the addresses out of the environment, so that no child of the broker sends signs."""
        self.systemd = Notifier(environment)
        self._pipe = int(environment.pop(FD_VARIABLE, "-1"))

    async def run(self) -> None:
        """Send signs of life until cancelled."""
        self.systemd.ready()
        while True:
            self.systemd.send("WATCHDOG=1")
            if self._pipe >= 0:
                with contextlib.suppress(OSError):  # full, or the parent is gone
                    os.write(self._pipe, b".")
            await asyncio.sleep(EVERY_S)


class Monitor:
    """The end of a parent: whether its child still sends signs of life."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._silent_at = time.monotonic() + STARTS_S

    def hangs(self) -> bool:
        """Return whether the child was silent for `HANGS_S`, or never said anything for `STARTS_S`."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            if os.read(self._reading, _DRAIN_BYTES):
                self._silent_at = now + HANGS_S
        return now >= self._silent_at

    def close(self) -> None:
        """Close both ends of the pipe."""
        os.close(self._reading)
        os.close(self.writing)
