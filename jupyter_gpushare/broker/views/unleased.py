"""Processes without a lease on a device, as `wire.UnleasedProcess`."""

from __future__ import annotations

from dataclasses import asdict

from jupyter_gpushare import messages
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import DeviceSample


def unleased_on(measured: DeviceSample | None) -> list[wire.UnleasedProcess]:
    """Return the processes without a lease that the last sample of a device shows."""
    found = measured.unleased if measured is not None else ()
    return [wire.UnleasedProcess(**asdict(each) | {"name": messages.printable(each.name)}) for each in found]
