"""More memory than granted, and processes without a lease."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.checks import watchdog as watchdog_module
from jupyter_gpushare.gpu.checks.unleased import StopRules, UnleasedProcesses
from jupyter_gpushare.gpu.checks.watchdog import Watchdog
from jupyter_gpushare.gpu.driver.nvml import DeviceReading
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases import files
from jupyter_gpushare.gpu.leases.holders import Holders
from jupyter_gpushare.gpu.leases.lease import parked_of
from jupyter_gpushare.native import build
from jupyter_gpushare.procfs import start_ticks
from jupyter_gpushare.protocol.helper import Phase, WatchdogAction
from tests.gpu.leases import lease_of, process_of
from tests.gpu.machine import GIB, MIB, PATIENCE_S, WORKER, Client, Machine, until

SHELL_WORKER = shlex.join([sys.executable, str(WORKER)])


def test_a_process_without_a_lease_is_told_and_left_alone(machine: Machine) -> None:
    watch = machine.watch()
    worker = machine.worker(mib=64)
    event = watch.event("unleased_process")
    assert event
    assert event["device"] == machine.uuids()[0]
    assert (event["fields"]["pid"], event["fields"]["action"]) == (str(worker.pid), "warn")
    assert worker.do("check") == "ok"


def test_no_process_is_examined_where_the_watchdog_is_off(bare: Machine) -> None:
    bare.start("--watchdog", "off")
    watch = bare.watch()
    bare.worker(mib=64)
    assert watch.event("unleased_process", timeout_s=1.0) is None


def test_memory_beyond_the_limit_is_told(machine: Machine) -> None:
    machine.lease("eve", 64 * MIB)
    watch = machine.watch()
    worker = machine.worker("eve", mib=2048, preload=False)
    event = watch.event("over_limit", "eve")
    assert event
    assert "its limit is 0.1 GiB" in event["reason"]
    assert event["fields"]["action"] == "warn"
    assert worker.do("check") == "ok"


def _watchdog(events: Events) -> Watchdog:
    processes: Any = None  # no process is looked up: none is without a lease, and none is stopped
    unleased = UnleasedProcesses(StopRules(), processes, events, Holders(Path("/nonexistent"), ""), {77})
    return Watchdog(WatchdogAction.WARN, processes, events, unleased)


def test_one_sample_beyond_the_limit_is_no_reason_yet() -> None:
    """An allocation may be shown before the one it replaces is gone."""
    events = Events()
    told = events.watch()
    compare = _watchdog(events).compare
    eve = lease_of("eve", {"GPU-1": GIB})
    eve.processes = (process_of(77, lease="eve"),)
    within, beyond = (
        {"GPU-1": DeviceReading(used, 0, 0, processes={77: used}, computing=None)} for used in (GIB, 2 * GIB)
    )
    for usages in (beyond, within, beyond):
        compare(usages, [eve])
        assert told.empty()
    compare(beyond, [eve])
    event = told.get_nowait()
    assert event
    assert (event.kind, event.lease) == ("over_limit", "eve")


def test_a_process_with_saved_memory_is_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the driver shows of it: beside it, only what began without saved memory is."""
    ended: list[int] = []
    processes: Any = SimpleNamespace(
        signal=lambda key, number: ended.append(key[0]) or True, alive=lambda key: True, find=lambda pid: None
    )
    unleased = UnleasedProcesses(StopRules(), processes, Events(), Holders(Path("/nonexistent"), ""), set())
    watchdog = Watchdog(WatchdogAction.STOP, processes, Events(), unleased)
    eve = lease_of("eve", {"GPU-1": GIB}, phase=Phase.SUSPENDED)
    server, kernel, new = (process_of(pid, lease="eve") for pid in (1, 77, 78))
    eve.parked = parked_of({kernel.key: {"GPU-1": GIB}})
    for living, used, expected in (
        ((server, kernel), {77: GIB}, []),
        ((server, kernel, new), {77: GIB, 78: GIB}, [78]),
    ):
        eve.processes = living
        watchdog._reported.clear()
        for _ in range(2):
            usage = DeviceReading(sum(used.values()), 0, 0, processes=used, computing=None)
            watchdog.compare({"GPU-1": usage}, [eve])
        assert ended == expected
        assert watchdog.closed("GPU-1")
        (found,) = watchdog.over("eve")
        assert (found.used_bytes, found.limit_bytes) == (sum(used.values()), 0)


def test_a_process_is_not_killed_once_its_memory_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives its SIGTERM, and is suspended before the SIGKILL."""
    sent: list[tuple[int, int]] = []
    processes: Any = SimpleNamespace(
        signal=lambda key, number: sent.append((key[0], number)) or True,
        alive=lambda key: True,
        find=lambda pid: None,
    )
    now = [0.0]
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    unleased = UnleasedProcesses(StopRules(), processes, Events(), Holders(Path("/nonexistent"), ""), set())
    watchdog = Watchdog(WatchdogAction.STOP, processes, Events(), unleased)
    eve = lease_of("eve", {"GPU-1": GIB})
    eve.processes = (process_of(1, lease="eve"), process_of(77, lease="eve"))
    beyond = {"GPU-1": DeviceReading(2 * GIB, 0, 0, processes={77: 2 * GIB}, computing=None)}
    empty = {"GPU-1": DeviceReading(0, 0, 0, processes={}, computing=None)}
    for _ in range(2):
        watchdog.compare(beyond, [eve])
    assert sent == [(77, signal.SIGTERM)]
    eve.phase, now[0] = Phase.SUSPENDING, 10.0
    watchdog.compare(empty, [eve])
    eve.phase, eve.parked = Phase.SUSPENDED, parked_of({(77, 1): {"GPU-1": 2 * GIB}})
    watchdog.compare(empty, [eve])
    eve.phase, eve.parked, now[0] = Phase.RUNNING, {}, 20.0
    watchdog.compare(empty, [eve])
    assert sent == [(77, signal.SIGTERM)]


def test_each_process_beyond_the_limit_is_stopped_and_the_lease_is_reported_once_a_minute() -> None:
    sent: list[int] = []
    processes: Any = SimpleNamespace(
        signal=lambda key, number: sent.append(key[0]) or True, alive=lambda key: False, find=lambda pid: None
    )
    events = Events()
    told = events.watch()
    unleased = UnleasedProcesses(StopRules(), processes, events, Holders(Path("/nonexistent"), ""), set())
    watchdog = Watchdog(WatchdogAction.STOP, processes, events, unleased)
    eve = lease_of("eve", {"GPU-1": GIB})
    for pid in range(100, 110):
        eve.processes = (process_of(1, lease="eve"), process_of(pid, lease="eve"))
        watchdog.compare({"GPU-2": DeviceReading(GIB, 0, 0, processes={pid: GIB}, computing=None)}, [eve])
    assert sent == list(range(101, 110))
    assert told.qsize() == 1


@pytest.mark.parametrize("counted", [True, False])
def test_contexts_close_no_device(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is full, and starts a second kernel: what the driver takes for its context is known."""
    watchdog = _watchdog(Events())
    eve = lease_of("eve", {"GPU-1": GIB})
    eve.processes = (process_of(1, lease="eve"), process_of(77, lease="eve"))
    known = {process.key: GIB for process in eve.processes} if counted else {}
    monkeypatch.setattr(eve, "counted_bytes", lambda *asked: known)
    usage = DeviceReading(0, 0, 0, processes={1: GIB, 77: GIB // 2}, computing=None)
    for _ in range(2):
        watchdog.compare({"GPU-1": usage}, [eve])
    (found,) = watchdog.over("eve")
    assert (bool(found.pid), bool(watchdog.closed("GPU-1"))) == (not counted, not counted)


def test_a_device_that_is_late_stays_closed() -> None:
    watchdog = _watchdog(Events())
    eve = lease_of("eve", {"GPU-1": GIB})
    eve.processes = (process_of(77, lease="eve"),)
    beyond = DeviceReading(2 * GIB, 0, 0, processes={77: 2 * GIB}, computing=None)
    for usages, is_closed in (({"GPU-1": beyond}, False), ({"GPU-1": beyond}, True), ({}, True)):
        watchdog.compare(usages, [eve])
        assert (bool(watchdog.closed("GPU-1")), bool(watchdog.over("eve"))) == (is_closed, is_closed)
    watchdog.compare({"GPU-1": beyond}, [])
    assert (watchdog.closed("GPU-1"), watchdog.over("eve")) == ("", ())


def test_the_leader_is_never_stopped(bare: Machine) -> None:
    bare.start("--watchdog", "stop")
    bare.lease("eve", GIB)
    watch = bare.watch()
    leader = bare.worker("eve", preload=False, mib=4096)
    event = watch.event("over_limit", "eve")
    assert event
    assert event["fields"]["action"] == "warn"
    assert leader.do("check") == "ok"


def test_a_process_on_a_lent_device_is_stopped(bare: Machine) -> None:
    bare.start("--watchdog", "stop")
    leader = bare.session("ada", 20 * GIB)
    assert bare.ask("suspend", lease="ada")["done"]
    stranger = bare.worker("ada", preload=False, wait=False)
    assert stranger.process.wait(PATIENCE_S) == -15
    bare.resume("ada", leader)


STATIC = """
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t);
int main(void)
{
    void *context;
    uint64_t at;
    int code = cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context);
    printf("ready %d\\n", code ? code : cuMemAlloc_v2(&at, (size_t)4 << 30));
    fflush(stdout);
    sleep(600);
    return 0;
}
"""


@pytest.fixture(scope="module")
def static_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program into which everything is linked, the driver library too: nothing can be put before it."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "evader.c").write_text(STATIC)
    driver = next(library for library in build.LIBRARIES if library.output == "sim/libcuda.so.1")
    sources = [str(build.NATIVE / source) for source in driver.sources]
    # Without the old versions of old_glibc.h, which a static C library does not have.
    options = ("-std=gnu11", "-O1", "-static", "-pthread", "-DGPUSHARE_DLSYM", f"-I{build.NATIVE}")
    command = [*build.compiler(), *options]
    made = subprocess.run(
        [*command, *sources, "evader.c", "-o", "evader"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no static C library here: {made.stderr[-200:]}")
    return folder / "evader"


def noticed(watch: Client, kind: str, pid: int) -> dict[str, Any]:
    """What is told about a process."""
    deadline = time.monotonic() + PATIENCE_S
    while event := watch.event(kind, timeout_s=max(0.0, deadline - time.monotonic())):
        if event["fields"].get("pid") == str(pid):
            return event
    raise AssertionError(f"nothing was told about {pid}")


@pytest.fixture
def guarded(bare: Machine) -> Machine:
    """A machine that stops processes beyond the limit; eve may have 1 GiB, her neighbour is at work."""
    bare.start("--watchdog", "stop")
    bare.lease("eve", GIB)
    bare.lease("ada", 20 * GIB)
    return bare


def test_a_static_program_is_noticed_and_stopped(guarded: Machine, static_program: Path) -> None:
    leader, ada = guarded.worker("eve", mib=64), guarded.worker("ada", mib=64)
    watch = guarded.watch()
    evader = guarded.worker("eve", command=[str(static_program)], wait=False)
    assert noticed(watch, "over_limit", evader.pid)["fields"]["action"] == "stop"
    assert evader.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert [leader.do("check"), ada.do("check")] == ["ok", "ok"]


def test_a_child_without_environment_is_noticed_and_stopped(guarded: Machine) -> None:
    leader, ada = guarded.worker("eve", mib=64), guarded.worker("ada", mib=64)
    watch = guarded.watch()
    child, code = leader.do("bare 4096").split()
    assert code in ("0", "ended")  # stopped before it could say so
    assert noticed(watch, "over_limit", int(child))["lease"] == "eve"
    until(lambda: not alive(int(child)), "it is stopped")
    assert [leader.do("check"), ada.do("check")] == ["ok", "ok"]


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_process_that_ignores_the_signal_is_killed(guarded: Machine) -> None:
    guarded.worker("eve", mib=64)
    evader = guarded.worker("eve", preload=False, command=["sh", "-c", f"trap '' TERM; exec {SHELL_WORKER}"])
    evader.tell("alloc 4096")
    assert evader.process.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("written", "mib"),
    [(1 << 62, 1400), (1400 * MIB, 1400), (900 * MIB, 4096)],
    ids=["absurd", "all of it", "plausible"],
)
def test_a_forged_account_hides_no_process(guarded: Machine, written: int, mib: int) -> None:
    """The evader has a slot, for it once was loaded, and writes there that all is counted."""
    directory = guarded.state_dir / "leases" / "eve"
    leader, ada = guarded.worker("eve", mib=64), guarded.worker("ada", mib=64)
    watch = guarded.watch()
    evader = guarded.worker("eve", preload=False)
    with (directory / "account").open("r+b") as account:
        slot = files.SLOT.pack(evader.pid, 0, start_ticks(evader.pid), 1, 1, 0, 0, 0, 0, 0, 0)
        used = files.SLOT_USED.pack(written, *[0] * 15)
        account.seek(files.ACCOUNT_HEAD.size + 200 * files.SLOT.size)
        account.write(slot[: files.USED_IN_SLOT] + used)
    evader.tell(f"alloc {mib}")
    assert noticed(watch, "over_limit", evader.pid)["fields"]["action"] == "stop"
    assert evader.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert [leader.do("check"), ada.do("check")] == ["ok", "ok"]


def test_a_user_that_stops_everything_that_reports_is_noticed(guarded: Machine) -> None:
    """All processes of the lease that count are stopped: the driver is asked, not they."""
    leader, ada = guarded.worker("eve", mib=64), guarded.worker("ada", mib=64)
    watch = guarded.watch()
    os.kill(leader.pid, signal.SIGSTOP)
    evader = guarded.worker("eve", preload=False)
    evader.tell("alloc 4096")
    assert noticed(watch, "over_limit", evader.pid)["fields"]["action"] == "stop"
    assert evader.process.wait(PATIENCE_S) == -signal.SIGTERM
    os.kill(leader.pid, signal.SIGCONT)
    assert [leader.do("check"), ada.do("check")] == ["ok", "ok"]


def test_contexts_are_charged_to_the_limit(machine: Machine) -> None:
    first = machine.session("ada", 2 * GIB, mib=512)
    contexts = machine.sim.device_used(0) - 512 * MIB
    if contexts == 0:
        pytest.skip("contexts cost nothing on this simulated machine")
    limit = machine.state_dir / "leases" / "ada" / "limit"

    def charged() -> bool:
        at = files.LIMIT_HEAD.size + files.CONTEXT_IN_DEVICE
        return int.from_bytes(limit.read_bytes()[at : at + 8], "little") == contexts

    until(charged, "contexts are charged")
    assert first.do(f"alloc {2048 - 512 - contexts // MIB + 1}") == "2"
    assert first.do(f"alloc {2048 - 512 - contexts // MIB - 1}") == "0"


def test_memory_taken_before_the_limit_was_lowered_is_told_and_not_stopped(guarded: Machine) -> None:
    guarded.lease("bo", 8 * GIB)
    leader, second = guarded.worker("bo", mib=64), guarded.worker("bo", mib=4096)
    watch = guarded.watch()
    guarded.lease("bo", GIB)
    event = watch.event("over_limit", "bo")
    assert event
    assert event["fields"]["action"] == "warn"
    assert [leader.do("check"), second.do("check")] == ["ok", "ok"]
