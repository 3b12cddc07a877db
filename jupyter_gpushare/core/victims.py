"""Whom to ask for room: who may be disturbed, for whom, and at what cost.

Cheapest first:

1. sessions whose owners offered their room, then idle ones, longest idle first
   (biggest first, where host memory cannot hold all of them: each one parked
   has to bring the most);
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
* a project *below its fair share* may take from jobs over quota (2-3) that have
  run for their minimum time, of projects above theirs (the others are *spared*);
  where a gang finds nothing so, because what others have too much lies apart,
  also *in exchange*: from smaller jobs that can go on elsewhere, whose projects
  take as much back from those above their share.  There jobs in quota are asked
  too, of projects that keep as much as their quota: it is an amount, not a place;
* a job may take from jobs of the same project that it outranks (2-3; `order`)
  and that have run for their minimum time, if it gains more than that costs,
  and unless these were owed the same room again before it (a job beyond quota
  does not displace what its project is guaranteed).

A lease that is just resuming is left alone until it runs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jupyter_gpushare.core import order
from jupyter_gpushare.core.board import Board, parked_bytes
from jupyter_gpushare.core.idle import eligible
from jupyter_gpushare.core.lines import Lines
from jupyter_gpushare.core.model import Kind, Lease, State, Survival, Why
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.room import Room


class Cost(enum.IntEnum):
    OFFERED = 0
    IDLE = 1
    SUSPENDED_JOB = 2
    STARTING_JOB = 3
    STOPPED_JOB = 4
    BUSY_SESSION = 5


class Victim:
    """A lease that would give its room away."""

    __slots__ = ("cost", "lease", "park", "rank", "why")

    def __init__(self, lease: Lease, cost: Cost, why: Why, *, park: bool, frees_bytes: int = 0) -> None:
        self.lease = lease
        self.cost = cost
        self.why = why
        self.park = park  # suspended, not stopped
        since_at = (lease.idle_since_at or 0.0) if cost <= Cost.IDLE else -lease.granted_at
        self.rank = (int(cost), -frees_bytes, since_at, lease.id)  # sorts victims, the cheapest first


def rank(victim: Victim) -> tuple[int, int, float, str]:
    return victim.rank


@dataclass(frozen=True, slots=True, eq=False)
class Rights:
    """On what terms a job asks for room; who has the same may ask the same leases.

    Made by `Asker.rights` only: there is one of each kind in a round.
    """

    project: str  # "": of no matter
    owed: bool  # its project is below quota
    below_share: bool  # its project is below its fair share
    lend: bool  # it may go where a session sleeps, or is put to sleep
    spared: frozenset[str]  # projects that nothing is taken from
    below_gpus: int = 0  # in exchange, from jobs of fewer GPUs; 0: not in exchange

    def there(self, room: Room) -> int:
        """What the job can count on without asking anybody."""
        there = room.free + room.coming - room.pledged  # as `Room.soon`, which this is asked for most
        if not self.lend:
            there -= room.asleep
        return there if self.owed else there - room.awaited


class Asker:
    """Knows who on a board may be asked."""

    def __init__(self, board: Board, lines: Lines) -> None:
        self.board = board
        self.memory_short = False  # an idle session was left alone for lack of host memory
        self.next_at: float | None = None  # when somebody may be asked who has not run for long enough
        self._lines = lines
        self._rights: dict[tuple[object, ...], Rights] = {}
        self._places: dict[Rights, set[Room]] = {}
        self._outranked: dict[tuple[str, order.Level], list[Lease]] = {}  # have run, by project and level
        self._known: dict[tuple[str, str], Victim | None] = {}  # by question and lease
        self._found: dict[Rights, dict[Room, list[Victim]]] = {}
        self._seen: dict[Rights, int] = {}  # how much of the board's log is in `_found`

    def rights(
        self, job: Lease, *, owed: bool, below_share: bool, lend: bool, spared: frozenset[str] = frozenset()
    ) -> Rights:
        """On what terms ``job`` may ask."""
        return self._the(Rights(job.project if owed or below_share else "", owed, below_share, lend, spared))

    def sparing(self, rights: Rights, more: frozenset[str]) -> Rights:
        """The same terms, without what these projects hold."""
        return self._the(replace(rights, spared=rights.spared | more))

    def in_exchange(self, rights: Rights, gpus: int) -> Rights:
        """The same terms for who takes room in exchange from jobs of fewer than ``gpus`` GPUs."""
        return self._the(replace(rights, spared=frozenset(), below_gpus=gpus))

    def _the(self, rights: Rights) -> Rights:
        key = rights.project, rights.owed, rights.below_share, rights.lend, rights.spared, rights.below_gpus
        return self._rights.setdefault(key, rights)

    def places(self, rights: Rights) -> set[Room]:
        """The devices on which there may be somebody to ask: few, as a rule, of many."""
        if rights not in self._places:
            found = self._places[rights] = set(self._idle_on) if rights.lend else set()
            if rights.project:
                asked = self.board.usable if rights.below_gpus else self._beyond_on
                found.update(
                    room for room in asked if any(self._may_take(x, rights) for x in self._held(room, rights))
                )
        return self._places[rights]

    @cached_property
    def _idle_on(self) -> dict[Room, list[Lease]]:
        board = self.board
        idle = (x for x in self._lines.idle.values() if eligible(x, board.settings, board.moment))
        return self._by_room(idle)

    @cached_property
    def _beyond_on(self) -> dict[Room, list[Lease]]:
        return self._by_room(self.board.standing.over_quota())

    def _by_room(self, leases: Iterable[Lease]) -> dict[Room, list[Lease]]:
        found: dict[Room, list[Lease]] = {}
        for lease in leases:
            for room in self.board.rooms_of(lease):
                if room.device.usable:
                    found.setdefault(room, []).append(lease)
        return found

    def on(self, room: Room, rights: Rights) -> list[Victim]:
        """Who on a device may be asked, the cheapest first."""
        found = self._found.get(rights)
        if found is None:
            found = self._found[rights] = {}
            self._seen[rights] = len(self.board.log)
        elif self._seen[rights] != len(self.board.log):
            for changed in self.board.log[self._seen[rights] :]:
                found.pop(changed, None)
            self._seen[rights] = len(self.board.log)
        victims = found.get(room)
        if victims is None:
            victims = found[room] = sorted(self._on(room, rights), key=rank)
        return victims

    def _on(self, room: Room, rights: Rights) -> Iterable[Victim]:
        asked: dict[str, Victim] = {}
        if rights.lend:
            for lease in self._idle_on.get(room, ()):
                if lease.id in room.holders and (victim := self._once(lease, self._lender)):
                    asked[lease.id] = victim
        if rights.project:
            over_quota = self._debtor if rights.owed else self._borrower
            for lease in self._held(room, rights):
                if lease.id in asked or lease.id not in room.holders or not self._may_take(lease, rights):
                    continue
                if victim := self._once(lease, over_quota):
                    asked[lease.id] = victim
        return asked.values()

    def _once(self, lease: Lease, ask: Callable[[Lease], Victim | None]) -> Victim | None:
        """What ``ask`` says of a lease: always the same, until `forget`."""
        key = ask.__name__, lease.id
        if key not in self._known:
            self._known[key] = ask(lease)
        return self._known[key]

    def _held(self, room: Room, rights: Rights) -> Iterable[Lease]:
        """Who on a device may hold what goes to a project."""
        return room.holders.values() if rights.below_gpus else self._beyond_on.get(room, ())

    def _may_take(self, lease: Lease, rights: Rights) -> bool:
        """Whether what a lease has may go to a project."""
        if lease.project == rights.project or lease.project in rights.spared:
            return False
        in_quota = lease.id in self.board.standing.in_quota
        if rights.below_gpus:
            moves = lease.device_count < rights.below_gpus and lease.survival is Survival.SIGTERM
            return moves and (lease.borrow or not in_quota)
        return not in_quota

    def forget(self) -> None:
        """Ask again: host memory is not what it was."""
        self._found.clear()
        self._known.clear()

    def for_owner(self, holder: Lease) -> Victim | None:
        if holder.kind is Kind.BUILD and (lender := self._lender(holder)):
            return lender
        return None if self.board.has_claim(holder) else self._holder(holder, Why.LENDER_RETURNED)

    def _debtor(self, holder: Lease) -> Victim | None:
        """A lease over quota, for a project below quota."""
        return self._holder(holder, Why.OVER_QUOTA)

    def _borrower(self, holder: Lease) -> Victim | None:
        """A lease over quota, for a project below its share."""
        return self.job(holder, Why.OVER_QUOTA) if self._has_run(holder) else None

    def juniors(self, job: Lease) -> Iterator[Victim]:
        """The jobs of its own project that ``job`` may preempt, the first to go first."""
        if job.devices:  # most often an awake session is there, and nobody to preempt
            jobs = self.board.standing.jobs.get(job.project, {})
            here = {id for room in self.board.rooms_of(job) for id in room.holders if id in jobs}
            if not here:
                return
        for lease in self.outranked(job):
            if (not job.devices or lease.id in here) and (victim := self.junior(lease, job.priority)):
                yield victim

    def outranked(self, job: Lease) -> Sequence[Lease]:
        """The jobs of its own project that come after ``job``, the first to go first; some may have left."""
        board = self.board
        key = job.project, order.level(job, board.moment, board.settings)
        if key not in self._outranked:
            worse = self._lines.outranked(*key, board.moment)
            self._outranked[key] = [x for x in worse if self._has_run(x)]
        return self._outranked[key]

    def junior(self, lease: Lease, priority: int) -> Victim | None:
        """A job that comes after one of its project with this priority, if it still holds its room."""
        if lease.id not in self.board.standing.jobs[lease.project]:
            return None
        return self._once(lease, self._lesser if lease.priority < priority else self._later)

    def _lesser(self, holder: Lease) -> Victim | None:
        return self.job(holder, Why.PRIORITY)

    def _later(self, holder: Lease) -> Victim | None:
        return self.job(holder, Why.ORDER)

    def to_move(self, project: str, holder: Lease) -> Victim | None:
        """A job of ``project`` that may be stopped where it is, to go on elsewhere."""
        movable = holder.project == project and holder.survival is Survival.SIGTERM
        return self.job(holder, Why.MOVED) if movable and self._has_run(holder) else None

    def _has_run(self, lease: Lease) -> bool:
        """Whether a job has had its minimum run time."""
        if lease.kind is not Kind.TRAIN:
            return False
        at = lease.granted_at + self.board.settings.min_run_s
        if at > self.board.moment:
            self.next_at = at if self.next_at is None else min(at, self.next_at)
        return at <= self.board.moment

    def job(self, lease: Lease, why: Why) -> Victim | None:
        """A job that holds room, if it can leave now."""
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
            return self.job(lease, why)
        return Victim(lease, Cost.BUSY_SESSION, why, park=True) if self._parkable(lease) else None

    def _lender(self, lease: Lease) -> Victim | None:
        board = self.board
        if not eligible(lease, board.settings, board.moment) or not board.can_park(lease):
            return None
        if parked_bytes(lease) > board.host_free:
            self.memory_short = True
            return None
        if lease.lend_now:
            return Victim(lease, Cost.OFFERED, Why.LEND_NOW, park=True)
        frees_bytes = 0
        if self._idle_exceed_memory:
            uuids = [room.device.uuid for room in board.rooms_of(lease)]
            frees_bytes = board.granted_bytes(uuids, held_by(lease))
        return Victim(lease, Cost.IDLE, Why.IDLE, park=True, frees_bytes=frees_bytes)

    @cached_property
    def _idle_exceed_memory(self) -> bool:
        """Whether host memory, as it was when the round began to ask, is too small for all idle sessions."""
        board = self.board
        idle = (x for x in self._lines.idle.values() if eligible(x, board.settings, board.moment))
        return sum(parked_bytes(x) for x in idle if board.can_park(x)) > board.host_free

    def _parkable(self, lease: Lease) -> bool:
        board = self.board
        return (
            lease.state is State.RUNNING
            and board.can_park(lease)
            and board.moment >= lease.retry_at
            and parked_bytes(lease) <= board.host_free + board.reserved.get(lease.id, 0)
        )
