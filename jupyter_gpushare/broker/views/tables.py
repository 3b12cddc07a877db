"""Tables of the service's page: users, sessions and jobs, searched and cut into pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import held_gpus
from jupyter_gpushare.broker.views import job_order
from jupyter_gpushare.broker.views.views import Views
from jupyter_gpushare.core.model import HOLDS_CAPACITY, State
from jupyter_gpushare.protocol import wire

A = TypeVar("A")
B = TypeVar("B")

ROWS = 25  # of one page of a table
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Generic[A]):
    """One page of a table; pages count from 1."""

    rows: Sequence[A]
    page: int
    total: int  # rows of all pages

    @property
    def pages(self) -> int:
        """Number of pages, at least 1."""
        return max(1, -(-self.total // ROWS))

    @property
    def first(self) -> int:
        """Number of the first row of this page among all; rows count from 1."""
        return (self.page - 1) * ROWS + 1

    @property
    def last(self) -> int:
        """Number of the last row of this page among all."""
        return min(self.page * ROWS, self.total)


def cut(found: Sequence[A], page: int, show: Callable[[A], B]) -> Rows[B]:
    """Return one page, the last one where ``page`` is beyond it; only its rows are ``show``n."""
    last = max(1, -(-len(found) // ROWS))
    page = min(max(1, page), last)
    rows = [show(each) for each in found[(page - 1) * ROWS : page * ROWS]]
    return Rows(rows=rows, page=page, total=len(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNow:
    """What a user holds and waits for, with the sums of the last seven days."""

    name: str
    projects: Sequence[str] = ()  # of these leases and sums
    held_gpus: float = 0.0
    sessions: int = 0
    running: int = 0  # jobs that hold GPUs
    waiting: int = 0  # jobs without a GPU, paused ones included
    oldest_wait_s: float = 0.0
    used_gpu_h: float = 0.0
    lent_gpu_h: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The lease that waits for the longest time."""

    name: str  # of the job; "a session"
    user: str
    waited_s: float


class Tables:
    """Builds the tables from the registry; ``user`` None: of all users."""

    def __init__(self, registry: Registry, views: Views) -> None:
        self._registry = registry
        self._views = views

    def sessions(self, user: str | None, find: str, page: int) -> Rows[wire.LeaseStatus]:
        """Return sessions and jobs that are placed on devices, by user."""
        placed = (r for r in self._registry.leases.values() if r.state is not State.PENDING)
        found = [r for r in placed if user in (None, r.lease.user) and self._is_like(r, find)]
        found.sort(key=lambda r: (r.lease.user, r.is_job, r.id))
        return cut(found, page, self._views.lease)

    def jobs(self, user: str | None, find: str, page: int) -> Rows[wire.Job]:
        """Return jobs as `job_order` has them: started, queued, ended."""
        mine = (job for job in self._registry.jobs.values() if user in (None, job.user))
        found = [job for job in mine if _is_like(find, job.name, job.user, job.project, ids=(job.id,))]
        active, ended = job_order.ordered(found, self._registry, self._views.cluster_views)
        return cut([*active, *ended], page, self._views.job)

    def users(self, find: str, page: int) -> Rows[UserNow]:
        """Return users with a lease, or with use in the last seven days; the largest holders first."""
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
        """Return the lease with this id; None: it has ended."""
        record = self._registry.leases.get(lease)
        return None if record is None else self._views.lease(record)

    def oldest_wait(self, user: str | None) -> Waiting | None:
        """Return the lease that has waited longest for capacity; None: none waits."""
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


def _waits(record: LeaseRecord) -> bool:
    return record.state is State.PENDING or (record.is_job and record.state is State.SUSPENDED)


def _is_like(find: str, *texts: str, ids: Collection[str] = ()) -> bool:
    # Ids are random: a part of one is the name of a user by chance.
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
