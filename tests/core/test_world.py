"""Any history: leases come, go, idle, return; actions succeed, fail or take their time.

The machine plays the broker: it asks `plan`, carries actions out in any order,
and checks after every step what must hold whatever happens.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from jupyter_gpushare.core.cluster_state import suspended_bytes
from jupyter_gpushare.core.explain import borrowed, lent, offers, uses
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Action,
    CheckpointMode,
    Cluster,
    Grant,
    Kind,
    Lease,
    LeaseEvent,
    Order,
    Project,
    Requeue,
    Resume,
    Settings,
    State,
    Suspend,
    Why,
    advance,
    held_by,
    size_of,
)
from jupyter_gpushare.core.order import served
from jupyter_gpushare.core.planning.planner import IncrementalPlanner, Planner, plan
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.sim.scenario import SRTF, TraceJob
from tests.core.build import GIB, begun, device, quotas, why

SUCCESS = {
    State.GRANTED: LeaseEvent.STARTED,
    State.SUSPENDING: LeaseEvent.SUSPEND_DONE,
    State.RESUMING: LeaseEvent.RESUME_DONE,
}
FAILURE = {
    State.GRANTED: LeaseEvent.START_FAILED,
    State.SUSPENDING: LeaseEvent.SUSPEND_REFUSED,
    State.RESUMING: LeaseEvent.RESUME_REFUSED,
}
BACK_OFF_S = 30.0


class World(RuleBasedStateMachine):
    names = Bundle("names")
    policy = {"order": Order.BACKFILL}
    shares = False  # two jobs may share a device

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.count = 0
        self.story: deque[object] = deque(maxlen=60)  # what led here, for the reader of a failure
        self.leases: dict[str, Lease] = {}
        self.lags: dict[str, float] = {}
        self.ending: set[str] = set()  # stopped for good, not to be requeued
        self.devices = [device(0), device(1), device(2, node="n1", memory_bytes=40 * GIB)]
        self.projects = (
            Project(name="p", quota_milli=1500),
            Project(name="q", quota_milli=1000, weight=2),
            Project(name="r", quota_milli=0, limit_milli=1500),
        )
        self.settings = Settings(idle_timeout_s=600, host_budget_bytes=200 * GIB, **self.policy)
        self.incremental = IncrementalPlanner()
        self.start_planner()

    def start_planner(self) -> None:
        """The one that is told what changes, and answers as one that looks at everything."""
        self.planner = Planner(self.devices, self.projects, self.settings)
        for lease in self.leases.values():
            self.planner.put(lease)
        self.planner.lags_gpu_s = self.lags

    def keep(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        self.planner.put(lease)

    def forget(self, id: str) -> None:
        del self.leases[id]
        self.planner.drop(id)

    def cluster(self) -> Cluster:
        return Cluster(
            devices=tuple(self.devices),
            projects=self.projects,
            leases=tuple(self.leases.values()),
            settings=self.settings,
            lags_gpu_s=self.lags,
        )

    def change(self, id: str, event: LeaseEvent | None = None, **more: object) -> None:
        lease = self.leases[id]
        if lease.kind is Kind.TRAIN and lease.state is State.RUNNING:
            lease = served(lease, self.now, self.settings)
        if event is not None:
            more["state"] = advance(lease.state, event)
            if event in (LeaseEvent.SUSPEND_DONE, LeaseEvent.REQUEUED):
                more["waits_since_at"] = self.now
            if event in (LeaseEvent.STARTED, LeaseEvent.RESUME_DONE):
                more["attained_at"] = self.now
        lease = replace(lease, **more)
        if lease.state is State.PENDING:
            lease = replace(lease, devices=(), held_milli=0, saved_bytes=0, used_bytes=0, host="")
        elif lease.state is State.RUNNING:
            lease = replace(lease, saved_bytes=lease.saved_bytes if lease.host else 0, wanted=False)
        elif lease.state is State.SUSPENDED and event is LeaseEvent.SUSPEND_DONE:
            lease = replace(lease, saved_bytes=lease.used_bytes, used_bytes=0, host="")
        if lease.state in (State.RELEASED, State.FAILED):
            self.forget(id)
        else:
            self.keep(lease)

    @initialize(sessions=st.lists(st.tuples(st.sampled_from([250, 500, 1000]), st.sampled_from("pqr"))))
    def initial_sessions(self, sessions):
        for milli, project in sessions[:4]:
            self.spawn((milli, 1), project)
        self.settle()

    # -- what people do

    @rule(
        target=names,
        shape=st.sampled_from([(250, 1), (500, 1), (1000, 1), (1000, 2), (0, 1)]),
        project=st.sampled_from("pqr"),
        priority=st.integers(0, 1),
        survival=st.sampled_from(CheckpointMode),
        consolidate=st.booleans(),
        borrow=st.booleans(),
        duration=st.sampled_from([None, 100.0, 5000.0]),
    )
    def submit(self, shape, project, priority, survival, consolidate, borrow, duration):
        self.count += 1
        milli, count = shape
        known = {} if duration is None else {"duration_s": duration}
        lease = (TraceJob if known else Lease)(
            id=f"j{self.count}",
            project=project,
            kind=Kind.TRAIN,
            size=Size(milli, count, 0 if milli else 15 * GIB),
            consolidate=consolidate,
            borrow=borrow,
            priority=priority,
            survival=survival,
            queued_at=self.now,
            waits_since_at=self.now,
            share=self.shares,
            movable=self.shares,
            spare_bytes=30 * GIB if self.shares else 0,
            **known,
        )
        self.keep(lease)
        return lease.id

    @rule(
        target=names,
        size=st.sampled_from([(250, 1), (500, 1), (1000, 1), (500, 2), (1000, 2)]),
        project=st.sampled_from("pqr"),
    )
    def spawn(self, size, project):
        milli, count = size
        self.count += 1
        lease = Lease(
            id=f"b{self.count}",
            project=project,
            kind=Kind.BUILD,
            size=Size(milli, count),
            queued_at=self.now,
        )
        (offer,) = offers(self.cluster(), project, [Size(*size)], self.now)
        self.keep(lease)
        grants = [a for a in plan(self.cluster(), self.now).actions if a.lease == lease.id]
        assert (offer.starts == "no") == (not grants)
        if not grants:
            assert why(self.cluster(), lease.id, self.now) is offer.why
            self.forget(lease.id)
            return multiple()
        assert (offer.borrowed, offer.devices) == (grants[0].borrowed, grants[0].devices)
        self.carry_out(grants[0])
        return lease.id

    @rule(id=consumes(names))
    def end(self, id):
        if id in self.leases:
            lease = self.leases[id]
            if lease.state in HOLDS_CAPACITY and lease.state is not State.STOPPING:
                self.change(id, LeaseEvent.STOP)
                self.ending.add(id)
            else:
                self.change(id, LeaseEvent.RELEASE)

    @rule(id=names, idle=st.booleans())
    def work(self, id, idle):
        if id in self.leases and self.leases[id].state is State.RUNNING:
            self.change(id, idle_since_at=self.now if idle else None)

    @rule()
    def lunch(self):
        """Every session idles for longer than the timeout."""
        for id in [x.id for x in self.leases.values() if x.kind is Kind.BUILD and x.idle_since_at is None]:
            self.change(id, idle_since_at=self.now)
        self.now += 700
        self.settle()

    @rule(id=names)
    def run_a_gpu_cell(self, id):
        lease = self.leases.get(id)
        if lease and lease.kind is Kind.BUILD and lease.state is State.SUSPENDED:
            self.change(id, wanted=True)

    @rule()
    def all_owners_return(self):
        for id in [x.id for x in self.leases.values() if x.kind is Kind.BUILD]:
            self.run_a_gpu_cell(id)
        self.settle()

    @rule(id=names)
    def spoil(self, id):
        if id in self.leases:
            self.change(id, suspendable=False)

    @rule(seconds=st.sampled_from([1.0, 31.0, 700.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(lag=st.sampled_from([-2000.0, -500.0, 0.0, 500.0, 2000.0]), behind=st.sampled_from("pqr"))
    def fall_behind(self, lag, behind):
        """A project had less than its fair share; another one has had it."""
        ahead = "r" if behind == "q" else "q"
        self.lags = self.planner.lags_gpu_s = {behind: lag, ahead: -lag}

    @rule(which=st.integers(0, 2), usable=st.booleans())
    def cordon(self, which, usable):
        self.devices[which] = replace(self.devices[which], usable=usable)
        self.start_planner()

    # -- what the broker does

    @rule(id=names, fails=st.booleans(), used=st.sampled_from([0, 1, 5]))
    def complete(self, id, fails, used):
        if id in self.leases:
            self.step(id, fails=fails, used_bytes=used * GIB)

    def step(self, id: str, *, fails: bool = False, used_bytes: int = 0) -> None:
        """What was begun for a lease ends."""
        lease = self.leases[id]
        if lease.state is State.STOPPING:
            if id in self.ending:
                self.change(id, LeaseEvent.RELEASE)
            else:
                self.change(id, LeaseEvent.REQUEUED)
        elif lease.state in SUCCESS:
            if fails:
                if lease.kind is Kind.BUILD and lease.state is State.GRANTED:
                    return self.change(id, LeaseEvent.FAIL)
                return self.change(id, FAILURE[lease.state], retry_at=self.now + BACK_OFF_S)
            more = {"used_bytes": used_bytes} if lease.state is State.GRANTED else {}
            if lease.state is State.RESUMING:
                more = {"used_bytes": lease.saved_bytes, "idle_since_at": None}
            self.change(id, SUCCESS[lease.state], **more)
        return None

    def told(self, what: str) -> str:
        return "\n".join([what, *map(str, self.story), *map(str, self.leases.values())])

    def a_job_that_does_not_borrow_starts_within_quota(self, action: Grant | Resume) -> None:
        """Its project's claims, and its jobs that do not borrow, stay within quota with it."""
        lease = self.leases[action.lease]
        if lease.kind is Kind.BUILD or lease.borrow:
            return
        assert not (isinstance(action, Grant) and action.borrowed)
        stand = quotas(self.cluster())
        account = stand.account(lease.project)
        held = action.held_milli if isinstance(action, Grant) else held_by(lease)
        devices = action.devices if isinstance(action, Grant) else lease.devices
        assert held * len(devices) <= account.unborrowed_left, self.told("it borrows")
        for uuid in devices:
            asleep = [
                x
                for x in self.leases.values()
                if uuid in x.devices and x.state is State.SUSPENDED and x.id in stand.claimants
            ]
            stays = HOLDS_CAPACITY - LEAVING
            holders = [x for x in self.leases.values() if uuid in x.devices and x.state in stays]
            there = sum(map(held_by, holders)) + sum(map(held_by, asleep))
            assert there + held <= WHOLE_GPU, self.told("it is on lent capacity")

    def carry_out(self, action: Action) -> None:
        self.story.append(action)
        if isinstance(action, Grant | Resume):
            self.a_job_that_does_not_borrow_starts_within_quota(action)
        event, changes = begun(action, self.now)
        self.change(action.lease, event, **changes)

    @rule()
    def tick(self):
        self.act()

    def act(self) -> tuple[object, ...]:
        cluster = self.cluster()
        done = plan(cluster, self.now)
        shuffled = replace(cluster, leases=cluster.leases[::-1], devices=cluster.devices[::-1])
        assert plan(cluster, self.now) == done
        assert self.planner.plan(self.now) == done, self.told("a planner that was kept decides otherwise")
        assert self.incremental.plan(cluster, self.now) == done, self.told(
            "one that compares decides otherwise"
        )
        assert Counter(plan(shuffled, self.now).actions) == Counter(done.actions)
        assert done.next_at is None or done.next_at > self.now
        assert max(Counter(a.lease for a in done.actions).values(), default=0) <= 1
        for action in done.actions:
            if isinstance(action, Suspend | Requeue) and not self.leases[action.lease].host:
                waits = self.leases[action.for_lease]
                assert waits.state in (State.PENDING, State.SUSPENDED)
                assert action.lease != action.for_lease
            if isinstance(action, Requeue):
                assert self.leases[action.lease].kind is Kind.TRAIN
            self.carry_out(action)
            self.capacity_is_never_granted_twice()
        return done.actions

    @rule()
    def settle(self):
        """Everything begun succeeds and nothing else happens: `plan` comes to rest."""
        disturbed: Counter[str] = Counter()
        made_way: dict[str, str] = {}
        stronger: set[str] = set()
        self.story.append("-- settle")
        self.story.extend(self.leases.values())
        for _ in range(6 * len(self.leases) + 6):
            actions = self.act()
            disturbed.update(a.lease for a in actions if isinstance(a, Suspend | Requeue))
            for a in actions:
                if isinstance(a, Suspend | Requeue) and a.for_lease not in ("", a.lease):
                    made_way[a.lease] = a.for_lease
                    stronger |= {a.for_lease} if a.why in (Why.PRIORITY, Why.OVER_QUOTA) else set()
            for a in actions:
                # A job may wake again where it outranks others or is owed their capacity, or where the
                # lease that it made way for has found better capacity.
                if isinstance(a, Resume) and a.lease in made_way and a.lease not in stronger:
                    other = self.leases[made_way[a.lease]]
                    assert other.state in HOLDS_CAPACITY, self.told("suspended and resumed for nothing")
            moving = [x.id for x in self.leases.values() if x.state in {*SUCCESS, State.STOPPING}]
            for id in moving:
                self.step(id, used_bytes=GIB)
            if not actions and not moving:
                break
        else:
            raise AssertionError(self.told("no fixed point"))
        # A guest whose host makes way may become the guest of another.
        assert max(disturbed.values(), default=0) <= 1 + self.shares, self.told("disturbed again")
        self.owners_are_awake()

    def owners_are_awake(self) -> None:
        """A returning owner of a claim has the capacity, or what is in the way cannot be moved."""
        cluster = self.cluster()
        claimants = quotas(cluster).claimants
        for lease in self.leases.values():
            if lease.id in claimants and lease.wanted and lease.retry_at <= self.now:
                in_the_way = [
                    x
                    for x in self.leases.values()
                    if x.state in HOLDS_CAPACITY
                    and set(x.devices) & set(lease.devices)
                    and x.id not in claimants
                ]
                assert any(
                    (x.kind is Kind.BUILD and not x.suspendable) or x.retry_at > self.now for x in in_the_way
                )

    # -- what always holds

    @invariant()
    def capacity_is_never_granted_twice(self):
        for d in self.devices:
            here = [x for x in self.leases.values() if d.uuid in x.devices and x.state in HOLDS_CAPACITY]
            guests = [x for x in here if x.host]
            holders = {x.id: held_by(x) for x in here if not x.host}
            assert sum(holders.values()) <= WHOLE_GPU
            # Whoever is beside a guest is its host.
            assert len(guests) <= 1
            assert not guests or holders.keys() <= {guests[0].host}, self.told("nobody else's device")

    @invariant()
    def claims_are_never_oversubscribed(self):
        cluster = self.cluster()
        claimants = quotas(cluster).claimants
        for d in self.devices:
            claims = [x for x in self.leases.values() if d.uuid in x.devices and x.id in claimants]
            assert sum(held_by(x) for x in claims) <= WHOLE_GPU
        for p in self.projects:
            claims = [x for x in self.leases.values() if x.project == p.name and x.id in claimants]
            assert sum(held_by(x) * len(x.devices) for x in claims) <= p.quota_milli

    @invariant()
    def limits_hold(self):
        held = sum(size_of(x) for x in self.leases.values() if x.project == "r" and x.state in HOLDS_CAPACITY)
        assert held <= 1500

    @invariant()
    def host_memory_is_never_promised_twice(self):
        suspended = sum(x.saved_bytes for x in self.leases.values())
        suspended += sum(
            suspended_bytes(x) for x in self.leases.values() if x.state is State.SUSPENDING and not x.host
        )
        assert suspended <= self.settings.host_budget_bytes

    @invariant()
    def what_is_said_agrees_with_what_is(self):
        cluster = self.cluster()
        assert set(borrowed(cluster)) >= {x.id for x in self.leases.values() if x.state is State.RUNNING}
        assert all(self.leases[id].state is State.SUSPENDED for id in lent(cluster))
        shares = sum(u.fair_share_milli for u in uses(cluster))
        assert shares <= WHOLE_GPU * len(self.devices)
        for id in self.leases:
            why(cluster, id, self.now)


EXPLORED = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,  # the same histories every time; to explore, drop this and raise the others
)


class LasWorld(World):
    policy = {"order": Order.LAS, "las_thresholds_gpu_s": (500.0, 2000.0)}


class PatientLasWorld(World):
    policy = {
        "order": Order.LAS,
        "las_thresholds_gpu_s": (500.0, 2000.0),
        "min_run_s": 20.0,
        "starvation_guard_s": 600.0,
        "max_bypass_s": 300.0,
        "preempt_cost_s": 30.0,
        "fairness_horizon_s": 1000.0,
    }


class FifoWorld(World):
    policy = {"order": Order.FIFO}


class PatientWorld(World):
    policy = {"order": Order.BACKFILL, "max_bypass_s": 300.0}


class SrtfWorld(World):
    policy = {"order": SRTF}


class SharingWorld(World):
    """Jobs leave memory unused, and take it back."""

    shares = True

    def __init__(self, policy: dict[str, object]) -> None:
        self.policy = policy
        super().__init__()
        self.devices = [device(n, movable=True, usable=n < 2) for n in range(3)]
        self.start_planner()

    def leave_unused(self, id: str, spare: int) -> None:
        self.change(id, spare_bytes=spare * GIB)

    def need_memory(self, id: str) -> None:
        """The helper suspends the guest by itself."""
        for guest in [x for x in self.leases.values() if x.host == id and x.state is State.RUNNING]:
            self.change(id, spare_bytes=0)
            self.change(guest.id, LeaseEvent.SUSPEND)
            self.change(guest.id, LeaseEvent.SUSPEND_DONE)

    def act(self) -> tuple[object, ...]:
        self.now += 0.1  # no two rounds at one moment
        return super().act()

    def step_at_random(self, random: Random) -> None:
        jobs = [x.id for x in self.leases.values() if x.kind is Kind.TRAIN]
        sessions = [x.id for x in self.leases.values() if x.kind is Kind.BUILD]
        what = random.choice("sssssstttttttttfummcebilv" if jobs else "s")
        if what == "s" and len(jobs) < 8:
            survival = random.choice([CheckpointMode.SUSPEND, CheckpointMode.SUSPEND_SIGTERM])
            shape = random.choice([(1000, 1), (1000, 1), (500, 1), (250, 1), (1000, 2)])
            self.submit(shape, random.choice("ppq"), 0, survival, True, random.random() < 0.95, None)
        elif what == "t":
            self.wait(random.choice([1.0, 31.0, 31.0, 700.0]))
            self.act()
            for id in list(self.leases):
                if random.random() < 0.7:
                    self.step(id, fails=random.random() < 0.1, used_bytes=GIB)
        elif what == "f":
            self.settle()
        elif what == "u" and jobs:
            self.leave_unused(random.choice(jobs), random.choice([0, 20, 40]))
        elif what == "m" and jobs:
            self.need_memory(random.choice(jobs))
        elif what == "c" and jobs:
            self.change(random.choice(jobs), share=random.random() < 0.7)
        elif what == "e" and jobs:
            self.end(random.choice([*jobs, *sessions]))
        elif what == "b" and len(sessions) < 3:
            self.spawn(random.choice([(250, 1), (1000, 1)]), "p")
        elif what == "i" and sessions:
            self.work(random.choice(sessions), True)
        elif what == "l":
            self.lunch()
        elif what == "v" and sessions:
            self.all_owners_return()


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 1000))]
)
def test_two_jobs_share_a_device_in_any_history(seed):
    world = SharingWorld([World.policy, PatientLasWorld.policy][seed % 2])
    random, joined = Random(seed), 0
    for _ in range(80):
        world.step_at_random(random)
        for each in world.invariants:
            each.function(world)
        joined += sum(bool(x.host) for x in world.leases.values())
    assert joined or seed >= 10


TestBackfill = World.TestCase
TestLas = LasWorld.TestCase
TestPatientLas = PatientLasWorld.TestCase
TestFifo = FifoWorld.TestCase
TestPatientBackfill = PatientWorld.TestCase
TestSrtf = SrtfWorld.TestCase
for case in (TestBackfill, TestLas, TestPatientLas, TestFifo, TestPatientBackfill, TestSrtf):
    case.settings = EXPLORED
