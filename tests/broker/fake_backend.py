"""A site in memory: devices, device helper, Hub, servers, jobs; and a clock that jumps.

`in_virtual_time` runs an async test on an event loop whose time passes only
while nobody has anything to do: an hour takes milliseconds, and nothing races.

`Site` is everything that outlives a broker.  It watches over what must never
happen (more memory on a device than it has, two attempts of one job at once)
and writes that into ``site.wrong``.  `Site.start_broker` starts a real store,
book, loop and desk on it; every commit and every call to the outside is a
*step*, and a broker told to die at a step does nothing more from there on.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import selectors
import signal
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from jupyter_gpushare import wire
from jupyter_gpushare.backends.base import Backend, HubError, ServerKey
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.desk import Desk
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.loop import Loop
from jupyter_gpushare.broker.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.store import Change, Store
from jupyter_gpushare.broker.views import Views
from jupyter_gpushare.core.model import HOLDS_ROOM, WHOLE_GPU, State
from jupyter_gpushare.errors import HelperError, RequestError, StoreError
from jupyter_gpushare.gpu import verbs
from jupyter_gpushare.gpu.verbs import Moved, Phase, Refusal

GB = 10**9
DEVICE_BYTES = 80 * GB
RESERVE_BYTES = 2 * GB
START_AT = 1_000.0
# A story that is not over after so long never ends.
TOO_LONG_S = 50_000.0
GROUPS = {"ada": ("vision",), "bo": ("nlp",), "cy": ("vision", "nlp"), "eve": ()}


# ---- a clock that jumps --------------------------------------------------------


class _Impatient(selectors.DefaultSelector):
    """Never waits: where the event loop would sleep, its clock moves on."""

    now = START_AT

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self.now += max(0.0, timeout)
        if self.now > START_AT + TOO_LONG_S:
            raise RuntimeError("this story never ends")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._impatient = _Impatient()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end on a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def until(condition: Callable[[], Any], within_s: float = 600.0, step_s: float = 0.05) -> None:
    """Return when ``condition`` holds; fail when it does not within virtual seconds."""
    end = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, "the condition never came true"
        await asyncio.sleep(step_s)


# ---- what is on the machine ----------------------------------------------------


@dataclass
class Held:
    """A lease as the device helper knows it, with the processes that carry it."""

    handle: str
    uid: int
    limits: dict[str, int]
    phase: Phase = Phase.RUNNING
    alive: bool = False
    used: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    wanted: bool = False
    active_at: float = 0.0
    suspendable: bool = True


@dataclass
class Program:
    """What the command of a job does."""

    work_s: float = 20.0
    exit_code: int = 0
    memory: float = 0.5  # of its limit
    heeds_sigterm: bool = True
    vanishes_after_s: float | None = None  # killed from outside, without a word
    lingers_s: float = 0.0  # its memory is still on the device so long after its end


@dataclass(eq=False)
class Run:
    """One attempt of a job that lives now."""

    job: wire.JobSpec
    user: str
    told_to_stop: bool = False
    ended: bool = False  # its processes are gone; their memory may linger
    task: asyncio.Task[None] | None = None


@functools.cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.sqlite"
        Store(f"sqlite:///{path}", "boot-1").close()
        return path.read_bytes()


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """In virtual time there are no threads."""
    return function(*arguments)


class Site:
    """Machine, Hub and people; outlives brokers."""

    def __init__(
        self, folder: Path, *, gpus: int = 2, profile: str = "", policy: Policy | None = None
    ) -> None:
        (folder / "broker.sqlite").write_bytes(_empty_database())
        self.url = f"sqlite:///{folder / 'broker.sqlite'}"
        self.policy = policy or Policy(
            projects=tuple(ProjectConfig(name=n, quota_percent=50.0, groups=(n,)) for n in ("vision", "nlp")),
            idle_timeout_s=60.0,
            grace_s=5.0,
        )
        self.profile = profile  # of MIG instances; "": its GPUs are not divided
        self.uuids = tuple(f"GPU-{n}" for n in range(gpus))
        self.groups: dict[str, tuple[str, ...]] = dict(GROUPS)
        self.held: dict[str, Held] = {}
        self.servers: dict[ServerKey, str] = {}
        self.programs: dict[str, Program] = {}
        self.runs: list[Run] = []
        self.started: Counter[str] = Counter()  # by job id
        self.worked_s: Counter[str] = Counter()
        self.worked_in: dict[tuple[str, int], float] = {}
        self.wrong: list[str] = []
        self.effects: list[str] = []
        self.faults: dict[str, deque[Moved | Exception]] = {}
        self.helper_silent = False
        self.patient = False  # people try again while a new broker looks around
        self.unhealthy: set[str] = set()
        self.unmeasured: set[str] = set()
        self.spawn_s = 0.2
        self.move_s = 1.0
        self.epoch = 0
        self.boot_id = "boot-1"
        self.broker: Broker | None = None
        self.inboxes: list[asyncio.Queue[verbs.Event]] = []
        self._seq = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> str:
        moment = datetime.fromtimestamp(1_700_000_000 + self.now, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    # ---- brokers

    async def start_broker(self, die_at: int | None = None, *, running: bool = True) -> Broker:
        broker = Broker(self, die_at)
        self.broker = broker
        if running:
            broker.begin()
            await until(lambda: broker.dead.is_set() or broker.book.sample is not None, 30)
        return broker

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.broker is not None:
            await self.broker.end()
        assert not self.wrong, self.wrong

    async def __aenter__(self) -> Site:
        return self

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self.wrong.clear()  # the first error is the one to show
        await self.close()

    def later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ask(self, question: Callable[[Broker], Awaitable[Any]], patience_s: float = 60.0) -> Any:
        """Ask whatever broker is alive, as clients do: again until one answers."""
        end = self.now + patience_s
        while self.now < end:
            broker = self.broker
            if broker is not None and not broker.dead.is_set():
                answer = asyncio.ensure_future(question(broker))
                dead = asyncio.ensure_future(broker.dead.wait())
                await asyncio.wait((answer, dead), return_when=asyncio.FIRST_COMPLETED)
                dead.cancel()
                if answer.done():
                    try:
                        return answer.result()
                    except StoreError:
                        broker.dead.set()
                    except RequestError as refused:
                        if not self.patient or refused.reason != "devices_unknown":
                            raise
                answer.cancel()
            await asyncio.sleep(0.1)
        raise TimeoutError("no broker answered")

    # ---- people and their servers

    async def session(
        self, user: str, size: str = "1/2", *, server: str = "", use: float = 0.5, project: str | None = None
    ) -> Held:
        """Start a server with a part of a GPU, and let its kernel use ``use`` of its limit."""
        request = spawn(user, size, server=server, project=project)
        grant = await self.ask(lambda b: b.desk.start(request))
        self.servers[ServerKey(user, server)] = "ready"
        held = self.held[grant.lease]
        held.alive = True
        if not grant.asleep:
            self.use(held, {uuid: int(limit * use) for uuid, limit in held.limits.items()})
        held.active_at = self.now
        return held

    async def gpu_cell(self, held: Held) -> None:
        """Enter a CUDA call; returns when it got through."""
        held.calls += 1
        held.active_at = self.now
        if held.phase is not Phase.RUNNING:
            held.wanted = True
            self.tell(verbs.EventKind.WANTED, held.handle)
            await until(lambda: held.phase is Phase.RUNNING)
        held.active_at = self.now

    async def end_session(self, user: str, server: str = "") -> None:
        """A server ends: its processes go, the Hub forgets it, the spawner says so."""
        for held in [h for h in self.held.values() if self.owner(h.handle) == (user, server)]:
            held.alive, held.used, held.saved = False, {}, {}
        self.servers.pop(ServerKey(user, server), None)
        await self.ask(lambda b: b.desk.stop(wire.SpawnStop(user=user, server=server)))

    def owner(self, handle: str) -> tuple[str, str] | None:
        record = self.broker.book.by_handle(handle) if self.broker else None
        return (record.lease.user, record.server) if record else None

    async def submit(self, user: str, gpus: str = "1", key: str | None = None, **more: Any) -> JobRecord:
        program = more.pop("program", None)
        request = wire.JobRequest(command=["python", "train.py"], gpus=gpus, **more)
        key = key or f"key-{next(self._seq)}"
        job: JobRecord = await self.ask(lambda b: b.desk.submit(user, self.groups[user], request, key))
        if program is not None:
            self.programs[job.id] = program
        return job

    # ---- device memory

    def use(self, held: Held, used: dict[str, int]) -> None:
        held.used = used
        for uuid in self.uuids:
            total = sum(h.used.get(uuid, 0) for h in self.held.values())
            if total > DEVICE_BYTES - RESERVE_BYTES:
                self.wrong.append(f"{uuid} is double-booked at {self.now}: {total}")

    def tell(self, kind: verbs.EventKind, lease: str = "", reason: str = "", **fields: str) -> None:
        event = verbs.Event(
            seq=next(self._seq), at=self.now, kind=kind, lease=lease, reason=reason, fields=fields
        )
        for inbox in self.inboxes:
            inbox.put_nowait(event)

    def fault(self, name: str, *outcomes: Moved | Exception) -> None:
        """Let the next calls of ``name`` end like this."""
        self.faults.setdefault(name, deque()).extend(outcomes)

    # ---- the Hub

    async def spawn_job(self, key: ServerKey) -> None:
        """What the Hub does once it took the request to start a job's server."""
        await asyncio.sleep(self.spawn_s)
        request = spawn(key.user, None, server=key.server)
        try:
            grant = await self.ask(lambda b: b.desk.start(request))
        except RequestError:
            self.servers.pop(key, None)
            await self.ask(lambda b: b.desk.stop(wire.SpawnStop(user=key.user, server=key.server)))
            return
        await asyncio.sleep(self.spawn_s)
        self.servers[key] = "ready"
        run = Run(job=grant.job, user=key.user)
        run.task = asyncio.current_task()
        if any(r.job.id == run.job.id for r in self.runs):
            self.wrong.append(f"two attempts of {run.job.id} at once")
        self.runs.append(run)
        self.started[run.job.id] += 1
        held = self.held.get(grant.lease) or Held(grant.lease, 0, {})
        try:
            await self._work(run, held)
        finally:
            self.runs.remove(run)
        self.servers.pop(key, None)
        await self.ask(lambda b: b.desk.stop(wire.SpawnStop(user=key.user, server=key.server)))

    async def _work(self, run: Run, held: Held) -> None:
        program = self.programs.get(run.job.id, Program())
        held.alive = True
        self.use(held, {u: int(x * program.memory) for u, x in held.limits.items()})
        done_s, code = 0.0, program.exit_code
        try:
            await self._report(run, state="started")
            while done_s < program.work_s:
                await asyncio.sleep(0.5)
                if run.told_to_stop and program.heeds_sigterm:
                    code = -signal.SIGTERM
                    break
                if held.phase is not Phase.RUNNING:
                    held.wanted = True
                    continue
                done_s += 0.5
                held.active_at = self.now
                self.worked_s[run.job.id] += 0.5
                self.worked_in[run.job.id, run.job.attempt] = done_s
                if program.vanishes_after_s is not None and done_s >= program.vanishes_after_s:
                    return
            stopped = run.told_to_stop and done_s < program.work_s
            await self._report(run, state="ended", exit_code=code, stopped=stopped)
            await asyncio.sleep(0.3)
        finally:
            held.alive, run.ended = False, True
            if program.lingers_s:
                await asyncio.sleep(program.lingers_s)
            held.used, held.saved = {}, {}
            self.tell(verbs.EventKind.ENDED, held.handle)

    async def _report(self, run: Run, **report: Any) -> None:
        message = wire.JobReport(**report)
        await self.ask(lambda b: b.desk.report(run.user, run.job.id, run.job.attempt, message))

    def kill_job(self, job_id: str) -> None:
        """kill -9 of everything that belongs to a job."""
        for run in [r for r in self.runs if r.job.id == job_id and not r.ended]:
            assert run.task is not None
            run.task.cancel()
            self.servers.pop(ServerKey(run.user, f"j{job_id}-{run.job.attempt}"), None)


def spawn(
    user: str, size: str | None, *, server: str = "", project: str | None = None, groups: Sequence[str] = ()
) -> wire.SpawnRequest:
    options = None if size is None else wire.GpuRequest(fraction=size, project=project)
    return wire.SpawnRequest(
        user=user, server=server, groups=list(groups or GROUPS[user]), uid=1000, options=options
    )


# ---- one broker ----------------------------------------------------------------


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
        self.desk = Desk(self.book, self.backend, self.loop.effects, forecast)
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
        self, handle: str, uid: int, limits: Mapping[str, int], *, asleep: bool
    ) -> dict[str, str]:
        await self._effect("prepare", handle)
        held = self.site.held.setdefault(handle, Held(handle, uid, dict(limits)))
        if not held.alive:
            held.limits = dict(limits)
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
                held.phase, held.saved = Phase.RUNNING, {}
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

    async def groups(self, user: str) -> tuple[str, ...]:
        return self.site.groups.get(user, ())

    async def server_url(self, key: ServerKey) -> str:
        here = f"https://{key.user}.hub.test/user/{key.user}/{key.server}/"
        return here if key in self.site.servers else ""

    async def close(self) -> None:
        return None
