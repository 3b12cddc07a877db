"""All changes of a lease; only `registry.Registry` applies them.

A `Transition` moves a lease along `core.model.TRANSITIONS`; each has its own frozen type.
An `Edit` is a function that changes a lease within its state.  Both return the new record
and have no other effect.  The registry sets the state, its times and the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.core.model import Lease, LeaseEvent
from jupyter_gpushare.core.size import Size

log = logging.getLogger("gpushare.broker")


Edit = Callable[[LeaseRecord], LeaseRecord]


def cancelled(record: LeaseRecord) -> LeaseRecord:
    """Return a job's lease that its owner has cancelled."""
    return replace(record, lease=replace(record.lease, cancelled=True))


def altered_to(lease: Lease) -> Edit:
    """Return the edit of a queued job whose request or place has changed; its new lease is ``lease``."""
    return lambda record: replace(record, lease=lease)


def kept_until(until_at: float) -> Edit:
    """Return the edit of an idle session that its owner keeps until ``until_at`` (monotonic)."""
    return lambda record: replace(record, lease=replace(record.lease, keep_until_at=until_at, lend_now=False))


def lent(record: LeaseRecord) -> LeaseRecord:
    """Return a session that its owner lends at once."""
    return replace(record, lease=replace(record.lease, lend_now=True, keep_until_at=0.0))


def sleep_allowed(*, allowed: bool) -> Edit:
    """Return the edit of a session whose owner allows or forbids its suspension."""
    return lambda record: replace(record, never_sleep=not allowed)


def started_as(uid: int, *, moves: bool) -> Edit:
    """Return the edit of a job whose server runs as ``uid``; ``moves`` says if it may change devices."""
    return lambda record: replace(record, uid=uid, moves=moves)


def on_devices(*devices: str) -> Edit:
    """Return the edit of a lease that is now on ``devices``; without devices it changes nothing.

    The n-th new device takes over the limit of the n-th old device.
    """

    def edit(record: LeaseRecord) -> LeaseRecord:
        if not devices or devices == record.lease.devices:
            return record
        limits = dict(zip(devices, record.limits.values(), strict=True))
        lease = replace(record.lease, devices=devices)
        return replace(record, lease=lease, limits=limits)

    return edit


def loss_replaced(record: LeaseRecord) -> LeaseRecord:
    """Return a session after the processes that used its lost device memory have ended."""
    return replace(record, lost=False)


def limits_unset(record: LeaseRecord) -> LeaseRecord:
    """Return a lease just before the device helper is asked for limits other than the record's."""
    return replace(record, unprepared=True)


def limits_set(prepared: LeaseRecord) -> Edit:
    """Return the edit of a lease for which the device helper has the limits of the record ``prepared``."""
    return lambda record: replace(record, unprepared=record.held != prepared.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of state; if it has a ``why``, it is a decision and appears in the log of decisions."""

    event: ClassVar[LeaseEvent]
    why: str = ""
    for_lease: str = ""  # the lease that profits

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        """Return the record with all changes except that of the state."""
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Transition):
    """A lease got devices; if it is a job's, the next attempt begins."""

    event = LeaseEvent.GRANT
    devices: tuple[str, ...]
    held_milli: int
    limits: Mapping[str, int] = field(default_factory=dict)  # bytes per device UUID
    borrowed: bool = False
    host: str = ""  # the lease whose guest a job becomes
    guest_bytes: int = 0

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        lease = replace(
            record.lease,
            devices=self.devices,
            held_milli=self.held_milli,
            granted_at=now,
            borrowed=self.borrowed,
            host=self.host,
        )
        attempt = record.attempt + 1 if record.is_job else record.attempt
        record = replace(record, lease=lease, limits=dict(self.limits), attempt=attempt)
        return replace(record, note="", given_to="", slept_on=(), guest_bytes=self.guest_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedAsleep(Granted):
    """A session got devices that borrowers use, so it starts suspended."""

    event = LeaseEvent.GRANT_ASLEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Transition):
    """The first process of a lease runs."""

    event = LeaseEvent.STARTED

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        return replace(record, tries=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(Transition):
    """The Hub did not start a job's server; ``tries`` is the number of such failures in this attempt."""

    event = LeaseEvent.START_FAILED
    reason: str
    tries: int

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        lease = replace(record.lease, devices=(), host="")
        return replace(record, lease=lease, limits={}, note=self.reason, tries=self.tries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Transition):
    """A session got another size on its device; ``prepared`` if the device helper has set its limits."""

    event = LeaseEvent.RESIZE
    size: Size
    held_milli: int
    limits: Mapping[str, int]
    borrowed: bool
    prepared: bool

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        lease = replace(record.lease, size=self.size, held_milli=self.held_milli, borrowed=self.borrowed)
        return replace(record, lease=lease, limits=dict(self.limits), unprepared=not self.prepared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Transition):
    """A guest got the device that its host has left."""

    event = LeaseEvent.KEEP

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        lease = replace(record.lease, host="", attained_at=now, granted_at=now)
        return replace(record, lease=lease, unprepared=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendBegun(Transition):
    """A lease must give up its device memory to a lease of the project ``given_to``."""

    event = LeaseEvent.SUSPEND
    given_to: str = ""

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        lease = replace(record.lease, lend_now=False)
        return replace(record, lease=lease, note="", given_to=self.given_to, slept_on=lease.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendDone(Transition):
    """The device memory of a lease is in host memory."""

    event = LeaseEvent.SUSPEND_DONE
    saved_bytes: int

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        lease = replace(record.lease, saved_bytes=self.saved_bytes, host="")
        return replace(record, lease=lease, unprepared=record.unprepared or bool(record.lease.host))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRefused(Transition):
    """The device helper did not suspend a lease."""

    event = LeaseEvent.SUSPEND_REFUSED
    reason: str

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        return replace(record, suspend_reason=self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeBegun(Transition):
    """A lease gets its device memory back on ``devices`` (none: on its own)."""

    event = LeaseEvent.RESUME
    devices: tuple[str, ...] = ()
    host: str = ""  # as in `Granted`
    guest_bytes: int = 0

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        record = on_devices(*self.devices)(record)
        lease = replace(record.lease, host=self.host)
        return replace(record, lease=lease, guest_bytes=self.guest_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeDone(Transition):
    """The device memory of a lease is back on ``devices`` (none: where it was to resume)."""

    event = LeaseEvent.RESUME_DONE
    devices: tuple[str, ...] = ()

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        record = on_devices(*self.devices)(record)
        return replace(record, lease=replace(record.lease, saved_bytes=0, granted_at=now), note="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRefused(Transition):
    """The device helper did not resume a lease, now on ``devices`` (none: where it was to resume)."""

    event = LeaseEvent.RESUME_REFUSED
    reason: str
    devices: tuple[str, ...] = ()
    stays: bool = False  # it cannot move, so no move is tried again

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        record = on_devices(*self.devices)(record)
        unprepared = record.unprepared or bool(record.lease.host)
        record = replace(record, lease=replace(record.lease, host=""), unprepared=unprepared)
        return replace(record, note=self.reason, moves=record.moves and not self.stays)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLost(Transition):
    """The driver could not restore the memory of a lease, now on ``devices`` (none: as before)."""

    event = LeaseEvent.STATE_LOST
    reason: str
    devices: tuple[str, ...] = ()

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        record = on_devices(*self.devices)(record)
        lease = replace(record.lease, saved_bytes=0)
        return replace(record, lease=lease, lost=True, note="", suspend_reason=self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Transition):
    """A lease must end; with ``requeue`` its job goes back to the queue."""

    event = LeaseEvent.STOP
    reason: str = ""  # empty: the earlier one stays
    requeue: bool = False
    given_to: str = ""  # of a requeued job: the project that its GPU is taken for

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        if self.requeue:
            return replace(record, requeue=True, note="", given_to=self.given_to)
        return replace(record, requeue=False, note=self.reason or record.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued(Transition):
    """An attempt has ended, and its job waits again."""

    event = LeaseEvent.REQUEUED

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        return replace(
            record,
            lease=replace(record.lease, devices=(), held_milli=0, saved_bytes=0, host=""),
            limits={},
            lost=False,
            note="",
            given_to=record.given_to if record.requeue else "",
            requeue=False,
            settled=record.attempt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Transition):
    """A lease has ended."""

    event = LeaseEvent.RELEASE
    reason: str = ""

    def apply(self, record: LeaseRecord, now: float) -> LeaseRecord:
        return replace(record, note=self.reason or record.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Released):
    """A job has ended without success."""

    event = LeaseEvent.FAIL


def log_transition(record: LeaseRecord, changed: LeaseRecord, transition: Transition) -> None:
    """Log a change of state in one line, with its cause."""
    log.info(
        "lease=%s user=%s project=%s %s->%s event=%s reason=%s for=%s for_s=%.1f note=%s",
        changed.handle,
        changed.lease.user,
        changed.lease.project,
        record.state,
        changed.state,
        transition.event,
        transition.why or "-",
        transition.for_lease or "-",
        changed.entered_at - record.entered_at,
        changed.note or "-",
    )
