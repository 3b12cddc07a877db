"""One broker on a site in memory: every commit and every call to the outside is a *step*.

A broker that has to die at a step does nothing from that step on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control.fenced_hub import StartTickets
from jupyter_gpushare.broker.control.loop import Loop
from jupyter_gpushare.broker.engine.local import LocalEngine
from jupyter_gpushare.broker.http import spawner
from jupyter_gpushare.broker.http.base import Control
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.session_queue import QueuePlace
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.state.tables import Change
from jupyter_gpushare.broker.state.usage import own_milli
from jupyter_gpushare.broker.views.views import Views
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, State
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import Phase
from tests.broker.fake_devices import SiteDevices
from tests.broker.fake_hub import SiteHub
from tests.broker.virtual_time import until

if TYPE_CHECKING:
    from tests.broker.site import Site

T = TypeVar("T")


def sent(answer: T) -> T:
    """Return an answer as its reader sees it."""
    return wire.decode_answer(wire.encode(messages.in_english(answer)), type(answer))


class Broker:
    """The store, book, loop and requests of one process, which dies at a given step."""

    def __init__(self, site: Site, die_at: int | None) -> None:
        self.site = site
        self.die_at = die_at
        self.steps = 0
        self.dead = asyncio.Event()
        self.store = SteppingStore(site.url, site.boot_id, self)
        self.registry = Registry(
            self.store, site.policy, clock=asyncio.get_running_loop().time, wall=site.wall
        )
        self.registry.load(site.boot_id)
        self.engine = LocalEngine()
        self.devices = SiteDevices(site, self)
        self.hub = SiteHub(site, self)
        tickets = StartTickets(lambda: self.store.epoch, ["of the spawner"])
        self.loop = Loop(self.registry, self.engine, self.devices, self.hub, tickets)
        control = self.control = Control.of(self.loop)
        self.request_policy, self.requests = control.request_policy, control.requests
        self.job_reports, self.own_sessions = control.job_reports, control.own_sessions
        self.project_numbers = control.project_numbers
        self.sessions, self.sizes = control.sessions, control.sizes
        self.views = Views(self.registry, self.engine, self.loop.faults)
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._running = asyncio.create_task(self.loop.run())

    async def step(self) -> None:
        """Count a step; the process may die at it."""
        self.steps += 1
        if self.steps == self.die_at:
            self.dead.set()
        if self.dead.is_set():
            await asyncio.Event().wait()

    async def end(self) -> None:
        """End the broker as kill -9 does: it does nothing more, and the kernel closes its files."""
        self.dead.set()
        tasks = [*self.loop.effects.tasks.values(), *self.loop.unstored.wakes.values()]
        tasks += [self._running] if self._running else []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, BaseExceptionGroup):
                await task
        if self.registry.journal.failed.done():
            self.registry.journal.failed.exception()
        self.store.close()

    # ---- requests of the Hub's spawner

    async def start(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        return await spawner.start(self.control, request)

    async def wait(self, request: wire.SpawnRequest) -> QueuePlace | None:
        return await spawner.wait(self.control, request)

    async def stop(self, request: wire.SpawnStop) -> None:
        await spawner.stop(self.control, request)

    # ---- short forms of queries

    @property
    def holds_nothing(self) -> bool:
        return not self.registry.leases and not self.registry.jobs and not self.site.held

    def lease(self, handle_or_job: str | JobRecord) -> LeaseRecord:
        if isinstance(handle_or_job, JobRecord):
            return self.registry.leases[handle_or_job.lease_id]
        return self.registry.leases[handle_or_job.rsplit("-", 1)[0]]

    def state(self, handle_or_job: str | JobRecord) -> str:
        return str(self.lease(handle_or_job).state)

    def job(self, job: JobRecord) -> JobRecord:
        return self.registry.jobs[job.id]

    def seen(self, job: JobRecord) -> wire.Job:
        return sent(self.views.job(self.registry.jobs[job.id]))

    def shown(self, handle: str) -> wire.LeaseStatus:
        return sent(self.views.lease(self.lease(handle)))

    def told(self, user: str | None, limit: int) -> list[wire.Decision]:
        return [sent(each) for each in self.views.decisions(user, limit)]

    async def ended(self, job: JobRecord, within_s: float = 600.0) -> str:
        """Return the state of a job when it has ended."""
        await until(lambda: self.job(job).result, within_s)
        return self.seen(job).state


class SteppingStore(Store):
    """The real store, without its thread; a process may die at a commit."""

    def __init__(self, url: str, boot_id: str, broker: Broker) -> None:
        super().__init__(url, boot_id)
        self._broker = broker
        # Tests wait for thousands of commits, and no test cuts the power.
        sa.event.listen(self._engine, "connect", lambda c, _: c.execute("PRAGMA synchronous=OFF").close())
        self._engine.dispose()

    def _upgrade(self) -> None:
        """Do nothing: the file is a copy of one with the newest schema."""

    async def commit(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        self._check()
        await self._broker.step()
        self._write(tuple(changes))
        await self._broker.step()

    async def retry(self) -> None:
        await self._broker.step()
        self._retry()

    async def _read(self, query: Any) -> list[Any]:
        await self._broker.step()
        return self._rows(query)

    async def scan(self, query: Any, of: Callable[[Any], Any]) -> list[Any]:
        return [of(row) for row in await self._read(query)]

    def _check(self) -> None:
        registry = self._broker.registry
        held: Counter[str] = Counter()
        for record in registry.leases.values():
            # A lease that ends while it sleeps holds no device, nor does one that the helper has dropped.
            known = self._broker.site.held.get(record.handle)
            asleep = known is None or known.phase is Phase.SUSPENDED
            parked = record.state is State.STOPPING and (record.lease.saved_bytes or asleep)
            if record.state in HOLDS_CAPACITY and not parked:
                held.update(dict.fromkeys(record.lease.devices, own_milli(record.lease)))
        for uuid, milli in held.items():
            if milli > WHOLE_GPU:
                self._broker.site.wrong.append(f"{milli}/1000 of {uuid} are held")
