"""Emptying devices: an administrator lets a device, or the machine, take nothing new.

What is there stays: sessions may sleep, wake and end, jobs may end; owners of sessions are
asked to finish.  Nothing is stopped, also not at the time that was named.  The planner sees a
device that is being emptied as not usable (`core.model.Device`).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from jupyter_gpushare import messages
from jupyter_gpushare.broker.engine import Engine
from jupyter_gpushare.broker.state.records import MACHINE, Drain, Drains
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.errors import Conflict, InvalidRequest, NotFound
from jupyter_gpushare.protocol.wire import Text
from jupyter_gpushare.wall_clock import iso

MAX_DRAINS = 1_000
_MOST_AHEAD = timedelta(days=366)


async def drain(registry: Registry, engine: Engine, name: str, until: str | None, by: str) -> None:
    """Let a device (UUID), or all of them (`MACHINE`), take nothing new; stored until `undrain`.

    ``until``: ISO 8601 with a zone, for the sentences to the owners of sessions there.

    Raises:
        Conflict: the engine cannot keep a device empty, or `MAX_DRAINS` are being emptied.
        NotFound: there is no such device.
        InvalidRequest: ``until`` is no time in the next year.
        DiskFull: nothing is changed.
        StoreError: the database failed; the broker ends.
    """
    if not engine.drains:
        raise Conflict("the cluster's scheduler places work here: empty a node with kubectl cordon")
    _check_name(registry, name)
    at = registry.iso_now()
    # Also of devices that are absent now: they may come back, to work that an administrator forbade.
    drains = registry.devices.drains.of
    if name not in drains and len(drains) >= MAX_DRAINS:
        raise Conflict("%1 GPUs are being emptied: let one of them take work again", MAX_DRAINS)
    by = messages.printable(by)
    wanted = Drain(by=by, at=at, until="" if until is None else _time(until, at))
    before = drains.get(name)
    if before is not None and (before.by, before.until) == (wanted.by, wanted.until):
        await registry.journal.durable()
        return
    what = _what(name)
    sentence = messages.text("notice.drain", by, what)
    if wanted.until:
        sentence = messages.text("notice.drain_until", by, what, messages.time_text(wanted.until))
    await _set(registry, Drains(of={**drains, name: wanted}), sentence)


async def undrain(registry: Registry, name: str, by: str) -> None:
    """Let a device, or with `MACHINE` every device, take work again; a repeated call changes nothing.

    Raises:
        NotFound: there is no such device.
        InvalidRequest: the whole machine is being emptied, and this is one device.
        DiskFull: nothing is changed.
        StoreError: the database failed; the broker ends.
    """
    drains = registry.devices.drains
    if name not in drains.of:
        _check_name(registry, name)
    if drains.on(name) is not None and name not in drains.of:
        raise InvalidRequest("the whole machine is being emptied: let the machine take work again")
    kept = {} if name == MACHINE else {uuid: each for uuid, each in drains.of.items() if uuid != name}
    if kept == drains.of:
        await registry.journal.durable()
        return
    sentence = messages.text("notice.drain_over", messages.printable(by), _what(name))
    await _set(registry, replace(drains, of=kept), sentence)


async def _set(registry: Registry, drains: Drains, sentence: Text) -> None:
    registry.journal.check()
    registry.devices.drains = drains
    await registry.journal.commit(drains, registry.decisions.add(None, "drain", sentence))
    await registry.notify()


def _what(name: str) -> Text:
    return messages.text("part.machine") if name == MACHINE else messages.text("verbatim", f"GPU {name}")


def _check_name(registry: Registry, name: str) -> None:
    if name != MACHINE and all(name != device.uuid for device in registry.devices.listed):
        raise NotFound("there is no GPU %1", repr(name[:60]))


def _time(text: str, now: str) -> str:
    """Return a time as the broker writes times.

    Raises:
        InvalidRequest: it is none, has no zone, is over, or is more than a year ahead.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None or len(text) > 40:
        raise InvalidRequest("until is a time with its zone, like 2026-11-22T18:00+01:00")
    if not timedelta(0) < at - datetime.fromisoformat(now) <= _MOST_AHEAD:
        raise InvalidRequest("until is a time in the future, at most a year ahead")
    return iso(at)
