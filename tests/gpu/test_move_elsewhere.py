"""A suspended lease resumes on another device of its machine: all that belongs to it follows."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases.files import LIMIT_BYTES, LIMIT_DEVICE, LIMIT_HEAD, uuid_bytes
from jupyter_gpushare.gpu.leases.journal import Parked
from jupyter_gpushare.gpu.service.sampler import Sampler
from tests.gpu.containers import engine_cgroup, in_container
from tests.gpu.leases import lease_of
from tests.gpu.machine import GIB, MIB, Machine, Refused, Worker, machine_in, until
from tests.gpu.test_seats import Node
from tests.simulator import Fault

FOUR = "4xH100-80GB,host=512GiB,context=0GiB,free-delay=0"


@pytest.fixture
def unstarted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Four equal devices, between which moves have passed their test; options of the driver by parameter."""
    for machine in machine_in(tmp_path, spec=FOUR + getattr(request, "param", "")):
        machine.movable = True
        yield machine


@pytest.fixture
def four(unstarted: Machine) -> Machine:
    """The same with a helper."""
    unstarted.start()
    return unstarted


def move(machine: Machine, lease: str, *devices: int, **fields: object) -> dict[str, object]:
    """Ask for a resume on these devices."""
    uuids = [machine.uuids()[device] for device in devices]
    return machine.ask("resume", lease=lease, devices=uuids, **fields)


def moves(machine: Machine, lease: str, *devices: int) -> None:
    """Suspend a lease and resume it on these devices."""
    assert machine.ask("suspend", lease=lease)["done"]
    moved = move(machine, lease, *devices)
    assert (moved["done"], moved["devices"]) == (True, [machine.uuids()[d] for d in devices]), moved


def stays(machine: Machine, lease: str, *devices: int) -> None:
    """The lease is suspended on these devices, in the sample and in its limit page."""
    shown, uuids = machine.of(lease), [machine.uuids()[d] for d in devices]
    assert (shown["phase"], shown["devices"], list(shown["saved_bytes"])) == ("suspended", uuids, uuids)
    assert page(machine, lease) == [(uuid_bytes(uuid), uuid_bytes(uuid)) for uuid in uuids]


def page(machine: Machine, lease: str) -> list[tuple[bytes, bytes]]:
    """UUID and name of each device in the limit page."""
    raw = (machine.state_dir / "leases" / lease / "limit").read_bytes()
    assert len(raw) == LIMIT_BYTES
    count = LIMIT_HEAD.unpack_from(raw)[2]
    found = [LIMIT_DEVICE.unpack_from(raw, LIMIT_HEAD.size + i * LIMIT_DEVICE.size) for i in range(count)]
    return [(uuid, name) for uuid, _, _, name, _ in found]


def used(machine: Machine) -> list[int]:
    """MiB in use on each device."""
    return [machine.sim.device_used(device) // MIB for device in range(len(machine.uuids()))]


@pytest.mark.parametrize(
    "unstarted",
    [
        "",
        *(
            pytest.param(odd, marks=pytest.mark.long)
            for odd in (",pairs=used", ",moved-uuid=old", ",growth=64MiB")
        ),
    ],
    indirect=True,
)
def test_memory_account_and_limit_move_with_a_lease(four: Machine) -> None:
    worker = four.session("ada", 2 * GIB)
    assert worker.do("fill 512") == "0"
    four.lease("bo", 2 * GIB, devices=(0,))
    assert four.ask("suspend", lease="ada")["done"]
    bo = four.worker("bo", mib=256)
    moved = move(four, "ada", 1)
    assert (moved["done"], moved["devices"]) == (True, [four.uuids()[1]]), moved
    assert (worker.do("verify"), worker.do("check"), bo.do("check")) == ("ok", "ok", "ok")
    assert used(four)[0] == 256
    assert used(four)[1] >= 576
    # The limit holds on the new device, and what it frees can be taken again.
    assert worker.do("alloc 2000") == "2"
    assert worker.do("alloc 1024") == "0"
    assert used(four)[0] == 256
    four.settled("ada")
    assert list(four.of("ada")["used_bytes"]) == four.of("ada")["devices"] == [four.uuids()[1]]
    assert not [line for line in four.log.read_text().splitlines() if "over_limit" in line]
    # Asking again moves nothing.
    again = move(four, "ada", 1)
    assert (again["done"], again["devices"]) == (True, [four.uuids()[1]])
    # Another restart of everything that can be restarted, and back.
    four.stop(signal.SIGKILL)
    four.start()
    assert four.of("ada")["devices"] == [four.uuids()[1]]
    moves(four, "ada", 0)
    assert worker.do("verify") == "ok"


def test_a_lease_that_runs_does_not_move(four: Machine) -> None:
    worker = four.session("ada")
    moved = move(four, "ada", 1)
    assert (moved["done"], moved["refused"], moved["devices"]) == (False, "busy", [four.uuids()[0]])
    assert worker.do("check") == "ok"


def test_a_new_process_gets_the_device_that_the_lease_moved_to(four: Machine) -> None:
    """It has the old UUID in its environment, and so has its child."""
    worker = four.session("ada", 2 * GIB)
    moves(four, "ada", 3)
    before = used(four)
    spawned = worker.do("spawn 128")
    assert spawned.endswith(" 0"), spawned
    assert four.worker("ada", device=0, mib=64).do("check") == "ok"
    assert [after - then for after, then in zip(used(four), before, strict=True)] == [0, 0, 0, 192]


def test_a_process_without_the_library_on_the_old_device_is_ended(unstarted: Machine) -> None:
    unstarted.start("--watchdog", "stop")
    unstarted.session("ada", 2 * GIB)
    moves(unstarted, "ada", 1)
    stray = unstarted.worker("ada", device=0, mib=1024, preload=False)
    assert stray.process.wait(60) == -signal.SIGTERM
    logged = f"over_limit lease=ada device={unstarted.uuids()[0]}"
    until(lambda: logged in unstarted.log.read_text(), "the watchdog says why")  # after its signal


def test_two_leases_change_their_devices(four: Machine) -> None:
    ada = four.session("ada", 60 * GIB, mib=40 * 1024)
    four.lease("bo", 60 * GIB, devices=(1,))
    bo = four.worker("bo", device=1, mib=30 * 1024)
    for lease in ("ada", "bo"):
        assert four.ask("suspend", lease=lease)["done"]
    assert move(four, "ada", 1)["done"]
    assert move(four, "bo", 0)["done"]
    assert (ada.do("check"), bo.do("check"), used(four)) == ("ok", "ok", [30 * 1024, 40 * 1024, 0, 0])


@pytest.mark.parametrize(
    ("unstarted", "unused"),
    [("", "0"), (",pairs=used", "2"), (",moved-uuid=old", "2")],
    indirect=["unstarted"],
)
def test_each_device_of_a_lease_takes_the_place_of_one(four: Machine, unused: str) -> None:
    """A device that a process has not used is denied where the driver does not say that it has moved."""
    four.lease("ada", 2 * GIB, devices=(0, 1))
    both, one = (four.worker("ada", devices=(0, 1), mib=64) for _ in range(2))
    assert both.do("second 256") == "0"
    for devices, expected in [
        ((3, 2), [0, 0, 256, 128]),
        ((2, 1), [0, 256, 128, 0]),
        ((0, 1), [128, 256, 0, 0]),
    ]:
        moves(four, "ada", *devices)
        assert (both.do("check"), one.do("check"), used(four)) == ("ok", "ok", expected)
    moves(four, "ada", 0, 3)
    assert both.do("second 1900") == "2"
    assert both.do("second 1024") == "0"
    assert used(four) == [128, 0, 0, 1280]
    assert one.do("second 64") == unused
    assert used(four) == [128, 0, 0, 1280 + 64 * (unused == "0")]


def test_a_lease_that_holds_nothing_moves_by_its_limits(four: Machine) -> None:
    four.lease("ada", 2 * GIB)
    moves(four, "ada", 2)
    worker = four.worker("ada", device=0, mib=64)
    assert used(four) == [0, 0, 64, 0]
    assert worker.do("alloc 2048") == "2"


def test_a_lease_that_has_moved_and_begins_anew_is_named_after_its_device(four: Machine) -> None:
    worker = four.session("ada", 2 * GIB)
    moves(four, "ada", 2)
    old, new = (uuid_bytes(four.uuids()[device]) for device in (0, 2))
    four.lease("ada", GIB, devices=(2,))
    assert page(four, "ada") == [(new, old)]
    with pytest.raises(Refused, match="its devices cannot change"):
        four.lease("ada", GIB, devices=(0,))
    worker.kill()
    until(lambda: not four.of("ada")["alive"], "it has ended")
    four.lease("ada", GIB, devices=(2,))
    assert page(four, "ada") == [(new, new)]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ((1, 2), "the lease has 1 devices, not 2"),
        ((7,), "no device"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(four: Machine, devices: tuple[int, ...], reason: str) -> None:
    worker = four.session("ada")
    assert four.ask("suspend", lease="ada")["done"]
    uuids = [four.uuids()[d] if d < 4 else "GPU-00000000-0000-4000-8000-000000000000" for d in devices]
    moved = four.ask("resume", lease="ada", devices=uuids)
    assert (moved["done"], moved["refused"], reason in moved["reason"]) == (False, "busy", True)
    assert moved["devices"] == [four.uuids()[0]]
    with pytest.raises(Refused, match="on the lease's own devices"):
        four.ask("resume", lease="ada", devices=[four.uuids()[1]], unrecorded=True)
    stays(four, "ada", 0)
    four.resume("ada", worker)


def test_no_move_to_another_model_or_where_none_has_passed(tmp_path: Path) -> None:
    for machine in machine_in(tmp_path, spec="1xH100-80GB+1xA100-80GB,host=512GiB"):
        machine.uuids = lambda m=machine: [m.sim.uuid(0), m.sim.uuid(1)]  # type: ignore[method-assign, misc]
        machine.movable = True
        machine.start()
        worker = machine.session("ada")
        assert machine.ask("suspend", lease="ada")["done"]
        assert "not of the model and memory" in str(move(machine, "ada", 1)["reason"])
        stays(machine, "ada", 0)
        machine.resume("ada", worker)


def test_no_move_from_a_device_where_none_has_passed(unstarted: Machine) -> None:
    unstarted.movable = False
    unstarted.start()
    worker = unstarted.session("ada")
    assert unstarted.ask("suspend", lease="ada")["done"]
    moved = move(unstarted, "ada", 1)
    assert (moved["refused"], "takes part in no move" in str(moved["reason"])) == ("busy", True)
    stays(unstarted, "ada", 0)
    unstarted.resume("ada", worker)


def test_no_move_to_a_device_out_of_service(four: Machine) -> None:
    four.hears()
    worker = four.session("ada")
    assert four.ask("suspend", lease="ada")["done"]
    four.sim.fault(Fault.XID, device=1, value=79)
    four.sim.fault(Fault.DEVICE_LOST, device=1)
    until(lambda: not four.ask("sample")["devices"][1]["healthy"], "it is out of service")
    assert "is out of service" in str(move(four, "ada", 1)["reason"])
    stays(four, "ada", 0)
    assert move(four, "ada", 2)["done"]
    assert worker.do("check") == "ok"


def test_a_move_that_the_self_test_proved(tmp_path: Path) -> None:
    for machine in machine_in(tmp_path, spec="2xH100-80GB,host=512GiB"):
        machine.start(examine=True)
        assert [device["movable"] for device in machine.ask("inventory")["devices"]] == [True, True]
        worker = machine.session("ada")
        moves(machine, "ada", 1)
        assert worker.do("check") == "ok"
        assert machine.sim.device_used(0) == 0


def test_no_move_from_the_device_of_a_seat(tmp_path: Path) -> None:
    node = Node(tmp_path, FOUR)
    try:
        node.movable = True
        node.begin()
        node.seat(lease="b1")
        worker = node.session("b1-1")
        assert node.ask("suspend", lease="b1-1")["done"]
        assert "of its seat" in str(move(node, "b1-1", 1)["reason"])
        stays(node, "b1-1", 0)
        node.resume("b1-1", worker)
    finally:
        for seat in node.seats.values():
            seat.kill()
            seat.wait()
        node.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_no_move_of_a_container(four: Machine) -> None:
    with engine_cgroup() as cgroup:
        folder = four.lease("b1-1")
        worker = in_container(four, "b1-1", cgroup=cgroup, mounts=(folder,))
        assert worker.do("alloc 64") == "0"
        until(lambda: four.of("b1-1")["processes"], "it is of the lease")
        assert four.ask("suspend", lease="b1-1")["done"]
        assert "in a container" in str(move(four, "b1-1", 1)["reason"])
        stays(four, "b1-1", 0)
        assert four.ask("resume", lease="b1-1")["done"]
        assert worker.do("check") == "ok"


def test_no_move_of_what_is_walled_in(unstarted: Machine) -> None:
    unstarted.start("--own-device-files")
    worker = unstarted.session("ada")
    assert unstarted.ask("suspend", lease="ada")["done"]
    assert "--own-device-files" in str(move(unstarted, "ada", 1)["reason"])
    listed = unstarted.ask("inventory")["devices"]
    assert all(not d["movable"] and "--own-device-files" in d["move_reason"] for d in listed)
    stays(unstarted, "ada", 0)
    unstarted.resume("ada", worker)


@pytest.mark.parametrize("unstarted", [",listed=initialized"], indirect=True)
def test_no_move_beside_a_process_that_only_opened_the_old_device(four: Machine) -> None:
    worker = four.session("ada")
    script = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0); print('ready 0', flush=True); input()"
    idle = four.worker("ada", command=(sys.executable, "-c", script), wait=False)
    assert idle.answer() == "ready 0"
    assert four.ask("suspend", lease="ada")["done"]
    assert f"process {idle.pid} has opened the device" in str(move(four, "ada", 1)["reason"])
    idle.kill()
    moved = move(four, "ada", 1)
    assert moved["done"], moved
    assert worker.do("check") == "ok"


#: Calls cuInit alone; at a word, makes a context as the runtime does, which no hook sees, and takes 512 MiB.
OPENS = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1"); cuda.cuInit(0)
print("ready 0", flush=True)
for line in sys.stdin:
    cuda.gpushare_sim_retain_unseen(int(line))
    print("took", cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(512 << 20)), flush=True)
"""


@pytest.mark.parametrize(
    "unstarted", [",listed=allocated", ",listed=allocated,moved-uuid=old"], indirect=True
)
def test_a_process_that_only_opened_the_old_device_gets_no_memory_there_after_a_move(four: Machine) -> None:
    worker = four.session("ada", 2 * GIB, mib=64)
    idle = four.worker("ada", command=(sys.executable, "-c", OPENS), wait=False)
    assert idle.answer() == "ready 0"
    moves(four, "ada", 1)
    assert idle.do("0") == "2"
    assert worker.do("check") == "ok"
    assert used(four) == [0, 64, 0, 0]


@pytest.mark.parametrize(
    "unstarted", [",listed=allocated", ",listed=allocated,moved-uuid=old"], indirect=True
)
def test_no_memory_is_charged_to_the_wrong_device_after_a_move(four: Machine) -> None:
    """The device of an ordinal that was not used has another place in the lease now."""
    four.lease("ada", 2 * GIB, devices=(0, 1))
    worker = four.worker("ada", devices=(0, 1), mib=64)
    idle = four.worker("ada", devices=(0, 1), command=(sys.executable, "-c", OPENS), wait=False)
    assert idle.answer() == "ready 0"
    moves(four, "ada", 1, 2)
    assert worker.do("alloc 1900") == "0"
    assert idle.do("1") == "2"
    assert used(four) == [0, 1964, 0, 0]


def test_a_target_without_room_leaves_the_lease_where_it_was(four: Machine) -> None:
    worker = four.session("ada", 70 * GIB, mib=60 * 1024)
    assert four.ask("suspend", lease="ada")["done"]
    four.lease("bo", 70 * GIB, devices=(1,))
    bo = four.worker("bo", device=1, mib=60 * 1024)
    moved = move(four, "ada", 1, timeout_s=0.2)
    assert (moved["refused"], moved["devices"]) == ("no_memory", [four.uuids()[0]])
    stays(four, "ada", 0)
    bo.kill()
    moved = move(four, "ada", 1)
    assert moved["done"], moved
    assert worker.do("check") == "ok"


#: The driver refuses to bring the process of each second call to another device.
SECOND_REFUSED = """
import itertools
from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
restore, count, refused = Checkpoint.restore, itertools.count(1), set()
def refusing(self, pid, timeout_s, moves={}):
    if pid in refused or (next(count) == 2 and not refused.add(pid)):
        raise DeviceError("cuCheckpointProcessRestore", 1, "CUDA_ERROR_INVALID_VALUE")
    restore(self, pid, timeout_s, moves)
Checkpoint.restore = refusing
"""


@pytest.mark.parametrize("back", [0, 1, 2])
def test_a_failed_restore_leaves_the_lease_on_its_own_devices(four: Machine, back: int) -> None:
    """One process was on the new device already: the driver has it to be restored from there, from now on."""
    four.lease("ada", 4 * GIB)
    workers = [four.worker("ada", mib=64) for _ in range(2)]
    assert four.ask("suspend", lease="ada")["done"]
    four.stop()
    four.start(before=SECOND_REFUSED)
    moved = move(four, "ada", 1)
    assert (moved["refused"], moved["devices"]) == ("not_suspendable", [four.uuids()[0]])
    stays(four, "ada", 0)
    assert used(four) == [0, 0, 0, 0]
    assert [each.device for each in four.sim.ledger() if each.event == "restore"] == [1]
    four.stop(signal.SIGKILL)
    four.start()
    moved = move(four, "ada", back)
    assert moved["done"], moved
    assert [each.do("check") for each in workers] == ["ok", "ok"]
    assert used(four) == [128 * (device == back) for device in range(4)]


def test_processes_that_were_checkpointed_on_different_devices_come_together() -> None:
    """One was restored on the new device before the move failed."""
    lease = lease_of("ada", {"a": 5, "b": 6}, guaranteed={"a": 1})
    lease.parked = {
        (pid, 1): Parked(pid=pid, start_ticks=1, saved_bytes={"a": pid, "b": 1}) for pid in (1, 2)
    }
    lease.put_on(("c", "b"))
    assert (lease.limits, lease.asked.guaranteed) == ({"c": 5, "b": 6}, {"c": 1})
    assert {each.devices for each in lease.parked.values()} == {("a", "b")}
    lease.parked[1, 1] = Parked(pid=1, start_ticks=1, saved_bytes={"c": 1, "b": 1})  # it has arrived
    lease.put_on(("a", "b"))
    assert [(each.devices, each.saved_bytes["a"]) for each in lease.parked.values()] == [
        (("c", "b"), 1),
        ((), 2),
    ]
    lease.put_on(("b", "a"))
    assert (lease.limits, lease.peak_limits["b"]) == ({"b": 5, "a": 6}, 5)


WHILE_MOVING = [
    "before restore 1", "after restore 1", "after restore 2", "after unlock 1", "after unlock 2",
    "after phase resuming", "after phase running",
]  # fmt: skip


@pytest.mark.parametrize("point", WHILE_MOVING)
def test_killed_while_moving(unstarted: Machine, point: str) -> None:
    four = unstarted
    four.start()
    four.lease("ada", 4 * GIB, devices=(0,))
    workers = [four.worker("ada", mib=64) for _ in range(2)]
    assert four.ask("suspend", lease="ada")["done"]
    four.stop(signal.SIGKILL)
    four.start(die=point)
    device = four.uuids()[1]
    four.client().send(f'{{"verb":"resume","epoch":1,"lease":"ada","devices":["{device}"]}}\n'.encode())
    four.died()
    four.start()
    until(lambda: four.of("ada")["phase"] in ("running", "suspended"), "settled")
    if four.of("ada")["phase"] == "suspended":
        stays(four, "ada", 0)
        assert used(four) == [0, 0, 0, 0]
        assert move(four, "ada", 1)["done"]
    assert four.of("ada")["devices"] == [device]
    assert [each.do("check") for each in workers] == ["ok", "ok"]
    assert used(four) == [0, 128, 0, 0]
    assert page(four, "ada") == [(uuid_bytes(device), uuid_bytes(four.uuids()[0]))]
    assert four.worker("ada", device=0, mib=64).do("check") == "ok"
    assert used(four) == [0, 192, 0, 0]
    moves(four, "ada", 0)
    assert [each.do("check") for each in workers] == ["ok", "ok"]


@pytest.mark.parametrize("then", ["done", "undone"])
@pytest.mark.parametrize("room", [True, False])
def test_killed_within_a_restore_on_another_device(tmp_path: Path, then: str, room: bool) -> None:
    """Some of its processes are there and some are not: all end on the same devices."""
    spec = FOUR + f",copy=1GB/s,caller-dies={then}"
    for machine in machine_in(tmp_path, spec=spec):
        machine.movable = True
        machine.start()
        machine.lease("ada", 70 * GIB)
        workers = [machine.worker("ada", mib=256) for _ in range(2)]
        assert machine.ask("suspend", lease="ada")["done"]
        device = machine.uuids()[1]
        machine.client().send(
            f'{{"verb":"resume","epoch":1,"lease":"ada","devices":["{device}"]}}\n'.encode()
        )
        until(lambda m=machine: m.sim.device_used(1) > 0, "the copy begins")
        machine.stop(signal.SIGKILL)
        if not room:
            # Another process takes what is free there.
            taken = machine.worker("", device=1)
            assert taken.do("alloc 78000") == "0"
        machine.start()
        until(lambda m=machine: m.of("ada")["phase"] in ("running", "suspended"), "settled")
        shown = machine.of("ada")
        if shown["phase"] == "suspended":
            stays(machine, "ada", 0)
            assert machine.ask("resume", lease="ada")["done"]
        place = machine.uuids().index(machine.of("ada")["devices"][0])
        assert [each.do("check") for each in workers] == ["ok", "ok"]
        assert machine.sim.device_used(place) // MIB in (512, 512 + 78000)
        assert machine.sim.device_used(1 - place) // MIB in (0, 78000)


def test_what_a_restore_left_on_the_old_device_is_suspended_again(four: Machine) -> None:
    """A driver that takes the list and ignores it: the memory is not where its room was reserved."""
    worker = four.session("ada")
    assert four.ask("suspend", lease="ada")["done"]
    four.stop()
    four.start(
        before="""
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
restore = Checkpoint.restore
Checkpoint.restore = lambda self, pid, timeout_s, moves={}: restore(self, pid, timeout_s)
"""
    )
    moved = move(four, "ada", 1)
    assert (moved["refused"], "did not move it" in str(moved["reason"])) == ("not_suspendable", True), moved
    stays(four, "ada", 0)
    four.resume("ada", worker)


def failed_half_way(machine: Machine, before: str) -> list[Worker]:
    """Two processes of a lease whose move to device 1 failed after one of them was there."""
    machine.lease("ada", 70 * GIB)
    workers = [machine.worker("ada", mib=256) for _ in range(2)]
    assert machine.ask("suspend", lease="ada")["done"]
    machine.stop()
    machine.start(before=before)
    assert not move(machine, "ada", 1)["done"]
    stays(machine, "ada", 0)
    assert used(machine) == [0, 0, 0, 0]
    machine.stop(signal.SIGKILL)
    return workers


def test_what_a_failed_move_left_elsewhere_goes_back_though_the_helper_is_killed(four: Machine) -> None:
    """It is suspended again on the lease's own device: the next resume must not look for it on the other."""
    workers = failed_half_way(four, SECOND_REFUSED)
    four.start(die="after restore 1")
    four.client().send(b'{"verb":"resume","epoch":1,"lease":"ada"}\n')
    four.died()
    taken = four.worker("", device=0)
    assert taken.do("alloc 81000") == "0"
    four.start()
    until(lambda: four.of("ada")["phase"] == "suspended", "settled")
    taken.kill()
    resumed = four.ask("resume", lease="ada")
    assert resumed["done"], resumed
    assert [each.do("check") for each in workers] == ["ok", "ok"]
    assert used(four) == [512, 0, 0, 0]


#: The driver does not say once where a process is that it has restored, and restores no second one.
UNKNOWN_PLACE = """
from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.moves.steps import ProcessMoves
restore, on_devices, restored, silent = Checkpoint.restore, ProcessMoves.on_devices, [], []
def restoring(self, pid, timeout_s, moves={}):
    if restored and pid != restored[0]:
        raise DeviceError("cuCheckpointProcessRestore", 1, "CUDA_ERROR_INVALID_VALUE")
    restore(self, pid, timeout_s, moves)
    restored.append(pid)
def asked(self, lease):
    if restored and not silent:
        silent.append(pid := restored[0])
        raise DeviceError("nvmlDeviceGetComputeRunningProcesses", -3, "no answer in time")
    return on_devices(self, lease)
Checkpoint.restore, ProcessMoves.on_devices = restoring, asked
"""


def test_a_move_is_undone_where_the_driver_does_not_say_whether_it_was_made(four: Machine) -> None:
    workers = failed_half_way(four, UNKNOWN_PLACE)
    four.start()
    resumed = four.ask("resume", lease="ada")
    assert resumed["done"], resumed
    assert [each.do("check") for each in workers] == ["ok", "ok"]
    assert used(four) == [512, 0, 0, 0]


@pytest.mark.parametrize(("code", "refused"), [(1, "not_suspendable"), (600, "busy")])
def test_only_a_move_that_the_driver_will_never_make_is_refused_for_good(
    four: Machine, code: int, refused: str
) -> None:
    """Going back is not: it is asked again until it succeeds."""
    failed_half_way(four, SECOND_REFUSED)
    four.start(
        before=f"""
from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
def refusing(self, pid, timeout_s, moves={{}}):
    raise DeviceError("cuCheckpointProcessRestore", {code}, "refused")
Checkpoint.restore = refusing
"""
    )
    assert move(four, "ada", 2)["refused"] == refused
    assert four.ask("resume", lease="ada")["refused"] == "busy"
    stays(four, "ada", 0)


def test_contexts_measured_before_a_move_are_not_charged_after_it(tmp_path: Path) -> None:
    """One of its devices is another by then: what was measured on the first is charged to no other."""
    lease = lease_of("ada", {"a": GIB, "b": GIB})
    page: list[tuple[int, int]] = []
    lease.files = SimpleNamespace(set_context=lambda *charged: page.append(charged))  # type: ignore[assignment]
    lease.contexts = {"a": 1, "b": 2}

    def moving(devices: Any) -> dict[str, int]:
        measured = dict.fromkeys(devices, GIB)
        lease.put_on(("a", "c"))
        return measured

    sampler: Any = SimpleNamespace(_states=SimpleNamespace(contexts=moving))
    account: Any = SimpleNamespace(held=dict)
    Sampler._charge_contexts(sampler, lease, account)
    assert (lease.contexts, page) == ({"a": GIB, "c": 2}, [(0, GIB)])
