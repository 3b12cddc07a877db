"""Queues of KAI-Scheduler: their allocation, their deserved quota, and their rights to reclaim.

Each rule names its source in kai-scheduler v0.16.8 (commit 40da4c87106f28cc6ca3a1c08d89473474cbe3f3),
below ``pkg/scheduler/plugins/proportion``.  Only GPUs are modelled, because seats request little else and
their queues have no quota for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

UNLIMITED = -1.0
Json = dict[str, Any]


def counted(portion: float, count: int = 1) -> float:
    """Return the GPUs charged to a queue: the portion rounded to hundredths.

    ``../../api/resource_info/gpu_resource_requirment.go:265-269``
    """
    return float(math.floor(portion * 100 + 0.5) * count) / 100


def less_equal(one: float, other: float) -> bool:
    """Compare exactly; -1 is more than any number (``resource_share/resource_quantities.go:78-96``)."""
    if one == UNLIMITED:
        return other == UNLIMITED
    return other == UNLIMITED or one <= other


@dataclass
class Share:
    """One queue (``resource_share/resource_share.go:12-21``)."""

    name: str
    parent: str
    created: str
    priority: int
    deserved: float
    limit: float
    weight: float
    spec: Json
    fair: float = 0.0
    allocated: float = 0.0
    non_preemptible: float = 0.0
    requested: float = 0.0

    @property
    def requestable(self) -> float:
        """``resource_share/resource_share.go:40-45``"""
        return self.requested if self.limit == UNLIMITED else min(self.limit, self.requested)

    @property
    def allocatable(self) -> float:
        """``resource_share/resource_share.go:51-61``"""
        if self.deserved == UNLIMITED:
            return self.limit
        most = max(self.deserved, self.fair)
        return most if self.limit == UNLIMITED else min(self.limit, most)


@dataclass(frozen=True)
class Group:
    """A PodGroup as its queue sees it."""

    queue: str
    gpus: float
    preemptible: bool
    allocated: bool  # else pending


@dataclass
class Shares:
    """All queues of one scheduling cycle."""

    queues: dict[str, Share]
    total: float
    rng: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(cls, queues: Iterable[Json], groups: Iterable[Group], total: float, rng: random.Random) -> Shares:
        found: dict[str, Share] = {}
        for queue in queues:
            spec, meta = queue["spec"], queue["metadata"]
            gpu = spec.get("resources", {}).get("gpu", {})
            numbers = gpu.get("quota", 0), gpu.get("limit", UNLIMITED), gpu.get("overQuotaWeight", 1)
            place = meta["name"], spec.get("parentQueue", ""), meta["creationTimestamp"]
            found[meta["name"]] = Share(*place, spec.get("priority", 100), *map(float, numbers), spec)
        shares = cls(found, total, rng)
        everything = list(groups)
        rng.shuffle(everything)  # Go's order of maps: floats sum up differently (proportion.go:359-413)
        for group in everything:
            for queue_ in shares.path(group.queue):
                queue_.requested += group.gpus
                if group.allocated:
                    queue_.allocated += group.gpus
                    queue_.non_preemptible += 0 if group.preemptible else group.gpus
        shares._divide(total, "")
        return shares

    def path(self, name: str) -> list[Share]:
        """Return the queue and its ancestors, the queue first."""
        found = []
        while (queue := self.queues.get(name)) is not None:
            found.append(queue)
            name = queue.parent
        return found

    def _divide(self, total: float, parent: str) -> None:
        """Compute fair shares: quotas, then the rest by priority and weight (``proportion.go:415-435``)."""
        queues = [q for q in self.queues.values() if q.parent == parent]
        self.rng.shuffle(queues)
        left = total
        for queue in queues:  # resource_division/resource_division.go:96-113
            deserved = total if queue.deserved == UNLIMITED else queue.deserved
            queue.fair = min(deserved, queue.requestable)
            left -= queue.fair
        remaining: dict[int, dict[str, float]] = {}
        priorities = sorted({q.priority for q in queues}, reverse=True)
        for priority in priorities if left > 0 else ():  # resource_division.go:115-148
            same = [q for q in queues if q.priority == priority]
            left, remaining[priority] = _by_weight(left, same)
        for priority in priorities:
            for name, _ in sorted(
                remaining.get(priority, {}).items(), key=lambda x: (-x[1], self.queues[x[0]].created)
            ):
                if left > 0:  # resource_division.go:268-285
                    given = min(1.0, left)
                    self.queues[name].fair += given
                    left -= given
        for queue in queues:
            self._divide(queue.fair, queue.name)

    # ---- capacity ------------------------------------------------------------

    def refusal(self, queue: str, gpus: float, *, preemptible: bool) -> str:
        """Return why a PodGroup may not be placed at all, or "" if it may.

        ``capacity_policy/max_allowed_check.go:51-66``, ``capacity_policy/quota_check.go:26-78``
        """
        for share in self.path(queue):
            if share.limit != UNLIMITED and share.limit < share.allocated + gpus:
                return "OverLimit"
        return self.over_quota(queue, gpus, preemptible=preemptible)

    def over_quota(self, queue: str, gpus: float, *, preemptible: bool) -> str:
        """``capacity_policy/quota_check.go:26-78``"""
        if not preemptible:
            for share in self.path(queue):
                if share.deserved != UNLIMITED and share.deserved < share.non_preemptible + gpus:
                    return "NonPreemptibleOverQuota"
        return ""

    def allocate(self, queue: str, gpus: float, *, preemptible: bool) -> None:
        """Charge a placement of this cycle; a negative value releases (``proportion.go:455-501``)."""
        for share in self.path(queue):
            share.allocated += gpus
            share.non_preemptible += 0 if preemptible else gpus

    # ---- reclaim -------------------------------------------------------------

    def can_reclaim(self, queue: str, gpus: float, *, preemptible: bool) -> bool:
        """``reclaimable/reclaimable.go:31-55``"""
        share = self.queues[queue]
        if not less_equal(share.allocated + gpus, share.fair):
            return False
        return preemptible or less_equal(share.non_preemptible + gpus, share.deserved)

    def leveled(self, reclaimer: str, victim: str) -> tuple[Share, Share]:
        """Return the first ancestors in which two queues differ (``reclaimable/reclaimable.go:237-255``)."""
        one, other = self.path(reclaimer)[::-1], self.path(victim)[::-1]
        found = one[0], other[0]
        for pair in zip(one, other, strict=False):
            found = pair
            if pair[0].name != pair[1].name:
                break
        return found

    def is_candidate(self, reclaimer: str, gpus: float, victim: str) -> bool:
        """``reclaimable/filter_victims.go:15-57``"""
        mine, its = self.leveled(reclaimer, victim)
        if not less_equal(mine.allocated + gpus, mine.deserved):
            return not less_equal(its.allocated, its.allocatable)
        return its.deserved == UNLIMITED or its.allocated >= its.deserved

    def may_reclaim(
        self, reclaimer: str, gpus: float, preemptible: bool, victims: Iterable[tuple[str, float]]
    ) -> bool:
        """Return whether these victims may be evicted (``reclaimable/reclaimable.go:57-196``)."""
        left = {name: share.allocated for name, share in self.queues.items()}
        touched: set[str] = set()
        for queue, lost in victims:
            mine, its = self.leveled(reclaimer, queue)
            keeps_share = not less_equal(left[its.name], its.allocatable)  # strategies/strategies.go:91-93
            entitled = less_equal(mine.allocated + gpus, mine.deserved)  # strategies.go:61-105
            if not keeps_share and not (entitled and not less_equal(left[its.name], its.deserved)):
                return False
            for share in self.path(queue):
                left[share.name] -= lost
                touched.add(share.name)
        for mine in self.path(reclaimer):
            if not self._stays_below_siblings(mine, left, touched, gpus):
                return False
            if not preemptible and not less_equal(mine.non_preemptible + gpus, mine.deserved):
                return False
        return True

    def _stays_below_siblings(
        self, mine: Share, left: dict[str, float], touched: set[str], gpus: float
    ) -> bool:
        """Compare the saturation of the queue and its siblings (``reclaimable/reclaimable.go:199-235``)."""
        for name in touched:
            sibling = self.queues[name]
            if sibling.parent != mine.parent or name == mine.name or sibling.fair <= 0:
                continue
            ratio = _saturation(left[mine.name] + gpus, mine.fair)
            if ratio > 1 and ratio >= _saturation(left[name], sibling.fair):
                return False
        return True

    # ---- order ---------------------------------------------------------------

    def order(self, queue: str, gpus: float) -> tuple[Any, ...]:
        """Return the sort key of queues for a PodGroup of ``gpus``; for victims use 0, reversed.

        ``queue_order/queue_order.go:32-86``, from the root down: over the fair share in *all* resources
        (88-113), which seats never are; within quota; priority; share of the allocatable; age.
        """
        key: list[Any] = []
        for share in self.path(queue)[::-1]:
            starved = less_equal(share.allocated + gpus, share.deserved)
            allocatable = self.total if share.allocatable == UNLIMITED else share.allocatable
            dominant = (
                (share.allocated + gpus) / allocatable if allocatable else (share.allocated + gpus) * 1000
            )
            key += [not starved, -share.priority, dominant, share.created]
        return tuple(key)


def _saturation(allocated: float, fair: float) -> float:
    if fair == 0:
        return math.inf if allocated > 0 else 0.0
    return allocated / fair


def _by_weight(left: float, queues: list[Share]) -> tuple[float, dict[str, float]]:
    """Divide over-quota capacity by weight, in whole GPUs (``resource_division.go:168-226,287-309``)."""
    remaining: dict[str, float] = {}
    while left > 0:
        open_ = [
            q for q in queues if q.requested > q.fair and not (q.limit != UNLIMITED and q.limit <= q.fair)
        ]
        weights = sum(q.weight for q in open_)
        if not weights:
            break
        round_, again = left, False
        for queue in open_:
            if not queue.weight:
                continue
            share, wanted = round_ * queue.weight / weights, max(0.0, queue.requestable - queue.fair)
            given = wanted if wanted <= share else math.floor(share)
            remaining.pop(queue.name, None)
            if wanted > share and share > given:
                remaining[queue.name] = share - given
            queue.fair += given
            left -= given
            again = again or wanted < share
        if not again:
            break
    return left, remaining
