"""Making room: the least disturbance that lets somebody have what is theirs to ask for.

Whom one may ask, and who is cheaper than whom, is in `victims`.  Between sets
of victims the dearest kind decides, then how many they are, then who.

Where that is not enough, a job may preempt others of its own project, the last
in their order first; and where all the room that it needs is there, but in
pieces, running jobs are moved together (`_by_moving`).  Both have a price: a
preemption costs `Settings.preempt_cost_s` of every GPU that changes hands, and
nobody is preempted for less gain than that (`order.gain_gpu_s`).

Nobody is disturbed in vain: either the whole room is made, or nothing is done;
who turns out not to be needed stays.  What is parked must find host memory: a
job that does not is stopped instead, a session never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jupyter_gpushare.core import order
from jupyter_gpushare.core.board import Board, parked_bytes
from jupyter_gpushare.core.gathering import Gathered, Gathering, Sweep
from jupyter_gpushare.core.lines import Lines
from jupyter_gpushare.core.model import WHOLE_GPU, Kind, Lease, Order, Why
from jupyter_gpushare.core.moving import Mover
from jupyter_gpushare.core.placement import Layout, Spot, demand
from jupyter_gpushare.core.prices import Cheapest, Offers
from jupyter_gpushare.core.quota import Shares, held_by, size_of
from jupyter_gpushare.core.room import Room
from jupyter_gpushare.core.victims import Asker, Cost, Rights, Victim, rank

# So often room is looked for once more without those who have not enough too much.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Making:
    """Room for one lease, and who must give it."""

    spot: Spot
    victims: tuple[Victim, ...]


class Maker:
    """Makes room on one board."""

    def __init__(self, board: Board, layout: Layout, lines: Lines, shares: Shares) -> None:
        self.board = board
        self.obstacle = Why.NO_ROOM  # why the last `for_job` came to nothing
        self.asker = Asker(board, lines)
        self._layout = layout
        self._shares = shares
        self._offered: dict[tuple[object, ...], Offers] = {}
        self._cheapest: dict[tuple[object, ...], Cheapest] = {}
        self._sweeps: dict[tuple[object, ...], Sweep] = {}
        self._memory = board.host_free  # as it was when victims were looked for
        self._free = 0  # whole devices that are free, as the log of the board was so long
        self._counted = -1
        self._overdrawn: frozenset[str] = frozenset()  # from whom the last choice took too much

    def for_owner(self, lease: Lease) -> tuple[Victim, ...] | None:
        """Whom to ask so that a sleeping session can wake on its own devices; None: nobody helps."""
        chosen: list[Victim] = []
        shorts = [(room, held_by(lease) - room.soon) for room in self.board.rooms_of(lease)]
        for room, short in shorts:
            victims = [v for x in room.holders.values() if (v := self.asker.for_owner(x))]
            if (picked := _enough(room, short, sorted(victims, key=rank), chosen)) is None:
                return None
            chosen = picked
        return self._afford(_least(shorts, chosen), 0)

    def for_limit(self, lease: Lease, over_limit: int) -> tuple[Victim, ...] | None:
        """Which jobs of its own project make way for a session, where a limit is in its way."""
        held = self.board.standing.jobs.get(lease.project, {}).values()
        jobs = sorted((v for x in held if (v := self.asker.job(x, Why.PRIORITY))), key=rank)
        return _enough_for_limit(lease.project, over_limit, (), jobs)

    def for_job(
        self, job: Lease, *, owed: bool, below_share: bool, over_limit: int, coming: Spot | None
    ) -> Making | None:
        """The least disturbance that makes room for ``job``; None: nothing helps.

        ``owed``: its project is below quota; ``below_share``: at least below its
        fair share.  ``over_limit``: how much must leave its own project as well.
        ``coming``: room that it could have but for that.
        """
        self.obstacle = Why.NO_ROOM
        # Where nobody has more than its share, there is nothing to take.
        below_share = below_share and not owed and self._shares.beyond() > 0
        spared = self._shares.within() if below_share else frozenset()
        ask = partial(self.asker.rights, job, owed=owed, below_share=below_share)
        made = self._for_job(job, ask(lend=job.borrow, spared=spared), over_limit, coming)
        if made is None and self.obstacle is Why.HOST_MEMORY and self._memory != self.board.host_free:
            self.asker.forget()
            self._offered.clear()
            self._cheapest.clear()
            self._sweeps.clear()
            self._memory = self.board.host_free
            made = self._for_job(job, ask(lend=job.borrow, spared=spared), over_limit, coming)
        if made is None and (self.obstacle is Why.HOST_MEMORY or self.asker.memory_short):
            made = self._for_job(job, ask(lend=False, spared=spared), over_limit, coming)
            self.obstacle = Why.HOST_MEMORY
        return made

    def _for_job(self, job: Lease, rights: Rights, over_limit: int, coming: Spot | None) -> Making | None:
        if over_limit:
            return self._under_limit(job, rights, over_limit, coming)
        made = self._from_others(job, rights)
        if made is None and rights.spared and job.device_count > 1:
            # What others have too much of may lie apart: somebody takes that instead.
            made = self._from_others(job, self.asker.in_exchange(rights, job.device_count))
        return made or self._by_rank(job, rights)

    def _from_others(self, job: Lease, rights: Rights) -> Making | None:
        made, tries = self._try_others(job, rights), _TRIES
        while made is None and self._overdrawn and tries:
            # The cheapest would take too much of somebody: is there room without them?
            tries -= 1
            rights = self.asker.sparing(rights, self._overdrawn)
            made = self._try_others(job, rights)
        return made

    def _try_others(self, job: Lease, rights: Rights) -> Making | None:
        self._overdrawn = frozenset()
        found = self._cheapest_of_others(job, rights)
        return self._decide(job, *found, rights) if found else None

    def _cheapest_of_others(self, job: Lease, rights: Rights) -> Gathered | None:
        """Where room costs least without the job's juniors, and who has to leave there."""
        places = self.asker.places(rights)
        if not places:
            return None
        offers = self._offers(job, rights)
        if job.devices:
            rooms = self.board.rooms_of(job)
            if any(offers.on(room).price is None for room in rooms):
                return None
            union = list({v.lease.id: v for room in rooms for v in offers.on(room).victims}.values())
        else:
            key = offers, job.device_count, job.consolidate
            if key not in self._cheapest:
                self._cheapest[key] = Cheapest(self.board, self._layout, offers, job, places)
            best = self._cheapest[key].best()
            if best is None:
                return None
            rooms, union = best
        return rooms, _least([(room, offers.missing(room)) for room in rooms], union)

    def _offers(self, job: Lease, rights: Rights) -> Offers:
        key = rights, job.fraction_milli, job.memory_bytes, job.profile, held_by(job) if job.devices else 0
        if key not in self._offered:
            self._offered[key] = Offers(self.board, self.asker, rights, job)
        return self._offered[key]

    def _decide(
        self, job: Lease, rooms: list[Room], victims: tuple[Victim, ...], rights: Rights
    ) -> Making | None:
        """Take these devices of these victims, if that is right, affordable and worth it."""
        need = held_by(job) if job.devices else demand(job, rooms[0].device)
        lends = self._lends(rooms, need, victims)
        if not job.borrow and (lends or need * len(rooms) > self.board.account(job).unborrowed_left):
            return None
        if not self._lasts(job, need * len(rooms), victims):
            return None
        if not rights.owed:
            taken = [v.lease for v in victims if v.why is Why.OVER_QUOTA]
            if rights.below_gpus and sum(map(size_of, taken)) > self._shares.beyond():
                return None
            too_much_of = self._shares.indebted if rights.below_gpus else self._shares.overdrawn
            if overdrawn := too_much_of(taken):
                self._overdrawn = overdrawn
                return None
        if not self._is_worth_it(job, victims):
            self.obstacle = Why.NOT_WORTH_IT
            return None
        spot = Spot(job.devices or tuple(r.device.uuid for r in rooms), need)
        reserve = 0
        if lends:
            reserve = self.board.reserve_needed(job, spot.devices, need)
        settled = self._afford(victims, reserve)
        return None if settled is None else Making(spot, settled)

    def _is_worth_it(self, job: Lease, victims: Iterable[Victim]) -> bool:
        """Whether ``job`` gains what it costs to preempt others of its project by the order of jobs."""
        settings = self.board.settings
        disturbed = sum(size_of(v.lease) for v in victims if v.why in (Why.ORDER, Why.MOVED)) / WHOLE_GPU
        cost = disturbed * settings.preempt_cost_s
        return not cost or order.gain_gpu_s(job, self.board.moment, settings) >= cost

    def _by_rank(self, job: Lease, rights: Rights) -> Making | None:
        """Room from whoever may be asked anyway and, the last in their order first, from its juniors."""
        found = self._gather(job, rights) or self._by_moving(job)
        return self._decide(job, *found, rights) if found else None

    def _gather(self, job: Lease, rights: Rights) -> Gathered | None:
        offers = self._offers(job, rights)
        if job.devices or job.device_count > 1:
            juniors = self.asker.juniors(job)
            return Gathering(self.board, self._layout, job, offers).gather(juniors)
        outranked = self.asker.outranked(job)
        key = offers, id(outranked)
        if key not in self._sweeps:
            ask = partial(self.asker.junior, priority=job.priority)
            self._sweeps[key] = Sweep(self.board, offers, outranked, ask)
        return self._sweeps[key].first()

    def _by_moving(self, job: Lease) -> tuple[list[Room], tuple[Victim, ...]] | None:
        """Room for a gang, where it is there in pieces."""
        preempts = self.board.settings.order in (Order.LAS, Order.SRTF)
        if job.devices or job.device_count == 1 or not job.consolidate or not preempts:
            return None
        if self._counted != len(self.board.log):
            self._free = sum(room.soon >= WHOLE_GPU for room in self.board.usable)
            self._counted = len(self.board.log)
        if not self._free:
            return None  # nobody can be moved anywhere
        juniors = {v.lease.id: v for v in self.asker.juniors(job)}
        if self._free + sum(v.lease.device_count for v in juniors.values()) < job.device_count:
            return None
        movable = partial(self.asker.to_move, job.project)
        return Mover(self._layout, job, juniors, movable).make()

    def _under_limit(self, job: Lease, rights: Rights, over_limit: int, coming: Spot | None) -> Making | None:
        """Room for which so much has to leave the job's own project."""
        juniors = list(self.asker.juniors(job))
        rooms = [self.board.rooms[u] for u in coming.devices] if coming else []
        chosen: tuple[Victim, ...] = ()
        if not coming:
            found = self._cheapest_of_others(job, rights) or self._gather(job, rights)
            if found is None:
                return None
            rooms, chosen = found
        enough = _enough_for_limit(job.project, over_limit, chosen, juniors)
        return None if enough is None else self._decide(job, rooms, enough, rights)

    def _lasts(self, job: Lease, size: int, victims: Sequence[Victim]) -> bool:
        """Whether no preempted junior would be served again before ``job`` gets the room.

        It would, where the project may have it within quota or fair share, but not ``job``.
        """
        sizes = [size_of(v.lease) for v in victims if v.why in (Why.PRIORITY, Why.ORDER)]
        account = self.board.account(job)
        own = [v for v in victims if v.lease.project == job.project and v.why is not Why.MOVED]
        left = account.use - sum(size_of(v.lease) for v in own)
        for most in (account.project.quota_milli, self._shares.of(job.project)):
            if left + size > most and any(left + own <= most for own in sizes):
                return False
        return True

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


def _enough(room: Room, short: int, victims: list[Victim], chosen: list[Victim]) -> list[Victim] | None:
    """``chosen`` and the first of ``victims`` that together free what is ``short`` on a device."""
    picked = list(chosen)
    names = {v.lease.id for v in chosen}
    if chosen:
        short -= _given(room, chosen)
    for v in victims:
        if short <= 0:
            break
        if v.lease.id not in names:
            picked.append(v)
            short -= held_by(v.lease)
    return picked if short <= 0 else None


def _least(shorts: Sequence[tuple[Room, int]], victims: list[Victim]) -> tuple[Victim, ...]:
    """``victims`` without those whose room is not needed, the dearest dropped first."""
    kept = sorted(victims, key=rank)
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
    for v in more:
        if over_limit <= 0:
            break
        if v.lease.id in names:
            continue
        chosen = (*chosen, v)
        over_limit -= size_of(v.lease)
    return chosen if over_limit <= 0 else None


def _given(room: Room, victims: Iterable[Victim]) -> int:
    return sum(held_by(v.lease) for v in victims if room.device.uuid in v.lease.devices)
