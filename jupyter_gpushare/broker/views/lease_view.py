"""A lease as its owner sees it, from its record and its measurements."""

from __future__ import annotations

import enum
from functools import cached_property
from typing import NamedTuple

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control import ending, snapshot
from jupyter_gpushare.broker.state.culling import KERNEL_SETTING, SiteEnd
from jupyter_gpushare.broker.state.observations import Companion
from jupyter_gpushare.broker.state.records import Drain, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import lent_milli, own_milli
from jupyter_gpushare.broker.views.cluster_view import ClusterView
from jupyter_gpushare.core import idle
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Kind, State, Why
from jupyter_gpushare.core.notice import OVERDUE_S
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import ComputeShare, Overuse, Phase, UnleasedProcess
from jupyter_gpushare.wall_clock import before

# Times nearer than this are shown with seconds.
_WITH_SECONDS_S = 120.0
# An end that is further ahead is not shown.
_MAX_SHOWN_DAYS = 300
_WITH_A_SERVER = frozenset({State.RUNNING, State.SUSPENDING, State.SUSPENDED, State.RESUMING})
# Time for the broker to act and the server's processes to continue.
_ROUND_S = 2.0


class LendingOutlook(NamedTuple):
    """When an idle session will be lent, in seconds from now, and whether its owner was warned."""

    stays_s: float = 0.0  # it is not lent sooner
    lend_in_s: float | None = None  # None: no work waits that lending would help
    warned: bool = False


class ProcessorOnly(NamedTuple):
    """Kernels compute without GPU work, which keeps their session busy for a bounded time."""

    since_s: float
    left_s: float  # seconds left of that time; 0 or less: it is over


class TimeShare(NamedTuple):
    """A lease's part of the time of each of its devices, in percent."""

    mode: ComputeShare = ComputeShare.OFF  # the mode in force
    granted: float | None = None  # None: off
    measured: float | None = None  # None: there was no time to share in the last minute
    reason: str = ""  # why the requested mode is not in force


class Consent(enum.StrEnum):
    """The effect of an owner's consent that a job may share a GPU; the value names its sentence."""

    NONE = ""  # the owner gave no consent
    SHARE = "may_share"
    GUEST = "may_come"  # as a guest only
    HOST = "may_host"  # as a host only
    NO_EFFECT = "no_effect"
    OFF = "off"  # for the whole site


class LeaseView:
    """One lease at the time of a cluster view; each value is computed on first use."""

    def __init__(self, registry: Registry, cluster: ClusterView, record: LeaseRecord) -> None:
        self._registry = registry
        self.cluster = cluster
        self.record = record
        self.lease = snapshot.measured(registry, record, cluster.at)
        self._job = registry.job_of(record)

    @cached_property
    def memory_limit_bytes(self) -> int:
        """Its limit on all devices together."""
        return sum(self.record.limits.values())

    @cached_property
    def device_name(self) -> str:
        """The model of its devices."""
        return self._registry.devices.model_name(self.lease.devices)

    @cached_property
    def idle_s(self) -> float | None:
        """Seconds for which it has been idle, or None if it is active."""
        idle_since_at = self.lease.idle_since_at
        return None if idle_since_at is None else self.cluster.at - idle_since_at

    @cached_property
    def obstacle(self) -> str:
        """Why it cannot be suspended; empty if it can."""
        return snapshot.suspend_obstacle(self._registry, self.record)

    @cached_property
    def damaged(self) -> bool:
        """Whether a failed checkpoint may have damaged one of its processes."""
        sample = self._registry.observations[self.record.id].sample
        return sample is not None and sample.damaged

    @cached_property
    def has_lost(self) -> bool:
        """Whether its saved GPU memory was lost since it was last suspended."""
        observation = self._registry.observations[self.record.id]
        return observation.has_lost or observation.loss is not None

    @cached_property
    def over(self) -> tuple[Overuse, ...]:
        """GPU memory that its processes hold beyond its grant."""
        sample = self._registry.observations[self.record.id].sample
        return sample.over if sample is not None else ()

    @cached_property
    def time_share(self) -> TimeShare:
        """Its part of its devices' time while awake, as the helper enforces and measures it."""
        sample = self._registry.observations[self.record.id].sample
        if sample is None or self.record.state is not State.RUNNING or sample.phase is not Phase.RUNNING:
            return TimeShare()
        if sample.compute_share is ComputeShare.OFF:
            return TimeShare(reason=sample.share_reason)
        measured = None if sample.measured_share < 0 else 100 * sample.measured_share
        granted = self.companion.granted if self.companion else self.lease.held_milli / WHOLE_GPU
        return TimeShare(sample.compute_share, 100 * granted, measured)

    @cached_property
    def companion(self) -> Companion | None:
        """The job that it shares a GPU with while it runs, or None."""
        is_running = self.record.state is State.RUNNING
        return self._registry.observations[self.record.id].companion if is_running else None

    @cached_property
    def consent(self) -> Consent:
        """The effect of the owner's consent that it may share a GPU."""
        lease = self.record.lease
        if not lease.share:
            return Consent.NONE
        if not self._registry.policy.share:
            return Consent.OFF
        hosts = lease.size.fraction_milli == WHOLE_GPU and not lease.size.profile
        visits = lease.can_be_guest and not lease.size.profile
        if hosts and visits:
            return Consent.SHARE
        return Consent.HOST if hosts else Consent.GUEST if visits else Consent.NO_EFFECT

    @cached_property
    def unleased(self) -> tuple[UnleasedProcess, ...]:
        """Processes of its user that hold GPU memory without a lease, except tolerated ones."""
        found = [x for d in self._registry.devices.measured for x in d.unleased if x.uid == self.record.uid]
        if not found or not self._registry.of_uid(self.record.uid):
            return ()
        return tuple(each for each in found if each.used_bytes and not (each.kept or each.contained))

    @cached_property
    def borrowed(self) -> bool:
        """Whether it is over the quota of its project."""
        return self.cluster.outlook.borrowed.get(self.record.id, False)

    @cached_property
    def unclaimed(self) -> bool:
        """Whether it is suspended and over its project's quota, so that no GPU is reserved for it."""
        return self.record.state is State.SUSPENDED and self.record.id not in self.cluster.outlook.lent

    @cached_property
    def position(self) -> int | None:
        """Its position in the queue."""
        return self.cluster.outlook.position.get(self.record.id)

    @cached_property
    def stays_because(self) -> str:
        """Why it waits for its own devices while others are free; empty if it does not."""
        waits = self.cluster.outlook.why.get(self.record.id) is Why.OWN_DEVICES
        return snapshot.move_obstacle(self._registry, self.record) if waits else ""

    @cached_property
    def retries_at(self) -> wire.Text | None:
        """When it retries, because the cluster gave it a GPU to which its memory cannot return."""
        return self._time_in(self.cluster.outlook.misplaced.get(self.record.id, 0.0) - self._registry.clock())

    @cached_property
    def kept_until(self) -> wire.Text | None:
        """Until when its owner keeps it, even if idle."""
        return self._time_in(self.lease.keep_until_at - self._registry.clock())

    @cached_property
    def stays_until(self) -> wire.Text | None:
        """Until when it is not lent, no matter which work waits."""
        return self._time_in(self.lending.stays_s)

    @cached_property
    def holds_until(self) -> wire.Text | None:
        """When kernels without GPU work start to count as idle, or None if they do already."""
        return None if self.processor_only is None else self._time_in(self.processor_only.left_s)

    @cached_property
    def usually_wakes(self) -> wire.Text | None:
        """The usual duration of a wake-up on this machine."""
        usual = self._registry.wake_times.usual()
        return messages.usually(*usual) if usual else None

    @cached_property
    def wall(self) -> str:
        """The present time, ISO 8601 in UTC."""
        return self._registry.iso_now()

    @cached_property
    def site_end(self) -> SiteEnd | None:
        """When a setting of the site may end it or one of its kernels if it stays idle, or None."""
        if self.record.is_job or self.record.state not in _WITH_A_SERVER:
            return None
        registry, observation = self._registry, self._registry.observations[self.record.id]
        ends = [registry.culling.end(ServerKey(self.lease.user, self.record.server))]
        kernels = dict(observation.kernel_ends_at)
        if self.record.state is State.SUSPENDED and observation.sample is not None:
            holders = {each.kernel[:64] for each in observation.sample.processes}
            if "" not in holders:  # otherwise a worker of any kernel may hold the memory
                kernels = {id_: at for id_, at in kernels.items() if id_ in holders}
        if kernels:
            in_s = min(kernels.values()) - registry.clock()
            at = before(self.wall, seconds=-in_s)
            ends.append(SiteEnd(at, KERNEL_SETTING, is_server=False))
        limit = before(self.wall, days=-_MAX_SHOWN_DAYS)
        shown = [end for end in ends if end is not None and end.at < limit]
        return min(shown, key=lambda end: end.at or "~", default=None)

    @cached_property
    def drain(self) -> Drain | None:
        """The earliest drain of its devices, which asks its owner to finish, or None."""
        drains = filter(None, map(self._registry.devices.drains.on, self.lease.devices))
        return min(drains, key=lambda each: each.until or "9", default=None)

    @cached_property
    def lending(self) -> LendingOutlook:
        """When it will be lent if it stays idle."""
        view, measured = self.cluster, self.lease
        is_idle = measured.kind is Kind.BUILD and measured.state is State.RUNNING
        eligible_at = idle.eligible_at(measured, view.cluster.settings) if is_idle else None
        if eligible_at is None or measured.idle_since_at is None:
            return LendingOutlook()
        if (notice := self._registry.notices.get(measured.id)) is not None:
            lend_in_s = max(0.0, notice.until_at - view.at)
            return LendingOutlook(lend_in_s, lend_in_s, warned=True)
        stays_s = eligible_at - view.at
        if not view.waiting or stays_s < -OVERDUE_S:
            return LendingOutlook(stays_s)
        warn_at = idle.warn_at(measured, view.cluster.settings)
        return LendingOutlook(stays_s, max(0.0, stays_s), warned=warn_at is not None and view.at >= warn_at)

    @cached_property
    def processor_only(self) -> ProcessorOnly | None:
        """Kernels without GPU work, if that has lasted for an idle timeout or to its limit; else None."""
        registry, now = self._registry, self.cluster.at
        until = snapshot.holds_until(registry, self.record)
        if until is None or not registry.observations[self.record.id].kernel_busy:
            return None
        since_s = now - snapshot.gpu_active_at(registry, self.record)
        is_long = since_s >= idle.idle_timeout_s(self.lease, registry.policy.settings()) or now >= until
        return ProcessorOnly(since_s, until - now) if is_long else None

    @cached_property
    def lent_to(self) -> wire.Text | None:
        """The kind and project of the lease that uses a suspended session's capacity; never a user name."""
        for device in self.lease.devices:
            bound = [other for other in self._registry.leases.values() if device in other.lease.devices]
            if self.record.id in lent_milli([other.lease for other in bound]):
                holders = (o for o in bound if o.state in HOLDS_CAPACITY and not o.lease.host)
                borrower = max(holders, key=lambda other: (other.is_job, other.lease.granted_at))
                key = "part.job_of_project" if borrower.is_job else "part.session_of_project"
                return messages.text(key, borrower.lease.project)
        return None

    @cached_property
    def held_up_s(self) -> float | None:
        """Seconds left of the grace period of stopping jobs on the same devices; None if there is none."""
        registry = self._registry
        rests_s = [
            other.entered_at + min(job.grace_s, registry.policy.max_grace_s) - self.cluster.at
            for other in registry.leases.values()
            if other.state is State.STOPPING and set(other.lease.devices) & set(self.lease.devices)
            if (job := registry.job_of(other)) is not None
        ]
        return max(0.0, *rests_s) if rests_s else None

    @cached_property
    def back(self) -> wire.Estimate | None:
        """Seconds until a suspended session has its GPU back if it is used now, or None if unknown.

        First the leases on its devices leave; then its memory is copied back.  A copy takes between
        one and two times as long as in the self-test.
        """
        state = self.record.state
        if self.record.is_job or state not in (State.SUSPENDED, State.RESUMING) or self.unclaimed:
            return None
        _, bytes_per_s = self._registry.devices.copy_rates(self.lease.devices)
        saved = self.lease.saved_bytes
        if saved and not bytes_per_s:
            return None
        copy_s = saved / bytes_per_s if saved else 0.0
        leaving = [] if state is State.RESUMING else self._borrowers()
        lows, highs = zip((0.0, 0.0), *map(self._leaves_in, leaving), strict=True)
        return wire.Estimate(
            low_s=round(max(lows) + copy_s), high_s=round(max(highs) + 2 * copy_s + _ROUND_S)
        )

    def _borrowers(self) -> list[LeaseRecord]:
        """Return the leases on a suspended session's devices if its part of the devices is not free."""
        own = set(self.lease.devices)
        found = [
            other
            for other in self._registry.leases.values()
            if own & set(other.lease.devices) and other.state in HOLDS_CAPACITY
        ]
        held = dict.fromkeys(own, 0)
        for other in found:
            for uuid in own & set(other.lease.devices):
                held[uuid] += own_milli(other.lease)
        return found if max(held.values()) + self.lease.held_milli > WHOLE_GPU else []

    def _leaves_in(self, record: LeaseRecord) -> tuple[float, float]:
        """Return the minimum and maximum seconds that a lease needs to give its devices back."""
        registry, now = self._registry, self.cluster.at
        lease = snapshot.measured(registry, record, now)
        bytes_per_s, _ = registry.devices.copy_rates(lease.devices)
        is_copied = lease.survival.suspends and lease.suspendable
        if lease.state is State.SUSPENDING or (is_copied and lease.state is not State.STOPPING):
            copy_s = lease.used_bytes / bytes_per_s if bytes_per_s else 0.0
            begun_s = now - record.entered_at if lease.state is State.SUSPENDING else 0.0
            return max(0.0, copy_s - begun_s), max(0.0, 2 * copy_s - begun_s)
        job = registry.job_of(record)
        grace_s = min(job.grace_s, registry.policy.max_grace_s) if job is not None else 0.0
        begun_s = now - record.entered_at if lease.state is State.STOPPING else 0.0
        return 0.0, max(0.0, grace_s - begun_s)

    @cached_property
    def taken_back_by(self) -> str:
        """The project that may take back what a job borrows; empty if several may."""
        owners = self.cluster.owners(self.record.id)
        return owners.pop() if len(owners) == 1 else ""

    @cached_property
    def ends_in(self) -> wire.Estimate | None:
        """Seconds until a running job ends, by its progress and maximum run time; None if not measured."""
        job, at = self._job, self.cluster.at
        if job is None or self.record.state is not State.RUNNING:
            return None
        left_s, run_left_s = messages.left_s(self.record.lease, job.measure, at), self._run_left_s
        if left_s is None:
            return None
        return messages.ends_in(left_s if run_left_s is None else max(0.0, min(left_s, run_left_s)))

    @cached_property
    def _run_left_s(self) -> float | None:
        """Seconds left of a running job's maximum run time, or None without a maximum."""
        return None if self._job is None else ending.left_s(self._job, self.record, self._registry.clock())

    @cached_property
    def is_timed_out(self) -> bool:
        """Whether a job has reached its maximum run time."""
        return self._job is not None and ending.timeout_reason(self._job) is not None

    @cached_property
    def progress(self) -> messages.Texts:
        """Sentences about the expected end of a running job and the end of its maximum run time."""
        job, ends = self._job, self.ends_in
        if job is None:
            return ()
        runs_until = self._time_in(self._run_left_s or 0.0)
        until = () if runs_until is None else (messages.text("job.runs_until", runs_until),)
        if ends is not None:
            return messages.text("job.ends_in", messages.range_text(ends.low_s, ends.high_s)), *until
        return until

    @cached_property
    def waits(self) -> messages.Texts:
        """Sentences on why a queued job waits."""
        view, record, lease, job = self.cluster, self.record, self.record.lease, self._job
        if lease.user in self._registry.owners.absent:
            return (messages.text("waiting.owner_gone"),)
        if view.at < record.entered_at:  # the view does not have it yet
            return (messages.text("job.waits", lease.size.text),)
        waits = messages.waiting(
            view.outlook.why.get(record.id, ""),  # empty: the next plan grants it
            needs=messages.needs_of(lease),
            free_milli=view.outlook.free_milli,
            position=self.position,
            largest=len(view.cluster.devices),
            notified_until=self._notified_until(),
        )
        if (smaller := view.smaller(record.id)) is not None:
            waits += (messages.text("job.smaller", messages.size_text(smaller)),)
        if job is None or not messages.is_preemption(record.why):
            return waits
        checkpoint = wire.decode(job.request.encode(), wire.JobRequest).checkpoint
        return messages.requeued(messages.time_text(record.since_at), self.because, checkpoint, waits)

    @cached_property
    def because(self) -> wire.Text:
        """Why a lease gave up its GPU."""
        record = self.record
        if messages.is_preemption(record.why) and record.note:
            return messages.reason_text(record.note)
        return messages.because_of(record.why, record.given_to)

    def _notified_until(self) -> wire.Text | None:
        """Return when the last notified session gives its GPU to this job, or None if none was notified."""
        notices = self._registry.notices.values()
        until = [notice.until_at for notice in notices if notice.for_lease == self.record.id]
        return self._time_in(max(until) - self._registry.clock()) if until else None

    def _time_in(self, seconds: float) -> wire.Text | None:
        """Return the text of the time ``seconds`` from now, or None if that is not in the future."""
        if seconds <= 0:
            return None
        at = before(self._registry.iso_now(), seconds=-seconds)
        return messages.time_text(at, seconds=seconds < _WITH_SECONDS_S)
