"""A device in trouble is out of service within seconds, said why, and back only after a self-test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.checks import health
from jupyter_gpushare.gpu.checks.health import APPLICATION_XIDS, HealthChecks
from jupyter_gpushare.gpu.driver import nvml
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.service import helper
from tests.gpu.machine import Machine, machine_in, until
from tests.simulator import Fault


def first(machine: Machine) -> dict[str, object]:
    device: dict[str, object] = machine.ask("sample")["devices"][0]
    return device


def is_ill(machine: Machine) -> bool:
    return not first(machine)["healthy"]


@pytest.mark.parametrize(
    ("fault", "value", "why"),
    [
        (Fault.XID, 79, "XID 79: GPU has fallen off the bus"),
        (Fault.XID, 48, "XID 48: double-bit memory error"),
        (Fault.XID, 9999, "XID 9999"),
        (Fault.ECC, 3, "3 uncorrectable memory error(s)"),
    ],
)
def test_a_reported_error_takes_the_device_out_of_service(
    two: Machine, fault: Fault, value: int, why: str
) -> None:
    two.lease("ada")
    watch = two.watch()
    two.hears()
    two.sim.fault(fault, device=0, value=value)
    told = watch.event("device")
    assert told
    assert (told["device"], told["fields"]["healthy"]) == (two.uuids()[0], "false")
    assert why in told["reason"]
    # The owners on it are told as well.
    owners = watch.event("device", "ada")
    assert owners
    assert why in owners["reason"]
    assert two.ask("sample")["devices"][1]["healthy"]
    # The device is fine all the same: the self-test says so, and only then is it back.
    until(lambda: not is_ill(two), "it is back")
    log = two.log.read_text()
    assert log.index("suspendable=True") < log.index("self-test passed")


@pytest.fixture
def specified(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine of the kind that the test asks for; no helper yet."""
    yield from machine_in(tmp_path, spec=request.param)


@pytest.mark.parametrize(
    ("specified", "action", "why"),
    [
        ("1xH100-80GB,host=512GiB", 1, "the driver asks to reset the GPU"),
        ("1xH100-80GB,host=512GiB", 99, "the driver asks to take recovery action 99"),
        ("2xA100 MIG 1g.10gb-10GB,host=512GiB,mig", 2, "the driver asks to reboot the machine"),
    ],
    indirect=["specified"],
)
def test_a_device_is_out_of_service_while_the_driver_asks_for_a_recovery_action(
    specified: Machine, action: int, why: str
) -> None:
    specified.sim.fault(Fault.RECOVERY_ACTION, device=0, value=action)
    specified.start("--sample-s", "0.05")  # its self-test passed once
    (device, *_) = specified.ask("inventory")["devices"]
    assert (device["healthy"], device["reason"]) == (False, why)
    specified.sim.fault(Fault.XID, device=0, value=79)  # a symptom does not hide what has to be done
    seen = {specified.ask("sample")["at"]}
    until(lambda: seen.add(specified.ask("sample")["at"]) or len(seen) > 10, "ten samples")
    assert first(specified)["reason"] == why
    assert "self-test" not in specified.log.read_text()
    specified.sim.fault(Fault.RECOVERY_ACTION, device=0, value=0)
    until(lambda: not is_ill(specified), "it is back after its self-test")


def test_a_recovery_action_says_more_than_the_symptom_before_it(machine: Machine) -> None:
    machine.hears()
    machine.sim.fault(Fault.DEVICE_LOST, device=0, count=-1)
    until(lambda: is_ill(machine), "it is noticed")
    machine.sim.fault(Fault.RECOVERY_ACTION, device=0, value=4)
    machine.sim.clear_faults()
    why = "the driver asks to end the work on the GPU, then reset it"
    until(lambda: first(machine)["reason"] == why, "it is said")


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 94])
def test_an_xid_of_an_application_takes_nothing_out_of_service(machine: Machine, xid: int) -> None:
    machine.hears()
    machine.sim.fault(Fault.XID, device=0, value=xid)
    until(lambda: f"xid={xid} of an application" in machine.log.read_text(), "it is heard")
    assert not is_ill(machine)
    assert machine.ask("inventory")["devices"][0]["healthy"]


def test_which_xids_are_an_applications_is_nvidias_catalog() -> None:
    assert {13, 31, 43, 45, 68, 94} <= APPLICATION_XIDS
    assert not {154, 46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 158} & APPLICATION_XIDS


def test_nothing_is_suspended_or_restored_on_a_device_out_of_service(machine: Machine) -> None:
    machine.lease("ada")
    machine.lease("bo")
    worker = machine.worker("ada", mib=64)
    machine.worker("bo", mib=64)
    assert machine.ask("suspend", lease="ada")["done"]
    machine.sim.fault(Fault.DEVICE_LOST, device=0, count=-1)
    until(lambda: is_ill(machine), "it is noticed")
    moved = machine.ask("resume", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "busy")
    assert "out of service" in moved["reason"]
    moved = machine.ask("suspend", lease="bo")
    assert (moved["done"], "out of service" in moved["reason"]) == (False, True)
    machine.sim.clear_faults()
    until(lambda: not is_ill(machine), "it is back")
    machine.resume("ada", worker)


def test_a_device_that_does_not_work_stays_out_of_service(machine: Machine) -> None:
    machine.sim.fault(Fault.DEVICE_LOST, device=0, count=-1)
    until(lambda: is_ill(machine), "it is noticed")
    until(lambda: machine.log.read_text().count("stays out of service") > 1, "it is tried again")
    assert is_ill(machine)


def test_a_restarted_driver_is_opened_again(two: Machine) -> None:
    worker = two.session("ada")
    watch = two.watch()
    two.sim.fault(Fault.DRIVER_RESTART)
    event = watch.event("device")
    assert event
    assert event["fields"]["healthy"] == "false"
    until(lambda: all(each["healthy"] for each in two.ask("sample")["devices"]), "both are back")
    assert worker.do("check") == "ok"
    assert two.ask("suspend", lease="ada")["done"]
    assert two.ask("resume", lease="ada")["done"]


def test_what_does_not_answer_is_out_of_service_within_five_seconds(tmp_path: Path) -> None:
    """By its bounds: it is asked once a sample, and believed to hang after one timeout."""
    assert (
        helper.parse(["--state-dir", str(tmp_path)]).sample_s + nvml.PASS_TIMEOUT_S + nvml.CALL_TIMEOUT_S < 5
    )


def test_each_failed_test_doubles_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_S", 10.0)
    monkeypatch.setattr(health, "MAX_RETRY_S", 50.0)
    devices = DeviceStates((DriverGpu(uuid="GPU", index=0, name="X", memory_bytes=1, mig=False),))
    registry: Any = SimpleNamespace(all=list)
    ill = HealthChecks(None, Events(), registry, devices)  # type: ignore[arg-type]  # asks no driver here
    ill.drain("GPU", "first")
    ill.drain("GPU", "second")
    now = time.monotonic()
    assert devices.out_of_service("GPU") == "first"
    assert (ill.due("GPU", now + 9), ill.due("GPU", now + 11)) == (False, True)
    waits = []
    for _ in range(4):
        ill.failed("GPU", "still ill")
        now = time.monotonic()
        waits.append(next(wait for wait in range(100) if ill.due("GPU", now + wait)))
    assert waits == [20, 40, 50, 50]
    ill.passed("GPU")
    assert devices.out_of_service("GPU") == ""
    ill.drain("GPU", "again")  # in trouble again soon after: no sooner than before
    assert not ill.due("GPU", time.monotonic() + 49)
