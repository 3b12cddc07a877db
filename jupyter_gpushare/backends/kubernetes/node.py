"""One node of a cluster, as its device helper was last heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jupyter_gpushare.backends.helper_client import Address, HelperClient
from jupyter_gpushare.backends.local import LocalDevices
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import DeviceSample, Inventory, LeaseSample, Sample
from jupyter_gpushare.protocol.seats import SeatSample


class Node:
    """One node as it was last heard."""

    def __init__(self, name: str, address: Address, epoch: Callable[[], int], seen_at: float) -> None:
        self.name = name
        self.address = address
        self.client = HelperClient(address, epoch)
        self.devices = LocalDevices(self.client)
        self.seen_at = seen_at
        self.offset_s = 0.0  # of this machine's clock to the node's
        self.clock_at = float("-inf")
        self.silent = ""  # why it does not answer
        self.probe: asyncio.Task[None] | None = None  # while it is silent
        self.inventory: Inventory | None = None
        self.sample: Sample | None = None
        self.has_news = False  # since the sample was asked for

    def stale(self) -> str:
        """Return the sentence about a helper that does not answer."""
        return f"the device helper of node {self.name} does not answer"

    def shown_devices(self) -> tuple[helper.Device, ...]:
        """Return the devices as others see them: unhealthy while the helper is silent."""
        devices = self.inventory.devices if self.inventory else ()
        unhealthy = partial(replace, healthy=False, reason=self.stale(), suspendable=False)
        return tuple(map(unhealthy, devices)) if self.silent else devices

    def device_samples(self, sample: Sample) -> tuple[DeviceSample, ...]:
        """Return what a sample says about devices: unhealthy while the helper is silent."""
        unhealthy = partial(replace, healthy=False, reason=self.stale())
        return tuple(map(unhealthy, sample.devices)) if self.silent else sample.devices

    def seat_samples(self, sample: Sample) -> tuple[SeatSample, ...]:
        """Return what a sample says about seats: not connected while the helper is silent."""
        return tuple(replace(seat, connected=False) for seat in sample.seats) if self.silent else sample.seats


def shifted(lease: LeaseSample, offset_s: float, now: float) -> LeaseSample:
    """Return a lease's sample with the times of this machine's clock."""
    return replace(
        lease,
        measured_at=min(now, lease.measured_at + offset_s),
        active_at=min(now, lease.active_at + offset_s),
        unread_since=lease.unread_since and min(now, lease.unread_since + offset_s),
        processes=tuple(
            replace(process, started_at=min(now, process.started_at + offset_s))
            for process in lease.processes
        ),
    )
