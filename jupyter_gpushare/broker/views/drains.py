"""Whether a device is being emptied, and what is still there, as `wire.Drain`."""

from __future__ import annotations

from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.protocol import wire


def drain_of(registry: Registry, uuid: str) -> wire.Drain | None:
    """Return why a device takes nothing new; None: an administrator lets it take work."""
    drains = registry.devices.drains
    if (drain := drains.on(uuid)) is None:
        return None
    there = [record for record in registry.index.placed.values() if uuid in record.lease.devices]
    return wire.Drain(
        by=drain.by,
        at=drain.at,
        until=drain.until,
        machine=uuid not in drains.of,
        sessions=sum(not record.is_job for record in there),
        jobs=sum(record.is_job for record in there),
    )
