"""One round of decisions: all rules, applied to one board.

The rules, in the order in which they bind:

1. *Owners*: a sleeping session whose processes want the GPU gets its claim
   back; whoever holds that room without a claim makes way.
2. *New sessions* within quota get their claim, awake if the room is free,
   asleep if it is lent; beyond quota they start on free room that nobody
   claims, or not at all.  They never wait: who asks gets an answer.
3. *Jobs* of projects below quota, waiting or suspended: inside a project by
   `order`; free room first, then room on its way, then room that others must
   give (`making`).
4. *Guests*: sleeping sessions beyond quota wake when unclaimed room is free.
5. *All other jobs* in the same way, those within their project's fair share
   first, projects by weight and by what they had before (`ledger`).

What does not fit blocks nobody, unless the order is strict, or it has been
overtaken for ``skip_wait_s``: then the room that it will need is kept for it.

What is decided for one is gone for the next: all rules work on one `Board`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jupyter_gpushare.core import order
from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.keeping import Keeping
from jupyter_gpushare.core.lines import Cursor, Lines, Shape
from jupyter_gpushare.core.making import Maker
from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Action,
    Grant,
    Lease,
    Order,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.placement import Spot, demand
from jupyter_gpushare.core.quota import Shares, held_by
from jupyter_gpushare.core.room import (
    UNLENT,
    RoomOf,
    claimable,
    claimable_now,
    free_now,
    free_soon,
    returnable,
    unclaimed_now,
)
from jupyter_gpushare.core.victims import Victim

if TYPE_CHECKING:
    from jupyter_gpushare.core.plan import Planner

# So often it is looked at anew who lags behind its fair share, where somebody does and somebody waits.
REVIEW_S = 900.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """That a lease got nothing in a round."""

    why: Why


class Round:
    """One application of all rules, kept for those who ask why."""

    def __init__(self, planner: Planner, now: float, *, everybody: bool) -> None:
        self.now = now
        self.planner = planner
        self.board = planner.board
        self.lines = planner.lines
        self.settings = planner.board.settings
        self.layout = planner.layout
        self.catching_up: dict[str, int] = {}  # thousandths of a GPU, by project
        if self.settings.catch_up_s:
            for name, lag in planner.lags_gpu_s.items():
                self.catching_up[name] = int(WHOLE_GPU * lag / self.settings.catch_up_s)
        capacity = WHOLE_GPU * len(self.board.usable)
        # Not of this round's own: it would refer to itself, and be left to the garbage collector.
        waiting_milli = partial(_waiting_milli, self.lines, self.board)
        self.shares = Shares(self.board.standing, waiting_milli, capacity, self.catching_up)
        self.maker = Maker(self.board, self.layout, self.lines, self.shares)
        self.keeping = Keeping(self.board, self.layout)
        self.actions: list[Action] = []
        self.waiting: dict[str, Waiting] = {}  # who got nothing, in the order in which they would be served
        self.next_at: float | None = None
        self._everybody = everybody
        self._in_turn = False  # whether those are served who are below their fair share
        self._asked: list[Victim] = []
        self._hopeless: dict[tuple[str, Shape], Why] = {}
        self._served: set[str] = set()

    def run(self) -> Round:
        """Apply all rules."""
        self.run_sessions()
        for lease in sorted(self.lines.backing_off.values(), key=lambda x: (x.queued_at, x.id)):
            self._backs_off(lease)
        self._serve_lines(self._is_owed)
        for lease in sorted(self._sleepers(claim=False), key=order.session_rank):
            self._wake_guest(lease)
        if len(self.lines.of) > 1:
            self._serve_lines(self._is_below_share)
        self._serve_lines(None)
        self._spare()
        if self.waiting:
            self._at(self.lines.next_at())
            self._at(self.maker.asker.next_at)
            if any(self.planner.lags_gpu_s.values()):
                self._at(self.now + REVIEW_S)
        return self

    def run_sessions(self) -> Round:
        """Apply the rules up to new sessions: what one more session would find."""
        for lease in sorted(self._sleepers(claim=True), key=order.session_rank):
            self._wake_owner(lease)
        self._spare()
        for lease in sorted(self.lines.sessions.values(), key=order.session_rank):
            if self._backs_off(lease):
                continue
            found = self.session_grant(lease)
            if isinstance(found, Why):
                self._wait(lease, found)
            else:
                self._start_session(lease, found)
        return self

    def _sleepers(self, *, claim: bool) -> list[Lease]:
        return [x for x in self.lines.sleepers.values() if self.board.has_claim(x) is claim]

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
        spot = self.planner.find(lease, claimable_now, quota_left)
        if spot and not account.over_limit(spot.size_milli):
            return Grant(lease.id, spot.devices, spot.held_milli, Why.CLAIM)
        if spot := spot or self.planner.find(lease, claimable, quota_left):
            return Grant(lease.id, spot.devices, spot.held_milli, Why.CLAIM, asleep=True)
        if spot := self.planner.find(lease, returnable):
            if account.over_limit(spot.size_milli):
                return Why.PROJECT_LIMIT
            return Grant(lease.id, spot.devices, spot.held_milli, Why.FREE_ROOM, borrowed=True)
        return self.planner.unplaced(lease)

    def _start_session(self, lease: Lease, grant: Grant) -> None:
        self.actions.append(grant)
        if grant.asleep:
            self.board.take_asleep(lease, grant.devices, grant.held_milli)
        else:
            self.board.take(lease, grant.devices, grant.held_milli, claim=not grant.borrowed)

    def _wake_guest(self, lease: Lease) -> None:
        board, held = self.board, held_by(lease)
        rooms = board.rooms_of(lease)
        if not board.is_whole(lease):
            self._wait(lease, Why.DEVICE_BROKEN)
        elif any(room.unclaimed < held for room in rooms):
            self._wait(lease, Why.NO_ROOM)
            board.await_room(lease)
        elif board.account(lease).over_limit(held * len(rooms)):
            self._wait(lease, Why.PROJECT_LIMIT)
        elif not self._backs_off(lease):
            self.actions.append(Resume(lease.id, Why.WANTED))
            board.take(lease, lease.devices, held)

    # -- jobs

    def would_start(self, job: Lease) -> bool:
        """Whether a new job would start at this point of the round."""
        spot = self._spot(job, free_now)
        return (
            spot is not None
            and not self._may_not_borrow(job)
            and not self.board.account(job).over_limit(spot.size_milli)
        )

    def _serve_lines(self, whom: Callable[[Lease], bool] | None) -> None:
        """Serve those jobs, or all that are left, the projects in turn."""
        lines = self.lines
        cursors = {name: Cursor(line, lines.leases) for name, line in lines.of.items() if line.waiting}
        owed = whom == self._is_owed
        self._in_turn = whom == self._is_below_share
        heap = [(self._turn(name, cursor, owed), name) for name, cursor in cursors.items()]
        heapq.heapify(heap)
        while heap:
            _, name = heapq.heappop(heap)
            asked = len(self.actions)
            if self._serve_next(cursors[name], whom):
                heapq.heappush(heap, (self._turn(name, cursors[name], owed), name))
            if any(not isinstance(a, Grant | Resume) for a in self.actions[asked:]):
                # Whoever gave room away has its turn earlier now.
                heap = [(self._turn(n, cursors[n], owed), n) for _, n in heap]
                heapq.heapify(heap)

    def _turn(self, project: str, cursor: Cursor, owed: bool) -> tuple[object, ...]:
        turn = self.board.standing.account(project).turn(self.catching_up.get(project, 0), owed=owed)
        return (*turn, cursor.first)

    def _is_owed(self, job: Lease) -> bool:
        """Whether the project of ``job`` stays within its quota with it."""
        return self.board.account(job).is_below_quota(_size(job, self.board))

    def _is_below_share(self, job: Lease) -> bool:
        """Whether the project of ``job`` stays within its fair share with it."""
        return self.board.account(job).use + _size(job, self.board) <= self.shares.of(job.project)

    def _serve_next(self, cursor: Cursor, whom: Callable[[Lease], bool] | None) -> bool:
        """Serve one job of a project; False: no other has a chance in this turn."""
        while cursor:
            job, shape = cursor.next()
            if job.id in self._served:
                cursor.go_on()
            elif whom is not None and not whom(job):
                # What other projects owe to this one nobody has to wait for.
                in_turn = whom == self._is_below_share or len(self.lines.of) == 1
                if self.settings.order is Order.FIFO or (in_turn and self._has_waited_for_long(job)):
                    return False  # nor are those behind it served before it
                cursor.close()  # its turn comes later
            elif self._serve_one(job, shape):
                self._served.add(job.id)
                cursor.go_on()
                return self.settings.order is not Order.FIFO or job.id not in self.waiting
            elif self.settings.order is Order.FIFO and self.waiting[job.id].why not in _NEVER_MIND:
                self._leave_in_line(cursor)
                return False
            elif (job.project, shape) in self._hopeless and not self._everybody:
                cursor.close()
            else:
                cursor.go_on()
        return False

    def _leave_in_line(self, cursor: Cursor) -> None:
        cursor.go_on()
        while self._everybody and cursor:
            self._wait(cursor.next()[0], Why.IN_LINE)
            cursor.go_on()

    def _serve_one(self, job: Lease, shape: Shape) -> bool:
        """Give ``job`` what can be given; False: nothing changed."""
        key = job.project, shape
        why = self._hopeless.get(key)
        if why is None:
            outcome = self._place(job)
            if outcome is None:
                return True
            self._wait(job, outcome)
            if outcome is Why.WAITS_FOR_ROOM:
                return True
            if outcome is not Why.NOT_WORTH_IT:
                self._hopeless[key] = outcome
        else:
            self._wait(job, why)
        return False

    def _place(self, job: Lease) -> Why | None:
        """None: the job has room now.  Else why it waits; room is pledged if it waits for room."""
        board = self.board
        if not board.is_whole(job):
            return Why.DEVICE_BROKEN
        if self._may_not_borrow(job) and self.planner.fits_ever(job):
            return Why.QUOTA
        if job.devices:
            held = held_by(job)
            hopeless = any(room.soon < held for room in board.rooms_of(job))
        else:
            hopeless = self.planner.find(job, free_soon) is None
        if hopeless:
            return self._make_room(job, None)
        spot = self._spot(job, unclaimed_now) or self._spot(job, free_now)
        coming = spot or self._spot(job, free_soon)
        if coming:
            account = board.account(job)
            over = account.over_limit(coming.size_milli)
            if spot and not over:
                self._start_job(job, spot)
                return None
            if not account.over_limit_soon(coming.size_milli):
                board.pledge(job, coming.devices, coming.held_milli)
                if job.device_count > 1:
                    self.keeping.keep_places(self.keeping.moved_for(job, coming), self.planner.find)
                return Why.WAITS_FOR_ROOM
        return self._make_room(job, coming)

    def _may_not_borrow(self, job: Lease) -> bool:
        """Whether ``job`` would have to borrow, and does not want to."""
        return not job.borrow and _size(job, self.board) > self.board.account(job).unborrowed_left

    def _spot(self, job: Lease, room_of: RoomOf) -> Spot | None:
        most_milli = None
        if not job.borrow:
            room_of, most_milli = UNLENT.get(room_of, room_of), self.board.account(job).unborrowed_left
        if job.devices:
            held, rooms = held_by(job), self.board.rooms_of(job)
            spot = Spot(job.devices, held) if all(room_of(r) >= held for r in rooms) else None
        else:
            spot = self.planner.find(job, room_of, most_milli)
        if spot is None or not job.borrow or not self._lent(spot, room_of is free_soon):
            return spot
        needed = self.board.reserve_needed(job, spot.devices, spot.held_milli)
        return spot if needed <= self.board.host_free else None

    def _lent(self, spot: Spot, soon: bool) -> bool:
        rooms = [self.board.rooms[u] for u in spot.devices]
        return any((r.soon - r.asleep if soon else r.unclaimed) < spot.held_milli for r in rooms)

    def _make_room(self, job: Lease, coming: Spot | None) -> Why:
        board, account = self.board, self.board.account(job)
        if not job.devices and not self.planner.fits_ever(job):
            return self.planner.unplaced(job)
        size = _size(job, self.board)
        over, owed = account.over_limit_soon(size), self._is_owed(job)
        below_share = not owed and len(self.lines.of) > 1 and self._is_below_share(job)
        # Room that was taken out of turn would go to whoever comes first in the next round.
        takes = below_share and self._in_turn
        made = self.maker.for_job(job, owed=owed, below_share=takes, over_limit=over, coming=coming)
        if made is None:
            if over:
                return Why.PROJECT_LIMIT
            # Beyond its share a project keeps no room from others.
            may_keep = owed or below_share or len(self.lines.of) == 1
            kept = may_keep and self._has_waited_for_long(job) and self.keeping.keep(job)
            return Why.RESERVED if kept else self.maker.obstacle
        self._ask(made.victims, job, binding=over > 0)
        board.pledge(job, made.spot.devices, made.spot.held_milli)
        moved = (v.lease for v in made.victims if v.why is Why.MOVED and v.lease.project == job.project)
        self.keeping.keep_places(moved, self.planner.find)
        return Why.WAITS_FOR_ROOM

    def _has_waited_for_long(self, job: Lease) -> bool:
        """Whether nobody may overtake ``job`` any more."""
        # Who does not borrow and cannot start waits for its own project only.
        return not self._may_not_borrow(job) and self.keeping.is_due(job, self.now)

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
            borrowed = job.borrow and (lent or beyond)
            grant = Grant(job.id, spot.devices, spot.held_milli, Why.FREE_ROOM, borrowed=borrowed)
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
        self.waiting[lease.id] = Waiting(why)

    def _backs_off(self, lease: Lease) -> bool:
        if lease.retry_at <= self.now:
            return False
        self._wait(lease, Why.BACKING_OFF)
        self._at(lease.retry_at)
        return True

    def _at(self, moment: float | None) -> None:
        if moment is not None and moment > self.now and (self.next_at is None or moment < self.next_at):
            self.next_at = moment


# Why a job may not start that does not keep those behind it from starting, where the order is strict.
_NEVER_MIND = frozenset({Why.TOO_LARGE, Why.DEVICE_BROKEN})


def _waiting_milli(lines: Lines, board: Board) -> dict[str, int]:
    """What the waiting jobs of each project take at the least, thousandths of a GPU."""
    return {
        name: sum(_size(lines.leases[ranks[0][-1]], board) * len(ranks) for ranks in line.waiting.values())
        for name, line in lines.of.items()
    }


def _size(job: Lease, board: Board) -> int:
    """The least that ``job`` takes anywhere, thousandths of a GPU."""
    if job.devices:
        return held_by(job) * len(job.devices)
    if not job.memory_bytes:
        return job.fraction_milli * job.device_count
    return min([demand(job, room.device) for room in board.usable], default=WHOLE_GPU)
