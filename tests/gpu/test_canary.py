"""Suspending and the library's level are offered only where a self-test passed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.checks import canary
from jupyter_gpushare.gpu.driver import ladder, probe
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, DriverGpu
from jupyter_gpushare.gpu.leases.devices import UNTESTED, DeviceStates, Verdict
from jupyter_gpushare.protocol.helper import Level, Rung
from tests.gpu.machine import Machine, open_machine, until
from tests.simulator import Fault

GPU = DriverGpu("GPU-1", 0, "H100", 80 << 30, mig=False, island="")


def test_a_device_that_passed_offers_suspending_and_the_librarys_level(bare: Machine) -> None:
    bare.start(examine=True)
    for device in bare.ask("inventory")["devices"]:
        assert (device["suspendable"], device["suspend_reason"]) == (True, "")
        assert device["level"] == "preload"
        assert device["suspend_bytes_per_s"] > 0
        assert device["resume_bytes_per_s"] > 0
    until(lambda: bare.sim.device_used(0) == 0, "the driver frees what the self-test held")
    assert list((bare.state_dir / "leases").iterdir()) == []


@pytest.mark.parametrize(
    "fault", [Fault.LOCK_TIMEOUT, Fault.CHECKPOINT_FAILS, Fault.RESTORE_FAILS, Fault.RESTORE_POISONS]
)
def test_a_cycle_that_fails_takes_the_offer_back(bare: Machine, fault: Fault) -> None:
    bare.sim.fault(fault)
    bare.start(examine=True)
    (device,) = bare.ask("inventory")["devices"]
    assert not device["suspendable"]
    assert "self-test failed" in device["suspend_reason"]
    assert device["level"] == "preload"  # the limit held all the same
    bare.lease("ada")
    bare.worker("ada", mib=64)
    until(lambda: not bare.of("ada")["suspendable"], "it is said")
    moved = bare.ask("suspend", lease="ada")
    assert (moved["refused"], "self-test" in moved["reason"]) == ("not_suspendable", True)


def test_a_driver_that_does_not_show_our_pids_cannot_suspend(bare: Machine) -> None:
    """As in a container with pids of its own: what is suspended could not be told from what is not."""
    bare.start(
        examine=True, before="from jupyter_gpushare.gpu.driver import nvml; nvml._processes = lambda at: {}"
    )
    (device,) = bare.ask("inventory")["devices"]
    assert (device["suspendable"], device["suspend_reason"]) == (False, canary.NO_PIDS)
    assert (device["level"], bare.ask("sample")["devices"][0]["blind"]) == ("hints", True)
    worker = bare.session("ada")
    assert worker.do("check") == "ok"


#: As a driver that tells no more than the context.
LITTLE = """
from jupyter_gpushare.gpu.driver import nvml
look = nvml._processes
nvml._processes = lambda handle: {pid: held and min(held, 32 << 20) for pid, held in look(handle).items()}
"""


def test_a_child_whose_bytes_are_not_all_shown_is_no_evidence(bare: Machine) -> None:
    bare.start(examine=True, before=LITTLE)
    (device,) = bare.ask("inventory")["devices"]
    assert (device["suspendable"], device["suspend_reason"]) == (False, canary.BLIND)
    assert "the watchdog is blind" in {rung["level"]: rung["reason"] for rung in device["ladder"]}["preload"]


@pytest.fixture
def reachable() -> Iterator[Machine]:
    """A machine on which every user finds the simulated driver's state; no helper yet."""
    yield from open_machine()


def test_the_child_is_like_a_kernel_no_descendant_another_user_and_uses_what_frameworks_use(
    reachable: Machine,
) -> None:
    reachable.sim.fault(Fault.HANG_CHECKPOINT, value=5000)
    reachable.start(examine=True, wait=False)
    until(lambda: reachable.sim.faults_left() == 0, "the first checkpoint call hangs")
    assert reachable.helper
    pid = reachable.sim.ledger()[-1].pid
    assert (reachable.sim.device_used(0) >= canary.CANARY_BYTES, pid != reachable.helper.pid) == (True, True)
    assert Path(f"/proc/{pid}").stat().st_uid == (probe.OVERFLOW_UID if os.geteuid() == 0 else os.geteuid())
    parent = pid
    while parent > 1:
        parent = int(procfs.stat_fields(parent)[procfs.PARENT])
        assert parent != reachable.helper.pid
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) >= 4  # main, input, two with a stream each
    torch = "+torch" if importlib.util.find_spec("torch") else ""
    used = f"features=segment+pinned+module+threads+callback{torch}\n"
    assert used in reachable.log.read_text()
    reachable.sim.clear_faults()
    until(reachable._answers, "the helper answers")
    until(lambda: reachable.ask("inventory")["devices"][0]["suspendable"], "it passes")


OTHER_BYTES = """
from jupyter_gpushare.gpu.checks import canary
answer = canary._answer
canary._answer = lambda child, timeout_s, first, words: (
    answer(child, timeout_s, first, words) if first else ["0" * 64])
"""


def test_a_driver_that_brings_back_other_bytes_is_found_out(bare: Machine) -> None:
    bare.start(examine=True, before=OTHER_BYTES)
    (device,) = bare.ask("inventory")["devices"]
    assert not device["suspendable"]
    assert "its memory came back changed" in device["suspend_reason"]


#: Each time the driver is asked it shows a MiB more of each process.
GROWS = """
from jupyter_gpushare.gpu.driver import nvml
look, asked = nvml._processes, []
nvml._processes = lambda handle: asked.append(1) or {
    pid: (used or 0) + (len(asked) << 20) for pid, used in look(handle).items()}
"""


def test_what_a_restore_takes_beyond_its_bytes_is_measured_and_kept_free(bare: Machine) -> None:
    bare.start(examine=True, before=GROWS)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    kept = json.loads((bare.state_dir / "private" / "canary").read_bytes())["devices"][bare.uuids()[0]]
    assert kept["grown_bytes"] >= 1 << 20
    devices = DeviceStates((GPU,))
    assert devices.margin_bytes("GPU-1", 1 << 30) == ladder.MARGIN_FLOOR_BYTES
    assert devices.margin_bytes("GPU-1", 50 << 30) == (50 << 30) * 3 // 100
    for grown, margin in ((1 << 20, ladder.MARGIN_FLOOR_BYTES), (1 << 30, 2 << 30)):
        devices.set_verdict("GPU-1", Verdict(suspendable=True, grown_bytes=grown))
        assert devices.margin_bytes("GPU-1", 1 << 30) == margin


LATE = """
import time
from jupyter_gpushare.gpu.driver import nvml
look, seen = nvml._processes, {}
def late(handle):
    now = time.monotonic()
    seen.update((pid, (now, used)) for pid, used in look(handle).items())
    return {pid: used for pid, (at, used) in seen.items() if now - at < 0.3}
nvml._processes = late
"""


def test_a_driver_with_a_lagging_list_of_processes_is_given_a_moment(bare: Machine) -> None:
    bare.start(examine=True, before=LATE)
    (device,) = bare.ask("inventory")["devices"]
    assert (device["suspendable"], device["suspend_reason"]) == (True, "")


#: What is used never gets less, whatever the list of processes says.
STILL_USED = """
from types import SimpleNamespace
from jupyter_gpushare.gpu.driver import nvml
look, most = nvml._memory, []
def used(handle):
    memory = look(handle)
    most.append(max([memory.used, *most[-1:]]))
    return SimpleNamespace(total=memory.total, used=most[-1], free=memory.total - most[-1])
nvml._memory = used
"""


def test_memory_that_is_gone_from_the_list_alone_is_not_gone(bare: Machine) -> None:
    bare.start(examine=True, before=STILL_USED)
    (device,) = bare.ask("inventory")["devices"]
    assert not device["suspendable"]
    assert "still shows its memory after the checkpoint" in device["suspend_reason"]


def test_a_full_device_is_tested_when_memory_is_free(bare: Machine) -> None:
    holder = bare.worker(mib=79 * 1024)
    bare.start(examine=True)
    watch = bare.watch()
    (device,) = bare.ask("inventory")["devices"]
    assert not device["suspendable"]
    assert "no free memory" in device["suspend_reason"]
    holder.kill()
    event = watch.event("device")
    assert event
    assert event["fields"] == {"suspendable": "true", "level": "preload"}
    assert bare.ask("inventory")["devices"][0]["suspendable"]


def test_the_helpers_own_child_is_no_stranger(bare: Machine) -> None:
    bare.start("--sample-s", "0.05", examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    assert "unleased_process" not in bare.log.read_text()


def test_the_child_does_not_outlive_a_helper_that_is_killed(bare: Machine) -> None:
    bare.sim.fault(Fault.HANG_CHECKPOINT, count=-1, value=5000)
    bare.start(examine=True, wait=False)
    until(lambda: bare.sim.device_used(0), "the child holds memory")
    bare.stop(signal.SIGKILL)
    until(lambda: bare.sim.device_used(0) == 0, "it is gone")


def test_a_verdict_is_kept_for_its_boot_and_driver_only() -> None:
    verdict = Verdict(suspendable=True, ladder=(Rung(level=Level.PRELOAD, offered=True),))
    later = Verdict(suspendable=False, reason="no room", final=False)
    gpus = (GPU, replace(GPU, uuid="GPU-2"))
    devices = DeviceStates(gpus)
    devices.load({}, "boot driver")
    devices.set_verdict("GPU-1", verdict)
    devices.set_verdict("GPU-2", later)
    devices.measure_hidden("GPU-1", DeviceReading((1 << 30) + 5, (79 << 30) - 5, 0, {7: 1 << 30}, None), 0)
    plain = json.loads(json.dumps(devices.saved()))

    def loaded(saved: dict[str, Any], key: str) -> DeviceStates:
        again = DeviceStates(gpus)
        again.load(saved, key)
        return again

    again = loaded(plain, "boot driver")
    assert again.verdict("GPU-1") == verdict
    assert again.verdict("GPU-2") is UNTESTED
    assert again.reserve_bytes(GPU) == 5 + (80 << 30) * 3 // 100
    assert loaded(plain, "boot other").verdict("GPU-1") is UNTESTED
    assert (
        loaded({"key": "boot driver", "devices": {"GPU-1": {"x": 1}}}, "boot driver").verdict("GPU-1")
        is UNTESTED
    )
    assert loaded({}, "boot driver").verdict("GPU-1") is UNTESTED


def test_a_failure_of_the_driver_has_the_device_tested_again(machine: Machine) -> None:
    worker = machine.session("ada")
    assert "suspendable=" not in machine.log.read_text()  # the verdict was kept
    machine.sim.fault(Fault.CHECKPOINT_FAILS, pid=worker.pid)
    assert machine.ask("suspend", lease="ada")["refused"] == "not_suspendable"
    until(lambda: "suspendable=True" in machine.log.read_text(), "it is tested again")
    assert machine.ask("inventory")["devices"][0]["suspendable"]
