"""The records the broker goes by, in memory and on disk, and the only place that changes them.

* `advance` moves a lease along its table of transitions, logs one line, writes
  the decision and commits; only then does the caller act.
* What is measured (of the machine, and of each lease: `live`) lies beside the
  records and is not stored.
* Readers wait on `seq`, a number that grows with every change.

The log of decisions is `decisions`, the sums of use `usage`, the snapshot for
the planner `snapshot`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from jupyter_gpushare import words
from jupyter_gpushare.broker.balance import Balance
from jupyter_gpushare.broker.decisions import Decisions
from jupyter_gpushare.broker.lending import Lending
from jupyter_gpushare.broker.live import Live, Wakes
from jupyter_gpushare.broker.machine import Meter
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
from jupyter_gpushare.broker.usage import Usage, use_of
from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Event, Kind, Lease, State, advance
from jupyter_gpushare.errors import NotFound, StoreError
from jupyter_gpushare.gpu.verbs import Inventory, Sample

log = logging.getLogger("gpushare.broker")

# Ended jobs that stay in memory (all are on disk).
_MAX_ENDED_JOBS = 2_000
_PROGRESS_S = 10.0
# Between two moments at which the lags of projects, and what was lent, are stored.
_SUMS_S = 300.0
# Pages that wait for news are told this often at most: many changes come together.
_GATHER_S = 0.1
_WAITING = (State.PENDING, State.SUSPENDED)


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


class Book:
    """The records and their changes."""

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
        self.decisions = Decisions(wall)
        self.overrides: dict[str, ProjectOverride] = {}
        self.balance = Balance(Lags())
        self.usage = Usage()
        self.lending = Lending(began_at=clock())
        self._sums_kept_at = clock()
        self.live: dict[str, Live] = {}
        self.wakes = Wakes()
        self.meter = Meter(clock())
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
            self.live[record.id] = Live.since(now)
        self.jobs = {job.id: job for job in loaded.jobs}
        self.decisions = Decisions(self.iso_now, loaded.decisions)
        self.overrides = {o.name: o for o in loaded.overrides}
        self.balance = Balance(loaded.lags)
        self.usage = Usage(loaded.usage)

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
            self._tell_soon()  # nothing to decide

    async def add(self, record: LeaseRecord, *also: Change) -> None:
        """Store a new lease."""
        self.live[record.id] = Live.since(self.clock())
        await self.put_lease(record, *also, *self._count_lent(record.lease.devices))

    async def keep_sums(self, now: float) -> None:
        """Store lags, what was lent and what the GPUs did, now and then: a restart forgets minutes.

        Raises:
            StoreError: the database failed.
        """
        if now - self._sums_kept_at < _SUMS_S:
            return
        self._sums_kept_at = now
        stored: list[Change] = [*self._count_lent()]
        if lags := self.balance.to_store():
            stored.append(lags)
        if row := self.meter.row(now, self.iso_now()):
            stored.append(row)
        if stored:
            await self.commit(*stored)

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
            also.append(self.usage.count(stretch))
        if why:
            also.append(self._decide(changed, event, why, for_lease))
        self._keep(changed)
        return changed, [changed, *also]

    def _timed(self, lease: Lease, state: State, now: float) -> Lease:
        """Return a lease in its new state, with what the order of jobs reads: service received, waiting."""
        if lease.kind is Kind.TRAIN and state is State.RUNNING:
            lease = replace(lease, attained_at=now)
        elif lease.attained_at is not None:
            lease = replace(order.served(lease, now, self.policy.settings()), attained_at=None)
        if state in _WAITING and lease.state not in _WAITING:
            lease = replace(lease, waits_since_at=now)
        return replace(lease, state=state)

    def _count_lent(self, devices: Collection[str] | None = None) -> list[UsageRecord]:
        """Count what was lent on these devices (None: on all), before something changes there."""
        lent = self.lending.count(self.leases.values(), self.clock(), self.iso_now()[:10], devices)
        return [self.usage.count(stretch) for stretch in lent]

    async def tell(self, record: LeaseRecord | None, action: str, text: str) -> None:
        """Say something about a lease to its owner and the administrator, in the log of decisions.

        Without a lease it is about the machine, and for the administrator only.

        Raises:
            StoreError: the database failed.
        """
        sentence = f"{self.name_of(record) if record else 'This machine:'} {text}."
        await self.commit(self.decisions.add(record, action, sentence))
        await self.bump()

    def _decide(self, record: LeaseRecord, event: Event, why: str, for_lease: str) -> DecisionRecord:
        action = {Event.STOP: "requeue", Event.GRANT_ASLEEP: "grant"}.get(event, str(event))
        facts = words.DecisionFacts(
            action=action,
            why=why,
            who=self.name_of(record),
            kind=record.lease.kind,
            for_whom=self._other_name(record, self.leases.get(for_lease)),
        )
        return self.decisions.add(record, action, words.decision(facts), why=why, for_lease=for_lease)

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
        self.woken.set()
        self._tell_soon()

    def _tell_soon(self) -> None:
        self.seq += 1
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


_LEASE_FIELDS = frozenset(Lease.__dataclass_fields__)
