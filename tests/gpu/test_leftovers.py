"""Memory of a dead process that processes forked by it keep: found, counted, shown and ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, DriverGpu
from jupyter_gpushare.gpu.leases.devices import HIDDEN_SETTLES_S, DeviceStates, Verdict
from jupyter_gpushare.gpu.leases.files import AccountFile, Slot, Taint
from jupyter_gpushare.gpu.leases.journal import JournalRecord
from jupyter_gpushare.gpu.leases.lease import HelperLease, parked_of
from jupyter_gpushare.gpu.leases.leftovers import MAX_TRACKED, Leftovers
from jupyter_gpushare.gpu.leases.processes import Process
from jupyter_gpushare.gpu.moves.reservations import MoveRefused
from jupyter_gpushare.gpu.moves.steps import ProcessMoves
from jupyter_gpushare.gpu.os import process_memory
from jupyter_gpushare.gpu.os.device_files import DESCRIPTORS, DeviceFiles
from jupyter_gpushare.gpu.service.requests import Requests
from jupyter_gpushare.protocol.helper import Signal
from tests.gpu.leases import lease_of, process_of
from tests.gpu.machine import GIB, MIB, Machine, Worker, machine_in
from tests.waiting import until

LEFT = "GPU memory of an ended process is kept by processes that it started"


@pytest.fixture(params=["dead=listed", "dead=unlisted"])
def any_list(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with a driver that lists dead processes with memory, and one that does not list them."""
    yield from machine_in(tmp_path, spec=f"1xH100-80GB,host=512GiB,context=0,{request.param}")


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Machine]:
    yield from machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,context=0")


def used(machine: Machine, name: str = "ada") -> int:
    """Bytes that a lease uses, as the last sample says."""
    return sum(machine.of(name)["used_bytes"].values())


def holders(machine: Machine, name: str = "ada") -> list[int]:
    """The pids of the processes of a lease that hold memory."""
    return [p["pid"] for p in machine.of(name)["processes"] if p["used_bytes"]]


def keepers(machine: Machine, name: str = "ada") -> dict[int, int]:
    """The bytes of each process that keeps what a dead one held, by pid."""
    return {p["pid"]: p["used_bytes"] for p in machine.of(name)["processes"] if p["keeps"]}


def left_by(machine: Machine, kernel: Worker) -> int:
    """End a process and not the one that it forked; the pid of that, once the helper knows."""
    pid = int(kernel.do("fork"))
    until(lambda: kernel.pid in holders(machine), "the helper sees its memory")
    kernel.kill()
    until(lambda: pid in keepers(machine), "the helper sees who keeps the memory")
    return pid


def test_what_a_forked_process_keeps_counts_to_the_lease_until_it_is_released(any_list: Machine) -> None:
    machine = any_list
    machine.start()
    old = machine.session("ada", 10 * GIB, mib=6 * 1024)
    worker = left_by(machine, old)
    assert keepers(machine) == {worker: 6 * GIB}
    assert used(machine) == 6 * GIB
    # A new kernel has what is left of the limit.
    new = machine.worker("ada", mib=1)
    until(lambda: new.do("alloc 5120") == "2", "the library denies it")
    assert new.do("alloc 3072") == "0"
    moved = machine.ask("suspend", lease="ada")
    assert (moved["refused"], moved["reason"]) == ("not_suspendable", LEFT)
    assert machine.of("ada")["suspend_reason"] == LEFT
    assert machine.ask("signal", lease="ada", number=signal.SIGKILL, to="keepers") == {"count": 1}
    until(lambda: used(machine) == 3 * GIB + 2 * MIB, "only the new kernel holds memory")
    assert keepers(machine) == {}
    assert machine.ask("suspend", lease="ada")["done"]
    machine.resume("ada", new)


def test_workers_of_a_living_kernel_are_left_alone(plain: Machine) -> None:
    plain.start()
    kernel = plain.session("ada", mib=1024)
    worker = int(kernel.do("fork"))
    plain.settled("ada")
    assert keepers(plain) == {}
    assert plain.ask("signal", lease="ada", number=signal.SIGKILL, to="keepers") == {"count": 0}
    assert plain.ask("suspend", lease="ada")["done"]
    plain.resume("ada", kernel)
    os.kill(worker, 0)


def test_a_program_that_a_dead_kernel_started_keeps_nothing(plain: Machine) -> None:
    plain.start()
    kernel = plain.session("ada", mib=1024)
    started = int(kernel.do("spawn 512").split()[0])  # with a context of its own
    worker = left_by(plain, kernel)
    assert keepers(plain) == {worker: GIB}
    assert used(plain) == GIB + 512 * MIB
    assert plain.ask("signal", lease="ada", number=signal.SIGKILL, to="keepers") == {"count": 1}
    until(lambda: used(plain) == 512 * MIB, "the memory of the dead is free")
    os.kill(started, 0)


def test_the_next_helper_knows_what_was_left(plain: Machine) -> None:
    plain.start()
    plain.lease("ada")
    worker = left_by(plain, plain.worker("ada", mib=1024))
    until(lambda: '"left": [{' in (plain.state_dir / "private/journal/ada").read_text(), "it is written")
    plain.stop(signal.SIGKILL)
    plain.start()
    until(lambda: keepers(plain) == {worker: GIB}, "the next helper sees it")
    assert plain.ask("drop", lease="ada", end_processes=True)["known"]
    until(lambda: plain.sim.device_used(0) == 0, "it ends with the lease")


def test_the_watchdog_counts_what_was_left(plain: Machine) -> None:
    plain.start("--watchdog", "warn")
    plain.lease("ada", 4 * GIB)
    left_by(plain, plain.worker("ada", mib=3 * 1024))
    events = plain.watch()
    plain.worker("ada", mib=2 * 1024, preload=False)
    said = events.event("over_limit", "ada")
    assert said is not None
    assert said["reason"] == "uses 5.0 GiB, its limit is 4.0 GiB"


# ---- which processes, and how much


GPU = DriverGpu("GPU-1", 0, "H100", 80 * GIB, mig=False, minor=0)


class Table:
    """Stands for `Processes`: which are alive, and what the last scan said of a pid."""

    def __init__(self) -> None:
        self.living: tuple[Process, ...] = ()
        self.now: dict[int, tuple[int, ...]] = {}  # images of those that called exec since
        self.fixed: set[int] = set()  # with addresses that are not drawn

    def image(self, pid: int) -> tuple[int, ...]:
        first = next((each.image for each in self.living if each.pid == pid), (0, 0))
        return self.now.get(pid, first)

    def is_randomized(self, pid: int) -> bool:
        return pid not in self.fixed

    def alive(self, key: tuple[int, int]) -> bool:
        return key in [each.key for each in self.living]

    def find(self, pid: int) -> Process | None:
        return next((each for each in self.living if each.pid == pid), None)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for every reader thread: on a busy machine one may take longer than `ANSWER_S`."""
    monkeypatch.setattr(process_memory, "ANSWER_S", 30.0)


class Files(DeviceFiles):
    """Device files that all processes but some have open."""

    def __init__(self) -> None:
        self.closed: set[int] = set()

    def are_open_in(self, pid: int) -> bool:
        return pid not in self.closed


def process(pid: int, start: int, image: tuple[int, ...] = (1, 1), parent: int = 1) -> Process:
    return process_of(pid, start, image=image, parent=parent)


def slot(each: Process, calls: int, count: int) -> Slot:
    """What a process counts in the account of its lease."""
    return Slot(Taint(0), 0, 0, calls, 0, (count,), each.key)


class Scene:
    """One lease with process 10, which held 8 GiB and has ended, and what is measured then."""

    def __init__(self) -> None:
        self.table, self.files, self.devices = Table(), Files(), DeviceStates((GPU,))
        self.lease = lease_of(limits={"GPU-1": 40 * GIB})
        self.now = self.lease.measured_at = 1.0
        self.lease.processes = (process(10, 100),)
        self.lease.held = {(10, 100): {"GPU-1": 8 * GIB}}
        self._leftovers = Leftovers(self.table, self.files, self.devices)  # type: ignore[arg-type]

    def sees(self, *living: Process, used: int = 8 * GIB, **listed: Any) -> tuple[list[int], int]:
        """Measure once: the pids of the keepers, and the bytes that they keep."""
        self.table.living = living
        shown = {int(name[1:]): count for name, count in listed.items()}
        usages = {"GPU-1": DeviceReading(used, 80 * GIB - used, 0, shown, None)}
        self._leftovers.find([self.lease], {"ada": living}, usages, (), self.now)
        self.lease.processes = living
        self.lease.held = {p.key: {"GPU-1": count} for p in living if (count := shown.get(p.pid))}
        return [each.pid for each in self.lease.keepers], sum(self.lease.leftover_bytes.values())

    def release(self) -> list[int]:
        """Have the keepers ended: the pids of those that got the signal."""
        sent: list[int] = []

        def send(key: tuple[int, int], number: int) -> bool:
            sent.append(key[0])
            return number == signal.SIGKILL

        registry: Any = SimpleNamespace(get=lambda name: self.lease, living=lambda name: self.table.living)
        processes = SimpleNamespace(image=self.table.image, signal=send)
        machine: Any = SimpleNamespace(processes=processes)
        nothing: Any = None
        requests = Requests(machine, registry, self.devices, nothing, nothing, nothing, nothing, nothing)
        requests._signal(Signal(lease="ada", number=signal.SIGKILL, to="keepers"), 1)
        return sent


def test_keepers_are_forks_with_a_device_open_and_no_memory_of_their_own() -> None:
    scene = Scene()
    older, fork, other = process(9, 90), process(11, 110), process(12, 120, (2, 2))
    quiet, own = process(13, 130), process(14, 140)
    scene.lease.held[own.key] = {"GPU-1": GIB}
    scene.files.closed = {13}
    assert scene.sees(older, fork, other, quiet, own, used=9 * GIB, p14=GIB) == ([11], 8 * GIB)
    assert scene.sees(older, other, own, used=9 * GIB, p14=GIB) == ([], 0)


def test_what_has_gpu_state_of_its_own_is_no_keeper_nor_what_it_forked() -> None:
    scene = Scene()
    fork, new, blind, parked, lost, counts, calls, inits = (process(11 + n, 110 + n) for n in range(8))
    its_worker = process(30, 130, parent=new.pid)
    for each, into in ((parked, scene.lease.parked), (lost, scene.lease.lost)):
        into |= parked_of({each.key: {"GPU-1": GIB}})
    slots = (slot(fork, 0, 0), slot(counts, 0, GIB), slot(calls, 1, 0))
    scene.lease.account = AccountFile(denied=0, slots={each.writer: each for each in slots})
    living = (fork, new, blind, parked, lost, counts, calls, inits, its_worker)
    seen = scene.sees(*living, used=9 * GIB, p12=GIB, p13=None, p18=0)
    assert seen == ([fork.pid, inits.pid], 8 * GIB)


@pytest.mark.parametrize("unknown", ["never measured", "late", "failed"])
def test_no_keeper_is_named_while_a_device_does_not_answer(unknown: str) -> None:
    scene, fork = Scene(), process(11, 110)
    usage = DeviceReading(8 * GIB, 0, 0, {}, None)
    scene.lease.limits["GPU-2"] = 40 * GIB
    usages = {"GPU-1": usage} | ({} if unknown == "failed" else {"GPU-2": usage})
    scene.lease.measured_at = 0.0 if unknown == "never measured" else 1.0
    late = {"GPU-2"} if unknown == "late" else set()
    scene.table.living = (fork,)
    scene._leftovers.find([scene.lease], {"ada": (fork,)}, usages, late, 1.0)
    assert (scene.lease.keepers, scene.lease.leftover_bytes) == ((), {"GPU-1": 8 * GIB})
    scene.lease.processes, scene.lease.measured_at = (fork,), 2.0
    scene._leftovers.find([scene.lease], {"ada": (fork,)}, {"GPU-1": usage, "GPU-2": usage}, (), 2.0)
    assert (scene.lease.keepers, scene.lease.leftover_bytes) == ((fork,), {"GPU-1": 8 * GIB})


def test_another_program_is_no_keeper_though_it_was_seen_before_its_exec() -> None:
    scene, fork, program, fixed = Scene(), process(11, 110), process(12, 120), process(13, 130)
    scene.table.now, scene.table.fixed = {12: (2, 2)}, {13}
    assert scene.sees(fork, program, fixed) == ([11], 8 * GIB)


def test_release_ends_those_keepers_that_have_not_called_exec_since() -> None:
    scene, fork, later = Scene(), process(11, 110), process(12, 120)
    assert scene.sees(fork, later) == ([11, 12], 8 * GIB)
    scene.table.now[12] = (2, 2)
    assert scene.release() == [11]


def test_forks_are_found_of_a_program_that_was_seen_before_its_exec() -> None:
    scene, parent, dead = Scene(), process(9, 90), process(20, 200)
    fork, sibling = process(21, 210, (2, 2)), process(22, 220, (2, 2), parent=9)
    its_worker = process(23, 230, (2, 2), parent=22)
    scene.table.now = {9: (2, 2), 20: (2, 2)}
    assert scene.sees(parent, dead, fork, used=GIB, p20=GIB) == ([], 0)
    scene.table.now[20] = (0, 0)  # it ends after the scan
    assert scene.sees(parent, dead, fork, used=GIB, p20=GIB) == ([], 0)
    assert scene.sees(parent, fork, sibling, its_worker, used=GIB) == ([21], GIB)


@pytest.mark.parametrize("kernel", [b"0\n", b"2\n"])
def test_without_drawn_addresses_no_process_has_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bytes
) -> None:
    setting = tmp_path / "randomize_va_space"
    setting.write_bytes(kernel)
    monkeypatch.setattr(procfs, "_RANDOMIZE", setting)
    assert any(procfs.image(procfs.stat_fields(os.getpid()))) is (kernel != b"0\n")


@pytest.mark.parametrize(
    ("personality", "is_drawn"),
    [(b"00000000\n", True), (b"00040000\n", False), (b"00c60008\n", False), (b"", True)],
)
def test_a_process_tells_whether_its_addresses_are_drawn(
    monkeypatch: pytest.MonkeyPatch, personality: bytes, is_drawn: bool
) -> None:
    assert procfs.read(os.getpid(), "personality", 16).endswith(b"\n")
    monkeypatch.setattr(procfs, "read", lambda pid, name, limit: personality)
    assert procfs.is_randomized(7) is is_drawn


def test_siblings_of_the_dead_are_no_keepers() -> None:
    scene = Scene()
    parent, sibling, its_worker = process(9, 90), process(11, 110, parent=9), process(12, 120, parent=11)
    worker = process(13, 130)  # its parent has ended
    assert scene.sees(parent, sibling, its_worker, worker) == ([13], 8 * GIB)


def test_a_pid_that_another_process_has_by_now_is_not_taken_for_the_dead() -> None:
    scene, fork, later = Scene(), process(11, 110), process(10, 150, (3, 3))
    assert scene.sees(fork, p10=8 * GIB) == ([11], 8 * GIB)
    assert scene.sees(fork, later, used=10 * GIB, p10=8 * GIB) == ([11], 2 * GIB)


def test_what_the_driver_has_freed_is_not_counted_and_is_forgotten() -> None:
    scene, fork = Scene(), process(11, 110)
    assert scene.sees(fork, used=3 * GIB) == ([11], 3 * GIB)
    assert scene.sees(fork, used=GIB // 32) == ([11], 0)
    scene.now += HIDDEN_SETTLES_S
    assert scene.sees(fork, used=GIB // 32) == ([], 0)
    assert scene.sees(fork) == ([], 0)  # of another process


def test_what_was_left_is_not_forgotten_after_samples_that_fall_into_a_neighbours_free() -> None:
    scene, fork = Scene(), process(11, 110)
    for _ in range(3):
        assert scene.sees(fork, used=0) == ([11], 0)
        scene.now += 2 * HIDDEN_SETTLES_S
        assert scene.sees(fork) == ([11], 8 * GIB)
        scene.now += 2 * HIDDEN_SETTLES_S


def test_what_another_process_leaves_is_not_forgotten_with_what_was_left_before() -> None:
    scene, fork, own = Scene(), process(11, 110), process(12, 115, (2, 2))
    its_fork = process(13, 120, (2, 2))
    for _ in range(2):
        assert scene.sees(fork, own, its_fork, used=GIB, p12=GIB) == ([11], 0)
        scene.now += 0.9 * HIDDEN_SETTLES_S
    assert scene.sees(fork, its_fork, used=0) == ([11, 13], 0)
    assert scene.sees(fork, its_fork, used=GIB) == ([11, 13], GIB)


def test_where_the_driver_shows_no_bytes_what_was_counted_last_is_believed() -> None:
    scene, fork = Scene(), process(11, 110)
    scene.devices.set_verdict("GPU-1", Verdict(suspendable=False, blind=True))
    assert scene.sees(fork, used=40 * GIB) == ([11], 8 * GIB)


def test_what_a_device_shows_is_charged_to_one_lease_only() -> None:
    scenes = {name: Scene() for name in ("ada", "bob", "eve")}
    leases = [scene.lease for scene in scenes.values()]
    for n, (name, lease) in enumerate(zip(scenes, leases, strict=True)):
        lease.name, lease.processes = name, (process(10 + n, 100),)
        lease.held = {(10 + n, 100): {"GPU-1": (4 + n) * GIB}}
    forks = {name: (process(20 + n, 110),) for n, name in enumerate(scenes)}
    # The dead process of ada is listed, those of the others are not.
    usages = {"GPU-1": DeviceReading(13 * GIB, 0, 0, {10: 4 * GIB}, None)}
    scenes["ada"].table.living = tuple(each for found in forks.values() for each in found)
    scenes["ada"]._leftovers.find(leases, forks, usages, (), 1.0)
    shares = [sum(lease.leftover_bytes.values()) // GIB for lease in leases]
    assert shares == [4, 3, 6]


def test_a_process_that_left_its_lease_has_not_ended() -> None:
    scene, fork = Scene(), process(11, 110)
    scene.table.living = scene.lease.processes
    usages = {"GPU-1": DeviceReading(8 * GIB, 0, 0, {}, None)}
    scene._leftovers.find([scene.lease], {"ada": (fork,)}, usages, (), 1.0)
    assert (scene.lease.leftovers, scene.lease.keepers) == ({}, ())


class Marked(HelperLease):
    """A lease that tells what was left at the moment that it was marked as unsaved."""

    at_mark: tuple[int, ...] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "unsaved" and value:
            self.at_mark = tuple(each.pid for each in self.leftovers.values())
        super().__setattr__(name, value)


def test_what_was_left_is_there_before_the_lease_is_marked_as_unsaved() -> None:
    scene = Scene()
    scene.lease.__class__ = Marked
    scene.sees(process(11, 110))
    assert isinstance(scene.lease, Marked)
    assert scene.lease.at_mark == (10,)


@pytest.mark.parametrize("fails", [False, True], ids=["written", "disk full"])
def test_what_was_left_while_a_record_is_written_is_written_next(fails: bool) -> None:
    scene = Scene()
    written: list[JournalRecord] = []

    def save(record: JournalRecord) -> None:
        scene.sees(process(11, 110))
        if fails:
            raise OSError(errno.ENOSPC, "disk full")
        written.append(record)

    machine: Any = SimpleNamespace(state=SimpleNamespace(save=save, boot_id="b"))
    with pytest.raises(MoveRefused) if fails else nullcontext():
        ProcessMoves(machine, cast(Any, None), scene.devices, lambda lease: None).save(scene.lease)
    assert scene.lease.unsaved
    machine.state.save = written.append
    ProcessMoves(machine, cast(Any, None), scene.devices, lambda lease: None).save(scene.lease)
    assert (scene.lease.unsaved, [each.pid for each in written[-1].left]) == (False, [10])


def test_any_number_of_the_living_and_of_the_dead_is_remembered_within_a_bound() -> None:
    scene = Scene()
    forks = [process(1000 + n, 110) for n in range(2 * MAX_TRACKED)]
    pids, kept = scene.sees(*forks)
    assert (len(pids), kept) == (MAX_TRACKED, 8 * GIB)
    small = [process(100 + n, 120) for n in range(2 * MAX_TRACKED)]
    scene.lease.processes += tuple(small)
    scene.lease.held = {each.key: {"GPU-1": MIB} for each in small}
    assert scene.sees(*forks, used=20 * GIB)[1] == 8 * GIB + (MAX_TRACKED - 1) * MIB


@pytest.mark.parametrize(
    ("path", "is_open"), [("/dev/nvidia0", True), ("/dev/nvidia1", False), ("/dev/nvidiactl", False)]
)
def test_only_files_of_the_machines_own_gpus_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_open: bool
) -> None:
    files = DeviceFiles(tmp_path / "host/dev", (GPU,), tmp_path / "saved", "boot", owns=False)
    monkeypatch.setattr(procfs, "descriptors", lambda pid, limit: ["0", "51"])
    monkeypatch.setattr(procfs, "opened", lambda pid, number: path if number == "51" else "/dev/null")
    assert files.are_open_in(7) is is_open


@pytest.mark.parametrize(
    ("opens", "is_open"), [(0, False), (DESCRIPTORS + 8, True)], ids=["none", "too many to look"]
)
def test_descriptors_of_a_process_are_looked_at_by_name_within_a_bound(
    tmp_path: Path, opens: int, is_open: bool
) -> None:
    files = DeviceFiles(Path("/dev"), (GPU,), tmp_path / "saved", "boot", owns=False)
    code = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({opens + 64}, {opens + 64}))
for _ in range({opens}): os.dup(0)
print("x", flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout
        child.stdout.read(1)
        assert files.are_open_in(child.pid) is is_open
        child.kill()
    assert not files.are_open_in(child.pid)
