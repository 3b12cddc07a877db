"""Decide what to do next: a snapshot in, a list of actions out.

`plan` is called by the broker with real leases and by the simulator with a
trace.  It is called again whenever something changed or failed, so it never
assumes that an earlier action took place.  It reads states, not history, and
counts room that is on its way out.

The rules, in the order in which they bind:

1. *Owners*: a sleeping session whose processes want the GPU gets its claim
   back; whoever holds that room without a claim makes way.
2. *New sessions* within quota get their claim, awake if the room is free,
   asleep if it is lent; beyond quota they start on free room that nobody
   claims, or not at all.  They never wait: who asks gets an answer.
3. *Guests*: sleeping sessions beyond quota wake when unclaimed room is free.
4. *Jobs*, waiting or suspended: projects below quota first, then by weight;
   free room first, then room on its way, then room that others must give
   (`making`).  What does not fit blocks nobody.

What is decided for one is gone for the next: all rules work on one `Board`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_gpushare.core import order
from jupyter_gpushare.core.board import Board, Room
from jupyter_gpushare.core.making import Maker
from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Action,
    Cluster,
    Grant,
    Kind,
    Lease,
    Plan,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.placement import Index, Layout, RoomOf, Spot, demand, find
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.victims import Victim, eligible_at

# What decides whether two jobs of one project have the same chance.
Shape = tuple[object, ...]


def plan(cluster: Cluster, now: float) -> Plan:
    """Return what to do now, most important first, and when to ask again.

    Actions take only what is free at ``now``.  Room that is on its way is kept
    for the lease it was asked for, and granted by a later call.
    """
    done = Round(cluster, now).run()
    return Plan(tuple(done.actions), done.next_at)


@dataclass(frozen=True, slots=True)
class Waiting:
    """That a lease got nothing in a round."""

    why: Why


_WAITING = {why: Waiting(why) for why in Why}


class Round:
    """One application of all rules, kept for those who ask why."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.now = now
        self.board = Board(cluster, now)
        self.layout = Layout(self.board.usable)
        self.maker = Maker(self.board, self.layout)
        self.actions: list[Action] = []
        self.waiting: dict[str, Waiting] = {}  # who got nothing, in the order in which they would be served
        self.next_at: float | None = None
        self._asked: list[Victim] = []
        self._hopeless: dict[Shape, Why] = {}
        self._possible: dict[Shape, bool] = {}
        self._indexes: dict[RoomOf, Index] = {}
        self._sizes: dict[int, int] = {}  # thousandths, by bytes asked for

    def run(self) -> Round:
        """Apply all rules."""
        owners, sessions, guests, jobs = self._census(self.board.cluster.leases)
        self._serve_people(owners, sessions)
        for lease in sorted(guests, key=order.session_key):
            self._wake_guest(lease)
        self._serve(jobs)
        self._spare()
        if self.waiting:
            self._look_ahead(self.board.cluster.leases)
        return self

    def run_sessions(self) -> Round:
        """Apply the rules up to new sessions: what one more session would find."""
        owners, sessions, _, _ = self._census(self.board.cluster.leases)
        self._serve_people(owners, sessions)
        return self

    def _serve_people(self, owners: list[Lease], sessions: list[Lease]) -> None:
        for lease in sorted(owners, key=order.session_key):
            self._wake_owner(lease)
        self._spare()
        for lease in sorted(sessions, key=order.session_key):
            if self._backs_off(lease):
                continue
            found = self.session_grant(lease)
            if isinstance(found, Why):
                self._wait(lease, found)
            else:
                self._start_session(lease, found)

    def _census(self, leases: Iterable[Lease]) -> tuple[list[Lease], ...]:
        owners: list[Lease] = []
        sessions: list[Lease] = []
        guests: list[Lease] = []
        jobs: list[Lease] = []
        for lease in leases:
            if lease.cancelled:
                continue
            if lease.kind is Kind.TRAIN:
                if lease.state is State.PENDING or (lease.state is State.SUSPENDED and lease.devices):
                    jobs.append(lease)
            elif lease.state is State.PENDING:
                sessions.append(lease)
            elif lease.state is State.SUSPENDED and lease.wanted and lease.devices:
                (owners if self.board.has_claim(lease) else guests).append(lease)
        return owners, sessions, guests, jobs

    # -- build sessions

    def _wake_owner(self, lease: Lease) -> None:
        """Wake a session on its claim, or keep that room for it and ask others to leave."""
        board, held = self.board, held_by(lease)
        if not board.is_whole(lease):
            self._wait(lease, Why.DEVICE_BROKEN)
            return
        over = self._over_own_limit(lease)
        if over or any(room.now < held for room in board.rooms_of(lease)):
            victims = self.maker.for_owner(lease)
            self._wait(lease, Why.NO_ROOM if victims is None else Why.WAITS_FOR_ROOM)
            self._ask(victims or (), lease)
        elif not self._backs_off(lease):
            self.actions.append(Resume(lease.id, Why.WANTED))
            board.take(lease, lease.devices, held)
            return
        board.pledge(lease, lease.devices, held)

    def _over_own_limit(self, lease: Lease) -> bool:
        """Whether jobs of its own project must leave before a session may wake; they are told to.

        A limit that no job is in the way of does not keep an owner from a claim.
        """
        account = self.board.account(lease)
        if not account.over_limit(0):
            return False
        victims = self.maker.for_limit(lease, account.over_limit_soon(0))
        self._ask(victims or (), lease, binding=True)
        return bool(victims or account.leaving)

    def session_grant(self, lease: Lease) -> Grant | Why:
        """What a new session gets at this point of the round, or why it gets nothing.

        Within quota, room that it can claim: awake where that is free now,
        else asleep.  Beyond quota, only free room that nobody claims and that
        it can give back.
        """
        account = self.board.account(lease)
        quota_left = account.project.quota_milli - account.claimed
        spot = find(lease, self.layout, _claimable_now, quota_left)
        if spot and not account.over_limit(spot.size_milli):
            return Grant(lease.id, spot.devices, spot.held_milli, Why.CLAIM)
        if spot := spot or find(lease, self.layout, _claimable, quota_left):
            return Grant(lease.id, spot.devices, spot.held_milli, Why.CLAIM, asleep=True)
        if spot := find(lease, self.layout, _unclaimed_returnable):
            if account.over_limit(spot.size_milli):
                return Why.PROJECT_LIMIT
            return Grant(lease.id, spot.devices, spot.held_milli, Why.FREE_ROOM, borrowed=True)
        return self._unplaced(lease)

    def _start_session(self, lease: Lease, grant: Grant) -> None:
        self.actions.append(grant)
        if grant.asleep:
            self.board.take_asleep(lease, grant.devices, grant.held_milli)
        else:
            self.board.take(lease, grant.devices, grant.held_milli, claim=not grant.borrowed)

    def _unplaced(self, lease: Lease) -> Why:
        """Why a lease that finds no room now finds none."""
        board = self.board
        if find(lease, self.layout, _whole):
            return Why.NO_ROOM
        return Why.DEVICE_BROKEN if find(lease, Layout(list(board.rooms.values())), _whole) else Why.TOO_LARGE

    def _wake_guest(self, lease: Lease) -> None:
        board, held = self.board, held_by(lease)
        rooms = board.rooms_of(lease)
        if not board.is_whole(lease):
            self._wait(lease, Why.DEVICE_BROKEN)
        elif any(room.unclaimed < held for room in rooms):
            self._wait(lease, Why.NO_ROOM)
        elif board.account(lease).over_limit(held * len(rooms)):
            self._wait(lease, Why.PROJECT_LIMIT)
        elif not self._backs_off(lease):
            self.actions.append(Resume(lease.id, Why.WANTED))
            board.take(lease, lease.devices, held)

    # -- jobs

    def would_start(self, job: Lease) -> bool:
        """Whether a new job would start at this point of the round."""
        spot = self._spot(job, _now)
        return spot is not None and not self.board.account(job).over_limit(spot.size_milli)

    def _serve(self, jobs: list[Lease]) -> None:
        """Offer room to the jobs: first what projects are owed, then the rest by weight."""
        queues: dict[str, list[Lease]] = {}
        for lease in sorted(jobs, key=order.job_key):
            queues.setdefault(lease.project, []).append(lease)
        rest = self._serve_queues(queues, owed=True)
        self._serve_queues(rest, owed=False)

    def _serve_queues(self, queues: dict[str, list[Lease]], *, owed: bool) -> dict[str, list[Lease]]:
        """Serve the projects in turn; return the jobs that were passed over, as they are not owed."""
        passed: dict[str, list[Lease]] = {name: [] for name in queues}
        left = {name: iter(queue) for name, queue in queues.items()}
        heap = [(self._turn(queue[0], owed), name) for name, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            _, name = heapq.heappop(heap)
            asked = len(self.actions)
            for job in left[name]:
                if owed and not self.board.account(job).is_below_quota(self._size(job)):
                    passed[name].append(job)
                elif self._serve_one(job):
                    heapq.heappush(heap, (self._turn(job, owed), name))
                    break
            if any(not isinstance(a, Grant | Resume) for a in self.actions[asked:]):
                # Whoever gave room away has its turn earlier now.
                heap = [(self._turn(queues[name][0], owed), name) for _, name in heap]
                heapq.heapify(heap)
        return {name: queue for name, queue in passed.items() if queue}

    def _turn(self, job: Lease, owed: bool) -> tuple[float | str, ...]:
        return (*self.board.account(job).turn(owed=owed), *order.job_key(job))

    def _size(self, job: Lease) -> int:
        """The least that ``job`` takes anywhere."""
        if job.devices:
            return held_by(job) * len(job.devices)
        if job.memory_bytes not in self._sizes:
            needs = [demand(job, room.device) for room in self.board.usable] or [WHOLE_GPU]
            self._sizes[job.memory_bytes] = min(needs)
        return (self._sizes[job.memory_bytes] if job.memory_bytes else job.fraction_milli) * job.device_count

    def _serve_one(self, job: Lease) -> bool:
        """Give ``job`` what can be given; False: nothing changed."""
        shape = self._shape(job)
        if why := self._hopeless.get(shape):
            self._wait(job, why)
            return False
        if self._backs_off(job):
            return False
        outcome = self._place(job)
        if outcome is None:
            return True
        self._wait(job, outcome)
        if outcome is Why.WAITS_FOR_ROOM:
            return True
        if not job.devices:
            self._hopeless[shape] = outcome
        return False

    def _shape(self, job: Lease) -> Shape:
        return (
            job.project,
            job.priority,
            job.fraction_milli,
            job.device_count,
            job.memory_bytes,
            job.consolidate,
            job.survival is job.survival.SUSPEND and job.suspendable,
            job.devices,
        )

    def _place(self, job: Lease) -> Why | None:
        """None: the job has room now.  Else why it waits; room is pledged if it waits for room."""
        board = self.board
        if not board.is_whole(job):
            return Why.DEVICE_BROKEN
        spot = self._spot(job, _unclaimed) or self._spot(job, _now)
        coming = spot or self._spot(job, _soon)
        if coming:
            account = board.account(job)
            over = account.over_limit(coming.size_milli)
            if spot and not over:
                self._start_job(job, spot)
                return None
            if not account.over_limit_soon(coming.size_milli):
                board.pledge(job, coming.devices, coming.held_milli)
                return Why.WAITS_FOR_ROOM
        return self._make_room(job)

    def _spot(self, job: Lease, room_of: RoomOf) -> Spot | None:
        if job.devices:
            held, rooms = held_by(job), self.board.rooms_of(job)
            spot = Spot(job.devices, held) if all(room_of(r) >= held for r in rooms) else None
        else:
            if room_of not in self._indexes:
                self._indexes[room_of] = Index(self.layout, room_of, self.board.log)
            spot = self._indexes[room_of].find(job)
        if spot is None or not self._lent(spot, room_of is _soon):
            return spot
        needed = self.board.reserve_needed(job, spot.devices, spot.held_milli)
        return spot if needed <= self.board.host_free else None

    def _lent(self, spot: Spot, soon: bool) -> bool:
        rooms = [self.board.rooms[u] for u in spot.devices]
        return any((r.soon - r.asleep if soon else r.unclaimed) < spot.held_milli for r in rooms)

    def _make_room(self, job: Lease) -> Why:
        board, account = self.board, self.board.account(job)
        if not job.devices and not self._fits_ever(job):
            return self._unplaced(job)
        size = self._size(job)
        over = account.over_limit_soon(size)
        made = self.maker.for_job(job, owed=account.is_below_quota(size), over_limit=over)
        if made is None:
            return Why.PROJECT_LIMIT if over else self.maker.obstacle
        self._ask(made.victims, job, binding=over > 0)
        board.pledge(job, made.spot.devices, made.spot.held_milli)
        return Why.WAITS_FOR_ROOM

    def _fits_ever(self, job: Lease) -> bool:
        """Whether the usable devices would do if they were empty."""
        key = (job.fraction_milli, job.memory_bytes, job.device_count, job.consolidate)
        if key not in self._possible:
            self._possible[key] = find(job, self.layout, _whole) is not None
        return self._possible[key]

    # -- effects on the board

    def _start_job(self, job: Lease, spot: Spot) -> None:
        board, lent = self.board, self._lent(spot, soon=False)
        if lent:
            needed = board.reserve_needed(job, spot.devices, spot.held_milli)
            board.host_free -= needed
        if job.state is State.SUSPENDED:
            self.actions.append(Resume(job.id, Why.ROOM_BACK))
            board.take(job, spot.devices, spot.held_milli)
        else:
            beyond = not board.account(job).fits_quota(spot.size_milli)
            grant = Grant(job.id, spot.devices, spot.held_milli, Why.FREE_ROOM, borrowed=lent or beyond)
            self.actions.append(grant)
            board.take(job, spot.devices, spot.held_milli)

    def _ask(self, victims: Iterable[Victim], lease: Lease, *, binding: bool = False) -> None:
        """Tell ``victims`` to leave; ``binding``: not only for the room, but for a limit."""
        for v in victims:
            action = Suspend if v.park else Requeue
            self.actions.append(action(v.lease.id, v.why, lease.id))
            self.board.leave(v.lease, parked=v.park)
            if not binding:
                self._asked.append(v)

    def _spare(self) -> None:
        """Let stay who need not leave, now that everybody has chosen.

        Two small borrowers may have been asked for two owners before a large
        one was, whose room is enough for both.
        """
        for v in sorted(self._asked, key=lambda v: (-v.cost, held_by(v.lease), v.rank)):
            if all(room.soon >= held_by(v.lease) for room in self.board.rooms_of(v.lease)):
                self.board.stay(v.lease, parked=v.park)
                self.actions = [a for a in self.actions if a.lease != v.lease.id]
        self._asked = []

    # -- who waits, and until when at the longest

    def _wait(self, lease: Lease, why: Why) -> None:
        self.waiting[lease.id] = _WAITING[why]

    def _backs_off(self, lease: Lease) -> bool:
        if lease.retry_at <= self.now:
            return False
        self._wait(lease, Why.BACKING_OFF)
        self._at(lease.retry_at)
        return True

    def _at(self, moment: float | None) -> None:
        if moment is not None and moment > self.now and (self.next_at is None or moment < self.next_at):
            self.next_at = moment

    def _look_ahead(self, leases: Iterable[Lease]) -> None:
        """Find when somebody can be asked who cannot be asked now."""
        settings = self.board.settings
        for lease in leases:
            if lease.kind is Kind.BUILD:
                self._at(eligible_at(lease, settings))
            if lease.state is State.RUNNING:
                self._at(lease.retry_at)
                if lease.kind is Kind.TRAIN and settings.min_run_s:
                    self._at(lease.granted_at + settings.min_run_s)


def _now(room: Room) -> int:
    return room.now


def _soon(room: Room) -> int:
    return room.soon


def _unclaimed(room: Room) -> int:
    return room.unclaimed


def _claimable(room: Room) -> int:
    return room.claimable


def _claimable_now(room: Room) -> int:
    return min(room.claimable, room.now)


def _unclaimed_returnable(room: Room) -> int:
    return room.unclaimed if room.device.suspendable else 0


def _whole(room: Room) -> int:
    return WHOLE_GPU
