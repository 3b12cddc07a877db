"""Everything the broker knows, in memory and on disk, and the only place that changes it.

* `advance` moves a lease along its table of transitions, logs one line, writes
  the decision and commits; only then does the caller act.
* What is measured (samples, hints of kernels) lives beside the records and is
  not stored: after a restart it is measured again.
* `cluster` is the snapshot that `core.plan` decides on.
* Readers wait on `seq`, a number that grows with every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from jupyter_gpushare import words
from jupyter_gpushare.broker.lending import Lending
from jupyter_gpushare.broker.policy import Policy
from jupyter_gpushare.broker.records import (
    ENDED,
    DecisionRecord,
    JobRecord,
    Lags,
    LeaseRecord,
    ProjectOverride,
    UsageRecord,
)
from jupyter_gpushare.broker.store import Change, Store
from jupyter_gpushare.core import order
from jupyter_gpushare.core.idle import Past, adaptive_timeout_s
from jupyter_gpushare.core.ledger import Ledger
from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Cluster,
    Device,
    Event,
    Kind,
    Lease,
    Project,
    Settings,
    State,
    advance,
)
from jupyter_gpushare.errors import NotFound, StoreError
from jupyter_gpushare.gpu.verbs import Inventory, LeaseSample, Sample

log = logging.getLogger("gpushare.broker")

# Shorter pauses between CUDA calls are not idleness.
_ACTIVE_S = 2.0
# Ended jobs that stay in memory (all are on disk).
_MAX_ENDED_JOBS = 2_000
_PROGRESS_S = 10.0
# Pages that wait for news are told this often at most: many changes come together.
_GATHER_S = 0.1
_WAITING = (State.PENDING, State.SUSPENDED)
# Between two moments at which the lags of projects, and what was lent, are stored.
_LAGS_S = 300.0
# Its device memory lies in host memory, until a resumption is over.
_ASLEEP = (State.SUSPENDED, State.RESUMING)
_GIB = 1 << 30
# Days of use that are shown.
WEEK_DAYS = 7


def use_of(record: LeaseRecord, day: str, seconds: float) -> UsageRecord | None:
    """Return what ``seconds`` in a lease's state count for: used, kept in host memory, or nothing."""
    lease, seconds = record.lease, max(0.0, seconds)
    use = UsageRecord(day=day, user=lease.user, project=lease.project)
    if lease.state is State.RUNNING:
        return replace(use, used_gpu_s=seconds * lease.held_milli * len(lease.devices) / WHOLE_GPU)
    if lease.state in _ASLEEP:
        return replace(use, saved_gib_s=seconds * lease.saved_bytes / _GIB)
    return None


def _begun_anew(record: LeaseRecord, now: float) -> LeaseRecord:
    """Return a record of another boot, whose monotonic moments mean nothing, as if it began now."""
    lease = replace(
        record.lease,
        submitted_at=now,
        queued_at=now,
        waits_since_at=now,
        granted_at=now,
        keep_until_at=0.0,
        attained_at=None if record.lease.attained_at is None else now,
    )
    return replace(record, lease=lease, entered_at=now)


def iso_now() -> str:
    """Return the wall clock, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class Habit:
    """What a session's pauses taught so far; forgotten by a restart of the broker."""

    past: Past = field(default_factory=Past)
    idle_from: float | None = None  # None: at work
    busy_from: float = 0.0
    pause_s: float = 0.0  # the last one

    def saw(self, idle_since: float | None, now: float) -> None:
        """Note whether the session is idle now, and since when."""
        if idle_since is None and self.idle_from is not None:
            self.pause_s, self.busy_from, self.idle_from = now - self.idle_from, now, None
        elif idle_since is not None and self.idle_from is None:
            self.past = self.past.after(self.pause_s, max(0.0, idle_since - self.busy_from))
            self.idle_from = idle_since


@dataclass(slots=True)
class Live:
    """What is measured or hinted about a lease; forgotten with the process."""

    sample: LeaseSample | None = None
    seen_alive: bool = False
    gone_since_at: float | None = None  # its processes are gone since
    habit: Habit = field(default_factory=Habit)
    active_at: float = 0.0  # last sign of work on the GPU
    kernel_busy: bool = False  # hint of its server
    kernel_active_at: float = 0.0
    kernels: dict[str, str] = field(default_factory=dict)  # kernel id -> name
    wanted: bool = False
    retry_at: float = 0.0  # nothing is planned for it before
    resumes_refused: int = 0  # in a row
    effect_retry_at: float = 0.0  # a failed effect is not tried again before
    not_suspendable: str = ""  # the driver refused, until retry_at
    lost: bool = False  # its device state was lost
    progress_stored_at: float = float("-inf")


class Book:
    """The records, their changes, and the snapshot for the planner."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        clock: Callable[[], float],
        wall: Callable[[], str] = iso_now,
    ) -> None:
        self.store = store
        self.policy = policy
        self.clock = clock
        self.iso_now = wall
        self.leases: dict[str, LeaseRecord] = {}  # living ones
        self.jobs: dict[str, JobRecord] = {}
        self.decisions: deque[DecisionRecord] = deque(maxlen=1_000)
        self.overrides: dict[str, ProjectOverride] = {}
        self.lags = Lags()  # of projects behind their fair share
        self._ledger: Ledger | None = None
        self._lags_kept_at = clock()
        self.usage: dict[tuple[str, str, str], UsageRecord] = {}  # by day, user and project
        self.lending = Lending(began_at=clock())
        self.live: dict[str, Live] = {}
        self.inventory: Inventory | None = None
        self.sample: Sample | None = None
        self.sampled_at = float("-inf")
        self.no_job_before = float("-inf")  # the Hub starts nothing just now
        self.strayed: dict[str, str] = {}  # by device: a lease on it that only the device helper knows
        self.seq = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.woken = asyncio.Event()  # for the loop: something changed
        self.told = 0  # the ``seq`` that those who wait were last told
        self._told_at = float("-inf")
        self._telling: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._decision_seq = 0

    def load(self, boot_id: str) -> None:
        """Take over what the last broker left; moments of another boot start anew."""
        loaded = self.store.load()
        now = self.clock()
        leases = loaded.leases
        if loaded.boot_id != boot_id:
            leases = tuple(_begun_anew(record, now) for record in leases)
            self.store.begin_boot(boot_id, leases)
        for record in leases:
            self.leases[record.id] = record
            self.live[record.id] = self.new_live()
        self.jobs = {job.id: job for job in loaded.jobs}
        self.decisions.extend(loaded.decisions)
        self._decision_seq = loaded.decisions[-1].seq if loaded.decisions else 0
        self.overrides = {o.name: o for o in loaded.overrides}
        self.lags = loaded.lags
        self.usage = {(u.day, u.user, u.project): u for u in loaded.usage}

    # ---- changes -------------------------------------------------------------

    async def commit(self, *changes: Change) -> None:
        """Make changes durable; a failure ends the broker (`failed`).

        Raises:
            StoreError: the database failed.
        """
        try:
            await self.store.commit(changes)
        except StoreError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise

    def outlive(self, epoch: int) -> None:
        """Take an epoch above ``epoch``, unless another broker is the one of this database by now.

        Raises:
            StoreError: it is, or the database failed; the broker ends.
        """
        if epoch < self.store.epoch:
            return
        try:
            self.store.raise_epoch(epoch + 1)
        except StoreError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise

    async def put_lease(self, record: LeaseRecord, *also: Change) -> None:
        """Store a changed lease (same state) and what goes with it."""
        self._keep(record)
        await self.commit(record, *also)
        await self.bump()

    async def put_job(self, job: JobRecord) -> None:
        self._keep_job(job)
        await self.commit(job)
        await self.bump()

    async def put_progress(self, job: JobRecord) -> None:
        """Keep how far a job is; on disk, where losing a little harms nobody, every `_PROGRESS_S` at most."""
        live, now = self.live[job.lease_id], self.clock()
        if now - live.progress_stored_at >= _PROGRESS_S:
            live.progress_stored_at = now
            await self.put_job(job)
        elif (job.done, job.total) != (self.jobs[job.id].done, self.jobs[job.id].total):
            self._keep_job(job)
            await self.bump()

    async def add(self, record: LeaseRecord, *also: Change) -> None:
        """Store a new lease."""
        self.live[record.id] = self.new_live()
        await self.put_lease(record, *also, *self._count_lent(record.lease.devices))

    def new_live(self) -> Live:
        now = self.clock()
        return Live(active_at=now, habit=Habit(busy_from=now))

    async def put_override(self, override: ProjectOverride) -> None:
        self.overrides[override.name] = override
        await self.commit(override)
        await self.bump()

    async def advance(
        self,
        record: LeaseRecord,
        event: Event,
        *,
        why: str = "",
        for_lease: str = "",
        job: JobRecord | None = None,
        **changes: Any,
    ) -> LeaseRecord:
        """Move a lease along its table and make it durable; returns the new record.

        Raises:
            Conflict: ``event`` cannot happen now; nothing is changed.
            StoreError: the database failed.
        """
        changed, stored = self.move(record, event, why=why, for_lease=for_lease, job=job, **changes)
        await self.commit(*stored)
        await self.bump()
        return changed

    def move(
        self,
        record: LeaseRecord,
        event: Event,
        *,
        why: str = "",
        for_lease: str = "",
        job: JobRecord | None = None,
        **changes: Any,
    ) -> tuple[LeaseRecord, list[Change]]:
        """Move a lease in memory; the caller commits what is returned before it acts.

        In one step, without a wait, so that a whole plan is taken over before
        anybody else looks.  ``changes`` replace fields of the record, or of its
        `Lease`.  ``why`` (of a decision) is also written to the decision log.
        ``job`` is stored in the same commit.

        Raises:
            Conflict: ``event`` cannot happen now; nothing is changed.
        """
        record = self.leases.get(record.id, record)
        state = advance(record.state, event)
        now = self.clock()
        mine = {k: changes.pop(k) for k in list(changes) if k in _LEASE_FIELDS}
        if why:
            changes["why"] = why
        changed = replace(
            record,
            lease=replace(self._timed(record.lease, state, now), **mine),
            since_at=self.iso_now(),
            entered_at=now,
            **changes,
        )
        log.info(
            "lease=%s user=%s project=%s %s->%s event=%s reason=%s for=%s for_s=%.1f note=%s",
            changed.handle,
            changed.lease.user,
            changed.lease.project,
            record.state,
            state,
            event,
            why or "-",
            for_lease or "-",
            now - record.entered_at,
            changed.note or "-",
        )
        also: list[Change] = []
        ran = record.state is State.RUNNING and state is not State.RUNNING
        if job is None and ran:
            job = self.job_of(record)
        if job is not None:
            if ran:
                job = replace(job, ran_s=job.ran_s + max(0.0, now - record.entered_at))
            self._keep_job(job)
            also.append(job)
        also += self._count_lent({*record.lease.devices, *changed.lease.devices})
        if stretch := use_of(record, self.iso_now()[:10], now - record.entered_at):
            also.append(self._count(stretch))
        if why:
            also.append(self._decide(changed, event, why, for_lease))
        self._keep(changed)
        return changed, [changed, *also]

    def _timed(self, lease: Lease, state: State, now: float) -> Lease:
        """Return a lease in its new state, with what the order of jobs reads: service received, waiting."""
        if lease.kind is Kind.TRAIN and state is State.RUNNING:
            lease = replace(lease, attained_at=now)
        elif lease.attained_at is not None:
            lease = replace(order.served(lease, now, self.settings()), attained_at=None)
        if state in _WAITING and lease.state not in _WAITING:
            lease = replace(lease, waits_since_at=now)
        return replace(lease, state=state)

    def _count_lent(self, devices: Collection[str] | None = None) -> list[UsageRecord]:
        """Count what was lent on these devices (None: on all), before something changes there."""
        lent = self.lending.count(self.leases.values(), self.clock(), self.iso_now()[:10], devices)
        return [self._count(stretch) for stretch in lent]

    def _count(self, stretch: UsageRecord) -> UsageRecord:
        """Add a stretch of use to its day; days that nobody looks at are kept on disk only."""
        key = (stretch.day, stretch.user, stretch.project)
        before = self.usage.get(key)
        if before is not None:
            stretch = replace(
                stretch,
                used_gpu_s=before.used_gpu_s + stretch.used_gpu_s,
                lent_gpu_s=before.lent_gpu_s + stretch.lent_gpu_s,
                saved_gib_s=before.saved_gib_s + stretch.saved_gib_s,
            )
        else:
            newest = sorted({day for day, _, _ in self.usage}, reverse=True)[:WEEK_DAYS]
            self.usage = {k: u for k, u in self.usage.items() if k[0] in newest}
        self.usage[key] = stretch
        return stretch

    async def tell(self, record: LeaseRecord | None, action: str, text: str) -> None:
        """Say something about a lease to its owner and the administrator, in the log of decisions.

        Without a lease it is about the machine, and for the administrator only.

        Raises:
            StoreError: the database failed.
        """
        self._decision_seq += 1
        told = DecisionRecord(
            seq=self._decision_seq,
            at=self.iso_now(),
            lease=record.id if record else "",
            user=record.lease.user if record else "",
            project=record.lease.project if record else "",
            action=action,
            why="",
            for_lease=None,
            sentence=f"{self.name_of(record) if record else 'This machine:'} {text}.",
        )
        self.decisions.append(told)
        await self.commit(told)
        await self.bump()

    def _decide(self, record: LeaseRecord, event: Event, why: str, for_lease: str) -> DecisionRecord:
        self._decision_seq += 1
        action = {Event.STOP: "requeue", Event.GRANT_ASLEEP: "grant"}.get(event, str(event))
        other = self.leases.get(for_lease)
        facts = words.DecisionFacts(
            action=action,
            why=why,
            who=self.name_of(record),
            kind=record.lease.kind,
            for_whom=self._other_name(record, other),
        )
        decision = DecisionRecord(
            seq=self._decision_seq,
            at=self.iso_now(),
            lease=record.id,
            user=record.lease.user,
            project=record.lease.project,
            action=action,
            why=why,
            for_lease=for_lease or None,
            sentence=words.decision(facts),
        )
        self.decisions.append(decision)
        return decision

    def _other_name(self, record: LeaseRecord, other: LeaseRecord | None) -> str:
        """Name who profits: people and jobs only within the same project."""
        if other is None or other.id == record.id:
            return ""
        if other.lease.project == record.lease.project:
            return self.name_of(other)
        what = "a training job" if other.is_job else "a session"
        return f"{what} of project {other.lease.project}"

    def _keep(self, record: LeaseRecord) -> None:
        if record.state in ENDED:
            self.leases.pop(record.id, None)
            self.live.pop(record.id, None)
        else:
            self.leases[record.id] = record

    def _keep_job(self, job: JobRecord) -> None:
        self.jobs[job.id] = job
        if not job.result or len(self.jobs) <= _MAX_ENDED_JOBS:
            return
        ended = [j for j in self.jobs.values() if j.result]
        if len(ended) > _MAX_ENDED_JOBS:
            ended.sort(key=lambda j: j.ended_at or j.submitted_at)
            for old in ended[: len(ended) // 2]:
                del self.jobs[old.id]

    async def bump(self) -> None:
        """Wake the loop, and tell everybody who waits that something changed, at most every `_GATHER_S`."""
        self.seq += 1
        self.woken.set()
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(max(loop.time(), self._told_at + _GATHER_S), self._tell)

    def _tell(self) -> None:
        self.told, self._told_at, self._telling = self.seq, asyncio.get_running_loop().time(), None
        self._news.set()
        self._news = asyncio.Event()

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Return when those who wait were told of a change after ``seq``, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.told <= seq:
                    await self._news.wait()

    # ---- lookups -------------------------------------------------------------

    def get(self, lease_id: str) -> LeaseRecord:
        """Return a living lease.

        Raises:
            NotFound: there is none of this id.
        """
        record = self.leases.get(lease_id)
        if record is None:
            raise NotFound("there is no such lease (it may have ended)")
        return record

    def by_handle(self, handle: str) -> LeaseRecord | None:
        record = self.leases.get(handle.rsplit("-", 1)[0])
        return record if record is not None and record.handle == handle else None

    def by_server(self, user: str, server: str) -> LeaseRecord | None:
        return next((r for r in self.leases.values() if r.lease.user == user and r.server == server), None)

    def job_of(self, record: LeaseRecord) -> JobRecord | None:
        return self.jobs.get(record.id[1:]) if record.is_job else None

    def name_of(self, record: LeaseRecord) -> str:
        """Return how people call a lease: ``bo's job train.py (2 GPUs)``."""
        lease = record.lease
        size = words.size_of(lease)
        job = self.job_of(record)
        what = f"job {job.name}" if job is not None else "session"
        return f"{lease.user}'s {what} ({size})"

    def device_name(self, uuids: Iterable[str]) -> str:
        """Return the model of a lease's devices, for people."""
        wanted = set(uuids)
        devices = self.inventory.devices if self.inventory else ()
        return next((d.name for d in devices if d.uuid in wanted), "")

    # ---- the snapshot --------------------------------------------------------

    @property
    def total_milli(self) -> int:
        return WHOLE_GPU * len(self.inventory.devices) if self.inventory else 0

    def projects(self) -> tuple[Project, ...]:
        return tuple(p.project(self.total_milli, self.overrides.get(p.name)) for p in self.policy.projects)

    def devices(self) -> Iterator[Device]:
        if self.inventory is None:
            return
        # A device that the helper inventoried and does not measure any more is out of service.
        healthy = {d.uuid: d.healthy for d in self.sample.devices} if self.sample else None
        for device in self.inventory.devices:
            yield Device(
                uuid=device.uuid,
                memory_bytes=device.memory_bytes,
                reserve_bytes=device.reserve_bytes,
                node=self.inventory.host,
                island=device.island,
                name=device.name,
                profile=device.profile,
                usable=(device.healthy if healthy is None else healthy.get(device.uuid, False))
                and device.uuid not in self.strayed,
                suspendable=device.suspendable,
            )

    def cluster(self, now: float, extra: Iterable[Lease] = ()) -> Cluster:
        """Return the snapshot at ``now``; ``extra`` are leases that are only being considered."""
        budget = self.inventory.host_budget_bytes if self.inventory else 0
        return Cluster(
            devices=tuple(self.devices()),
            projects=self.projects(),
            leases=(*(self.measured(r, now) for r in self.leases.values()), *extra),
            settings=self.settings(budget),
            lags_gpu_s=self._ledger.lags_gpu_s if self._ledger else {},
        )

    def add_up(self, now: float) -> None:
        """Bring up to date what each project had against its fair share (`core.ledger`)."""
        projects = self.projects()
        if len(projects) < 2 or not self.policy.catch_up_s:
            return
        capacity = WHOLE_GPU * sum(device.usable for device in self.devices())
        ledger = self._ledger
        if ledger is not None:
            ledger.advance(now)
        if ledger is None or (ledger.projects, ledger.capacity_milli) != (projects, capacity):
            lags = ledger.lags_gpu_s if ledger else self.lags.gpu_s
            ledger = self._ledger = Ledger(projects, capacity, lags, now=now)
        ledger.recount(record.lease for record in self.leases.values())

    async def keep_lags(self, now: float) -> None:
        """Store lags, and what was lent, now and then: a restart forgets minutes and not a day.

        Raises:
            StoreError: the database failed.
        """
        if now - self._lags_kept_at < _LAGS_S:
            return
        self._lags_kept_at = now
        stored: list[Change] = [*self._count_lent()]
        if self._ledger is not None:
            lags = Lags(gpu_s={name: round(lag, 1) for name, lag in self._ledger.lags_gpu_s.items()})
            if lags != self.lags:
                self.lags = lags
                stored.append(lags)
        if stored:
            await self.commit(*stored)

    def settings(self, host_budget_bytes: int = 0) -> Settings:
        """Return the knobs of the policy."""
        policy = self.policy
        return Settings(
            idle_timeout_s=policy.idle_timeout_s,
            host_budget_bytes=host_budget_bytes,
            order=policy.order,
            las_thresholds_gpu_s=policy.las_thresholds_gpu_s,
            min_run_s=policy.min_run_s,
            preempt_cost_s=policy.preempt_cost_s,
            guard_s=policy.guard_s,
            skip_wait_s=policy.skip_wait_s,
            catch_up_s=policy.catch_up_s,
        )

    def measured(self, record: LeaseRecord, now: float) -> Lease:
        """Return a lease with what is measured about it filled in."""
        live, lease = self.live[record.id], record.lease
        sample = live.sample
        return replace(
            lease,
            used_bytes=sum(sample.used_bytes.values()) if sample else 0,
            idle_since_at=self.idle_since(record, now),
            wanted=live.wanted,
            retry_at=max(live.retry_at, self.no_job_before) if record.is_job else live.retry_at,
            suspendable=not self.suspend_obstacle(record),
            idle_timeout_s=self._own_timeout_s(record),
        )

    def _own_timeout_s(self, record: LeaseRecord) -> float | None:
        if not self.policy.adaptive_idle or record.is_job:
            return None
        gpus = record.lease.held_milli * record.lease.device_count / WHOLE_GPU
        return adaptive_timeout_s(self.live[record.id].habit.past, gpus) if gpus else None

    def idle_since(self, record: LeaseRecord, now: float) -> float | None:
        """Return since when neither a kernel nor the GPU of a lease did anything; None: busy."""
        live = self.live[record.id]
        active = max(live.active_at, live.kernel_active_at, record.lease.granted_at)
        return None if live.kernel_busy or now - active < _ACTIVE_S else active

    def suspend_obstacle(self, record: LeaseRecord) -> str:
        """Return why a lease cannot be suspended; empty: it can."""
        live = self.live[record.id]
        if live.not_suspendable and self.clock() < live.retry_at:
            return live.not_suspendable
        if live.sample is not None and not live.sample.suspendable:
            return live.sample.suspend_reason
        for device in self.inventory.devices if self.inventory else ():
            if device.uuid in record.lease.devices and not device.suspendable:
                return device.suspend_reason
        return ""


_LEASE_FIELDS = frozenset(Lease.__dataclass_fields__)
