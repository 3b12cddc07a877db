"""Making room: whom to disturb, as few and as cheaply as possible.

Cheapest first:

1. sessions whose owners offered their room, then idle ones, longest idle first;
2. jobs that can be suspended, last in first out;
3. jobs that must start again: those that are only being started, then the
   last in;
4. busy sessions beyond quota: suspended, never stopped.

Who may be asked depends on who needs the room:

* the *owner* of lent room takes it from all who hold it without a claim (2-4),
  on the devices of the claim only; an idle neighbour there (1) goes before a
  borrower, who would have that room next;
* anybody may have the room of an idle session (1), if host memory has room for
  its bytes and for those of a suspendable job that takes its place;
* a project *below quota* may take from leases over quota (2-4);
* a job may take from jobs of the same project with a lower *priority* (2-3),
  unless these were owed the same room again before it (a job beyond quota does
  not displace what its project is guaranteed).

Nobody is disturbed in vain: either the whole room is made, or nothing is done.
A lease that is just resuming is left alone until it runs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jupyter_gpushare.core.board import Board, Room, parked_bytes
from jupyter_gpushare.core.model import Kind, Lease, Settings, State, Survival, Why
from jupyter_gpushare.core.placement import Spot, demand, tiers
from jupyter_gpushare.core.quota import held_by, size_of

RoomOf = Callable[[Room], int]


class Cost(enum.IntEnum):
    OFFERED = 0
    IDLE = 1
    SUSPENDED_JOB = 2
    STARTING_JOB = 3
    STOPPED_JOB = 4
    BUSY_SESSION = 5


@dataclass(frozen=True, slots=True)
class Victim:
    """A lease that would give its room away."""

    lease: Lease
    cost: Cost
    why: Why
    park: bool  # suspended, not stopped

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts victims, the cheapest first."""
        if self.cost <= Cost.IDLE:
            return self.cost, self.lease.idle_since_at or 0.0, self.lease.id
        return self.cost, -self.lease.granted_at, self.lease.id


@dataclass(frozen=True, slots=True)
class Making:
    """Room for one lease, and who must give it."""

    spot: Spot
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class _Ask:
    """On what terms a job asks for room."""

    owed: bool  # its project is below quota
    over_limit: int  # how much must leave its own project
    lend: bool  # it may go where a session sleeps, or is put to sleep

    def there(self, room: Room) -> int:
        """What the job can count on without asking anybody."""
        return room.soon if self.lend else room.soon - room.asleep


def eligible_at(lease: Lease, settings: Settings) -> float | None:
    """The moment from which a running session's room may be lent; None: not while it is as it is."""
    if lease.kind is not Kind.BUILD or lease.state is not State.RUNNING or not lease.suspendable:
        return None
    if not lease.lend_now and lease.idle_since_at is None:
        return None
    idle_at = 0.0 if lease.lend_now else (lease.idle_since_at or 0.0) + settings.idle_timeout_s
    return max(idle_at, lease.keep_until_at, lease.retry_at)


def eligible(lease: Lease, settings: Settings, now: float) -> bool:
    """Whether the room of this session may be lent now, should anybody need it."""
    at = eligible_at(lease, settings)
    return at is not None and now >= at


def warn_at(lease: Lease, settings: Settings) -> float | None:
    """The moment from which its owner should know, if somebody waits for room."""
    at = eligible_at(lease, settings)
    return None if at is None else at - min(300.0, settings.idle_timeout_s / 3)


class Maker:
    """Finds victims on one board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.obstacle = Why.NO_ROOM  # why the last `for_job` came to nothing

    # -- who can be asked

    def _lender(self, lease: Lease) -> Victim | None:
        board = self.board
        if not eligible(lease, board.settings, board.moment) or not board.can_park(lease):
            return None
        if parked_bytes(lease) > board.host_free:
            self.obstacle = Why.HOST_MEMORY
            return None
        if lease.lend_now:
            return Victim(lease, Cost.OFFERED, Why.LEND_NOW, park=True)
        return Victim(lease, Cost.IDLE, Why.IDLE, park=True)

    def _parkable(self, lease: Lease) -> bool:
        board = self.board
        return (
            lease.state is State.RUNNING
            and board.can_park(lease)
            and board.moment >= lease.retry_at
            and parked_bytes(lease) <= board.host_free + board.reserved.get(lease.id, 0)
        )

    def _job(self, lease: Lease, why: Why) -> Victim | None:
        if lease.state is State.GRANTED:
            return Victim(lease, Cost.STARTING_JOB, why, park=False)
        if lease.state is not State.RUNNING:
            return None
        if lease.survival is Survival.SUSPEND and self._parkable(lease):
            return Victim(lease, Cost.SUSPENDED_JOB, why, park=True)
        return Victim(lease, Cost.STOPPED_JOB, why, park=False)

    def _holder(self, lease: Lease, why: Why) -> Victim | None:
        """A lease that holds room without a claim."""
        if lease.kind is Kind.TRAIN:
            return self._job(lease, why)
        return Victim(lease, Cost.BUSY_SESSION, why, park=True) if self._parkable(lease) else None

    def _for_owner(self, holder: Lease) -> Victim | None:
        if holder.kind is Kind.BUILD and (lender := self._lender(holder)):
            return lender
        return None if self.board.has_claim(holder) else self._holder(holder, Why.LENDER_RETURNED)

    def _for_job(self, holder: Lease, job: Lease, *, owed: bool, lend: bool) -> Victim | None:
        board = self.board
        if lend and holder.kind is Kind.BUILD and (lender := self._lender(holder)):
            return lender
        if owed and holder.project != job.project and holder.id not in board.standing.in_quota:
            return self._holder(holder, Why.OVER_QUOTA)
        if outranks(job, holder) and board.moment - holder.granted_at >= board.settings.min_run_s:
            return self._job(holder, Why.PRIORITY)
        return None

    # -- whom to choose

    def for_owner(self, lease: Lease) -> tuple[Victim, ...] | None:
        """Whom to ask so that a sleeping session can wake on its own devices; None: nobody helps."""
        chosen: list[Victim] = []
        shorts = [(room, held_by(lease) - room.soon) for room in self.board.rooms_of(lease)]
        for room, short in shorts:
            victims = [v for x in room.holders if (v := self._for_owner(x))]
            if (picked := _enough(room, short, victims, chosen)) is None:
                return None
            chosen = picked
        return self._afford(_least(shorts, chosen), 0)

    def for_limit(self, lease: Lease, over_limit: int) -> tuple[Victim, ...] | None:
        """Which jobs of its own project make way for a session, where a limit is in its way."""
        jobs = [v for x in self._jobs_of(lease.project) if (v := self._job(x, Why.PRIORITY))]
        return _enough_for_limit(lease.project, over_limit, (), jobs)

    def _jobs_of(self, project: str) -> list[Lease]:
        return list(self.board.jobs.get(project, {}).values())

    def for_job(self, job: Lease, rooms: Sequence[Room], *, owed: bool, over_limit: int) -> Making | None:
        """The least disturbance that makes room for ``job`` on some of ``rooms``; None: nothing helps.

        ``owed``: its project is below quota.  ``over_limit``: how much must
        leave its own project as well.
        """
        self.obstacle = Why.NO_ROOM
        made = self._for_job_on(job, rooms, _Ask(owed, over_limit, lend=True))
        if made is None and self.obstacle is Why.HOST_MEMORY:
            made = self._for_job_on(job, rooms, _Ask(owed, over_limit, lend=False))
        return made

    def _for_job_on(self, job: Lease, rooms: Sequence[Room], ask: _Ask) -> Making | None:
        offers: dict[str, tuple[tuple[object, ...], list[Victim]]] = {}
        for room in rooms:
            need = demand(job, room.device) if not job.devices else held_by(job)
            victims = [v for x in room.holders if (v := self._for_job(x, job, owed=ask.owed, lend=ask.lend))]
            picked = _enough(room, need - ask.there(room), victims, [])
            if picked is not None:
                spare = ask.there(room) + sum(held_by(v.lease) for v in picked) - need
                offers[room.device.uuid] = (*_price(picked), spare, room.device.uuid), picked
        best: tuple[tuple[object, ...], list[Room]] | None = None
        count = len(job.devices) or job.device_count
        for tier, sets in enumerate([[rooms]] if job.devices else tiers(job, rooms)):
            for group in sets:
                able = sorted(
                    (r for r in group if r.device.uuid in offers), key=lambda r: offers[r.device.uuid][0]
                )[:count]
                if len(able) < count:
                    continue
                union = _union(offers[r.device.uuid][1] for r in able)
                price = (*_price(union), tier, able[0].device.uuid)
                if best is None or price < best[0]:
                    best = price, able
        if best is None:
            return None
        return self._settle(job, best[1], _union(offers[r.device.uuid][1] for r in best[1]), ask)

    def _settle(self, job: Lease, rooms: list[Room], union: list[Victim], ask: _Ask) -> Making | None:
        """Drop who is not needed, and see that host memory holds what would be parked."""
        need = held_by(job) if job.devices else demand(job, rooms[0].device)
        victims = _least([(room, need - ask.there(room)) for room in rooms], union)
        if ask.over_limit:
            jobs = self._jobs_of(job.project)
            juniors = [v for x in jobs if (v := self._for_job(x, job, owed=False, lend=False))]
            if (more := _enough_for_limit(job.project, ask.over_limit, victims, juniors)) is None:
                return None
            victims = more
        if not self._lasts(job, need * len(rooms), victims):
            return None
        spot = Spot(job.devices or tuple(r.device.uuid for r in rooms), need)
        reserve = 0
        if self._lends(rooms, need, victims):
            reserve = self.board.reserve_needed(job, spot.devices, need)
        settled = self._afford(victims, reserve)
        return None if settled is None else Making(spot, settled)

    def _lasts(self, job: Lease, size: int, victims: Iterable[Victim]) -> bool:
        """Whether a preempted junior would not be owed the very room again before ``job`` gets it."""
        juniors = [v.lease for v in victims if v.why is Why.PRIORITY]
        account = self.board.account(job)
        left = sum(size_of(x) for x in juniors)
        return account.is_below_quota(size - left) or not any(
            account.is_below_quota(size_of(x) - left) for x in juniors
        )

    def _afford(self, victims: Sequence[Victim], reserve: int) -> tuple[Victim, ...] | None:
        """``victims`` such that host memory holds who is parked, and ``reserve``; None: it cannot.

        A job that finds no host memory is stopped instead; a session never is.
        """
        left = self.board.host_free - reserve
        left += sum(self.board.reserved.get(v.lease.id, 0) for v in victims)
        settled = []
        for v in victims:
            if v.park and parked_bytes(v.lease) <= left:
                left -= parked_bytes(v.lease)
                settled.append(v)
            elif v.lease.kind is Kind.TRAIN:
                settled.append(Victim(v.lease, Cost.STOPPED_JOB, v.why, park=False))
            else:
                break
        if len(settled) < len(victims) or (reserve and left < 0):
            self.obstacle = Why.HOST_MEMORY
            return None
        return tuple(settled)

    def _lends(self, rooms: Iterable[Room], need: int, victims: Iterable[Victim]) -> bool:
        """Whether the room so made would be somebody's who sleeps."""
        for room in rooms:
            here = [v.lease for v in victims if room.device.uuid in v.lease.devices]
            unclaimed = room.soon - room.asleep
            unclaimed += sum(held_by(x) for x in here if not self.board.has_claim(x))
            if unclaimed < need:
                return True
        return False


def outranks(job: Lease, holder: Lease) -> bool:
    """Whether ``job`` may take the room of ``holder``, a job of the same project."""
    return holder.kind is Kind.TRAIN and holder.project == job.project and holder.priority < job.priority


def _enough(room: Room, short: int, victims: list[Victim], chosen: list[Victim]) -> list[Victim] | None:
    """``chosen`` and the cheapest of ``victims`` that together free what is ``short`` on a device."""
    picked = list(chosen)
    short -= _given(room, chosen)
    for v in sorted((v for v in victims if v not in chosen), key=lambda v: v.rank):
        if short <= 0:
            break
        picked.append(v)
        short -= held_by(v.lease)
    return picked if short <= 0 else None


def _least(shorts: Sequence[tuple[Room, int]], victims: list[Victim]) -> tuple[Victim, ...]:
    """``victims`` without those whose room is not needed, the dearest dropped first."""
    kept = sorted(victims, key=lambda v: v.rank)
    for v in sorted(victims, key=lambda v: (-v.cost, held_by(v.lease), v.rank)):
        rest = [x for x in kept if x is not v]
        if all(_given(room, rest) >= short for room, short in shorts):
            kept = rest
    return tuple(kept)


def _enough_for_limit(
    project: str, over_limit: int, chosen: tuple[Victim, ...], more: list[Victim]
) -> tuple[Victim, ...] | None:
    """``chosen`` and as many of ``more`` as bring the project under its limit; None: it stays above."""
    over_limit -= sum(size_of(v.lease) for v in chosen if v.lease.project == project)
    names = {v.lease.id for v in chosen}
    for v in sorted((v for v in more if v.lease.id not in names), key=lambda v: v.rank):
        if over_limit <= 0:
            break
        chosen = (*chosen, v)
        over_limit -= size_of(v.lease)
    return chosen if over_limit <= 0 else None


def _given(room: Room, victims: Iterable[Victim]) -> int:
    return sum(held_by(v.lease) for v in victims if room.device.uuid in v.lease.devices)


def _union(lists: Iterable[list[Victim]]) -> list[Victim]:
    by_id = {v.lease.id: v for victims in lists for v in victims}
    return sorted(by_id.values(), key=lambda v: v.rank)


def _price(victims: Sequence[Victim]) -> tuple[object, ...]:
    """Compares sets of victims: the dearest kind first, then how many, then who."""
    ranks = sorted(v.rank for v in victims)
    return max((v.cost for v in victims), default=-1), len(ranks), tuple(ranks)
