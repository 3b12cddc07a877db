"""Replay work through the policy in virtual time, for the simulator.

A `Replay` holds leases and a heap of events.  Time jumps from event to event.
After the events of one moment the broker's planner plans, and its actions are
carried out at the cost of `Costs`.  It plans only if a lease waits and something
changed: capacity was released, a lease came, moved or wants its GPU, or the time of
`Plan.next_at` has come.

* A *job* runs for ``duration_s``.  A suspended job continues where it stopped, on its devices or on
  those that it moves to.  A requeued job starts again on any devices: where it stopped if it has a
  checkpoint of its own, else from the beginning.
* A job may be the *guest* of another (`sharing`).  Then both have the speeds that the caller gives.  The pair
  is judged once, after its trial (`pairs`), because its speeds do not change.  Hosts are watched alone first.
* A *session* comes with its first cell and ends with its last.  Its cells run one after
  the other, each when it is submitted or when the previous cell ends.  Between cells the
  session is idle.  A cell of a suspended session wakes it.

Leases follow `model.TRANSITIONS`, as in the broker.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from jupyter_gpushare.core.fairshare import Ledger, ProjectLedger, UserLedger
from jupyter_gpushare.core.idle import adaptive_timeout_s, eligible_at
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    WHOLE_GPU,
    Action,
    Cluster,
    Grant,
    Kind,
    Lease,
    LeaseEvent,
    Resume,
    State,
    Suspend,
    advance,
    size_of,
)
from jupyter_gpushare.core.order import order_of, served, with_turn
from jupyter_gpushare.core.pairs import (
    ALONE_S,
    TRIAL_S,
    PairDecision,
    PairVerdict,
    Parted,
    Rates,
    Reading,
    judge,
)
from jupyter_gpushare.core.planning.planner import Planner
from jupyter_gpushare.core.planning.sharing import WATCHED_S, needed_bytes
from jupyter_gpushare.core.simulated_lease import Cell as Cell
from jupyter_gpushare.core.simulated_lease import ReplayEvent, Reports, SimulatedLease

# Returns the speeds of a host and of its guest beside each other, as parts of their speeds alone.
Speeds = Callable[[Lease, Lease], tuple[float, float]]

# The maximum number of rounds at one moment; after them the plan counts as unstable.
MAX_ROUNDS = 10_000
_ALWAYS = -1  # stamp of an event that stays valid


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Duration of actions, in virtual seconds; a stop takes `Settings.grace_s`."""

    restart_s: float = 0.0  # a requeued job holds its GPUs for this long before it continues
    copy_bytes_per_s: float = inf  # of each GPU, to host memory and back

    def copy_s(self, count: int, devices: int) -> float:
        """Return the seconds to copy ``count`` bytes that are spread evenly over ``devices`` GPUs."""
        return count / max(devices, 1) / self.copy_bytes_per_s


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """The wait of a cell and its causes, reported when the cell begins."""

    lease: Lease  # its session, as it is now
    due_at: float  # when it was submitted and the previous cell had ended
    waited_s: float  # since ``due_at``
    lent: bool  # its GPU was lent
    crowded: bool  # other sessions held its devices


class ReplayWatcher:
    """Receives the events of a replay; this one ignores them."""

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        """Receive a lease that came (``before`` is None) or changed."""

    def began(self, now: float, run: CellRun) -> None:
        """Receive a cell that begins now."""

    def ran(self, lease: Lease, seconds: float, speed: float, guest: str) -> None:
        """Receive a period of a job's work that ends now; ``guest`` is its guest, or "" without one."""

    def judged(self, now: float, host: Lease, guest: Lease, verdict: PairVerdict) -> None:
        """Receive the verdict on a pair after its trial."""


class Replay:
    """Leases on devices in virtual time that starts at ``now``."""

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs = NO_COSTS,
        *,
        now: float = 0.0,
        adaptive: bool = False,
        watcher: ReplayWatcher | None = None,
        speeds: Speeds | None = None,
        parted: Parted | None = None,
    ) -> None:
        """Prepare a replay on a ``cluster`` without leases; `add_job` and `add_session` add them.

        ``adaptive``: each session's idle timeout follows from its own history (`idle`).
        ``speeds``: the speeds of pairs.  If given, jobs that `share` may be hosts and guests, and a job
        uses `needs_bytes` of each of its devices.  ``parted``: pairs that are not tried.
        """
        self.now = now
        self.rounds = self.decisions = self.events = 0
        settings = self._settings = cluster.settings
        self._costs = costs
        self._adaptive = adaptive
        self._watcher = watcher or ReplayWatcher()
        self.shares = speeds is not None
        self._speeds = speeds
        self._parted = parted or Parted()
        self.stopped = False  # once it is set to True, `run` returns after the present moment
        self._memory = {device.uuid: device.grantable_bytes for device in cluster.devices}
        self._planner = Planner(cluster.devices, cluster.projects, settings)
        self._ledger: ProjectLedger | None = None  # only with several projects
        if settings.fairness_horizon_s and len(cluster.projects) > 1:
            self._ledger = ProjectLedger(cluster.projects, cluster.devices, cluster.lags_gpu_s, now=now)
        self._users: UserLedger | None = None  # only if the order considers users
        if order_of(settings).preempts:
            self._users = UserLedger(cluster.devices, {}, now=now)
        self._leases: dict[str, SimulatedLease] = {}
        self._heap: list[tuple[float, ReplayEvent, int, str, int]] = []
        self._scheduled = 0
        self._waiting: set[str] = set()  # ids of leases that wait for capacity
        self._due = False  # whether a round may decide something
        self._next_at = inf
        self._delayed: list[SimulatedLease] = []  # sessions with a cell that found no GPU at this moment

    def add_job(self, lease: Lease, duration_s: float, reports: Reports | None = None) -> None:
        """Add a job that comes at its ``submitted_at`` and runs for ``duration_s``, maybe with reports."""
        self._leases[lease.id] = SimulatedLease(lease, duration_s, reports=reports)
        self._schedule(max(lease.submitted_at, self.now), ReplayEvent.ARRIVED, lease.id)

    def add_session(self, lease: Lease, cells: Sequence[Cell]) -> None:
        """Add a session that comes with the first of ``cells``, which must be sorted by submission."""
        self._leases[lease.id] = SimulatedLease(lease, 0.0, cells)
        self._schedule(max(cells[0].submit_at, self.now), ReplayEvent.ARRIVED, lease.id)

    def run(self, until_at: float = inf, *, max_events: float = inf) -> bool:
        """Run until ``until_at``, or for about ``max_events``; return False if nothing is left to do."""
        end = self.events + max_events
        self._decide()
        while self.events < end and not self.stopped:
            at = min(self._heap[0][0] if self._heap else inf, self._next_at)
            if at > until_at or at == inf:
                return at < inf
            self.now = max(self.now, at)
            while self._heap and self._heap[0][0] <= self.now:
                _, kind, _, name, stamp = heapq.heappop(self._heap)
                sim = self._leases.get(name)
                if sim is not None and stamp in (sim.stamp, _ALWAYS):
                    self.events += 1
                    self._handle(kind, sim)
            if self._next_at <= self.now:
                self.events += 1
                self._due = True
            self._decide()
        return not self.stopped

    # -- events

    def _schedule(self, moment: float, kind: ReplayEvent, name: str) -> None:
        self._scheduled += 1
        stamp = _ALWAYS if kind >= ReplayEvent.ARRIVED else self._leases[name].stamp
        heapq.heappush(self._heap, (moment, kind, self._scheduled, name, stamp))

    def _handle(self, kind: ReplayEvent, sim: SimulatedLease) -> None:
        match kind:
            case ReplayEvent.MOVED:
                self._complete(sim, sim.lease)
            case ReplayEvent.ENDED if sim.busy:
                sim.busy = False
                self._next_cell(sim)
            case ReplayEvent.ENDED:
                self._release(sim)
            case ReplayEvent.REPORTED:
                self._report(sim)
            case ReplayEvent.JUDGED:
                self._judge(sim)
            case ReplayEvent.WATCHED:
                self._become_host(sim)
            case ReplayEvent.ARRIVED:
                self._on_arrival(sim)
            case _:
                self._submit_cell(sim)

    def _on_arrival(self, sim: SimulatedLease) -> None:
        now = self.now
        sim.lease = replace(sim.lease, submitted_at=now, queued_at=now, waits_since_at=now)
        self._changed(None, sim.lease)
        self._waiting.add(sim.lease.id)
        self._due = True
        if sim.cells:
            self._submit_cell(sim)

    def _put(self, sim: SimulatedLease, state: State, **changes: Any) -> None:
        """Change a lease; note whether it waits, and whether the planner may have something to decide."""
        before = sim.lease
        self._update(sim, before, replace(before, state=state, **changes))

    def _update(self, sim: SimulatedLease, before: Lease, after: Lease) -> None:
        sim.lease = after
        if _waits(after):
            self._due = self._due or after.state is not before.state or after.id not in self._waiting
            self._waiting.add(after.id)
        else:
            self._waiting.discard(after.id)
        if before.state in HOLDS_CAPACITY and after.state not in HOLDS_CAPACITY:
            self._due = True
        self._changed(before, after)

    def _changed(self, before: Lease | None, after: Lease) -> None:
        """Notify planner, ledgers and watcher that a lease came (``before`` is None), changed or ended."""
        if after.state in (State.RELEASED, State.FAILED):
            self._planner.drop(after.id)
        else:
            self._planner.put(after)
        ledger: Ledger[Any] | None
        for ledger in (self._ledger, self._users):
            if ledger is not None:
                ledger.advance(self.now)
                if before is not None:
                    ledger.count(before, -1)
                ledger.count(after, 1)
        self._watcher.changed(self.now, before, after)

    def _release(self, sim: SimulatedLease) -> None:
        before = sim.lease
        self._settle(sim)
        self._part(sim)
        after = replace(self._served(sim.lease), state=advance(before.state, LeaseEvent.RELEASE))
        del self._leases[before.id]
        self._waiting.discard(before.id)
        self._due = True
        self._changed(before, after)

    def _served(self, lease: Lease) -> Lease:
        return served(lease, self.now, self._settings) if lease.kind is Kind.TRAIN else lease

    # -- sessions

    def _submit_cell(self, sim: SimulatedLease) -> None:
        sim.due.append(sim.cells[sim.next_cell])
        sim.next_cell += 1
        if sim.next_cell < len(sim.cells):
            self._schedule(sim.cells[sim.next_cell].submit_at, ReplayEvent.CELL, sim.lease.id)
        if not sim.busy and len(sim.due) == 1:
            self._next_cell(sim)

    def _next_cell(self, sim: SimulatedLease) -> None:
        """Begin the next due cell; without one, become idle, or end after the last cell."""
        state = sim.lease.state
        if sim.due:
            sim.due_at = self.now
            sim.lent = state not in (State.RUNNING, State.PENDING)
            sim.crowded = False
            if state is State.RUNNING:
                self._begin_cell(sim)
            else:
                self._delayed.append(sim)
                self._put(sim, state, wanted=True)
        elif sim.next_cell == len(sim.cells):
            self._release(sim)
        else:
            self._be_idle(sim)

    def _be_idle(self, sim: SimulatedLease) -> None:
        lease, now = sim.lease, self.now
        timeout_s = lease.idle_timeout_s
        if self._adaptive:
            sim.past = sim.past.after(sim.pause_s, now - sim.busy_from_at)
            timeout_s = adaptive_timeout_s(sim.past, size_of(lease) / WHOLE_GPU)
        self._put(sim, lease.state, idle_since_at=now, idle_timeout_s=timeout_s)
        at = eligible_at(sim.lease, self._settings)
        if self._waiting and at is not None:
            self._next_at = min(self._next_at, at)

    def _begin_cell(self, sim: SimulatedLease) -> None:
        sim.left_s = sim.due.popleft().duration_s
        sim.busy = True
        idle_since_at = sim.lease.idle_since_at
        if idle_since_at is not None:
            sim.pause_s = sim.due_at - idle_since_at
            sim.busy_from_at = self.now
        elif sim.next_cell == 1:
            sim.busy_from_at = self.now
        if idle_since_at is not None or sim.lease.wanted:
            self._put(sim, State.RUNNING, idle_since_at=None, wanted=False)
        self._run_from_now(sim)
        waited_s = self.now - sim.due_at
        run = CellRun(
            lease=sim.lease, due_at=sim.due_at, waited_s=waited_s, lent=sim.lent, crowded=sim.crowded
        )
        self._watcher.began(self.now, run)

    # -- decisions

    def _decide(self) -> None:
        """Plan until nothing is left to decide at this moment."""
        for _ in range(MAX_ROUNDS):
            if not self._waiting:
                self._due, self._next_at = False, inf
            if not self._due:
                break
            self._due = False
            self.rounds += 1
            if self._ledger is not None:
                self._ledger.advance(self.now)
                self._planner.lags_gpu_s = self._ledger.lags_gpu_s
            if self._speeds is not None:
                self._planner.parted = self._parted.pairs(self.now)
            if self._users is not None:
                self._users.advance(self.now)
                self._users.review()
                self._planner.behind = self._users.behind()
            plan = self._planner.plan(self.now)
            self._next_at = inf if plan.next_at is None else plan.next_at
            if self._users is not None:
                self._next_at = min(self._next_at, self._users.next_at)
            for action in plan.actions:
                self.decisions += 1
                self._carry_out(action)
        else:
            raise AssertionError(f"the plan does not settle at {self.now}")
        for sim in self._delayed:
            state = sim.lease.state
            sim.crowded = state is State.PENDING or (state is State.SUSPENDED and sim.lease.borrowed)
        self._delayed.clear()

    def _carry_out(self, action: Action) -> None:
        sim = self._leases[action.lease]
        state = sim.lease.state
        match action:
            case Grant() if sim.lease.host and not action.host:
                self._keep_device(sim)
            case Grant():
                placed = {"devices": action.devices, "held_milli": action.held_milli}
                placed |= {"borrowed": action.borrowed, "granted_at": self.now, "made_way_for": ""}
                placed |= {"host": action.host} if action.host else {}
                if action.asleep:
                    self._put(sim, advance(state, LeaseEvent.GRANT_ASLEEP), **placed)
                else:
                    self._move(sim, advance(state, LeaseEvent.GRANT), placed)
            case Suspend():
                self._move(
                    sim,
                    advance(state, LeaseEvent.SUSPEND),
                    {"wanted": sim.busy, "made_way_for": action.for_lease},
                )
            case Resume():
                changes = {"granted_at": self.now, "made_way_for": ""}
                changes |= {"devices": action.devices} if action.devices else {}
                changes |= {"host": action.host} if action.host else {}
                self._move(sim, advance(state, LeaseEvent.RESUME), changes)
            case _:
                self._move(sim, advance(state, LeaseEvent.STOP), {"made_way_for": action.for_lease})

    def _move(self, sim: SimulatedLease, state: State, changes: dict[str, Any]) -> None:
        """Enter a transitional state; leave it at once if the transition takes no time."""
        before = sim.lease
        if sim.runs_from_at is not None:
            self._settle(sim)
            sim.lease = self._served(sim.lease)
        self._part(sim)
        sim.stamp += 1
        sim.lease = replace(sim.lease, state=state, spare_bytes=0, **changes)
        duration_s = self._transition_s(sim)
        if duration_s > 0:
            self._update(sim, before, sim.lease)
            self._schedule(self.now + duration_s, ReplayEvent.MOVED, sim.lease.id)
        else:
            self._complete(sim, before)

    def _transition_s(self, sim: SimulatedLease) -> float:
        lease, costs = sim.lease, self._costs
        match lease.state:
            case State.GRANTED:
                return costs.restart_s if sim.restarts else 0.0
            case State.STOPPING:
                return self._settings.grace_s
            case State.SUSPENDING:
                return costs.copy_s(lease.used_bytes, len(lease.devices))
            case _:
                return costs.copy_s(lease.saved_bytes, len(lease.devices))

    def _complete(self, sim: SimulatedLease, before: Lease) -> None:
        """Complete a transition; ``before`` is the lease as the watcher knows it."""
        lease, now = sim.lease, self.now
        is_guest = bool(lease.host)
        self._due = True  # `Plan.next_at` did not know that the lease would run or wait
        changes: dict[str, Any]
        if lease.kind is Kind.TRAIN and lease.state in (State.GRANTED, State.RESUMING) and not is_guest:
            lease = with_turn(lease, lease.granted_at, self._settings)
        match lease.state:
            case State.GRANTED:
                event, changes = LeaseEvent.STARTED, {"attained_at": now}
            case State.RESUMING:
                event, changes = LeaseEvent.RESUME_DONE, {"attained_at": now, "granted_at": now}
                changes |= {"saved_bytes": 0, "wanted": False}
            case State.SUSPENDING:
                event, changes = (
                    LeaseEvent.SUSPEND_DONE,
                    {"saved_bytes": lease.used_bytes, "waits_since_at": now},
                )
            case _:
                event, changes = LeaseEvent.REQUEUED, {"devices": (), "held_milli": 0, "waits_since_at": now}
                changes["saved_bytes"] = 0
                sim.restarts = True
                sim.attempt += 1
                if not lease.survival.has_checkpoint:
                    sim.left_s = sim.duration_s
        if is_guest:  # it still waits, and its attained service is counted by its speed
            changes |= {"attained_at": None, "waits_since_at": lease.waits_since_at}
            changes["host"] = lease.host if lease.state in (State.GRANTED, State.RESUMING) else ""
        self._update(sim, before, replace(lease, state=advance(lease.state, event), **changes))
        if sim.lease.state is State.RUNNING:
            self._continue(sim)

    def _continue(self, sim: SimulatedLease) -> None:
        """Continue the job or cell of a running lease, or begin the cell that waits for it."""
        if sim.due and not sim.busy:
            self._begin_cell(sim)
        else:
            self._run_from_now(sim)

    def _run_from_now(self, sim: SimulatedLease) -> None:
        if self._speeds is not None:
            self._set_pace(sim)
        sim.runs_from_at = self.now
        self._schedule(self.now + sim.left_s / sim.speed, ReplayEvent.ENDED, sim.lease.id)
        if sim.reports is not None:
            self._report(sim)

    def _report(self, sim: SimulatedLease) -> None:
        before = sim.lease
        if (after := sim.report(self.now)) != before:
            self._due = True
            self._update(sim, before, after)
        self._schedule(self.now + sim.reports_in_s(self.now), ReplayEvent.REPORTED, before.id)

    # -- hosts and guests

    def _settle(self, sim: SimulatedLease) -> None:
        seconds = sim.settle(self.now)
        if self._speeds is not None:
            self._watcher.ran(sim.lease, seconds, sim.speed, sim.guest)

    def _set_pace(self, sim: SimulatedLease) -> None:
        """Set the speed of a lease that begins to run; a guest also changes the speed of its host."""
        lease, name = sim.lease, sim.lease.id
        host = self._leases.get(lease.host)
        if host is not None and host.runs_from_at is not None and not host.guest:
            assert self._speeds is not None
            speed, sim.speed = self._speeds(host.lease, lease)
            self._change_pace(host, speed, name)
            self._schedule(self.now + TRIAL_S, ReplayEvent.JUDGED, name)
        elif sim.is_alone and lease.share and lease.kind is Kind.TRAIN:
            self._schedule(self.now + WATCHED_S, ReplayEvent.WATCHED, name)

    def _change_pace(self, sim: SimulatedLease, speed: float, guest: str = "") -> None:
        self._settle(sim)
        sim.speed, sim.guest = speed, guest
        sim.stamp += 1
        self._run_from_now(sim)

    def _part(self, sim: SimulatedLease) -> None:
        """End the pair, if any, of a lease that stops running or gets capacity of its own."""
        host = self._leases.get(sim.lease.host, sim)
        guest = self._leases.get(host.guest)
        if guest is None or sim not in (host, guest):
            return
        for each in (host, guest):
            if each.runs_from_at is not None:
                self._change_pace(each, 1.0)
            each.speed, each.guest = 1.0, ""
        if sim is not host:
            self._update(host, host.lease, replace(host.lease, spare_bytes=0))

    def _become_host(self, sim: SimulatedLease) -> None:
        memory_bytes = min(self._memory[uuid] for uuid in sim.lease.devices)
        spare_bytes = max(0, memory_bytes - needed_bytes(sim.lease.needs_bytes))
        self._due = self._due or bool(self._waiting)
        self._update(sim, sim.lease, replace(sim.lease, spare_bytes=spare_bytes))

    def _keep_device(self, sim: SimulatedLease) -> None:
        """Give a guest the capacity of its device, which its host has left."""
        before = sim.lease
        self._settle(sim)
        self._part(sim)
        sim.lease = with_turn(sim.lease, self.now, self._settings)
        after = replace(sim.lease, state=advance(before.state, LeaseEvent.KEEP), host="")
        sim.stamp += 1
        self._update(sim, before, replace(after, attained_at=self.now, granted_at=self.now, made_way_for=""))
        self._run_from_now(sim)

    def _judge(self, sim: SimulatedLease) -> None:
        host = self._leases[sim.lease.host]
        began_at = self.now - TRIAL_S
        rates = (
            _rates(host.speed, began_at, is_known=True),
            _rates(sim.speed, began_at, sim.alone_s >= ALONE_S),
        )
        verdict = judge(*rates, began_at, self.now)
        if verdict.decision is PairDecision.PART:
            self._parted.add(host.lease.pair_key, sim.lease.pair_key, self.now)
            self._due = True
        self._watcher.judged(self.now, host.lease, sim.lease, verdict)


def _rates(speed: float, began_at: float, is_known: bool) -> Rates:
    """Return the rates at the end of a trial of a job that runs at this part of its speed alone."""
    rates = Rates()
    for second in range(-int(2 * ALONE_S), int(TRIAL_S) + 1, 60):
        if second >= 0 or is_known:
            work = int(1e6 * (second if second < 0 else second * speed) + 1e12)
            rates.add(Reading(at=began_at + second, work=work), "other" if second >= 0 else "")
    return rates


def _waits(lease: Lease) -> bool:
    """Return whether a lease waits for capacity; a guest waits for capacity of its own."""
    if lease.host and lease.state is State.RUNNING:
        return True
    if lease.state is State.SUSPENDED:
        return lease.kind is Kind.TRAIN or lease.wanted
    return lease.state is State.PENDING
