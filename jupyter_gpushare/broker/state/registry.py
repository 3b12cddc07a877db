"""Leases and jobs in memory and on disk; the only module that changes them.

* A `transitions.Transition` or `Edit` changes a lease.  The change is logged, and
  committed before the caller acts on it.
* Measurements (`devices`, `observations`) are in memory only.
* Readers wait on `notifications`, which numbers all changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.culling import Culling
from jupyter_gpushare.broker.state.observations import DeviceObservations, Observation, WakeTimes
from jupyter_gpushare.broker.state.policy import Policy
from jupyter_gpushare.broker.state.records import (
    ENDED,
    DecisionRecord,
    JobRecord,
    Lags,
    LeaseRecord,
    LendingMode,
    LendingOverride,
    Owner,
    PartedPairs,
    ProjectOverride,
    SuspensionCounts,
    UserLags,
    with_current_boot,
)
from jupyter_gpushare.broker.state.session_queue import SessionQueue
from jupyter_gpushare.broker.state.store import Journal, Loaded, Store
from jupyter_gpushare.broker.state.tables import Change
from jupyter_gpushare.broker.state.transitions import (
    Edit,
    Granted,
    GrantedAsleep,
    ResumeDone,
    Transition,
    log_transition,
)
from jupyter_gpushare.broker.state.usage import Counted, FairnessTracker, Meter, Tally, UsageSums
from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Grant, Kind, Lease, LeaseEvent, Notice, State, advance
from jupyter_gpushare.core.pairs import Parted
from jupyter_gpushare.errors import Conflict, DiskFull, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.wire import Text
from jupyter_gpushare.wall_clock import iso_now

log = logging.getLogger("gpushare.broker")


# ---- the log of decisions: one sentence each, with lease, owner and reason ---
# Owners and administrators read it; every entry is also stored.

# Entries in memory; the database has all.
_MAX_ENTRIES = 1_000


class DecisionLog:
    """Creates all entries and keeps the newest in memory."""

    def __init__(self, wall: Callable[[], str], stored: Iterable[DecisionRecord] = ()) -> None:
        self.latest = deque(stored, maxlen=_MAX_ENTRIES)
        self.counted: Counter[tuple[str, str]] = Counter()  # by action and reason, for metrics
        self._wall = wall
        self._seq = self.latest[-1].seq if self.latest else 0

    def move_owner(self, old: str, new: str) -> None:
        """Move the entries about leases of the owner ``old`` to ``new``."""
        for number, entry in enumerate(self.latest):
            if entry.user == old:
                self.latest[number] = replace(entry, user=new)

    def made_way_for(self, lease_id: str) -> tuple[str, ...]:
        """Return the actions on other leases for this one since its last grant, from the newest entries."""
        found: dict[str, None] = {}
        for entry in reversed(self.latest):
            if entry.lease == lease_id and entry.action == "grant":
                break
            if entry.for_lease == lease_id:
                found[entry.action] = None
        return tuple(found)

    def add(
        self, record: LeaseRecord | None, action: str, text: Text, *, why: str = "", for_lease: str = ""
    ) -> DecisionRecord:
        """Return a new entry, which the caller stores; without a lease the entry is about the machine."""
        self._seq += 1
        self.counted[action, why] += 1
        entry = DecisionRecord(
            seq=self._seq,
            at=self._wall(),
            lease=record.id if record else "",
            user=record.lease.user if record else "",
            project=record.lease.project if record else "",
            action=action,
            why=why,
            for_lease=for_lease or None,
            texts=(text,),
        )
        self.latest.append(entry)
        return entry


# ---- the owners that the broker knows; no waiting job of an absent owner starts


class KnownOwners:
    """All owners, and the absent ones; only `control.ownership` changes them."""

    def __init__(self) -> None:
        self.of: dict[str, Owner] = {}  # by `Owner.user`
        self.absent: frozenset[str] = frozenset()
        self.are_undated = False  # the Hub does not report the creation time of all users
        self.doubted = asyncio.Event()  # set when the Hub may not have an owner

    def load(self, stored: Iterable[Owner]) -> None:
        """Replace all owners with those on disk."""
        self.of = {owner.user: owner for owner in stored}
        self.absent |= {user for user, owner in self.of.items() if owner.held or owner.is_former}

    def doubt(self, user: str) -> None:
        """Start no job of an owner until the Hub is asked again; it reported that it has no such user."""
        self.absent |= {user}
        self.doubted.set()


# ---- all leases that have not ended, waiting jobs apart from the others ------
# Thousands of jobs may wait, and nothing is measured about them.  So code that visits
# leases every second visits only the others, and code that needs the waiting jobs
# caches its result until a counter of the index changes.


class LeaseIndex:
    """Leases by id, as read-only views: ``all``, which consists of ``queued`` and ``placed``."""

    def __init__(self) -> None:
        self._all: dict[str, LeaseRecord] = {}
        self._queued: dict[str, LeaseRecord] = {}
        self._placed: dict[str, LeaseRecord] = {}
        self.all: Mapping[str, LeaseRecord] = MappingProxyType(self._all)
        self.queued: Mapping[str, LeaseRecord] = MappingProxyType(self._queued)  # jobs that are pending
        self.placed: Mapping[str, LeaseRecord] = MappingProxyType(self._placed)
        self.changes = 0  # of any lease
        self._queue_changes = 0
        self._kept: tuple[object, tuple[Lease, ...]] = None, ()

    def put(self, record: LeaseRecord) -> None:
        """Add or replace a lease."""
        is_queued = record.is_job and record.state is State.PENDING
        into, other = (self._queued, self._placed) if is_queued else (self._placed, self._queued)
        self._all[record.id] = into[record.id] = record
        was_elsewhere = other.pop(record.id, None) is not None
        self.changes += 1
        self._queue_changes += is_queued or was_elsewhere

    def drop(self, id: str) -> None:
        """Remove a lease, if the index has it."""
        if self._all.pop(id, None) is not None:
            self.changes += 1
            self._placed.pop(id, None)
            self._queue_changes += self._queued.pop(id, None) is not None

    def clear(self) -> None:
        """Remove all leases."""
        for id in list(self._all):
            self.drop(id)

    def waiting(
        self, version: object, as_planned: Callable[[Iterable[LeaseRecord]], Iterable[Lease]]
    ) -> tuple[Lease, ...]:
        """Return what ``as_planned`` makes of the waiting jobs.

        The result is cached until the queue or ``version`` changes.
        """
        key = self._queue_changes, version
        if self._kept[0] != key:
            self._kept = key, tuple(as_planned(self._queued.values()))
        return self._kept[1]


# ---- the lending mode in force: the configured one, unless an administrator has set another


@dataclass(slots=True)
class LendingSwitch:
    """Configured mode and override; the override is stored and outlives restarts."""

    configured: LendingMode
    override: LendingOverride = field(default_factory=LendingOverride)

    @property
    def mode(self) -> LendingMode:
        """The mode in force."""
        return self.configured if self.override.mode is None else self.override.mode

    @property
    def obstacle(self) -> str:
        """Why no session is suspended, as a part of a sentence; empty while lending is on."""
        match self.mode:
            case LendingMode.ON:
                return ""
            case LendingMode.WATCH:
                return "lending is only watched on this machine"
            case LendingMode.OFF:
                return "lending is switched off on this machine"


# ---- notifications of readers that wait for a change, such as long polls ------

# Minimum interval between notifications; changes in between are bundled.
_INTERVAL_S = 0.1
# Changes per epoch; 2**21 epochs fit into the integers that a JSON number holds exactly.
_PER_EPOCH = 2**32


class Notifications:
    """Counts changes (`seq`) and wakes waiting readers.

    The numbers of a broker are above those of its predecessor.  Otherwise a client whose
    request outlived a restart would take new answers for old ones.
    """

    def __init__(self, epoch: int) -> None:
        self.seq = epoch * _PER_EPOCH  # of the last change
        self.notified_seq = self.seq  # of the last notification
        self._notified_at = float("-inf")  # clock of the event loop
        self._timer: asyncio.TimerHandle | None = None
        self._event = asyncio.Event()

    def add(self) -> None:
        """Count a change; readers are notified within `_INTERVAL_S`."""
        self.seq += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._notified_at + _INTERVAL_S), self._notify)

    def enter(self, epoch: int) -> None:
        """Continue with the numbers of a higher epoch, and count this as a change."""
        self.seq = epoch * _PER_EPOCH
        self.add()

    def is_last(self, seq: int) -> bool:
        """Return whether a reader with ``seq`` knows all changes; False for a number of another broker."""
        return self.notified_seq <= seq <= self.seq

    def _notify(self) -> None:
        self.notified_seq, self._timer = self.seq, None
        self._notified_at = asyncio.get_running_loop().time()
        self._event.set()
        self._event = asyncio.Event()

    async def wait_after(self, seq: int, timeout_s: float) -> None:
        """Wait until a change after ``seq`` is notified, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.notified_seq <= seq:
                    await self._event.wait()


# ---- the registry ------------------------------------------------------------

# Ended jobs in memory; the database has all.
_MAX_ENDED_JOBS = 2_000
# Intervals at which a job's progress, and lags and sums of use, are stored.
_PROGRESS_S = 10.0
_SUMS_S = 300.0
_WAITING = (State.PENDING, State.SUSPENDED)


class Registry:
    """All leases that have not ended, jobs, decisions and sums of use."""

    def __init__(
        self, store: Store, policy: Policy, *, clock: Callable[[], float], wall: Callable[[], str] = iso_now
    ) -> None:
        self.store = store
        self.policy = policy
        self.clock = clock
        self.iso_now = wall
        self.index = LeaseIndex()
        self._jobs, self._observations = dict[str, JobRecord](), dict[str, Observation]()
        # Read-only views: only the methods below change leases and jobs.
        self.leases = self.index.all  # leases that have not ended
        self.jobs: Mapping[str, JobRecord] = MappingProxyType(self._jobs)
        self.observations: Mapping[str, Observation] = MappingProxyType(self._observations)
        self.decisions = DecisionLog(wall)
        self.overrides, self.owners = dict[str, ProjectOverride](), KnownOwners()
        self.fairness = FairnessTracker(Lags(), UserLags())
        self.lending_switch = LendingSwitch(policy.lending)
        self.suspensions, self._sums_kept_at = SuspensionCounts(), clock()
        self.parted = Parted()
        self.wake_times, self.meter = WakeTimes(), Meter(clock())
        self.tally, self.devices, self.culling = Tally(), DeviceObservations(), Culling()
        self.session_queue = SessionQueue()
        self.usage = UsageSums(self.devices.model_name, clock())
        self.hub_backoff_until = float("-inf")  # no job is started before this time
        self.notices: dict[str, Notice] = {}  # by the session whose owner is notified
        self.notifications = Notifications(store.epoch)
        self.journal = Journal(store, self._roll_back)
        self.changed = asyncio.Event()  # wakes the loop

    def load(self, boot_id: str) -> None:
        """Take over the state of the last broker; convert monotonic times of another boot to this one.

        Raises:
            StoreError: the database failed.
        """
        loaded = self.store.load()
        now = self.clock()
        leases = loaded.leases
        if loaded.boot_id != boot_id:
            leases = with_current_boot(leases, now, self.iso_now())
            self.store.begin_boot(boot_id, leases)
            # Its times belong to another clock.
            loaded = replace(loaded, meta=loaded.meta._replace(parted=PartedPairs()))
        self._take(leases, loaded)

    def _roll_back(self) -> None:
        """Replace leases, jobs and sums with those on disk; measurements of leases stay.

        Raises:
            StoreError: the database cannot be read.
        """
        loaded = self.store.load()
        observations = dict(self._observations)
        for known in (self.index, self._jobs, self._observations):
            known.clear()
        self._take(loaded.leases, loaded)
        for lease_id in observations.keys() & self.leases.keys():
            self._observations[lease_id] = observations[lease_id]
        log.warning("the disk is full: what could not be stored is undone, and changes are refused")
        self.changed.set()
        self.notifications.add()

    def _take(self, leases: Iterable[LeaseRecord], loaded: Loaded) -> None:
        for record in leases:
            self._open(record)
        self._jobs.update({job.id: job for job in loaded.jobs})
        self.decisions = DecisionLog(self.iso_now, loaded.decisions)
        self.overrides = {o.name: o for o in loaded.overrides}
        lags, self.lending_switch.override, self.suspensions, self.devices.drains, users, parted = loaded.meta
        self.parted = Parted(parted.rows)
        self.fairness = FairnessTracker(lags, users)
        self.usage.load(loaded.usage)
        self.owners.load(loaded.owners)

    # ---- changes -------------------------------------------------------------

    async def raise_epoch_above(self, epoch: int) -> None:
        """Take an epoch above ``epoch``.

        Raises:
            DiskFull: the epoch cannot be stored; the broker does nothing until it is.
            StoreError: a newer broker uses the database, or the database failed; the broker ends.
        """
        if epoch >= self.store.epoch:
            if self.journal.is_disk_full and not await self.journal.retry():
                raise DiskFull
            self.journal.raise_epoch(epoch + 1)
            self.notifications.enter(self.store.epoch)

    async def edit(self, record: LeaseRecord, edit: Edit, *also: Change) -> LeaseRecord:
        """Change a lease within its state and store it with ``also``; return the new record.

        Raises:
            Conflict: the lease has ended.
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        (changed,) = await self.edit_all([(record, edit)], *also)
        return changed

    async def edit_all(self, edits: Iterable[tuple[LeaseRecord, Edit]], *also: Change) -> list[LeaseRecord]:
        """Change leases as `edit` does, all or none, and the jobs in ``also`` with them."""
        self.journal.check()
        changed = [edit(self._current(record)) for record, edit in edits]
        for record in changed:
            self._cache(record)
        for each in also:
            if isinstance(each, JobRecord):
                self.cache_job(each)
        await self.journal.commit(*changed, *also)
        await self.notify()
        return changed

    async def put_job(self, job: JobRecord) -> None:
        """Store a changed job.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        self.journal.check()
        self.cache_job(job)
        await self.journal.commit(job)
        await self.notify()

    async def put_progress(self, job: JobRecord) -> None:
        """Keep the progress of a job; store it at most every `_PROGRESS_S`, so a crash loses few reports.

        Raises:
            StoreError: the database failed; the broker ends.
        """
        observation, now = self.observations[job.lease_id], self.clock()
        if not self.journal.is_disk_full and now - observation.progress_stored_at >= _PROGRESS_S:
            observation.progress_stored_at = now
            await self.put_job(job)
        elif (job.done, job.total) != (self.jobs[job.id].done, self.jobs[job.id].total):
            self.cache_job(job)
            self.notifications.add()  # nothing to decide

    async def add(self, record: LeaseRecord, job: JobRecord) -> None:
        """Store a new job and its lease.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        self.journal.check()
        self._open(record)
        self.cache_job(job)
        await self.journal.commit(record, job)
        await self.notify()

    async def add_granted(self, record: LeaseRecord, grant: Grant) -> LeaseRecord:
        """Store and grant a new session in one step, so that no other lease gets its capacity.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        self.journal.check()
        transition = self.granted(record, grant)
        self._open(record)
        return await self.advance(record, transition)

    def granted(self, record: LeaseRecord, grant: Grant) -> Granted:
        """Return the transition of a grant, with memory limits from the held parts of the devices."""
        kind = GrantedAsleep if grant.asleep else Granted
        return kind(
            why=grant.why,
            devices=grant.devices,
            held_milli=grant.held_milli,
            limits=self.devices.limits(record.lease.size, grant.devices, grant.held_milli),
            borrowed=grant.borrowed,
            host=grant.host,
            guest_bytes=grant.guest_bytes,
        )

    def _open(self, record: LeaseRecord) -> None:
        self.index.put(record)
        self._observations[record.id] = Observation.since(self.clock())

    async def store_sums(self, now: float) -> None:
        """Store lags, lending and use of the GPUs every `_SUMS_S`, so that a crash loses only minutes.

        Raises:
            StoreError: the database failed.
        """
        if self.journal.is_disk_full or now - self._sums_kept_at < _SUMS_S:
            return
        self._sums_kept_at = now
        stored: list[Change] = [*self._count_lent()]
        counted, held = self.usage.count_held(self.index.placed.values(), now, self.iso_now())
        for record in counted:
            self._cache(record)
        stored += [*counted, *held, *self.usage.unstored()]
        stored += self.fairness.to_store()
        if row := self.meter.row(now, self.iso_now()):
            stored.append(row)
        if stored:
            await self.journal.commit(*stored)

    async def put_override(self, override: ProjectOverride, notice: wire.Text) -> None:
        """Store new numbers of a project, or their removal, with ``notice`` in the log of decisions.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        self.journal.check()
        self.overrides[override.name] = override
        if override.is_empty:
            del self.overrides[override.name]
        await self.journal.commit(override, self.decisions.add(None, "project", notice))
        await self.notify()

    async def advance(
        self, record: LeaseRecord, transition: Transition, *, job: JobRecord | None = None
    ) -> LeaseRecord:
        """Apply a transition to a lease, store it with ``job``, and return the new record.

        Raises:
            Conflict: the present state does not allow it, or the lease has ended; nothing is changed.
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        self.journal.check()
        changed, stored = self.move(record, transition, job=job)
        await self.journal.commit(*stored)
        await self.notify()
        return changed

    def move(
        self, record: LeaseRecord, transition: Transition, *, job: JobRecord | None = None
    ) -> tuple[LeaseRecord, list[Change]]:
        """Apply a transition in memory; the caller commits the returned changes before it acts on them.

        The method does not wait, so that no reader sees half of a plan.

        Raises:
            Conflict: the present state does not allow it, or the lease has ended; nothing is changed.
        """
        record = self._current(record)
        state, now = advance(record.state, transition.event), self.clock()
        changed = replace(
            transition.apply(replace(record, lease=self._timed(record.lease, state, now)), now),
            since_at=self.iso_now(),
            entered_at=now,
            why=transition.why or record.why,
        )
        log_transition(record, changed, transition)
        self.tally.moved(record, state, now, self._observations.get(record.id))
        also: list[Change] = []
        ran = record.state is State.RUNNING and state is not State.RUNNING
        if record.lease.host and record.state is State.RUNNING:
            changed = self._with_time_as_guest(changed)
        if job is None and ran:
            job = self.job_of(record)
        if job is not None:
            if ran:
                job = replace(job, ran_s=job.ran_s + max(0.0, now - record.entered_at))
            self.cache_job(job)
            also.append(job)
        also += self._count_lent({*record.lease.devices, *changed.lease.devices})
        also += map(self.usage.count, self.usage.of(record, self.iso_now(), record.uncounted_s(now)))
        if transition.why:
            event = transition.event
            action = {LeaseEvent.STOP: "requeue", LeaseEvent.GRANT_ASLEEP: "grant"}.get(event, str(event))
            also.append(self.decision(changed, action, transition.why, transition.for_lease))
        if changed.moved and isinstance(transition, ResumeDone):
            key = "notice.moved_job" if changed.is_job else "notice.moved_session"
            line = messages.text(key, self.subject_of(changed))
            also.append(self.decisions.add(changed, str(LeaseEvent.RESUME), line))
        self._cache(changed)
        if changed.id in self.observations:
            self.observations[changed.id].enter(state, transition.for_lease)
        return changed, [changed, *also]

    def _timed(self, lease: Lease, state: State, now: float) -> Lease:
        """Return a lease in its new state, with its times and turns.

        A job that failed to start keeps its waiting time, as does a guest until it has its own device.
        """
        starts = lease.state in (State.GRANTED, State.RESUMING)
        keeps = bool(lease.host) and lease.state is state  # it keeps the device that its host has left
        if lease.kind is Kind.TRAIN and state is State.RUNNING:
            lease = replace(lease, attained_at=None if lease.host else now)
        elif lease.attained_at is not None:
            lease = replace(order.served(lease, now, self.policy.settings()), attained_at=None)
        if state in _WAITING and lease.state not in _WAITING and not (starts or lease.host):
            lease = replace(lease, waits_since_at=now)
        elif lease.kind is Kind.TRAIN and state is State.RUNNING and (keeps or (starts and not lease.host)):
            granted_at = lease.granted_at if lease.state is State.GRANTED else now
            lease = order.with_turn(lease, granted_at, self.policy.settings())
        return replace(lease, state=state)

    def _with_time_as_guest(self, record: LeaseRecord) -> LeaseRecord:
        """Return the record of a guest with the service that it got from its host's GPU."""
        observation = self._observations[record.id]
        guest_gpu_s, observation.guest_gpu_s = observation.guest_gpu_s, 0.0
        lease = replace(record.lease, attained_gpu_s=record.lease.attained_gpu_s + guest_gpu_s)
        return replace(record, lease=lease)

    def _count_lent(self, devices: Collection[str] | None = None) -> list[Counted]:
        """Count what was lent on these devices (None: all) until now; called before a change on them."""
        return self.usage.count_lent(self.leases.values(), self.clock(), self.iso_now(), devices)

    async def record_notice(
        self, record: LeaseRecord | None, action: str, key: str, *details: str | wire.Text
    ) -> None:
        """Add a notice about a lease to the log of decisions, for its owner and administrators.

        ``key`` names its template, whose first argument is the lease.  A notice without a lease is about
        the machine, and only administrators see it.  While the disk is full it is only logged.

        Raises:
            StoreError: the database failed.
        """
        notice = messages.text("notice.machine", *details)
        if record is not None:
            notice = messages.text(key, self.subject_of(record), *details)
        if self.journal.is_disk_full:
            log.warning("not stored: %s", messages.english(notice))
            return
        await self.journal.commit(self.decisions.add(record, action, notice))
        await self.notify()

    def decision(self, record: LeaseRecord, action: str, why: str, for_lease: str) -> DecisionRecord:
        """Return a new entry of the log of decisions, which the caller stores."""
        beneficiary = self._beneficiary(record, self.leases.get(for_lease))
        made_way = self.decisions.made_way_for(record.id) if action == "grant" else ()
        line = messages.decision(
            action, why, self.subject_of(record), record.lease.kind, beneficiary, made_way
        )
        return self.decisions.add(record, action, line, why=why, for_lease=for_lease)

    def _beneficiary(self, record: LeaseRecord, other: LeaseRecord | None) -> wire.Text | None:
        """Return the name of the lease that profits, or only its project if that is another one."""
        if other is None or other.id == record.id:
            return None
        if other.lease.project == record.lease.project:
            return self.subject_of(other)
        key = "part.job_of_project" if other.is_job else "part.session_of_project"
        return messages.text(key, other.lease.project)

    def _current(self, record: LeaseRecord) -> LeaseRecord:
        """Return the present record of a lease; the caller may have an older one."""
        current = self.leases.get(record.id)
        if current is None:
            raise Conflict("the lease %1 has ended", record.handle)
        return current

    def _cache(self, record: LeaseRecord) -> None:
        if record.state in ENDED:
            self.index.drop(record.id)
            self._observations.pop(record.id, None)
        else:
            self.index.put(record)

    async def want(self, record: LeaseRecord) -> None:
        """Note that the owner needs a lease that is suspended or about to be; ignored in other states.

        Raises:
            Conflict: the lease has ended.
        """
        record = self._current(record)
        if self.observations[record.id].want(record.state, self.clock()):
            log.info("lease=%s wants its GPU back", record.handle)
            await self.notify()

    def cache_job(self, job: JobRecord) -> None:
        """Keep a job that the caller stores; beyond `_MAX_ENDED_JOBS` ended jobs drop the older half."""
        self._jobs[job.id] = job
        if not job.result or len(self.jobs) <= _MAX_ENDED_JOBS:
            return
        ended = [j for j in self.jobs.values() if j.result]
        if len(ended) > _MAX_ENDED_JOBS:
            ended.sort(key=lambda j: j.ended_at or j.submitted_at)
            for old in ended[: len(ended) // 2]:
                del self._jobs[old.id]

    async def notify(self) -> None:
        """Wake the loop, and notify waiting readers within 0.1 s (`Notifications`)."""
        self.changed.set()
        self.notifications.add()

    # ---- lookups -------------------------------------------------------------

    def get(self, lease_id: str) -> LeaseRecord:
        """Return a lease that has not ended.

        Raises:
            NotFound: no such lease has this id.
        """
        record = self.leases.get(lease_id)
        if record is None:
            raise NotFound("there is no such lease (it may have ended)")
        return record

    def by_handle(self, handle: str) -> LeaseRecord | None:
        """Return the lease with this handle; None for the handle of an earlier attempt."""
        record = self.leases.get(handle.rsplit("-", 1)[0])
        return record if record is not None and record.handle == handle else None

    def of_uid(self, uid: int) -> list[LeaseRecord]:
        """Return the leases whose processes run as this uid; none if several users share it."""
        found = [record for record in self.leases.values() if record.uid == uid >= 0]
        return found if len({record.lease.user for record in found}) == 1 else []

    def by_server(self, user: str, server: str) -> LeaseRecord | None:
        """Return the lease of a user's server; ``server`` is its name at the Hub."""
        return next((r for r in self.leases.values() if r.lease.user == user and r.server == server), None)

    def job_of(self, record: LeaseRecord) -> JobRecord | None:
        """Return the job of a lease, or None for a session."""
        return self.jobs.get(record.id[1:]) if record.is_job else None

    def subject_of(self, record: LeaseRecord) -> wire.Text:
        """Return the name of a lease in sentences: ``bo's job train.py (2 GPUs)``."""
        user, size, job = record.lease.user, messages.size_text(record.lease.size), self.job_of(record)
        if job is not None:
            return messages.text("decision.job", user, job.name, size)
        return messages.text("decision.session", user, size)


# ---- the daily budget to keep idle sessions from being lent ------------------
# A project with its own ``keep_minutes_per_day`` has its own budget; all other projects
# share the site's budget.


def keep_budget(registry: Registry, project: str) -> float:
    """Return the minutes per day for which a user may keep idle sessions of a project."""
    policy = registry.policy
    own = _own(registry, project)
    return policy.keep_minutes_per_day if own is None else own


def keep_left(registry: Registry, user: str, project: str = "") -> float:
    """Return the minutes left today (UTC) in a user's budget for a project, or in the site's budget."""
    today, usage = registry.iso_now()[:10], registry.usage
    if _own(registry, project) is not None:
        used_s = usage.kept_s(today, user, project)
    else:
        known = usage.kept_projects(today, user)
        used_s = sum(usage.kept_s(today, user, each) for each in known if _own(registry, each) is None)
    return max(0.0, keep_budget(registry, project) - used_s / 60)


def _own(registry: Registry, project: str) -> float | None:
    config = registry.policy.project_config(project)
    return None if config is None else config.keep_minutes_per_day
