"""The one loop: measure, plan, write down the intent, act, observe.

It is level-triggered.  Every round looks at what is, asks `core.plan` what to
do, and sees to it that every lease in a state of passage has somebody working
on it (an effect, `effects`).  Nothing is remembered as done: an
effect that fails is simply started again later, and a restarted broker starts
with the states it finds and asks the device helper how far things went.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from jupyter_gpushare.backends.base import Backend, HubError, ServerKey
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.effects import GONE_S, START_S, Effects, is_news
from jupyter_gpushare.broker.live import Live
from jupyter_gpushare.broker.machine import shares
from jupyter_gpushare.broker.records import LeaseRecord
from jupyter_gpushare.broker.store import Change
from jupyter_gpushare.core.model import Event, Grant, Requeue, Resume, State, Suspend
from jupyter_gpushare.core.plan import Keeper
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError, StoreError
from jupyter_gpushare.gpu.verbs import Event as HelperEvent
from jupyter_gpushare.gpu.verbs import EventKind, LeaseSample, Phase, Sample
from jupyter_gpushare.words import because_of

log = logging.getLogger("gpushare.broker")

SAMPLE_S = 1.0
SERVERS_S = 15.0  # between two looks at the Hub's list of servers
REPEAT_S = 60.0  # the same trouble is logged again only after this long
# No news from the helper for this long: devices are unknown, nothing is decided.
STALE_S = 5.0


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the garbage collector wait: a plan leaves nothing to it, and it takes a tenth of a plan's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Loop:
    """Runs until cancelled; see the module's first lines."""

    def __init__(self, book: Book, backend: Backend) -> None:
        self.book = book
        self.backend = backend
        self.effects = Effects(book, backend, self.measure)
        self._keeper = Keeper()
        self._inventory_due = True
        self._met = False  # the device helper, by a broker that has just started
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
        said, said_at = "", 0.0
        while True:
            try:
                await part()
            except StoreError:
                raise
            except (HelperError, HubError, DeviceError) as error:
                now = self.book.clock()
                if str(error) != said or now - said_at >= REPEAT_S:
                    log.warning("%s: %s", part.__name__.strip("_"), error)
                    said, said_at = str(error), now
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
        if not self._met:
            # A restored database counts from where it was saved.  Only at start: whom the helper
            # refuses later on was followed by another broker, and does nothing more.
            book.outlive(await self.backend.epoch())
            self._met = True
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
        self._note_machine(sample)
        strays = []
        for orphan in by_handle.values():
            if orphan.alive or any(orphan.used_bytes.values()):
                strays.append(orphan)
            else:
                await self.backend.drop(orphan.lease)
        await self._keep_clear(strays)
        if before is None or [d.healthy for d in before.devices] != [d.healthy for d in sample.devices]:
            await book.bump()

    def _note_machine(self, sample: Sample) -> None:
        book = self.book
        usable = [device.uuid for device in snapshot.devices(book) if device.usable]
        leases = (record.lease for record in book.leases.values())
        share = shares(leases, usable, len(sample.devices) - len(usable))
        book.meter.note(share, sample.devices)

    async def _keep_clear(self, strays: Sequence[LeaseSample]) -> None:
        """Grant nothing on devices of leases that live, but not in this database, until they end."""
        before = self.book.strayed
        there = [stray for stray in strays if stray.phase is not Phase.SUSPENDED]
        self.book.strayed = {uuid: stray.lease for stray in there for uuid in stray.devices}
        if self.book.strayed != before:
            for uuid, lease in self.book.strayed.items():
                log.warning("device=%s is used by lease=%s, which the database does not know", uuid, lease)
            await self.book.bump()

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
        if not record.is_job:
            live.habit.saw(snapshot.idle_since(self.book, record, now), now)
        asleep = record.state is State.SUSPENDED and is_news(self.book, record)
        if sample is not None and sample.wanted and asleep:
            await self._wanted(record, queries_only=sample.queries_only)
        if record.state is State.GRANTED and live.seen_alive and not record.is_job:
            await self.book.advance(record, Event.STARTED)

    async def _watching(self) -> None:
        self._inventory_due = True  # what happened while nobody listened, a restart included
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
                if record is not None and event.fields.get("healthy") == "false":
                    await self.book.tell(record, "device", f"lost its GPU for now: {event.reason}")
                elif record is not None:
                    await self.book.tell(record, "device", "has its GPU back in service")
                await self.book.bump()
            case EventKind.OVER_LIMIT | EventKind.STRANGER:
                log.warning("%s lease=%s device=%s: %s", event.kind, event.lease, event.device, event.reason)
                if record is not None or event.kind is EventKind.STRANGER:
                    what = "was stopped" if event.fields.get("action") == "stop" else "should be stopped"
                    name = event.fields.get("name", "")
                    process = (
                        f"; process {event.fields['pid']} ({name}) {what}" if "pid" in event.fields else ""
                    )
                    await self.book.tell(record, "watchdog", f"{event.reason}{process}")
            case _:
                pass

    async def _wanted(self, record: LeaseRecord, *, queries_only: bool) -> None:
        live = self.book.live[record.id]
        # Frameworks query streams in the background: only a busy kernel means it.
        if record.is_job or (queries_only and not live.kernel_busy) or live.wanted:
            return
        live.wanted_at = self.book.clock()
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
            self.effects.see_to(lease, now)
        snapshot.add_up(book, now)
        with uninterrupted():
            decided = self._keeper.plan(snapshot.cluster(book, now), now)
        await book.keep_sums(now)
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
                self.effects.see_to(record, book.clock())

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
                reason = self._because(record, action)
                return move(
                    record,
                    Event.SUSPEND,
                    why=action.why,
                    for_lease=action.for_lease,
                    note=reason,
                    lend_now=False,
                )
            case Resume():
                # Tried again after a refusal, it is no new decision.
                again = self.book.live[record.id].resumes_refused > 0
                return move(record, Event.RESUME, why="" if again else action.why)
            case Requeue():
                reason = self._because(record, action)
                return move(
                    record, Event.STOP, why=action.why, for_lease=action.for_lease, note=reason, requeue=True
                )

    def _because(self, record: LeaseRecord, action: Suspend | Requeue) -> str:
        """Return why a job has to give its room up, for people; of a session its state says enough."""
        if not record.is_job:
            return ""
        other = self.book.leases.get(action.for_lease)
        return because_of(action.why, other.lease.project if other is not None else "")

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
            if is_job_server(key.server) and not self._expected(key) and await self._is_ours(key):
                await self.backend.stop_server(key)

    def _expected(self, key: ServerKey) -> bool:
        record = self.book.by_handle(key.server)
        return record is not None and record.lease.user == key.user and record.state is not State.PENDING

    async def _is_ours(self, key: ServerKey) -> bool:
        """Return whether a server is of a job of its user, not one that only bears such a name."""
        job_id = key.server[1:].partition("-")[0]
        job = self.book.jobs.get(job_id) or await self.book.store.job(job_id, key.user)
        return job is not None and job.user == key.user


def is_job_server(name: str) -> bool:
    """Return whether a server's name is one that only the broker gives: ``j`` + 10 characters + attempt."""
    head, dash, attempt = name.rpartition("-")
    return bool(dash) and attempt.isdigit() and len(head) == 11 and head[0] == "j" and head[1:].isalnum()


def granted(book: Book, record: LeaseRecord, action: Grant) -> dict[str, Any]:
    """Return what a grant changes in a record: devices, limits, the next attempt."""
    grantable = {d.uuid: d.grantable_bytes for d in snapshot.devices(book)}
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
