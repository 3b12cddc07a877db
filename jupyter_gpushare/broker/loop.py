"""The one loop: measure, plan, write down the intent, act, observe.

It is level-triggered.  Every round looks at what is, asks `core.plan` what to
do, and sees to it that every lease in a state of passage has somebody working
on it (an *effect*, one task per lease).  Nothing is remembered as done: an
effect that fails is simply started again later, and a restarted broker starts
with the states it finds and asks the device helper how far things went.

Order of every effect: the store has the intent (`Book.advance`), the effect
is tried, what was observed decides the next transition.  A lease gives its
room back only after the driver shows that its memory is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from jupyter_gpushare.backends.base import Backend, HubError, ServerKey
from jupyter_gpushare.broker.book import Book, Live
from jupyter_gpushare.broker.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.store import Change
from jupyter_gpushare.core.model import Event, Grant, Requeue, Resume, State, Suspend, Why
from jupyter_gpushare.core.plan import plan
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError, StoreError
from jupyter_gpushare.gpu.verbs import Event as HelperEvent
from jupyter_gpushare.gpu.verbs import EventKind, LeaseSample, Moved, Phase, Refusal

log = logging.getLogger("gpushare.broker")

SAMPLE_S = 1.0
SERVERS_S = 15.0  # between two looks at the Hub's list of servers
# No news from the helper for this long: devices are unknown, nothing is decided.
STALE_S = 5.0
# A server that shows no process this long after its grant did not start.
START_S = 60.0
# Processes that do not show after this long were never there, or are gone.
GONE_S = 3.0
MAX_TRIES = 5
# After the leader was told to stop and its grace is over, all are killed.
KILL_MARGIN_S = 5.0
# How long a lease that the driver refused to suspend is left alone.
_BACKOFF_S = {"wanted": 0.0, "busy": 10.0, "host_memory": 30.0, "no_lease": 5.0, "not_suspendable": 60.0}


class Loop:
    """Runs until cancelled; see the module's first lines."""

    def __init__(self, book: Book, backend: Backend) -> None:
        self.book = book
        self.backend = backend
        self._effects: dict[str, asyncio.Task[None]] = {}
        self._inventory_due = True
        self._next_at: float | None = None

    async def run(self) -> None:
        """Measure, decide and act for ever.

        Raises:
            StoreError: the database failed; the process must end.
        """
        async with asyncio.TaskGroup() as group:
            for part in (self._measuring, self._watching, self._deciding, self._matching_servers):
                group.create_task(self._kept_up(part), name=part.__name__)
            group.create_task(self._failing())

    async def _failing(self) -> None:
        await asyncio.shield(self.book.failed)

    async def _kept_up(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one part for ever; a mistake in it is logged and it starts again."""
        while True:
            try:
                await part()
            except StoreError:
                raise
            except (HelperError, HubError, DeviceError) as error:
                log.warning("%s: %s", part.__name__.strip("_"), error)
            except Exception:
                log.exception("%s failed", part.__name__.strip("_"))
            await asyncio.sleep(SAMPLE_S)

    # ---- measuring -----------------------------------------------------------

    async def _measuring(self) -> None:
        while True:
            await self.measure()
            await asyncio.sleep(SAMPLE_S)

    async def measure(self) -> None:
        """Take one sample from the helper and note what it says about each lease.

        Raises:
            HelperError: the helper does not answer.
        """
        book = self.book
        if self._inventory_due:
            book.inventory = await self.backend.inventory()
            self._inventory_due = False
        sample = await self.backend.sample()
        before = book.sample
        now = book.clock()
        book.sample, book.sampled_at = sample, now
        by_handle = {s.lease: s for s in sample.leases}
        for lease_id in list(book.leases):
            record = book.leases.get(lease_id)
            if record is not None:
                await self._note(record, book.live[lease_id], by_handle.pop(record.handle, None), now)
        for orphan in by_handle.values():
            if not orphan.alive and not any(orphan.used_bytes.values()):
                await self.backend.drop(orphan.lease)
        if before is None or [d.healthy for d in before.devices] != [d.healthy for d in sample.devices]:
            await book.bump()

    async def _note(self, record: LeaseRecord, live: Live, sample: LeaseSample | None, now: float) -> None:
        live.sample = sample
        if sample is None or not sample.alive:
            # A restarted broker has never seen them alive: it gives them a moment.
            missing = live.seen_alive or now - record.entered_at > GONE_S
            if record.state in (State.PENDING, State.GRANTED):
                live.gone_since_at = None  # nobody is missed who has not come yet
            elif missing and live.gone_since_at is None:
                live.gone_since_at = now
                self.book.woken.set()
        else:
            live.seen_alive, live.gone_since_at = True, None
            live.active_at = max(live.active_at, min(now, sample.active_at))
        if record.is_job and record.state is State.RUNNING:
            held = record.lease.held_milli * record.lease.device_count / 1000
            gained = held * max(0.0, now - max(live.ran_from_at, record.entered_at))
            lease = replace(record.lease, attained_gpu_s=record.lease.attained_gpu_s + gained)
            self.book.leases[record.id] = replace(record, lease=lease)
        live.ran_from_at = now
        if sample is not None and sample.wanted and record.state is State.SUSPENDED and self._is_news(record):
            await self._wanted(record, queries_only=sample.queries_only)
        if record.state is State.GRANTED and live.seen_alive and not record.is_job:
            await self.book.advance(record, Event.STARTED)

    async def _watching(self) -> None:
        async for event in self.backend.watch():
            await self._heard(event)

    async def _heard(self, event: HelperEvent) -> None:
        record = self.book.by_handle(event.lease) if event.lease else None
        match event.kind:
            case EventKind.WANTED if record is not None:
                await self._wanted(record, queries_only=event.fields.get("queries_only") == "true")
            case EventKind.ENDED:
                await self.measure()
                self.book.woken.set()
            case EventKind.DEVICE:
                self._inventory_due = True
                log.warning("device=%s changed: %s", event.device, event.reason)
                await self.book.bump()
            case EventKind.OVER_LIMIT | EventKind.STRANGER:
                log.warning("%s lease=%s device=%s: %s", event.kind, event.lease, event.device, event.reason)
            case _:
                pass

    async def _wanted(self, record: LeaseRecord, *, queries_only: bool) -> None:
        live = self.book.live[record.id]
        # Frameworks query streams in the background: only a busy kernel means it.
        if record.is_job or (queries_only and not live.kernel_busy) or live.wanted:
            return
        live.wanted = True
        log.info("lease=%s wants its GPU back", record.handle)
        await self.book.bump()

    # ---- deciding ------------------------------------------------------------

    async def _deciding(self) -> None:
        while True:
            await self.decide()
            timeout = SAMPLE_S
            if self._next_at is not None:
                timeout = min(timeout, max(0.01, self._next_at - self.book.clock()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self.book.woken.wait()
            self.book.woken.clear()

    async def decide(self) -> None:
        """One round: see to every passage, then plan and begin what is planned."""
        book = self.book
        now = book.clock()
        if book.inventory is None or now - book.sampled_at > STALE_S:
            return  # nothing is known about the devices: nothing is changed
        for lease in list(book.leases.values()):
            self._see_to(lease, now)
        decided = plan(book.cluster(now), now)
        self._next_at = decided.next_at
        moved: list[LeaseRecord] = []
        stored: list[Change] = []
        for action in decided.actions:
            record = book.leases.get(action.lease)
            if record is not None:
                try:
                    record, changes = self._intend(record, action)
                except Conflict as error:
                    log.info("lease=%s overtaken: %s", record.handle, error)
                    continue
                moved.append(record)
                stored += changes
        if moved:
            await book.commit(*stored)
            await book.bump()
            for record in moved:
                self._see_to(record, book.clock())

    def _intend(
        self, record: LeaseRecord, action: Grant | Suspend | Resume | Requeue
    ) -> tuple[LeaseRecord, list[Change]]:
        """Take one action over into the book; no wait in here, so that nobody sees half a plan.

        Raises:
            Conflict: the lease has moved on.
        """
        move = self.book.move
        match action:
            case Grant() if not record.is_job:
                raise Conflict("a session is granted while its spawner waits")
            case Grant():
                return move(record, Event.GRANT, why=action.why, **granted(self.book, record, action))
            case Suspend():
                return move(record, Event.SUSPEND, why=action.why, for_lease=action.for_lease, lend_now=False)
            case Resume():
                return move(record, Event.RESUME, why=action.why)
            case Requeue():
                return move(record, Event.STOP, why=action.why, for_lease=action.for_lease, requeue=True)

    # ---- effects: one task per lease -----------------------------------------

    def _see_to(self, record: LeaseRecord, now: float) -> None:
        """Start the effect that a lease's state calls for, unless one is at work."""
        live = self.book.live[record.id]
        if record.id in self._effects or now < live.effect_retry_at:
            return
        effect: Callable[[LeaseRecord], Coroutine[Any, Any, None]] | None = None
        match record.state:
            case State.GRANTED if record.is_job:
                effect = self._start_job
            case State.SUSPENDING:
                effect = self._suspend
            case State.RESUMING:
                effect = self._resume
            case State.STOPPING:
                effect = self._stop_job if record.is_job else self._stop_session
            case State.RUNNING | State.SUSPENDED:
                effect = self._obstacle(record, live, now)
            case _:
                pass
        if effect is not None:
            task = asyncio.create_task(
                self._effect(effect, record), name=f"{effect.__name__} {record.handle}"
            )
            self._effects[record.id] = task

    def _obstacle(
        self, record: LeaseRecord, live: Live, now: float
    ) -> Callable[[LeaseRecord], Coroutine[Any, Any, None]] | None:
        """Return what to do about a lease that is not as it should be."""
        job = self.book.job_of(record)
        vanished = live.gone_since_at is not None and now - live.gone_since_at > GONE_S
        if record.is_job and (vanished or job is None or job.exit_code is not None):
            return self._end_job
        phase = live.sample.phase if live.sample and self._is_news(record) else None
        if record.state is State.SUSPENDED and phase is Phase.RUNNING:
            return self._found_awake
        if record.state is State.RUNNING and phase is Phase.SUSPENDED:
            return self._found_asleep
        return None

    def _is_news(self, record: LeaseRecord) -> bool:
        """Return whether the last sample was taken while the lease was in its present state."""
        sample = self.book.sample
        return sample is not None and sample.at > record.entered_at

    async def _effect(
        self, effect: Callable[[LeaseRecord], Coroutine[Any, Any, None]], record: LeaseRecord
    ) -> None:
        """Run one effect; what fails is tried again by a later round."""
        live = self.book.live.get(record.id)
        try:
            await effect(record)
        except (HelperError, HubError, DeviceError) as error:
            log.warning("lease=%s %s: %s", record.handle, effect.__name__.strip("_"), error)
            if live is not None:
                live.effect_retry_at = self.book.clock() + SAMPLE_S
        except Conflict as error:
            log.info("lease=%s overtaken: %s", record.handle, error)
        except StoreError:
            return  # `Book.failed` ends the process
        except Exception:
            log.exception("lease=%s %s failed", record.handle, effect.__name__)
            if live is not None:
                live.effect_retry_at = self.book.clock() + 5 * SAMPLE_S
        finally:
            self._effects.pop(record.id, None)
            self.book.woken.set()

    # suspend and resume

    async def _suspend(self, record: LeaseRecord) -> None:
        live = self.book.live[record.id]
        calls = ""
        if record.why == Why.IDLE:  # an owner who lends it means it, whatever ran a moment ago
            if live.sample is None:
                await self._suspend_refused(
                    record, Moved(done=False, refused=Refusal.NO_LEASE, reason="not measured")
                )
                return
            calls = live.sample.calls
        live.wanted = False  # a wish that comes from now on is one for after the suspension
        moved = await self.backend.suspend(record.handle, calls)
        if moved.done:
            job = self.book.job_of(record)
            if job is not None:
                job = replace(job, preemptions=job.preemptions + 1)
            await self.book.advance(record, Event.SUSPEND_DONE, job=job, saved_bytes=moved.bytes)
        else:
            await self._suspend_refused(record, moved)

    async def _suspend_refused(self, record: LeaseRecord, moved: Moved) -> None:
        live, now = self.book.live[record.id], self.book.clock()
        live.retry_at = now + _BACKOFF_S.get(moved.refused, 10.0)
        if moved.refused == "wanted":
            live.active_at = now
        else:
            live.not_suspendable = moved.reason
        await self.book.advance(record, Event.SUSPEND_REFUSED, suspend_reason=moved.reason)

    async def _resume(self, record: LeaseRecord) -> None:
        live = self.book.live[record.id]
        moved = await self.backend.resume(record.handle)
        now = self.book.clock()
        if moved.done:
            live.wanted, live.active_at = False, now
            live.ran_from_at = now
            await self.book.advance(record, Event.RESUME_DONE, saved_bytes=0, granted_at=now, note="")
        elif moved.refused == "lost":
            live.wanted, live.lost = False, True
            await self.book.advance(record, Event.STATE_LOST, saved_bytes=0, note="state_lost")
        else:
            live.retry_at = now + 0.25
            await self.book.advance(record, Event.RESUME_REFUSED, note=moved.reason)

    async def _found_awake(self, record: LeaseRecord) -> None:
        """The helper rolled a suspension back: its memory is on the device."""
        await self.book.advance(record, Event.RESUME, why=Why.ROOM_BACK)
        await self.book.advance(record, Event.RESUME_DONE, saved_bytes=0)

    async def _found_asleep(self, record: LeaseRecord) -> None:
        """The helper suspended it, but the broker's note of that was lost."""
        sample = self.book.live[record.id].sample
        saved = sum(sample.saved_bytes.values()) if sample else 0
        await self.book.advance(record, Event.SUSPEND, why=Why.IDLE)
        await self.book.advance(record, Event.SUSPEND_DONE, saved_bytes=saved)

    # start and stop

    async def _start_job(self, record: LeaseRecord) -> None:
        """Have the Hub start the job's server; wait until it runs, or did not start."""
        key = ServerKey(record.lease.user, record.handle)
        try:
            await self.backend.start_server(key)
        except HubError as error:
            # A start whose answer was lost may have begun all the same.
            if error.permanent or not await self._may_come(record, key):
                await self.start_failed(record, str(error), for_good=error.permanent)
                return
        until = self.book.clock() + START_S
        while self._still(record, State.GRANTED):
            if self.book.clock() > until and not await self._may_come(record, key):
                await self.start_failed(record, "its server did not start")
                return
            await asyncio.sleep(SAMPLE_S)

    async def _may_come(self, record: LeaseRecord, key: ServerKey) -> bool:
        """Return whether processes of this attempt are there, or the Hub may still start them."""
        sample = self.book.live[record.id].sample
        return (sample is not None and sample.alive) or key in await self.backend.servers()

    def _still(self, record: LeaseRecord, state: State) -> bool:
        current = self.book.leases.get(record.id)
        return current is not None and current.state is state and current.attempt == record.attempt

    async def start_failed(self, record: LeaseRecord, reason: str, *, for_good: bool = False) -> None:
        """Note that the Hub could not start a granted job; it is tried again, a few times."""
        book = self.book
        await self.backend.drop(record.handle)
        tries = record.tries + 1
        if for_good or tries >= MAX_TRIES:
            await self.finish(record, "failed", f"It could not be started: {reason}")
            return
        book.live[record.id].retry_at = book.clock() + 2.0**tries
        await book.advance(record, Event.START_FAILED, tries=tries, note=reason, devices=(), limits={})

    async def _end_job(self, record: LeaseRecord) -> None:
        """A job's command has ended, or its processes are gone: stop what is left."""
        await self.book.advance(record, Event.STOP)

    async def _stop_job(self, record: LeaseRecord) -> None:
        """Tell a job to end, wait for its grace, free its room, and settle what becomes of it."""
        book = self.book
        job, live = book.job_of(record), book.live[record.id]
        grace_s = job.grace_s if job is not None else book.policy.grace_s
        if job is None or job.exit_code is None:
            await self.backend.signal(record.handle, signal.SIGTERM, "leader")
        await self._until_gone(record, live, grace_s + KILL_MARGIN_S)
        if not live.seen_alive and job is not None and job.exit_code is None:
            await self._until_forgotten(record)
            await self._until_gone(record, live, grace_s + KILL_MARGIN_S)
        await self.backend.drop(record.handle)
        if job is None:
            await book.advance(record, Event.RELEASE)
            return
        await self._settle(record, book.jobs[job.id])

    async def _until_forgotten(self, record: LeaseRecord) -> None:
        """Return when the Hub has no server of this attempt: one under way would bring its processes yet."""
        key = ServerKey(record.lease.user, record.handle)
        while key in await self.backend.servers():
            with contextlib.suppress(HubError):  # not while it is being started
                await self.backend.stop_server(key)
            await asyncio.sleep(SAMPLE_S)

    async def _stop_session(self, record: LeaseRecord) -> None:
        """A server has ended: see its last processes go, then free its room."""
        await self._until_gone(record, self.book.live[record.id], self.book.policy.grace_s)
        await self.backend.drop(record.handle)
        await self.book.advance(record, Event.RELEASE)

    async def _until_gone(self, record: LeaseRecord, live: Live, grace_s: float) -> None:
        """Return when no process carries the lease and the driver shows no memory of it."""
        kill_at = self.book.clock() + grace_s
        while True:
            await self.measure()
            sample = live.sample
            gone = sample is None or not (sample.alive or any(sample.used_bytes.values()))
            if gone and self._is_news(record):
                return
            if self.book.clock() >= kill_at:
                log.warning("lease=%s still has processes after its grace: killing them", record.handle)
                await self.backend.signal(record.handle, signal.SIGKILL, "all")
                kill_at = self.book.clock() + KILL_MARGIN_S
            await asyncio.sleep(0.2)

    async def _settle(self, record: LeaseRecord, job: JobRecord) -> None:
        """Decide what becomes of a job whose attempt is over."""
        if record.lease.cancelled:
            await self.finish(record, "cancelled", "Stopped by its owner.")
        elif job.exit_code is not None and not job.stopped:
            if job.exit_code == 0:
                await self.finish(record, "succeeded", "It ended with exit code 0.")
            else:
                await self._failed_attempt(
                    record, job, job.reason or f"It ended with exit code {job.exit_code}."
                )
        elif record.requeue or job.stopped:
            if record.requeue:
                job = replace(job, preemptions=job.preemptions + 1)
            await self._requeue(record, job)
        else:
            await self._failed_attempt(
                record, job, "It vanished without a word (killed, or the machine failed)."
            )

    async def _failed_attempt(self, record: LeaseRecord, job: JobRecord, reason: str) -> None:
        job = replace(job, failures=job.failures + 1, reason=reason)
        if job.failures <= job.retries:
            await self._requeue(record, job)
        else:
            self.book.jobs[job.id] = job
            await self.finish(record, "failed", reason)

    async def _requeue(self, record: LeaseRecord, job: JobRecord) -> None:
        book, live = self.book, self.book.live[record.id]
        live.seen_alive = live.lost = False
        live.gone_since_at, live.sample = None, None
        await book.advance(
            record,
            Event.REQUEUED,
            job=replace(job, exit_code=None, stopped=False),
            requeue=False,
            devices=(),
            held_milli=0,
            limits={},
            saved_bytes=0,
            note="",
        )

    async def finish(self, record: LeaseRecord, result: str, reason: str) -> None:
        """End a job for good: its result and the end of its lease are one commit."""
        book = self.book
        job = book.job_of(record)
        if job is not None:
            job = replace(job, result=result, reason=reason, ended_at=book.iso_now(), attempts=record.attempt)
        event = Event.FAIL if result == "failed" else Event.RELEASE
        await book.advance(record, event, job=job, note=reason)

    # ---- matching with the Hub -----------------------------------------------

    async def _matching_servers(self) -> None:
        while True:
            await self.match_servers()
            await asyncio.sleep(SERVERS_S)

    async def match_servers(self) -> None:
        """Release sessions whose server the Hub does not know, and stop servers of jobs that have ended.

        Raises:
            HubError: the Hub does not answer.
        """
        book = self.book
        servers = await self.backend.servers()
        now = book.clock()
        for record in list(book.leases.values()):
            live = book.live[record.id]
            known = ServerKey(record.lease.user, record.server) in servers
            settled = now - record.entered_at > START_S and now - book.sampled_at < STALE_S
            alive = live.sample is not None and live.sample.alive
            if (
                not record.is_job
                and not known
                and settled
                and not alive
                and record.state is not State.STOPPING
            ):
                await book.advance(record, Event.STOP, note="its server is gone")
        for key in servers:
            if is_job_server(key.server) and not self._expected(key):
                await self.backend.stop_server(key)

    def _expected(self, key: ServerKey) -> bool:
        record = self.book.by_handle(key.server)
        return record is not None and record.lease.user == key.user and record.state is not State.PENDING


def is_job_server(name: str) -> bool:
    """Return whether a server's name is one that only the broker gives: ``j`` + 10 characters + attempt."""
    head, dash, attempt = name.rpartition("-")
    return bool(dash) and attempt.isdigit() and len(head) == 11 and head[0] == "j" and head[1:].isalnum()


def granted(book: Book, record: LeaseRecord, action: Grant) -> dict[str, Any]:
    """Return what a grant changes in a record: devices, limits, the next attempt."""
    grantable = {d.uuid: d.grantable_bytes for d in book.devices()}
    lease = record.lease
    limits = {
        uuid: lease.memory_bytes or grantable[uuid] * action.held_milli // 1000 for uuid in action.devices
    }
    return {
        "devices": action.devices,
        "held_milli": action.held_milli,
        "limits": limits,
        "granted_at": book.clock(),
        "borrowed": action.borrowed,
        "attempt": record.attempt + 1 if record.is_job else record.attempt,
        "note": "",
    }
