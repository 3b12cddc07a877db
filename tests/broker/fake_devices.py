"""The contract of `DeviceBackend` on a `Site`, for one broker.

It imitates `gpu.service.helper`: the epoch fence (`ErrorKind.STALE_EPOCH`), refused moves
(`gpu.moves.suspend`), refused leases beside one that resumed without a request, and the sample of
a lease (`gpu.service.sampler`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jupyter_gpushare.backends.base import DeviceBackend, Prepared
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import ComputeShare, MoveResult, Phase, Refusal, SetLimit
from tests.broker.machine import GB, Held

if TYPE_CHECKING:
    from tests.broker.brokers import Broker
    from tests.broker.site import Site


class SiteDevices(DeviceBackend):
    """The devices of a site; each effect is two steps of the broker."""

    def __init__(self, site: Site, broker: Broker) -> None:
        self.site = site
        self.broker = broker

    async def effect(self, name: str, handle: str = "") -> None:
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

    def _read(self) -> None:
        """Check the epoch as the helper does; requests that only read carry it too."""
        self._reach()
        if self.broker.store.epoch < self.site.epoch:
            raise HelperError("stale_epoch", "a newer broker is at work")
        self.site.epoch = self.broker.store.epoch

    async def epoch(self) -> int:
        self._reach()
        return self.site.epoch

    async def inventory(self) -> helper.Inventory:
        self._read()
        return helper.Inventory(
            host=self.site.host,
            driver="999",
            simulated=True,
            devices=tuple(
                helper.Device(
                    uuid=uuid,
                    index=n,
                    name=self.site.models[uuid][0],
                    memory_bytes=self.site.models[uuid][1],
                    reserve_bytes=self.site.reserve_bytes,
                    suspendable=not self.site.profile,
                    movable=self.site.movable,
                    move_reason="" if self.site.movable else "the driver cannot move it",
                    resume_bytes_per_s=4 * GB,
                    profile=self.site.profile,
                )
                for n, uuid in enumerate(self.site.uuids)
            ),
            host_total_bytes=1000 * GB,
            host_budget_bytes=500 * GB,
            at=self.site.now,
        )

    async def sample(self) -> helper.Sample:
        self._read()
        if self.broker.dead.is_set():
            await asyncio.Event().wait()
        site = self.site
        for each in site.held.values():
            each.advance(site.now)
        return helper.Sample(
            at=site.now,
            devices=tuple(
                helper.DeviceSample(
                    uuid=uuid,
                    used_bytes=sum(h.used.get(uuid, 0) for h in site.held.values()),
                    utilization_percent=site.utilization.get(uuid, 0),
                    healthy=uuid not in site.unhealthy,
                    unleased=tuple(site.unleased.get(uuid, ())),
                    closed=site.closed.get(uuid, ""),
                )
                for uuid in site.uuids
                if uuid not in site.unmeasured
            ),
            leases=tuple(
                helper.LeaseSample(
                    lease=h.handle,
                    phase=h.phase,
                    measured_at=site.now,
                    devices=tuple(h.limits),
                    used_bytes=dict(h.used),
                    saved_bytes=dict(h.saved),
                    calls=str(h.calls),
                    active_at=h.active_at,
                    suspendable=h.suspendable,
                    suspend_reason="" if h.suspendable else "it uses CUDA IPC",
                    alive=h.alive,
                    wanted=h.wanted,
                    runner_ended=h.runner_ended,
                    damaged=h.damaged,
                    over=h.over,
                    unread_since=h.unread_since,
                    stalled=h.stalled,
                    unconfirmed=h.unconfirmed,
                    compute_share=ComputeShare.OFF if h.share_reason else h.asked.compute_share,
                    share_reason=h.share_reason,
                    measured_share=h.measured_share,
                    work=int(h.work),
                    guest_of=h.asked.guest_of if h.phase is Phase.RUNNING else "",
                    ended_as_guest=h.ended_as_guest,
                    processes=tuple(
                        helper.ProcessSample(
                            pid=pid, started_at=0, name="python3", used_bytes=count, calls=-1, keeps=True
                        )
                        for pid, count in h.left.items()
                    )
                    + h.processes,
                )
                for h in site.held.values()
            ),
            host_available_bytes=1000 * GB,
            host_saved_bytes=sum(sum(h.saved.values()) for h in site.held.values()),
        )

    async def watch(self) -> AsyncIterator[helper.Event | None]:
        self._read()
        inbox: asyncio.Queue[helper.Event] = asyncio.Queue()
        self.site.inboxes.append(inbox)
        try:
            yield None
            while True:
                event = await inbox.get()
                self._reach()
                yield event
        finally:
            self.site.inboxes.remove(inbox)

    async def prepare(self, request: SetLimit) -> Prepared:
        handle, limits, guaranteed = request.lease, dict(request.limits), dict(request.guaranteed)
        await self.effect("prepare", handle)
        if not request.suspended and (reason := self.site.conflict(handle, limits)):
            raise HelperError("conflict", reason)
        if request.guest_of and not request.suspended:
            self._begin_pair(request)
        held = self.site.held.setdefault(handle, Held(handle, request.uid, limits, work_at=self.site.now))
        held.unattended, held.stops, held.asked = request.unattended, request.stops, request
        if not held.alive or list(limits) == list(held.limits):
            held.limits, held.guaranteed = limits, guaranteed
        if not held.alive:
            held.phase = Phase.SUSPENDED if request.suspended else Phase.RUNNING
        await self.broker.step()
        return Prepared(env={"GPUSHARE_LEASE": handle})

    def _begin_pair(self, request: SetLimit) -> None:
        host, (uuid,) = self.site.held.get(request.guest_of), request.limits
        if host is None or host.used.get(uuid, 0) + request.guest_bytes > host.limits[uuid]:
            raise HelperError("conflict", "its host uses the memory")
        if any(guest.handle != request.lease for guest in self.site.guests_of(host)):
            self.site.wrong.append(f"{host.handle} has two guests")

    async def reserve(self, handle: str) -> dict[str, str]:
        await self.effect("reserve", handle)
        await self.broker.step()
        return {"GPUSHARE_LEASE": handle}

    async def suspend(self, handle: str, calls: str) -> MoveResult:
        await self.effect("suspend", handle)
        moved = await self._move("suspend", handle, lambda held: self._park(held, calls))
        await self.broker.step()
        return moved

    async def resume(
        self, handle: str, *, unrecorded: bool = False, devices: Sequence[str] = ()
    ) -> MoveResult:
        await self.effect("resume", handle)
        if unrecorded:
            moved = await self._move("resume", handle, self._restore_unrecorded)
        else:
            moved = await self._move("resume", handle, lambda held: self._restore(held, devices))
        await self.broker.step()
        held = self.site.held.get(handle)
        return moved if held is None else replace(moved, devices=tuple(held.limits))

    async def _move(self, name: str, handle: str, move: Callable[[Held], MoveResult]) -> MoveResult:
        held = self.site.held.get(handle)
        if held is None:
            return MoveResult(done=False, refused=Refusal.NO_LEASE, reason="no such lease")
        waiting = self.site.faults.get(name)
        if waiting:
            moved = waiting.popleft()
            assert isinstance(moved, MoveResult)
            if moved.refused is Refusal.LOST:
                held.phase, held.saved = Phase.LOST, {}
            return moved
        await asyncio.sleep(self.site.move_s)
        return move(held)

    def _park(self, held: Held, calls: str) -> MoveResult:
        if held.phase is Phase.SUSPENDED:
            return MoveResult(done=True, bytes=sum(held.saved.values()))
        if calls and calls != str(held.calls):
            return MoveResult(done=False, refused=Refusal.WANTED, reason="a process entered a CUDA call")
        held.phase, held.saved, held.wanted = Phase.SUSPENDED, dict(held.used), False
        held.unconfirmed = False
        self.site.use(held, {})
        return MoveResult(done=True, bytes=sum(held.saved.values()))

    def _restore_unrecorded(self, held: Held) -> MoveResult:
        if held.phase is not Phase.SUSPENDED:
            return MoveResult(done=held.phase is Phase.RUNNING, refused=Refusal.NONE)
        if not self.site.claim(held):
            return MoveResult(done=False, refused=Refusal.NO_MEMORY, reason="another lease has its part")
        moved = self._restore(held)
        held.unconfirmed = moved.done
        return moved

    def _restore(self, held: Held, devices: Sequence[str] = ()) -> MoveResult:
        if held.phase is Phase.LOST:
            return MoveResult(done=False, refused=Refusal.LOST, reason="the driver lost it")
        if held.phase is Phase.RUNNING:
            held.unconfirmed = False
            return MoveResult(done=True)
        here = tuple(held.limits)
        if devices and tuple(devices) != here and not self.site.movable:
            return MoveResult(done=False, refused=Refusal.NOT_SUSPENDABLE, reason="it cannot move")
        held.place_on(devices or here)
        if held.asked.guest_of:
            if sum(held.saved.values()) > held.asked.guest_bytes:
                return MoveResult(done=False, refused=Refusal.NO_MEMORY, reason="it needs more")
            try:
                self._begin_pair(replace(held.asked, limits=held.limits))
            except HelperError as error:
                return MoveResult(done=False, refused=Refusal.NO_MEMORY, reason=str(error))
        if why := self._no_memory(held):
            held.place_on(here)
            return MoveResult(done=False, refused=Refusal.NO_MEMORY, reason=why)
        back, held.saved = held.saved, {}
        held.phase, held.wanted = Phase.RUNNING, False
        self.site.use(held, back)
        return MoveResult(done=True, bytes=sum(back.values()))

    def _no_memory(self, held: Held) -> str:
        for uuid, count in held.saved.items():
            used = sum(h.used.get(uuid, 0) for h in self.site.held.values())
            if used + count > self.site.grantable_bytes(uuid):
                return "the driver shows too little free memory"
        return self.site.conflict(held.handle, held.limits)

    async def signal(self, handle: str, number: int, to: str) -> int:
        await self.effect(f"signal {signal.Signals(number).name} {to}", handle)
        held = self.site.held.get(handle)
        if to == "keepers":
            ended = len(held.left) if held is not None else 0
            if held is not None:
                held.left = {}
            return ended
        count = int(held is not None and held.alive)
        for run in [r for r in self.site.runs if f"j{r.job.id}-{r.job.attempt}" == handle]:
            if number == signal.SIGKILL and to == "others":
                run.command_killed.set()
            elif number == signal.SIGKILL:
                self.site.kill_job(run.job.id)
            else:
                run.told_to_stop = True
        if (
            number == signal.SIGKILL
            and held is not None
            and (held.runner_ended or not handle.startswith("j"))
        ):
            held.alive, held.used = False, {}
        await self.broker.step()
        return count

    async def end_process(self, device: str, process: str) -> None:
        await self.effect("end_process", f"{device} {process}")
        here = self.site.unleased.get(device, [])
        if not any(each.process == process for each in here):
            raise HelperError("unknown_process", "no such process without a lease uses this GPU")
        self.site.unleased[device] = [each for each in here if each.process != process]

    async def drop(self, handle: str) -> None:
        await self.effect("drop", handle)
        held = self.site.held.pop(handle, None)
        if held is not None and (held.alive or any(held.used.values())):
            self.site.wrong.append(f"{handle} was dropped while it lives")
        await self.broker.step()

    async def close(self) -> None:
        return None
