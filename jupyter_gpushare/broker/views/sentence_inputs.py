"""Inputs of the sentences about a lease (`messages.LeaseFacts`), from records and measurements."""

from __future__ import annotations

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot, time_limit
from jupyter_gpushare.broker.control.forecast import Forecast
from jupyter_gpushare.broker.state.lending import lent_milli
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.views.cluster_view import ClusterView, ClusterViewCache
from jupyter_gpushare.core import idle
from jupyter_gpushare.core.model import HOLDS_CAPACITY, Kind, Lease, State
from jupyter_gpushare.core.notice import OVERDUE_S
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import before

# Times less than this ahead are shown with seconds.
_CLOSE_S = 120.0


class SentenceInputs:
    """Collects the inputs from the present registry; keeps no state."""

    def __init__(self, registry: Registry, cluster_views: ClusterViewCache, forecast: Forecast) -> None:
        self._registry = registry
        self._cluster_views = cluster_views
        self._forecast = forecast

    def of(self, record: LeaseRecord, *, is_new: bool = False) -> messages.LeaseFacts:
        """Return the inputs of all sentences about one lease; ``is_new``: it was submitted just now."""
        views, registry, lease = self._cluster_views, self._registry, record.lease
        view = views.recent() if is_new else views.now()
        observation = registry.observations[record.id]
        measured = snapshot.measured(registry, record, view.at)
        idle_s = None if measured.idle_since_at is None else view.at - measured.idle_since_at
        asleep = lease.state is State.SUSPENDED
        stays_s, lend_in_s, warned = self._lending(view, measured)
        obstacle = snapshot.suspend_obstacle(registry, record)
        wakes = registry.wake_times.usual()
        job = registry.job_of(record)
        run_left_s = time_limit.left_s(job, record, registry.clock()) if job else None
        return messages.LeaseFacts(
            kind=lease.kind,
            state=lease.state,
            size=messages.size_text(lease.size),
            device_name=registry.devices.model_name(lease.devices),
            memory_limit_bytes=sum(record.limits.values()),
            memory_used_bytes=measured.used_bytes,
            memory_saved_bytes=measured.saved_bytes,
            idle_s=idle_s,
            lend_in_s=lend_in_s,
            warned=warned,
            waiting=view.waiting,
            why=record.why,
            note=record.note,
            given_to=record.given_to,
            waits=self._why_waiting(view, record) if lease.state is State.PENDING else (),
            lost=record.lost,
            damaged=observation.sample is not None and observation.sample.damaged,
            borrowed=view.outlook.borrowed.get(record.id, False),
            unclaimed=asleep and record.id not in view.outlook.lent,
            wanted=observation.wanted,
            since=messages.time_text(record.since_at),
            lent_to=self._lent_to(record) if asleep else None,
            suspendable=not obstacle,
            suspend_reason=record.suspend_reason if record.lost else obstacle,
            kept_until=self._time_in(lease.keep_until_at - registry.clock()),
            stays_until=self._time_in(stays_s),
            lend_now=lease.lend_now,
            usually_wakes=messages.usually(*wakes) if wakes else None,
            held_up_s=self._held_up_s(view, record) if asleep and observation.wanted else None,
            copy_s=self._copy_s(measured),
            taken_back_by=self._taken_back_by(view, record),
            position=view.outlook.position.get(record.id),
            reference=record.handle,
            left_s=messages.left_s(lease, job.measure, view.at) if job else None,
            runs_until=self._time_in(run_left_s or 0.0),
            is_timed_out=job is not None and time_limit.why_over(job) is not None,
            doubt=messages.doubt(lease, job.measure, view.at) if job else None,
        )

    def _lending(self, view: ClusterView, measured: Lease) -> tuple[float, float | None, bool]:
        """Return in how many seconds a session may be lent, is lent, and whether to warn its owner.

        The second is None while no job waits, or when lending helps none of them.
        """
        is_idle = measured.kind is Kind.BUILD and measured.state is State.RUNNING
        eligible_at = idle.eligible_at(measured, view.cluster.settings) if is_idle else None
        if eligible_at is None or measured.idle_since_at is None:
            return 0.0, None, False
        if (notice := self._registry.notices.get(measured.id)) is not None:
            lend_in_s = max(0.0, notice.until_at - view.at)
            return lend_in_s, lend_in_s, True
        stays_s = eligible_at - view.at
        if not view.waiting or stays_s < -OVERDUE_S:
            return stays_s, None, False
        warn_at = idle.warn_at(measured, view.cluster.settings)
        return stays_s, max(0.0, stays_s), warn_at is not None and view.at >= warn_at

    def _lent_to(self, record: LeaseRecord) -> wire.Text | None:
        """Return the user of a suspended session's capacity: kind and project, never a user name."""
        for device in record.lease.devices:
            there = [other for other in self._registry.leases.values() if device in other.lease.devices]
            if record.id in lent_milli([other.lease for other in there]):
                holders = (other for other in there if other.state in HOLDS_CAPACITY)
                user = max(holders, key=lambda other: (other.is_job, other.lease.granted_at))
                key = "part.job_of_project" if user.is_job else "part.session_of_project"
                return messages.text(key, user.lease.project)
        return None

    def _held_up_s(self, view: ClusterView, record: LeaseRecord) -> float | None:
        """Return the rest of the grace period of a stopping job on the same devices; None: no such job."""
        registry = self._registry
        left = [
            other.entered_at + min(job.grace_s, registry.policy.max_grace_s) - view.at
            for other in registry.leases.values()
            if other.state is State.STOPPING and set(other.lease.devices) & set(record.lease.devices)
            if (job := registry.job_of(other)) is not None
        ]
        return max(0.0, *left) if left else None

    def _copy_s(self, lease: Lease) -> float | None:
        """Return the copy time of a resume at the rate that the self-test measured; None: not measured."""
        bytes_per_s = self._registry.devices.resume_bytes_per_s(lease.devices)
        return lease.saved_bytes / bytes_per_s if bytes_per_s > 0 else None

    def _taken_back_by(self, view: ClusterView, record: LeaseRecord) -> str:
        if not (record.is_job and record.state is State.RUNNING and view.outlook.borrowed.get(record.id)):
            return ""
        owners = view.owners(record.id)
        if len(owners) != 1:
            return ""
        (owner,) = owners
        return owner

    def _why_waiting(self, view: ClusterView, record: LeaseRecord) -> messages.Texts:
        lease, job = record.lease, self._registry.job_of(record)
        if view.at < record.entered_at:  # it is not in the view
            return (messages.text("job.waits", lease.size.text),)
        waits = messages.waiting(
            view.outlook.why.get(record.id, ""),  # none: the next plan grants it
            needs=messages.needs_of(lease),
            free_milli=view.outlook.free_milli,
            position=view.outlook.position.get(record.id),
            largest=len(view.cluster.devices),
            told_until=self._told_until(record),
        )
        if (found := self._forecast.estimate(record.id)) is not None:
            waits += (messages.starts_in(found.low_s, found.likely_s, found.high_s),)
        if (smaller := view.smaller(record.id)) is not None:
            waits += (messages.text("job.smaller", messages.size_text(smaller)),)
        if job is None or not messages.is_preemption(record.why):
            return waits
        checkpoint = wire.decode(job.request.encode(), wire.JobRequest).checkpoint
        because = messages.because_of(record.why, record.given_to)
        if record.note:
            because = messages.reason_text(record.note)
        since = messages.time_text(record.since_at)
        return messages.requeued(since, because, checkpoint, waits)

    def _told_until(self, record: LeaseRecord) -> wire.Text | None:
        """Return when the last of the sessions that were told gives its GPU to a job; None: none was."""
        notices = self._registry.notices.values()
        until = [notice.until_at for notice in notices if notice.for_lease == record.id]
        return self._time_in(max(until) - self._registry.clock()) if until else None

    def _time_in(self, seconds: float) -> wire.Text | None:
        """Return the time in so many seconds; None for a past one."""
        if seconds <= 0:
            return None
        at = before(self._registry.iso_now(), seconds=-seconds)
        return messages.time_text(at, seconds=seconds < _CLOSE_S)
