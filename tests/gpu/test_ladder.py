"""Each level is offered where it was seen to hold, with the reason where not; leases are told theirs."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.backends.helper_client import HelperClient, SocketAddress
from jupyter_gpushare.backends.local import LocalDevices, holder_environment
from jupyter_gpushare.gpu.driver.ladder import ladder_of, level_of, strongest, weakest
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases import cgroup_limits
from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.gpu.os.cgroups import Cgroups
from jupyter_gpushare.procfs import start_ticks
from jupyter_gpushare.protocol.helper import Level, SetLimit
from tests.gpu.leases import lease_of, process_of
from tests.gpu.machine import GIB, Machine, machine_in, until
from tests.systemd import cgroup2

# ---- into the cgroup of a lease go its own processes, and none that has taken over the pid of one


@pytest.mark.parametrize("later", [0, 1], ids=["its own", "another one's"])
def test_only_the_very_process_is_put_into_a_leases_cgroup(tmp_path: Path, later: int) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.procs").touch()
    nvml: Any = SimpleNamespace(set_memory_limits=lambda *limits: None)
    processes = Processes(tmp_path)
    cgroups = Cgroups(root, nvml)
    lease = lease_of(limits={"GPU-1": 1})
    cgroup_limits.limit(lease, cgroups)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        # The one that was seen may have ended since, and its pid may have gone to another.
        seen = start_ticks(child.pid) - later
        lease.processes = (process_of(child.pid, seen),)
        cgroup_limits.place(lease, cgroups, processes)
        members = cgroups.path("ada") / "cgroup.procs"
        written = members.read_text() if members.exists() else ""
        assert written == ("" if later else f"{child.pid}\n")
        child.communicate()


# ---- test ladder -------------------------------------------------------------

WHOLE = DriverGpu("GPU-1", 0, "H100", 80 * GIB, mig=False, island="")
INSTANCE = DriverGpu("MIG-1", 0, "H100 MIG 1g.10gb", 10 * GIB, mig=True, island="", profile="1g.10gb")


def offered(machine: Machine, index: int = 0) -> dict[str, str]:
    """Level -> why it is not offered, "" where it is."""
    rungs = machine.ask("inventory")["devices"][index]["ladder"]
    return {rung["level"]: "" if rung["offered"] else rung["reason"] for rung in rungs}


def test_a_plain_device_offers_the_whole_and_the_library(bare: Machine) -> None:
    bare.start(examine=True)
    assert offered(bare) == {
        "whole_gpu": "",
        "mig": "the GPU is not in MIG mode",
        "cgroup": "the helper was started without --cgroup-root",
        "preload": "",
        "hints": "",
    }
    memory = bare.ask("inventory")["devices"][0]
    bare.lease("half", 40 * GIB)
    bare.lease("all", memory["memory_bytes"] - memory["reserve_bytes"])
    assert (bare.of("half")["level"], bare.of("all")["level"]) == ("preload", "whole_gpu")


def test_a_driver_that_limits_no_cgroups_says_so(bare: Machine, tmp_path: Path) -> None:
    bare.start("--cgroup-root", str(fake_root(tmp_path)), examine=True)
    assert "not offered by this driver" in offered(bare)["cgroup"]
    assert bare.ask("inventory")["devices"][0]["level"] == "preload"


def test_a_root_that_is_no_cgroup_is_named(bare: Machine, tmp_path: Path) -> None:
    bare.start("--cgroup-root", str(tmp_path), examine=True)
    assert "is no cgroup" in offered(bare)["cgroup"]


def fake_root(tmp_path: Path) -> Path:
    """A folder that looks like a cgroup: the simulated driver reads its members from the file."""
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.procs").touch()
    return root


@pytest.fixture
def limiting(tmp_path: Path) -> Iterator[tuple[Machine, Path]]:
    """A machine with a driver that limits cgroups, and the root given to the helper."""
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,cgroup"):
        root = fake_root(tmp_path)
        machine.start("--cgroup-root", str(root), examine=True)
        yield machine, root


def test_the_drivers_own_limit_holds_without_the_library(limiting: tuple[Machine, Path]) -> None:
    machine, root = limiting
    assert offered(machine)["cgroup"] == ""
    machine.lease("ada", 8 * GIB, guaranteed={machine.uuids()[0]: 2 * GIB})
    assert machine.of("ada")["level"] == "cgroup"
    assert machine.sim.group(0, root / "gpushare-ada") == (2 * GIB, 8 * GIB)
    first = machine.worker("ada", preload=False)
    second = machine.worker("ada", preload=False, mib=64)
    members = root / "gpushare-ada" / "cgroup.procs"
    until(
        lambda: {first.pid, second.pid} <= {int(pid) for pid in members.read_text().split()}, "both are in it"
    )
    assert first.do(f"alloc {4 * 1024}") == "0"
    assert second.do(f"alloc {4 * 1024}") == "2"
    assert second.do(f"alloc {2 * 1024}") == "0"
    # What they start is in it from its first instruction on, whatever its environment says.
    assert first.do(f"spawn {4 * 1024}").split()[1] == "2"
    machine.lease("ada", 16 * GIB)
    assert second.do(f"alloc {4 * 1024}") == "0"
    assert machine.ask("drop", lease="ada")["known"]
    assert machine.sim.group(0, root / "gpushare-ada") is None


async def test_the_driver_keeps_for_a_lease_what_the_broker_guarantees_it(
    limiting: tuple[Machine, Path],
) -> None:
    machine, root = limiting
    gpu = machine.uuids()[0]
    devices = LocalDevices(HelperClient(SocketAddress(machine.socket), lambda: 1))
    for handle, limit, guaranteed in (("owner", 8 * GIB, 8 * GIB), ("borrower", 4 * GIB, 0)):
        limits, kept = {gpu: limit}, {gpu: guaranteed}
        await devices.prepare(SetLimit(lease=handle, uid=os.geteuid(), limits=limits, guaranteed=kept))
    await devices.close()
    assert machine.sim.group(0, root / "gpushare-owner") == (8 * GIB, 8 * GIB)
    assert machine.sim.group(0, root / "gpushare-borrower") == (0, 4 * GIB)


def test_the_driver_guarantees_a_sleeper_nothing_of_what_it_has_lent(limiting: tuple[Machine, Path]) -> None:
    machine, root = limiting
    machine.lease("ada", 8 * GIB)
    machine.worker("ada", mib=64)
    group = root / "gpushare-ada"
    assert machine.sim.group(0, group) == (8 * GIB, 8 * GIB)
    assert machine.ask("suspend", lease="ada")["done"]
    assert machine.sim.group(0, group) == (0, 8 * GIB)
    assert machine.ask("resume", lease="ada")["done"]
    assert machine.sim.group(0, group) == (8 * GIB, 8 * GIB)
    machine.lease("next", 4 * GIB, suspended=True)
    assert machine.sim.group(0, root / "gpushare-next") == (0, 4 * GIB)


def test_a_driver_that_takes_a_limit_and_does_not_keep_it_is_found_out(tmp_path: Path) -> None:
    """The self-test's child is put into another cgroup than the limited one."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        "from pathlib import Path; from jupyter_gpushare.gpu.os.cgroups import Cgroups\n"
        "make = Cgroups.make\n"
        f"Cgroups.make = lambda *given: make(*given) and Path({str(elsewhere)!r})"
    )
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,cgroup"):
        machine.start("--cgroup-root", str(fake_root(tmp_path)), examine=True, before=code)
        assert offered(machine)["cgroup"] == "the driver granted a cgroup more than its limit"
        machine.lease("ada", 8 * GIB)
        assert machine.of("ada")["level"] == "preload"


def test_a_limit_of_the_driver_outlives_the_helper_and_what_was_dropped_is_cleared(
    limiting: tuple[Machine, Path],
) -> None:
    machine, root = limiting
    machine.lease("ada", 8 * GIB)
    machine.stop()
    left = root / "gpushare-gone"
    left.mkdir()
    assert machine.sim.group(0, root / "gpushare-ada") == (8 * GIB, 8 * GIB)
    machine.offered = (Level.WHOLE_GPU, Level.CGROUP, Level.PRELOAD, Level.HINTS)
    machine.start("--cgroup-root", str(root))
    until(lambda: machine.of("ada")["level"] == "cgroup", "it is in force again")
    assert not left.exists()


def test_a_lease_that_could_not_be_placed_is_not_called_limited(limiting: tuple[Machine, Path]) -> None:
    machine, root = limiting
    machine.lease("ada", 8 * GIB)
    members = root / "gpushare-ada" / "cgroup.procs"
    members.mkdir()  # nothing can be written to it, by root neither
    machine.worker("ada", mib=64)
    until(lambda: machine.of("ada")["level"] == "preload", "it is said")


def test_real_cgroups_take_the_processes_of_a_lease(tmp_path: Path) -> None:
    # No other run may have the same; and no lease is called so.
    root = cgroup2() / f"gpushare_test_{uuid.uuid4().hex}"
    try:
        root.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here, which needs root: {error}")
    try:
        for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,cgroup"):
            real_cgroup(machine, root)
    finally:
        for left in root.glob("gpushare-*"):
            left.rmdir()
        root.rmdir()


def real_cgroup(machine: Machine, root: Path) -> None:
    machine.offered = (Level.CGROUP, Level.PRELOAD, Level.HINTS)
    machine.start("--cgroup-root", str(root))
    machine.lease("ada", 8 * GIB)
    until(lambda: machine.of("ada")["level"] == "cgroup", "it is limited")
    worker = machine.worker("ada", preload=False, mib=64)
    own = Path(f"/proc/{worker.pid}/cgroup")
    until(lambda: "/gpushare-ada" in own.read_text(), "it is in the cgroup")
    child = int(worker.do("spawn 64").split()[0])
    assert "/gpushare-ada" in Path(f"/proc/{child}/cgroup").read_text()
    assert worker.do(f"alloc {9 * 1024}") == "2"
    worker.kill()
    subprocess.run(["kill", "-9", str(child)], check=False)
    until(lambda: not machine.of("ada")["alive"], "both have ended")
    until(lambda: not (root / "gpushare-ada" / "cgroup.procs").read_text(), "the cgroup is empty")
    assert machine.ask("drop", lease="ada")["known"]
    assert not (root / "gpushare-ada").exists()


def test_mig_instances_are_devices_by_profile(tmp_path: Path) -> None:
    for machine in machine_in(tmp_path, spec="2xH100 MIG 1g.10gb-10GB,host=512GiB,mig"):
        machine.start(examine=True)
        devices = machine.ask("inventory")["devices"]
        assert [(d["profile"], d["level"], d["suspendable"]) for d in devices] == [
            ("1g.10gb", "mig", False)
        ] * 2
        assert devices[0]["uuid"].startswith("MIG-")
        assert offered(machine) == {
            "whole_gpu": "it is a MIG instance",
            "mig": "",
            "cgroup": "the driver does not limit cgroups on MIG instances",
            "preload": "not needed beside MIG",
            "hints": "",
        }
        machine.lease("ada", 9 * GIB)
        assert machine.of("ada")["level"] == "mig"
        worker = machine.worker("ada", mib=64)
        assert worker.do("check") == "ok"
        assert "MIG" in machine.ask("suspend", lease="ada")["reason"]


def test_an_instance_that_gives_more_than_it_says_is_no_level(tmp_path: Path) -> None:
    """What the driver says about it is a quarter of what it gives."""
    code = (
        "import dataclasses; from jupyter_gpushare.gpu.driver import nvml; find = nvml._find\n"
        "def lies():\n"
        "    driver, found, left_out = find()\n"
        "    return driver, [(dataclasses.replace(gpu, memory_bytes=gpu.memory_bytes // 4), at)\n"
        "                    for gpu, at in found], left_out\n"
        "nvml._find = lies"
    )
    for machine in machine_in(tmp_path, spec="1xH100 MIG 1g.10gb-10GB,host=512GiB,mig"):
        machine.start(examine=True, before=code)
        assert offered(machine)["mig"] == "more than the instance's memory was granted"
        (device,) = machine.ask("inventory")["devices"]
        assert (device["level"], device["suspendable"]) == ("hints", False)
        machine.lease("ada", 2 * GIB)
        assert machine.of("ada")["level"] == "hints"


def test_a_limit_of_the_library_that_does_not_hold_is_not_offered(bare: Machine, tmp_path: Path) -> None:
    """The library is loaded, but a copy of it that knows no lease."""
    code = (
        "from pathlib import Path; from jupyter_gpushare import native;"
        f"native.preload_path = lambda: Path({str(tmp_path / 'empty.so')!r})"
    )
    (tmp_path / "empty.c").write_text("int gpushare_nothing;\n")
    subprocess.run(["cc", "-shared", "-o", "empty.so", "empty.c"], cwd=tmp_path, check=True, timeout=60)
    bare.start(examine=True, before=code)
    assert "did not keep the child within its limit" in offered(bare)["preload"]
    assert bare.ask("inventory")["devices"][0]["level"] == "hints"
    bare.lease("ada", 8 * GIB)
    assert bare.of("ada")["level"] == "hints"


def test_frameworks_that_would_take_all_at_start_are_asked_not_to_whatever_the_level() -> None:
    environment = holder_environment("ada", "/leases/ada", {"GPU-1": 8 * GIB})
    asked = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert environment | asked == environment


def test_the_strongest_level_is_for_a_part_and_a_lease_has_the_weakest_of_its_devices() -> None:
    rungs = ladder_of(WHOLE, {Level.WHOLE_GPU: "", Level.CGROUP: "", Level.PRELOAD: ""})
    assert [rung.level for rung in rungs] == list(Level)
    assert strongest(rungs) is Level.CGROUP
    assert level_of(rungs, whole=False, in_cgroup=True) is Level.CGROUP
    assert level_of(rungs, whole=False, in_cgroup=False) is Level.PRELOAD
    assert level_of(rungs, whole=True, in_cgroup=False) is Level.WHOLE_GPU
    assert level_of((), whole=True, in_cgroup=True) is Level.HINTS
    cut = ladder_of(INSTANCE, {Level.MIG: ""})
    assert level_of(cut, whole=False, in_cgroup=False) is Level.MIG
    assert weakest([Level.MIG, Level.PRELOAD, Level.WHOLE_GPU]) is Level.PRELOAD
    assert weakest([]) is Level.HINTS


def test_the_driver_s_limit_moves_with_a_lease(tmp_path: Path) -> None:
    for machine in machine_in(tmp_path, spec="2xH100-80GB,host=512GiB,cgroup"):
        root = fake_root(tmp_path)
        machine.movable, machine.offered = True, (*machine.offered, Level.CGROUP)
        machine.start("--cgroup-root", str(root))
        limited_on_both(machine, root / "gpushare-ada")


def limited_on_both(machine: Machine, group: Path) -> None:
    machine.lease("ada", 8 * GIB, guaranteed={machine.uuids()[0]: 2 * GIB})
    worker = machine.worker("ada", preload=False, mib=64)
    until(lambda: str(worker.pid) in (group / "cgroup.procs").read_text(), "it is in its cgroup")
    assert machine.ask("suspend", lease="ada")["done"]
    assert machine.ask("resume", lease="ada", devices=[machine.uuids()[1]])["done"]
    assert [machine.sim.group(device, group) for device in (0, 1)] == [None, (2 * GIB, 8 * GIB)]
    assert (worker.do("check"), worker.do(f"alloc {8 * 1024}")) == ("ok", "2")
    assert machine.ask("drop", lease="ada")["known"]
    assert machine.sim.group(1, group) is None
