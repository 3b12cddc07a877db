"""Who is owed what: claims, use, quota and fair share.

* A build session within quota has a *claim*: room on its devices for as long
  as it lives, asleep or not.  Claims of one project never exceed its quota and
  claims on one device never exceed the device.
* A job that does not *borrow* (`Lease.borrow`) starts only on what the quota
  leaves beside claims and the other jobs of this kind, and is in quota before
  jobs that do borrow, as long as there is quota.
* *Use* is room held by a project's leases, without what is on its way out.  A
  sleeping lease is a claim, not use.
* A lease is *in quota* if it has a claim, or if it is a training job that fits
  in what the project's claims in use leave of its quota: who does not borrow
  first, then the oldest grant.
  All other use is *over quota*: borrowed, and taken back first.
* *Fair share*: quota first, then the rest by weight, never more than a project
  can use (water filling over real demand).

Nothing here is remembered: standing follows from the states of the leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from jupyter_gpushare.core.model import (
    HOLDS_ROOM,
    LEAVING,
    WHOLE_GPU,
    Kind,
    Lease,
    Project,
    State,
)


def held_by(lease: Lease) -> int:
    """Thousandths of each of its devices that ``lease`` holds, or will hold again."""
    return lease.held_milli or lease.fraction_milli


def size_of(lease: Lease) -> int:
    """Thousandths of a GPU over all its devices."""
    return held_by(lease) * len(lease.devices)


@dataclass(slots=True)
class Account:
    """Where one project stands in a round; every number in thousandths of a GPU."""

    project: Project
    claimed: int = 0  # by its build sessions, asleep or not
    use: int = 0  # held, and not on its way out
    in_quota_use: int = 0
    unborrowing: int = 0  # the part of the use by jobs that do not borrow
    capped: int = 0  # what counts against the limit: held in any way, or claimed
    leaving: int = 0  # the part of it that is on its way out

    def undoing(self) -> Callable[[], None]:
        """Return what brings the account back to how it is now, after decisions."""
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
        """Whether the project stays within quota with ``more``: then it is owed that room."""
        return self.use + more <= self.project.quota_milli

    def fits_quota(self, more: int) -> bool:
        """Whether ``more`` would be in quota, whatever the project borrows already."""
        return self.in_quota_use + more <= self.project.quota_milli

    @property
    def unborrowed_left(self) -> int:
        """What jobs that do not borrow may still have."""
        return self.project.quota_milli - self.claimed - self.unborrowing

    def over_limit(self, more: int) -> int:
        """By how much ``more`` would exceed the project's limit now; 0: it does not."""
        limit = self.project.limit_milli
        return 0 if limit is None else max(0, self.capped + more - limit)

    def over_limit_soon(self, more: int) -> int:
        """The same once everything on its way out has left."""
        return max(0, self.over_limit(more) - self.leaving)

    def turn(self, catching_up: int, *, owed: bool) -> tuple[float, float]:
        """Sorts projects that are ``owed`` room, by what they have of it; or the others, by weight.

        ``catching_up``: what a project may have more, or has to have less, because of what it had.
        """
        quota = self.project.quota_milli
        if owed:
            return -self.project.priority, self.use / max(quota, 1)
        return -self.project.priority, (self.use - quota - catching_up) / max(self.project.weight, 1)


class Standing:
    """Accounts of all projects, and which leases are within quota.

    Leases that have a place `enter` and `exit`.  Whether a session has a claim
    decides how it is counted: so `count` who came after `claims_to_change`, and
    whose claim changed anew; `settle` then brings the quotas up to date.
    """

    def __init__(self, projects: Iterable[Project]) -> None:
        self.accounts = {p.name: Account(p) for p in projects}
        self.claimants: set[str] = set()  # build sessions whose room is theirs
        self.in_quota: set[str] = set()  # leases that hold room within quota
        self.jobs: dict[str, dict[str, Lease]] = {}  # by project and id: hold room, are not leaving
        self._beyond: dict[str, dict[str, Lease]] = {}  # those of them that are not in quota
        # The same with their sizes, in the order in which they get into quota.
        self._next: dict[str, list[tuple[int, Lease]]] = {}
        self._guests: dict[str, Lease] = {}  # sessions that hold room without a claim
        self._sessions: dict[str, Lease] = {}  # may have a claim
        self._unsettled: set[str] = set()  # projects whose jobs are not yet in or out of quota
        self._claims_unsettled = False

    def undoing(self) -> Callable[[], None]:
        """Return what brings back who holds room and who is in quota, after decisions."""
        jobs, in_quota = {name: held.copy() for name, held in self.jobs.items()}, self.in_quota.copy()

        def undo() -> None:
            self.jobs, self.in_quota = jobs, in_quota
            self._next.clear()

        return undo

    def account(self, project: str) -> Account:
        """The account of ``project``; one that is not configured (any more) is owed nothing."""
        found = self.accounts.get(project)
        if found is None:
            found = self.accounts[project] = Account(Project(name=project, quota_milli=0))
        return found

    def enter(self, lease: Lease) -> None:
        """``lease`` has a place from now on; it is not counted yet."""
        if lease.kind is Kind.BUILD and lease.state is not State.STOPPING:
            self._sessions[lease.id] = lease
            self._claims_unsettled = True

    def exit(self, lease: Lease) -> None:
        """``lease``, as it entered, has no place any more; what was counted of it still is."""
        if self._sessions.pop(lease.id, None) is not None:
            self._claims_unsettled = True

    def count(self, lease: Lease, sign: int) -> None:
        """Count what ``lease`` holds, or take it out again."""
        account, size = self.account(lease.project), sign * size_of(lease)
        claimant = lease.id in self.claimants
        holds, leaving = lease.state in HOLDS_ROOM, lease.state in LEAVING
        if claimant or holds:
            account.capped += size
            if leaving and not claimant:
                account.leaving += size
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
                self._put_out(account, lease)
                del self.jobs[lease.project][lease.id]
                del self._beyond[lease.project][lease.id]
        elif sign > 0:
            self._guests[lease.id] = lease
        else:
            del self._guests[lease.id]

    def _put_out(self, account: Account, job: Lease) -> None:
        if job.id in self.in_quota:
            self.in_quota.discard(job.id)
            self._beyond[job.project][job.id] = job
            account.in_quota_use -= size_of(job)

    def over_quota(self) -> Iterator[Lease]:
        """The leases that hold room beyond their project's quota."""
        for beyond in self._beyond.values():
            yield from beyond.values()
        yield from self._guests.values()

    def claims_to_change(self) -> set[str]:
        """Give the quotas to the sessions anew; returns the sessions whose claim comes or goes."""
        if not self._claims_unsettled:
            return set()
        self._claims_unsettled = False
        return _give_claims(self, self._sessions.values()) ^ self.claimants

    def settle(self) -> None:
        """Bring the jobs of projects that changed into quota, or out of it."""
        for name in self._unsettled:
            self._next.pop(name, None)
            account, beyond = self.account(name), self._beyond.get(name, {})
            if not account.project.quota_milli:
                continue  # nobody is in quota
            if account.in_quota_use + sum(map(size_of, beyond.values())) > account.project.quota_milli:
                # Not all fit: whether one does depends on those that are older.
                for lease in self.jobs.get(name, {}).values():
                    self._put_out(account, lease)
            for lease in self.promote(account):
                del beyond[lease.id]
            self._next.pop(name, None)
        self._unsettled.clear()

    def promote(self, account: Account) -> list[Lease]:
        """Bring jobs that hold room into their project's quota as far as they fit.

        Those that do not borrow first, then the oldest.  Returns those that were not in quota before.
        """
        if not account.fits_quota(1):
            return []
        name = account.project.name
        promoted: list[Lease] = []
        if name not in self._next:
            beyond = sorted(self._beyond.get(name, {}).values(), key=lambda x: (x.borrow, x.granted_at, x.id))
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


def has_place(lease: Lease) -> bool:
    """Whether ``lease`` is bound to devices now, asleep or not."""
    return bool(lease.devices) and (lease.state in HOLDS_ROOM or lease.state is State.SUSPENDED)


def standing(projects: Iterable[Project], leases: Iterable[Lease]) -> Standing:
    """Return who is within quota now."""
    result = Standing(projects)
    placed = [lease for lease in leases if has_place(lease)]
    for lease in placed:
        result.enter(lease)
    result.claimants = result.claims_to_change()
    for lease in placed:
        result.count(lease, 1)
    result.settle()
    return result


def _give_claims(standing: Standing, sessions: Iterable[Lease]) -> set[str]:
    """Give the quotas to the sessions, first come first served.

    A session that started on borrowed room may move up into its project's
    quota, but never at the cost of a claim that was granted as one.
    """
    claimants = set()
    on_device: dict[str, int] = {}
    for account in standing.accounts.values():
        account.claimed = 0
    for lease in sorted(sessions, key=lambda x: (x.borrowed, x.queued_at, x.id)):
        account, held, size = standing.account(lease.project), held_by(lease), size_of(lease)
        if account.claimed + size > account.project.quota_milli:
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
    """Return what each project may hold now, by name.

    Quota first, then what is left by weight, none getting more than it demands
    or its limit allows.  Exact: the shares add up to the capacity, or to the
    whole demand if that is less.
    """
    caps: dict[str, int] = {}
    weights: dict[str, int] = {}
    shares: dict[str, int] = {}
    left = capacity_milli
    for p in sorted(projects, key=lambda p: (-p.priority, p.name)):
        demand = demand_milli.get(p.name, 0)
        caps[p.name] = demand if p.limit_milli is None else min(demand, p.limit_milli)
        weights[p.name] = max(p.weight, 0)
        shares[p.name] = min(caps[p.name], p.quota_milli, left)
        left -= shares[p.name]
    while left > 0:
        thirsty = [name for name in shares if shares[name] < caps[name] and weights[name]]
        thirsty = thirsty or [name for name in shares if shares[name] < caps[name]]
        if not thirsty:
            break
        total = sum(weights[name] or 1 for name in thirsty)
        pool = left
        for name in thirsty:
            more = min(caps[name] - shares[name], max(1, pool * (weights[name] or 1) // total), left)
            shares[name] += more
            left -= more
    return shares


class Shares:
    """Fair shares of the projects in a round, worked out when somebody asks.

    ``catching_up``: what is added to them because of what projects had before.
    """

    def __init__(
        self,
        standing: Standing,
        waiting_milli: Callable[[], Mapping[str, int]],
        capacity_milli: int,
        catching_up: Mapping[str, int],
    ):
        self._standing = standing
        self._waiting_milli = waiting_milli
        self._capacity = capacity_milli
        self._catching_up = catching_up
        self._shares: dict[str, int] | None = None

    def of(self, project: str) -> int:
        """What a project may hold now, thousandths of a GPU."""
        if self._shares is None:
            accounts = self._standing.accounts
            if len(accounts) == 1:
                return self._capacity
            waiting = self._waiting_milli()
            demand = {name: account.use + waiting.get(name, 0) for name, account in accounts.items()}
            projects = [account.project for account in accounts.values()]
            shares = fair_shares(projects, demand, self._capacity)
            self._shares = {name: share + self._catching_up.get(name, 0) for name, share in shares.items()}
        return self._shares.get(project, 0)

    def within(self) -> frozenset[str]:
        """The projects that hold no more than their share."""
        return frozenset(n for n, account in self._standing.accounts.items() if account.use <= self.of(n))

    def overdrawn(self, leaving: Iterable[Lease]) -> frozenset[str]:
        """The projects of which not all of these leases may leave.

        Each may, while its project is above its share without the others.  The
        project may fall below by part of a lease then, and cannot take that
        back: the same lease would bring it above again.
        """
        sizes: dict[str, list[int]] = {}
        for lease in leaving:
            sizes.setdefault(lease.project, []).append(size_of(lease))
        return frozenset(
            n for n, own in sizes.items() if self._standing.account(n).use - sum(own) + min(own) <= self.of(n)
        )

    def indebted(self, leaving: Iterable[Lease]) -> frozenset[str]:
        """The projects that would hold less than their quota without these leases."""
        left = {n: a.use - a.project.quota_milli for n, a in self._standing.accounts.items()}
        for lease in leaving:
            left[lease.project] -= size_of(lease)
        return frozenset(lease.project for lease in leaving if left[lease.project] < 0)

    def beyond(self) -> int:
        """What all projects together hold beyond their shares."""
        return sum(max(0, a.use - max(0, self.of(n))) for n, a in self._standing.accounts.items())
