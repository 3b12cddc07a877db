"""Suspending and the library's level are offered only where a self-test passed."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu import canary, room
from jupyter_gpushare.gpu.canary import Verdict
from jupyter_gpushare.gpu.examiner import Examiner
from jupyter_gpushare.gpu.verbs import Level, Rung
from tests.gpu.machine import Machine, until
from tests.simulator import Fault


def test_a_device_that_passed_offers_suspending_and_the_librarys_level(bare: Machine) -> None:
    bare.start(examine=True)
    for device in bare.ask("inventory")["devices"]:
        assert (device["suspendable"], device["suspend_reason"]) == (True, "")
        assert device["level"] == "preload"
        assert device["suspend_bytes_per_s"] > 0
        assert device["resume_bytes_per_s"] > 0
    assert bare.sim.device_used(0) == 0
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
    bare.start(examine=True, before="from jupyter_gpushare.gpu import nvml; nvml._processes = lambda at: {}")
    (device,) = bare.ask("inventory")["devices"]
    assert (device["suspendable"], device["suspend_reason"]) == (False, canary.NO_PIDS)
    assert device["level"] == "preload"
    bare.lease("ada")
    worker = bare.worker("ada", mib=64)
    assert worker.do("check") == "ok"


OTHER_BYTES = """
from jupyter_gpushare.gpu import canary
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
from jupyter_gpushare.gpu import nvml
look, asked = nvml._processes, []
nvml._processes = lambda handle: asked.append(1) or {
    pid: used + (len(asked) << 20) for pid, used in look(handle).items()}
"""


def test_what_a_restore_takes_beyond_its_bytes_is_measured_and_kept_free(bare: Machine) -> None:
    bare.start(examine=True, before=GROWS)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    kept = json.loads((bare.state_dir / "private" / "canary").read_bytes())["devices"][bare.uuids()[0]]
    assert kept["grown_bytes"] >= 1 << 20
    known: dict[str, Any] = dict.fromkeys(("canary", "nvml", "events", "state", "enforce"))
    examiner = Examiner(**known, health=SimpleNamespace(), key="")  # type: ignore[arg-type]
    assert examiner.margin_bytes("GPU-1") == room.MARGIN_BYTES
    for grown, margin in ((1 << 20, room.MARGIN_BYTES), (1 << 30, 2 << 30)):
        examiner._verdicts["GPU-1"] = Verdict(suspendable=True, grown_bytes=grown)
        assert examiner.margin_bytes("GPU-1") == margin


LATE = """
import time
from jupyter_gpushare.gpu import nvml
look, seen = nvml._processes, {}
def late(handle):
    now = time.monotonic()
    seen.update((pid, (now, used)) for pid, used in look(handle).items())
    return {pid: used for pid, (at, used) in seen.items() if now - at < 0.3}
nvml._processes = late
"""


def test_a_driver_whose_list_of_processes_lags_behind_is_given_a_moment(bare: Machine) -> None:
    bare.start(examine=True, before=LATE)
    (device,) = bare.ask("inventory")["devices"]
    assert (device["suspendable"], device["suspend_reason"]) == (True, "")


def test_a_full_device_is_tested_when_there_is_room(bare: Machine) -> None:
    holder = bare.worker(mib=79 * 1024)
    bare.start(examine=True)
    watch = bare.watch()
    (device,) = bare.ask("inventory")["devices"]
    assert not device["suspendable"]
    assert "no room" in device["suspend_reason"]
    holder.kill()
    event = watch.event("device")
    assert event
    assert event["fields"] == {"suspendable": "true", "level": "preload"}
    assert bare.ask("inventory")["devices"][0]["suspendable"]


def test_the_helpers_own_child_is_no_stranger(bare: Machine) -> None:
    bare.start("--sample-s", "0.05", examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    assert "stranger" not in bare.log.read_text()


def test_the_child_does_not_outlive_a_helper_that_is_killed(bare: Machine) -> None:
    bare.sim.fault(Fault.HANG_CHECKPOINT, count=-1, value=5000)
    bare.start(examine=True, wait=False)
    until(lambda: bare.sim.device_used(0), "the child holds memory")
    bare.stop(signal.SIGKILL)
    until(lambda: bare.sim.device_used(0) == 0, "it is gone")


def test_a_verdict_is_kept_for_its_boot_and_driver_only() -> None:
    verdict = Verdict(suspendable=True, ladder=(Rung(level=Level.PRELOAD, offered=True),))
    later = Verdict(suspendable=False, reason="no room", final=False)
    plain = canary.keep("boot driver", {"GPU-1": verdict, "GPU-2": later})
    assert canary.kept(plain, "boot driver", "GPU-1") == verdict
    assert canary.kept(plain, "boot driver", "GPU-2") is None
    assert canary.kept(plain, "boot other", "GPU-1") is None
    assert canary.kept({"key": "boot driver", "devices": {"GPU-1": {"x": 1}}}, "boot driver", "GPU-1") is None
    assert canary.kept({}, "boot driver", "GPU-1") is None


def test_a_failure_of_the_driver_has_the_device_tested_again(machine: Machine) -> None:
    machine.lease("ada")
    worker = machine.worker("ada", mib=64)
    assert "suspendable=" not in machine.log.read_text()  # the verdict was kept
    machine.sim.fault(Fault.CHECKPOINT_FAILS, pid=worker.pid)
    assert machine.ask("suspend", lease="ada")["refused"] == "not_suspendable"
    until(lambda: "suspendable=True" in machine.log.read_text(), "it is tested again")
    assert machine.ask("inventory")["devices"][0]["suspendable"]
