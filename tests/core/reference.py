"""A naive implementation of the scheduling order of docs/concepts.md; `test_reference` compares the planner.

It has the orders `progress` and `las`.  It omits moves for a gang, several GPU models, MIG, requests for
memory, limits of host memory, notices, idle timeouts of single sessions, failing devices, and reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import inf, log2, sqrt
from typing import Any, NamedTuple

from jupyter_gpushare.core import model
from jupyter_gpushare.core.model import CheckpointMode, Kind, Lease, State, Why

# Status of a lease in the round.  RESERVED capacity is not free yet; KEPT is reserved for a starving job.
WAITS, ASLEEP, KEPT, RUNS, STARTS, RESERVED, LEAVES = range(7)
HOLDS = (KEPT, RUNS, STARTS, RESERVED)
# Kinds of victims, cheapest first.
OFFERED, IDLE, SUSPENDED, STARTING, STOPPED, BUSY = range(6)
STARVED = (-inf, False, -1.0)
UNMEASURED_GPU_S, LEAST_GPU_S, EPSILON_GPU_S = 3e5, 60.0, 1e-3
# The reason of a preemption by its rule.
WHY = {"owner": Why.LENDER_RETURNED, "limit": Why.PRIORITY, "quota": Why.OVER_QUOTA, "share": Why.OVER_QUOTA}
MOST_LOST, COSTS_APART = 4, 25  # minimum run times; times what a swap for a lag costs


class Seen:
    """A lease with the state of the round."""

    def __init__(self, x: Lease) -> None:
        self.lease, self.at, self.claim, self.in_quota = x, x.devices, False, False
        self.status = RUNS if x.state in model.HOLDS_CAPACITY else ASLEEP if x.devices else WAITS
        self.status = LEAVES if x.state in model.LEAVING else self.status
        self.held = x.held_milli or x.size.fraction_milli  # thousandths of each of its devices
        self.milli = self.held * x.size.device_count
        self.suspends = x.survival.suspends and x.suspendable
        self.restarts = not (x.survival.has_checkpoint or self.suspends)
        self.starves, self.preferred, self.undisturbed_until = False, False, 0.0
        self.level, self.rank, self.gain_gpu_s, self.since = STARVED, tuple[object, ...](), 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lease, name)


class Victim(NamedTuple):
    """A lease that may be preempted; the cheapest sorts first."""

    kind: int
    lost_s: float
    since: float
    id: str
    lease: Seen
    why: Why
    suspends: bool = True

    def thrift(self) -> tuple[object, ...]:
        return -self.kind, self.lease.held, self  # the dearest first


Room = dict[str, int]  # thousandths by device
Victims = list[Victim]
Plan = tuple[tuple[str, ...], Victims]  # devices for a lease, and what makes way there


def price(victims: Victims) -> tuple[int, int, Victims]:
    return max((v.kind for v in victims), default=-1), len(victims), victims


def rounded(gpu_s: float) -> float:
    return LEAST_GPU_S * 2.0 ** int(log2(gpu_s / LEAST_GPU_S)) if gpu_s >= LEAST_GPU_S else 0.0


class Reference:
    def __init__(self, c: model.Cluster, now: float) -> None:
        self.c, self.now, self.settings = c, now, c.settings
        self.min_run_s, self.horizon_s = c.settings.min_run_s, c.settings.fairness_horizon_s or 0.0
        self.node = {d.uuid: d.node for d in c.devices}
        self.projects = {p.name: p for p in sorted(c.projects, key=lambda p: (-p.priority, p.name))}
        # Sessions have claims up to these quotas.  If they exceed the machine, jobs get shares by weight.
        self.configured = self.quota = {p.name: p.quota_milli for p in c.projects}
        if sum(self.quota.values()) > 1000 * len(c.devices):
            self.quota = self.poured(dict.fromkeys(self.quota, 0), self.quota, 1000 * len(c.devices))
        self.limit = {p.name: 10**9 if p.limit_milli is None else p.limit_milli for p in c.projects}
        lags, horizon_s = c.lags_gpu_s, self.horizon_s or inf
        self.catch_up = {name: int(1000 * lags.get(name, 0.0) / horizon_s) for name in self.quota}
        self.leases = [Seen(x) for x in sorted(c.leases, key=lambda x: (-x.priority, x.queued_at, x.id))]
        self.give_claims()
        for name in self.quota:
            self.promote(name)
        asleep = [x for x in self.leases if x.state is State.SUSPENDED and not x.claim]
        self.awaited = {u: self.on(u, asleep) for u in self.node}  # by suspended leases without a claim
        self.guests: list[Seen] = []  # suspended sessions beyond quota that cannot wake
        self.fails: dict[object, Why] = {}  # what failed, fails again
        self.actions: list[model.Action] = []
        self.evicted: Victims = []
        jobs = [x for x in self.leases if x.kind is Kind.TRAIN]
        self.waiting = [x for x in jobs if x.status in (WAITS, ASLEEP) and x.retry_at <= now]
        self.running = [x for x in jobs if x.status == RUNS]
        self.shared = len({x.project for x in (*self.waiting, *self.running)}) > 1
        guard_s = inf if c.settings.starvation_guard_s is None else c.settings.starvation_guard_s
        for x in jobs:
            x.starves = x in self.waiting and self.min_run_s > 0 and x.waits_since_at + guard_s <= now
            turns = x.turns if x.waits_since_at + guard_s <= x.granted_at else 1
            x.undisturbed_until = x.granted_at + self.min_run_s * 2.0 ** max(0, turns - 1)
            x.preferred = x in self.running and (x.project, x.user) in c.behind
            self.put_in_order(x)
        for user, behind in c.behind.items():
            left, own = behind.left_milli, [x for x in self.waiting if (x.project, x.user) == user]
            for x in sorted((x for x in own if not self.lacks_quota(x)), key=lambda x: x.rank):
                if x.milli <= left or (x.milli <= behind.first_milli and left == behind.left_milli):
                    left -= x.milli
                    x.preferred = True
                    self.put_in_order(x)
        self.waiting.sort(key=lambda x: x.rank)

    def run(self) -> tuple[model.Action, ...]:
        sessions = [x for x in self.leases if x.kind is Kind.BUILD]
        waking = [x for x in sessions if x.state is State.SUSPENDED and x.wanted]
        for x in (x for x in waking if x.claim):
            self.wake_owner(x)
        self.reinstate_unneeded()
        new = [x for x in sessions if x.state is State.PENDING and x.retry_at <= self.now]
        guests = [x for x in new if not self.starts_with_claim(x)]
        for x in self.promised():
            self.take(x)
        self.serve_jobs("starving")
        self.start_guests([x for x in guests if not x.waits])
        self.serve_jobs("quota")
        self.start_guests([x for x in waking if not x.claim] + [x for x in guests if x.waits])
        if self.shared:
            self.serve_jobs("share")
        self.serve_jobs("rest")
        self.reinstate_unneeded()
        return tuple(self.actions)

    # -- sessions

    def wake_owner(self, x: Seen) -> None:
        """Wake a session on its claim, or reserve it and evict leases in its way or over its limit."""
        room, wakes = self.room(), x.retry_at <= self.now
        if wakes and any(room[u] < x.held for u in x.devices):
            plan, wakes = self.from_others(x, "owner"), False
            if not plan:
                return self.give(x, x.devices, RESERVED)
            self.evict(plan[1], x)
        if x.retry_at <= self.now and self.over(x.project) > 0:
            jobs = [y for y in self.having(RUNS) if y.kind is Kind.TRAIN and y.project == x.project]
            victims = sorted(v for y in jobs for v in self.victim(x, y, "limit"))
            victims = self.enough_for_limit(x, 0, [], victims) or []
            wakes = wakes and not victims and self.over(x.project, soon=True) == self.over(x.project)
            self.evict(victims, x, final=True)
        return self.start(x, x.devices, Why.WANTED) if wakes else self.give(x, x.devices, RESERVED)

    def starts_with_claim(self, x: Seen) -> bool:
        """Give a new session a claim within quota: it starts on free capacity, or asleep on lent capacity."""
        stuck = [y for y in self.having(RUNS) if y.kind is Kind.BUILD and not y.suspendable]
        kept = [y for y in self.leases if y.claim or y in stuck]
        claimable, room = {u: 1000 - self.on(u, kept) for u in self.node}, self.room()
        free = self.find(x, {u: min(room[u], claimable[u]) for u in room})
        devices = free or self.find(x, claimable)
        if not devices or self.claimed(x.project) + x.milli > self.configured[x.project]:
            return False
        asleep = not free or self.over(x.project, x.milli) > 0
        self.actions.append(model.Grant(x.id, devices, x.held, Why.CLAIM, asleep=asleep))
        x.claim = True
        self.give(x, devices, ASLEEP if asleep else STARTS)
        return True

    def start_guests(self, sessions: list[Seen]) -> None:
        """Start or wake sessions beyond quota on free, unclaimed capacity."""
        for x in sessions:
            devices = self.find(x, self.room(lent=False))
            if x.devices and not devices:
                self.guests.append(x)
            if devices and self.over(x.project, x.milli) <= 0 and x.retry_at <= self.now:
                self.start(x, devices, Why.WANTED if x.devices else Why.FREE_CAPACITY)

    # -- jobs, pass by pass

    def promised(self) -> list[Seen]:
        """Return the waiting jobs for which others made way: those bound to devices, then large ones."""
        made_way = [y for y in self.leases if y.made_way_for and not y.cancelled]
        since = [(y.made_way_for, inf if y.status == LEAVES else y.waits_since_at) for y in made_way]
        jobs = [x for x in self.waiting if any(id == x.id and at >= x.waits_since_at for id, at in since)]
        return sorted(jobs, key=lambda x: (not x.devices, -x.milli, x.borrow, x.rank))

    def serve_jobs(self, rule: str) -> None:
        jobs = [x for x in self.waiting if x.status in (WAITS, ASLEEP, KEPT)]
        queues = {name: [x for x in jobs if x.project == name] for name in self.projects}
        while heads := [queue[0] for queue in queues.values() if queue]:
            queue = queues[min(heads, key=lambda x: self.turn(x, rule)).project]
            while queue:
                x = queue.pop(0)
                why = self.serve(x, rule) if self.admits(x, rule) else Why.IN_LINE
                if why is None:
                    break
                if x.starves and self.holds_up(x, why, rule):
                    queue.clear()

    def turn(self, x: Seen, rule: str) -> tuple[object, ...]:
        p, use, quota = self.projects[x.project], self.use(x.project), self.quota[x.project]
        ratio = use / max(quota, 1) if rule == "quota" else (use - quota - self.catch_up[p.name]) / p.weight
        return x.rank if rule == "starving" else (-p.priority, ratio, x.rank)

    def admits(self, x: Seen, rule: str) -> bool:
        """Return whether a pass serves a job: a starving one if use and job each fit its project's share."""
        name, use = x.project, self.use(x.project)
        if rule == "starving":
            return x.starves and max(use, x.milli) <= max(self.shares[name], self.quota[name])
        return rule == "rest" or use + x.milli <= (self.quota if rule == "quota" else self.shares)[name]

    def holds_up(self, x: Seen, why: Why, rule: str) -> bool:
        """Return whether others wait for a starving job: if its project's share, with its lag, holds it."""
        waits = why is Why.NO_CAPACITY and self.shared and not self.admits(x, "starving")
        if why is Why.IN_LINE:
            waits = (rule == "share" or not self.shared) and not self.lacks_quota(x)
        most = 1000 * len(self.node) - sum(self.quota.values()) + self.quota[x.project]
        reachable = x.milli <= max(most * bool(self.horizon_s), self.shares[x.project], self.quota[x.project])
        return waits and (reachable or not self.shared)

    def serve(self, x: Seen, rule: str) -> Why | None:
        """Start a job, or get capacity for it; return why neither is possible."""
        alike = x.project, x.size, x.consolidate, x.borrow, x.survival, x.devices, x.movable
        fit = alike, x.priority if x.starves else None
        if fit in self.fails or self.take(x):
            return self.fails.get(fit)
        if self.lacks_quota(x):
            return self.fails.setdefault(fit, Why.QUOTA)
        owed, over = self.admits(x, "quota"), self.over(x.project, x.milli, soon=True) > 0
        below = not owed and self.shared and self.admits(x, "share")
        by = "quota" if owed else "share" if below and rule in ("share", "starving") else "order"
        found = {self.objection(x, plan[1], by): plan for plan in reversed(self.plans(x, by, over=over))}
        if plan := found.get(None):
            self.evict(plan[1], x, final=over or not x.borrow)
            self.give(x, plan[0], RESERVED)
            return None
        if over:
            return self.fails.setdefault(fit, Why.PROJECT_LIMIT)
        may_keep = x.starves and (owed or below or rule == "starving" or not self.shared)
        if may_keep and self.keep(x):
            return self.fails.setdefault(fit, Why.RESERVED)
        return Why.NOT_WORTH_IT if Why.NOT_WORTH_IT in found else self.fails.setdefault(fit, Why.NO_CAPACITY)

    def take(self, x: Seen) -> bool:
        """Start a job on free capacity, or reserve capacity that is being released."""
        now, soon = ((), ()) if self.lacks_quota(x) else self.places(x)
        if now and self.over(x.project, x.milli) <= 0:
            self.start(x, now, Why.CAPACITY_BACK if x.devices else Why.FREE_CAPACITY)
        elif soon and self.over(x.project, x.milli, soon=True) <= 0:
            self.give(x, soon, RESERVED)
        return x.status in (STARTS, RESERVED)

    def places(self, x: Seen) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return where a job fits now (best where no lease waits, then on unlent devices), and soon."""
        unlent = self.room(lent=False)
        unawaited = {u: m - (0 if x.devices else self.awaited[u]) for u, m in unlent.items()}
        now = self.find(x, unawaited) or self.find(x, unlent) or self.find(x, self.room(lent=x.borrow))
        return now, now or self.find(x, self.room(lent=x.borrow, at_once=False))

    def keep(self, x: Seen) -> bool:
        """Reserve the devices with the least missing capacity, for one job of each project."""
        found, sessions = [], [y for y in self.having(RUNS) if y.kind is Kind.BUILD]
        for group in [] if self.total(self.having(KEPT), x.project) else self.sets(x):
            able = [u for u in group if x.devices or 1000 - self.on(u, sessions) - self.lent(u) >= x.held]
            able = sorted(able, key=lambda u: (-self.soon(u), u))[: x.size.device_count]
            if len(able) == x.size.device_count:
                found.append((sum(max(0, x.held - self.soon(u)) for u in able), sorted(able)))
        if found:
            self.give(x, tuple(min(found)[1]), KEPT)
        return bool(found)

    def objection(self, x: Seen, victims: Victims, by: str) -> Why | None:
        """Return why a job may not preempt these leases."""
        # A smaller victim of the same project would be served before it again.
        own = [v for v in victims if v.lease.project == x.project]
        left = self.use(x.project) - sum(v.lease.milli for v in own)
        again = min((v.lease.milli for v in own if v.why in (Why.PRIORITY, Why.ORDER)), default=inf)
        if any(left + again <= m < left + x.milli for m in (self.quota[x.project], self.shares[x.project])):
            return Why.NO_CAPACITY
        # If its project's share alone is less, the lag has to make up for the rest.
        s, lag_milli = self.settings, self.catch_up[x.project]
        stop_s = {v: s.preempt_cost_s + (0.0 if v.suspends else s.grace_s) for v in victims}
        taken = sum(v.lease.milli * stop_s[v] for v in victims if v.why is Why.OVER_QUOTA)
        by_lag = by == "share" and self.use(x.project) + x.milli > self.shares[x.project] - lag_milli
        if by_lag and lag_milli * self.horizon_s < COSTS_APART * taken:
            return Why.NO_CAPACITY
        # A preemption by order must gain the GPU-seconds that it costs.
        lost_s = {v: stop_s[v] + min(v.lost_s, MOST_LOST * self.min_run_s) for v in victims}
        cost = sum(v.lease.milli / 1000 * lost_s[v] for v in victims if v.why is Why.ORDER)
        return Why.NOT_WORTH_IT if cost and x.gain_gpu_s < cost else None

    def give(self, x: Seen, devices: tuple[str, ...], status: int) -> None:
        x.in_quota = x.in_quota or x.claim or (x.kind is Kind.TRAIN and self.fits_quota(x))
        x.status, x.at = status, devices

    def start(self, x: Seen, devices: tuple[str, ...], why: Why) -> None:
        if x.devices:
            self.actions.append(model.Resume(x.id, why, () if devices == x.devices else devices))
        else:
            lent = any(m < x.held for u, m in self.room(lent=False).items() if u in devices)
            borrowed = x.kind is Kind.BUILD or (x.borrow and (lent or not self.fits_quota(x)))
            self.actions.append(model.Grant(x.id, devices, x.held, why, borrowed=borrowed))
        self.give(x, devices, STARTS)

    def evict(self, victims: Victims, x: Seen, *, final: bool = False) -> None:
        for v in victims:
            self.actions.append((model.Suspend if v.suspends else model.Requeue)(v.id, v.why, x.id))
            v.lease.status = LEAVES
            self.promote(v.lease.project)
        self.evicted += [] if final else victims

    def reinstate_unneeded(self) -> None:
        """Reinstate victims that are not needed: a large one may be enough for two leases."""
        for v in sorted(self.evicted, key=Victim.thrift):
            if all(self.soon(u) >= v.lease.held for u in v.lease.devices):
                v.lease.status = RUNS
                self.actions = [a for a in self.actions if a.lease != v.id]
        self.evicted = []

    # -- who makes way

    def idle(self, y: Seen) -> bool:
        idle_at = inf if y.idle_since_at is None else y.idle_since_at + self.settings.idle_timeout_s
        at = max(0.0 if y.lend_now else idle_at, y.keep_until_at, y.retry_at)
        return y.kind is Kind.BUILD and y.state is State.RUNNING and y.suspendable and at <= self.now

    def victim(self, x: Seen, y: Seen, by: str) -> Victims:
        if by == "idle":
            kind, why = (OFFERED, Why.LEND_NOW) if y.lend_now else (IDLE, Why.IDLE)
            return [Victim(kind, 0.0, y.idle_since_at or 0.0, y.id, y, why)]
        why = WHY.get(by, Why.PRIORITY if y.priority < x.priority else Why.ORDER)
        suspends = y.suspends and y.state is State.RUNNING and y.retry_at <= self.now
        if y.kind is Kind.BUILD or y.state is State.RESUMING:
            able = suspends and by in ("owner", "quota")
            return [Victim(BUSY, 0.0, -y.granted_at, y.id, y, why)] if able else []
        if by in ("share", "order") and y.survival is CheckpointMode.SUSPEND_SIGTERM:
            others = self.resume_devices(y)
            suspends &= len(y.devices) == 1 < len(others) and not any(self.awaited[u] for u in others)
        kind = STARTING if y.state is State.GRANTED else SUSPENDED if suspends else STOPPED
        lost_s = self.now - y.granted_at if kind == STOPPED and not y.survival.has_checkpoint else 0.0
        return [Victim(kind, lost_s, -y.granted_at, y.id, y, why, suspends)]

    def possible(self, x: Seen, u: str, by: str) -> Victims:
        """Return the leases on a device that may make way, except jobs of the same project."""
        found = []
        for y in (y for y in self.having(RUNS) if u in y.devices):
            beyond = y.project != x.project and not y.in_quota
            if by == "share" and beyond:
                has_run = y.granted_at + max(self.min_run_s, self.horizon_s) <= self.now
                beyond = has_run and self.use(y.project) > self.shares[y.project]
            if self.idle(y) and x.borrow and not (y.claim and self.is_unlent(u)):
                found += self.victim(x, y, "idle")
            elif (by == "owner" and not y.claim) or (by in ("quota", "share") and beyond):
                found += self.victim(x, y, by)
        return sorted(found)

    def missing(self, x: Seen, u: str, by: str) -> int:
        """Return the missing capacity of a device; sessions beyond quota come before jobs beyond quota."""
        return x.held - self.soon(u, lent=x.borrow) + self.on(u, [] if by == "quota" else self.guests)

    def plans(self, x: Seen, by: str, *, over: bool) -> list[Plan]:
        """Return ways to preempt; with ``over``, the cheapest one that also meets its project's limit."""
        soon = self.places(x)[1] if over else ()
        ways = (self.from_others, self.from_juniors)
        plans = [(soon, [])] if soon else [plan for way in ways if (plan := way(x, by))]
        if not over:
            return plans
        found = [(p[0], self.enough_for_limit(x, x.milli, p[1], self.juniors(x))) for p in plans]
        return sorted(((d, v) for d, v in found if v is not None), key=lambda p: price(p[1])[:2])[:1]

    def enough_for_limit(self, x: Seen, more: int, leave: Victims, others: Victims) -> Victims | None:
        """Return ``leave`` and the first of ``others`` that bring ``more`` within the limit of ``x``."""
        others = [v for v in others if v.id not in {w.id for w in leave}]
        plans = [[*leave, *others[:n]] for n in range(len(others) + 1)]
        return next((p for p in plans if self.over(x.project, more, soon=True, without=p) <= 0), None)

    def from_others(self, x: Seen, by: str) -> Plan | None:
        """Return the cheapest devices: by the dearest kind of victim, their number, the latest grant."""
        missing, options, found = {u: self.missing(x, u, by) for u in self.node}, {}, []
        for u, short in missing.items():
            possible = self.possible(x, u, by)
            for n in range(len(possible), -1, -1):
                if (spare := self.frees(u, possible[:n]) - short) >= 0:
                    options[u] = (*price(possible[:n]), spare, u)
        for group in self.sets(x):
            able = sorted((u for u in group if u in options), key=options.__getitem__)[: x.size.device_count]
            if len(able) == x.size.device_count:
                victims = sorted({v for u in able for v in options[u][2]})
                found.append((*price(victims), *options[able[0]][3:], able))
        if not found:
            return None
        _, _, victims, *_, able = min(found)
        for v in sorted(victims, key=Victim.thrift):
            rest = [w for w in victims if w is not v]
            if all(self.frees(u, rest) >= missing[u] for u in able):
                victims = rest
        return self.packed(x, able, self.room(at_once=False)) if x.devices else tuple(able), victims

    def from_juniors(self, x: Seen, by: str) -> Plan | None:
        """Add jobs of later levels one by one until the job fits, then spare the dearest unneeded ones."""
        juniors = self.juniors(x)
        for n, junior in enumerate(juniors, 1):
            for group in (g for u in junior.lease.devices for g in self.sets(x) if u in g):
                victims = sorted({v for u in group for v in self.possible(x, u, by)})
                victims += [v for v in juniors[:n] if set(v.lease.devices) & set(group)]
                for v in reversed(victims) if self.taken_by(x, group, victims, by) else ():
                    rest = [w for w in victims if w is not v]
                    victims = rest if self.taken_by(x, group, rest, by) else victims
                if devices := self.taken_by(x, group, victims, by):
                    return devices, victims
        return None

    def taken_by(self, x: Seen, group: list[str], leave: Victims, by: str) -> tuple[str, ...]:
        """Return the devices of a set that a job takes if victims leave, or none if they are too few."""
        spare = {u: self.frees(u, leave) - self.missing(x, u, by) for u in group}
        able = [u for u in group if spare[u] >= 0]
        return self.packed(x, able, spare) if len(able) >= x.size.device_count else ()

    def juniors(self, x: Seen) -> Victims:
        """Return the jobs of later levels (on the devices of ``x``, if any), in the order of preemption."""
        later = [y for y in self.running if y.project == x.project and y.level > x.level]
        able = [y for y in later if y.undisturbed_until <= self.now]
        # A job that started lately makes way instead of one that is at least as large and loses more.
        spared = sorted(y.milli for y in able if y.restarts)
        young = [y for y in later if y not in able and y.restarts and not y.turns]
        for y in sorted(young, key=lambda y: (-y.granted_at, y.id)):
            if larger := [s for s in spared if s >= y.milli]:
                spared.remove(larger[0])
                able.append(y)
        here = set(self.resume_devices(x) if x.devices else self.node)
        able = [y for y in able if y.status == RUNS and here & set(y.devices)]
        return [v for y in sorted(able, key=self.makes_way) for v in self.victim(x, y, "order")]

    def makes_way(self, y: Seen) -> tuple[object, ...]:
        """Return the sort key of juniors: jobs that would wait behind other suspended leases come later."""
        _, not_behind, group = y.level
        awaited = max(self.awaited[u] for u in y.devices) if y.survival.suspends else 0
        lost_s = self.now - y.granted_at if y.restarts else 0.0
        return y.priority, not not_behind, awaited, lost_s, -group, not y.suspends, -y.since, y.id

    def put_in_order(self, x: Seen) -> None:
        """Compute the level of a job, its rank in the project, and the gain of a preemption for it."""
        thresholds, progress = self.settings.las_thresholds_gpu_s, self.settings.order is model.Order.PROGRESS
        began_at = x.attained_at or self.now
        attained = x.attained_gpu_s + (self.now - began_at) * x.milli / 1000
        begins = (0.0, *thresholds, *(UNMEASURED_GPU_S * 2.0**n for n in range(1, 40) if progress), inf)
        queue = sum(at <= attained + EPSILON_GPU_S for at in begins) - 1
        begin, ran = begins[queue], attained > begins[queue] + EPSILON_GPU_S
        group, gain = float(queue), begins[queue + 1] - attained
        if progress and queue:
            group = rounded(begin) if queue < len(thresholds) else max(UNMEASURED_GPU_S, begin)
        if progress and x.left_gpu_s is not None:
            said = max(x.trusted_until_gpu_s, LEAST_GPU_S)
            is_measured = attained + EPSILON_GPU_S < x.trusted_until_gpu_s  # else it is overdue
            left = x.left_gpu_s if is_measured else rounded((attained + EPSILON_GPU_S) ** 2 / said)
            if queue or is_measured:
                doubles_at = sqrt(max(LEAST_GPU_S, 2 * left) * said)
                gain = (left or LEAST_GPU_S) if is_measured else doubles_at - attained
            if queue:
                group, ran = left, ran or left > 0
        again = x.state is State.PENDING and not x.survival.has_checkpoint
        x.gain_gpu_s = gain - attained if again else gain
        x.level = -x.priority, not x.preferred, group
        at = -x.waits_since_at if ran else x.queued_at
        x.rank = x.level, x.state is State.PENDING, not ran, at, x.id
        entered_at = began_at + (begin - x.attained_gpu_s) / (x.milli / 1000)
        x.since = max(x.granted_at, entered_at if begin > x.attained_gpu_s + EPSILON_GPU_S else x.queued_at)
        if x.starves:
            x.level, x.rank = STARVED, (STARVED, True, True, x.waits_since_at, x.id)
            x.gain_gpu_s = self.min_run_s * 2.0**x.turns * x.milli / 1000

    def having(self, *status: int) -> list[Seen]:
        return [x for x in self.leases if x.status in status]

    def give_claims(self) -> None:
        """Give claims to sessions within quota, first come first served; those that borrow come last."""
        sessions = [x for x in self.leases if x.kind is Kind.BUILD and x.devices]
        for x in sorted(sessions, key=lambda x: (x.borrowed, x.queued_at, x.id)):
            full = any(self.on(u, [y for y in sessions if y.claim]) + x.held > 1000 for u in x.devices)
            if self.claimed(x.project) + x.milli <= self.configured[x.project] and not full:
                x.claim = True

    def promote(self, name: str) -> None:
        """Fill the quota with claims, then jobs that do not borrow, that starved before, then the oldest."""
        own = [x for x in self.having(RUNS) if x.project == name and (x.claim or x.kind is Kind.TRAIN)]
        for x in sorted(own, key=lambda x: (not x.claim, x.borrow, not x.turns, x.granted_at, x.id)):
            x.in_quota = x.in_quota or x.claim or self.fits_quota(x)

    def fits_quota(self, x: Seen) -> bool:
        """Return whether it would be in quota, ignoring what its project borrows."""
        inside = [y for y in self.having(*HOLDS) if y.in_quota]
        return self.total(inside, x.project) + x.milli <= self.quota[x.project]

    def use(self, name: str) -> int:
        return self.total(self.having(*HOLDS), name)

    def claimed(self, name: str) -> int:
        return self.total((x for x in self.leases if x.claim), name)

    def unborrowed_left(self, name: str) -> int:
        jobs = (x for x in self.having(*HOLDS) if not x.borrow)
        return self.quota[name] - self.claimed(name) - self.total(jobs, name)

    def lacks_quota(self, x: Seen) -> bool:
        return not x.borrow and x.milli > self.unborrowed_left(x.project)

    def over(self, name: str, more: int = 0, *, soon: bool = False, without: Iterable[Victim] = ()) -> int:
        """Return the excess of ``more`` over the limit; ``soon``: once leavers are gone.  Claims stay."""
        leave = [v.lease for v in without]
        counts = [x for x in self.having(*HOLDS, *(() if soon else (LEAVES,))) if not x.claim]
        counts = [x for x in counts if x not in leave]
        return self.total(counts, name) + self.claimed(name) + more - self.limit[name]

    @cached_property
    def shares(self) -> dict[str, int]:
        """Return the shares: quota, then the rest by weight up to what a project can use, and the lag."""
        if len(self.projects) == 1:
            return dict.fromkeys(self.quota, 1000 * len(self.node))
        demand = {}
        for name in self.projects:
            wanted = self.total((x for x in self.waiting if not x.borrow), name)
            wanted = min(wanted, max(0, self.unborrowed_left(name)))
            wanted += self.total((x for x in self.waiting if x.borrow), name)
            wanted = min(wanted, max(0, -self.over(name, soon=True)))
            demand[name] = min(self.use(name) + wanted, self.limit[name])
        shares = self.poured(self.quota, demand, 1000 * len(self.node))
        return {name: share + self.catch_up[name] for name, share in shares.items()}

    def poured(self, first: dict[str, int], most: dict[str, int], left: int) -> dict[str, int]:
        """Return shares of ``left``: ``first`` by priority, then the rest by weight up to ``most``."""
        shares = {}
        for name in self.projects:
            shares[name] = min(most[name], first[name], left)
            left -= shares[name]
        while left and (short := [p for p in self.projects.values() if shares[p.name] < most[p.name]]):
            pool, weights = left, sum(p.weight for p in short)
            for p in short:
                more = min(most[p.name] - shares[p.name], max(1, pool * p.weight // weights), left)
                shares[p.name] += more
                left -= more
        return shares

    def total(self, leases: Iterable[Seen], project: str) -> int:
        return sum(x.milli for x in leases if x.project == project)

    def frees(self, u: str, victims: Victims) -> int:
        return self.on(u, (v.lease for v in victims))

    def on(self, u: str, leases: Iterable[Seen]) -> int:
        return sum(x.held for x in leases if u in x.at)

    def lent(self, u: str) -> int:
        return self.on(u, (x for x in self.having(ASLEEP, LEAVES) if x.claim))

    def is_unlent(self, u: str) -> bool:
        """Return whether a job that does not borrow waits for a device; its claims are then not lent."""
        return any(u in x.at and not x.borrow for x in self.having(RESERVED, KEPT))

    def soon(self, u: str, *, lent: bool = True) -> int:
        """Return the capacity of a device once all leavers are gone, with or without lent capacity."""
        left = 1000 - self.on(u, self.having(*HOLDS))
        return left if lent and not self.is_unlent(u) else left - self.lent(u)

    def room(self, *, lent: bool = True, at_once: bool = True) -> Room:
        soon = {u: self.soon(u, lent=lent) for u in self.node}
        free = {u: 1000 - self.on(u, self.having(RUNS, LEAVES, STARTS)) for u in self.node}
        return {u: min(soon[u], free[u]) if at_once else soon[u] for u in self.node}

    def resume_devices(self, x: Seen) -> list[str]:
        """Return its devices, and the movable ones of their node (all models are equal)."""
        movable = [d.uuid for d in self.c.devices if d.movable and d.node == self.node[x.devices[0]]]
        moves = x.movable and not x.claim and set(x.devices) <= set(movable)
        return [*x.devices, *(u for u in movable if moves and u not in x.devices)]

    def sets(self, x: Seen) -> list[list[str]]:
        if x.devices:
            return [self.resume_devices(x)]
        if x.size.device_count == 1:
            return [[u] for u in self.node]
        nodes = [[u for u in self.node if self.node[u] == name] for name in sorted({*self.node.values()})]
        return nodes if x.consolidate else [list(self.node)]

    def find(self, x: Seen, room: Room) -> tuple[str, ...]:
        """Return where a lease fits: the fullest device, the smallest set; empty if nowhere."""
        groups = [[u for u in group if room[u] >= x.held] for group in self.sets(x)]
        groups = [group for group in groups if len(group) >= x.size.device_count]
        if x.size.device_count == 1 and not x.devices:
            left = {n: sum(max(0, room[u]) for u in room if self.node[u] == n) for n in self.node.values()}
            groups.sort(key=lambda group: (room[group[0]], left[self.node[group[0]]], group))
        return self.packed(x, min(groups, key=len), room) if groups else ()

    def packed(self, x: Seen, able: list[str], room: Room) -> tuple[str, ...]:
        """Return devices node by node, the fullest first; a suspended lease keeps its own."""
        nodes, sign = [self.node[u] for u in able], -1 if x.consolidate else 1
        others = sorted((u for u in able if u not in x.devices), key=lambda u: (room[u], u))
        others.sort(key=lambda u: (sign * nodes.count(self.node[u]), self.node[u]))
        own = [u if u in able else others.pop(0) for u in x.devices]
        return tuple(own or others[: x.size.device_count])
