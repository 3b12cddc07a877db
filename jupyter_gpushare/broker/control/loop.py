"""The control loop: measure, decide, record the intent, act, observe.

The loop is level-triggered.  Every round reads the present state, asks the engine what to do, and makes
sure that every lease in a transitional state has an effect at work (`effects`).  No step counts as done
before it was observed: an effect that fails is started again, and a restarted broker continues from the
states that it finds in the database and at the device helper.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import starmap

from jupyter_gpushare.backends.base import DeviceBackend, Hub, HubError, ServerKey
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.control.effects import POLL_S, START_S, Effects
from jupyter_gpushare.broker.control.ending import apply_time_limits
from jupyter_gpushare.broker.control.fenced_hub import FencedHub, StartTickets
from jupyter_gpushare.broker.control.guests import GuestControl
from jupyter_gpushare.broker.control.lending_control import LendingControl
from jupyter_gpushare.broker.control.observer import Metering, Observer
from jupyter_gpushare.broker.control.ownership import Ownership
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.culling import culler_of
from jupyter_gpushare.broker.state.observations import Faults
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.tables import Change
from jupyter_gpushare.broker.state.transitions import Kept, ResumeBegun, Stopping, SuspendBegun
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Grant, Requeue, Resume, State, Suspend
from jupyter_gpushare.error_log import ErrorLog
from jupyter_gpushare.errors import Conflict, DeviceError, DiskFull, HelperError, StoreError, Superseded
from jupyter_gpushare.protocol.helper import ErrorKind, Phase
from jupyter_gpushare.protocol.wire import JOB_SERVER_NAME

log = logging.getLogger("gpushare.broker")


# ---- work that continues while nothing can be stored: the disk is full, or the database does not answer
# * On a full disk, stored intents are carried out (`carry_out`), and their results are stored later.  Jobs
#   do not start.  While a commit hangs, an effect that has not begun waits for the commit.
# * Wanted sessions wake (`wake`).  Their resume is the only effect without a stored intent.  The device
#   helper resumes a session if no living lease has its part of the devices.  It writes the resume down
#   first, and refuses leases that do not fit beside it.  This or the next broker reads the resume from the
#   sample as soon as it can store, and records and confirms it (`Effects`).
#
# Nothing else changes, and no request that changes something is answered.

# The recorded states of a lease whose memory the driver may have moved to RAM.
_ASLEEP = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)


class Unstored:
    """Wakes sessions while nothing can be stored; on a full disk, also carries out stored intents."""

    def __init__(self, registry: Registry, devices: DeviceBackend, effects: Effects) -> None:
        self._registry = registry
        self._devices = devices
        self._effects = effects
        self._errors = ErrorLog(log)
        self.wakes: dict[str, asyncio.Task[None]] = {}  # by lease

    def carry_out(self, now: float) -> None:
        """Carry out stored suspensions and ends, except suspensions of wanted sessions."""
        for record in list(self._registry.index.placed.values()):
            wanted = self._registry.observations[record.id].wanted
            if record.state is State.STOPPING or (record.state is State.SUSPENDING and not wanted):
                self._effects.reconcile(record, now)

    def wake(self) -> None:
        """Start to resume wanted sessions, without a wait for a commit."""
        for record in self._wakeable():
            if record.id not in self.wakes:
                name = f"wake {record.handle}"
                self.wakes[record.id] = asyncio.create_task(self._resume(record), name=name)

    async def _resume(self, record: LeaseRecord) -> None:
        source = f"lease={record.handle} wake"
        try:
            moved = await self._devices.resume(record.handle, unrecorded=True)
            if moved.done:
                log.warning("lease=%s resumed without a stored intent", record.handle)
                self._errors.works(source)
            else:
                self._errors.failed(source, HelperError(moved.refused, moved.reason))
        except (HelperError, DeviceError) as error:
            self._errors.failed(source, error)
        except Exception as error:
            self._errors.broke(source, error)
        finally:
            # A second resume waits, because the sample may be older than this one.
            await asyncio.sleep(2 * POLL_S)
            del self.wakes[record.id]

    def _wakeable(self) -> list[LeaseRecord]:
        """Return the suspended sessions that are wanted and may resume.

        For a session with a claim, the helper decides whether its part of the devices is free.  For one that
        borrows, that part must also be free in the records.
        """
        registry, held, asleep = self._registry, Counter[str](), list[LeaseRecord]()
        for record in registry.index.placed.values():
            observation = registry.observations[record.id]
            is_parked = observation.sample is not None and observation.sample.phase is Phase.SUSPENDED
            if not record.is_job and record.state in _ASLEEP and is_parked and observation.wanted:
                asleep.append(record)
            elif record.state in (*HOLDS_CAPACITY, State.SUSPENDED):
                held.update(dict.fromkeys(record.lease.devices, record.lease.held_milli))
        found = []
        for record in sorted(asleep, key=lambda each: each.lease.borrowed):
            part = dict.fromkeys(record.lease.devices, record.lease.held_milli)
            if not record.lease.borrowed or all(held[uuid] + part[uuid] <= WHOLE_GPU for uuid in part):
                found.append(record)
            held.update(part)
        return found


# ---- rounds ------------------------------------------------------------------

SAMPLE_S = 1.0
SERVERS_S = 15.0  # between two comparisons with the Hub's list of servers
SERVICES_S = 60.0  # between two reads of the Hub's services
# A measurement that takes longer is late; it may wait for a commit, a move or self-tests.
LATE_S = 1.5


class Loop:
    """The broker's background work; runs until cancelled."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        devices: DeviceBackend,
        hub: Hub,
        tickets: StartTickets,
        announcer: Announcer | None = None,
    ) -> None:
        self.registry = registry
        self.engine = engine
        self.faults = Faults(registry.clock)
        self.hub = FencedHub(hub, devices, lambda: registry.store.epoch, self.faults)
        self.observer = Observer(registry, devices)
        self.announcer = announcer or Announcer()
        self.effects = Effects(registry, devices, self.hub, self.observer, self.announcer, tickets)
        self.unstored = Unstored(registry, devices, self.effects)
        self.ownership = Ownership(registry, self.hub, self.effects)
        self.lending = LendingControl(registry, engine)
        self.guests = GuestControl(registry)
        self._metering = Metering(registry, engine)
        self._errors = ErrorLog(log)
        self._next_at: float | None = None
        self._services_due_at = float("-inf")

    async def run(self) -> None:
        """Measure, decide and act until cancelled.

        Raises:
            StoreError: the database failed; the process must end.
            Superseded: a newer broker is at work; the process must end and not restart.
        """
        parts = {
            "measuring": self._measuring,
            "fencing": self._fencing,
            "watching": self.observer.watch,
            "deciding": self._deciding,
            "waking": self._waking,
            "reconciling_servers": self._reconciling_servers,
            "removing_servers": self._removing_servers,
            "looking_for_owners": self.ownership.watch,
        }
        async with asyncio.TaskGroup() as group:
            for name, part in parts.items():
                group.create_task(self._supervised(name, part), name=name)
            group.create_task(self._raise_store_failure())

    async def _raise_store_failure(self) -> None:
        await asyncio.shield(self.registry.journal.failed)

    async def _supervised(self, name: str, part: Callable[[], AsyncIterator[None]]) -> None:
        """Run one part until cancelled, and start it again after an error.

        A part yields after each success.  Only this method logs when a part fails and when it works again.
        """
        if part != self._measuring:  # measuring first takes an epoch above all that the helper has seen
            await self.observer.epoch_checked.wait()
        while True:
            pause_s = SAMPLE_S
            try:
                async for _ in part():
                    self._errors.works(name)
            except StoreError:
                raise
            except (HelperError, HubError, DeviceError, DiskFull) as error:
                if isinstance(error, HelperError) and error.kind == ErrorKind.STALE_EPOCH:
                    raise self.registry.journal.fail(Superseded(f"this broker ends: {error}")) from None
                self._errors.failed(name, error)
                if isinstance(error, HubError) or part == self._reconciling_servers:
                    pause_s = SERVERS_S  # the Hub logs each request
            except Exception as error:
                self._errors.broke(name, error)
            await asyncio.sleep(pause_s)

    async def _measuring(self) -> AsyncIterator[None]:
        while True:
            await self.observer.measure()
            yield
            await asyncio.sleep(SAMPLE_S)

    async def _fencing(self) -> AsyncIterator[None]:
        """Ask the helper for a newer broker's epoch while a measurement, which would show it, is late."""
        while True:
            if self.registry.clock() - self.observer.answered_at > LATE_S:
                await self.hub.fence()
            yield
            await asyncio.sleep(SAMPLE_S / 2)

    async def _waking(self) -> AsyncIterator[None]:
        """Wake wanted sessions while nothing can be stored, apart from all parts that wait for commits."""
        while True:
            if self.registry.journal.is_blocked:
                self.unstored.wake()
            yield
            await asyncio.sleep(SAMPLE_S)

    # ---- deciding ------------------------------------------------------------

    async def _deciding(self) -> AsyncIterator[None]:
        while True:
            began = self.registry.clock()
            await self.decide()
            yield
            # With a long queue a round takes long; requests get at least as much time as the round.
            await asyncio.sleep(min(SAMPLE_S, self.registry.clock() - began))
            timeout = SAMPLE_S
            if self._next_at is not None:
                timeout = min(timeout, max(0.01, self._next_at - self.registry.clock()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self.registry.changed.wait()
            self.registry.changed.clear()

    async def decide(self) -> None:
        """Run one round: reconcile every lease, ask the engine, commit its decisions and start their effects.

        Raises:
            StoreError: the database failed; the broker ends.
        """
        registry, now = self.registry, self.registry.clock()
        if not registry.devices.are_known(now):
            return
        if registry.journal.is_disk_full and not await registry.journal.retry():
            self.unstored.carry_out(now)
            return
        await self.lending.apply(now)
        await apply_time_limits(registry, self.announcer, now)
        if registry.session_queue.expire(now):
            await registry.notify()
        for lease in list(registry.index.placed.values()):
            self.effects.reconcile(lease, now)
        await self.guests.update(now)
        snapshot.update_fairness(registry, self.engine, now)
        await registry.store_sums(now)
        # No await from here to the intents: a request in between would change what the plan is based on.
        cluster = snapshot.cluster(registry, self.engine, now)
        self._metering.sample(cluster, now)
        plan = self.engine.decide(cluster, now)
        self._next_at = plan.next_at
        notices = {notice.lease: notice for notice in plan.notices}
        if notices != registry.notices:
            registry.notices = notices
            await registry.notify()
        reserved, moved = False, list[LeaseRecord]()
        changes: list[Change] = []
        for action in plan.actions:
            record = registry.leases.get(action.lease)
            if record is None:
                reserved |= isinstance(action, Grant) and registry.session_queue.reserve(action, now)
                continue
            try:
                record, stored = self._record_intent(record, action)
            except Conflict as error:
                log.info("lease=%s overtaken: %s", record.handle, error)
                continue
            moved.append(record)
            changes += stored
        if moved or reserved:
            await registry.journal.commit(*changes)
            await registry.notify()
            for record in moved:
                self.effects.reconcile(record, registry.clock())
        await self.engine.settle(cluster, now)

    def _record_intent(
        self, record: LeaseRecord, action: Grant | Suspend | Resume | Requeue
    ) -> tuple[LeaseRecord, list[Change]]:
        """Apply one action to its lease in memory; return the lease and the changes to store.

        It does not await, so that no reader sees half a plan.

        Raises:
            Conflict: the lease has entered another state.
        """
        move = self.registry.move
        match action:
            case Grant() if not record.is_job:
                raise Conflict("a session is granted while its spawner waits")
            case Grant() if record.state is State.RUNNING:
                return move(record, Kept(why=action.why))
            case Grant():
                return move(record, self.registry.granted(record, action))
            case Suspend():
                given_to = self._project_of(record, action.for_lease)
                return move(
                    record, SuspendBegun(why=action.why, for_lease=action.for_lease, given_to=given_to)
                )
            case Resume():
                # A retry after a refusal is not a new decision.
                again = self.registry.observations[record.id].resumes_refused > 0
                begun = ResumeBegun(
                    why="" if again else action.why,
                    devices=action.devices,
                    host=action.host,
                    guest_bytes=action.guest_bytes,
                )
                return move(record, begun)
            case Requeue():
                given_to = self._project_of(record, action.for_lease)
                return move(
                    record,
                    Stopping(why=action.why, for_lease=action.for_lease, given_to=given_to, requeue=True),
                )

    def _project_of(self, record: LeaseRecord, lease_id: str) -> str:
        other = self.registry.leases.get(lease_id)
        return other.lease.project if other is not None and other.id != record.id else ""

    # ---- servers of the Hub --------------------------------------------------

    async def _reconciling_servers(self) -> AsyncIterator[None]:
        """Compare with the Hub's list every `SERVERS_S`, and at once when processes of a session vanish."""
        missed = self.observer.missed
        while True:
            missed.clear()
            if not self.registry.journal.is_disk_full:
                await self.reconcile_servers()
            yield
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SERVERS_S):
                    await missed.wait()

    async def reconcile_servers(self) -> None:
        """Release sessions without a server at the Hub, and stop servers of ended jobs.

        Raises:
            HubError: the Hub does not answer.
            StoreError: the database failed; the broker ends.
        """
        registry = self.registry
        servers = await self.hub.servers()
        now = registry.clock()
        sessions = (each for each in registry.index.placed.values() if not each.is_job)
        registry.culling.saw(servers, [ServerKey(each.lease.user, each.server) for each in sessions])
        for record in list(registry.index.placed.values()):
            if record.is_job or record.state is State.STOPPING:
                continue
            sample = registry.observations[record.id].sample
            alive = sample is not None and sample.alive
            # Until the lease was seen alive, its server may still be starting.
            begun = record.state is not State.GRANTED or now - record.entered_at > START_S
            settled = begun and registry.devices.are_known(now)
            if settled and not alive and ServerKey(record.lease.user, record.server) not in servers:
                await registry.advance(record, Stopping(reason="its server is gone"))
        for key in servers:
            if is_job_server(key.server) and not self._expected(key) and await self._is_ours(key):
                await self.hub.stop_server(key)
        if now >= self._services_due_at:
            self._services_due_at = now + SERVICES_S
            with contextlib.suppress(HubError, TimeoutError):  # the role of the broker may lack the scope
                async with asyncio.timeout(POLL_S * 5):
                    services = await self.hub.services()
                cullers = starmap(culler_of, services.items())
                registry.culling.cullers = tuple(filter(None, cullers))

    async def _removing_servers(self) -> AsyncIterator[None]:
        """Remove the servers of ended attempts from the Hub, so that its pages list no ended job."""
        ended, pauses = self.effects.ended_servers, dict[ServerKey, tuple[float, float]]()
        while True:
            now = self.registry.clock()
            for key in list(ended):
                due_at, pause_s = pauses.get(key, (now, SAMPLE_S))
                if now < due_at:
                    continue
                try:
                    await self.hub.stop_server(key)
                except HubError:  # refused while the server starts; tried again
                    pauses[key] = (now + pause_s, min(2 * pause_s, SERVERS_S))
                else:
                    ended.pop(key, None)
                    pauses.pop(key, None)
            yield
            await asyncio.sleep(SAMPLE_S)

    def _expected(self, key: ServerKey) -> bool:
        record = self.registry.by_handle(key.server)
        return record is not None and record.lease.user == key.user and record.state is not State.PENDING

    async def _is_ours(self, key: ServerKey) -> bool:
        """Return whether a server with a job's name belongs to a job of its user."""
        job_id = key.server[1:].partition("-")[0]
        job = self.registry.jobs.get(job_id) or await self.registry.store.job(job_id, key.user)
        return job is not None and job.user == key.user


def is_job_server(name: str) -> bool:
    """Return whether a server has a name that only the broker gives."""
    return JOB_SERVER_NAME.fullmatch(name) is not None
