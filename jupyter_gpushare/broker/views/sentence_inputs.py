"""Inputs of the sentences about a lease (`messages.LeaseFacts`), from records and measurements."""

from __future__ import annotations

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot, time_limit
from jupyter_gpushare.broker.control.forecast import Forecast
from jupyter_gpushare.broker.engine import Estimate
from jupyter_gpushare.broker.state.lending import lent_milli
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.views.cluster_view import ClusterView, ClusterViewCache
from jupyter_gpushare.core import idle
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, CheckpointMode, Kind, Lease, State
from jupyter_gpushare.core.notice import OVERDUE_S
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import before

# Times less than this ahead are shown with seconds.
_CLOSE_S = 120.0
# Until the broker acts, and the server's processes go on.
_ROUND_S = 2.0


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
        drains = filter(None, map(registry.devices.drains.on, lease.devices))
        drain = min(drains, key=lambda each: each.until or "9", default=None)
        processor_s, hold_left_s = self._processor_only(record, measured, view.at)
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
            processor_s=processor_s,
            holds_until=self._time_in(hold_left_s),
            lend_now=lease.lend_now,
            usually_wakes=messages.usually(*wakes) if wakes else None,
            held_up_s=self._held_up_s(view, record) if asleep and observation.wanted else None,
            starts_in=_range(self._forecast.start(record.id)),
            ends_in=_range(self._forecast.end(record.id)),
            back_in=_range(self.back(record)),
            asks_again_at=self._time_in(view.outlook.misplaced.get(record.id, 0.0) - registry.clock()),
            taken_back_by=self._taken_back_by(view, record),
            position=view.outlook.position.get(record.id),
            reference=record.handle,
            draining=drain is not None,
            finish_by=messages.time_text(drain.until) if drain is not None and drain.until else None,
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

    def _processor_only(self, record: LeaseRecord, measured: Lease, now: float) -> tuple[float | None, float]:
        """Return since when kernels run without GPU work, and for how long that keeps the session busy (s).

        The first is None unless that is bounded, and has lasted for an idle timeout or for the bound.
        """
        registry = self._registry
        until = snapshot.holds_until(registry, record)
        if until is None or not registry.observations[record.id].kernel_busy:
            return None, 0.0
        since_s = now - snapshot.gpu_active_at(registry, record)
        is_long = since_s >= idle.idle_timeout_s(measured, registry.policy.settings()) or now >= until
        return (since_s if is_long else None), until - now

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

    def back(self, record: LeaseRecord) -> Estimate | None:
        """Return in how many seconds a suspended session has its GPU, if it is used now; None: not known.

        What is on its devices leaves first; then its memory is copied back.  Copies take
        from as long as in the self-test to twice that.
        """
        lease = record.lease
        if record.is_job or lease.state not in (State.SUSPENDED, State.RESUMING):
            return None
        view = self._cluster_views.now()
        if lease.state is State.SUSPENDED and record.id not in view.outlook.lent:
            return None
        _, bytes_per_s = self._registry.devices.copy_rates(lease.devices)
        saved = snapshot.measured(self._registry, record, view.at).saved_bytes
        if saved and not bytes_per_s:
            return None
        copy_s = saved / bytes_per_s if saved else 0.0
        leaving = [] if lease.state is State.RESUMING else self._borrowers(record)
        lows, highs = zip((0.0, 0.0), *(self._leaves_in(other, view.at) for other in leaving), strict=True)
        return Estimate(max(lows) + copy_s, max(highs) + 2 * copy_s + _ROUND_S)

    def _borrowers(self, record: LeaseRecord) -> list[LeaseRecord]:
        """Return what holds devices of a suspended session, if that is more than the devices have."""
        here = set(record.lease.devices)
        found = [
            other
            for other in self._registry.leases.values()
            if here & set(other.lease.devices) and other.state in HOLDS_CAPACITY
        ]
        held = dict.fromkeys(here, 0)
        for other in found:
            for uuid in here & set(other.lease.devices):
                held[uuid] += other.lease.held_milli
        return found if max(held.values()) + record.lease.held_milli > WHOLE_GPU else []

    def _leaves_in(self, record: LeaseRecord, now: float) -> tuple[float, float]:
        """Return in how many seconds, at least and at most, a lease gives its devices back once told to."""
        registry, lease = self._registry, snapshot.measured(self._registry, record, now)
        bytes_per_s, _ = registry.devices.copy_rates(lease.devices)
        is_copied = lease.survival is CheckpointMode.SUSPEND and lease.suspendable
        if lease.state is State.SUSPENDING or (is_copied and lease.state is not State.STOPPING):
            copy_s = lease.used_bytes / bytes_per_s if bytes_per_s else 0.0
            begun_s = now - record.entered_at if lease.state is State.SUSPENDING else 0.0
            return max(0.0, copy_s - begun_s), max(0.0, 2 * copy_s - begun_s)
        job = registry.job_of(record)
        grace_s = min(job.grace_s, registry.policy.max_grace_s) if job is not None else 0.0
        begun_s = now - record.entered_at if lease.state is State.STOPPING else 0.0
        return 0.0, max(0.0, grace_s - begun_s)

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
        if lease.user in self._registry.owners.absent:
            return (messages.text("waiting.owner_gone"),)
        starts = _range(self._forecast.start(record.id))
        starts_in = () if starts is None else (messages.text("job.starts_in", starts),)
        if view.at < record.entered_at:  # it is not in the view
            return messages.text("job.waits", lease.size.text), *starts_in
        waits = messages.waiting(
            view.outlook.why.get(record.id, ""),  # none: the next plan grants it
            needs=messages.needs_of(lease),
            free_milli=view.outlook.free_milli,
            position=view.outlook.position.get(record.id),
            largest=len(view.cluster.devices),
            told_until=self._told_until(record),
        )
        if record.id in view.outlook.why:  # else the next plan grants it
            waits += starts_in
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


def _range(found: Estimate | None) -> wire.Text | None:
    return None if found is None else messages.range_text(found.low_s, found.high_s)
