"""Leases that compute on one device take turns: a helper, the library, and the simulated driver's time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.protocol.helper import Level
from tests.gpu.machine import GIB, Machine, Refused, Worker
from tests.waiting import until

LAUNCHER = str(Path(__file__).with_name("launcher.py"))
# Of a share: the suite may run beside other load.
GENEROUS = 0.12


def lease(machine: Machine, name: str, share: float, devices: tuple[int, ...] = (0,), **fields: Any) -> None:
    asked = {"compute_share": "fair", "share": share} | fields
    machine.lease(name, int(share * 64) * GIB, devices, **asked)


def launcher(
    machine: Machine, name: str, kernel_ms: float, every: int = 0, *more: object, **seen: Any
) -> Worker:
    """A process of a lease that launches kernels without end; see launcher.py."""
    words = (kernel_ms, every, *more)
    return machine.worker(name, command=(sys.executable, LAUNCHER, *map(str, words)), **seen)


def got(machine: Machine, workers: dict[str, Worker], seconds: float, device: int = 0) -> dict[str, float]:
    """The part of a device's time that each got, of what all of them got within about so many seconds."""
    before = {name: machine.sim.served_s(each.pid, device) for name, each in workers.items()}
    time.sleep(seconds)
    served = {name: machine.sim.served_s(each.pid, device) - before[name] for name, each in workers.items()}
    return {name: each / sum(served.values()) for name, each in served.items()}


def competes(machine: Machine, name: str) -> bool:
    return bool(machine.of(name)["measured_share"] > 0)


def start_two(machine: Machine, shares: tuple[float, float] = (0.25, 0.75)) -> dict[str, Worker]:
    lease(machine, "a", shares[0])
    lease(machine, "b", shares[1])
    workers = {"a": launcher(machine, "a", 5, 10), "b": launcher(machine, "b", 1, 20)}
    until(lambda: competes(machine, "a") and competes(machine, "b"))
    time.sleep(1.0)
    return workers


def test_two_leases_get_time_by_their_shares_and_the_sample_says_so(machine: Machine) -> None:
    workers = start_two(machine)
    assert got(machine, workers, 4.0)["a"] == pytest.approx(0.25, abs=GENEROUS)
    seen = {name: machine.of(name) for name in workers}
    assert {each["compute_share"] for each in seen.values()} == {"fair"}
    assert seen["a"]["measured_share"] == pytest.approx(0.25, abs=GENEROUS)
    assert seen["b"]["measured_share"] == pytest.approx(0.75, abs=GENEROUS)
    workers["b"].kill()
    until(lambda: turn_word(machine, "a") == 0)  # alone


def turn_word(machine: Machine, name: str) -> int:
    page = machine.state_dir / "leases" / name / "limit"
    return int.from_bytes(page.read_bytes()[20:24], sys.byteorder)


def test_without_turns_the_driver_divides_between_processes(machine: Machine) -> None:
    for name, share in (("a", 0.25), ("b", 0.75)):
        lease(machine, name, share, compute_share="off")
    workers = {"a": launcher(machine, "a", 5, 10), "b": launcher(machine, "b", 5, 10)}
    assert got(machine, workers, 2.0)["a"] == pytest.approx(0.5, abs=GENEROUS)
    assert machine.of("a")["compute_share"] == "off"
    assert machine.of("a")["measured_share"] == -1.0


def test_a_lease_that_dies_is_suspended_or_resized_in_competition(machine: Machine) -> None:
    workers = start_two(machine)
    lease(machine, "a", 0.75)
    time.sleep(0.5)
    assert got(machine, workers, 3.0)["a"] == pytest.approx(0.5, abs=GENEROUS)
    moved = machine.ask("suspend", lease="b")
    assert moved["done"], moved
    before = machine.sim.served_s(workers["a"].pid)
    time.sleep(1.0)
    assert machine.sim.served_s(workers["a"].pid) - before > 0.6
    until(lambda: machine.ask("resume", lease="b")["done"])
    served = machine.sim.served_s(workers["b"].pid)
    until(lambda: machine.sim.served_s(workers["b"].pid) > served)
    workers["a"].kill()
    served = machine.sim.served_s(workers["b"].pid)
    time.sleep(1.0)
    assert machine.sim.served_s(workers["b"].pid) - served > 0.3


def test_a_suspension_in_a_turn_harms_no_process(machine: Machine) -> None:
    """The library's thread is in the driver nearly all the time; a checkpoint there would end the process."""
    workers = start_two(machine)
    for _ in range(6):
        until(lambda: machine.ask("suspend", lease="a")["done"])
        until(lambda: machine.ask("resume", lease="a")["done"])
        time.sleep(0.1)
    assert workers["a"].process.poll() is None
    served = machine.sim.served_s(workers["a"].pid)
    until(lambda: machine.sim.served_s(workers["a"].pid) > served)


def test_who_loses_its_helper_goes_on_and_the_next_helper_takes_over(machine: Machine) -> None:
    workers = start_two(machine)
    machine.stop(9)
    time.sleep(4.0)
    both = got(machine, workers, 2.0)
    assert min(both.values()) > 0.2, both  # as the driver divides
    machine.start()
    until(lambda: competes(machine, "a"))
    time.sleep(1.0)
    assert got(machine, workers, 3.0)["a"] == pytest.approx(0.25, abs=GENEROUS)


def test_a_lease_of_two_devices_has_its_turns_on_both_together(two: Machine) -> None:
    machine = two
    lease(machine, "both", 0.5, (0, 1))
    lease(machine, "first", 0.5)
    lease(machine, "second", 0.5, (1,))
    workers = {
        "both": launcher(machine, "both", 4, 1, 0, 2, devices=(0, 1)),
        "first": launcher(machine, "first", 2, 10),
        "second": launcher(machine, "second", 2, 10, device=1),
    }
    until(lambda: all(competes(machine, name) for name in workers))
    time.sleep(1.0)
    seen: set[tuple[bool, ...]] = set()
    before = {name: machine.sim.served_s(each.pid, int(name == "second")) for name, each in workers.items()}
    for _ in range(300):
        seen.add(tuple(bool(turn_word(machine, n)) and not turn_word(machine, n) & 1 for n in workers))
        time.sleep(0.01)
    served = {
        name: machine.sim.served_s(each.pid, int(name == "second")) - before[name]
        for name, each in workers.items()
    }
    assert (True, False, False) in seen
    assert served["first"] > 0.8
    assert served["second"] > 0.8
    assert served["both"] > 0.5


def test_a_strict_share_is_a_cap(machine: Machine) -> None:
    lease(machine, "a", 0.25, compute_share="strict")
    worker = launcher(machine, "a", 4)
    time.sleep(1.0)
    before = machine.sim.served_s(worker.pid)
    time.sleep(4.0)
    assert (machine.sim.served_s(worker.pid) - before) / 4.0 == pytest.approx(0.25, abs=0.1)


def test_a_share_that_makes_no_sense_is_refused_and_the_lease_goes_on(machine: Machine) -> None:
    lease(machine, "a", 0.5)
    for share in (0, -0.5, 1.5, "half", None, True):
        with pytest.raises(Refused, match="share") as refused:
            machine.lease("a", 8 * GIB, compute_share="fair", share=share)
        assert refused.value.kind == "bad_request"
    with pytest.raises(Refused, match="off, fair, strict"):
        machine.lease("a", 8 * GIB, compute_share="half")
    until(lambda: machine.of("a")["compute_share"] == "fair")
    assert machine.worker("a", mib=10 * 1024).do("check") == "ok"  # within the limit that it has


@pytest.mark.parametrize("compute_share", ["fair", "strict"])
def test_a_device_without_the_library_has_no_turns_and_the_lease_goes_on(
    bare: Machine, compute_share: str
) -> None:
    machine = bare
    machine.offered = (Level.HINTS,)
    machine.start()
    lease(machine, "a", 0.5, compute_share=compute_share)
    until(lambda: turn_word(machine, "a") == 0)
    machine.worker("a", mib=64)
    until(lambda: bool(machine.of("a")["share_reason"]))
    found = machine.of("a")
    assert (found["compute_share"], found["share_reason"]) == (
        "off",
        "its device has no library that could hold calls",
    )


def test_a_process_around_the_library_ends_the_turns_of_its_lease(machine: Machine) -> None:
    lease(machine, "a", 0.5)
    machine.worker("a", mib=64, preload=False)
    until(
        lambda: machine.of("a")["share_reason"] == "a process of it runs without the library that holds calls"
    )
    assert machine.of("a")["compute_share"] == "off"
