"""One broker on a site in memory: every commit and every call to the outside is a *step*.

A broker told to die at a step does nothing more from there on.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from jupyter_gpushare import wire
from jupyter_gpushare.backends.base import Backend, HubError, ServerKey
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.desk import Desk
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.loop import Loop
from jupyter_gpushare.broker.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.spawning import Spawning
from jupyter_gpushare.broker.store import Change, Store
from jupyter_gpushare.broker.terms import Terms
from jupyter_gpushare.broker.views import Views
from jupyter_gpushare.core.model import HOLDS_ROOM, WHOLE_GPU, State
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu import verbs
from jupyter_gpushare.gpu.verbs import Moved, Phase, Refusal
from tests.broker.machine import DEVICE_BYTES, GB, RESERVE_BYTES, Held

if TYPE_CHECKING:
    from tests.broker.site import Site


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """In virtual time there are no threads."""
    return function(*arguments)


class Broker:
    """Store, book, loop and desk of one process, which dies at a given step."""

    def __init__(self, site: Site, die_at: int | None) -> None:
        self.site = site
        self.die_at = die_at
        self.steps = 0
        self.dead = asyncio.Event()
        self.store = SteppingStore(site.url, site.boot_id, self)
        self.book = Book(self.store, site.policy, clock=asyncio.get_running_loop().time, wall=site.wall)
        self.book.load(site.boot_id)
        self.backend = SiteBackend(site, self)
        self.loop = Loop(self.book, self.backend)
        forecast = Forecast(self.book, _at_once)
        self.terms = Terms(self.book)
        self.desk = Desk(self.book, self.loop.effects, forecast, self.terms)
        self.spawning = Spawning(self.book, self.backend, self.loop.effects, self.terms)
        self.views = Views(self.book, forecast)
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._running = asyncio.create_task(self.loop.run())

    async def step(self) -> None:
        """Go on, unless the process dies here."""
        self.steps += 1
        if self.steps == self.die_at:
            self.dead.set()
        if self.dead.is_set():
            await asyncio.Event().wait()

    async def end(self) -> None:
        """kill -9: nothing more is done; the kernel closes the files."""
        self.dead.set()
        tasks = [*self.loop.effects.tasks.values(), *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, BaseExceptionGroup):
                await task
        if self.book.failed.done():
            self.book.failed.exception()
        self.store.close()

    # ---- short ways to look

    @property
    def holds_nothing(self) -> bool:
        return not self.book.leases and not self.book.jobs and not self.site.held

    def lease(self, handle_or_job: str | JobRecord) -> LeaseRecord:
        if isinstance(handle_or_job, JobRecord):
            return self.book.leases[handle_or_job.lease_id]
        return self.book.leases[handle_or_job.rsplit("-", 1)[0]]

    def state(self, handle_or_job: str | JobRecord) -> str:
        return str(self.lease(handle_or_job).state)

    def job(self, job: JobRecord) -> JobRecord:
        return self.book.jobs[job.id]

    def seen(self, job: JobRecord) -> wire.Job:
        return self.views.job(self.book.jobs[job.id])


class SteppingStore(Store):
    """The real store, without its thread; a commit may be the last thing a process does."""

    def __init__(self, url: str, boot_id: str, broker: Broker) -> None:
        super().__init__(url, boot_id)
        self._broker = broker
        # No power is cut here, and thousands of commits are waited for.
        sa.event.listen(self._engine, "connect", lambda c, _: c.execute("PRAGMA synchronous=OFF").close())
        self._engine.dispose()

    def _migrate(self) -> None:
        """The file is a copy of one that was migrated."""

    async def commit(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        self._check()
        await self._broker.step()
        self._write(tuple(changes))
        await self._broker.step()

    async def _read(self, query: Any) -> list[Any]:
        await self._broker.step()
        return self._rows(query)

    def _check(self) -> None:
        book = self._broker.book
        held: Counter[str] = Counter()
        for record in book.leases.values():
            # What was cancelled in its sleep holds host memory, and no room until it is gone.
            parked = record.state is State.STOPPING and record.lease.saved_bytes
            if record.state in HOLDS_ROOM and not parked:
                held.update(dict.fromkeys(record.lease.devices, record.lease.held_milli))
        for uuid, milli in held.items():
            if milli > WHOLE_GPU:
                self._broker.site.wrong.append(f"{milli}/1000 of {uuid} are held")


class SiteBackend(Backend):
    """The contract of `Backend`, on a `Site`, for one broker."""

    def __init__(self, site: Site, broker: Broker) -> None:
        self.site = site
        self.broker = broker

    async def _effect(self, name: str, handle: str = "") -> None:
        await self.broker.step()
        self._reach()
        if self.broker.store.epoch < self.site.epoch:
            self.site.wrong.append(f"a stale broker did {name}")
            raise HelperError("stale_epoch", "a newer broker is at work")
        self.site.epoch = self.broker.store.epoch
        self.site.effects.append(f"{name} {handle}".strip())
        waiting = self.site.faults.get(name)
        if waiting and isinstance(waiting[0], Exception):
            raise waiting.popleft()  # type: ignore[misc]

    def _reach(self) -> None:
        if self.site.helper_silent:
            raise HelperError("silent", "the device helper did not answer")

    async def epoch(self) -> int:
        self._reach()
        return self.site.epoch

    async def inventory(self) -> verbs.Inventory:
        self._reach()
        return verbs.Inventory(
            host="here",
            driver="999",
            simulated=True,
            devices=tuple(
                verbs.Device(
                    uuid=uuid,
                    index=n,
                    name="H100-80GB",
                    memory_bytes=DEVICE_BYTES,
                    reserve_bytes=RESERVE_BYTES,
                    suspendable=not self.site.profile,
                    resume_bytes_per_s=4 * GB,
                    profile=self.site.profile,
                )
                for n, uuid in enumerate(self.site.uuids)
            ),
            host_total_bytes=1000 * GB,
            host_budget_bytes=500 * GB,
            at=self.site.now,
        )

    async def sample(self) -> verbs.Sample:
        self._reach()
        if self.broker.dead.is_set():
            await asyncio.Event().wait()
        site = self.site
        return verbs.Sample(
            at=site.now,
            devices=tuple(
                verbs.DeviceSample(
                    uuid=uuid,
                    used_bytes=sum(h.used.get(uuid, 0) for h in site.held.values()),
                    utilization_percent=0,
                    healthy=uuid not in site.unhealthy,
                )
                for uuid in site.uuids
                if uuid not in site.unmeasured
            ),
            leases=tuple(
                verbs.LeaseSample(
                    lease=h.handle,
                    phase=h.phase,
                    devices=tuple(h.limits),
                    used_bytes=dict(h.used),
                    saved_bytes=dict(h.saved),
                    calls=str(h.calls),
                    active_at=h.active_at,
                    suspendable=h.suspendable,
                    suspend_reason="" if h.suspendable else "it uses CUDA IPC",
                    alive=h.alive,
                    wanted=h.wanted,
                )
                for h in site.held.values()
            ),
            host_available_bytes=1000 * GB,
            host_saved_bytes=sum(sum(h.saved.values()) for h in site.held.values()),
        )

    async def watch(self) -> AsyncIterator[verbs.Event]:
        inbox: asyncio.Queue[verbs.Event] = asyncio.Queue()
        self.site.inboxes.append(inbox)
        try:
            while True:
                yield await inbox.get()
        finally:
            self.site.inboxes.remove(inbox)

    async def prepare(
        self, handle: str, uid: int, limits: Mapping[str, int], guaranteed: Mapping[str, int], *, asleep: bool
    ) -> dict[str, str]:
        await self._effect("prepare", handle)
        held = self.site.held.setdefault(handle, Held(handle, uid, dict(limits)))
        if not held.alive:
            held.limits, held.guaranteed = dict(limits), dict(guaranteed)
            held.phase = Phase.SUSPENDED if asleep else Phase.RUNNING
        await self.broker.step()
        return {"GPUSHARE_LEASE": handle}

    async def suspend(self, handle: str, calls: str) -> Moved:
        await self._effect("suspend", handle)
        moved = await self._move("suspend", handle, lambda held: self._park(held, calls))
        await self.broker.step()
        return moved

    async def resume(self, handle: str) -> Moved:
        await self._effect("resume", handle)
        moved = await self._move("resume", handle, self._restore)
        await self.broker.step()
        return moved

    async def _move(self, name: str, handle: str, move: Callable[[Held], Moved]) -> Moved:
        held = self.site.held.get(handle)
        if held is None:
            return Moved(done=False, refused=Refusal.NO_LEASE, reason="no such lease")
        waiting = self.site.faults.get(name)
        if waiting:
            moved = waiting.popleft()
            assert isinstance(moved, Moved)
            if moved.refused is Refusal.LOST:
                held.phase, held.saved = Phase.LOST, {}
            return moved
        await asyncio.sleep(self.site.move_s)
        return move(held)

    def _park(self, held: Held, calls: str) -> Moved:
        if held.phase is Phase.SUSPENDED:
            return Moved(done=True, bytes=sum(held.saved.values()))
        if calls and calls != str(held.calls):
            return Moved(done=False, refused=Refusal.WANTED, reason="a process entered a CUDA call")
        held.phase, held.saved, held.wanted = Phase.SUSPENDED, dict(held.used), False
        self.site.use(held, {})
        return Moved(done=True, bytes=sum(held.saved.values()))

    def _restore(self, held: Held) -> Moved:
        if held.phase is Phase.RUNNING:
            return Moved(done=True)
        for uuid, count in held.saved.items():
            used = sum(h.used.get(uuid, 0) for h in self.site.held.values())
            if used + count > DEVICE_BYTES - RESERVE_BYTES:
                return Moved(done=False, refused=Refusal.NO_ROOM, reason="the driver shows too little room")
        back, held.saved = held.saved, {}
        held.phase, held.wanted = Phase.RUNNING, False
        self.site.use(held, back)
        return Moved(done=True)

    async def signal(self, handle: str, number: int, to: str) -> None:
        await self._effect(f"signal {signal.Signals(number).name} {to}", handle)
        for run in [r for r in self.site.runs if f"j{r.job.id}-{r.job.attempt}" == handle]:
            if number == signal.SIGKILL:
                self.site.kill_job(run.job.id)
            else:
                run.told_to_stop = True
        held = self.site.held.get(handle)
        if number == signal.SIGKILL and held is not None and not handle.startswith("j"):
            held.alive, held.used = False, {}
        await self.broker.step()

    async def drop(self, handle: str) -> None:
        await self._effect("drop", handle)
        held = self.site.held.pop(handle, None)
        if held is not None and (held.alive or any(held.used.values())):
            self.site.wrong.append(f"{handle} was dropped while it lives")
        await self.broker.step()

    async def start_server(self, key: ServerKey) -> None:
        await self._effect("start_server", key.server)
        if key not in self.site.servers:
            self.site.servers[key] = "spawn"
            self.site.later(self.site.spawn_job(key))
        await self.broker.step()

    async def stop_server(self, key: ServerKey) -> None:
        await self._effect("stop_server", key.server)
        state = self.site.servers.get(key)
        if state == "spawn":
            raise HubError(f"{key.server} is pending spawn")
        for run in self.site.runs:
            if run.user == key.user and f"j{run.job.id}-{run.job.attempt}" == key.server:
                run.told_to_stop = True
        await self.broker.step()

    async def servers(self) -> frozenset[ServerKey]:
        if self.broker.dead.is_set():
            await asyncio.Event().wait()
        return frozenset(self.site.servers)

    async def has_server(self, key: ServerKey) -> bool:
        return key in await self.servers()

    async def groups(self, user: str) -> tuple[str, ...]:
        return self.site.groups.get(user, ())

    async def server_url(self, key: ServerKey) -> str:
        here = f"https://{key.user}.hub.test/user/{key.user}/{key.server}/"
        return here if key in self.site.servers else ""

    async def close(self) -> None:
        return None
