"""What the sentences about a lease depend on (`words.LeaseFacts`): records and measurements, put together."""

from __future__ import annotations

from datetime import datetime, timedelta

from jupyter_gpushare import wire, words
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.lending import lent_milli
from jupyter_gpushare.broker.moment import Moment, Moments
from jupyter_gpushare.broker.records import LeaseRecord
from jupyter_gpushare.core import explain
from jupyter_gpushare.core.model import HOLDS_ROOM, Kind, Lease, State

# A moment closer than this is told with its seconds.
_CLOSE_S = 120.0
# Of times of another day, those that need no day with them, and those that need no date.
_NEAR, _THIS_WEEK = timedelta(hours=12), timedelta(days=6)
# Who may be lent and is not after so long is kept because it would help nobody.
_OVERDUE_S = 5.0


class Facts:
    """Answers from the book as it is now; holds nothing."""

    def __init__(self, book: Book, moments: Moments, forecast: Forecast) -> None:
        self._book = book
        self._moments = moments
        self._forecast = forecast

    def of(self, record: LeaseRecord) -> words.LeaseFacts:
        """Return what a sentence about this lease depends on."""
        book, moment, lease = self._book, self._moments.now(), record.lease
        live = book.live[record.id]
        measured = snapshot.measured(book, record, moment.at)
        idle_s = None if measured.idle_since_at is None else moment.at - measured.idle_since_at
        asleep = lease.state is State.SUSPENDED
        stays_s, lend_in_s, warned = self._lending(moment, measured)
        obstacle = snapshot.suspend_obstacle(book, record)
        wakes = book.wakes.usual()
        return words.LeaseFacts(
            kind=lease.kind,
            state=lease.state,
            size=words.size_of(lease),
            device_name=book.device_name(lease.devices),
            memory_limit_bytes=sum(record.limits.values()),
            memory_used_bytes=measured.used_bytes,
            memory_saved_bytes=measured.saved_bytes,
            idle_s=idle_s,
            lend_in_s=lend_in_s,
            warned=warned,
            waiting=moment.waiting,
            why=record.why,
            note=self._why_waiting(moment, record) if lease.state is State.PENDING else record.note,
            borrowed=moment.borrowed.get(record.id, False),
            unclaimed=asleep and record.id not in moment.lent,
            wanted=live.wanted,
            since=clock_time(record.since_at, book.iso_now()),
            lent_to=self._lent_to(record) if asleep else "",
            suspendable=not obstacle,
            suspend_reason=record.suspend_reason if record.note == words.STATE_LOST else obstacle,
            kept_until=self._time_in(lease.keep_until_at - book.clock()),
            stays_until=self._time_in(stays_s),
            lend_now=lease.lend_now,
            usually_wakes=words.usually(*wakes) if wakes else "",
            held_up_s=self._held_up_s(moment, record) if asleep and live.wanted else None,
            copy_s=self._copy_s(measured),
            taken_back_by=self._taken_back_by(moment, record),
            position=moment.position.get(record.id),
            reference=record.handle,
        )

    def _lending(self, moment: Moment, measured: Lease) -> tuple[float, float | None, bool]:
        """Return how long a session stays anyway, when it is lent, and whether its owner should know.

        It is lent in None seconds while nobody waits, or lending it helps none of them.
        """
        idle = measured.kind is Kind.BUILD and measured.state is State.RUNNING
        eligible_at = explain.eligible_at(measured, moment.cluster.settings) if idle else None
        if eligible_at is None or measured.idle_since_at is None:
            return 0.0, None, False
        stays_s = eligible_at - moment.at
        if not moment.waiting or stays_s < -_OVERDUE_S:
            return stays_s, None, False
        warn_at = explain.warn_at(measured, moment.cluster.settings)
        return stays_s, max(0.0, stays_s), warn_at is not None and moment.at >= warn_at

    def _lent_to(self, record: LeaseRecord) -> str:
        """Name who uses a sleeping session's room: a project, never a person of another one."""
        for device in record.lease.devices:
            there = [other for other in self._book.leases.values() if device in other.lease.devices]
            if record.id in lent_milli([other.lease for other in there]):
                holders = (other for other in there if other.state in HOLDS_ROOM)
                user = max(holders, key=lambda other: (other.is_job, other.lease.granted_at))
                return f"a {'training job' if user.is_job else 'session'} of project {user.lease.project}"
        return ""

    def _held_up_s(self, moment: Moment, record: LeaseRecord) -> float | None:
        """Return how long a job on the same devices, told to stop, may still take."""
        book = self._book
        left = [
            other.entered_at + min(job.grace_s, book.policy.max_grace_s) - moment.at
            for other in book.leases.values()
            if other.state is State.STOPPING and set(other.lease.devices) & set(record.lease.devices)
            if (job := book.job_of(other)) is not None
        ]
        return max(0.0, *left) if left else None

    def _copy_s(self, lease: Lease) -> float | None:
        """Return how long bringing the memory back takes, as the self-test of its devices measured it."""
        devices = self._book.inventory.devices if self._book.inventory else ()
        speeds = [d.resume_bytes_per_s for d in devices if d.uuid in lease.devices]
        return lease.saved_bytes / min(speeds) if speeds and min(speeds) > 0 else None

    def _taken_back_by(self, moment: Moment, record: LeaseRecord) -> str:
        if not (record.is_job and record.state is State.RUNNING and moment.borrowed.get(record.id)):
            return ""
        owners = moment.owners(record.id)
        if len(owners) != 1:
            return ""
        (owner,) = owners
        return f"project {owner}"

    def _why_waiting(self, moment: Moment, record: LeaseRecord) -> str:
        lease, job = record.lease, self._book.job_of(record)
        text = words.waiting(
            moment.why.get(record.id, ""),  # none: it is granted with the next plan
            needs=words.needs_of(lease),
            free_milli=moment.free_milli,
            position=moment.position.get(record.id),
            largest=len(moment.cluster.devices),
        )
        if (found := self._forecast.of(record.id)) is not None:
            text += f" {words.starts_in(found.low_s, found.likely_s, found.high_s)}"
        if (smaller := moment.smaller(record.id)) is not None:
            text += f" With {words.size(smaller.fraction_milli, smaller.device_count)} it would start now."
        if job is None or not words.gave_up_room(record.why):
            return text
        checkpoint = wire.decode(job.request.encode(), wire.JobRequest).checkpoint
        because = record.note or words.because_of(record.why)
        since = clock_time(record.since_at, self._book.iso_now())
        return words.requeued(since, because, words.GOES_ON.get(checkpoint, ""), text)

    def _time_in(self, seconds: float) -> str:
        """Return the local time so long from now; empty for a past one."""
        if seconds <= 0:
            return ""
        now = self._book.iso_now()
        moment = datetime.fromisoformat(now) + timedelta(seconds=seconds)
        return clock_time(moment.isoformat(), now, seconds=seconds < _CLOSE_S)


def clock_time(iso: str, now: str, *, seconds: bool = False) -> str:
    """Return the local time of a moment, ``14:20``, with seconds ``14:20:05``; empty for none.

    One of another day has its day too, ``Fri 14:20``, or its date, ``6 Nov 14:20``, unless it is near.
    """
    if not iso:
        return ""
    moment, seen = (datetime.fromisoformat(each).astimezone() for each in (iso, now))
    apart = abs(seen - moment)
    time = f"{moment:%H:%M:%S}" if seconds else f"{moment:%H:%M}"
    if moment.date() == seen.date() or apart < _NEAR:
        return time
    return f"{moment:%a} {time}" if apart < _THIS_WEEK else f"{moment.day} {moment:%b} {time}"
