"""A helper is killed at any point of a move; the next one finds out and goes on."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import MIB, PATIENCE_S, Machine, Refused, machine_in, until
from tests.simulator import Fault

# Of a lease with two processes; see `Machine.start`.
WHILE_SUSPENDING = [
    "after phase suspending", "before lock 1", "after lock 1", "after lock 2", "after checkpoint 1",
    "after checkpoint 2", "after phase suspended",
]  # fmt: skip
WHILE_RESUMING = [
    "after phase resuming", "after restore 1", "after restore 2", "after unlock 1", "after unlock 2",
    "after phase running",
]  # fmt: skip


def killed_during(bare: Machine, verb: str, point: str) -> None:
    """A lease with two processes, and a helper that died at a point of this verb."""
    bare.start()
    bare.lease("ada")
    if verb == "resume":
        workers = [bare.worker("ada", mib=64) for _ in range(2)]
        assert bare.ask("suspend", lease="ada")["done"]
        bare.stop(signal.SIGKILL)
        bare.start(die=point)
    else:
        bare.stop(signal.SIGKILL)
        bare.start(die=point)
        workers = [bare.worker("ada", mib=64) for _ in range(2)]
    bare.client().send(f'{{"verb":"{verb}","epoch":1,"lease":"ada"}}\n'.encode())
    bare.died()
    bare.workers = workers


def ends_well(bare: Machine) -> None:
    """Whatever phase the next helper found: the lease moves both ways and its bytes are there."""
    bare.start()
    until(lambda: bare.of("ada")["phase"] in ("running", "suspended"), "settled")
    shown = bare.of("ada")
    if shown["phase"] == "suspended":
        assert sum(shown["saved_bytes"].values()) >= 2 * 64 * MIB
        assert bare.sim.device_used(0) == 0
        assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in bare.workers] == ["ok", "ok"]
    assert bare.ask("suspend", lease="ada")["done"]
    assert bare.sim.device_used(0) == 0
    assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in bare.workers] == ["ok", "ok"]


@pytest.mark.parametrize("point", WHILE_SUSPENDING)
def test_killed_while_suspending(bare: Machine, point: str) -> None:
    killed_during(bare, "suspend", point)
    ends_well(bare)


@pytest.mark.parametrize("point", WHILE_RESUMING)
def test_killed_while_resuming(bare: Machine, point: str) -> None:
    killed_during(bare, "resume", point)
    ends_well(bare)


@pytest.mark.parametrize("then", ["done", pytest.param("undone", marks=pytest.mark.long)])
@pytest.mark.parametrize("during", ["Lock", "Checkpoint", "Restore"])
def test_killed_within_a_call_of_the_driver(tmp_path: Path, during: str, then: str) -> None:
    """What becomes of the call is not documented: it is undone, or the driver brings it to its end."""
    for machine in killed_within(tmp_path, during, then):
        ends_well(machine)


def killed_within(folder: Path, during: str, then: str) -> Iterator[Machine]:
    """A machine with a lease of two processes, and a helper that died within a call for the first one."""
    spec = f"1xH100-80GB,host=512GiB,context=0GiB,copy=1GB/s,caller-dies={then}"
    for machine in machine_in(folder, spec=spec):
        machine.start()
        machine.lease("ada")
        machine.workers = [machine.worker("ada", mib=256) for _ in range(2)]
        verb = "resume" if during == "Restore" else "suspend"
        if verb == "resume":
            assert machine.ask("suspend", lease="ada")["done"]
        if during == "Lock":
            machine.sim.fault(Fault.HANG_CALL, pid=machine.workers[0].pid, value=1000)
            machine.workers[0].tell("check")
            until(lambda sim=machine.sim: sim.faults_left() == 0, "a call holds the lock up")
        watch = machine.watch()
        total, _ = machine.sim.host_memory()
        machine.client().send(f'{{"verb":"{verb}","epoch":1,"lease":"ada"}}\n'.encode())
        if during == "Lock":
            assert watch.event("phase", "ada")
        elif during == "Checkpoint":
            until(lambda sim=machine.sim, n=total: sim.host_memory()[1] < n, "the copy begins")
        else:
            until(lambda sim=machine.sim: sim.device_used(0) > 0, "the copy begins")
        machine.stop(signal.SIGKILL)
        yield machine


#: The bounds on calls for the state, and until a process counts as lost.
IMPATIENT = """
from jupyter_gpushare.gpu.driver import checkpoint
from jupyter_gpushare.gpu.moves import steps
checkpoint.SHORT_TIMEOUT_S = 0.5
steps.copy_s = lambda parked: 3.0
"""
#: Much time passes after a lease was found lost.
BUSY_AFTER_A_LOSS = """
import time
from jupyter_gpushare.gpu.moves.suspend import Mover
forget_lost = Mover.forget_lost
Mover.forget_lost = lambda self, lease: time.sleep(2.0) or forget_lost(self, lease)
"""


@pytest.mark.parametrize(
    ("during", "then"),
    [
        ("Checkpoint", "hangs"),
        ("Restore", "hangs"),
        ("Checkpoint", "400"),
        ("Restore", "999"),
        pytest.param("Checkpoint", "999", marks=pytest.mark.long),
        pytest.param("Restore", "400", marks=pytest.mark.long),
    ],
)
def test_a_process_with_which_the_driver_is_out_of_step_is_lost_and_its_device_drained(
    tmp_path: Path, during: str, then: str
) -> None:
    """checkpoint-restore/criu pull request 2547: a caller that is killed in a call may leave them so."""
    for machine in killed_within(tmp_path, during, then):
        machine.start(before=IMPATIENT)
        until(lambda m=machine: not m.ask("sample")["devices"][0]["healthy"], "the device is drained")
        until(lambda m=machine: m.of("ada")["phase"] == "lost", "the lease is lost")
        for verb in ("suspend", "resume"):
            moved = machine.ask(verb, lease="ada")
            assert (moved["refused"], "restart the kernel" in moved["reason"]) == ("lost", True)
        device = machine.ask("inventory")["devices"][0]
        stuck = next(each for each in machine.workers if device["reason"].endswith(f" process {each.pid}"))
        assert device["reason"] == f"the driver fails at every call about process {stuck.pid}"
        others = [each for each in machine.workers if each is not stuck]
        assert [each.do("check") for each in others] == ["ok"]
        # The next helper knows it too, and nothing is tested there before that process has ended.
        machine.stop(signal.SIGKILL)
        machine.start(before=IMPATIENT)
        until(lambda m=machine: not m.ask("sample")["devices"][0]["healthy"], "the device is drained again")
        assert machine.of("ada")["phase"] == "lost"
        assert machine.log.read_text().count("self-test uid=") == 0
        stuck.kill()
        until(lambda m=machine: m.ask("sample")["devices"][0]["healthy"], "it is back after its self-test")
        assert machine.of("ada")["phase"] == "running"
        assert machine.ask("suspend", lease="ada")["done"]
        assert machine.ask("resume", lease="ada")["done"]
        assert [each.do("check") for each in others] == ["ok"]


def test_a_call_of_the_helper_that_returns_late_loses_nothing(bare: Machine) -> None:
    """A lock may be taken late: the process would stay locked if it counted as lost before."""
    bare.start(before=IMPATIENT)
    for name in ("ada", "bob"):
        bare.lease(name, 30 << 30)
    late, neighbour = bare.worker("ada", mib=64), bare.worker("bob", mib=64)
    assert bare.ask("suspend", lease="bob")["done"]
    bare.sim.fault(Fault.HANG_CHECKPOINT, pid=late.pid, count=1, value=6000)
    assert bare.ask("suspend", lease="ada", timeout_s=0.5)["refused"] == "busy"
    time.sleep(4.5)  # the process would count as lost after 3 s
    assert (bare.of("ada")["phase"], bare.ask("sample")["devices"][0]["healthy"]) == ("suspending", True)
    bare.resume("bob", neighbour)
    until(lambda: bare.of("ada")["phase"] == "running", "it is settled")
    assert late.do("check") == "ok"


def test_a_process_that_the_driver_unlocks_after_all_is_lost_no_more(bare: Machine) -> None:
    killed_during(bare, "suspend", "after lock 2")
    stuck, _ = bare.workers
    bare.sim.fault(Fault.UNLOCK_FAILS, pid=stuck.pid, count=-1)
    bare.start(before=IMPATIENT)
    until(lambda: bare.of("ada")["phase"] == "lost", "the driver has failed for long enough")
    bare.sim.clear_faults()
    until(lambda: bare.of("ada")["phase"] == "running", "it runs again")
    assert [each.do("check") for each in bare.workers] == ["ok", "ok"]
    until(lambda: bare.ask("sample")["devices"][0]["healthy"], "the device is back")


def test_a_process_that_the_driver_never_unlocks_is_lost_and_its_device_drained(bare: Machine) -> None:
    killed_during(bare, "suspend", "after lock 2")
    stuck, other = bare.workers
    bare.sim.fault(Fault.UNLOCK_FAILS, pid=stuck.pid, count=-1)
    bare.start(before=IMPATIENT + BUSY_AFTER_A_LOSS)
    # No sample shows a lost lease on a device that may be granted.
    until(lambda: bare.of("ada")["phase"] == "lost", "the driver has failed for long enough")
    assert other.do("check") == "ok"
    (device,) = bare.ask("sample")["devices"]
    assert device["reason"] == f"the driver fails at every call about process {stuck.pid}"
    stuck.kill()
    until(lambda: bare.ask("sample")["devices"][0]["healthy"], "it is back")
    assert bare.of("ada")["phase"] == "running"


@pytest.mark.parametrize(
    ("verb", "point"), [("suspend", "after checkpoint 1"), ("resume", "after restore 1")]
)
def test_killed_half_way_without_memory_to_restore_all_processes_stay_suspended(
    bare: Machine, verb: str, point: str
) -> None:
    killed_during(bare, verb, point)
    other = bare.worker()
    free_mib = (bare.sim.device_total(0) - bare.sim.device_used(0)) // MIB
    assert other.do(f"alloc {free_mib - 256}") == "0"
    bare.start()
    assert bare.of("ada")["phase"] == "suspended"
    other.kill()
    until(lambda: bare.sim.device_used(0) == 0, "nothing is on the device")
    assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in bare.workers] == ["ok", "ok"]


@pytest.mark.parametrize(("verb", "point"), [("suspend", "after lock 2"), ("resume", "after restore 1")])
def test_processes_that_died_together_with_the_helper_are_dropped(
    bare: Machine, verb: str, point: str
) -> None:
    killed_during(bare, verb, point)
    bare.workers[0].kill()
    bare.start()
    if bare.of("ada")["phase"] == "suspended":
        assert bare.ask("resume", lease="ada")["done"]
    assert bare.workers[1].do("check") == "ok"


def test_a_suspended_lease_stays_asleep_over_a_clean_stop(bare: Machine) -> None:
    bare.start()
    worker = bare.session("ada")
    saved = bare.ask("suspend", lease="ada")["bytes"]
    assert bare.stop() == 0
    worker.tell("check")
    assert worker.answer(0.3) == ""
    bare.start()
    shown = bare.of("ada")
    assert (shown["phase"], sum(shown["saved_bytes"].values())) == ("suspended", saved)
    # The call was entered while no helper ran: it is not lost.
    until(lambda: bare.of("ada")["wanted"], "the wish is seen")
    assert bare.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"


def test_a_stop_is_heard_whichever_thread_the_kernel_hands_it_to(bare: Machine) -> None:
    bare.start()
    assert bare.helper
    pid = bare.helper.pid
    threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir() if int(each.name) != pid]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(pid, threads[0], signal.SIGTERM) == 0, ctypes.get_errno()
    assert bare.helper.wait(PATIENCE_S) == 0
    assert "helper stopped" in bare.log.read_text()


def test_a_running_lease_is_adopted_with_its_limit(bare: Machine) -> None:
    bare.start()
    worker = bare.session("ada", 100 * MIB)
    bare.stop(signal.SIGKILL)
    assert worker.do("alloc 64") == "2"
    bare.start()
    assert bare.of("ada")["alive"]
    assert worker.do("alloc 64") == "2"
    assert worker.do("check") == "ok"


def test_an_epoch_outlives_the_helper(bare: Machine) -> None:
    bare.start()
    bare.client(epoch=7).ask("hello")
    bare.stop(signal.SIGKILL)
    bare.start()
    assert bare.client(epoch=8).ask("hello")["epoch"] == 8
    with pytest.raises(Refused) as refused:
        bare.client(epoch=7).ask("drop", lease="ada")
    assert refused.value.kind == "stale_epoch"
    assert bare.client(epoch=8).ask("drop", lease="ada") == {"known": False}


def test_a_stale_broker_can_change_nothing(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    old, new = bare.client(epoch=1), bare.client(epoch=2)
    new.ask("hello")
    for verb, fields in (
        ("suspend", {}),
        ("resume", {}),
        ("drop", {}),
        ("signal", {"number": 15}),
        ("set_limit", {"uid": 0, "limits": {}}),
    ):
        with pytest.raises(Refused) as refused:
            old.ask(verb, lease="ada", **fields)
        assert refused.value.kind == "stale_epoch" or verb == "set_limit"
    assert new.ask("sample")["leases"][0]["phase"] == "running"


def test_only_one_helper_works_on_a_state_directory(bare: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    bare.start()
    first = bare.helper
    log = bare.log
    bare.log = bare.folder / "second.log"
    said = bare.fails()
    assert "another device helper" in said
    assert str(first.pid if first else 0) in said
    bare.helper, bare.log = first, log
    assert bare.ask("hello")["pid"] == (first.pid if first else 0)


def test_a_lease_of_an_earlier_boot_is_forgotten(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    bare.stop()
    record = bare.state_dir / "private" / "journal" / "ada"
    record.write_text(record.read_text().replace('"boot_id": "', '"boot_id": "other-'))
    bare.start()
    assert bare.ask("sample")["leases"] == []
    assert not (bare.state_dir / "leases" / "ada").exists()


def test_a_torn_record_removes_its_lease_and_nothing_else(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    bare.lease("bo")
    bare.stop()
    record = bare.state_dir / "private" / "journal" / "ada"
    record.write_bytes(record.read_bytes()[:20])
    bare.start()
    assert [lease["lease"] for lease in bare.ask("sample")["leases"]] == ["bo"]


def test_a_lease_written_by_another_version_is_not_forgotten(bare: Machine) -> None:
    bare.start()
    worker = bare.session("ada")
    assert bare.ask("suspend", lease="ada")["done"]
    bare.stop(signal.SIGKILL)
    record = bare.state_dir / "private" / "journal" / "ada"
    written = record.read_bytes()
    record.write_text(json.dumps({**json.loads(written), "of_a_newer_version": 1}))
    assert "of_a_newer_version" in bare.fails()
    record.write_bytes(written)
    bare.start()
    bare.resume("ada", worker)


def test_a_damaged_epoch_is_not_taken_for_zero(bare: Machine) -> None:
    bare.start()
    bare.stop()
    (bare.state_dir / "private" / "epoch").write_text("")
    assert "epoch is damaged" in bare.fails()


def test_the_verdict_of_the_self_test_outlives_the_helper(bare: Machine) -> None:
    bare.start(examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    until(lambda: bare.sim.device_used(0) == 0, "the self-test's memory is free")
    bare.lease("ada", 80 << 30)
    bare.worker("ada", mib=79 * 1024)  # and its context: no memory for another test
    bare.stop(signal.SIGKILL)
    bare.start(examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]


def test_a_helper_that_finds_its_records_gone_stops_nothing_and_says_so(bare: Machine) -> None:
    bare.start()
    worker = bare.session("ada")
    bare.stop(signal.SIGKILL)
    (bare.state_dir / "private" / "journal" / "ada").unlink()
    bare.start()
    assert "lease=ada has no record" in bare.log.read_text()
    holders = json.loads((bare.state_dir / "private" / "holders").read_text())
    assert holders["with_lost_record"] == [os.geteuid()]
    assert [worker.do("alloc 64"), worker.do("check")] == ["0", "ok"]
    bare.lease("ada")  # the broker asks for it again
    until(lambda: bare.of("ada")["used_bytes"], "its processes are found again")
    assert bare.ask("suspend", lease="ada")["done"]
    bare.resume("ada", worker)


def test_processes_that_name_a_reserved_lease_belong_to_it_once_it_is_made(bare: Machine) -> None:
    bare.start()
    folder = bare.ask("reserve", lease="ada")["directory"]
    assert not Path(folder).exists()
    assert bare.ask("sample")["leases"] == []
    named = {"GPUSHARE_LEASE": "ada", "GPUSHARE_LEASE_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(["sleep", "600"], env=bare.environment | named) as server:
        try:
            assert bare.lease("ada") == Path(folder)
            until(lambda: bare.of("ada")["alive"], "its process is found")
        finally:
            server.kill()


def test_a_process_that_names_a_lease_which_never_was_switches_nothing_off(bare: Machine) -> None:
    with subprocess.Popen(["sleep", "600"], env=bare.environment | {"GPUSHARE_LEASE": "anything-1"}) as named:
        try:
            bare.start()
        finally:
            named.kill()
    assert "no process without a lease is stopped" not in bare.log.read_text()
    bare.lease("ada")
    assert json.loads((bare.state_dir / "private" / "holders").read_text())["with_lost_record"] == []


def test_the_example_unit_keeps_leases_in_memory_and_the_journal_on_disk() -> None:
    unit = Path(__file__).parents[2] / "docs" / "units" / "gpushare-helper.service"
    lines = unit.read_text().replace("\\\n", " ").splitlines()
    options = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    command = options["ExecStart"].split()
    assert options["RuntimeDirectoryPreserve"] == "yes"
    assert command[command.index("--lease-dir") + 1] == f"/run/{options['RuntimeDirectory']}/leases"
    assert command[command.index("--state-dir") + 1] == f"/var/lib/{options['StateDirectory']}"


def test_a_suspended_lease_without_its_files_is_still_brought_back(bare: Machine) -> None:
    bare.start()
    directory = bare.lease("ada")
    worker = bare.worker("ada", mib=64)
    assert bare.ask("suspend", lease="ada")["done"]
    bare.stop(signal.SIGKILL)
    shutil.rmtree(directory)
    bare.start()
    assert "lease=ada its files were removed while its processes live" in bare.log.read_text()
    assert bare.of("ada")["phase"] == "suspended"
    bare.resume("ada", worker)


def test_the_lease_directory_may_be_elsewhere_and_outlives_the_helper(bare: Machine) -> None:
    leases = bare.folder / "run" / "leases"
    bare.start("--lease-dir", str(leases))
    assert bare.lease("ada", 100 * MIB) == leases / "ada"
    worker = bare.worker("ada", mib=64)
    assert bare.state_dir.stat().st_mode & 0o777 == 0o700
    assert not (bare.state_dir / "leases").exists()
    assert bare.ask("suspend", lease="ada")["done"]
    bare.stop(signal.SIGKILL)
    bare.start("--lease-dir", str(leases))
    assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check"), worker.do("alloc 64")] == ["ok", "2"]
