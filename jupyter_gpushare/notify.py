"""Messages to systemd about a service's own state (sd_notify(3)); nothing where systemd did not ask."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping


class Notifier:
    """The address to which a service of ``Type=notify`` writes."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take the address out of the environment, so that no child of the service writes there."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)

    def ready(self) -> None:
        """Tell that the service answers, or works with its new settings."""
        self.send("READY=1")

    def reloading(self) -> None:
        """Tell that settings are read again; `ready` ends it."""
        self.send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Tell that the service ends in order."""
        self.send("STOPPING=1")

    def send(self, state: str) -> None:
        """Write ``state`` without waiting."""
        if not self._address:
            return
        # An address with @ is in the abstract namespace (unix(7)).
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.setblocking(False)
            systemd.sendto(state.encode(), path)


def of_process() -> Notifier:
    """Return the notifier of this process."""
    return Notifier(os.environ)
