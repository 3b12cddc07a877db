"""More memory than granted, and processes without a lease."""

from __future__ import annotations

import pytest

from tests.gpu.machine import GIB, MIB, Machine, until


def test_a_process_without_a_lease_is_told_and_left_alone(machine: Machine) -> None:
    watch = machine.watch()
    worker = machine.worker(mib=64)
    event = watch.event("stranger")
    assert event
    assert event["device"] == machine.uuids()[0]
    assert (event["fields"]["pid"], event["fields"]["action"]) == (str(worker.pid), "warn")
    assert worker.do("check") == "ok"


def test_a_process_without_a_lease_is_stopped_where_asked(bare: Machine) -> None:
    bare.start("--watchdog", "stop")
    watch = bare.watch()
    worker = bare.worker(mib=64)
    event = watch.event("stranger")
    assert event
    assert event["fields"]["action"] == "stop"
    assert worker.process.wait(10) == -15


def test_nobody_looks_where_the_watchdog_is_off(bare: Machine) -> None:
    bare.start("--watchdog", "off")
    watch = bare.watch()
    bare.worker(mib=64)
    assert watch.event("stranger", timeout_s=1.0) is None


def test_memory_beyond_the_limit_is_told(machine: Machine) -> None:
    machine.lease("eve", 64 * MIB)
    watch = machine.watch()
    worker = machine.worker("eve", mib=2048, preload=False)
    event = watch.event("over_limit", "eve")
    assert event
    assert "67108864 are granted" in event["reason"]
    assert event["fields"]["action"] == "warn"
    assert worker.do("check") == "ok"


def test_only_the_process_that_goes_round_the_library_is_stopped(bare: Machine) -> None:
    bare.start("--watchdog", "stop")
    bare.lease("eve", GIB)
    bare.lease("ada", 20 * GIB)
    leader = bare.worker("eve", mib=64)
    ada = bare.worker("ada", mib=64)
    evader = bare.worker("eve", preload=False, mib=4096)
    assert evader.process.wait(10) == -15
    assert leader.do("check") == "ok"
    assert ada.do("check") == "ok"


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
    bare.lease("ada", 20 * GIB)
    leader = bare.worker("ada", mib=64)
    assert bare.ask("suspend", lease="ada")["done"]
    stranger = bare.worker("ada", preload=False, wait=False)
    assert stranger.answer() == "ready 0"
    stranger.tell("alloc 256")
    assert stranger.process.wait(10) == -15
    assert bare.ask("resume", lease="ada")["done"]
    assert leader.do("check") == "ok"


def test_contexts_are_charged_to_the_limit(machine: Machine) -> None:
    machine.lease("ada", 2 * GIB)
    first = machine.worker("ada", mib=512)
    contexts = machine.sim.device_used(0) - 512 * MIB
    if contexts == 0:
        pytest.skip("contexts cost nothing on this simulated machine")
    limit = machine.state_dir / "leases" / "ada" / "limit"

    def charged() -> bool:
        return int.from_bytes(limit.read_bytes()[40:48], "little") == contexts

    until(charged, "contexts are charged")
    assert first.do(f"alloc {2048 - 512 - contexts // MIB + 1}") == "2"
    assert first.do(f"alloc {2048 - 512 - contexts // MIB - 1}") == "0"
