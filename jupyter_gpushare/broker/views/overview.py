"""Contents of the service's page: the administrator's overview and the tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import quantiles
from typing import Generic, TypeVar

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.observations import COMPUTES_PERCENT
from jupyter_gpushare.broker.state.policy import over_capacity
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord, MachineUse
from jupyter_gpushare.broker.state.registry import keep_budget, keep_left
from jupyter_gpushare.broker.state.usage import WEEK_DAYS, GpuBreakdown, downsample, gpu_breakdown, held_gpus
from jupyter_gpushare.broker.views import cluster_view
from jupyter_gpushare.broker.views.views import Views
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Kind, State
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import before, seconds_between

# Periods of the chart in hours, and its number of points.
PERIODS = {"24h": 24.0, "7d": 7 * 24.0, "90d": 90 * 24.0}
PARTS = 180
# A guaranteed request that waits longer raises an alert.
OWED_S = 60.0
# A session that holds an idle GPU longer raises an alert.
IDLE_LONG_S = 3600.0
# Maximum age of decisions that raise alerts, and their actions.
RECENT_HOURS = 24
_ALERT_ACTIONS = ("lost", "watchdog")
MAX_ALERTS = 30
# Minimum number of jobs for statistics of waiting times.
_MIN_JOBS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A sentence for the administrator; ``lend`` is the id of a session that can be lent at once."""

    sentence: str
    lend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectWeek:
    """The last seven days of a project."""

    used_gpu_h: float
    lent_gpu_h: float
    waited_s: tuple[float, float] | None  # median and 95th percentile; None: too few jobs


class Overview:
    """Builds the overview and the tables from the registry and the current cluster view."""

    def __init__(self, views: Views) -> None:
        self._registry = views.registry
        self._views = views

    def now(self) -> GpuBreakdown:
        """Return the current use of the GPUs."""
        cluster = self._views.cluster_views.now().cluster
        usable = [device.uuid for device in cluster.devices if device.usable or device.draining]
        at_work = snapshot.at_work(self._registry, self._registry.clock())
        return gpu_breakdown(cluster.leases, usable, len(cluster.devices) - len(usable), at_work)

    async def past(self, period: str) -> list[MachineUse | None]:
        """Return the past use in `PARTS` equal parts, oldest first; None for a part without measurements.

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
        return [*found, *self._kept(), *self._recent()][:MAX_ALERTS]

    def _promised(self) -> list[Alert]:
        """Return an alert if all quotas together exceed the devices."""
        cluster = self._views.cluster_views.now().cluster
        sentence = over_capacity(cluster.projects, WHOLE_GPU * len(cluster.devices))
        return [Alert(sentence=sentence)] if sentence else []

    def _starved(self) -> list[Alert]:
        """Return alerts about projects that wait for guaranteed capacity, with those that borrow."""
        view = self._views.cluster_views.now()
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
            if (smallest := min(late[project.name])) > project.quota_milli:
                found.append(
                    Alert(
                        sentence=f"A job of project {project.name} waits for {smallest / WHOLE_GPU:g} GPUs "
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
        """Return alerts about sessions that hold an idle GPU, longest first."""
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
        """Return alerts about sessions that keep a GPU busy without computing, longest first."""
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
        """Return alerts about users who spent half or more of the day's budget to keep an idle GPU."""
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

    def _recent(self) -> list[Alert]:
        """Return alerts about lost GPU memory and findings of the watchdog in the last `RECENT_HOURS`."""
        since = datetime.fromisoformat(self._registry.iso_now()) - timedelta(hours=RECENT_HOURS)
        return [
            Alert(sentence=f"{d.at[:16]}Z: {d.sentence}")
            for d in reversed(self._registry.decisions.latest)
            if d.action in _ALERT_ACTIONS and datetime.fromisoformat(d.at) >= since
        ]

    # ---- tables of users, sessions and jobs; ``user`` None means all users

    def sessions(self, user: str | None, find: str, page: int) -> Rows[wire.LeaseStatus]:
        """Return sessions and jobs that are placed on devices, by user."""
        placed = (r for r in self._registry.leases.values() if r.state is not State.PENDING)
        found = [r for r in placed if user in (None, r.lease.user) and self._is_like(r, find)]
        found.sort(key=lambda r: (r.lease.user, r.is_job, r.id))
        return cut(found, page, self._views.lease)

    def jobs(self, user: str | None, find: str, page: int) -> Rows[wire.Job]:
        """Return jobs in the order of `cluster_view`: started, queued, ended."""
        mine = (job for job in self._registry.jobs.values() if user in (None, job.user))
        found = [job for job in mine if _is_like(find, job.name, job.user, job.project, ids=(job.id,))]
        active, ended = cluster_view.ordered(found, self._registry, self._views.cluster_views)
        return cut([*active, *ended], page, self._views.job)

    def users(self, find: str, page: int) -> Rows[UserNow]:
        """Return users with a lease or with use in the last seven days, those with most GPUs first."""
        registry, now = self._registry, self._registry.clock()
        leases: dict[str, list[LeaseRecord]] = {}
        for record in registry.leases.values():
            leases.setdefault(record.lease.user, []).append(record)
        projects = {name: {r.lease.project for r in mine} for name, mine in leases.items()}
        used: dict[str, float] = {}
        lent: dict[str, float] = {}
        for use in registry.usage.sums.values():
            projects.setdefault(use.user, set()).add(use.project)
            used[use.user] = used.get(use.user, 0.0) + use.used_gpu_s / _HOUR_S
            lent[use.user] = lent.get(use.user, 0.0) + use.lent_gpu_s / _HOUR_S
        found = [
            _user(
                name,
                sorted(mine),
                leases.get(name, ()),
                now,
                (used.get(name, 0.0), lent.get(name, 0.0)),
            )
            for name, mine in projects.items()
            if _is_like(find, name, *mine)
        ]
        found.sort(key=lambda user: (-user.held_gpus, -user.waiting, user.name))
        return cut(found, page, lambda user: user)

    def acting(self, lease: str) -> wire.LeaseStatus | None:
        """Return the lease with this id, or None if it has ended."""
        record = self._registry.leases.get(lease)
        return None if record is None else self._views.lease(record)

    def oldest_wait(self, user: str | None) -> Waiting | None:
        """Return the lease that has waited longest for capacity, or None if none waits."""
        waiting = [r for r in self._registry.leases.values() if _waits(r) and user in (None, r.lease.user)]
        if not waiting:
            return None
        record = min(waiting, key=lambda r: r.lease.waits_since_at)
        job = self._registry.job_of(record)
        return Waiting(
            name=job.name if job is not None else "a session",
            user=record.lease.user,
            waited_s=max(0.0, self._registry.clock() - record.lease.waits_since_at),
        )

    def _is_like(self, record: LeaseRecord, find: str) -> bool:
        job: JobRecord | None = self._registry.job_of(record)
        names, ids = ((), ()) if job is None else ((job.name,), (job.id,))
        return _is_like(find, record.lease.user, record.lease.project, *names, ids=(record.id, *ids))


def _median_and_p95(seconds: Sequence[float]) -> tuple[float, float] | None:
    if len(seconds) < _MIN_JOBS:
        return None
    twentieths = quantiles(seconds, n=20, method="inclusive")
    return twentieths[9], twentieths[18]


# ---- tables of the service's page: users, sessions and jobs, with search and pages

A = TypeVar("A")
B = TypeVar("B")

ROWS = 25  # per page of a table
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Generic[A]):
    """One page of a table; page numbers start at 1."""

    rows: Sequence[A]
    page: int
    total: int  # rows of all pages

    @property
    def pages(self) -> int:
        """Number of pages, at least 1."""
        return max(1, -(-self.total // ROWS))

    @property
    def first(self) -> int:
        """Number of this page's first row among all rows, which are numbered from 1."""
        return (self.page - 1) * ROWS + 1

    @property
    def last(self) -> int:
        """Number of this page's last row among all rows."""
        return min(self.page * ROWS, self.total)


def cut(found: Sequence[A], page: int, show: Callable[[A], B]) -> Rows[B]:
    """Return the page ``page``, or the last one if there are fewer; ``show`` converts only its rows."""
    last = max(1, -(-len(found) // ROWS))
    page = min(max(1, page), last)
    rows = [show(each) for each in found[(page - 1) * ROWS : page * ROWS]]
    return Rows(rows=rows, page=page, total=len(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNow:
    """A user's leases now, with the sums of the last seven days."""

    name: str
    projects: Sequence[str] = ()  # of the leases and sums
    held_gpus: float = 0.0
    sessions: int = 0
    running: int = 0  # jobs that hold GPUs
    waiting: int = 0  # jobs without a GPU, including paused ones
    oldest_wait_s: float = 0.0
    used_gpu_h: float = 0.0
    lent_gpu_h: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The lease that has waited longest."""

    name: str  # of the job, or "a session"
    user: str
    waited_s: float


def _waits(record: LeaseRecord) -> bool:
    return record.state is State.PENDING or (record.is_job and record.state is State.SUSPENDED)


def _is_like(find: str, *texts: str, ids: Collection[str] = ()) -> bool:
    # Ids must match whole: a part of a random id may equal the name of a user.
    return find in ids or any(find.casefold() in text.casefold() for text in texts)


def _user(
    name: str, projects: Sequence[str], leases: Iterable[LeaseRecord], now: float, hours: tuple[float, float]
) -> UserNow:
    leases = list(leases)
    waiting = [r for r in leases if _waits(r)]
    holding = [r for r in leases if r.state in HOLDS_CAPACITY]
    return UserNow(
        name=name,
        projects=projects,
        held_gpus=sum(held_gpus(r.lease) for r in holding),
        sessions=sum(not r.is_job and not _waits(r) for r in leases),
        running=sum(r.is_job for r in holding),
        waiting=len(waiting),
        oldest_wait_s=max((now - r.lease.waits_since_at for r in waiting), default=0.0),
        used_gpu_h=hours[0],
        lent_gpu_h=hours[1],
    )
