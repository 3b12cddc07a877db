"""The administrator's overview: GPU use now and in the past, projects' weeks, alerts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import quantiles

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.breakdown import GpuBreakdown, downsample, gpu_breakdown
from jupyter_gpushare.broker.state.keep_budget import keep_budget, keep_left
from jupyter_gpushare.broker.state.low_use import COMPUTES_PERCENT
from jupyter_gpushare.broker.state.policy import beyond_machine
from jupyter_gpushare.broker.state.records import MachineUse
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import WEEK_DAYS
from jupyter_gpushare.broker.views.cluster_view import ClusterViewCache
from jupyter_gpushare.core.model import WHOLE_GPU, Kind, State
from jupyter_gpushare.wall_clock import before, seconds_between

# Periods of the chart in hours, and its number of points.
PERIODS = {"24h": 24.0, "7d": 7 * 24.0, "90d": 90 * 24.0}
PARTS = 180
# A guaranteed request that waits longer raises an alert.
OWED_S = 60.0
# A session that holds an idle GPU longer raises an alert.
IDLE_LONG_S = 3600.0
# Age of the decisions that raise alerts.
LATELY_HOURS = 24
_WORRYING = ("lost", "watchdog")
MAX_ALERTS = 30
# No waiting times from fewer jobs.
_LEAST_JOBS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A sentence for the administrator; ``lend``: id of a session that can be lent at once."""

    sentence: str
    lend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectWeek:
    """The last seven days of a project."""

    used_gpu_h: float
    lent_gpu_h: float
    waited_s: tuple[float, float] | None  # median and 95th percentile; None: too few jobs


class Overview:
    """Builds the overview from the registry and the present cluster view."""

    def __init__(self, registry: Registry, cluster_views: ClusterViewCache) -> None:
        self._registry = registry
        self._cluster_views = cluster_views

    def now(self) -> GpuBreakdown:
        """Return the present use of the GPUs."""
        cluster = self._cluster_views.now().cluster
        usable = [device.uuid for device in cluster.devices if device.usable or device.draining]
        at_work = snapshot.at_work(self._registry, self._registry.clock())
        return gpu_breakdown(cluster.leases, usable, len(cluster.devices) - len(usable), at_work)

    async def past(self, period: str) -> list[MachineUse | None]:
        """Return the past use in `PARTS` equal parts, oldest first; None: not measured.

        Raises:
            StoreError: the database cannot be read.
        """
        registry, hours = self._registry, PERIODS[period]
        until = registry.iso_now()
        since = before(until, hours=hours)
        return downsample(await registry.store.machine_since(since), until, hours, PARTS)

    def weeks(self) -> dict[str, ProjectWeek]:
        """Return use, lending and waiting times of each project in the last seven days."""
        registry = self._registry
        first = (
            (datetime.fromisoformat(registry.iso_now()) - timedelta(days=WEEK_DAYS - 1)).date().isoformat()
        )
        sums = [use for use in registry.usage.sums.values() if use.day >= first]
        waited: dict[str, list[float]] = {}
        for job in registry.jobs.values():
            if job.started_at and job.started_at >= first:
                waited_s = seconds_between(job.submitted_at, job.started_at)
                waited.setdefault(job.project, []).append(waited_s)
        return {
            project.name: ProjectWeek(
                used_gpu_h=sum(use.used_gpu_s for use in sums if use.project == project.name) / 3600,
                lent_gpu_h=sum(use.lent_gpu_s for use in sums if use.project == project.name) / 3600,
                waited_s=_median_and_p95(waited.get(project.name, [])),
            )
            for project in registry.policy.projects
        }

    def alerts(self) -> list[Alert]:
        """Return at most `MAX_ALERTS` alerts, most urgent first."""
        found = [*self._promised(), *self._starved(), *self._idle(), *self._low_use()]
        return [*found, *self._kept(), *self._lately()][:MAX_ALERTS]

    def _promised(self) -> list[Alert]:
        """Quotas that exceed the devices together."""
        cluster = self._cluster_views.now().cluster
        sentence = beyond_machine(cluster.projects, WHOLE_GPU * len(cluster.devices))
        return [Alert(sentence=sentence)] if sentence else []

    def _starved(self) -> list[Alert]:
        """Projects that wait for guaranteed capacity, and the projects that borrow meanwhile."""
        view = self._cluster_views.now()
        late: dict[str, list[int]] = {}
        for lease in view.cluster.leases:
            if lease.id in view.outlook.why and view.at - lease.waits_since_at >= OWED_S:
                size_milli = (lease.size.fraction_milli or WHOLE_GPU) * lease.size.device_count
                late.setdefault(lease.project, []).append(size_milli)
        found = []
        for project in view.cluster.projects:
            use = view.outlook.usage[project.name]
            unused = project.quota_milli - (use.in_use_milli - use.borrowed_milli)
            owed = min(unused, use.waiting_milli)
            if owed <= 0 or project.name not in late:
                continue
            if (least := min(late[project.name])) > project.quota_milli:
                found.append(
                    Alert(
                        sentence=f"A job of project {project.name} waits for {least / WHOLE_GPU:g} GPUs "
                        f"together, more than the {project.quota_milli / WHOLE_GPU:g} that the project is "
                        "guaranteed: it starts when the rest can be borrowed."
                    )
                )
                continue
            others = [u for u in view.outlook.usage.values() if u.borrowed_milli and u is not use]
            borrowers = ", ".join(f"{u.project} borrows {u.borrowed_milli / WHOLE_GPU:g}" for u in others)
            sentence = f"Project {project.name} waits for {owed / WHOLE_GPU:g} GPU of what it is guaranteed"
            found.append(Alert(sentence=f"{sentence}{'; ' if borrowers else ''}{borrowers}."))
        return found

    def _idle(self) -> list[Alert]:
        """Sessions that hold an idle GPU, longest first."""
        registry, now = self._registry, self._registry.clock()
        idle = []
        for record in registry.leases.values():
            if record.lease.kind is not Kind.BUILD or record.state is not State.RUNNING:
                continue
            since = snapshot.idle_since(registry, record, now)
            if since is not None and now - since >= IDLE_LONG_S:
                idle.append((now - since, record))
        found = []
        for idle_s, record in sorted(idle, key=lambda item: -item[0]):
            obstacle = snapshot.suspend_obstacle(registry, record)
            name = messages.english(registry.subject_of(record))
            sentence = f"{name} has been idle for {messages.duration(idle_s)}"
            if obstacle:
                found.append(Alert(sentence=f"{sentence} and cannot be put to sleep: {obstacle}."))
            else:
                found.append(Alert(sentence=f"{sentence}; no other work has needed its GPU.", lend=record.id))
        return found

    def _low_use(self) -> list[Alert]:
        """Sessions that keep a GPU busy without computing, longest first, with what they held meanwhile."""
        registry = self._registry
        after_s, found = registry.policy.fake_busy_after_s, []
        for record in registry.leases.values():
            lasted_s = registry.observations[record.id].low_use.lasted_s
            if after_s and lasted_s >= after_s:
                held_milli = record.lease.held_milli * len(record.lease.devices)
                name = messages.english(registry.subject_of(record))
                found.append((lasted_s, name, held_milli / WHOLE_GPU * lasted_s / 3600))
        return [
            Alert(
                sentence=f"{name} has kept its GPU busy for {messages.duration(lasted_s)} without "
                f"computing: utilization stayed below {COMPUTES_PERCENT} %; it held {held_gpu_h:.1f} "
                "GPU-hours meanwhile."
            )
            for lasted_s, name, held_gpu_h in sorted(found, reverse=True)
        ]

    def _kept(self) -> list[Alert]:
        """Users with less than half of the day's budget for keeping an idle GPU left."""
        registry = self._registry
        sessions = [r.lease for r in registry.leases.values() if r.lease.kind is Kind.BUILD]
        keepers = {(lease.user, lease.project) for lease in sessions}
        found = {
            (keep_left(registry, user, project), user, keep_budget(registry, project))
            for user, project in keepers
        }
        return [
            Alert(sentence=f"{user} kept an idle GPU for {budget - minutes:.0f} of {budget:g} minutes today.")
            for minutes, user, budget in sorted(found)
            if minutes <= budget / 2 and budget
        ]

    def _lately(self) -> list[Alert]:
        """Lost GPU memory and findings of the watchdog in the last `LATELY_HOURS`."""
        since = datetime.fromisoformat(self._registry.iso_now()) - timedelta(hours=LATELY_HOURS)
        return [
            Alert(sentence=f"{d.at[:16]}Z: {d.sentence}")
            for d in reversed(self._registry.decisions.latest)
            if d.action in _WORRYING and datetime.fromisoformat(d.at) >= since
        ]


def _median_and_p95(seconds: Sequence[float]) -> tuple[float, float] | None:
    if len(seconds) < _LEAST_JOBS:
        return None
    twentieths = quantiles(seconds, n=20, method="inclusive")
    return twentieths[9], twentieths[18]
