"""Who is owed what: claims, use, quota and fair share.

* A build session within quota has a *claim*: room on its devices for as long
  as it lives, asleep or not.  Claims of one project never exceed its quota and
  claims on one device never exceed the device.
* *Use* is room held by a project's leases, without what is on its way out.  A
  sleeping lease is a claim, not use.
* A lease is *in quota* if it has a claim, or if it is a training job that fits
  in what the project's claims in use leave of its quota, oldest grant first.
  All other use is *over quota*: borrowed, and taken back first.
* *Fair share*: quota first, then the rest by weight, never more than a project
  can use (water filling over real demand).

Nothing here is remembered: standing follows from the states of the leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    capped: int = 0  # what counts against the limit: held in any way, or claimed
    leaving: int = 0  # the part of it that is on its way out

    def is_below_quota(self, more: int) -> bool:
        """Whether the project stays within quota with ``more``: then it is owed that room."""
        return self.use + more <= self.project.quota_milli

    def fits_quota(self, more: int) -> bool:
        """Whether ``more`` would be in quota, whatever the project borrows already."""
        return self.in_quota_use + more <= self.project.quota_milli

    def over_limit(self, more: int) -> int:
        """By how much ``more`` would exceed the project's limit now; 0: it does not."""
        limit = self.project.limit_milli
        return 0 if limit is None else max(0, self.capped + more - limit)

    def over_limit_soon(self, more: int) -> int:
        """The same once everything on its way out has left."""
        return max(0, self.over_limit(more) - self.leaving)

    def turn(self, *, owed: bool) -> tuple[float, float]:
        """Sorts projects that are ``owed`` room, by what they have of it; or the others, by weight."""
        quota = self.project.quota_milli
        if owed:
            return -self.project.priority, self.use / max(quota, 1)
        return -self.project.priority, (self.use - quota) / max(self.project.weight, 1)


@dataclass(slots=True)
class Standing:
    """Accounts of all projects, and which leases are within quota."""

    accounts: dict[str, Account] = field(default_factory=dict)
    claimants: set[str] = field(default_factory=set)  # build sessions whose room is theirs
    in_quota: set[str] = field(default_factory=set)  # leases that hold room within quota

    def account(self, project: str) -> Account:
        """The account of ``project``; one that is not configured (any more) is owed nothing."""
        if project not in self.accounts:
            self.accounts[project] = Account(Project(name=project, quota_milli=0))
        return self.accounts[project]

    def promote(self, account: Account, jobs: Iterable[Lease]) -> list[Lease]:
        """Bring jobs that hold room into their project's quota as far as they fit, oldest first.

        Returns those that were not in quota before.
        """
        promoted = []
        beyond = [x for x in jobs if x.id not in self.in_quota] if account.fits_quota(1) else []
        for lease in sorted(beyond, key=lambda x: (x.granted_at, x.id)):
            size = size_of(lease)
            if account.fits_quota(size):
                account.in_quota_use += size
                self.in_quota.add(lease.id)
                promoted.append(lease)
        return promoted


def has_place(lease: Lease) -> bool:
    """Whether ``lease`` is bound to devices now, asleep or not."""
    return bool(lease.devices) and (lease.state in HOLDS_ROOM or lease.state is State.SUSPENDED)


def standing(projects: Iterable[Project], leases: Iterable[Lease]) -> Standing:
    """Return who is within quota now."""
    result = Standing({p.name: Account(p) for p in projects})
    placed = [lease for lease in leases if has_place(lease)]
    _give_claims(result, [x for x in placed if x.kind is Kind.BUILD and x.state is not State.STOPPING])
    jobs: dict[str, list[Lease]] = {}
    for lease in placed:
        account, size = result.account(lease.project), size_of(lease)
        claimant = lease.id in result.claimants
        if claimant or lease.state in HOLDS_ROOM:
            account.capped += size
            if not claimant and lease.state in LEAVING:
                account.leaving += size
        if lease.state not in HOLDS_ROOM or lease.state in LEAVING:
            continue
        account.use += size
        if claimant:
            account.in_quota_use += size
            result.in_quota.add(lease.id)
        elif lease.kind is Kind.TRAIN:
            jobs.setdefault(lease.project, []).append(lease)
    for name, held in jobs.items():
        result.promote(result.account(name), held)
    return result


def _give_claims(result: Standing, sessions: list[Lease]) -> None:
    """Give the quotas to the sessions, first come first served.

    A session that started on borrowed room may move up into its project's
    quota, but never at the cost of a claim that was granted as one.
    """
    on_device: dict[str, int] = {}
    for lease in sorted(sessions, key=lambda x: (x.borrowed, x.queued_at, x.id)):
        account, held, size = result.account(lease.project), held_by(lease), size_of(lease)
        if account.claimed + size > account.project.quota_milli:
            continue
        if any(on_device.get(uuid, 0) + held > WHOLE_GPU for uuid in lease.devices):
            continue
        account.claimed += size
        result.claimants.add(lease.id)
        for uuid in lease.devices:
            on_device[uuid] = on_device.get(uuid, 0) + held


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
