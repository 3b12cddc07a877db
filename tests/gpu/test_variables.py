"""Processes with changed variables, beside a real helper: the cases of docs/isolation.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import GIB, PATIENCE_S, WORKER, Machine, Worker, open_machine, until

PAGE = Path(__file__).parents[2] / "docs/isolation.md"
ANOTHER = 41_001 if os.geteuid() == 0 else os.geteuid()
# A process that holds some memory as another user, whom the interpreter's own files may be closed to.
HIDDEN = """
import os, sys
sys.path.insert(0, os.path.dirname(sys.argv[2]))
import worker
if os.geteuid() == 0:
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
worker.main()
"""
NOT_LOADED = "a process in it does not load the library that limits memory"


@pytest.fixture
def site() -> Iterator[Machine]:
    """Two GPUs, whose simulated state every user may open; ada has 20 GiB of the second."""
    yield from open_machine(spec="2xH100-80GB,host=512GiB")


def begin(site: Machine, *arguments: str) -> Worker:
    """Start the helper, and a session of ada that holds memory."""
    site.start(*arguments)
    site.lease("ada", 20 * GIB, devices=(1,))
    return site.worker("ada", device=1, mib=64)


def lend(site: Machine) -> Worker:
    """Put ada to sleep, and let bo work on her GPU."""
    assert site.ask("suspend", lease="ada")["done"]
    site.lease("bo", 60 * GIB, devices=(1,))
    return site.worker("bo", device=1, mib=1024)


def of_lease(site: Machine, lease: str) -> set[int]:
    """The processes of a lease in the last sample."""
    return {process["pid"] for process in site.of(lease)["processes"]}


def closed(site: Machine) -> list[bool]:
    """Whether each GPU takes nothing new."""
    return [bool(device["closed"]) for device in site.ask("sample")["devices"]]


def over(site: Machine) -> list[tuple[str, int]]:
    """GPUs on which ada has more than was granted, with the process that holds the most."""
    found: list[dict[str, Any]] = site.of("ada")["over"]
    return [(each["device"], each["pid"]) for each in found]


def test_the_page_names_every_case_and_no_other() -> None:
    part = PAGE.read_text().split("### Variables of a lease", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`(test_\w+)` \|$", part, re.MULTILINE)
    here = [name for name in globals() if name.startswith("test_")]
    assert named == [name for name in here if "page" not in name]
    assert len(named) == 12


def test_without_the_name_it_is_limited_and_sleeps(site: Machine) -> None:
    leader = begin(site)
    second = site.worker("ada", device=1, mib=1024, changes={"GPUSHARE_LEASE": None})
    assert second.do("alloc 20480") == "2"
    assert site.ask("suspend", lease="ada")["done"]
    assert site.sim.device_used(1) == 0
    site.resume("ada", leader)
    assert second.do("check") == "ok"


def test_another_name_changes_nothing(site: Machine) -> None:
    leader = begin(site)
    site.lease("eve", 60 * GIB)
    second = site.worker("ada", device=1, mib=1024, changes={"GPUSHARE_LEASE": "eve"})
    assert second.do("alloc 20480") == "2"
    assert (second.pid in of_lease(site, "ada"), of_lease(site, "eve")) == (True, set())
    assert site.ask("suspend", lease="ada")["done"]
    site.resume("ada", leader)
    assert second.do("check") == "ok"


def test_another_folder_is_another_lease(site: Machine) -> None:
    begin(site)
    folder = site.lease("bo", 4 * GIB)
    changes = {"GPUSHARE_LEASE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": None}
    worker = site.worker("ada", wait=False, changes=changes)
    assert worker.answer() == "ready 0"
    assert (worker.do("alloc 1024"), worker.do("alloc 4096")) == ("0", "2")
    until(lambda: worker.pid in of_lease(site, "bo"), "it belongs to the lease of its folder")
    assert (worker.pid in of_lease(site, "ada"), closed(site)) == (False, [False, False])


def test_variables_of_an_ended_lease_leave_it_with_its_parent(site: Machine) -> None:
    leader = begin(site)
    folder = site.state_dir / "leases" / "old-1"
    said = leader.do(f"changed 64 GPUSHARE_LEASE=old-1 GPUSHARE_LEASE_DIR={folder} LD_PRELOAD")
    child, code = said.split()
    assert code == "0"
    until(lambda: int(child) in of_lease(site, "ada"), "it belongs to the lease of its parent")


def test_an_empty_environment_within_the_limit_keeps_the_lease_awake(site: Machine) -> None:
    leader = begin(site)
    child, code = leader.do("bare 64").split()
    assert code == "0"
    until(lambda: int(child) in of_lease(site, "ada"), "it belongs to the lease of its parent")
    until(lambda: NOT_LOADED in site.of("ada")["suspend_reason"], "the lease says why it stays awake")
    assert (over(site), closed(site)) == ([], [False, False])


def test_an_empty_environment_on_anothers_gpu_closes_that_gpu(site: Machine) -> None:
    leader = begin(site)
    child, code = leader.do("bare 512 PATH").split()
    assert code == "0"
    until(lambda: over(site) == [(site.uuids()[0], int(child))], "the lease says so")
    assert closed(site) == [True, False]
    os.kill(int(child), signal.SIGKILL)
    until(lambda: (over(site), closed(site)) == ([], [False, False]), "it is over with the process")
    assert leader.do("check") == "ok"


@pytest.mark.parametrize("watchdog", ["warn", "stop"])
def test_another_library_beyond_the_limit_is_named_and_ended(site: Machine, watchdog: str) -> None:
    leader = begin(site, "--watchdog", watchdog)
    watch = site.watch()
    second = site.worker("ada", device=1, changes={"LD_PRELOAD": "libm.so.6"})
    second.tell("alloc 30720")
    event = watch.event("over_limit", "ada")
    assert event
    assert (event["fields"]["pid"], event["fields"]["action"]) == (str(second.pid), watchdog)
    if watchdog == "warn":
        until(lambda: over(site) == [(site.uuids()[1], second.pid)], "the lease names it")
        assert closed(site) == [False, True]
    else:
        assert second.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert leader.do("check") == "ok"


def test_a_process_that_hides_whole_closes_its_gpu(site: Machine) -> None:
    begin(site)
    limits = {site.uuids()[0]: GIB}
    site.ask("set_limit", lease="eve", uid=ANOTHER, limits=limits)
    # Its parent is this test, of no lease; its GPU is ada's.
    command = [sys.executable, "-c", HIDDEN, "512", str(WORKER), str(ANOTHER)]
    env = site.environment | {"CUDA_VISIBLE_DEVICES": site.uuids()[1]}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as hidden:
        try:
            assert hidden.stdout
            assert hidden.stdout.readline() == b"held 0\n"
            until(lambda: closed(site) == [False, True], "its GPU takes nothing new")
            (shown,) = site.ask("sample")["devices"][1]["unleased"]
            assert (shown["pid"], shown["uid"]) == (hidden.pid, ANOTHER)
        finally:
            hidden.kill()
    until(lambda: closed(site) == [False, False], "it is over with the process")


def test_a_new_process_waits_while_the_lease_sleeps(site: Machine) -> None:
    leader = begin(site)
    lend(site)
    used = site.sim.device_used(1)
    second = site.worker("ada", device=1, wait=False)
    assert second.answer(1.0) == ""
    assert site.sim.device_used(1) == used
    site.resume("ada", leader)
    assert second.answer() == "ready 0"


def test_without_the_name_it_waits_too(site: Machine) -> None:
    leader = begin(site)
    lend(site)
    used = site.sim.device_used(1)
    changes = {"GPUSHARE_LEASE": None, "CUDA_VISIBLE_DEVICES": "0"}
    second = site.worker("ada", wait=False, changes=changes)
    assert second.answer(1.0) == ""
    assert (site.sim.device_used(0), site.sim.device_used(1), over(site)) == (0, used, [])
    site.resume("ada", leader)
    assert second.answer() == "ready 0"
    until(lambda: second.pid in of_lease(site, "ada"), "it belongs to the lease")


@pytest.mark.parametrize("watchdog", ["warn", "stop"])
def test_an_empty_environment_on_a_lent_gpu_is_ended_alone(site: Machine, watchdog: str) -> None:
    leader = begin(site, "--watchdog", watchdog)
    borrower = lend(site)
    watch = site.watch()
    child, _ = leader.do("bare 512").split()
    event = watch.event("over_limit", "ada")
    assert event
    assert event["fields"]["pid"] == child
    assert "of a device that is lent" in event["reason"]
    if watchdog == "warn":
        assert (over(site), closed(site)) == ([(site.uuids()[1], int(child))], [False, True])
        os.kill(int(child), signal.SIGTERM)
    until(lambda: (over(site), closed(site)) == ([], [False, False]), "it is over with the process")
    assert borrower.do("check") == "ok"
    site.resume("ada", leader)


def test_an_emptied_environment_loses_nothing(site: Machine) -> None:
    leader = begin(site)
    borrower = lend(site)
    assert leader.do("clear") == "0"
    site.stop(signal.SIGKILL)
    site.start()
    until(lambda: bool(site.of("ada")["saved_bytes"]), "its memory is still its own")
    borrower.kill()
    site.resume("ada", leader)
    assert leader.do("alloc 20480") == "2"
