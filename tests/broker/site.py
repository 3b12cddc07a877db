"""A site in memory: devices, device helper, Hub, servers, jobs.

`Site` is everything that outlives a broker.  It checks invariants (no device holds
more memory than it has, no two attempts of one job run at once) and writes
violations to ``site.wrong``.  `Site.start_broker` starts a real store, book, loop
and requests on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import signal
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jupyter_gpushare.backends.base import HubServer, ServerKey
from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.errors import DiskFull, RequestError, StoreError
from jupyter_gpushare.protocol import helper, wire
from jupyter_gpushare.protocol.helper import MoveResult, Phase, UnleasedProcess
from tests.broker.brokers import Broker
from tests.broker.machine import GROUPS, MODELS, RESERVE_BYTES, Held, Program, Run
from tests.broker.virtual_time import until


@functools.cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.sqlite"
        Store(f"sqlite:///{path}", "boot-1").close()
        return path.read_bytes()


class Site:
    """The machine, the Hub and the users; outlives brokers."""

    def __init__(
        self,
        folder: Path,
        *,
        gpus: int = 2,
        profile: str = "",
        policy: Policy | None = None,
        models: Mapping[str, int] = MODELS,
    ) -> None:
        (folder / "broker.sqlite").write_bytes(_empty_database())
        self.url = f"sqlite:///{folder / 'broker.sqlite'}"
        self.policy = policy or Policy(
            projects=tuple(ProjectConfig(name=n, quota_percent=50.0, groups=(n,)) for n in ("vision", "nlp")),
            idle_timeout_s=60.0,
            grace_s=5.0,
        )
        self.host = "here"  # "": several nodes of a cluster
        self.movable = True  # suspended work can resume on another of its GPUs
        self.profile = profile  # of MIG instances; "": its GPUs are not divided
        self.uuids = tuple(f"GPU-{n}" for n in range(gpus))
        # Model and memory in bytes of each GPU, in turn.
        self.models = dict(zip(self.uuids, itertools.cycle(models.items()), strict=False))
        self.groups: dict[str, tuple[str, ...]] = dict(GROUPS)
        self.made: dict[str, str] = {}  # when the Hub created users, if not at the default time
        self.deleted: set[str] = set()  # users of `groups` that the Hub does not have
        self.held: dict[str, Held] = {}
        self.servers: dict[ServerKey, str] = {}
        self.active: dict[ServerKey, HubServer] = {}  # what the Hub knows of the use of servers
        self.services: dict[str, Sequence[str]] = {}  # commands of the Hub's services
        self.shown: dict[ServerKey, str] = {}  # what the Hub's pages call them
        self.programs: dict[str, Program] = {}
        self.runs: list[Run] = []
        self.started: Counter[str] = Counter()  # by job id
        self.worked_s: Counter[str] = Counter()
        self.worked_in: dict[tuple[str, int], float] = {}
        self.wrong: list[str] = []
        self.effects: list[str] = []
        self.faults: dict[str, deque[MoveResult | Exception]] = {}
        self.helper_silent = False
        self.patient = False  # users retry while a new broker takes its first measurements
        self.unhealthy: set[str] = set()
        self.unmeasured: set[str] = set()
        self.unleased: dict[str, list[UnleasedProcess]] = {}  # by device
        self.closed: dict[str, str] = {}  # why devices take nothing new, by UUID
        self.utilization: dict[str, int] = {}  # percent, by UUID
        self.reserve_bytes = RESERVE_BYTES  # of each device, never granted
        self.spawn_s = 0.2
        self.move_s = 1.0
        self.epoch = 0
        self.boot_id = "boot-1"
        self.broker: Broker | None = None
        self.inboxes: list[asyncio.Queue[helper.Event]] = []
        self._seq = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> str:
        moment = datetime.fromtimestamp(1_700_000_000 + self.now, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def made_at(self, name: str) -> str:
        """Return when the Hub created a user, in the Hub's format; no two users have the same time."""
        return self.made.get(name, f"2026-01-01T00:00:00.{zlib.crc32(name.encode()) % 999_999 + 1:06}Z")

    def moment(self, name: str) -> datetime | None:
        """Return when the Hub created a user, in the spawner's format."""
        return datetime.fromisoformat(at) if (at := self.made_at(name)) else None

    # ---- brokers

    async def start_broker(self, die_at: int | None = None, *, running: bool = True) -> Broker:
        broker = Broker(self, die_at)
        self.broker = broker
        if running:
            broker.begin()
            await until(lambda: broker.dead.is_set() or broker.registry.devices.sample is not None, 30)
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
        """Send a request to the living broker, and retry until one answers, as clients do."""
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

    # ---- users and their servers

    async def session(
        self, user: str, size: str = "1/2", *, server: str = "", use: float = 0.5, project: str | None = None
    ) -> Held:
        """Start a server with a part of a GPU, and let its kernel use ``use`` of its limit."""
        request = spawn(user, size, server=server, project=project)
        request = wire.replace(request, created=self.moment(user))
        grant = await self.ask(lambda b: b.start(request))
        self.servers[ServerKey(user, server)] = "ready"
        held = self.held[grant.lease]
        held.alive = True
        if not grant.asleep:
            self.use(held, {uuid: int(limit * use) for uuid, limit in held.limits.items()})
        held.active_at = self.now
        return held

    async def gpu_cell(self, held: Held) -> None:
        """Make a CUDA call; return when the call returns."""
        held.calls += 1
        held.active_at = self.now
        if held.phase is not Phase.RUNNING:
            held.wanted = True
            self.emit(helper.EventKind.WANTED, held.handle)
            await until(lambda: held.phase is Phase.RUNNING)
        held.active_at = self.now

    async def end_session(self, user: str, server: str = "", *, by_hub: bool | None = None) -> None:
        """End a server: its processes end, the Hub forgets it, and the spawner reports it."""
        for held in [h for h in self.held.values() if self.owner(h.handle) == (user, server)]:
            held.alive, held.used, held.saved = False, {}, {}
        self.servers.pop(ServerKey(user, server), None)
        stop = wire.SpawnStop(user=user, server=server, by_hub=by_hub)
        await self.ask(lambda b: b.stop(stop))

    def owner(self, handle: str) -> tuple[str, str] | None:
        record = self.broker.registry.by_handle(handle) if self.broker else None
        return (record.lease.user, record.server) if record else None

    async def submit(self, user: str, gpus: str = "1", key: str | None = None, **more: Any) -> JobRecord:
        program = more.pop("program", None)
        request = wire.JobRequest(command=["python", "train.py"], gpus=gpus, **more)
        key = key or f"key-{next(self._seq)}"
        job: JobRecord = await self.ask(lambda b: b.requests.submit(user, self.groups[user], request, key))
        if program is not None:
            self.programs[job.id] = program
        return job

    async def running(self, user: str, gpus: str = "1", **more: Any) -> JobRecord:
        """Submit a job and return it when it runs, within 120 s."""
        job = await self.submit(user, gpus, **more)
        await until(lambda: self.broker is not None and self.broker.state(job) == "running", 120)
        return job

    async def lent(self, **job: Any) -> tuple[Held, JobRecord]:
        """Return a sleeping session of ada with half a GPU, and a job of bo that runs on both GPUs."""
        ada = await self.session("ada", "1/2")
        return ada, await self.running("bo", "2", **job)

    async def computes(self, user: str, *, busy: bool = True) -> None:
        """Let a user's server report that its kernel runs a cell, or has ended it."""
        kernel = wire.KernelActivity(id="k", busy=busy, idle_s=0.0, name="a.ipynb")
        await self.reports(user, kernel)

    async def reports(self, user: str, *kernels: wire.KernelActivity) -> None:
        """Let a user's server report the activity of its kernels."""
        report = wire.ActivityReport(kernels=list(kernels))
        await self.ask(lambda b: b.own_sessions.activity(user, "", report))

    async def report(self, job: JobRecord, **fields: Any) -> None:
        """Send a report for the first attempt of a job, as its runner does."""
        assert self.broker is not None
        await self.broker.job_reports.report(job.user, job.id, 1, wire.JobReport(**fields))

    # ---- device memory

    def grantable_bytes(self, uuid: str) -> int:
        return self.models[uuid][1] - self.reserve_bytes

    def use(self, held: Held, used: dict[str, int]) -> None:
        held.used = used
        for uuid in self.uuids:
            total = sum(h.used.get(uuid, 0) for h in self.held.values())
            if total > self.grantable_bytes(uuid):
                self.wrong.append(f"{uuid} is double-booked at {self.now}: {total}")

    def guests_of(self, host: Held) -> list[Held]:
        """Return the guests on the devices of a lease, as the helper knows them."""
        return [h for h in self.held.values() if h.asked.guest_of == host.handle and h.phase is Phase.RUNNING]

    async def allocate(self, held: Held, used: dict[str, int]) -> None:
        """Let a lease allocate memory as its program does; it waits for memory kept for its partner."""
        for guest in [held] if held.asked.guest_of else self.guests_of(held):
            (uuid,) = guest.limits
            is_own = guest is held
            room = guest.asked.guest_bytes if is_own else held.limits[uuid] - guest.asked.guest_bytes
            if used.get(uuid, 0) > room:
                await self.leave(guest, "own_memory" if is_own else "host_memory")
        if held.phase is Phase.RUNNING:
            self.use(held, used)
        else:
            held.saved, held.wanted = used, True

    async def leave(self, guest: Held, reason: str) -> None:
        """Suspend a guest, as `gpu.moves.guests` does by itself."""
        began_at = self.now
        await asyncio.sleep(self.move_s)
        guest.phase, guest.saved = Phase.SUSPENDED, dict(guest.used)
        self.use(guest, {})
        took_s = str(self.now - began_at)
        self.emit(helper.EventKind.GUEST, guest.handle, reason, host=guest.asked.guest_of, took_s=took_s)

    def emit(self, kind: helper.EventKind, lease: str = "", reason: str = "", **fields: str) -> None:
        event = helper.Event(
            seq=next(self._seq), at=self.now, kind=kind, lease=lease, reason=reason, fields=fields
        )
        for inbox in self.inboxes:
            inbox.put_nowait(event)

    def fault(self, name: str, *outcomes: MoveResult | Exception) -> None:
        """Let the next calls of ``name`` have these outcomes."""
        self.faults.setdefault(name, deque()).extend(outcomes)

    def claim(self, held: Held) -> bool:
        """Return whether a lease may resume unrecorded, by the rules of `moves.wake`; end ended leases."""
        for other in self.held.values():
            if other.command_ended and other.phase is Phase.RUNNING and not any(other.used.values()):
                other.phase = Phase.SUSPENDED
        beside = [h for h in self.held.values() if h is not held and h.phase is not Phase.SUSPENDED]
        here = [h for h in beside if h.limits.keys() & held.limits.keys()]
        borrows = any(h.guaranteed.get(u, x) < x for h in here for u, x in h.limits.items())
        taken = {u: sum(h.limits.get(u, 0) for h in here) for u in held.limits}
        return not borrows and all(taken[u] + x <= self.grantable_bytes(u) for u, x in held.limits.items())

    def resume_unattended(self, held: Held) -> None:
        """Resume a lease as the helper does while no broker answers."""
        assert held.unattended
        assert held.phase is Phase.SUSPENDED
        assert self.claim(held)
        back, held.saved = held.saved, {}
        held.phase, held.wanted, held.unconfirmed = Phase.RUNNING, False, True
        self.use(held, back)

    def conflict(self, handle: str, limits: Mapping[str, int]) -> str:
        """Return why a lease may not be on its devices now, as `LeaseRegistry.conflict` does."""
        others = (h for h in self.held.values() if h.handle != handle and h.phase is not Phase.SUSPENDED)
        beside = [h for h in others if not h.asked.guest_of]
        taken = {uuid: sum(h.limits.get(uuid, 0) for h in beside) for uuid in limits}
        fits = all(taken[uuid] + count <= self.grantable_bytes(uuid) for uuid, count in limits.items())
        is_unknown = any(h.unconfirmed and h.limits.keys() & limits.keys() for h in beside)
        return "a lease was resumed on its device" if is_unknown and not fits else ""

    # ---- the Hub

    async def spawn_job(self, key: ServerKey, ticket: str) -> None:
        """Start a job's server as the Hub does after it accepted the request."""
        await asyncio.sleep(self.spawn_s)
        request = spawn(key.user, None, server=key.server, groups=self.groups.get(key.user, ()))
        request = wire.replace(request, ticket=ticket, created=self.moment(key.user))
        try:
            grant = await self.ask(lambda b: b.start(request))
        except RequestError:  # refused: our spawner has no lease to give back
            self.servers.pop(key, None)
            return
        await asyncio.sleep(self.spawn_s)
        self.servers[key] = "ready"
        held = self.held.get(grant.lease)
        if held is None:  # the runner finds no lease: it starts nothing
            self.servers.pop(key, None)
            await self.ask(lambda b: b.stop(wire.SpawnStop(user=key.user, server=key.server)))
            return
        run = Run(job=grant.job, user=key.user)
        run.task = asyncio.current_task()
        if any(r.job.id == run.job.id for r in self.runs):
            self.wrong.append(f"two attempts of {run.job.id} at once")
        self.runs.append(run)
        self.started[run.job.id] += 1
        try:
            await self._work(run, held)
        finally:
            self.runs.remove(run)
        self.servers.pop(key, None)
        await self.ask(lambda b: b.stop(wire.SpawnStop(user=key.user, server=key.server)))

    async def _work(self, run: Run, held: Held) -> None:
        program = self.programs.get(run.job.id, Program())
        held.alive = True
        await self.allocate(held, {u: int(x * program.memory) for u, x in held.limits.items()})
        done_s, code = 0.0, program.exit_code
        try:
            await self._report(run, state="started")
            while done_s < program.work_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(run.command_killed.wait(), 0.5)
                if run.told_to_stop and program.heeds_sigterm:
                    code = -signal.SIGTERM
                    break
                if run.command_killed.is_set():
                    code = -signal.SIGKILL
                    break
                if held.phase is Phase.LOST and program.dies_of_loss:
                    code = 1
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
            await asyncio.sleep(program.records_s)
            if not program.lingers_s:
                held.used = {}
            held.command_ended = True
            await self._report(run, state="ended", exit_code=code, stopped=stopped)
            await asyncio.sleep(0.3)
        finally:
            held.alive, held.command_ended, run.ended = False, True, True
            if program.lingers_s:
                await asyncio.sleep(program.lingers_s)
            held.used, held.saved = {}, {}
            self.emit(helper.EventKind.ENDED, held.handle)

    async def _report(self, run: Run, **report: Any) -> Any:
        """Send a report as `job.reports` does: retry while the disk is full."""
        message = wire.JobReport(**report)
        while True:
            try:
                return await self.ask(
                    lambda b: b.job_reports.report(run.user, run.job.id, run.job.attempt, message)
                )
            except DiskFull:
                await asyncio.sleep(4.0)

    def kill_job(self, job_id: str) -> None:
        """Kill all processes of a job with SIGKILL."""
        for run in [r for r in self.runs if r.job.id == job_id and not r.ended]:
            assert run.task is not None
            run.task.cancel()
            self.servers.pop(ServerKey(run.user, f"j{job_id}-{run.job.attempt}"), None)

    async def kill_runner(self, job_id: str) -> None:
        """Kill a job's runner with SIGKILL; a process that daemonised ends only at SIGKILL."""
        (run,) = (r for r in self.runs if r.job.id == job_id)
        held = self.held[f"j{job_id}-{run.job.attempt}"]
        used = dict(held.used)
        self.kill_job(job_id)
        await asyncio.sleep(0.01)
        held.alive, held.used, held.runner_ended = True, used, True


def spawn(
    user: str, size: str | None, *, server: str = "", project: str | None = None, groups: Sequence[str] = ()
) -> wire.SpawnRequest:
    options = None if size is None else wire.GpuRequest(fraction=size, project=project)
    return wire.SpawnRequest(
        user=user,
        server=server,
        groups=list(groups or GROUPS.get(user, ())),
        uid=1000,
        options=options,
        sees_all_gpus=True,
    )
