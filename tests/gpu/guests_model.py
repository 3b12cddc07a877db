"""A machine in memory for tests of guests: the real helper, with small models of the driver and the library.

The page, the account, the journal, the registry, the mover and the watch over pairs are real.  The driver
model records what each process holds.  The library model takes bytes in the steps of `lease_client.c`.
Between any two steps, and around every write and call of the helper, other programs run (`Paper.meanwhile`).
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.errors import DeviceError, HelperError
from jupyter_gpushare.gpu.driver.checkpoint import ProcessState
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, DriverGpu
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases import files, holders
from jupyter_gpushare.gpu.leases.devices import DeviceStates, Verdict
from jupyter_gpushare.gpu.leases.files import LeaseDirectory, PagePhase, Taint
from jupyter_gpushare.gpu.leases.host_memory import HostMemory, with_overhead
from jupyter_gpushare.gpu.leases.journal import StateDirectory
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.processes import Process
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.leases.seats import SeatTable
from jupyter_gpushare.gpu.moves import guests, reservations, steps, suspend
from jupyter_gpushare.gpu.moves.guests import Guests
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.gpu.os import files as os_files
from jupyter_gpushare.protocol.helper import Drop, Level, Phase, Rung, SetLimit
from tests.gpu.leases import process_of

GIB = 1 << 30
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
GPU = DriverGpu(UUID, 0, "paper", 80 * GIB, mig=False, island="")
WHOLE = 76 * GIB
HOST_BYTES = 400 * GIB
CONTEXT_BYTES = GIB // 4


class Killed(BaseException):
    """Raised where SIGKILL ends the helper."""


@dataclass
class Program:
    """One process of a lease, with the library in it."""

    lease: str
    pid: int
    slot: int
    used: int = 0  # as it wrote into the account
    held: dict[int, int] = field(default_factory=dict)  # on the device: bytes by pattern
    parked: dict[int, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)  # the patterns that it has not freed
    state: ProcessState = ProcessState.RUNNING
    wants: int = 0
    asked: int = 0  # bytes of the call under way; 0: none
    step: str = ""  # where in `take` that is
    taints: int = 0

    @property
    def device_bytes(self) -> int:
        return 0 if self.state is ProcessState.CHECKPOINTED else CONTEXT_BYTES + sum(self.held.values())


class Paper:
    """The driver, the programs, and a helper that may die at any moment."""

    unavailable = ""
    gpus = (GPU,)
    left_out = ()
    driver = "999"
    proves_end = True

    def __init__(self, chance: random.Random, folder: Path, *, looks_again: bool = True) -> None:
        self.chance = chance
        self.folder = folder
        self.looks_again = looks_again  # the library, after it has taken
        self.programs: dict[int, Program] = {}
        self.pids = iter(range(1_000_000_000, 2_000_000_000))
        self.patterns = iter(range(1, 1 << 30))
        self.faults: list[str] = []
        self.denied = self.asks = 0
        self.dead = self.quiet = False
        self.kills, self.at = 0, 0.0
        # Bytes that guests which have ended left, and for how many looks the driver still has them.
        self.lingering: list[list[int]] = []
        self.pace = chance.choice((0.05, 0.2, 0.5))  # the rate of the programs' steps beside the helper
        self.events: list[Any] = []
        self.start_helper()

    # ---- the helper

    def start_helper(self) -> None:
        self.dead = False
        self.directory = StateDirectory(self.folder / "state", "boot")
        processes: Any = SimpleNamespace(
            scan=self.scan,
            unread=(),
            claim=lambda key, name, uid: False,
            alive=lambda key: key[0] in self.programs,
            signal=self.signal,
            core_filter=lambda key: -1,
            exit_status=lambda key: signal.SIGKILL,
            is_contained=lambda process: False,
        )
        made = Events()
        publish = made.publish
        made.publish = lambda kind, **more: (self.events.append((kind, more)), publish(kind, **more))[1]  # type: ignore[method-assign]
        machine: Any = SimpleNamespace(
            nvml=self,
            checkpoint=self,
            processes=processes,
            state=self.directory,
            host=HostMemory(50, self),  # type: ignore[arg-type]
            events=made,
            files=SimpleNamespace(admit=lambda users: None, are_closed=False),
            seats=SeatTable(),
        )
        cgroups: Any = SimpleNamespace(**dict.fromkeys(("remove", "sweep"), lambda *_: None))
        devices = DeviceStates((GPU,))
        ladder = (Rung(level=Level.PRELOAD, offered=True),)
        devices.set_verdict(UUID, Verdict(suspendable=True, ladder=ladder, context_bytes=CONTEXT_BYTES))
        self.host_memory = machine.host
        self.registry = LeaseRegistry(machine, devices, cgroups)
        self.mover = Mover(machine, self.registry, devices, lambda lease: None)
        self.guests = Guests(machine, self.registry, devices, self.mover)
        self.registry.adopt()
        for lease in self.registry.all():
            self.mover.adopt(lease)
        self.guests.adopt()

    def restart(self) -> None:
        """Start the next helper after a kill; it may be killed while it starts."""
        while self.dead:
            self.dead = False
            os.close(self.directory._lock_fd)
            for _ in range(self.chance.randrange(6)):
                self.meanwhile()
            try:
                self.start_helper()
            except Killed:
                self.kills += 1

    def touches(self) -> None:
        """Let other programs run, or kill the helper, before and after each of the helper's effects."""
        if self.dead:
            raise Killed
        self.meanwhile()
        if not self.quiet and self.chance.random() < 0.002:
            self.dead = True
            raise Killed

    def hook(self, patch: pytest.MonkeyPatch) -> None:
        """Put such a moment around every write and read of the helper."""

        def touching(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                self.touches()
                answer = real(*arguments, **named)
                self.touches()
                return answer

            return call

        patch.setattr(LeaseDirectory, "_pwrite", touching(_PWRITE))
        patch.setattr(LeaseDirectory, "account", touching(_ACCOUNT))
        patch.setattr(LeaseDirectory, "revoke", touching(_REVOKE))
        patch.setattr(files, "write_whole", touching(_WRITE_WHOLE))
        patch.setattr(os_files, "write_whole", touching(_WRITE_WHOLE))
        patch.setattr(holders, "write_whole", touching(_WRITE_WHOLE))

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.touches()

    def do(self, ask: Callable[[], object]) -> None:
        """Run a request of the broker, or a check of the helper; a refusal is a valid answer."""
        try:
            ask()
        except (HelperError, OSError):
            if self.dead:
                raise AssertionError("a dead helper answered") from None
        except Killed:
            self.kills += 1
        self.restart()

    # ---- other dependencies of the helper

    def simulated_host_memory(self) -> tuple[int, int]:
        return HOST_BYTES, HOST_BYTES - sum(sum(each.parked.values()) for each in self.programs.values())

    def scan(self, owners: Mapping[str, int], within_s: float = 0) -> dict[str, tuple[Process, ...]]:
        found: dict[str, list[Process]] = {name: [] for name in owners}
        for each in self.programs.values():
            found.setdefault(each.lease, []).append(process_of(each.pid, lease=each.lease, uid=os.geteuid()))
        return {name: tuple(each) for name, each in found.items()}

    def signal(self, key: tuple[int, int], number: int) -> bool:
        self.touches()
        assert number == signal.SIGKILL
        return self.end(key[0])

    def end(self, pid: int) -> bool:
        each = self.programs.pop(pid, None)
        if each is not None and each.lease == "guest":
            self.lingering.append([each.device_bytes, self.chance.randrange(20)])
        return each is not None

    def sample(self) -> None:
        """Update the values that the sampler measures for the blockers and the checks."""
        living = self.registry.scan()
        for lease in self.registry.all():
            lease.processes = living[lease.name]
            lease.account = lease.files.account()
            lease.count_work(lease.account)
            here = [self.programs[each.pid] for each in lease.processes if each.pid in self.programs]
            lease.held = {(each.pid, 1): {UUID: each.device_bytes} for each in here if each.device_bytes}

    # ---- the driver

    def free(self) -> int:
        held = sum(each.device_bytes for each in self.programs.values())
        return GPU.memory_bytes - held - sum(count for count, _ in self.lingering)

    def free_bytes(self, uuid: str) -> int:
        self.touches()
        return self.free()

    def processes(self, uuid: str, wait_s: float | None = None) -> dict[int, int]:
        self.touches()
        return {each.pid: each.device_bytes for each in self.programs.values() if each.device_bytes}

    def usage(self, uuid: str) -> DeviceReading:
        shown = self.processes(uuid)
        free = self.free()
        return DeviceReading(GPU.memory_bytes - free, free, 0, dict(shown), None)

    def under_mps(self, uuid: str) -> frozenset[int]:
        return frozenset()

    def of(self, pid: int) -> Program:
        if pid not in self.programs:
            raise DeviceError("cuCheckpointProcess", 1)
        return self.programs[pid]

    def state(self, pid: int) -> ProcessState:
        return self.of(pid).state

    def lock(self, pid: int, timeout_s: float) -> None:
        self.touches()
        if not self.quiet and self.chance.random() < 0.05:
            raise DeviceError("cuCheckpointProcessLock", 600)
        self.of(pid).state = ProcessState.LOCKED

    def checkpoint(self, pid: int, timeout_s: float) -> None:
        self.touches()
        each = self.of(pid)
        each.parked, each.held, each.state = each.held, {}, ProcessState.CHECKPOINTED
        self.touches()

    def restore(self, pid: int, timeout_s: float, moves: Mapping[str, str]) -> None:
        self.touches()
        each = self.of(pid)
        if CONTEXT_BYTES + sum(each.parked.values()) > self.free():
            self.faults.append(f"process {pid} is lost: it does not fit")
        each.held, each.parked, each.state = each.parked, {}, ProcessState.LOCKED
        self.touches()

    def unlock(self, pid: int) -> None:
        self.touches()
        self.of(pid).state = ProcessState.RUNNING

    # ---- programs and the library

    def start_program(self, lease: str) -> None:
        taken = {each.slot for each in self.programs.values() if each.lease == lease}
        slot = min(set(range(8)) - taken)
        each = Program(lease, next(self.pids), slot)
        self.programs[each.pid] = each
        self.write_slot(each)

    def write_slot(self, each: Program) -> None:
        raw = files.SLOT.pack(each.pid, each.taints, 1, each.wants, 0, 0, 0, each.wants, 0, 0, 0)
        raw = raw[: files.USED_IN_SLOT] + files.SLOT_USED.pack(each.used, *[0] * (files.DEVICES - 1))
        path = self.folder / "state" / "leases" / each.lease / files.ACCOUNT_NAME
        if path.exists():
            with path.open("r+b") as account:
                account.write(files.ACCOUNT_HEAD.pack(files.ACCOUNT_MAGIC, files.VERSION, 0)[:16])
                account.seek(files.ACCOUNT_HEAD.size + each.slot * files.SLOT.size)
                account.write(raw)

    def page(self, lease: str) -> tuple[PagePhase, int, int]:
        """Return the phase, the limit without contexts, and the kept bytes."""
        path = self.folder / "state" / "leases" / lease / "limit"
        try:
            raw = path.read_bytes()
        except OSError:
            return PagePhase.REVOKED, 0, 0
        phase = files.LIMIT_HEAD.unpack_from(raw)[5]
        _, limit, contexts, _, kept = files.LIMIT_DEVICE.unpack_from(raw, files.LIMIT_HEAD.size)
        return PagePhase(phase), limit - contexts, kept

    def used_by(self, lease: str) -> int:
        return sum(each.used for each in self.programs.values() if each.lease == lease)

    def meanwhile(self) -> None:
        """Let some programs make one step each."""
        self.lingering = [[count, left - 1] for count, left in self.lingering if left > 0]
        for each in list(self.programs.values()):
            if each.pid in self.programs and self.chance.random() < self.pace:
                self.step(each)
        if self.free() < 0:
            self.faults.append(f"{-self.free()} bytes too many are on the device")

    def step(self, each: Program) -> None:
        if each.step == "taken":
            each.used += each.asked
            each.step = "look again"
            self.write_slot(each)
        elif each.step == "look again":
            _, limit, kept = self.page(each.lease)
            each.step = "call"
            if self.looks_again and kept and self.used_by(each.lease) > limit - kept:
                each.used -= each.asked
                self.ask(each)
        elif each.step == "call":
            if each.state is ProcessState.RUNNING:
                self.allocate(each)
        elif each.asked:
            self.take(each)
        elif not self.quiet:
            self.begin(each)

    def take(self, each: Program) -> None:
        others = (
            other for other in self.programs.values() if other.lease == each.lease and other is not each
        )
        if any(other.step in ("taken", "look again") for other in others):
            return  # it has the mutex
        phase, limit, kept = self.page(each.lease)
        if phase is PagePhase.REVOKED:
            each.asked = 0
        elif phase is not PagePhase.RUNNING:
            return
        elif self.used_by(each.lease) + each.asked > limit:
            each.asked, self.denied = 0, self.denied + 1
        elif self.used_by(each.lease) + each.asked > limit - kept:
            self.ask(each)
        else:
            each.step = "taken"

    def ask(self, each: Program) -> None:
        each.step, each.wants, self.asks = "", each.wants + 1, self.asks + 1
        self.write_slot(each)

    def allocate(self, each: Program) -> None:
        if each.asked > self.free():
            if self.page(each.lease)[2]:
                each.wants += 1
                self.write_slot(each)
            elif each.lease == "host":
                self.faults.append("the host is out of memory within its limit")
            return
        if each.lease == "guest" and (kept := self.page("guest")[2]):
            hosts = [host for host in self.programs.values() if host.lease == "host"]
            used = sum(host.used - host.asked * (host.step == "look again") for host in hosts)
            if used > kept:
                self.faults.append(f"the host has {used} bytes beside a guest, {kept} are left to it")
        pattern = next(self.patterns)
        each.held[pattern] = each.asked
        each.made.add(pattern)
        each.asked, each.step = 0, ""

    def begin(self, each: Program) -> None:
        dice = self.chance.random()
        if dice < 0.25:
            left = max(4 * GIB, WHOLE - self.used_by(each.lease))
            most = left if each.lease == "host" and self.chance.random() < 0.5 else 12 * GIB
            each.asked = self.chance.randrange(1, most // GIB + 2) * GIB
        elif dice < 0.4 and each.held and each.state is ProcessState.RUNNING:
            pattern = self.chance.choice(sorted(each.held))
            each.used -= each.held.pop(pattern)
            each.made.discard(pattern)
            self.write_slot(each)
        elif dice < 0.41:
            self.end(each.pid)
        elif dice < 0.42 and each.lease == "guest":
            each.taints = Taint.MANAGED
            self.write_slot(each)

    # ---- the broker

    def broker(self) -> None:
        """Send one request that a broker may send, whether it is sensible or late."""
        host, guest = self.registry.get("host"), self.registry.get("guest")
        dice = self.chance.random()
        guest_bytes = self.chance.randrange(8, 30) * GIB
        # A device that a guest got for its own is given to nobody else.
        is_free = guest is None or guest.is_guest or guest.phase is Phase.SUSPENDED
        if host is None and is_free:
            self.do(lambda: self.guests.set_limit(self.asked("host"), 1))
            self.start_program("host")
        elif guest is None:
            self.do(lambda: self.guests.set_limit(self.asked("guest", "host", guest_bytes), 1))
            if self.registry.get("guest"):
                self.start_program("guest")
        elif dice < 0.1 or host is None:
            self.do(lambda: self.move(guest, lambda: self.mover.suspend(guest, "", 1.0)))
        elif dice < 0.35 and guest.phase is Phase.SUSPENDED:
            asked = self.asked("guest", "host", guest_bytes)
            self.do(lambda: self.guests.set_limit(asked, 1))
            if (now := self.registry.get("guest")) is not None:
                self.do(lambda: self.move(now, lambda: self.guests.resume(now, 0.0, ())))
        elif dice < 0.38:
            self.do(lambda: self.move(host, lambda: self.mover.suspend(host, "", 1.0)))
        elif dice < 0.6 and host.phase is Phase.SUSPENDED and is_free:
            self.do(lambda: self.move(host, lambda: self.guests.resume(host, 0.0, ())))
        elif dice < 0.63:
            name = self.chance.choice(("host", "guest"))
            for each in [each for each in self.programs.values() if each.lease == name]:
                self.end(each.pid)
            self.do(lambda: self.guests.drop(Drop(lease=name), 1))
        elif dice < 0.66 and guest.phase is Phase.RUNNING:
            self.do(
                lambda: self.guests.set_limit(self.asked("guest"), 1)
            )  # mostly refused: its host is there
        elif dice < 0.72:
            name = self.chance.choice(("host", "guest"))
            if sum(each.lease == name for each in self.programs.values()) < 2:
                self.start_program(name)

    def move(self, lease: HelperLease, move: Callable[[], object]) -> None:
        with self.registry.hold(lease, 1):
            move()

    def asked(self, name: str, host: str = "", guest_bytes: int = 0) -> SetLimit:
        limits = {UUID: WHOLE}
        return SetLimit(lease=name, uid=os.geteuid(), limits=limits, guest_of=host, guest_bytes=guest_bytes)

    # ---- invariants

    def settle(self) -> None:
        """Start nothing new; check that waiting calls continue and that the ledger is right."""
        self.quiet = True
        self.pace = 0.5
        for _ in range(40):
            self.do(self.sample)
            self.do(self.guests.poll)
            for lease in self.registry.all():
                if lease.unsettled:
                    self.mover.settle(lease)
            self.meanwhile()
        self.check_ledger()

    def check_ledger(self) -> None:
        reserved, kept = {}, {"host": 0}
        for lease in self.registry.all():
            record = self.directory.records()[lease.name]
            assert record is not None
            assert (record.phase, record.asked) == (lease.phase, lease.asked), lease.name
            if lease.is_guest:
                reserved[lease.name] = with_overhead(lease.asked.guest_bytes)
                kept["host"] = lease.asked.guest_bytes
            if lease.asked.guest_of:
                kept[lease.name] = WHOLE - lease.asked.guest_bytes
        assert self.host_memory._reserved == reserved
        assert self.host_memory._promised_bytes == 0
        for lease in self.registry.all():
            assert self.page(lease.name)[2] == kept.get(lease.name, 0), lease.name
        for each in self.programs.values():
            assert each.made == set(each.held) | set(each.parked), "memory was lost"
            taken = each.asked if each.step in ("look again", "call") else 0
            assert each.used == sum((each.held | each.parked).values()) + taken, "the account is wrong"
            lease = self.registry.get(each.lease)  # type: ignore[assignment]
            if each.lease == "host" and lease is not None and lease.phase is Phase.RUNNING:
                assert not each.asked, "the host waits"


_PWRITE, _ACCOUNT, _REVOKE = LeaseDirectory._pwrite, LeaseDirectory.account, LeaseDirectory.revoke
_WRITE_WHOLE = files.write_whole


class AtOnce:
    """A thread whose `start` runs it to its end."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self._run = lambda: target(*args)

    def start(self) -> None:
        self._run()

    def is_alive(self) -> bool:
        return False


def history(seed: int, folder: Path, patch: pytest.MonkeyPatch, *, steps_: int = 40) -> Paper:
    """Run one history: a host and a guest, some dozen requests, and kills of every process."""
    folder.mkdir()
    chance = random.Random(seed)
    for module in (reservations, suspend):
        patch.setattr(module, "FREE_WAIT_S", 0.0)
    patch.setattr(reservations, "SETTLE_S", 0.0)
    patch.setattr(reservations, "POLL_S", 0.0)
    patch.setattr(steps, "GONE_WAIT_S", 0.05)
    patch.setattr(guests, "threading", SimpleNamespace(Thread=AtOnce, Event=guests.threading.Event,
                                                       Lock=guests.threading.Lock))  # fmt: skip
    paper = Paper(chance, folder)
    patch.setattr(guests, "time", SimpleNamespace(monotonic=lambda: paper.at, sleep=paper.sleep))
    paper.hook(patch)
    for _ in range(steps_):
        paper.broker()
        paper.do(paper.sample)
        for _ in range(2):
            paper.do(paper.guests.poll)
            paper.meanwhile()
        if paper.faults:
            break
    else:
        paper.settle()
    os.close(paper.directory._lock_fd)
    for lease in paper.registry.all():
        lease.files.close()
    return paper
