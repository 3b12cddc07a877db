"""What the helper resumes by itself while no broker answers, and what it leaves to the broker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases import registry as leases
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.journal import StateDirectory
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.machine import Machine as Parts
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.leases.seats import SeatTable
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.gpu.moves.wake import UnattendedResumes, resume_unrecorded
from jupyter_gpushare.gpu.os.cgroups import Cgroups
from jupyter_gpushare.gpu.os.device_files import DeviceFiles
from jupyter_gpushare.protocol.helper import Drop, MoveResult, Phase, Refusal, SetLimit
from tests.gpu.machine import GIB, Machine, Refused, machine_in, until

UUIDS = ("GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-11112233-4455-6677-8899-aabbccddeeff")
HALF = 38 * GIB
EPOCH = 1


class Moves:
    """The mover: restores what it is told to, or answers with ``refused``."""

    def __init__(self) -> None:
        self.resumed: list[str] = []
        self.refused: Refusal | None = None
        self.may_suspend = True
        self.hangs = 0  # so many more looks find the driver at work

    def settle(self, lease: HelperLease) -> None:
        """As `Mover.settle` where the driver has undone a restore."""
        if self.hangs:
            self.hangs -= 1
            return
        lease.unsettled = False
        lease.enter(Phase.SUSPENDED)

    def suspend(self, lease: HelperLease, calls: str, timeout_s: float) -> MoveResult:
        if not self.may_suspend:
            return MoveResult(done=False, refused=Refusal.BUSY, reason="it cannot be written")
        lease.enter(Phase.SUSPENDING)
        lease.enter(Phase.SUSPENDED)
        return MoveResult(done=True)

    def resume(self, lease: HelperLease, timeout_s: float) -> MoveResult:
        if lease.unsettled:
            self.settle(lease)
        if lease.phase is Phase.RESUMING:
            return MoveResult(done=False, refused=Refusal.BUSY, reason="not finished")
        if self.refused is not None:
            return MoveResult(done=False, refused=self.refused, reason="not now")
        if lease.phase is Phase.RUNNING:
            return MoveResult(done=True)
        self.resumed.append(lease.name)
        lease.enter(Phase.RESUMING)
        lease.enter(Phase.RUNNING)
        return MoveResult(done=True)


RUNNER = SimpleNamespace(is_runner=True, key=(1, 1), inner_key=(1, 1))
COMMAND = SimpleNamespace(is_runner=False, key=(2, 1), inner_key=(2, 1))


class Helper:
    """Registry, journal and lease files are real; no broker has been heard for 5 s."""

    def __init__(self, folder: Path) -> None:
        gpus = tuple(DriverGpu(uuid, 0, "paper", 80 * GIB, mig=False, island="") for uuid in UUIDS)
        self.state = StateDirectory(folder, "boot")
        parts = SimpleNamespace(
            nvml=SimpleNamespace(gpus=gpus),
            state=self.state,
            processes=SimpleNamespace(unread=(), signal=lambda *_: True),
            seats=SeatTable(),
            host=SimpleNamespace(keep_reserved=lambda *_: None),
        )
        parts.files = DeviceFiles(None, gpus, folder / "device-files", "boot", owns=False)
        machine = cast("Parts", parts)
        self.living: dict[str, tuple[object, ...]] = {}  # processes by lease
        parts.processes.scan = lambda uids, *_: {uid: self.living.get(uid, ()) for uid in uids}
        self.processes = parts.processes
        cgroups = Cgroups(None, machine.nvml)
        self.registry = LeaseRegistry(machine, DeviceStates(gpus), cgroups)
        self.moves = Moves()
        self.resumes = UnattendedResumes(self.registry, cast("Mover", self.moves))

    def lease(self, name: str, limit_bytes: int = HALF, devices: int = 1, **fields: Any) -> HelperLease:
        limits = dict.fromkeys(UUIDS[:devices], limit_bytes)
        request = SetLimit(lease=name, uid=os.geteuid(), limits=limits, **fields)
        self.registry.set_limit(request, EPOCH)
        lease = self.registry.get(name)
        assert lease is not None
        return lease

    def asleep(
        self, name: str, limit_bytes: int = HALF, *, unattended: bool = True, **fields: Any
    ) -> HelperLease:
        lease = self.lease(name, limit_bytes, suspended=True, unattended=unattended, **fields)
        lease.wanted = True
        return lease

    def ended(self, name: str = "job", **fields: Any) -> HelperLease:
        """A lease that had processes: a job whose runner reports the end, if it borrows."""
        lease = self.lease(name, 60 * GIB, **fields)
        lease.lived = True
        return lease

    def ask(self, lease: HelperLease) -> MoveResult:
        """What the broker gets that cannot store that it asks."""
        with lease.moving:
            return resume_unrecorded(self.registry, cast("Mover", self.moves), lease, 0.0, by_broker=True)

    def check(self) -> list[str]:
        for lease in self.registry.all():
            self.resumes.check(lease)
        return self.moves.resumed


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    monkeypatch.setattr(leases, "SILENT_S", 0.0)
    helper = Helper(tmp_path)
    yield helper
    for lease in helper.registry.all():
        lease.files.close()


def test_a_wanted_session_with_its_part_of_the_device_free_is_resumed(helper: Helper) -> None:
    ada = helper.asleep("ada")
    helper.lease("beside", HALF)
    helper.asleep("rival", 40 * GIB, unattended=False)
    assert helper.check() == ["ada"]
    assert ada.unconfirmed


def test_a_resume_that_raises_leaves_nothing_to_confirm(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = helper.asleep("ada")

    def resume(*_: object) -> None:
        assert ada.unconfirmed
        raise OSError("no memory")

    monkeypatch.setattr(helper.moves, "resume", resume)
    with pytest.raises(OSError, match="no memory"):
        helper.check()
    assert not ada.unconfirmed
    assert ada.moving.acquire(blocking=False)


def test_a_device_that_is_its_own_as_a_whole_is_free_for_it(helper: Helper) -> None:
    helper.asleep("ada", 80 * GIB, devices=2)
    assert helper.check() == ["ada"]


def guest(helper: Helper) -> None:
    helper.lease("guest", GIB, devices=2, guaranteed=dict.fromkeys(UUIDS, 0))


def guest_on_one_of_its_devices(helper: Helper) -> None:
    helper.lease("guest", GIB, guaranteed={UUIDS[0]: 0})


def granted_and_not_started(helper: Helper) -> None:
    helper.lease("job", 60 * GIB)


def lost(helper: Helper) -> None:
    helper.lease("job", 60 * GIB).phase = Phase.LOST


def in_a_move(helper: Helper) -> None:
    helper.asleep("job", 60 * GIB, unattended=False).moving.acquire()


def resumed_before(helper: Helper) -> None:
    other = helper.asleep("other", 60 * GIB)
    helper.resumes.check(other)
    helper.moves.resumed.clear()


@pytest.mark.parametrize(
    "there", [guest, guest_on_one_of_its_devices, granted_and_not_started, lost, in_a_move, resumed_before]
)
def test_what_another_lease_has_or_may_get_is_not_taken(
    helper: Helper, there: Callable[[Helper], None]
) -> None:
    there(helper)
    ada = helper.asleep("ada", devices=2)
    assert helper.check() == []
    assert ada.phase is Phase.SUSPENDED
    assert not ada.unconfirmed


def borrows(helper: Helper) -> HelperLease:
    return helper.ended(guaranteed={UUIDS[0]: 0})


def borrows_and_reports(helper: Helper) -> HelperLease:
    helper.living["job"] = (RUNNER,)
    return borrows(helper)


@pytest.mark.parametrize("ended", [Helper.ended, borrows, borrows_and_reports])
def test_a_lease_that_has_ended_makes_way(helper: Helper, ended: Callable[[Helper], HelperLease]) -> None:
    job, ada = ended(helper), helper.asleep("ada")
    assert helper.check() == ["ada"]
    assert (job.phase, ada.unconfirmed) == (Phase.SUSPENDED, True)
    with pytest.raises(HelperError, match="lease ada was resumed"):
        helper.lease("job2", 60 * GIB)


def test_a_lease_that_has_ended_on_another_device_is_left_alone(helper: Helper) -> None:
    request = SetLimit(lease="job", uid=os.geteuid(), limits={UUIDS[1]: HALF})
    helper.registry.set_limit(request, EPOCH)
    job = helper.registry.get("job")
    assert job is not None
    job.lived = True
    helper.asleep("ada")
    assert helper.check() == ["ada"]
    assert job.phase is Phase.RUNNING


def test_a_guest_whose_host_has_ended_makes_no_way(helper: Helper) -> None:
    """What it has was in the limit of its host, and is in nobody's now."""
    host = helper.ended("host")
    fields = {"guest_of": "host", "guest_bytes": 20 * GIB}
    guest = helper.lease("guest", 60 * GIB, **fields)
    helper.living["guest"] = (COMMAND,)
    ada = helper.asleep("ada")
    assert helper.check() == []
    assert (host.phase, guest.phase, ada.phase) == (Phase.SUSPENDED, Phase.RUNNING, Phase.SUSPENDED)


def its_command_lives(helper: Helper, _job: HelperLease) -> None:
    helper.living["job"] = (RUNNER, COMMAND)


def a_process_does_not_answer(helper: Helper, job: HelperLease) -> None:
    helper.processes.unread = (SimpleNamespace(uid=job.asked.uid, key=(3, 1)),)


def it_is_moved(_helper: Helper, job: HelperLease) -> None:
    job.moving.acquire()


def it_cannot_be_put_to_sleep(helper: Helper, _job: HelperLease) -> None:
    helper.moves.may_suspend = False


@pytest.mark.parametrize("by_broker", [True, False])
@pytest.mark.parametrize(
    "but",
    [
        its_command_lives,
        a_process_does_not_answer,
        it_is_moved,
        it_cannot_be_put_to_sleep,
    ],
)
def test_nothing_is_taken_from_a_lease_that_may_not_have_ended(
    helper: Helper, by_broker: bool, but: Callable[[Helper, HelperLease], None]
) -> None:
    ada = helper.asleep("ada")
    but(helper, helper.ended())
    if by_broker:
        assert helper.ask(ada).refused is Refusal.NO_MEMORY
    assert helper.check() == []
    assert (ada.phase, ada.unconfirmed) == (Phase.SUSPENDED, False)


def test_a_lease_that_is_dropped_meanwhile_is_left_alone(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, ada = helper.ended(), helper.asleep("ada")

    def has_unread(_uid: int) -> bool:
        helper.registry.drop(Drop(lease="job"), EPOCH)
        return False

    monkeypatch.setattr(helper.registry, "has_unread", has_unread)
    assert helper.ask(ada).done
    assert job.phase is Phase.RUNNING


def test_a_resume_that_came_to_nothing_late_is_claimed_again(helper: Helper) -> None:
    ada = helper.asleep("ada", 60 * GIB)
    ada.enter(Phase.RESUMING)
    ada.unsettled = ada.unconfirmed = True
    helper.moves.hangs = 1
    assert helper.ask(ada).refused is Refusal.BUSY
    assert helper.ask(ada).done
    assert ada.unconfirmed
    with pytest.raises(HelperError, match="lease ada was resumed"):
        helper.lease("job", 60 * GIB)


def test_each_reason_to_stay_asleep_is_logged_once(helper: Helper, caplog: pytest.LogCaptureFixture) -> None:
    helper.lease("job", 60 * GIB)
    helper.asleep("ada")
    helper.asleep("bo")
    for _ in range(5):
        assert helper.check() == []
    assert sorted(record.getMessage().partition(" ")[0] for record in caplog.records) == [
        "lease=ada",
        "lease=bo",
    ]


def test_an_ended_lease_that_keeps_its_part_is_logged_once(
    helper: Helper, caplog: pytest.LogCaptureFixture
) -> None:
    helper.ended()
    helper.asleep("ada")
    helper.moves.may_suspend = False
    for _ in range(5):
        assert helper.check() == []
    assert caplog.text.count("keeps its part") == 1


def test_a_broker_that_cannot_store_anything_asks_for_it(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SILENT_S", 1000.0)
    job, ada = helper.ended(), helper.asleep("ada", unattended=False)
    assert helper.check() == []
    assert job.phase is Phase.RUNNING
    for _ in range(2):
        assert helper.ask(ada).done
        assert ada.unconfirmed, "only a resume that is recorded confirms it"
    assert helper.moves.resumed == ["ada"]
    assert job.phase is Phase.SUSPENDED


def never_allowed(ada: HelperLease) -> None:
    ada.asked = replace(ada.asked, unattended=False)  # a job, or a session that borrows


def wanted_by_queries_alone(ada: HelperLease) -> None:
    ada.queries_only = True


def not_wanted(ada: HelperLease) -> None:
    ada.wanted = False


def held(ada: HelperLease) -> None:
    ada.moving.acquire()


def dropped(ada: HelperLease) -> None:
    ada.dropped = True


@pytest.mark.parametrize("change", [never_allowed, wanted_by_queries_alone, not_wanted, held, dropped])
def test_nothing_else_is_resumed_without_a_broker(
    helper: Helper, change: Callable[[HelperLease], None]
) -> None:
    ada = helper.asleep("ada")
    change(ada)
    assert helper.check() == []
    assert not ada.unconfirmed


def test_a_broker_that_answers_decides_itself(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    helper.asleep("ada")
    monkeypatch.setattr(leases, "SILENT_S", 5.0)
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: clock.now))
    helper.registry.fence(EPOCH)
    clock.now += 4.9
    assert helper.check() == []
    helper.registry.fence(EPOCH)
    clock.now += 4.9
    with pytest.raises(HelperError, match="stale"):
        helper.registry.fence(EPOCH - 1)  # a broker that has a successor is none
    assert helper.check() == []
    clock.now += 0.2
    assert helper.check() == ["ada"]


def test_a_resume_that_the_driver_refuses_leaves_no_trace(helper: Helper) -> None:
    ada = helper.asleep("ada", 60 * GIB)
    helper.moves.refused = Refusal.NO_MEMORY
    assert helper.check() == []
    assert not ada.unconfirmed
    helper.lease("job", 60 * GIB)


def test_what_was_granted_meanwhile_is_refused_until_the_broker_confirms(helper: Helper) -> None:
    ada, job = helper.asleep("ada", 60 * GIB), helper.asleep("job", 60 * GIB, unattended=False)
    assert helper.check() == ["ada"]
    with pytest.raises(HelperError, match="lease ada was resumed") as refused:
        helper.lease("new", 60 * GIB)
    assert refused.value.kind == "conflict"
    assert helper.registry.get("new") is None
    assert "lease ada was resumed" in helper.registry.conflict(job.name, job.limits)
    helper.lease("small", 10 * GIB)  # it fits beside her
    helper.lease("sleeper", 60 * GIB, suspended=True)
    with pytest.raises(HelperError, match="lease ada was resumed"):
        helper.lease("small", 20 * GIB)
    assert helper.registry.conflict(ada.name, ada.limits) == ""
    helper.registry.confirm(ada)
    assert helper.registry.conflict(job.name, job.limits) == ""
    helper.lease("new", 60 * GIB)  # the broker knows all that is here


#: A broker is silent after 0.5 s, and is looked for more often.
SOON = """
from jupyter_gpushare.gpu.leases import registry
from jupyter_gpushare.gpu.moves import wake as unattended
registry.SILENT_S, unattended.CHECK_S = 0.5, 0.05
"""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Machine]:
    """A machine with a helper that no broker asks anything, and a session that has woken by itself."""
    for machine in machine_in(tmp_path):
        machine.start(before=SOON)
        worker = machine.session("ada", 60 * GIB, unattended=True)
        assert machine.ask("suspend", lease="ada")["done"]
        worker.tell("check")
        assert worker.answer() == "check ok"
        until(lambda machine=machine: phase_of(machine) == ("running", True), "it is awake")
        yield machine


def phase_of(machine: Machine) -> tuple[str, bool]:
    ada = machine.of("ada")
    return ada["phase"], ada["unconfirmed"]


def test_a_cell_goes_on_without_a_broker_and_the_next_broker_is_told(alone: Machine) -> None:
    assert phase_of(alone) == ("running", True)
    alone.stop()
    alone.start()
    assert phase_of(alone) == ("running", True)
    with pytest.raises(Refused, match="lease ada was resumed"):
        alone.lease("job", 60 * GIB)
    assert alone.ask("resume", lease="ada")["done"]
    until(lambda: phase_of(alone) == ("running", False), "it is confirmed")
    alone.stop()
    alone.start()
    assert phase_of(alone) == ("running", False)
    alone.lease("job", 60 * GIB)


@pytest.mark.parametrize("ending", ["it reports its end", "its runner is gone too"])
def test_a_cell_goes_on_once_the_job_on_its_device_has_ended(tmp_path: Path, ending: str) -> None:
    for machine in machine_in(tmp_path):
        machine.start(before=SOON)
        ada = machine.session("ada", 60 * GIB, unattended=True)
        assert machine.ask("suspend", lease="ada")["done"]
        machine.lease("job", 60 * GIB, guaranteed={machine.uuids()[0]: 0})
        waits = [sys.executable, "-c", "import sys; sys.stdin.read()", "GPUSHARE_LEASE=job"]
        runner = machine.worker("job", wait=False, command=waits)
        command = machine.worker("job", mib=64)
        ada.tell("check")
        assert ada.answer(timeout_s=2.0) == "", "the job has its device"
        command.process.kill()
        if ending == "its runner is gone too":
            runner.process.kill()
        assert ada.answer() == "check ok"
        until(lambda machine=machine: phase_of(machine) == ("running", True), "it is awake")
        assert machine.of("job")["phase"] == "suspended"
        machine.stop(signal.SIGKILL)
        machine.start()
        assert (phase_of(machine), machine.of("job")["phase"]) == (("running", True), "suspended")
        assert runner.process.poll() is None or ending == "its runner is gone too"


def test_a_resume_that_could_not_be_written_is_to_be_confirmed(tmp_path: Path) -> None:
    for machine in machine_in(tmp_path):
        machine.start()
        machine.lease("ada", 60 * GIB)
        machine.worker("ada", mib=64)
        assert machine.ask("suspend", lease="ada")["done"]
        record = machine.state_dir / "private" / "journal" / "ada"
        asleep = record.read_bytes()
        assert machine.ask("resume", lease="ada")["done"]
        machine.stop(signal.SIGKILL)
        record.write_bytes(asleep)
        for _ in range(2):
            machine.start()
            assert phase_of(machine) == ("running", True)
            machine.stop(signal.SIGKILL)


def test_a_resume_that_was_decided_before_is_refused(alone: Machine) -> None:
    alone.lease("job", 60 * GIB, suspended=True)
    refused = alone.ask("resume", lease="job")
    assert (refused["done"], refused["refused"]) == (False, "no_memory")
    assert "lease ada was resumed" in refused["reason"]


def test_a_suspension_ends_what_is_to_be_confirmed(alone: Machine) -> None:
    assert alone.ask("suspend", lease="ada")["done"]
    assert phase_of(alone) == ("suspended", False)
    alone.lease("job", 60 * GIB)
