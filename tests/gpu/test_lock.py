"""Only locked: compute is given back at once, the memory stays where it is."""

from __future__ import annotations

import signal

import pytest

from tests.gpu.machine import GIB, MIB, Machine, until
from tests.simulator import Fault


@pytest.fixture
def ada(machine: Machine) -> Machine:
    machine.lease("ada", 20 * GIB)
    return machine


def test_a_locked_lease_stops_where_it_is_and_goes_on(ada: Machine) -> None:
    workers = [ada.worker("ada", mib=64) for _ in range(2)]
    used = ada.sim.device_used(0)
    moved = ada.ask("suspend", lease="ada", calls=ada.settled("ada"), keep_memory=True)
    assert (moved["done"], ada.of("ada")["phase"]) == (True, "locked")
    assert ada.sim.device_used(0) == used
    assert ada.of("ada")["used_bytes"][ada.uuids()[0]] == used
    assert ada.ask("sample")["host_saved_bytes"] == 0
    for worker in workers:
        worker.tell("check")
    assert workers[0].answer(0.3) == ""
    assert ada.ask("resume", lease="ada")["done"]
    assert [worker.answer() for worker in workers] == ["check ok", "check ok"]
    assert "checkpoint" not in {event.event for event in ada.sim.ledger()}


def test_a_call_of_a_locked_lease_is_told(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    watch = ada.watch()
    assert ada.ask("suspend", lease="ada", keep_memory=True)["done"]
    worker.tell("check")
    assert watch.event("wanted", "ada")
    assert ada.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"


def test_a_locked_lease_is_suspended_without_running_in_between(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    assert ada.ask("suspend", lease="ada", keep_memory=True)["done"]
    late = ada.worker("ada", wait=False)  # waits in the library
    assert late.answer(0.3) == ""
    moved = ada.ask("suspend", lease="ada")
    assert (moved["done"], ada.of("ada")["phase"]) == (True, "suspended")
    assert moved["bytes"] >= 64 * MIB
    assert ada.sim.device_used(0) == 0
    assert "unlock" not in {event.event for event in ada.sim.ledger()}
    assert ada.ask("resume", lease="ada")["done"]
    assert worker.do("check") == "ok"
    assert late.answer() == "ready 0"


def test_one_that_cannot_be_locked_lets_all_go_on(ada: Machine) -> None:
    first, second = ada.worker("ada", mib=64), ada.worker("ada", mib=64)
    ada.sim.fault(Fault.LOCK_TIMEOUT, pid=second.pid)
    moved = ada.ask("suspend", lease="ada", keep_memory=True)
    assert (moved["done"], moved["refused"]) == (False, "busy")
    assert ada.of("ada")["phase"] == "running"
    assert [first.do("check"), second.do("check")] == ["ok", "ok"]


def test_a_locked_lease_is_still_locked_for_the_next_helper(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    assert ada.ask("suspend", lease="ada", keep_memory=True)["done"]
    ada.stop(signal.SIGKILL)
    ada.start()
    assert ada.of("ada")["phase"] == "locked"
    worker.tell("check")
    assert worker.answer(0.3) == ""
    assert ada.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"


def test_an_unlock_that_keeps_failing_is_tried_again_later(ada: Machine) -> None:
    worker = ada.worker("ada", mib=64)
    assert ada.ask("suspend", lease="ada", keep_memory=True)["done"]
    ada.sim.fault(Fault.UNLOCK_FAILS, pid=worker.pid, count=-1)
    assert not ada.ask("resume", lease="ada")["done"]
    ada.sim.clear_faults()
    until(lambda: ada.ask("resume", lease="ada")["done"], "it is unlocked")
    assert worker.do("check") == "ok"
