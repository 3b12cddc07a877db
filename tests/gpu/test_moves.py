"""Suspend and resume on the simulated driver, as the broker asks for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.gpu.leases import lease_of
from tests.gpu.machine import GIB, MIB, PATIENCE_S, Machine, Refused, machine_in, until
from tests.simulator import Fault


def test_memory_comes_back_as_it_was(machine: Machine) -> None:
    worker = machine.session("ada", mib=256)
    moved = machine.ask("suspend", lease="ada", calls=machine.settled("ada"))
    assert moved["done"], moved
    assert moved["bytes"] >= 256 * MIB
    assert machine.of("ada")["phase"] == "suspended"
    assert machine.ask("sample")["devices"][0]["used_bytes"] == 0
    assert machine.sim.device_used(0) == 0
    worker.tell("check")
    assert worker.answer(0.3) == ""
    assert machine.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"
    assert machine.of("ada")["phase"] == "running"


def test_all_processes_of_a_lease_move_together(two: Machine) -> None:
    two.lease("ada")
    workers = [two.worker("ada", mib=64) for _ in range(3)]
    moved = two.ask("suspend", lease="ada")
    assert moved["done"]
    assert moved["bytes"] >= 3 * 64 * MIB
    assert two.sim.device_used(0) == 0
    # As one group: none is checkpointed before all are locked.
    steps = [each.event for each in two.sim.ledger() if each.event in ("lock", "checkpoint")]
    assert steps == ["lock"] * 3 + ["checkpoint"] * 3
    assert two.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in workers] == ["ok"] * 3


def test_another_lease_on_the_device_does_not_notice(machine: Machine) -> None:
    machine.lease("ada", 20 * GIB)
    machine.lease("bo", 20 * GIB)
    machine.worker("ada", mib=64)
    bo = machine.worker("bo", mib=64)
    assert machine.ask("suspend", lease="ada")["done"]
    assert bo.do("check") == "ok"
    assert machine.of("bo")["phase"] == "running"


def test_suspending_and_resuming_twice_changes_nothing_more(machine: Machine) -> None:
    machine.lease("ada")
    machine.worker("ada", mib=64)
    first = machine.ask("suspend", lease="ada")
    again = machine.ask("suspend", lease="ada")
    assert (again["done"], again["bytes"]) == (True, first["bytes"])
    assert machine.ask("resume", lease="ada")["done"]
    assert machine.ask("resume", lease="ada")["done"]


def test_a_lease_without_gpu_processes_can_sleep(machine: Machine) -> None:
    machine.lease("ada")
    assert machine.of("ada")["suspendable"]
    moved = machine.ask("suspend", lease="ada", calls=machine.settled("ada"))
    assert (moved["done"], moved["bytes"]) == (True, 0)
    worker = machine.worker("ada", wait=False)
    assert worker.answer(0.5) == ""
    assert machine.ask("resume", lease="ada")["done"]
    assert worker.answer() == "ready 0"


def test_a_lease_may_start_asleep(machine: Machine) -> None:
    machine.lease("bo", suspended=True)
    watch = machine.watch()
    worker = machine.worker("bo", wait=False)
    assert watch.event("wanted", "bo")
    assert worker.answer(0.2) == ""
    assert machine.sim.device_used(0) == 0
    assert machine.ask("resume", lease="bo")["done"]
    assert worker.answer() == "ready 0"
    assert worker.do("alloc 64") == "0"


def test_a_suspension_is_refused_when_a_call_was_entered_since_the_decision(machine: Machine) -> None:
    worker = machine.session("ada")
    calls = machine.settled("ada")
    assert worker.do("check") == "ok"
    moved = machine.ask("suspend", lease="ada", calls=calls)
    assert (moved["done"], moved["refused"]) == (False, "wanted")
    assert worker.do("check") == "ok"
    assert machine.of("ada")["phase"] == "running"


def test_a_resume_without_free_memory_is_refused_and_loses_nothing(machine: Machine) -> None:
    machine.lease("ada", 70 * GIB)
    machine.lease("bo", 70 * GIB)
    ada = machine.worker("ada", mib=60 * 1024)
    assert machine.ask("suspend", lease="ada")["done"]
    bo = machine.worker("bo", mib=60 * 1024)
    moved = machine.ask("resume", lease="ada", timeout_s=0.2)
    assert (moved["done"], moved["refused"]) == (False, "no_memory")
    assert machine.of("ada")["phase"] == "suspended"
    assert bo.do("check") == "ok"
    bo.kill()
    machine.resume("ada", ada)


def test_a_resume_waits_a_moment_for_memory_that_is_being_given_back(machine: Machine) -> None:
    machine.lease("ada", 70 * GIB)
    machine.lease("bo", 70 * GIB)
    ada = machine.worker("ada", mib=60 * 1024)
    assert machine.ask("suspend", lease="ada")["done"]
    bo = machine.worker("bo", mib=60 * 1024)
    client = machine.client()
    client.send(b'{"verb":"resume","epoch":1,"lease":"ada"}\n')
    assert client.line(0.2) == b""
    bo.kill()
    assert b'"done":true' in client.line().replace(b" ", b"")
    assert ada.do("check") == "ok"


def test_two_resumes_at_once_share_the_free_memory(machine: Machine) -> None:
    for name in ("ada", "bo"):
        machine.lease(name, 70 * GIB)
        machine.worker(name, mib=30 * 1024)
        assert machine.ask("suspend", lease=name)["done"]
    clients = [machine.client(), machine.client()]
    for client, name in zip(clients, ("ada", "bo"), strict=True):
        client.send(f'{{"verb":"resume","epoch":1,"lease":"{name}"}}\n'.encode())
    assert all(b'"done":true' in client.line() for client in clients)
    assert {machine.of(name)["phase"] for name in ("ada", "bo")} == {"running"}


def test_what_other_leases_have_suspended_counts_against_the_budget(machine: Machine) -> None:
    machine.sim.set_host_memory(16 * GIB)  # the budget is half of the memory
    for name in ("ada", "bo"):
        machine.lease(name, 20 * GIB)
        machine.worker(name, mib=5 * 1024)
    assert machine.ask("suspend", lease="ada")["done"]
    moved = machine.ask("suspend", lease="bo")
    assert (moved["done"], moved["refused"], "budget" in moved["reason"]) == (False, "host_memory", True)
    assert machine.ask("resume", lease="ada")["done"]
    assert machine.ask("suspend", lease="bo")["done"]


@pytest.mark.parametrize("use", ["taint", "managed"])
def test_a_taint_is_named_as_the_reason(machine: Machine, use: str) -> None:
    worker = machine.session("ada")
    assert worker.do(use) == "0"
    until(lambda: not machine.of("ada")["suspendable"], "the taint is seen")
    assert "managed memory" in machine.of("ada")["suspend_reason"]
    moved = machine.ask("suspend", lease="ada")
    assert (moved["refused"], "managed memory" in moved["reason"]) == ("not_suspendable", True)


def test_without_the_library_only_a_forced_suspension_is_possible(machine: Machine) -> None:
    worker = machine.session("ada", preload=False)
    seen = until(lambda: machine.of("ada") if machine.of("ada")["used_bytes"] else None, "its memory")
    assert (seen["suspendable"], seen["suspend_reason"]) == (
        False,
        "a process in it does not load the library that limits memory",
    )
    assert seen["processes"][0]["calls"] == -1
    assert machine.ask("suspend", lease="ada", calls=seen["calls"])["refused"] == "not_suspendable"
    assert machine.ask("suspend", lease="ada")["done"]
    machine.resume("ada", worker)


def test_an_unknown_lease_is_refused_and_dropping_it_is_fine(machine: Machine) -> None:
    assert machine.ask("suspend", lease="nobody")["refused"] == "no_lease"
    assert machine.ask("resume", lease="nobody")["refused"] == "no_lease"
    assert machine.ask("drop", lease="nobody") == {"known": False}
    with pytest.raises(Refused) as refused:
        machine.ask("signal", lease="nobody", number=15)
    assert refused.value.kind == "unknown_lease"


def test_a_dropped_lease_may_allocate_no_more(machine: Machine) -> None:
    worker = machine.session("ada")
    assert machine.ask("drop", lease="ada") == {"known": True}
    assert worker.do("alloc 64") == "2"
    assert machine.ask("sample")["leases"] == []


def test_what_began_just_before_a_lease_ended_is_killed_with_it(machine: Machine) -> None:
    machine.lease("ada")
    worker, other = machine.worker("ada"), machine.worker()
    assert machine.ask("drop", lease="ada", end_processes=True) == {"known": True}
    assert worker.process.wait(PATIENCE_S) == -9
    assert other.process.poll() is None


def test_what_is_left_asleep_of_a_dropped_lease_is_ended(machine: Machine) -> None:
    worker = machine.session("ada")
    assert machine.ask("suspend", lease="ada")["done"]
    assert machine.ask("drop", lease="ada")["known"]
    assert worker.process.wait(PATIENCE_S) == -9


def core_filter(pid: int) -> int:
    return int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16)


def test_a_suspended_process_would_dump_no_memory_and_later_again(machine: Machine) -> None:
    machine.lease("ada")
    worker, other = machine.worker("ada", mib=64), machine.worker("ada", mib=64)
    usual = core_filter(worker.pid)
    assert usual > 0
    Path(f"/proc/{other.pid}/coredump_filter").write_text("0x7f")
    assert machine.ask("suspend", lease="ada")["done"]
    assert (core_filter(worker.pid), core_filter(other.pid)) == (0, 0)
    # Another helper, which was not there, knows what it was.
    machine.stop(signal.SIGKILL)
    machine.start()
    assert machine.ask("resume", lease="ada")["done"]
    assert (core_filter(worker.pid), core_filter(other.pid)) == (usual, 0x7F)
    # Where the suspension fails nothing has changed in the end.
    machine.sim.fault(Fault.CHECKPOINT_FAILS, pid=worker.pid)
    assert not machine.ask("suspend", lease="ada")["done"]
    assert (core_filter(worker.pid), core_filter(other.pid)) == (usual, 0x7F)


def test_a_client_of_mps_is_not_suspended(machine: Machine) -> None:
    worker = machine.session("ada")
    machine.sim.fault(Fault.MPS, pid=worker.pid, count=-1)
    moved = machine.ask("suspend", lease="ada")
    assert (moved["refused"], moved["reason"]) == ("not_suspendable", "it runs under MPS")
    assert worker.do("check") == "ok"


def test_no_allocation_takes_the_memory_reserved_for_a_restore(tmp_path: Path) -> None:
    """The limits do not fit together: what the neighbour asks for waits, and is then his."""
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,copy=20GB/s"):
        machine.start()
        wait_for_a_neighbour(machine)


def wait_for_a_neighbour(machine: Machine) -> None:
    for name in ("ada", "bo"):
        machine.lease(name, 70 * GIB)
    ada = machine.worker("ada", mib=30 * 1024)
    assert machine.ask("suspend", lease="ada")["done"]
    bo = machine.worker("bo", mib=64)
    asks = machine.client()
    asks.send(b'{"verb":"resume","epoch":1,"lease":"ada"}\n')
    until(lambda: machine.of("ada")["phase"] == "resuming", "it is on its way")
    bo.tell(f"alloc {60 * 1024}")
    assert bo.answer(0.5) == ""
    assert b'"done":true' in asks.line().replace(b" ", b"")
    assert bo.answer() == "alloc 2"
    assert bo.do(f"alloc {40 * 1024}") == "0"
    assert [ada.do("check"), bo.do("check")] == ["ok", "ok"]


def test_a_failed_move_is_left_alone_for_longer_each_time() -> None:
    lease, waits = lease_of(), []
    for _ in range(8):
        lease.block((1, 2), "the driver failed")
        waits.append(lease.failures[1, 2].wait_s)
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    lease.block((3, 4), "another process")
    assert lease.failures[3, 4].wait_s == 60


def test_a_process_that_dies_asleep_is_dropped_with_what_it_had_saved(machine: Machine) -> None:
    machine.lease("ada")
    dies, lives = machine.worker("ada", mib=64), machine.worker("ada", mib=64)
    saved = machine.ask("suspend", lease="ada")["bytes"]
    assert sum(machine.of("ada")["saved_bytes"].values()) == saved
    dies.kill()
    until(lambda: sum(machine.of("ada")["saved_bytes"].values()) == saved // 2, "the other's is left")
    assert machine.ask("sample")["host_saved_bytes"] == saved // 2
    machine.resume("ada", lives)
    assert machine.ask("suspend", lease="ada")["done"]
    lives.kill()
    until(lambda: not sum(machine.of("ada")["saved_bytes"].values()), "nothing is kept for the dead")
    assert machine.ask("sample")["host_saved_bytes"] == 0
    assert machine.of("ada")["phase"] == "suspended"
    assert "driver_killed" not in machine.log.read_text()  # the driver is not blamed for it


@pytest.mark.parametrize("parks", [True, False])
def test_a_lease_is_checkpointed_before_it_is_killed_where_the_administrator_asks_for_it(
    bare: Machine, parks: bool
) -> None:
    bare.start(*["--park-before-kill"] * parks)
    bare.lease("ada")
    workers = [bare.worker("ada", mib=64) for _ in range(2)]
    assert bare.ask("signal", lease="ada", number=signal.SIGCONT, to="all")["count"] == 2
    assert bare.ask("signal", lease="ada", number=signal.SIGKILL, to="all")["count"] == 2
    assert [worker.process.wait() for worker in workers] == [-signal.SIGKILL] * 2
    parked = {event.pid for event in bare.sim.ledger() if event.event == "checkpoint"}
    assert parked == ({worker.pid for worker in workers} if parks else set())
    # One that does not come to rest is killed all the same.
    assert bare.ask("resume", lease="ada")["done"]
    last = bare.worker("ada", mib=64)
    bare.sim.fault(Fault.LOCK_TIMEOUT, pid=last.pid)
    assert bare.ask("signal", lease="ada", number=signal.SIGKILL, to="all")["count"] == 1
    assert last.process.wait() == -signal.SIGKILL
    assert ("killed without a checkpoint" in bare.log.read_text()) == parks
