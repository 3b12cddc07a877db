"""Claims, use, quota and fair share of projects.

* A build session within quota has a *claim* on capacity of its devices for its
  whole life, running or suspended.  Claims of a project never exceed its quota;
  claims on a device never exceed the device.
* A job that does not *borrow* (`Lease.borrow`) starts only on the quota that claims
  and other such jobs leave.  It is in quota before jobs that borrow.
* *Use* is the capacity that a project's leases hold, except leaving ones.  A
  suspended session is a claim, not use.
* A project's *limit* applies to the capacity that its leases hold and to its claims.  A
  session with a claim may return at any time, so it counts awake or asleep
  (`QuotaState.capped_by`).
* A lease is *in quota* if it has a claim, or if it is a job that fits into the quota
  beside the claims in use: first jobs that do not borrow, then jobs that once starved
  (`Lease.turns`), then the oldest grant.  All other use is *over quota*: borrowed, and
  reclaimed first.
* If all quotas together exceed the machine, jobs get shares of it by weight instead
  (`kept_quotas`); claims still reach up to the configured quota.
* *Fair share*: quota first, then the rest by weight, never more than a project
  can use (water filling over its real demand).

All of this follows from the states of the leases; no history is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Kind,
    Lease,
    Project,
    State,
    held_by,
    size_of,
)

T = TypeVar("T")


@dataclass(slots=True)
class Account:
    """Use and claims of one project in a round, in thousandths of a GPU."""

    project: Project  # with the quota that can be kept (`kept_quotas`)
    claimable: int  # its configured quota: no session loses a claim because other quotas are too high
    claimed: int = 0  # by its build sessions, suspended or not
    use: int = 0  # held by leases that are not leaving
    in_quota_use: int = 0
    unborrowing: int = 0  # the part of ``use`` held by jobs that do not borrow
    capped: int = 0  # counted against the limit (`QuotaState.capped_by`)
    leaving: int = 0  # the part of ``capped`` that ends once every leaving lease has left

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that restores the numbers that decisions change."""
        before = self.claimed, self.use, self.in_quota_use, self.unborrowing, self.capped, self.leaving

        def undo() -> None:
            (
                self.claimed,
                self.use,
                self.in_quota_use,
                self.unborrowing,
                self.capped,
                self.leaving,
            ) = before

        return undo

    def is_below_quota(self, more: int) -> bool:
        """Return whether the project stays within quota with ``more``, so its quota owes it that capacity."""
        return self.use + more <= self.project.quota_milli

    def fits_quota(self, more: int) -> bool:
        """Return whether ``more`` would be in quota, regardless of the capacity that the project borrows."""
        return self.in_quota_use + more <= self.project.quota_milli

    @property
    def unborrowed_left(self) -> int:
        """Quota left for jobs that do not borrow."""
        return self.project.quota_milli - self.claimed - self.unborrowing

    def over_limit(self, more: int) -> int:
        """Return the thousandths by which ``more`` would exceed the project's limit now, or 0."""
        limit = self.project.limit_milli
        return 0 if limit is None else max(0, self.capped + more - limit)

    def over_limit_soon(self, more: int) -> int:
        """Return `over_limit` once every leaving lease has left."""
        return max(0, self.over_limit(more) - self.leaving)

    @property
    def limit_left(self) -> int | None:
        """Capacity that the limit leaves once every leaving lease has left; None: no limit."""
        limit = self.project.limit_milli
        return None if limit is None else max(0, limit - self.capped + self.leaving)

    def demand(self, waiting: int) -> int:
        """Return the capacity that the project could use: its use, and ``waiting`` within its limit."""
        left = self.limit_left
        return self.use + (waiting if left is None else min(waiting, left))

    def turn(self, catching_up: int, *, owed: bool) -> tuple[float, float]:
        """Return the sort key of a project: the used part of its quota if ``owed``, else excess per weight.

        ``catching_up``: thousandths that its lag adds to its share, or takes from it.
        """
        quota = self.project.quota_milli
        if owed:
            return -self.project.priority, self.use / max(quota, 1)
        return -self.project.priority, (self.use - quota - catching_up) / max(self.project.weight, 1)


class QuotaState:
    """Accounts of all projects, and the leases that are in quota.

    Leases with devices `enter` and `exit`.  A claim changes how a session is counted.  So
    leases are counted after `claims_to_change`, and leases with a changed claim are counted
    again; then `settle` updates the quotas.
    """

    def __init__(self, projects: Iterable[Project], capacity_milli: int) -> None:
        projects = list(projects)
        kept = kept_quotas(projects, capacity_milli)
        self.accounts = {p.name: Account(k, p.quota_milli) for p, k in zip(projects, kept, strict=True)}
        self.claimants: set[str] = set()  # build sessions with a claim
        self.in_quota: set[str] = set()  # leases in quota that hold capacity
        self.jobs: dict[str, dict[str, Lease]] = {}  # by project and id: jobs that hold capacity
        self._beyond: dict[str, dict[str, Lease]] = {}  # jobs over quota
        # Jobs over quota with their sizes, in the order in which they enter the quota.
        self._next: dict[str, list[tuple[int, Lease]]] = {}
        self._guests: dict[str, Lease] = {}  # sessions over quota
        self._sessions: dict[str, Lease] = {}  # sessions that may have a claim
        self._unsettled: set[str] = set()  # projects with changed jobs
        # Sessions that changed since claims were last distributed, as they were then; None: new.
        self._changed_sessions: dict[str, Lease | None] = {}

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that restores the jobs and the leases in quota."""
        jobs, in_quota = {name: held.copy() for name, held in self.jobs.items()}, self.in_quota.copy()

        def undo() -> None:
            self.jobs, self.in_quota = jobs, in_quota
            self._next.clear()

        return undo

    def account(self, project: str) -> Account:
        """Return the account of ``project``; a project that is not configured has no quota."""
        found = self.accounts.get(project)
        if found is None:
            found = self.accounts[project] = Account(Project(name=project, quota_milli=0), 0)
        return found

    def enter(self, lease: Lease) -> None:
        """Add a lease that has devices; `count` counts it."""
        if lease.kind is Kind.BUILD and lease.state is not State.STOPPING:
            self._sessions[lease.id] = lease
            self._changed_sessions.setdefault(lease.id, None)

    def exit(self, lease: Lease) -> None:
        """Remove a lease that entered; `count` with sign -1 subtracts it."""
        if (before := self._sessions.pop(lease.id, None)) is not None:
            self._changed_sessions.setdefault(lease.id, before)

    def capped_by(self, lease: Lease) -> int:
        """Return the thousandths that ``lease`` counts against the limit of its project."""
        return size_of(lease) if lease.id in self.claimants or lease.state in HOLDS_CAPACITY else 0

    def capped_until_left(self, lease: Lease) -> int:
        """Return the part of `capped_by` that ends once ``lease`` has left its devices."""
        return 0 if lease.id in self.claimants else self.capped_by(lease)

    def count(self, lease: Lease, sign: int) -> None:
        """Add the capacity that ``lease`` holds (``sign`` 1), or subtract it (-1)."""
        account, size = self.account(lease.project), sign * size_of(lease)
        claimant = lease.id in self.claimants
        holds, leaving = lease.state in HOLDS_CAPACITY, lease.state in LEAVING
        account.capped += sign * self.capped_by(lease)
        account.leaving += sign * self.capped_until_left(lease) if leaving else 0
        if not holds or leaving:
            return
        account.use += size
        self._unsettled.add(lease.project)
        if claimant:
            account.in_quota_use += size
            (self.in_quota.add if sign > 0 else self.in_quota.discard)(lease.id)
        elif lease.kind is Kind.TRAIN:
            account.unborrowing += 0 if lease.borrow else size
            if sign > 0:
                self.jobs.setdefault(lease.project, {})[lease.id] = lease
                self._beyond.setdefault(lease.project, {})[lease.id] = lease
            else:
                self._take_out_of_quota(account, lease)
                del self.jobs[lease.project][lease.id]
                del self._beyond[lease.project][lease.id]
        elif sign > 0:
            self._guests[lease.id] = lease
        else:
            del self._guests[lease.id]

    def _take_out_of_quota(self, account: Account, job: Lease) -> None:
        if job.id in self.in_quota:
            self.in_quota.discard(job.id)
            self._beyond[job.project][job.id] = job
            account.in_quota_use -= size_of(job)

    def over_quota(self) -> Iterator[Lease]:
        """Yield the leases that hold capacity beyond their project's quota."""
        for beyond in self._beyond.values():
            yield from beyond.values()
        yield from self._guests.values()

    def claims_to_change(self) -> set[str]:
        """Distribute claims again; return the sessions that gain or lose one."""
        changed, self._changed_sessions = self._changed_sessions, {}
        if all(_claim_key(before) == _claim_key(self._sessions.get(id)) for id, before in changed.items()):
            return set()
        return _give_claims(self, self._sessions.values()) ^ self.claimants

    def settle(self) -> None:
        """Decide again which jobs of changed projects are in quota."""
        for name in self._unsettled:
            self._next.pop(name, None)
            account, beyond = self.account(name), self._beyond.get(name, {})
            if not account.project.quota_milli:
                continue  # no job can be in quota
            if account.in_quota_use + sum(map(size_of, beyond.values())) > account.project.quota_milli:
                # Not all jobs fit: whether a job fits depends on the older ones.
                for lease in self.jobs.get(name, {}).values():
                    self._take_out_of_quota(account, lease)
            for lease in self.promote(account):
                del beyond[lease.id]
            self._next.pop(name, None)
        self._unsettled.clear()

    def promote(self, account: Account) -> list[Lease]:
        """Bring the jobs over quota that now fit into quota; return them.

        Jobs that do not borrow come first, then jobs that once starved, then the oldest.
        """
        if not account.fits_quota(1):
            return []
        name = account.project.name
        promoted: list[Lease] = []
        if name not in self._next:
            beyond = sorted(self._beyond.get(name, {}).values(), key=_quota_rank)
            self._next[name] = [(size_of(lease), lease) for lease in beyond]
        held, left = self.jobs.get(name, {}), account.project.quota_milli - account.in_quota_use
        for n, (size, lease) in enumerate(tuple(self._next[name])):
            if size <= left and lease.id in held:
                left -= size
                account.in_quota_use += size
                self.in_quota.add(lease.id)
                del self._next[name][n - len(promoted)]
                promoted.append(lease)
                if left <= 0:
                    break
        return promoted


def _quota_rank(job: Lease) -> tuple[bool, bool, float, str]:
    return job.borrow, not job.turns, job.granted_at, job.id


def has_place(lease: Lease) -> bool:
    """Return whether ``lease`` is bound to devices now, suspended or not."""
    return bool(lease.devices) and (lease.state in HOLDS_CAPACITY or lease.state is State.SUSPENDED)


def _claim_key(session: Lease | None) -> tuple[object, ...]:
    """Return the properties of a session that decide about claims."""
    if session is None:
        return ()
    return session.borrowed, session.queued_at, session.project, session.devices, held_by(session)


def _give_claims(quotas: QuotaState, sessions: Iterable[Lease]) -> set[str]:
    """Distribute claims, first come first served; return the ids of the sessions with a claim.

    A session that started on borrowed capacity may gain a claim, but never takes a
    claim that was granted.
    """
    claimants = set()
    on_device: dict[str, int] = {}
    for account in quotas.accounts.values():
        account.claimed = 0
    for lease in sorted(sessions, key=lambda x: (x.borrowed, x.queued_at, x.id)):
        account, held, size = quotas.account(lease.project), held_by(lease), size_of(lease)
        if account.claimed + size > account.claimable:
            continue
        if any(on_device.get(uuid, 0) + held > WHOLE_GPU for uuid in lease.devices):
            continue
        account.claimed += size
        claimants.add(lease.id)
        for uuid in lease.devices:
            on_device[uuid] = on_device.get(uuid, 0) + held
    return claimants


def fair_shares(
    projects: Iterable[Project], demand_milli: Mapping[str, int], capacity_milli: int
) -> dict[str, int]:
    """Return the fair share of each project in thousandths of a GPU, by name.

    Quota comes first, then the rest by weight, never more than a project demands or
    its limit allows.  The sum of the shares is exactly the capacity, or the demand if
    that is less.
    """
    ranked = sorted(projects, key=lambda p: (-p.priority, p.name))
    shares: list[int] = []
    open_: list[tuple[int, int, int]] = []  # number, cap and weight of projects that could use more
    left = capacity_milli
    for p in ranked:
        cap, limit = demand_milli.get(p.name, 0), p.limit_milli
        if limit is not None and limit < cap:
            cap = limit
        share = min(cap, p.quota_milli, left)
        if share < cap:
            open_.append((len(shares), cap, max(p.weight, 0)))
        shares.append(share)
        left -= share
    while left > 0 and open_:
        weighted = [x for x in open_ if x[2]] or [(n, cap, 1) for n, cap, _ in open_]
        total, pool = sum(weight for _, _, weight in weighted), left
        for n, cap, weight in weighted:
            if not left:
                break
            more = min(cap - shares[n], pool * weight // total or 1, left)
            shares[n] += more
            left -= more
        open_ = [x for x in open_ if shares[x[0]] < x[1]]
    return {p.name: share for p, share in zip(ranked, shares, strict=True)}


def kept_quotas(projects: Iterable[Project], capacity_milli: int) -> list[Project]:
    """Return the projects with quotas that ``capacity_milli`` can keep together.

    If it cannot keep all configured quotas, the quotas are shares of it by weight.
    """
    projects = list(projects)
    promised = {p.name: p.quota_milli for p in projects}
    if capacity_milli >= sum(promised.values()):
        return projects
    by_weight = [replace(p, quota_milli=0, limit_milli=None) for p in projects]
    kept = fair_shares(by_weight, promised, capacity_milli)
    return [replace(p, quota_milli=kept[p.name]) for p in projects]


class Shares:
    """Fair shares of the projects in a round, computed on first use.

    ``catching_up``: thousandths added to each share for the project's lag (`fairshare`).
    ``version``: returns a number that changes with every use of capacity.
    """

    def __init__(
        self,
        quotas: QuotaState,
        waiting_milli: Callable[[], Mapping[str, int]],
        capacity_milli: int,
        catching_up: Mapping[str, int],
        version: Callable[[], int],
    ):
        self._quotas = quotas
        self._version = version
        self._known: dict[str, tuple[int, Any]] = {}  # cached results, each with its version
        self._waiting_milli = waiting_milli
        self._capacity = capacity_milli
        self._catching_up = catching_up
        self._shares: dict[str, int] | None = None

    def of(self, project: str) -> int:
        """Return the fair share of a project, in thousandths of a GPU."""
        if self._shares is None:
            accounts = self._quotas.accounts
            if len(accounts) == 1:
                return self._capacity
            waiting = self._waiting_milli()
            demand = {name: account.demand(waiting.get(name, 0)) for name, account in accounts.items()}
            projects = [account.project for account in accounts.values()]
            shares = fair_shares(projects, demand, self._capacity)
            self._shares = {name: share + self.catching_up(name) for name, share in shares.items()}
        return self._shares.get(project, 0)

    def catching_up(self, project: str) -> int:
        """Return the thousandths that make up for the project's lag; negative if it is ahead."""
        return self._catching_up.get(project, 0)

    def maximum(self, project: str) -> int:
        """Return the maximum that a project may hold once it lags enough: all but the quotas of others."""
        others = (a.project.quota_milli for name, a in self._quotas.accounts.items() if name != project)
        return self._capacity - sum(others)

    def at_or_below_share(self) -> frozenset[str]:
        """Return the projects that hold no more than their share."""
        return self._cached(
            "share", lambda accounts: frozenset(n for n, a in accounts if a.use <= self.of(n))
        )

    def total_excess(self) -> int:
        """Return the thousandths that all projects together hold beyond their shares."""
        return self._cached(
            "excess", lambda accounts: sum(max(0, a.use - max(0, self.of(n))) for n, a in accounts if a.use)
        )

    def _cached(self, name: str, compute: Callable[[Iterable[tuple[str, Account]]], T]) -> T:
        """Return a result, computed again only if the use of capacity has changed."""
        known = self._known.get(name)
        if known is None or known[0] != self._version():
            known = self._known[name] = self._version(), compute(self._quotas.accounts.items())
        found: T = known[1]
        return found
