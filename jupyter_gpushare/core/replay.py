"""Run work through the policy in virtual time: the engine of estimates and of the simulator.

A `Replay` holds leases and a heap of what will happen to them.  Time jumps from
event to event; after those of one moment the planner, the very one of the
broker, is asked, and what it decides is carried out at the cost that `Costs`
says.  It is asked only when somebody waits and something changed for the
better: room came free, a lease came or wants its GPU, or the moment has come
that the last plan named (`Plan.next_at`).  Nothing ticks.

* A *job* runs for ``duration_s``.  Suspended, it keeps its devices; requeued, it
  starts again anywhere, from where it was (`Survival.NONE`: from the beginning).
* A *session* comes with its first cell and ends with its last.  Its cells run
  one after the other, each when it is submitted or when the one before it
  ends; between two it is idle.  A cell of a session that sleeps wakes it.

Leases move along the table of `model.TRANSITIONS` like any others.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from jupyter_gpushare.core.idle import Past, adaptive_timeout_s, eligible_at
from jupyter_gpushare.core.ledger import Ledger
from jupyter_gpushare.core.model import (
    HOLDS_ROOM,
    WHOLE_GPU,
    Action,
    Device,
    Event,
    Grant,
    Kind,
    Lease,
    Project,
    Resume,
    Settings,
    State,
    Survival,
    Suspend,
    advance,
)
from jupyter_gpushare.core.order import served
from jupyter_gpushare.core.plan import Planner
from jupyter_gpushare.core.quota import size_of

# Rounds at one moment after which a plan is taken for one that never settles.
MOST_ROUNDS = 10_000
_ALWAYS = -1  # the stamp of an event that nothing makes void


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What carrying out a decision takes, in virtual seconds."""

    restart_s: float = 0.0  # a job that was requeued holds its GPUs so long before it goes on
    grace_s: float = 0.0  # from being told to stop until the room is free
    copy_bytes_per_s: float = inf  # of each GPU, to host memory and back

    def copy_s(self, count: int, devices: int) -> float:
        """Seconds to move ``count`` bytes that lie evenly on so many GPUs."""
        return count / max(devices, 1) / self.copy_bytes_per_s


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Cell:
    """One execution of a notebook cell on the GPU."""

    submit_at: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """How a cell fared when it began."""

    lease: Lease  # its session, as it is now
    due_at: float  # submitted, and the cell before it had ended
    waited_s: float  # from then on
    lent: bool  # its GPU was lent
    crowded: bool  # other sessions held what it needs


class Watcher:
    """Is told what happens; measures, and may add work.  This one does nothing."""

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        """A lease came (``before`` is None) or changed."""

    def began(self, now: float, run: CellRun) -> None:
        """A cell runs from now on."""


class _What(enum.IntEnum):
    """Events; at one moment in this order: what frees room comes first."""

    MOVED = 0  # a transition is complete
    ENDED = 1  # a job, or the cell that a session runs, has done its work
    CAME = 2
    CELL = 3  # a cell is submitted


class _Life:
    """A lease and what lies before it."""

    __slots__ = (
        "busy",
        "busy_from_at",
        "cells",
        "crowded",
        "due",
        "due_at",
        "duration_s",
        "lease",
        "left_s",
        "lent",
        "next_cell",
        "past",
        "pause_s",
        "restarts",
        "runs_from_at",
        "stamp",
    )  # fmt: skip

    def __init__(self, lease: Lease, work_s: float, cells: Sequence[Cell] = ()) -> None:
        self.lease = lease
        self.duration_s = work_s
        self.left_s = work_s  # of the job, or of the cell that runs
        self.runs_from_at: float | None = None  # None: makes no progress
        self.stamp = 0  # ends and completions foreseen under an older one are void
        self.restarts = False
        self.cells = cells
        self.next_cell = 0  # the next to be submitted
        self.due: deque[Cell] = deque()  # submitted, not begun
        self.due_at = 0.0  # since when the first of them waits for the GPU alone
        self.busy = False  # a cell has begun
        self.lent = self.crowded = False  # what the cell that is due found
        self.past = Past()
        self.pause_s = 0.0  # before the work that goes on, or went on last
        self.busy_from_at = 0.0


class Replay:
    """Leases on devices in virtual time, from ``now`` on."""

    def __init__(
        self,
        devices: Iterable[Device],
        projects: Iterable[Project],
        settings: Settings,
        costs: Costs = NO_COSTS,
        *,
        now: float = 0.0,
        adaptive: bool = False,
        watcher: Watcher | None = None,
        lags_gpu_s: Mapping[str, float] | None = None,
    ) -> None:
        """``adaptive``: each session's idle timeout follows from its own past (`idle`).

        ``lags_gpu_s``: of projects behind their fair share, at ``now`` (`ledger`).
        """
        self.now = now
        self.rounds = self.decisions = self.events = 0
        self._settings = settings
        self._costs = costs
        self._adaptive = adaptive
        self._watcher = watcher or Watcher()
        self.stopped = False  # set it, and `run` returns after the present moment
        devices, projects = tuple(devices), tuple(projects)
        self._planner = Planner(devices, projects, settings)
        self._ledger: Ledger | None = None  # where there is something to share
        if settings.catch_up_s and len(projects) > 1:
            capacity = WHOLE_GPU * sum(device.usable for device in devices)
            self._ledger = Ledger(projects, capacity, lags_gpu_s or {}, now=now)
        self._lives: dict[str, _Life] = {}
        self._heap: list[tuple[float, _What, int, str, int]] = []
        self._foreseen = 0
        self._asking: set[str] = set()  # wait for room
        self._due = False  # a round may have something to decide
        self._look_at = inf
        self._delayed: list[_Life] = []  # sessions with a cell that found no GPU at this moment

    def add_job(self, lease: Lease, duration_s: float) -> None:
        """A job that comes at its ``submitted_at`` and runs for ``duration_s``."""
        self._lives[lease.id] = _Life(lease, duration_s)
        self._foresee(max(lease.submitted_at, self.now), _What.CAME, lease.id)

    def add_session(self, lease: Lease, cells: Sequence[Cell]) -> None:
        """A session that comes with the first of ``cells``, which are ordered by submission."""
        self._lives[lease.id] = _Life(lease, 0.0, cells)
        self._foresee(max(cells[0].submit_at, self.now), _What.CAME, lease.id)

    def adopt(self, lease: Lease, left_s: float = inf) -> None:
        """A lease that is there already, with ``left_s`` of work before it.

        What it is in the middle of takes as long as if it began now.
        """
        life = self._lives[lease.id] = _Life(lease, left_s)
        self._changed(None, lease)
        self._due = True
        if _asks(lease):
            self._asking.add(lease.id)
        elif lease.state is State.RUNNING:
            self._progress(life)
        elif lease.state is not State.SUSPENDED:
            self._foresee(self.now + self._takes(life), _What.MOVED, lease.id)

    def run(self, until_at: float = inf, *, most_events: float = inf) -> bool:
        """Go on until ``until_at``, or for about ``most_events``; False: nothing is left to do."""
        last = self.events + most_events
        self._decide()
        while self.events < last and not self.stopped:
            at = min(self._heap[0][0] if self._heap else inf, self._look_at)
            if at > until_at or at == inf:
                return at < inf
            self.now = max(self.now, at)
            while self._heap and self._heap[0][0] <= self.now:
                _, what, _, name, stamp = heapq.heappop(self._heap)
                life = self._lives.get(name)
                if life is not None and stamp in (life.stamp, _ALWAYS):
                    self.events += 1
                    self._happen(what, life)
            if self._look_at <= self.now:
                self.events += 1
                self._due = True
            self._decide()
        return not self.stopped

    # -- events

    def _foresee(self, moment: float, what: _What, name: str) -> None:
        self._foreseen += 1
        stamp = _ALWAYS if what >= _What.CAME else self._lives[name].stamp
        heapq.heappush(self._heap, (moment, what, self._foreseen, name, stamp))

    def _happen(self, what: _What, life: _Life) -> None:
        match what:
            case _What.MOVED:
                self._due = True
                self._arrive(life, life.lease)
            case _What.ENDED if life.busy:
                life.busy = False
                self._next_cell(life)
            case _What.ENDED:
                self._release(life)
            case _What.CAME:
                self._come(life)
            case _:
                self._submit_cell(life)

    def _come(self, life: _Life) -> None:
        now = self.now
        life.lease = replace(life.lease, submitted_at=now, queued_at=now, waits_since_at=now)
        self._changed(None, life.lease)
        self._asking.add(life.lease.id)
        self._due = True
        if life.cells:
            self._submit_cell(life)

    def _put(self, life: _Life, state: State, **changes: Any) -> None:
        """The lease becomes this; notes who asks for room, and whether somebody may get some."""
        before = life.lease
        self._tell(life, before, replace(before, state=state, **changes))

    def _tell(self, life: _Life, before: Lease, after: Lease) -> None:
        life.lease = after
        if _asks(after):
            self._due = self._due or after.state is not before.state or after.id not in self._asking
            self._asking.add(after.id)
        else:
            self._asking.discard(after.id)
        if before.state in HOLDS_ROOM and after.state not in HOLDS_ROOM:
            self._due = True
        self._changed(before, after)

    def _changed(self, before: Lease | None, after: Lease) -> None:
        """Tell everybody that a lease came (``before`` is None), changed or ended."""
        if after.state in (State.RELEASED, State.FAILED):
            self._planner.drop(after.id)
        else:
            self._planner.put(after)
        if self._ledger is not None:
            self._ledger.advance(self.now)
            if before is not None:
                self._ledger.count(before, -1)
            self._ledger.count(after, 1)
        self._watcher.changed(self.now, before, after)

    def _release(self, life: _Life) -> None:
        before = life.lease
        after = replace(self._served(before), state=advance(before.state, Event.RELEASE))
        del self._lives[before.id]
        self._asking.discard(before.id)
        self._due = True
        self._changed(before, after)

    def _served(self, lease: Lease) -> Lease:
        return served(lease, self.now, self._settings) if lease.kind is Kind.TRAIN else lease

    # -- sessions

    def _submit_cell(self, life: _Life) -> None:
        life.due.append(life.cells[life.next_cell])
        life.next_cell += 1
        if life.next_cell < len(life.cells):
            self._foresee(life.cells[life.next_cell].submit_at, _What.CELL, life.lease.id)
        if not life.busy and len(life.due) == 1:
            self._next_cell(life)

    def _next_cell(self, life: _Life) -> None:
        """Begin the next cell that is due; be idle if none is, end if none will be."""
        state = life.lease.state
        if life.due:
            life.due_at = self.now
            life.lent = state not in (State.RUNNING, State.PENDING)
            life.crowded = False
            if state is State.RUNNING:
                self._begin_cell(life)
            else:
                self._delayed.append(life)
                self._put(life, state, wanted=True)
        elif life.next_cell == len(life.cells):
            self._release(life)
        else:
            self._be_idle(life)

    def _be_idle(self, life: _Life) -> None:
        lease, now = life.lease, self.now
        timeout_s = lease.idle_timeout_s
        if self._adaptive:
            life.past = life.past.after(life.pause_s, now - life.busy_from_at)
            timeout_s = adaptive_timeout_s(life.past, size_of(lease) / WHOLE_GPU)
        self._put(life, lease.state, idle_since_at=now, idle_timeout_s=timeout_s)
        at = eligible_at(life.lease, self._settings)
        if self._asking and at is not None:
            self._look_at = min(self._look_at, at)

    def _begin_cell(self, life: _Life) -> None:
        life.left_s = life.due.popleft().duration_s
        life.busy = True
        idle_since_at = life.lease.idle_since_at
        if idle_since_at is not None:
            life.pause_s = life.due_at - idle_since_at
            life.busy_from_at = self.now
        elif life.next_cell == 1:
            life.busy_from_at = self.now
        if idle_since_at is not None or life.lease.wanted:
            self._put(life, State.RUNNING, idle_since_at=None, wanted=False)
        self._progress(life)
        waited_s = self.now - life.due_at
        run = CellRun(
            lease=life.lease, due_at=life.due_at, waited_s=waited_s, lent=life.lent, crowded=life.crowded
        )
        self._watcher.began(self.now, run)

    # -- decisions

    def _decide(self) -> None:
        """Ask the planner until it has nothing more to say at this moment."""
        for _ in range(MOST_ROUNDS):
            if not self._asking:
                self._due, self._look_at = False, inf
            if not self._due:
                break
            self._due = False
            self.rounds += 1
            if self._ledger is not None:
                self._ledger.advance(self.now)
                self._planner.lags_gpu_s = self._ledger.lags_gpu_s
            plan = self._planner.plan(self.now)
            self._look_at = inf if plan.next_at is None else plan.next_at
            for action in plan.actions:
                self.decisions += 1
                self._carry_out(action)
        else:
            raise AssertionError(f"the plan does not settle at {self.now}")
        for life in self._delayed:
            state = life.lease.state
            life.crowded = state is State.PENDING or (state is State.SUSPENDED and life.lease.borrowed)
        self._delayed.clear()

    def _carry_out(self, action: Action) -> None:
        life = self._lives[action.lease]
        state = life.lease.state
        match action:
            case Grant():
                placed = {"devices": action.devices, "held_milli": action.held_milli}
                placed |= {"borrowed": action.borrowed, "granted_at": self.now}
                if action.asleep:
                    self._put(life, advance(state, Event.GRANT_ASLEEP), **placed)
                else:
                    self._move(life, advance(state, Event.GRANT), placed)
            case Suspend():
                self._move(life, advance(state, Event.SUSPEND), {"wanted": life.busy})
            case Resume():
                self._move(life, advance(state, Event.RESUME), {"granted_at": self.now})
            case _:
                self._move(life, advance(state, Event.STOP), {})

    def _move(self, life: _Life, state: State, changes: dict[str, Any]) -> None:
        """Enter a state in which something has to be done; if that takes no time, leave it at once."""
        before = life.lease
        if life.runs_from_at is not None:
            life.left_s -= self.now - life.runs_from_at
            life.runs_from_at = None
            life.lease = self._served(before)
        life.stamp += 1
        life.lease = replace(life.lease, state=state, **changes)
        takes_s = self._takes(life)
        if takes_s > 0:
            self._tell(life, before, life.lease)
            self._foresee(self.now + takes_s, _What.MOVED, life.lease.id)
        else:
            self._arrive(life, before)

    def _takes(self, life: _Life) -> float:
        lease, costs = life.lease, self._costs
        match lease.state:
            case State.GRANTED:
                return costs.restart_s if life.restarts else 0.0
            case State.STOPPING:
                return costs.grace_s
            case State.SUSPENDING:
                return costs.copy_s(lease.used_bytes, len(lease.devices))
            case _:
                return costs.copy_s(lease.saved_bytes, len(lease.devices))

    def _arrive(self, life: _Life, before: Lease) -> None:
        """What a lease was in the middle of is complete; ``before``: as it was told last."""
        lease, now = life.lease, self.now
        changes: dict[str, Any]
        match lease.state:
            case State.GRANTED:
                event, changes = Event.STARTED, {"attained_at": now}
            case State.RESUMING:
                event, changes = Event.RESUME_DONE, {"attained_at": now, "granted_at": now}
                changes |= {"saved_bytes": 0, "wanted": False}
            case State.SUSPENDING:
                event, changes = Event.SUSPEND_DONE, {"saved_bytes": lease.used_bytes, "waits_since_at": now}
            case _:
                event, changes = Event.REQUEUED, {"devices": (), "held_milli": 0, "waits_since_at": now}
                changes["saved_bytes"] = 0
                life.restarts = True
                if lease.survival is Survival.NONE:
                    life.left_s = life.duration_s
        self._tell(life, before, replace(lease, state=advance(lease.state, event), **changes))
        if life.lease.state is State.RUNNING:
            self._go_on(life)

    def _go_on(self, life: _Life) -> None:
        """A lease runs (again): its job, its cell, or the cell that waits for it."""
        if life.due and not life.busy:
            self._begin_cell(life)
        else:
            self._progress(life)

    def _progress(self, life: _Life) -> None:
        life.runs_from_at = self.now
        if life.left_s < inf:
            self._foresee(self.now + life.left_s, _What.ENDED, life.lease.id)


def _asks(lease: Lease) -> bool:
    """Whether a lease waits for room."""
    if lease.state is State.SUSPENDED:
        return lease.kind is Kind.TRAIN or lease.wanted
    return lease.state is State.PENDING
