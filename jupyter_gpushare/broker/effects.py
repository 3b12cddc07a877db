"""Effects: what is done about a lease that is on its way from one state to another.

One task per lease.  Order of every effect: the store has the intent
(`Book.advance`), the effect is tried, what was observed decides the next
transition.  An effect that fails is started again by a later round of the
loop, in whatever state it then finds the lease.  A lease gives its room back
only after the driver shows that its memory is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from jupyter_gpushare.backends.base import Backend, HubError, ServerKey
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.live import Live
from jupyter_gpushare.broker.records import JobRecord, LeaseRecord
from jupyter_gpushare.core.model import Event, State, Why
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError, StoreError
from jupyter_gpushare.gpu.verbs import Moved, Phase, Refusal
from jupyter_gpushare.words import STATE_LOST

log = logging.getLogger("gpushare.broker")

# Between two looks at what somebody waits for.
LOOK_S = 1.0
# A server that shows no process this long after its grant did not start.
START_S = 60.0
# Processes that do not show after this long were never there, or are gone.
GONE_S = 3.0
MAX_TRIES = 5
# While the Hub starts nothing, it is asked again after 2, 4, ... seconds, at most:
HUB_REST_S = 60.0
# After the leader was told to stop and its grace is over, all are killed.
KILL_MARGIN_S = 5.0
# How long a lease that the driver refused to suspend is left alone.
_BACKOFF_S = {"wanted": 0.0, "busy": 10.0, "host_memory": 30.0, "no_lease": 5.0, "not_suspendable": 60.0}
# How soon a resume that was refused is tried again: at first at once, since room may be back at any
# moment; the pause doubles up to this.
_RESUME_AGAIN_S = 5.0


class Effects:
    """At most one task for each lease; ``measure`` takes a sample now."""

    def __init__(self, book: Book, backend: Backend, measure: Callable[[], Awaitable[None]]) -> None:
        self.book = book
        self.backend = backend
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._measure = measure
        self._hub_rest_s = 1.0

    def see_to(self, record: LeaseRecord, now: float) -> None:
        """Start the effect that a lease's state calls for, unless one is at work."""
        live = self.book.live[record.id]
        if record.id in self.tasks or now < live.effect_retry_at:
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
            self.tasks[record.id] = task

    def _obstacle(
        self, record: LeaseRecord, live: Live, now: float
    ) -> Callable[[LeaseRecord], Coroutine[Any, Any, None]] | None:
        """Return what to do about a lease that is not as it should be."""
        job = self.book.job_of(record)
        vanished = live.gone_since_at is not None and now - live.gone_since_at > GONE_S
        if record.is_job and (vanished or job is None or job.exit_code is not None):
            return self._end_job
        phase = live.sample.phase if live.sample and is_news(self.book, record) else None
        if record.note == STATE_LOST and record.state is State.RUNNING:
            if record.is_job:
                return self._start_anew
            return self._found_whole if phase is not None and phase is not Phase.LOST else None
        if record.state is State.SUSPENDED and phase is Phase.RUNNING:
            return self._found_awake
        if record.state is State.RUNNING and phase is Phase.SUSPENDED:
            return self._found_asleep
        if record.state is State.RUNNING and phase is Phase.LOCKED:
            return self._found_locked
        return None

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
                live.effect_retry_at = self.book.clock() + LOOK_S
        except Conflict as error:
            log.info("lease=%s overtaken: %s", record.handle, error)
        except StoreError:
            return  # `Book.failed` ends the process
        except Exception:
            log.exception("lease=%s %s failed", record.handle, effect.__name__)
            if live is not None:
                live.effect_retry_at = self.book.clock() + 5 * LOOK_S
        finally:
            self.tasks.pop(record.id, None)
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
        live.wanted_at = None  # a wish that comes from now on is one for after the suspension
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
            if live.wanted_at is not None:
                self.book.wakes.took_s.append(now - live.wanted_at)
            live.wanted_at, live.active_at, live.resumes_refused = None, now, 0
            with contextlib.suppress(HelperError):
                # People are told that it is back: not with figures of when it slept.
                found = {sample.lease: sample for sample in (await self.backend.sample()).leases}
                live.sample = found.get(record.handle, live.sample)
            await self.book.advance(record, Event.RESUME_DONE, saved_bytes=0, granted_at=now, note="")
        elif moved.refused == "lost":
            live.wanted_at = None
            await self.book.advance(
                record, Event.STATE_LOST, saved_bytes=0, note=STATE_LOST, suspend_reason=moved.reason
            )
            await self.book.tell(record, "lost", f"lost its GPU memory: {moved.reason} ({record.handle})")
        else:
            again_s = _RESUME_AGAIN_S if moved.refused == "no_lease" else 0.25 * 2.0**live.resumes_refused
            live.retry_at = now + min(again_s, _RESUME_AGAIN_S)
            live.resumes_refused = min(live.resumes_refused + 1, 10)
            await self.book.advance(record, Event.RESUME_REFUSED, note=moved.reason)

    async def _start_anew(self, record: LeaseRecord) -> None:
        """A job's memory could not be brought back: it starts again, which is not a failure of its own."""
        await self.book.advance(record, Event.STOP, why=STATE_LOST, requeue=True)

    async def _found_whole(self, record: LeaseRecord) -> None:
        """The processes whose memory was lost have ended, so the session is as good as new."""
        await self.book.put_lease(replace(record, note=""))

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

    async def _found_locked(self, record: LeaseRecord) -> None:
        """Somebody beside the broker only locked it: its memory is in its own room, so it goes on at once."""
        live = self.book.live[record.id]
        moved = await self.backend.resume(record.handle)
        if moved.done:
            live.wanted_at = None
        else:
            live.effect_retry_at = self.book.clock() + LOOK_S

    # start and stop

    async def _start_job(self, record: LeaseRecord) -> None:
        """Have the Hub start the job's server; wait until it runs, or did not start."""
        key = ServerKey(record.lease.user, record.handle)
        try:
            await self.backend.start_server(key)
        except HubError as error:
            if error.not_now:
                await self._not_now(record, str(error))
                return
            # A start whose answer was lost may have begun all the same.
            if error.permanent or not await self._may_come(record, key):
                await self.start_failed(record, str(error), for_good=error.permanent)
                return
        else:
            self._hub_rest_s = 1.0
        until = self.book.clock() + START_S
        while self._still(record, State.GRANTED):
            if self.book.clock() > until and not await self._may_come(record, key):
                await self.start_failed(record, "its server did not start")
                return
            await asyncio.sleep(LOOK_S)

    async def _may_come(self, record: LeaseRecord, key: ServerKey) -> bool:
        """Return whether processes of this attempt are there, or the Hub may still start them."""
        sample = self.book.live[record.id].sample
        return (sample is not None and sample.alive) or await self.backend.has_server(key)

    def _still(self, record: LeaseRecord, state: State) -> bool:
        current = self.book.leases.get(record.id)
        return current is not None and current.state is state and current.attempt == record.attempt

    async def _not_now(self, record: LeaseRecord, reason: str) -> None:
        """Back into the queue, uncounted; no job is started before the Hub has had a rest."""
        book = self.book
        self._hub_rest_s = min(2 * self._hub_rest_s, HUB_REST_S)
        book.no_job_before = book.clock() + self._hub_rest_s
        await self.backend.drop(record.handle)
        await book.advance(record, Event.START_FAILED, note=reason, devices=(), limits={})

    async def start_given_up(self, record: LeaseRecord) -> None:
        """The Hub gave a granted job's start up; what came up of it must be gone before it is tried again."""
        await self._measure()
        if not self._still(record, State.GRANTED):
            return
        sample = self.book.live[record.id].sample
        if sample is not None and (sample.alive or any(sample.used_bytes.values())):
            await self.book.advance(record, Event.STOP, note="the Hub could not start its server")
        else:
            await self.start_failed(record, "the Hub could not start its server")

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
        grace_s = min(job.grace_s, book.policy.max_grace_s) if job is not None else book.policy.grace_s
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
        while await self.backend.has_server(key):
            with contextlib.suppress(HubError):  # not while it is being started
                await self.backend.stop_server(key)
            await asyncio.sleep(LOOK_S)

    async def _stop_session(self, record: LeaseRecord) -> None:
        """A server has ended: see its last processes go, then free its room."""
        await self._until_gone(record, self.book.live[record.id], self.book.policy.grace_s)
        await self.backend.drop(record.handle)
        await self.book.advance(record, Event.RELEASE)

    async def _until_gone(self, record: LeaseRecord, live: Live, grace_s: float) -> None:
        """Return when no process carries the lease and the driver shows no memory of it."""
        kill_at = self.book.clock() + grace_s
        while True:
            await self._measure()
            sample = live.sample
            gone = sample is None or not (sample.alive or any(sample.used_bytes.values()))
            if gone and is_news(self.book, record):
                return
            if self.book.clock() >= kill_at:
                log.warning("lease=%s still has processes after its grace: killing them", record.handle)
                await self.backend.signal(record.handle, signal.SIGKILL, "all")
                kill_at = self.book.clock() + KILL_MARGIN_S
            await asyncio.sleep(0.2)

    async def _settle(self, record: LeaseRecord, job: JobRecord) -> None:
        """Decide what becomes of a job whose attempt is over."""
        record = self.book.leases.get(record.id, record)  # its owner may have cancelled it meanwhile
        lost = record.why == STATE_LOST and job.exit_code != 0
        if record.lease.cancelled:
            await self.finish(record, "cancelled", "Stopped by its owner.")
        elif job.exit_code is not None and not job.stopped and not lost:
            if job.exit_code == 0:
                await self.finish(record, "succeeded", "It ran to its end.")
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
        live.seen_alive = False
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
            note=record.note if record.requeue else "",
        )

    async def finish(self, record: LeaseRecord, result: str, reason: str) -> None:
        """End a job for good: its result and the end of its lease are one commit."""
        book = self.book
        job = book.job_of(record)
        if job is not None:
            job = replace(job, result=result, reason=reason, ended_at=book.iso_now(), attempts=record.attempt)
        event = Event.FAIL if result == "failed" else Event.RELEASE
        await book.advance(record, event, job=job, note=reason)


def is_news(book: Book, record: LeaseRecord) -> bool:
    """Return whether the last sample was taken while the lease was in its present state."""
    return book.sample is not None and book.sample.at > record.entered_at
