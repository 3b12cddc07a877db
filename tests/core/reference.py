"""The rules of docs/concepts.md, in its order, written down naively: no caches, no heaps, no indexes.

It covers `progress` and `las` without moves and bounds of host memory;
`test_reference` compares it with the planner on small clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jupyter_gpushare.core import order
from jupyter_gpushare.core.idle import eligible
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    CheckpointMode,
    Cluster,
    Grant,
    Kind,
    Lease,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.quota import held_by, size_of
from tests.core.reference_numbers import Numbers

Victim = tuple[tuple[int, float, float, str], Lease, Why]  # sort key (cost, lost, since, id), lease, reason


class Reference(Numbers):
    """One round; `run` returns its actions."""

    def __init__(self, c: Cluster, now: float) -> None:
        super().__init__(c, now)
        self.actions: list[object] = []
        self.evicted: list[Victim] = []
        self.unplaceable: set[object] = set()
        self.done: set[str] = set()
        self.costly: set[str] = set()  # jobs that would gain less than they cost
        self.kept: dict[str, str] = {}  # by project: the job that capacity is kept for

    # -- decisions

    def give(self, x: Lease, devices: tuple[str, ...], what: list[tuple[str, str, int]]) -> None:
        size = held_by(x) * len(devices)
        self.capped_more[x.project] += 0 if x.id in self.claims else size
        if x.id in self.claims:
            self.awake.add(x.id)
        if x.id in self.claims or (
            x.kind is Kind.TRAIN and self.used_quota[x.project] + size <= self.quota[x.project]
        ):
            self.used_quota[x.project] += size
        what.extend((x.project, u, held_by(x)) for u in devices)

    def evict(self, victims: Iterable[Victim], for_lease: Lease, *, for_limit: bool = False) -> None:
        for v in victims:
            x = v[1]
            suspends = x.kind is Kind.BUILD or v[0][0] == 2
            self.actions.append((Suspend if suspends else Requeue)(x.id, v[2], for_lease.id))
            del self.stays[x.id]
            self.gone.append(x)
            self.evicted += [] if for_limit else [v]
            if x.id in self.in_quota:
                self.used_quota[x.project] -= size_of(x)
                self.promote(x.project)

    def reinstate_unneeded(self) -> None:
        for v in sorted(self.evicted, key=lambda v: (-v[0][0], held_by(v[1]), v[0])):
            if all(self.soon(u) >= held_by(v[1]) for u in v[1].devices):
                self.stays[v[1].id] = v[1]
                self.gone.remove(v[1])
                self.actions = [a for a in self.actions if a.lease != v[1].id]
                self.used_quota[v[1].project] += size_of(v[1]) if v[1].id in self.in_quota else 0
        self.evicted = []

    # -- the page

    def run(self) -> tuple[object, ...]:
        waking = [
            x for x in self.c.leases if x.state is State.SUSPENDED and x.kind is Kind.BUILD and x.wanted
        ]
        waking.sort(key=order.session_rank)
        for x in (x for x in waking if x.id in self.claims):  # rule 1
            if self.way_is_clear(x):
                self.actions.append(Resume(x.id, Why.WANTED))
                self.give(x, x.devices, self.granted)
            else:
                self.give(x, x.devices, self.reserved)
        self.reinstate_unneeded()
        new = [x for x in self.c.leases if x.kind is Kind.BUILD and x.state is State.PENDING]
        new.sort(key=order.session_rank)
        new = [x for x in new if not self.starts_with_claim(x)]  # rule 2
        for x in self.promised():
            if self.take(x, self.size(x)):
                self.done.add(x.id)
        self.run_pass(lambda x: self.starves(x) and self.within_share(x), starved=True, takes=True)  # rule 3
        for x in (x for x in new if not x.waits):
            self.start_guest(x)
        self.run_pass(lambda x: self.owed(x), by_quota=True)  # rule 4
        for x in (x for x in waking if x.id not in self.claims):
            if devices := self.find(x, self.unclaimed):
                if not self.over(x.project, size_of(x)):
                    self.resume(x, devices, Why.WANTED)
            else:
                self.guests.extend((u, held_by(x)) for u in x.devices)
        for x in (x for x in new if x.waits):
            self.start_guest(x)
        if self.competing():
            self.run_pass(lambda x: self.below_share(x), takes=True, last=True)
        self.run_pass(lambda x: True, last=True)
        self.reinstate_unneeded()
        return tuple(self.actions)

    def resume(self, x: Lease, devices: tuple[str, ...], why: Why) -> None:
        self.actions.append(Resume(x.id, why, () if devices == x.devices else devices))
        self.give(x, devices, self.granted)

    def way_is_clear(self, x: Lease) -> bool:
        """Whether an owner can wake now; else evicts what is in the way on its devices or under its limit."""
        short = any(self.now_free(u) < held_by(x) for u in x.devices)
        victims = self.for_owner(x) if short else []
        if victims is None:
            return False
        self.evict(victims, x)
        if not self.over(x.project, 0):
            return not short
        jobs = [y for y in self.stays.values() if y.kind is Kind.TRAIN and y.project == x.project]
        own = [v for y in jobs if (v := self.victim(y, Why.PRIORITY, min_run=False))]
        enough = self.enough_for_limit(x, 0, [], sorted(own, key=lambda v: v[0])) or []
        leaves = any(y.project == x.project and self.lets_go(y) for y in self.gone)
        self.evict(enough, x, for_limit=True)
        return not (short or enough or leaves)

    def enough_for_limit(
        self, x: Lease, size: int, victims: list[Victim], more: Iterable[Victim]
    ) -> list[Victim] | None:
        """``victims`` and the first of ``more`` without which ``size`` is within the limit of ``x``."""
        for v in [None, *(v for v in more if all(v[1] is not w[1] for w in victims))]:
            victims = [*victims, v] if v else victims
            left = sum(self.lets_go(w[1]) for w in victims if w[1].project == x.project)
            if self.over_soon(x.project, size) <= left:
                return victims
        return None

    def promised(self) -> list[Lease]:
        """Jobs that others made way for since they wait: bound to devices, then large ones first."""
        jobs = [x for x in self.c.leases if x.kind is Kind.TRAIN and order.is_waiting(x)]
        made_way = [y for y in self.c.leases if y.made_way_for and not y.cancelled]
        found = [
            x
            for x in jobs
            if any(
                y.made_way_for == x.id and (y.state in LEAVING or y.waits_since_at >= x.waits_since_at)
                for y in made_way
            )
        ]
        return sorted(found, key=lambda x: (not x.devices, -self.size(x), self.rank(x)))

    def competing(self) -> bool:
        jobs = (x for x in self.c.leases if x.kind is Kind.TRAIN and x.state not in LEAVING)
        return len({x.project for x in jobs}) > 1

    def owed(self, x: Lease) -> bool:
        return self.use(x.project) + self.size(x) <= self.quota[x.project]

    def below_share(self, x: Lease) -> bool:
        return self.use(x.project) + self.size(x) <= self.shares[x.project]

    def starves(self, x: Lease) -> bool:
        return order.is_starved(x, self.now, self.c.settings)

    def within_share(self, x: Lease) -> bool:
        share = max(self.shares[x.project], self.quota[x.project])
        return self.use(x.project) <= share and self.size(x) <= share

    def starts_with_claim(self, x: Lease) -> bool:
        left = self.configured[x.project] - self.claimed[x.project]
        size = x.size.fraction_milli * x.size.device_count
        for asleep, view in (
            (False, lambda u: min(self.claimable(u), self.now_free(u))),
            (True, self.claimable),
        ):
            if devices := self.find(x, view, left):
                asleep = asleep or bool(self.over(x.project, size))
                self.capped_more[x.project] += size
                self.actions.append(Grant(x.id, devices, x.size.fraction_milli, Why.CLAIM, asleep=asleep))
                self.claimed[x.project] += size
                self.new_claims += [(u, x.size.fraction_milli) for u in devices]
                if asleep:
                    self.lent_claims += [(u, x.size.fraction_milli) for u in devices]
                else:
                    self.used_quota[x.project] += size
                    self.granted += [(x.project, u, x.size.fraction_milli) for u in devices]
                return True
        return False

    def start_guest(self, x: Lease) -> None:
        devices = self.find(x, self.unclaimed)
        if devices and not self.over(x.project, self.size(x)):
            self.capped_more[x.project] += self.size(x)
            self.actions.append(Grant(x.id, devices, x.size.fraction_milli, Why.FREE_CAPACITY, borrowed=True))
            self.granted += [(x.project, u, x.size.fraction_milli) for u in devices]

    # -- rules 3 to 6: jobs

    def run_pass(
        self,
        admits: Callable[[Lease], bool],
        *,
        by_quota: bool = False,
        takes: bool = False,
        starved: bool = False,
        last: bool = False,
    ) -> None:
        rank = self.rank

        def turn(name: str) -> tuple[object, ...]:
            if starved:
                return rank(queues[name][0])
            p = next(p for p in self.projects if p.name == name)
            used, quota = self.use(name), p.quota_milli
            ratio = used / max(quota, 1) if by_quota else (used - quota) / max(p.weight, 1)
            return -p.priority, ratio, rank(queues[name][0]), name

        waiting = sorted((x for x in self.c.leases if x.kind is Kind.TRAIN and order.is_waiting(x)), key=rank)
        queues = {n: [x for x in waiting if x.project == n] for n in self.quota}
        waits_long = last or not self.competing()  # jobs that are not admitted wait for their own project
        while name := min((n for n in queues if queues[n]), key=turn, default=None):
            queue = queues[name]
            while queue:
                x = queue[0]
                if x.id in self.done:
                    queue.pop(0)
                elif waits_long and not admits(x) and self.starves(x) and self.reachable(x):
                    queue.clear()
                elif not admits(x):
                    queue[:] = [y for y in queue if self.shape(y) != self.shape(x)]
                elif self.fit(x) in self.unplaceable:
                    behind = [] if self.holds_up(x) else queue
                    queue[:] = [y for y in behind if self.shape(y) != self.shape(x)]
                elif self.serve(x, takes=takes, starved=starved):
                    self.done.add(queue.pop(0).id)
                    break
                elif x.id in self.costly:
                    queue.pop(0)
                else:
                    self.unplaceable.add(self.fit(x))

    def rank(self, x: Lease) -> order.Rank:
        return order.rank(x, self.now, self.c.settings, preferred=self.preferred(x))

    def level(self, x: Lease) -> order.Level:
        return order.level(x, self.now, self.c.settings, preferred=self.preferred(x))

    def preferred(self, x: Lease) -> bool:
        """Whether a job of a user who is behind runs, or is one of the next that the user's share holds."""
        behind = self.c.behind.get((x.project, x.user))
        if behind is None or not order.is_waiting(x):
            return behind is not None
        same = [
            y for y in self.c.leases if y.kind is Kind.TRAIN and (y.project, y.user) == (x.project, x.user)
        ]
        same = [y for y in same if y.devices or self.find(y, lambda u: 1000)]
        left = behind.left_milli
        for y in sorted(
            filter(order.is_waiting, same), key=lambda y: order.rank(y, self.now, self.c.settings)
        ):
            if self.size(y) <= left or (self.size(y) <= behind.first_milli and left == behind.left_milli):
                if y is x:
                    return True
                left -= self.size(y)
        return False

    def shape(self, x: Lease) -> tuple[object, ...]:
        return x.project, self.level(x), x.size, x.consolidate, x.survival, x.devices, x.movable

    def fit(self, x: Lease) -> object:
        """What fails alike in a project, at this or a later level."""
        return self.starves(x), *self.shape(x)[2:], x.project

    def holds_up(self, x: Lease) -> bool:
        """A starved job larger than its project's share, which must fall behind first."""
        kept = x.id in self.kept.values() or not self.starves(x)
        return not kept and self.competing() and self.reachable(x) and not self.within_share(x)

    def reachable(self, x: Lease) -> bool:
        """Whether the share of its project holds ``x``, now or once the project lags enough."""
        others = sum(m for n, m in self.quota.items() if n != x.project)
        most = 1000 * len(self.c.devices) - others if self.c.settings.fairness_horizon_s else 0
        return not self.competing() or self.size(x) <= max(
            self.shares[x.project], self.quota[x.project], most
        )

    def keep(self, x: Lease) -> None:
        """Reserve the devices that lack least, for one job of each project."""
        found = []
        for group in [self.resume_devices(x)] if x.devices else self.sets(x):
            able = sorted(
                (u for u in group if x.devices or self.without_jobs(u) >= held_by(x)),
                key=lambda u: (-self.soon(u), u),
            )[: x.size.device_count]
            if len(able) == x.size.device_count:
                able = able if x.devices else list(self.packed(x, able, self.soon))
                found.append((sum(max(0, held_by(x) - self.soon(u)) for u in able), able[0], able))
        if x.project not in self.kept and found:
            self.kept[x.project] = x.id
            self.give(x, tuple(min(found)[2]), self.reserved)

    def find_now(self, x: Lease) -> tuple[str, ...] | None:
        """Where no suspended lease waits, else on unlent capacity, else on any that is free."""
        views = [self.unclaimed, self.now_free]
        views = views if x.devices else [self.unawaited, *views]
        return next((devices for view in views if (devices := self.find(x, view))), None)

    def take(self, x: Lease, size: int) -> bool:
        """Start a job on what is free, or reserve what is being released, within its project's limit."""
        if self.find(x, self.soon) and not self.over_soon(x.project, size):
            devices = self.find_now(x)
            if devices and not self.over(x.project, size):
                beyond = self.used_quota[x.project] + held_by(x) * len(devices) > self.quota[x.project]
                borrowed = beyond or any(self.unclaimed(u) < held_by(x) for u in devices)
                if x.state is State.SUSPENDED:
                    self.resume(x, devices, Why.CAPACITY_BACK)
                else:
                    self.actions.append(
                        Grant(x.id, devices, held_by(x), Why.FREE_CAPACITY, borrowed=borrowed)
                    )
                    self.give(x, devices, self.granted)
            else:
                self.give(x, devices or self.find(x, self.soon) or (), self.reserved)
            return True
        return False

    def serve(self, x: Lease, *, takes: bool, starved: bool) -> bool:
        if self.take(x, self.size(x)):
            return True
        if not self.find(x, lambda u: 1000) and not x.devices:
            return False
        owed = self.owed(x)
        below = not owed and self.competing() and self.below_share(x)
        if self.over_soon(x.project, self.size(x)):
            return self.reclaim_under_limit(x, owed=owed, below=below and takes)
        for way in (self.from_others, self.from_juniors):
            found = way(x, owed=owed, below=below and takes)
            if found and self.is_stable(x, found[1]):
                if self.is_worth_it(x, found[1]):
                    self.evict(found[1], x)
                    self.give(x, found[0], self.reserved)
                    return True
                self.costly.add(x.id)
        if self.starves(x) and (owed or below or starved or not self.competing()):
            self.keep(x)
        return False

    def reclaim_under_limit(self, x: Lease, *, owed: bool, below: bool) -> bool:
        """Evict for devices, and as many juniors as the limit asks for."""
        soon = self.find_now(x) or self.find(x, self.soon)
        ways = [self.from_others(x, owed=owed, below=below), self.from_juniors(x, owed=owed, below=below)]
        found = []
        for devices, victims in [(soon, [])] if soon else filter(None, ways):
            enough = self.enough_for_limit(x, self.size(x), victims, self.juniors(x))
            found += [] if enough is None else [(devices, enough)]
        best = min(found, key=lambda f: (max((v[0][0] for v in f[1]), default=-1), len(f[1])), default=None)
        if best and self.is_stable(x, best[1]):
            if self.is_worth_it(x, best[1]):
                self.evict(best[1], x, for_limit=True)
                self.give(x, best[0], self.reserved)
                return True
            self.costly.add(x.id)
        return False

    def is_stable(self, x: Lease, victims: list[Victim]) -> bool:
        """No smaller victim of the same project would be served before ``x`` again."""
        own = [v[1] for v in victims if v[1].project == x.project]
        left = self.use(x.project) - sum(map(size_of, own))
        sizes = [size_of(v[1]) for v in victims if v[2] in (Why.PRIORITY, Why.ORDER)]
        bounds = self.quota[x.project], self.shares[x.project]
        return not any(left + self.size(x) > most and any(left + s <= most for s in sizes) for most in bounds)

    def is_worth_it(self, x: Lease, victims: list[Victim]) -> bool:
        """Rule 7: what the jobs lose that make way by the order."""
        settings = self.c.settings
        cost = sum(
            size_of(v[1])
            / 1000
            * (
                settings.preempt_cost_s
                + (v[0][0] != 2) * settings.grace_s
                + min((v[0][0] == 4) * v[0][1], 4 * settings.min_run_s)
            )
            for v in victims
            if v[2] is Why.ORDER
        )
        return not cost or order.gain_gpu_s(x, self.now, settings) >= cost

    # -- the table of rule 6

    def victim(
        self, x: Lease, why: Why, *, sessions: bool = False, min_run: bool = True, has_run: bool = False
    ) -> Victim | None:
        has_run = has_run or x.granted_at + order.share_run_s(self.c.settings) <= self.now
        if x.kind is Kind.BUILD:
            return (
                ((5, 0.0, -x.granted_at, x.id), x, why)
                if sessions and x.suspendable and x.state is State.RUNNING
                else None
            )
        if x.state is State.RESUMING or (min_run and not has_run):
            return None
        suspends = x.survival.suspends and x.suspendable
        if min_run and x.survival is CheckpointMode.SUSPEND_SIGTERM:
            others = self.resume_devices(x)
            suspends &= len(x.devices) == 1 < len(others) and not any(map(self.awaited, others))
        cost = 3 if x.state is State.GRANTED else 2 if suspends else 4
        lost_s = order.lost_s(x, self.now) if cost == 4 else 0.0
        return (cost, lost_s, -x.granted_at, x.id), x, why

    def idle(self, x: Lease) -> Victim | None:
        if not eligible(x, self.c.settings, self.now):
            return None
        return (
            (0 if x.lend_now else 1, 0.0, x.idle_since_at or 0.0, x.id),
            x,
            Why.LEND_NOW if x.lend_now else Why.IDLE,
        )

    def possible(self, x: Lease, u: str, *, owed: bool, below: bool) -> list[Victim]:
        """Leases on a device that ``x`` may preempt outside of its own project's jobs."""
        within = {n for n in self.quota if self.use(n) <= self.shares[n]} if below else set()
        found = []
        for y in (y for y in self.stays.values() if u in y.devices):
            v = self.idle(y)
            if (
                not v
                and (owed or below)
                and y.project not in within | {x.project}
                and y.id not in self.in_quota
            ):
                v = self.victim(y, Why.OVER_QUOTA, sessions=owed, min_run=not owed)
            found += [v] if v else []
        return sorted(found, key=lambda v: v[0])

    def missing(self, x: Lease, u: str, *, owed: bool) -> int:
        return held_by(x) - self.soon(u) + (0 if owed else sum(m for v, m in self.guests if v == u))

    def sets(self, x: Lease) -> list[list[str]]:
        if x.devices and x.size.device_count > 1:
            return [self.resume_devices(x)]
        if x.devices:
            return [[u] for u in sorted(self.resume_devices(x))]
        if x.size.device_count == 1:
            return [[u] for u in sorted(self.node)]
        return self.nodes() if x.consolidate else [list(self.node)]

    def from_others(
        self, x: Lease, *, owed: bool, below: bool
    ) -> tuple[tuple[str, ...], list[Victim]] | None:
        """The cheapest devices: by the dearest kind of victim, then their number, then the last granted."""
        below = below and any(self.use(n) > max(0, self.shares[n]) for n in self.quota)
        options: dict[str, tuple[tuple[object, ...], list[Victim]]] = {}
        for u in self.node:
            possible, short, picked = (
                self.possible(x, u, owed=owed, below=below),
                self.missing(x, u, owed=owed),
                [],
            )
            while short > 0 and possible:
                picked.append(possible.pop(0))
                short -= held_by(picked[-1][1])
            if short <= 0:
                options[u] = (*price(picked), -short, u), picked
        found = []
        for number, group in enumerate(self.sets(x)):
            able = sorted((u for u in group if u in options), key=lambda u: options[u][0])[
                : x.size.device_count
            ]
            if len(able) == x.size.device_count:
                union = {v[0]: v for u in able for v in options[u][1]}
                first = options[able[0]][0]
                found.append(
                    ((*price(sorted(union.values(), key=lambda v: v[0])), *first[3:]), number, able, union)
                )
        if not found:
            return None
        _, _, able, union = min(found, key=lambda x: x[:2])
        devices = self.to_resume_on(x, able, self.soon) if x.devices else tuple(able)
        return devices or (), self.least(
            {u: self.missing(x, u, owed=owed) for u in able}, list(union.values())
        )

    def least(self, short: dict[str, int], victims: list[Victim]) -> list[Victim]:
        """Without victims that are not needed, the dearest spared first."""
        kept = sorted(victims, key=lambda v: v[0])
        for v in sorted(victims, key=lambda v: (-v[0][0], held_by(v[1]), v[0])):
            rest = [w for w in kept if w is not v]
            if all(self.on((w[1] for w in rest), u) >= s for u, s in short.items()):
                kept = rest
        return kept

    def from_juniors(
        self, x: Lease, *, owed: bool, below: bool
    ) -> tuple[tuple[str, ...], list[Victim]] | None:
        """Add jobs of later levels one by one, until the job fits; then spare the dearest not needed."""
        below = below and any(self.use(n) > max(0, self.shares[n]) for n in self.quota)
        taken: list[Victim] = []
        others = {u: self.possible(x, u, owed=owed, below=below) for u in self.node}

        def lacking(u: str, victims: list[Victim]) -> int:
            return self.missing(x, u, owed=owed) - self.on((v[1] for v in victims), u)

        def all_of(group: list[str]) -> list[Victim]:
            union = {v[0]: v for u in group for v in others[u]}
            return sorted(union.values(), key=lambda v: v[0])

        def able(group: list[str], victims: list[Victim]) -> list[str]:
            return [u for u in group if lacking(u, victims) <= 0]

        for v in self.juniors(x):
            y = v[1]
            taken.append(v)
            sets = [self.resume_devices(x)] if x.devices else self.sets(x)
            near = [g for g in sets if set(g) & set(y.devices)]
            if x.size.device_count == 1 and not x.devices:
                near.sort(key=lambda g: y.devices.index(g[0]))
            for group in near:
                victims = [*all_of(group), *(w for w in taken if set(w[1].devices) & set(group))]
                if len(able(group, victims)) >= x.size.device_count:
                    for w in reversed(victims.copy()):
                        rest = [z for z in victims if z is not w]
                        if len(able(group, rest)) >= x.size.device_count:
                            victims = rest
                    free = able(group, victims)

                    def view(u: str, v: list[Victim] = victims) -> int:
                        return -lacking(u, v)

                    if x.devices:
                        return self.to_resume_on(x, free, view) or (), victims
                    return self.packed(x, free, view), victims
        return None

    def juniors(self, x: Lease) -> list[Victim]:
        """Jobs of later levels, on the devices of ``x`` if it has some, the first to be preempted first."""
        jobs = [y for y in self.stays.values() if y.kind is Kind.TRAIN and y.project == x.project]
        jobs = [y for y in jobs if not x.devices or set(y.devices) & set(self.resume_devices(x))]
        later = sorted((y for y in jobs if self.level(y) > self.level(x)), key=self.last_in)
        why = {y.id: Why.PRIORITY if y.priority < x.priority else Why.ORDER for y in later}
        before = [y for y in self.c.leases if y.state in HOLDS_CAPACITY - LEAVING and y.kind is Kind.TRAIN]
        before = [y for y in before if y.project == x.project and self.level(y) > self.level(x)]
        has_run = {y.id for y in before if order.undisturbed_until(y, self.c.settings) <= self.now}
        spared = sorted(size_of(y) for y in before if y.id in has_run and self.restarts(y))
        young = [y for y in before if y.id not in has_run and self.restarts(y) and not y.turns]
        cheap = set()
        for y in sorted(young, key=lambda y: (-y.granted_at, y.id)):
            if larger := [size for size in spared if size >= size_of(y)]:
                spared.remove(larger[0])
                cheap.add(y.id)
        able = (y for y in later if y.id in has_run | cheap)
        return [v for y in able if (v := self.victim(y, why[y.id], has_run=True))]

    def restarts(self, y: Lease) -> bool:
        """Whether it loses all since its start when it makes way."""
        return not y.survival.has_checkpoint and not (y.survival.suspends and y.suspendable)

    def last_in(self, y: Lease) -> tuple[object, ...]:
        _, user, group = self.level(y)
        stops = not y.survival.suspends or not y.suspendable
        awaited = 0 if not y.survival.suspends else max(map(self.awaited, y.devices))
        lost_s = order.lost_s(y, self.now) if self.restarts(y) else 0.0
        return (
            y.priority,
            -user,
            awaited,
            lost_s,
            -group,
            stops,
            -order.seniority(y, self.now, self.c.settings),
            y.id,
        )

    def borrower(self, y: Lease) -> Victim | None:
        if y.id in self.claims:
            return None
        return self.victim(y, Why.LENDER_RETURNED, sessions=True, min_run=False)

    def for_owner(self, x: Lease) -> list[Victim] | None:
        chosen: list[Victim] = []
        short = {u: held_by(x) - self.soon(u) for u in x.devices}
        for u in x.devices:
            here = [y for y in self.stays.values() if u in y.devices]
            found = [self.idle(y) or self.borrower(y) for y in here]
            for v in sorted((v for v in found if v), key=lambda v: v[0]):
                if self.on((w[1] for w in chosen), u) < short[u] and v not in chosen:
                    chosen.append(v)
            if self.on((w[1] for w in chosen), u) < short[u]:
                return None
        return self.least(short, chosen)


def price(victims: list[Victim]) -> tuple[object, ...]:
    return (victims[-1][0][0], len(victims), tuple(v[0] for v in victims)) if victims else (-1, 0, ())
