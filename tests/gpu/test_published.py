"""The device layer on a driver that behaves as published: lost, killed, damaged, hidden, forbidden.

`native/simulator` names the source of each behaviour; tests/native/test_truth.py shows it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.checks.canary import BLIND, NO_WATCHDOG
from jupyter_gpushare.gpu.driver.known import NOTES, note_of
from tests.gpu.machine import GIB, MIB, Machine, Refused, machine_in, until
from tests.simulator import Fault

ONE = "1xH100-80GB,host=512GiB"


@pytest.fixture
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with the option of the simulated driver that the test names; no helper yet."""
    yield from machine_in(tmp_path, spec=f"{ONE},{request.param}")


@pytest.mark.parametrize("published", ["lost=checkpointed", "lost=failed"], indirect=True)
def test_a_restore_out_of_memory_is_final(published: Machine) -> None:
    """It answers 2; the process stays CHECKPOINTED and answers 304 ever after, or is FAILED."""
    published.start()
    published.lease("ada", 30 * GIB)
    published.lease("bo", 30 * GIB)
    lost, other = published.worker("ada", mib=64), published.worker("ada", mib=64)
    bo = published.worker("bo", mib=64)
    watch = published.watch()
    assert published.ask("suspend", lease="ada")["done"]
    published.sim.fault(Fault.RESTORE_POISONS, pid=lost.pid)
    moved = published.ask("resume", lease="ada")
    assert (moved["done"], moved["refused"], "restart the kernel" in moved["reason"]) == (False, "lost", True)
    event = until(lambda: _phase(watch.event("phase", "ada")), "the loss is published")
    assert "restart the kernel" in event["reason"]
    log = published.log.read_text()
    assert "restore failed: cuCheckpointProcessRestore failed with code 2" in log  # the first code
    assert "code 304" not in log  # it was not tried again
    # The other process goes on, and so does the other lease: nothing is reserved any more.
    assert other.do("check") == "ok"
    assert published.ask("suspend", lease="bo")["done"]
    published.resume("bo", bo)
    shown = published.of("ada")
    assert (shown["phase"], shown["saved_bytes"], shown["suspendable"]) == ("lost", {}, False)
    assert published.ask("suspend", lease="ada")["refused"] == "lost"
    lost.kill()
    until(lambda: published.of("ada")["phase"] == "running", "the lease goes on")


def _phase(event: dict[str, object] | None) -> dict[str, object] | None:
    fields = event["fields"] if event else {}
    return event if isinstance(fields, dict) and fields.get("to") == "lost" else None


#: Does not touch a device: as `torch.cuda.device_count()` in a terminal.
ONLY_INIT = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
print("ready", cuda.cuInit(0), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("published", ["listed=initialized"], indirect=True)
def test_a_process_that_only_called_cu_init_is_left_out_without_fault(published: Machine) -> None:
    """NVML lists it with 0 bytes, and Lock on it answers 3."""
    published.start()
    worker = published.session("ada")
    initialized = published.worker("ada", command=[sys.executable, "-c", ONLY_INIT], wait=False)
    assert initialized.answer() == "ready 0"
    moved = published.ask("suspend", lease="ada", calls=published.settled("ada"))
    assert moved["done"], moved
    published.resume("ada", worker)
    assert published.of("ada")["suspendable"]
    assert "suspendable=" not in published.log.read_text()  # no device was doubted and tested again


@pytest.mark.parametrize("published", ["bytes=zero", "bytes=unavailable"], indirect=True)
def test_a_driver_that_hides_bytes_suspends_nothing_and_limits_by_hints(published: Machine) -> None:
    published.start("--watchdog", "stop", examine=True)
    (device,) = published.ask("inventory")["devices"]
    assert (device["suspendable"], device["suspend_reason"], device["level"]) == (False, BLIND, "hints")
    assert {rung["level"]: rung["reason"] for rung in device["ladder"]}["preload"] == NO_WATCHDOG
    assert published.ask("sample")["devices"][0]["blind"]
    published.lease("ada", 8 * GIB)
    assert published.of("ada")["level"] == "hints"
    worker = published.worker("ada", wait=False)
    assert worker.answer() == "ready 0"
    assert worker.do("alloc 64") == "0"
    assert worker.do("alloc 9000") == "2"  # the library still limits
    assert published.ask("suspend", lease="ada")["reason"] == BLIND
    # What the driver does not tell is shown as the library counts it.
    until(lambda: published.of("ada")["used_bytes"] == {published.uuids()[0]: 64 * MIB}, "it is counted")
    assert worker.do("check") == "ok"


@pytest.mark.parametrize("published", ["bytes=zero", "bytes=unavailable"], indirect=True)
def test_a_process_is_not_suspended_when_its_bytes_vanish_from_the_list(
    published: Machine, request: pytest.FixtureRequest
) -> None:
    """The self-test passed once: the account says more than the driver does."""
    unknown = "unavailable" in request.node.callspec.id
    published.start()
    published.lease("ada", 8 * GIB)
    worker = published.worker("ada", wait=False)
    assert worker.answer() == "ready 0"
    assert worker.do("alloc 64") == "0"
    moved = published.ask("suspend", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "not_suspendable")
    assert f"does not say how much memory process {worker.pid} holds" in moved["reason"]
    until(lambda: published.ask("sample")["devices"][0]["blind"] == unknown, "not available is not 0")
    assert worker.do("check") == "ok"


HIDES_THE_SECOND = """
import pynvml
from jupyter_gpushare.gpu.driver import nvml
look = nvml._processes
nvml._processes = lambda handle: {} if pynvml.nvmlDeviceGetIndex(handle) else look(handle)
"""


def test_a_process_is_not_suspended_when_one_of_its_devices_does_not_show_it(two: Machine) -> None:
    two.lease("ada", devices=(0, 1))
    worker = two.worker("ada", devices=(0, 1), mib=64)
    assert worker.do("second 64") == "0"
    two.stop()
    two.start(before=HIDES_THE_SECOND)
    moved = two.ask("suspend", lease="ada")
    assert (moved["refused"], "does not say how much" in moved["reason"]) == ("not_suspendable", True)
    assert worker.do("check") == "ok"


#: As a driver that leaves out what pools or other contexts of the process hold.
SHOWS_LESS = """
from jupyter_gpushare.gpu.driver import nvml
look = nvml._processes
nvml._processes = lambda handle: {pid: min(held, 2 << 20) for pid, held in look(handle).items()}
"""


def test_a_restore_needs_what_the_library_counts_where_the_driver_shows_less(bare: Machine) -> None:
    bare.start(before=SHOWS_LESS)
    ada = bare.session("ada", 60 * GIB, mib=40 * 1024)
    bare.lease("bo", 60 * GIB)
    moved = bare.ask("suspend", lease="ada")
    assert (moved["done"], moved["bytes"]) == (True, 40 * GIB)
    bo = bare.worker("bo", mib=50 * 1024)
    moved = bare.ask("resume", lease="ada", timeout_s=0.2)
    assert (moved["done"], moved["refused"]) == (False, "no_memory")  # it would have been lost
    bo.kill()
    bare.resume("ada", ada)


@pytest.mark.parametrize("fault", [Fault.LOCK_KILLS, Fault.CHECKPOINT_KILLS, Fault.RESTORE_KILLS])
def test_a_process_that_the_driver_ends_is_reported_and_twice_is_enough(
    machine: Machine, fault: Fault
) -> None:
    machine.lease("ada")
    watch = machine.watch()
    for _ in range(2):
        worker = machine.worker("ada", mib=64)
        machine.sim.fault(fault, pid=worker.pid)
        machine.ask("suspend", lease="ada")
        machine.ask("resume", lease="ada")
        event = watch.event("driver_killed", "ada")
        assert event
        assert f"process {worker.pid} ended within" in event["reason"]
        assert event["device"] == machine.uuids()[0]
        worker.process.wait()
        until(lambda: machine.of("ada")["phase"] == "running", "the lease goes on")
    (device,) = machine.ask("inventory")["devices"]
    assert "2 processes ended while the driver suspended" in device["suspend_reason"]
    last = machine.worker("ada", mib=64)
    # A helper that is killed does not forget it, one that is stopped does.
    for stop in (None, signal.SIGKILL, signal.SIGTERM):
        refused = "" if stop is signal.SIGTERM else "not_suspendable"
        if stop is not None:
            machine.stop(stop)
            machine.start(examine=True)
        moved = machine.ask("suspend", lease="ada")
        assert moved["refused"] == refused
        assert ("stop and start the device helper" in moved["reason"]) == bool(refused)
    machine.resume("ada", last)


@pytest.mark.parametrize("end", ["killed", "killed, not yet waited for", "exit"])
def test_a_process_that_its_user_ends_within_a_call_is_not_taken_for_the_drivers(
    machine: Machine, end: str
) -> None:
    machine.lease("ada")
    client = machine.client()
    for _ in range(2):
        worker = machine.worker("ada", mib=64)
        machine.sim.fault(Fault.HANG_CHECKPOINT, pid=worker.pid, value=60_000)
        client.send(b'{"verb":"suspend","epoch":1,"lease":"ada"}\n')
        until(lambda: machine.sim.faults_left() == 0, "the call hangs")
        if end == "exit":
            worker.tell("exit")
        else:
            worker.process.kill()
        if end != "killed, not yet waited for":
            worker.process.wait()
        else:
            until(lambda pid=worker.pid: procfs.stat_fields(pid)[procfs.STATE] == b"Z", "it has ended")
        machine.sim.clear_faults()  # the call goes on
        assert client.line()
        assert machine.ask("resume", lease="ada")["done"]
    assert machine.log.read_text().count("ended within Lock, wait status") == 2
    assert "driver_killed" not in machine.log.read_text()
    assert machine.ask("inventory")["devices"][0]["suspend_reason"] == ""


@pytest.mark.parametrize("fault", [Fault.CHECKPOINT_FAILS, Fault.CHECKPOINT_FAILS_UNHARMED])
def test_after_a_failed_checkpoint_the_user_reads_that_the_kernel_may_be_damaged(
    machine: Machine, fault: Fault
) -> None:
    worker = machine.session("ada")
    machine.sim.fault(fault, pid=worker.pid)
    moved = machine.ask("suspend", lease="ada")
    assert (moved["refused"], "may be damaged" in moved["reason"]) == ("not_suspendable", True)
    until(lambda: "may be damaged" in machine.of("ada")["suspend_reason"], "the sample says it")
    assert machine.of("ada")["damaged"]
    assert worker.do("check") == ("bad" if fault is Fault.CHECKPOINT_FAILS else "ok")
    other = machine.worker("ada", mib=64)
    machine.stop(signal.SIGKILL)
    machine.start()
    assert machine.of("ada")["damaged"]  # the next helper knows
    worker.kill()
    until(lambda: not machine.of("ada")["damaged"], "the process that may be damaged has ended")
    assert other.do("check") == "ok"


@pytest.mark.parametrize("published", [f"growth={96}MiB,free-delay=700", f"unusable={200}MiB"], indirect=True)
def test_growth_late_frees_and_memory_that_cannot_be_taken_lose_nothing(published: Machine) -> None:
    published.start(examine=True)
    (device,) = published.ask("inventory")["devices"]
    assert device["suspendable"], device["suspend_reason"]
    limit = device["memory_bytes"] - device["reserve_bytes"]
    published.lease("ada", limit)
    published.lease("bo", limit)
    ada = published.worker("ada", mib=(limit - GIB) // MIB)
    assert published.ask("suspend", lease="ada")["done"]
    bo = published.worker("bo", mib=(limit - GIB) // MIB)
    bo.kill()  # its memory comes free later
    moved = published.ask("resume", lease="ada")
    assert moved["done"], moved
    assert ada.do("check") == "ok"


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("575.51.02", "in a container with some of the machine's GPUs"),
        ("575.57.08", "first version"),
        ("580.00.00-simulated", "checkpointed for ever"),
        ("595.80.00", ""),
        ("", ""),
    ],
)
def test_what_is_published_about_a_driver_is_known_by_its_version(version: str, says: str) -> None:
    note = note_of(version)
    assert (says in note.note) if note and says else note is None
    assert all(note.source for note in NOTES)


@pytest.fixture
def odd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with the devices that the test names; no helper yet."""
    yield from machine_in(tmp_path, spec=f"{request.param},host=512GiB")


@pytest.mark.parametrize("odd", ["1xH100-80GB+1xGB10-120GB"], indirect=True)
def test_a_device_that_does_not_say_how_much_memory_it_has_is_left_out_with_a_reason(odd: Machine) -> None:
    """GB10: github.com/XuehaiPan/nvitop pull request 208, NVIDIA-NeMo/RL pull request 2203."""
    odd.start()
    inventory = odd.ask("inventory")
    assert [device["uuid"] for device in inventory["devices"]] == [odd.sim.uuid(0)]
    gb10 = f"Simulated GB10-120GB ({odd.sim.uuid(1)})"
    left_out = f"{gb10} is left out: the driver does not say how much memory it has"
    assert inventory["left_out"] == [left_out]
    assert left_out in odd.log.read_text()
    assert [device["uuid"] for device in odd.ask("sample")["devices"]] == [odd.sim.uuid(0)]
    worker = odd.session("ada")
    assert odd.ask("suspend", lease="ada")["done"]
    odd.resume("ada", worker)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("1xGB10-120GB", "the driver does not say how much memory it has"),
        ("1xH100-80GB,bytes=refused", "the driver does not list its processes"),
    ],
    indirect=["odd"],
)
def test_a_helper_without_a_device_that_can_be_leased_says_why(odd: Machine, reason: str) -> None:
    odd.start()
    inventory = odd.ask("inventory")
    assert inventory["devices"] == odd.ask("sample")["devices"] == []
    (left_out,) = inventory["left_out"]
    assert left_out.endswith(reason)
    with pytest.raises(Refused) as refused:
        odd.lease("ada")
    assert refused.value.kind == "bad_request"


@pytest.mark.parametrize("odd", ["2xH100-80GB"], indirect=True)
def test_a_device_that_is_lost_when_the_helper_starts_keeps_no_other_from_service(odd: Machine) -> None:
    odd.start()
    odd.lease("ada", devices=(0,))
    odd.lease("bo", devices=(1,))
    ada, bo = odd.worker("ada", mib=64), odd.worker("bo", device=1, mib=64)
    assert odd.ask("suspend", lease="ada")["done"]
    odd.stop(signal.SIGKILL)
    odd.sim.fault(Fault.DEVICE_LOST, device=0, count=-1)
    odd.start()
    inventory = odd.ask("inventory")
    assert [device["uuid"] for device in inventory["devices"]] == [odd.sim.uuid(1)]
    assert inventory["left_out"] == ["GPU 0 is left out: it answers GPU is lost"]
    moved = odd.ask("resume", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "busy")
    assert moved["reason"] == "the device is out of service: the device helper left it out at its start"
    assert odd.of("ada")["phase"] == "suspended"
    assert odd.ask("suspend", lease="bo")["done"]
    odd.resume("bo", bo)
    # It is back, and so is the helper.
    odd.sim.clear_faults()
    odd.stop()
    odd.start()
    odd.resume("ada", ada)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users get 304 anyway")
@pytest.mark.parametrize(
    ("published", "code", "cause"),
    [
        ("persistence=off", 800, "persistence mode is off on GPU-"),
        ("checkpoint=none", 304, "this GPU or driver may not support it"),
    ],
    indirect=["published"],
)
def test_a_driver_that_denies_root_names_persistence_mode_or_the_gpu(
    published: Machine, code: int, cause: str
) -> None:
    """NVIDIA/cuda-checkpoint issues 25 and 37: it is not that the helper needs root."""
    published.start()  # its self-test passed once
    worker = published.session("ada")
    moved = published.ask("suspend", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "not_suspendable")
    assert f"failed with code {code} (" in moved["reason"]
    assert f"): {cause}" in moved["reason"]
    assert published.of("ada")["phase"] == "running"
    assert worker.do("alloc 64") == ("999" if code == 800 else "0")  # a checkpoint that fails damages
    until(lambda: cause in published.ask("inventory")["devices"][0]["suspend_reason"], "it is tested again")
    assert "needs root" not in published.log.read_text()
    # The administrator may have mended it: the next helper looks for itself.
    tested = published.log.read_text().count("self-test failed")
    published.stop()
    published.start(examine=True)
    assert published.log.read_text().count("self-test failed") > tested


OLD_DRIVER = """
import pynvml
find = pynvml._nvmlGetFunctionPointer
def of_before_r510(name):
    if name.endswith("RunningProcesses_v3"):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return find(name)
pynvml._nvmlGetFunctionPointer = of_before_r510
"""


@pytest.mark.parametrize("odd", ["1xH100-80GB"], indirect=True)
def test_a_driver_without_a_function_of_nvml_is_said_and_ends_nothing(odd: Machine) -> None:
    odd.start(before=OLD_DRIVER)
    inventory = odd.ask("inventory")
    assert inventory["devices"] == []
    (left_out,) = inventory["left_out"]
    assert left_out.endswith("is left out: it answers Function Not Found")
    assert odd.ask("sample")["at"] > 0
