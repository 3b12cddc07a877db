"""Guests on the device of another lease: the host always wins, and nothing is lost."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases import files
from jupyter_gpushare.gpu.moves.guests import GONE_S, Guests, _Departure
from jupyter_gpushare.protocol.helper import Level
from tests.gpu.machine import GIB, WORKER, Machine, Refused, Worker, machine_in
from tests.gpu.test_turns_of_leases import LAUNCHER, got
from tests.simulator import Fault
from tests.waiting import until

WHOLE = 70 * GIB
GUEST = 20 * GIB
MIB_OF_GIB = 1024


def kept(machine: Machine, name: str, index: int = 0) -> int:
    """Bytes that a limit page keeps for another lease."""
    page = (machine.state_dir / "leases" / name / "limit").read_bytes()
    at = files.LIMIT_HEAD.size + index * files.LIMIT_DEVICE.size + files.KEPT_IN_DEVICE
    return int.from_bytes(page[at : at + 8], sys.byteorder)


def record(machine: Machine, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((machine.state_dir / "private" / "journal" / name).read_bytes())
    return found


def start_guest(machine: Machine, gib: int = 4, guest_bytes: int = GUEST, **fields: Any) -> Worker:
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=guest_bytes, **fields)
    return machine.worker("guest", mib=gib * MIB_OF_GIB)


def denied(machine: Machine, name: str) -> int:
    raw = (machine.state_dir / "leases" / name / "account").read_bytes()
    return int(files.ACCOUNT_HEAD.unpack_from(raw)[2])


SLOW_SAVES = """
import time
from jupyter_gpushare.gpu.leases.journal import StateDirectory
save = StateDirectory.save
def slow(self, record):
    save(self, record)
    time.sleep(0.5 * (record.asked.share < 1))
StateDirectory.save = slow
"""


def test_a_guest_that_begins_while_its_host_starts_again_is_kept_for(bare: Machine) -> None:
    bare.start(before=SLOW_SAVES)
    bare.lease("host", WHOLE)  # no process carries it
    again = threading.Thread(target=lambda: bare.lease("host", WHOLE, share=0.5))
    again.start()
    time.sleep(0.2)
    bare.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)
    again.join()
    assert kept(bare, "host") == GUEST


@pytest.fixture
def pair(machine: Machine) -> tuple[Machine, Worker, Worker]:
    """A host that holds 30 GiB of 70, and a guest with 4 of 20."""
    host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
    return machine, host, start_guest(machine)


def test_a_guest_has_what_its_host_keeps_for_it(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, host, guest = pair
    assert (kept(machine, "host"), kept(machine, "guest")) == (GUEST, WHOLE - GUEST)
    assert machine.of("guest")["guest_of"] == "host"
    assert machine.of("host")["guest_of"] == ""
    assert host.do("alloc 10240") == "0"
    assert guest.do("alloc 10240") == "0"
    assert machine.of("guest")["phase"] == "running"


def test_the_host_asks_and_the_guest_leaves(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, host, guest = pair
    assert [each.do("fill 256") for each in (host, guest)] == ["0", "0"]
    watch = machine.watch()
    assert host.do("alloc 35000") == "0"
    event = watch.event("guest")
    assert event is not None
    assert (event["lease"], event["reason"]) == ("guest", "host_memory")
    fields = event["fields"]
    assert (fields["host"], fields["ended"]) == ("host", "false")
    assert machine.of("host")["phase"] == "running"
    assert int(fields["bytes"]) >= 4 * GIB
    assert 0 < float(fields["took_s"]) < 5
    assert (kept(machine, "host"), denied(machine, "host")) == (0, 0)
    shown = machine.of("guest")
    assert (shown["phase"], shown["guest_of"]) == ("suspended", "")
    assert record(machine, "guest")["phase"] == "suspended"
    assert host.do("check") == "ok"
    assert host.do("free") == "0"
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)
    assert kept(machine, "host") == 0
    machine.resume("guest", guest)
    assert kept(machine, "host") == GUEST
    assert [each.do("verify") for each in (host, guest)] == ["ok", "ok"]


def test_a_guest_that_wants_more_waits_until_it_has_its_own_capacity(
    pair: tuple[Machine, Worker, Worker],
) -> None:
    machine, _, guest = pair
    watch = machine.watch()
    guest.tell("alloc 30720")
    event = watch.event("guest")
    assert event is not None
    assert event["reason"] == "own_memory"
    assert guest.answer(0.3) == ""
    assert machine.of("guest")["phase"] == "suspended"
    assert machine.ask("suspend", lease="host")["done"]
    machine.lease("guest", WHOLE)
    assert machine.ask("resume", lease="guest")["done"]
    assert guest.answer() == "alloc 0"
    assert guest.do("check") == "ok"
    assert kept(machine, "guest") == 0
    assert denied(machine, "guest") == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_a_guest_that_ends_has_left_when_the_driver_shows_its_memory_gone(
    tmp_path: Path, dropped: bool
) -> None:
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,free-delay=600"):
        machine.start()
        host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
        guest = start_guest(machine, gib=18)
        guest.kill()
        if dropped:
            machine.ask("drop", lease="guest")
        assert host.do("alloc 39936") == "0"
        assert denied(machine, "host") == 0
        assert kept(machine, "host") == 0


def test_dropping_the_guest_ends_the_pair(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, _, guest = pair
    guest.kill()
    assert kept(machine, "host") == GUEST
    machine.ask("drop", lease="guest")
    assert kept(machine, "host") == 0
    start_guest(machine)  # another one


def test_what_a_guest_held_that_was_dropped_as_it_began_is_waited_for(tmp_path: Path) -> None:
    """Its processes are in no sample yet."""
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,free-delay=600"):
        machine.start()
        host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
        machine.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)
        guest = machine.worker("guest", wait=False)
        assert guest.answer() == "ready 0"
        assert guest.do(f"alloc {18 * MIB_OF_GIB}") == "0"
        machine.ask("drop", lease="guest", end_processes=True)
        assert host.do("alloc 39936") == "0"


def test_a_host_waits_longer_than_a_request_for_a_guest_that_was_dropped(tmp_path: Path) -> None:
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,free-delay=1500"):
        machine.start(before="from jupyter_gpushare.gpu.moves import guests; guests.GONE_S = 0.1")
        host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
        start_guest(machine, gib=18).kill()
        machine.ask("drop", lease="guest", end_processes=True)
        assert kept(machine, "host") == GUEST
        assert host.do("alloc 39936") == "0"
        assert kept(machine, "host") == 0


def test_a_guest_that_has_ended_is_not_declared_asleep(pair: tuple[Machine, Worker, Worker]) -> None:
    """The pair would have no guest that could leave, and its host would wait for ever."""
    machine, host, guest = pair
    guest.kill()
    until(lambda: not machine.of("guest")["processes"])
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST, suspended=True)
    assert machine.of("guest")["phase"] == "running"
    assert host.do("alloc 35000") == "0"
    assert (machine.of("guest")["phase"], kept(machine, "host")) == ("suspended", 0)


def watched(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, int], guests: list[str]
) -> tuple[Guests, list[tuple[str, str]]]:
    """A watch over a host and its guests, whose words these are, and who was told to leave."""

    def lease(name: str, guest_of: str = "") -> Any:
        def turn_slots() -> list[Any]:
            return [SimpleNamespace(key=(1, 1), wants_memory=words[name])]

        files, asked = SimpleNamespace(turn_slots=turn_slots), SimpleNamespace(guest_of=guest_of)
        return SimpleNamespace(
            name=name, is_guest=bool(guest_of), asked=asked, files=files, processes=(), guests={}
        )

    leases = [lease("host"), *(lease(name, "host") for name in guests)]
    registry: Any = SimpleNamespace(all=lambda: leases, get={each.name: each for each in leases}.get)
    nothing: Any = None
    watch, left = Guests(nothing, registry, nothing, nothing), list[tuple[str, str]]()
    monkeypatch.setattr(watch, "leave", lambda guest, reason: left.append((guest.name, reason)))
    return watch, left


def test_all_guests_of_a_host_hear_that_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may take long to leave, on another device."""
    words = {"host": 1, "first": 1, "second": 1}
    watch, left = watched(monkeypatch, words, ["first", "second"])
    watch.poll()
    words["host"] = 2
    watch.poll()
    until(lambda: sorted(left) == [("first", "host_memory"), ("second", "host_memory")])


def test_what_was_asked_before_a_pair_began_is_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest may have left and resumed between two looks."""
    words = {"host": 1, "guest": 1}
    watch, left = watched(monkeypatch, words, ["guest"])
    watch.poll()
    words["host"] = 9
    watch._begun.set()
    watch.poll()
    time.sleep(0.1)
    assert left == []
    words["host"] = 10
    watch.poll()
    until(lambda: left == [("guest", "host_memory")])


def test_the_broker_suspends_a_guest_as_any_lease(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, host, guest = pair
    assert machine.ask("suspend", lease="guest")["done"]
    assert kept(machine, "host") == 0
    assert host.do("alloc 35000") == "0"
    moved = machine.ask("resume", lease="guest")  # it is to be a guest still, and there is no place
    assert (moved["done"], moved["refused"]) == (False, "no_memory")
    assert "with a guest 50 GiB are left" in moved["reason"], moved
    assert kept(machine, "host") == 0
    assert host.do("free") == "0"
    machine.resume("guest", guest)


def test_a_guest_whose_host_has_left_stays_until_it_gets_the_device(
    pair: tuple[Machine, Worker, Worker],
) -> None:
    machine, host, guest = pair
    with pytest.raises(Refused, match="suspend it first"):
        machine.lease("guest", WHOLE)
    host.kill()
    machine.ask("drop", lease="host")
    assert machine.of("guest")["guest_of"] == "host"
    guest.tell("alloc 20480")
    until(lambda: machine.of("guest")["phase"] == "suspended")
    machine.lease("guest", WHOLE)
    machine.ask("resume", lease="guest")
    assert guest.answer() == "alloc 0"
    assert guest.do("check") == "ok"


def test_a_guest_that_runs_gets_the_device_of_a_host_that_has_left(
    pair: tuple[Machine, Worker, Worker],
) -> None:
    machine, host, guest = pair
    host.kill()
    machine.ask("drop", lease="host")
    machine.lease("guest", WHOLE)
    assert (kept(machine, "guest"), machine.of("guest")["guest_of"]) == (0, "")
    assert guest.do("alloc 40960") == "0"
    assert guest.do("check") == "ok"


def test_a_guest_that_cannot_be_suspended_is_killed_and_the_host_goes_on(
    pair: tuple[Machine, Worker, Worker],
) -> None:
    machine, host, guest = pair
    assert guest.do("taint") == "0"
    watch = machine.watch()
    assert host.do("alloc 35000") == "0"
    event = watch.event("guest")
    assert event is not None
    assert event["fields"]["ended"] == "true"
    assert guest.process.wait(10) == -signal.SIGKILL
    shown = machine.of("guest")
    assert (shown["ended_as_guest"], shown["phase"], shown["guest_of"]) == (True, "suspended", "")
    assert not machine.of("host")["ended_as_guest"]
    assert denied(machine, "host") == 0
    machine.stop(signal.SIGKILL)
    machine.start()
    assert machine.of("guest")["ended_as_guest"]


def test_a_guest_with_the_arguments_of_a_runner_is_killed_all_the_same(machine: Machine) -> None:
    host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)
    command = [sys.executable, "-X", "GPUSHARE_LEASE=guest", str(WORKER)]
    guest = machine.worker("guest", mib=4 * MIB_OF_GIB, command=command)
    assert guest.do("taint") == "0"
    assert host.do("alloc 35000") == "0"
    assert guest.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("killed_s_ago", "killed"), [(0.0, [2, 3]), (GONE_S, [1, 2, 3])])
def test_what_looks_like_a_runner_is_spared_for_some_seconds_only(
    killed_s_ago: float, killed: list[int]
) -> None:
    """It may be the program that starts the others anew."""
    found = [SimpleNamespace(pid=pid, key=pid, is_runner=pid < 3) for pid in (1, 2, 3)]
    signalled: list[int] = []
    machine: Any = SimpleNamespace(
        nvml=SimpleNamespace(processes=lambda uuid: {2: 0}),
        processes=SimpleNamespace(signal=lambda key, number: signalled.append(key)),
    )
    registry: Any = SimpleNamespace(living=lambda name: found)
    guest: Any = SimpleNamespace(name="guest", limits={"GPU-0": 0}, ended_as_guest=True)
    nothing: Any = None
    now = time.monotonic()
    departure = _Departure(now, killed_at=now - killed_s_ago)
    Guests(machine, registry, nothing, nothing)._kill(guest, departure, "refused")
    assert signalled == killed


def test_a_guest_that_does_not_come_to_rest_is_tried_again(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, host, guest = pair
    machine.sim.fault(Fault.LOCK_TIMEOUT, count=3)
    assert host.do("alloc 35000") == "0"
    assert not machine.of("guest")["ended_as_guest"]
    assert host.do("free") == "0"
    machine.resume("guest", guest)


def test_a_guest_that_never_comes_to_rest_is_killed(bare: Machine) -> None:
    bare.start(before="from jupyter_gpushare.gpu.moves import guests; guests.BUSY_S = 0.5")
    host = bare.session("host", WHOLE, mib=30 * MIB_OF_GIB)
    guest = start_guest(bare)
    bare.sim.fault(Fault.LOCK_TIMEOUT, pid=guest.pid, count=-1)
    assert host.do("alloc 35000") == "0"
    assert guest.process.wait(10) == -signal.SIGKILL
    assert bare.of("guest")["ended_as_guest"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guest_of": "nobody"}, "no lease nobody"),
    ({"guest_of": "guest"}, "not its own guest"),
    ({"guest_bytes": 0}, "1 to its limit"),
    ({"guest_bytes": WHOLE + 1}, "1 to its limit"),
    ({"guest_bytes": 45 * GIB}, "lease host uses"),
    ({"devices": (1,)}, "does not run on device"),
    ({"devices": (0, 1)}, "one device"),
    ({"guest_of": "small"}, "has less there"),
    ({"guest_of": "sleeper"}, "does not run"),
    ({"guest_of": "tainted", "devices": (1,)}, "managed memory"),
    ({"guest_of": "host", "guest_bytes": 30 * GIB}, ""),
]


def test_what_cannot_be_a_guest_is_refused_with_a_reason_and_changes_nothing(two: Machine) -> None:
    machine = two
    machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
    for asked, reason in REFUSED:
        devices = asked.get("devices", (0,))
        if asked.get("guest_of") == "small":
            machine.lease("small", GIB, (1,))
            devices = (1,)
        if asked.get("guest_of") == "sleeper":
            machine.ask("drop", lease="small")
            machine.lease("sleeper", WHOLE, (1,), suspended=True)
            devices = (1,)
        if asked.get("guest_of") == "tainted":
            machine.ask("drop", lease="sleeper")
            machine.lease("tainted", WHOLE, (1,))
            assert machine.worker("tainted", device=1, mib=64).do("taint") == "0"
            until(lambda: not machine.of("tainted")["suspendable"])
        fields = {"guest_of": "host", "guest_bytes": GUEST} | {
            k: v for k, v in asked.items() if k != "devices"
        }
        if not reason:
            machine.lease("guest", WHOLE, devices, **fields)
            continue
        with pytest.raises(Refused, match=reason):
            machine.lease("guest", WHOLE, devices, **fields)
        assert kept(machine, "host") == 0
        assert not (machine.state_dir / "private" / "journal" / "guest").exists()
    with pytest.raises(Refused, match="has a guest there"):
        machine.lease("second", WHOLE, guest_of="host", guest_bytes=GUEST)
    with pytest.raises(Refused, match="cannot be a host"):
        machine.lease("second", WHOLE, guest_of="guest", guest_bytes=GIB)


def test_host_memory_is_reserved_before_a_guest_starts_and_while_it_is_one(bare: Machine) -> None:
    bare.sim.set_host_memory(60 * GIB)
    bare.start("--host-budget-percent", "50")
    host = bare.session("host", WHOLE, mib=20 * MIB_OF_GIB)
    with pytest.raises(Refused, match="of host memory"):
        bare.lease("guest", WHOLE, guest_of="host", guest_bytes=30 * GIB)
    assert kept(bare, "host") == 0
    guest = start_guest(bare, guest_bytes=20 * GIB)
    moved = bare.ask("suspend", lease="host")  # it would take what is reserved
    assert (moved["done"], moved["refused"]) == (False, "host_memory")
    assert bare.ask("suspend", lease="guest")["done"]
    assert bare.ask("suspend", lease="host")["done"]
    assert bare.ask("resume", lease="host")["done"]
    bare.resume("guest", guest)
    assert bare.ask("suspend", lease="host")["refused"] == "host_memory"
    bare.stop(signal.SIGKILL)
    bare.start("--host-budget-percent", "50")
    assert bare.ask("suspend", lease="host")["refused"] == "host_memory"
    assert host.do("alloc 40960") == "0"


def test_a_guest_resumes_as_one_on_another_device_after_set_limit_and_only_into_its_bytes(
    tmp_path: Path,
) -> None:
    for machine in machine_in(tmp_path, spec="2xH100-80GB,host=512GiB,growth=0"):
        machine.movable = True
        machine.start()
        host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
        machine.lease("guest", WHOLE, (1,))
        guest = machine.worker("guest", devices=(1, 0), mib=4 * MIB_OF_GIB)
        fields = {"guest_of": "host", "guest_bytes": GUEST}
        with pytest.raises(Refused, match="becomes a guest when it resumes"):
            machine.lease("guest", WHOLE, (1,), **fields)
        assert machine.ask("suspend", lease="guest")["done"]
        machine.lease("guest", WHOLE, (1,), **fields | {"guest_bytes": 2 * GIB})
        moved = machine.ask("resume", lease="guest", devices=[machine.uuids()[0]])
        assert (moved["done"], moved["refused"]) == (False, "no_memory")
        machine.lease("guest", WHOLE, (1,), **fields)
        assert machine.ask("resume", lease="guest")["refused"] == "no_memory"  # its host is not there
        moved = machine.ask("resume", lease="guest", devices=[machine.uuids()[0]])
        assert moved["done"], moved
        assert (kept(machine, "host"), kept(machine, "guest")) == (GUEST, WHOLE - GUEST)
        assert guest.do("check") == "ok"
        assert host.do("alloc 35000") == "0"
        # Elsewhere, on capacity of its own.
        machine.lease("guest", WHOLE)
        assert machine.ask("resume", lease="guest", devices=[machine.uuids()[1]])["done"]
        assert (kept(machine, "host"), kept(machine, "guest")) == (0, 0)
        assert guest.do("check") == "ok"
        assert guest.do("alloc 40960") == "0"


def restarted(machine: Machine, die: str = "") -> None:
    machine.stop(signal.SIGKILL)
    machine.start(die=die)


# A helper that adopts the host alone writes once what that keeps.
@pytest.mark.parametrize("point", ["before kept 2", "after kept 2", "before save 1", "after save 1"])
def test_killed_while_a_pair_begins(bare: Machine, point: str) -> None:
    bare.start()
    host = bare.session("host", WHOLE, mib=30 * MIB_OF_GIB)
    restarted(bare, point)
    uuid = bare.uuids()[0]
    asked = {"lease": "guest", "uid": 0, "limits": {uuid: WHOLE}, "guest_of": "host", "guest_bytes": GUEST}
    bare.client().send(json.dumps({"verb": "set_limit", "epoch": 1} | asked).encode() + b"\n")
    bare.died()
    bare.start()
    if point != "after save 1":
        assert kept(bare, "host") == 0
    guest = start_guest(bare)
    assert (kept(bare, "host"), kept(bare, "guest")) == (GUEST, WHOLE - GUEST)
    assert host.do("alloc 35000") == "0"
    assert host.do("check") == "ok"
    assert guest.process.poll() is None


# The helper that adopts both leases writes what each keeps; the third is the host's for a resume.
WHILE_RESUMING = [
    "before kept 3", "after kept 3", "after phase resuming", "after restore 1", "after unlock 1",
    "after phase running",
]  # fmt: skip


@pytest.mark.parametrize("point", WHILE_RESUMING)
def test_killed_while_a_guest_resumes(pair: tuple[Machine, Worker, Worker], point: str) -> None:
    machine, host, guest = pair
    assert machine.ask("suspend", lease="guest")["done"]
    restarted(machine, point)
    machine.client().send(b'{"verb":"resume","epoch":1,"lease":"guest"}\n')
    machine.died()
    host.tell("alloc 35000")  # it may wait for the next helper
    machine.start()
    assert host.answer() == "alloc 0"
    assert host.do("check") == "ok"
    until(lambda: machine.of("guest")["phase"] == "suspended")
    assert kept(machine, "host") == 0
    assert host.do("free") == "0"
    machine.resume("guest", guest)
    assert kept(machine, "host") == GUEST


WHILE_LEAVING = [
    "before save 1", "after phase suspending", "after lock 1", "after checkpoint 1", "before kept 3",
    "after kept 3", "after phase suspended",
]  # fmt: skip


@pytest.mark.parametrize("point", WHILE_LEAVING)
def test_killed_while_a_guest_leaves(pair: tuple[Machine, Worker, Worker], point: str) -> None:
    machine, host, guest = pair
    restarted(machine, point)
    host.tell("alloc 35000")
    machine.died()
    machine.start()
    assert host.answer() == "alloc 0"
    assert (host.do("check"), denied(machine, "host")) == ("ok", 0)
    until(lambda: machine.of("guest")["phase"] == "suspended")
    assert kept(machine, "host") == 0
    assert host.do("free") == "0"
    machine.resume("guest", guest)


def test_a_host_that_waits_while_no_helper_runs_goes_on_with_the_next(
    pair: tuple[Machine, Worker, Worker],
) -> None:
    machine, host, guest = pair
    machine.stop(signal.SIGKILL)
    host.tell("alloc 35000")
    assert host.answer(0.5) == ""
    machine.start()
    assert host.answer() == "alloc 0"
    assert host.do("free") == "0"
    machine.resume("guest", guest)


def test_host_and_guest_share_time_nine_to_one_whatever_they_asked_for(machine: Machine) -> None:
    machine.lease("host", WHOLE, compute_share="fair", share=0.2)
    workers = {"host": machine.worker("host", command=(sys.executable, LAUNCHER, "5", "10"))}
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)
    workers["guest"] = machine.worker("guest", command=(sys.executable, LAUNCHER, "5", "10"))
    until(lambda: machine.of("guest")["measured_share"] > 0)
    time.sleep(1.0)
    shares = got(machine, workers, 4.0)
    assert shares["guest"] == pytest.approx(0.1, abs=0.08)
    assert machine.of("guest")["compute_share"] == "fair"
    assert machine.ask("suspend", lease="guest")["done"]
    until(
        lambda: machine.of("host")["measured_share"] == -1.0 or machine.of("host")["compute_share"] == "fair"
    )
    served = machine.sim.served_s(workers["host"].pid)
    time.sleep(1.0)
    assert machine.sim.served_s(workers["host"].pid) - served > 0.6


def test_without_turns_there_are_no_guests(bare: Machine) -> None:
    bare.offered = (Level.HINTS,)
    bare.start()
    bare.lease("host", WHOLE)
    with pytest.raises(Refused, match="cannot share the time of its host: its device has no library"):
        bare.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)


def test_work_counts_what_processes_did_also_those_that_ended(machine: Machine) -> None:
    worker = machine.session("ada", WHOLE, mib=64)
    assert worker.do("check") == "ok"
    until(lambda: machine.of("ada")["work"] > 0)
    before = machine.of("ada")["work"]
    worker.kill()
    until(lambda: not machine.of("ada")["alive"])
    assert machine.of("ada")["work"] >= before
    machine.worker("ada", mib=64)
    until(lambda: machine.of("ada")["work"] > before)
    (machine.state_dir / "leases" / "ada" / "account").write_bytes(b"")
    until(lambda: machine.of("ada")["work"] == -1)


def test_a_host_waits_for_the_copy_of_its_guest_and_little_more(tmp_path: Path) -> None:
    """The bound is that and 100 ms (docs/benchmarks.md has figures); here with a share of a busy machine."""
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,copy=4GB/s"):
        machine.start()
        host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
        guest = start_guest(machine, gib=4)
        copy_s = 4 * GIB / 4e9
        watch = machine.watch()
        for mib in (35_000, 66_560):  # the second time of a guest that has come back
            began = time.monotonic()
            assert host.do(f"alloc {mib}") == "0"
            took_s = time.monotonic() - began
            event = watch.event("guest")
            assert event is not None
            assert copy_s < float(event["fields"]["took_s"]) < 2 * copy_s + 0.5
            assert copy_s < took_s < 2 * copy_s + 0.5
            assert host.do("free") == "0"
            machine.resume("guest", guest)
