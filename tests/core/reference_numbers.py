"""What the reference planner counts and where it places, worked out from leases and decisions each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from itertools import chain

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import HOLDS_CAPACITY, LEAVING, Cluster, Kind, Lease, State
from jupyter_gpushare.core.quota import fair_shares, held_by, size_of

View = Callable[[str], int]


class Numbers:
    """Capacity, quotas and claims on a small cluster, after the decisions so far."""

    def __init__(self, c: Cluster, now: float) -> None:
        self.c, self.now, self.leases = c, now, {x.id: x for x in c.leases}
        self.node = {d.uuid: d.node for d in c.devices}
        self.movable = {d.uuid for d in c.devices if d.movable}
        self.configured = {p.name: p.quota_milli for p in c.projects}  # bounds claims
        # Jobs count on what the machine can keep of it: by weight where it cannot keep all.
        self.quota, capacity = self.configured, 1000 * len(c.devices)
        if sum(self.quota.values()) > capacity:
            by_weight = [replace(p, quota_milli=0, limit_milli=None) for p in c.projects]
            self.quota = fair_shares(by_weight, self.configured, capacity)
        self.projects = [replace(p, quota_milli=self.quota[p.name]) for p in c.projects]
        self.stays = {x.id: x for x in c.leases if x.state in HOLDS_CAPACITY - LEAVING and x.devices}
        self.gone = [x for x in c.leases if x.state in LEAVING]  # are releasing their devices
        self.granted: list[tuple[str, str, int]] = []  # project, device, milli
        self.reserved: list[tuple[str, str, int]] = []
        self.new_claims: list[tuple[str, int]] = []
        self.lent_claims: list[tuple[str, int]] = []  # those of them that start suspended
        self.guests: list[tuple[str, int]] = []  # what sessions beyond quota would take
        self.awake: set[str] = set()  # suspended sessions with a claim that wake in this round
        self.claims, self.in_quota = self.claimants(), set[str]()
        self.limit = {p.name: 10**9 if p.limit_milli is None else p.limit_milli for p in c.projects}
        self.capped_more = dict.fromkeys(self.quota, 0)  # by decisions, against the limit
        self.used_quota = dict.fromkeys(self.quota, 0)
        self.claimed = dict.fromkeys(self.quota, 0)
        for id in self.claims:
            self.claimed[self.leases[id].project] += size_of(self.leases[id])
        for id in self.claims & self.stays.keys():
            self.in_quota.add(id)
            self.used_quota[self.leases[id].project] += size_of(self.leases[id])
        for name in self.quota:
            self.promote(name)

    # -- numbers

    def claimants(self) -> set[str]:
        found: list[Lease] = []
        sessions = (x for x in self.c.leases if x.kind is Kind.BUILD and x.devices)
        for x in sorted(sessions, key=lambda x: (x.borrowed, x.queued_at, x.id)):
            own = sum(size_of(y) for y in found if y.project == x.project)
            full = any(
                sum(held_by(y) for y in found if u in y.devices) + held_by(x) > 1000 for u in x.devices
            )
            if own + size_of(x) <= self.configured[x.project] and not full:
                found.append(x)
        return {x.id for x in found}

    def promote(self, name: str) -> None:
        """Jobs in quota, as many as fit beside claims in use: those that once starved, then the oldest."""
        jobs = (x for x in self.stays.values() if x.project == name and x.kind is Kind.TRAIN)
        for x in sorted(jobs, key=lambda x: (not x.turns, x.granted_at, x.id)):
            if x.id not in self.in_quota and self.used_quota[name] + size_of(x) <= self.quota[name]:
                self.in_quota.add(x.id)
                self.used_quota[name] += size_of(x)

    def use(self, name: str) -> int:
        held = sum(size_of(x) for x in self.stays.values() if x.project == name)
        return held + sum(m for p, _, m in chain(self.granted, self.reserved) if p == name)

    def lets_go(self, x: Lease) -> int:
        """What a lease that leaves its devices takes off its project's limit: a claim stays."""
        return 0 if x.id in self.claims else size_of(x)

    def over(self, name: str, more: int) -> int:
        """By how much a project would exceed its limit with ``more``: all that is held or claimed counts."""
        held = {x.id: x for x in (*self.stays.values(), *self.gone)}
        held |= {id: self.leases[id] for id in self.claims}
        capped = sum(size_of(x) for x in held.values() if x.project == name) + self.capped_more[name]
        return max(0, capped + more - self.limit[name])

    def over_soon(self, name: str, more: int) -> int:
        """The same once every leaving lease has left."""
        return max(0, self.over(name, more) - sum(self.lets_go(x) for x in self.gone if x.project == name))

    def size(self, x: Lease) -> int:
        return size_of(x) if x.devices else x.size.fraction_milli * x.size.device_count

    @cached_property
    def shares(self) -> dict[str, int]:
        waiting = [x for x in self.c.leases if x.kind is Kind.TRAIN and order.is_waiting(x)]
        demand = {n: sum(self.size(x) for x in waiting if x.project == n) for n in self.quota}
        for n in self.quota:
            leaving = sum(self.lets_go(x) for x in self.gone if x.project == n)
            left = self.limit[n] + leaving - (self.over(n, 10**10) + self.limit[n] - 10**10)
            demand[n] = self.use(n) + min(demand[n], max(0, left))
        return fair_shares(self.projects, demand, 1000 * len(self.c.devices)) if len(self.quota) > 1 else {
            n: 1000 * len(self.c.devices) for n in self.quota}  # fmt: skip

    def on(self, leases: Iterable[Lease], u: str) -> int:
        return sum(held_by(x) for x in leases if u in x.devices)

    def free(self, u: str) -> int:
        held = self.on(self.stays.values(), u) + self.on(self.gone, u)
        return 1000 - held - sum(m for _, v, m in self.granted if v == u)

    def soon(self, u: str) -> int:
        return self.free(u) + self.on(self.gone, u) - sum(m for _, v, m in self.reserved if v == u)

    def lent(self, u: str) -> int:
        """Claims of suspended and leaving sessions."""
        claims = (self.leases[id] for id in self.claims - self.stays.keys() - self.awake)
        return self.on(claims, u) + sum(m for v, m in self.lent_claims if v == u)

    def now_free(self, u: str) -> int:
        return min(self.free(u), self.soon(u))

    def unclaimed(self, u: str) -> int:
        return min(self.free(u), self.soon(u) - self.lent(u))

    def awaited(self, u: str) -> int:
        """What suspended leases without a claim wait for."""
        asleep = (x for x in self.c.leases if x.state is State.SUSPENDED and x.id not in self.claims)
        return self.on(asleep, u)

    def unawaited(self, u: str) -> int:
        return self.unclaimed(u) - self.awaited(u)

    def without_jobs(self, u: str) -> int:
        """What would be free if every job left."""
        sessions = (x for x in self.stays.values() if x.kind is Kind.BUILD)
        return 1000 - self.on(sessions, u) - self.lent(u)

    def claimable(self, u: str) -> int:
        stuck = (
            x
            for x in self.stays.values()
            if x.kind is Kind.BUILD and x.id not in self.claims and not x.suspendable
        )
        new = sum(m for v, m in self.new_claims if v == u)
        return 1000 - self.on((self.leases[id] for id in self.claims), u) - new - self.on(stuck, u)

    # -- placement

    def nodes(self) -> list[list[str]]:
        return [[u for u in self.node if self.node[u] == name] for name in dict.fromkeys(self.node.values())]

    def resume_devices(self, x: Lease) -> list[str]:
        """Its own, and those that it may move to: movable, on the node of its own (all here are alike)."""
        moves = x.movable and all(u in self.movable for u in x.devices)
        here = {self.node[u] for u in x.devices}
        others = [u for u in self.node if moves and here == {self.node[u]} and u in self.movable]
        return [*x.devices, *(u for u in others if u not in x.devices)]

    def to_resume_on(self, x: Lease, able: Iterable[str], view: View) -> tuple[str, ...] | None:
        able = list(able)
        others = sorted((u for u in able if u not in x.devices), key=lambda u: (view(u), u))
        if len(able) < len(x.devices):
            return None
        return tuple(u if u in able else others.pop(0) for u in x.devices)

    def find(self, x: Lease, view: View, most: int = 10**9) -> tuple[str, ...] | None:
        if x.devices:
            able = [u for u in self.resume_devices(x) if view(u) >= held_by(x)]
            return self.to_resume_on(x, able, view)
        if self.size(x) > most:
            return None
        if x.size.device_count > 1:
            sets = self.nodes() if x.consolidate else [list(self.node)]
            able = [[u for u in group if view(u) >= x.size.fraction_milli] for group in sets]
            able = [group for group in able if len(group) >= x.size.device_count]
            return self.packed(x, min(able, key=len), view) if able else None
        found = []
        for group in self.nodes():
            total = sum(max(0, view(u)) for u in group)
            able = [u for u in group if view(u) >= x.size.fraction_milli]
            found += [(view(u), total, min(group), u) for u in able]
        return (min(found)[-1],) if found else None

    def packed(self, x: Lease, able: list[str], view: View) -> tuple[str, ...]:
        count = {u: sum(self.node[v] == self.node[u] for v in able) for u in able}
        sign = -1 if x.consolidate else 1
        return tuple(
            sorted(able, key=lambda u: (sign * count[u], self.node[u], view(u), u))[: x.size.device_count]
        )
