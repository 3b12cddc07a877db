"""Effects: the actions that take a lease out of a transitional state.

Each lease has at most one effect at work.  Each effect follows the same order: the intent is committed
(`Registry.advance`), the action is tried, and the observation decides the next transition.  After a
failure, a later round starts the effect for the state that the lease has by then.  A lease releases its
capacity only after the driver shows that its device memory is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import DeviceBackend, Hub, HubError, Prepared, ServerKey
from jupyter_gpushare.broker.control import losses, snapshot
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.control.ending import LEASE_POLL_S, Ending, outcome_of, with_end
from jupyter_gpushare.broker.control.fenced_hub import StartTickets
from jupyter_gpushare.broker.control.job_request import shown_name
from jupyter_gpushare.broker.control.observer import GONE_S, Observer
from jupyter_gpushare.broker.state.observations import Observation
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import (
    Failed,
    Released,
    Requeued,
    ResumeBegun,
    ResumeDone,
    ResumeRefused,
    StartFailed,
    StateLost,
    Stopping,
    SuspendBegun,
    SuspendDone,
    SuspendRefused,
    limits_set,
    loss_replaced,
    on_devices,
)
from jupyter_gpushare.core.model import WHOLE_GPU, State, Why
from jupyter_gpushare.error_log import ErrorLog
from jupyter_gpushare.errors import Conflict, DeviceError, DiskFull, HelperError, StoreError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import MoveResult, Phase, Refusal, SetLimit
from jupyter_gpushare.protocol.wire import Text

log = logging.getLogger("gpushare.broker")

Effect = Callable[[LeaseRecord], Coroutine[Any, Any, object]]

_ASLEEP = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)
# Between two checks of the Hub; a failed effect is also tried again after this time.
POLL_S = 1.0
# A server that still has no process this long after its grant has failed to start.
START_S = 60.0
MAX_TRIES = 5
# A Hub that starts no server is asked again after 2, 4, ... seconds, up to this maximum.
HUB_BACKOFF_MAX_S = 60.0
# Seconds until a refused suspension is tried again, by reason.
_BACKOFF_S: Mapping[Refusal, float] = {
    Refusal.NONE: 10.0,
    Refusal.WANTED: 0.0,
    Refusal.BUSY: 10.0,
    Refusal.NO_MEMORY: 10.0,
    Refusal.HOST_MEMORY: 30.0,
    Refusal.NOT_SUSPENDABLE: 60.0,
    Refusal.LOST: 10.0,
    Refusal.NO_LEASE: 5.0,
}
# Refusals of a suspension because of the driver, or of a process that does not come to rest.
_FAILURES = frozenset({Refusal.NONE, Refusal.BUSY, Refusal.NOT_SUSPENDABLE, Refusal.LOST})
# Reasons for which a move to other devices would be refused again.
_IMMOVABLE = frozenset({Refusal.NONE, Refusal.NOT_SUSPENDABLE})
# After a refused move to a device, the lease avoids that device this long.
_AVOID_DEVICE_S = 60.0
# A refused resume is tried again soon, because memory may be freed at any moment.  The delay starts at
# 0.25 s and doubles up to this maximum.
_RESUME_RETRY_MAX_S = 5.0


class Effects:
    """Runs at most one task for each lease."""

    def __init__(
        self,
        registry: Registry,
        devices: DeviceBackend,
        hub: Hub,
        observer: Observer,
        announcer: Announcer,
        tickets: StartTickets,
    ) -> None:
        self.registry = registry
        self.devices = devices
        self.hub = hub
        self.announcer = announcer
        self.tickets = tickets
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        # Servers of ended attempts; the Hub lists them until they are removed.
        self.ended_servers: dict[ServerKey, None] = {}
        self._ending, self._observer = Ending(registry, devices, observer), observer
        self._hub_backoff_s = 1.0
        self._outdated: set[str] = set()  # handles whose start was an earlier broker's, and was refused
        self._errors = ErrorLog(log)

    def reconcile(self, record: LeaseRecord, now: float) -> None:
        """Start the effect that a lease's state needs, unless one runs or its retry is not due."""
        observation = self.registry.observations[record.id]
        if record.id in self.tasks or now < observation.effect_retry_at:
            return
        effect: Effect | None = None
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
                effect = self._corrective_effect(record, observation, now)
            case _:
                pass
        if effect is not None:
            self._begin(effect, record)

    def _corrective_effect(self, record: LeaseRecord, observation: Observation, now: float) -> Effect | None:
        """Return the effect for a lease whose sample disagrees with its record; None if they agree."""
        job = self.registry.job_of(record)
        if record.is_job and (observation.vanished_s >= GONE_S or job is None or job.exit_code is not None):
            return self._end_job
        sample = observation.sample
        if snapshot.sampled_elsewhere(self.registry, record):
            return self._reconcile_devices
        if record.unprepared:
            return self.set_limits
        phase = sample.phase if sample and snapshot.sampled_since_entry(self.registry, record) else None
        if record.lost and record.state is State.RUNNING:
            if record.is_job:
                return self._requeue_lost
            return self._reconcile_restarted if phase is not None and phase is not Phase.LOST else None
        if record.state is State.SUSPENDED and phase in (Phase.RUNNING, Phase.LOST):
            return self._reconcile_awake if snapshot.may_be_awake(self.registry, record) else None
        if record.state is State.RUNNING and sample is not None and sample.unconfirmed:
            return self._confirm_awake
        if record.state is State.RUNNING and phase is Phase.SUSPENDED:
            return self._reconcile_suspended
        return self.set_limits if phase and snapshot.share_differs(self.registry, record) else None

    def _begin(self, effect: Effect, record: LeaseRecord) -> None:
        name = f"{effect.__name__} {record.handle}"
        self.tasks[record.id] = asyncio.create_task(self._effect(effect, record), name=name)

    async def _effect(self, effect: Effect, record: LeaseRecord) -> None:
        """Run one effect; after an error, a later round starts it again."""
        observation = self.registry.observations.get(record.id)
        source = f"lease={record.handle} {effect.__name__.strip('_')}"
        try:
            await self.registry.journal.durable()  # the intent
            if self._is_still(record, record.state):
                await effect(record)
                self._errors.works(source)
        except (HelperError, HubError, DeviceError, DiskFull) as error:
            self._errors.failed(source, error)
            if observation is not None:
                observation.effect_retry_at = self.registry.clock() + POLL_S
        except Conflict as error:
            log.info("lease=%s overtaken: %s", record.handle, error)
        except StoreError:
            return  # `Journal.failed` ends the process
        except Exception as error:
            self._errors.broke(source, error)
            if observation is not None:
                observation.effect_retry_at = self.registry.clock() + 5 * POLL_S
        finally:
            self.tasks.pop(record.id, None)
            if not self._is_still(record, State.GRANTED):
                self._outdated.discard(record.handle)
            self.registry.changed.set()

    # suspend and resume

    async def _confirm_awake(self, record: LeaseRecord) -> None:
        """Confirm to the helper that a resume without a stored intent is now recorded."""
        await self.devices.resume(record.handle)
        self.registry.observations[record.id].effect_retry_at = self.registry.clock() + 2 * POLL_S

    async def _suspend(self, record: LeaseRecord) -> None:
        sample, calls = self.registry.observations[record.id].sample, ""
        # An unrecorded resume means that the session wanted its GPU.  A claim of others still suspends it.
        is_voluntary = record.why in (Why.IDLE, Why.LEND_NOW)
        if is_voluntary and sample is not None and sample.unconfirmed:
            reason = "a process of the lease entered a CUDA call"
            await self._suspend_refused(record, _refused(Refusal.WANTED, reason))
            return
        if record.why == Why.IDLE:  # `Why.LEND_NOW` does not check calls: the owner asked for it
            if sample is None:
                await self._suspend_refused(record, _refused(Refusal.NO_LEASE, "not measured"))
                return
            calls = sample.calls
        moved = await self.devices.suspend(record.handle, calls)
        await self._count_suspension(moved)
        if moved.done:
            await self._suspended(record, moved.bytes)
        else:
            await self._suspend_refused(record, moved)

    async def _suspended(self, record: LeaseRecord, saved_bytes: int) -> None:
        job = self.registry.job_of(record)
        if job is not None:
            job = replace(job, preemptions=job.preemptions + 1)
        await self.registry.advance(record, SuspendDone(saved_bytes=saved_bytes), job=job)
        if job is not None:
            self.announcer.job("paused", job, "suspended")

    async def _count_suspension(self, moved: MoveResult) -> None:
        """Count a suspension that reached the driver."""
        if moved.done or moved.refused in _FAILURES:
            self.registry.journal.check()
            failure, registry = "" if moved.done else moved.reason or "no reason given", self.registry
            registry.suspensions = registry.suspensions.after_try(failure, registry.iso_now())
            await registry.journal.commit(registry.suspensions)

    async def _suspend_refused(self, record: LeaseRecord, moved: MoveResult) -> None:
        observation, now = self.registry.observations[record.id], self.registry.clock()
        observation.retry_at = now + _BACKOFF_S[moved.refused]
        if moved.refused is Refusal.WANTED:
            observation.active_at = now
        else:
            observation.not_suspendable = moved.reason
        await self.registry.advance(record, SuspendRefused(reason=moved.reason))

    async def _resume(self, record: LeaseRecord) -> None:
        observation = self.registry.observations[record.id]
        if record.is_job and (record.lease.host or record.unprepared):
            if (refused := await self._prepare_to_resume(record)) is not None:
                await self._resume_refused(record, refused, ())
                return
            record = self.registry.get(record.id)
        # The record names the devices on which the lease is to resume: its earlier ones, or others.
        moved = await self.devices.resume(record.handle, devices=record.lease.devices if record.moves else ())
        devices = moved.devices if snapshot.is_place_of(record, moved.devices) else ()
        now = self.registry.clock()
        if moved.done:
            if observation.wanted_at is not None:
                self.registry.wake_times.took_s.append(now - observation.wanted_at)
            observation.active_at, observation.resumes_refused = now, 0
            with contextlib.suppress(HelperError):
                # The next notification must not show the sample of the suspended lease.
                found = {sample.lease: sample for sample in (await self.devices.sample()).leases}
                observation.sample = found.get(record.handle, observation.sample)
            losses.note_resume(self.registry, record, moved.bytes, now)
            await self.registry.advance(record, ResumeDone(devices=devices))
        elif moved.refused is Refusal.LOST:
            counts = self.registry.suspensions.after_loss(moved.reason, self.registry.iso_now())
            self.registry.suspensions = counts
            await self.registry.journal.commit(counts)
            await self.registry.advance(record, StateLost(reason=moved.reason, devices=devices))
            why = messages.reason_text(moved.reason)
            await self.registry.record_notice(record, "lost", "notice.lost", why, record.handle)
        else:
            await self._resume_refused(record, moved, devices)

    async def _prepare_to_resume(self, record: LeaseRecord) -> MoveResult | None:
        """Prepare a suspended job to resume, as a guest or not; return the refusal, None if it may resume."""
        try:
            await self.prepare(record, asleep=True)
        except HelperError as error:
            if not record.lease.host:
                raise
            return _refused(Refusal.NO_MEMORY, str(error))
        await self.registry.edit(record, limits_set(record))
        return None

    async def _resume_refused(self, record: LeaseRecord, moved: MoveResult, devices: tuple[str, ...]) -> None:
        """Record a refused resume; ``devices`` are its devices now, empty for those of its record."""
        observation, now = self.registry.observations[record.id], self.registry.clock()
        delay_s = (
            _RESUME_RETRY_MAX_S
            if moved.refused is Refusal.NO_LEASE or record.lease.host
            else 0.25 * 2.0**observation.resumes_refused
        )
        observation.retry_at = now + min(delay_s, _RESUME_RETRY_MAX_S)
        observation.resumes_refused = min(observation.resumes_refused + 1, 10)
        self._reset_host_peak(record)
        has_stayed = devices not in ((), record.lease.devices)
        if has_stayed:
            others = set(record.lease.devices) - set(devices)
            observation.avoids |= dict.fromkeys(others, now + _AVOID_DEVICE_S)
        stays = has_stayed and moved.refused in _IMMOVABLE
        await self.registry.advance(record, ResumeRefused(reason=moved.reason, devices=devices, stays=stays))

    def _reset_host_peak(self, guest: LeaseRecord) -> None:
        """Forget the memory peak of ``guest``'s host, which had no room; without a peak it gets no guest."""
        if guest.lease.host in self.registry.observations:
            self.registry.observations[guest.lease.host].peak.reset()

    async def set_limits(self, record: LeaseRecord) -> LeaseRecord:
        """Set the recorded limits of a lease at the device helper, whose limits may differ."""
        await self.prepare(record, asleep=record.state is State.SUSPENDED)
        return await self.registry.edit(record, limits_set(record))

    async def prepare(self, record: LeaseRecord, *, asleep: bool) -> Prepared:
        """Prepare a lease at the device helper, as its record and the policy say.

        Raises:
            HelperError: see `DeviceBackend.prepare`.
            DeviceError: the driver refused.
        """
        observation = self.registry.observations[record.id]
        request = _limit_request(self.registry, record, asleep=asleep)
        prepared = await self.devices.prepare(request)
        observation.requested_share = request.compute_share
        return prepared

    async def grant(self, record: LeaseRecord) -> wire.SpawnGrant:
        """Prepare the devices for a server that starts, and return what the server may use.

        Raises:
            Conflict: the device helper does not answer, or the driver refuses.  The lease of a session that
                was granted is released.
        """
        asleep = record.state in _ASLEEP
        try:
            prepared = await self.prepare(record, asleep=asleep)
        except (HelperError, DeviceError) as error:
            log.warning("lease=%s prepare: %s", record.handle, error)
            if record.state is State.GRANTED and not record.is_job:
                await self.registry.advance(record, Released(reason=str(error)))
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            ) from None
        lease, limit_bytes = record.lease, sum(record.limits.values())
        name = self.registry.devices.model_name(lease.devices)
        return wire.SpawnGrant(
            lease=record.handle,
            kind=lease.kind,
            env=dict(prepared.env),
            devices=list(lease.devices),
            node=prepared.node,
            mounts=list(prepared.mounts),
            memory_limit_bytes=limit_bytes,
            asleep=asleep,
            borrowed=lease.borrowed,
            message=f"Your {lease.size.text} ({messages.gibibytes(limit_bytes)} of {name}) is "
            + ("lent just now and comes with your first GPU cell." if asleep else "ready."),
        )

    async def _requeue_lost(self, record: LeaseRecord) -> None:
        """Requeue a job that lost its device memory; the attempt does not count as failed."""
        await self.registry.advance(record, Stopping(why=messages.STATE_LOST, requeue=True))

    async def _reconcile_restarted(self, record: LeaseRecord) -> None:
        """Clear the loss of a session whose kernels have restarted."""
        await self.registry.edit(record, loss_replaced)

    async def _reconcile_devices(self, record: LeaseRecord) -> None:
        """Record the devices on which the helper has a lease; they differ from the record."""
        sample = self.registry.observations[record.id].sample
        if sample is not None:
            log.warning("lease=%s is on %s", record.handle, ",".join(sample.devices))
            await self.registry.edit(record, on_devices(*sample.devices))

    async def _reconcile_awake(self, record: LeaseRecord) -> None:
        """Record a resume by the helper, which undid a suspension or acted while no broker answered."""
        is_unrecorded = snapshot.resumed_without_intent(self.registry, record)
        begun = ResumeBegun(why=Why.WANTED if is_unrecorded else Why.CAPACITY_BACK)
        await self._resume(await self.registry.advance(record, begun))

    async def _reconcile_suspended(self, record: LeaseRecord) -> None:
        """Record a suspension that the helper completed and the broker did not record."""
        sample = self.registry.observations[record.id].sample
        saved = sum(sample.saved_bytes.values()) if sample else 0
        why = Why.LENDER_RETURNED if record.is_job else Why.IDLE
        if record.lease.host:
            found = self.registry.observations[record.id].left_host
            why = Why(found[0]) if found is not None else Why.HOST_MEMORY_WANTED
        await self._suspended(await self.registry.advance(record, SuspendBegun(why=why)), saved)

    # start and stop

    async def _start_job(self, record: LeaseRecord) -> None:
        """Have the Hub start a job's server, and return when the server runs or has failed to start."""
        key = ServerKey(record.lease.user, record.handle)
        shown = shown_name(self.registry.jobs[record.id[1:]])
        request = asyncio.create_task(self.hub.start_server(key, shown, self.tickets.issue(key)))
        try:
            # The Hub answers after seconds; an attempt that is stopped meanwhile does not wait that long.
            while not request.done() and self._is_still(record, State.GRANTED):
                await asyncio.wait((request,), timeout=LEASE_POLL_S)
            if not request.done():
                return
            request.result()
        except HubError as error:
            if error.not_now:
                await self._hub_busy(record, str(error))
                return
            # The answer may have been lost after the Hub began the start.
            if error.unknown_user or not await self._may_still_start(record, key):
                # A proxy in front of the Hub, or one of its hooks, may have answered 404.
                is_owner_unknown = error.unknown_user and await self.hub.user(key.user) is None
                await self.start_failed(record, str(error), is_owner_unknown=is_owner_unknown)
                return
        else:
            self._hub_backoff_s = 1.0
        finally:
            request.cancel()
        until = self.registry.clock() + START_S
        while self._is_still(record, State.GRANTED):
            sample = self.registry.observations[record.id].sample
            if sample is not None and sample.runner_ended:
                await self.registry.advance(record, Stopping(reason="its runner ended before it reported"))
                return
            if record.handle in self._outdated and not await self._may_still_start(record, key):
                self._outdated.discard(record.handle)
                return  # the next round asks the Hub again
            if self.registry.clock() > until:
                if not await self._may_still_start(record, key):
                    await self.start_failed(record, "its server did not start")
                    return
                until = self.registry.clock() + POLL_S
            await asyncio.sleep(LEASE_POLL_S)

    async def _may_still_start(self, record: LeaseRecord, key: ServerKey) -> bool:
        """Return whether this attempt has processes, or the Hub may still start them."""
        sample = self.registry.observations[record.id].sample
        return (sample is not None and sample.alive) or await self.hub.has_server(key)

    def _is_still(self, record: LeaseRecord, state: State) -> bool:
        current = self.registry.leases.get(record.id)
        return current is not None and current.state is state and current.attempt == record.attempt

    async def _hub_busy(self, record: LeaseRecord, reason: str) -> None:
        """Requeue a job that the Hub refused for a reason of its own, and pause all starts."""
        registry = self.registry
        self._hub_backoff_s = min(2 * self._hub_backoff_s, HUB_BACKOFF_MAX_S)
        registry.hub_backoff_until = registry.clock() + self._hub_backoff_s
        await self.devices.drop(record.handle)
        await registry.advance(record, StartFailed(reason=reason, tries=record.tries))

    def on_outdated_start(self, record: LeaseRecord) -> None:
        """Note that the start of a granted attempt was an earlier broker's, and was refused.

        The Hub may have taken this broker's request for that start, so `_start_job` asks once more.
        """
        self._outdated.add(record.handle)

    async def start_failed(
        self, record: LeaseRecord, reason: str, *, is_owner_unknown: bool = False, has_no_room: bool = False
    ) -> None:
        """Requeue a job that the Hub could not start; `MAX_TRIES` such failures end it.

        Two failures do not count: ``is_owner_unknown``, after which `Ownership` decides whether the job ends,
        and ``has_no_room``, when the host has no room for a guest.  If the attempt may still have processes
        or device memory, it is stopped first.
        """
        registry = self.registry
        gone = await self._ending.is_gone_now(record)
        if not self._is_still(record, State.GRANTED):
            return
        if not gone:
            await registry.advance(record, Stopping(reason=reason))
            return
        await self.devices.drop(record.handle)
        if has_no_room:
            self._reset_host_peak(record)
        tries = record.tries + (not (is_owner_unknown or has_no_room))
        if tries >= MAX_TRIES:
            await self.finish(
                record, "failed", messages.text("job.not_started", messages.reason_text(reason))
            )
            return
        registry.observations[record.id].retry_at = registry.clock() + 2.0**tries
        await registry.advance(record, StartFailed(reason=reason, tries=tries))
        if is_owner_unknown:
            registry.owners.doubt(record.lease.user)

    async def _end_job(self, record: LeaseRecord) -> None:
        """Stop a job that has reported its end or has no process."""
        if record.lease.host:
            await self._observer.measure()
            sample = self.registry.observations[record.id].sample
            if sample is not None and sample.ended_as_guest:
                await self.registry.advance(record, Stopping(why=Why.CANNOT_YIELD, requeue=True))
                return
        await self.registry.advance(record, Stopping())

    async def _stop_job(self, record: LeaseRecord) -> None:
        """Terminate a job within its grace period, release its lease, and end or requeue it."""
        job = self.registry.job_of(record)
        await self._ending.until_job_gone(record)
        # If the Hub still starts a server of this attempt, that server now runs nothing.
        await self.devices.drop(record.handle)
        if job is None:
            await self.registry.advance(record, Released())
            return
        await self._settle(record, self.registry.jobs[job.id])

    async def _stop_session(self, record: LeaseRecord) -> None:
        """Release a session when its last process has ended and its device memory is free."""
        await self._ending.until_gone(record, self.registry.policy.grace_s)
        await self.devices.drop(record.handle)
        reason = ""
        if self.registry.devices.have_left(record.lease.devices):
            reason = "the cluster lost its node"
            await self.registry.record_notice(record, "lost", "notice.node_lost")
        else:
            await losses.note_server_end(self.registry, record)
        await self.registry.advance(record, Released(reason=reason))

    async def _settle(self, record: LeaseRecord, job: JobRecord) -> None:
        """End or requeue a job after an attempt: cancelled, finished, preempted, lost or failed."""
        record = self.registry.leases.get(record.id, record)  # it may have been cancelled meanwhile
        observation = self.registry.observations.get(record.id)
        if job.exit_code is None and observation is not None and observation.end is not None:
            job = with_end(job, observation.end, self.registry.iso_now())
            # In its own commit: a full disk that refuses the next one must not undo this.
            await self.registry.put_job(job)
        self.ended_servers[ServerKey(record.lease.user, record.handle)] = None
        outcome = outcome_of(record, job)
        if outcome.result:
            await self.finish(record, outcome.result, outcome.reason, outcome.job)
        else:
            again = replace(outcome.job, exit_code=None, stopped=False)
            await self.registry.advance(record, Requeued(), job=again)
            self.announcer.job("queued", again, "queued", messages.english(outcome.reason))

    async def finish(
        self, record: LeaseRecord, result: str, reason: Text, job: JobRecord | None = None
    ) -> None:
        """End a job; its result and the end of its lease are one commit.

        Raises:
            Conflict: the lease has already ended.
            StoreError: the database failed; the broker ends.
        """
        registry, why = self.registry, messages.english(reason)
        job = job or registry.job_of(record)
        if job is not None:
            ended_at, attempts = registry.iso_now(), record.attempt
            job = replace(job, result=result, reason_texts=(reason,), ended_at=ended_at, attempts=attempts)
        ended = Failed(reason=why) if result in ("failed", "timed_out") else Released(reason=why)
        await registry.advance(record, ended, job=job)
        if job is not None:
            self.announcer.job("ended", job, result, why)


def _limit_request(registry: Registry, record: LeaseRecord, *, asleep: bool) -> SetLimit:
    """Return the request to the device helper that sets the limits of a lease."""
    host = registry.leases.get(record.lease.host)
    return SetLimit(
        lease=record.handle,
        uid=record.uid,
        limits=dict(record.limits),
        guaranteed=dict.fromkeys(record.limits, 0) if record.lease.borrowed else dict(record.limits),
        suspended=asleep,
        unattended=not record.is_job and not record.lease.borrowed,
        stops=record.is_job and not record.lease.survival.suspends,
        compute_share=registry.policy.compute_share,
        share=record.lease.held_milli / WHOLE_GPU,
        guest_of=host.handle if host is not None else "",
        guest_bytes=record.guest_bytes if host is not None else 0,
    )


def _refused(refused: Refusal, reason: str) -> MoveResult:
    return MoveResult(done=False, refused=refused, reason=reason)
