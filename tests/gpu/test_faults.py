"""The driver refuses, fails half-way, hangs, or loses a device."""

from __future__ import annotations

import json

import pytest

from tests.gpu.machine import Machine, Refused, until
from tests.simulator import Fault

# Ended by clearing the faults, long before.
HANG_MS = 120_000


@pytest.fixture
def ada(machine: Machine) -> Machine:
    machine.lease("ada")
    return machine


def test_a_lock_that_times_out_leaves_the_lease_running(ada: Machine) -> None:
    first, second = ada.worker("ada", mib=64), ada.worker("ada", mib=64)
    ada.sim.fault(Fault.LOCK_TIMEOUT, pid=second.pid)
    moved = ada.ask("suspend", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "busy")
    assert [first.do("check"), second.do("check")] == ["ok", "ok"]
    assert ada.of("ada")["phase"] == "running"
    assert ada.ask("suspend", lease="ada")["done"]


def test_a_checkpoint_that_fails_puts_every_process_back(ada: Machine) -> None:
    workers = [ada.worker("ada", mib=64) for _ in range(3)]
    ada.sim.fault(Fault.CHECKPOINT_FAILS, pid=workers[1].pid)
    moved = ada.ask("suspend", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "not_suspendable")
    assert ada.of("ada")["phase"] == "running"  # at once, not when it is settled later
    # After a failed checkpoint the driver gives no promise for that process.
    assert [worker.do("check") for worker in workers] == ["ok", "bad", "ok"]
    shown = ada.of("ada")
    assert (shown["phase"], shown["saved_bytes"], shown["damaged"]) == ("running", {}, True)
    # It is not tried over and over: the sample says why.
    assert not shown["suspendable"]
    assert "failed to checkpoint" in shown["suspend_reason"]


def test_a_restore_that_fails_once_is_tried_again(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    assert ada.ask("suspend", lease="ada")["done"]
    ada.sim.fault(Fault.RESTORE_FAILS, pid=worker.pid)
    ada.resume("ada", worker)


def test_a_restore_that_fails_twice_loses_the_process_and_no_other(ada: Machine) -> None:
    """999 (CUDA_ERROR_UNKNOWN) twice while checkpointed: nothing retries for ever."""
    workers = [ada.worker("ada", mib=64) for _ in range(2)]
    assert ada.ask("suspend", lease="ada")["done"]
    ada.sim.fault(Fault.RESTORE_FAILS, pid=workers[1].pid, count=-1)
    moved = ada.ask("resume", lease="ada")
    assert (moved["done"], moved["refused"], "restart the kernel" in moved["reason"]) == (False, "lost", True)
    assert workers[0].do("check") == "ok"
    log = ada.log.read_text()
    assert log.count("restore failed: cuCheckpointProcessRestore failed with code 999") == 1
    assert f"process={workers[1].pid} its GPU state is lost" in log
    # What it held is free for others, and the lease goes on once it has ended.
    workers[1].kill()
    until(lambda: ada.of("ada")["phase"] == "running", "the lease goes on")
    assert ada.ask("suspend", lease="ada")["done"]
    assert ada.ask("resume", lease="ada")["done"]


def test_an_unlock_that_fails_is_tried_again(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    assert ada.ask("suspend", lease="ada")["done"]
    ada.sim.fault(Fault.UNLOCK_FAILS, pid=worker.pid, count=2)
    ada.resume("ada", worker)


def test_a_hung_query_of_a_device_delays_no_other_request(two: Machine) -> None:
    """While it hangs, samples go on, other devices are measured and moved, the device is named."""
    two.lease("ada", devices=(1,))
    worker = two.worker("ada", device=1, mib=64)
    watch = two.watch()
    two.sim.fault(Fault.HANG_NVML, device=0, count=1, value=HANG_MS)
    event = watch.event("device")
    assert event
    assert event["device"] == two.uuids()[0]
    moments = {two.ask("sample")["at"]}
    until(lambda: moments.add(two.ask("sample")["at"]) or len(moments) > 3, "samples go on")
    assert two.ask("suspend", lease="ada")["done"]
    assert two.ask("resume", lease="ada")["done"]
    assert [device["healthy"] for device in two.ask("sample")["devices"]] == [False, True]
    two.sim.clear_faults()
    until(lambda: two.ask("sample")["devices"][0]["healthy"], "it answers again, and passes its self-test")
    assert worker.do("check") == "ok"


def test_a_checkpoint_call_that_hangs_is_settled_when_it_returns(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    ada.sim.fault(Fault.HANG_CHECKPOINT, pid=worker.pid, count=1, value=HANG_MS)
    moved = ada.ask("suspend", lease="ada", timeout_s=0.5)
    assert (moved["done"], moved["refused"]) == (False, "busy")
    # Before it returns it is unknown whether the process will be locked.
    assert ada.of("ada")["phase"] == "suspending"
    assert ada.ask("resume", lease="ada")["refused"] == "busy"
    ada.sim.clear_faults()
    until(lambda: ada.of("ada")["phase"] == "running", "settled")
    assert worker.do("check") == "ok"


def test_a_state_directory_that_takes_no_more_refuses_and_loses_nothing(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    journal = ada.state_dir / "private" / "journal"
    journal.rename(journal.with_name("away"))  # every write fails, for root too
    moved = ada.ask("suspend", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "busy")
    assert "cannot be written" in moved["reason"]
    assert worker.do("check") == "ok"
    with pytest.raises(Refused) as refused:
        ada.lease("bo")
    assert refused.value.kind == "state"
    assert [lease["lease"] for lease in ada.ask("sample")["leases"]] == ["ada"]
    journal.with_name("away").rename(journal)
    assert ada.ask("suspend", lease="ada")["done"]
    ada.resume("ada", worker)


def test_a_full_state_directory_keeps_no_lease_asleep(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    assert ada.ask("suspend", lease="ada")["done"]
    journal = ada.state_dir / "private" / "journal"
    journal.rename(journal.with_name("away"))
    ada.resume("ada", worker)
    journal.with_name("away").rename(journal)
    record = journal / "ada"
    until(lambda: json.loads(record.read_bytes())["phase"] == "running", "it is written down later")


@pytest.mark.parametrize(
    "point", ["after phase resuming", "after restore 1", "after unlock 1", "after phase running"]
)
def test_a_helper_killed_during_a_resume_that_it_could_not_write_down(bare: Machine, point: str) -> None:
    """Its record still says suspended; the next helper asks the driver."""
    bare.start(die=point)
    worker = bare.session("ada")
    assert bare.ask("suspend", lease="ada")["done"]
    journal = bare.state_dir / "private" / "journal"
    journal.rename(journal.with_name("away"))
    bare.client().send(b'{"verb":"resume","epoch":1,"lease":"ada"}\n')
    bare.died()
    journal.with_name("away").rename(journal)
    bare.start()
    bare.resume("ada", worker)
    assert bare.ask("suspend", lease="ada")["done"]
    assert bare.sim.device_used(0) == 0


def test_a_removed_limit_page_does_not_stop_a_move(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    (ada.state_dir / "leases" / "ada" / "limit").unlink()
    assert ada.ask("suspend", lease="ada")["done"]
    ada.resume("ada", worker)
