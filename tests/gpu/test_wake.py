"""What wakes a suspended lease, and what does not."""

from __future__ import annotations

import json

import pytest

from tests.gpu.machine import Machine


@pytest.fixture
def asleep(machine: Machine) -> Machine:
    machine.lease("ada")
    return machine


@pytest.mark.parametrize("command", ["check", "thread", "alloc 64", "free"])
def test_a_cuda_call_of_a_suspended_lease_is_reported(asleep: Machine, command: str) -> None:
    worker = asleep.worker("ada", mib=64)
    watch = asleep.watch()
    assert asleep.ask("suspend", lease="ada", calls=asleep.settled("ada"))["done"]
    worker.tell(command)
    event = watch.event("wanted", "ada")
    assert event
    assert event["fields"] == {"queries_only": "false"}
    assert asleep.of("ada")["wanted"]
    assert asleep.ask("resume", lease="ada")["done"]
    assert worker.answer().split()[1] in ("0", "ok")
    assert not asleep.of("ada")["wanted"]


def test_a_second_process_of_the_lease_wakes_it_too(asleep: Machine) -> None:
    asleep.worker("ada", mib=64)
    watch = asleep.watch()
    assert asleep.ask("suspend", lease="ada")["done"]
    newcomer = asleep.worker("ada", wait=False)
    assert watch.event("wanted", "ada")
    assert newcomer.answer(0.2) == ""
    assert asleep.ask("resume", lease="ada")["done"]
    assert newcomer.answer() == "ready 0"


def test_work_without_the_gpu_does_not_wake(asleep: Machine) -> None:
    worker = asleep.worker("ada", mib=64)
    watch = asleep.watch()
    assert asleep.ask("suspend", lease="ada")["done"]
    assert worker.do("sleep 0.3") == "0"
    assert watch.event("wanted", timeout_s=0.5) is None
    assert not asleep.of("ada")["wanted"]


def test_queries_are_told_apart_from_calls(asleep: Machine) -> None:
    worker = asleep.worker("ada", mib=64)
    watch = asleep.watch()
    assert asleep.ask("suspend", lease="ada")["done"]
    worker.tell("query")
    event = watch.event("wanted", "ada")
    assert event
    assert event["fields"] == {"queries_only": "true"}
    assert asleep.of("ada")["queries_only"]


def test_a_wish_is_repeated_for_a_broker_that_was_away(asleep: Machine) -> None:
    worker = asleep.worker("ada", mib=64)
    first = asleep.watch()
    assert asleep.ask("suspend", lease="ada")["done"]
    worker.tell("check")
    assert first.event("wanted", "ada")
    late = asleep.client()
    sample = late.ask("watch")
    assert sample["leases"][0]["wanted"]
    assert late.event("wanted", "ada")


def test_a_wish_is_told_again_after_the_next_suspension(asleep: Machine) -> None:
    worker = asleep.worker("ada", mib=64)
    watch = asleep.watch()
    for _ in range(3):
        assert asleep.ask("suspend", lease="ada", calls=asleep.settled("ada"))["done"]
        assert not asleep.of("ada")["wanted"]
        worker.tell("check")
        assert watch.event("wanted", "ada")
        assert asleep.ask("resume", lease="ada")["done"]
        assert worker.answer() == "check ok"


def test_phases_are_told_in_order(asleep: Machine) -> None:
    asleep.worker("ada", mib=64)
    watch = asleep.watch()
    assert asleep.ask("suspend", lease="ada")["done"]
    assert asleep.ask("resume", lease="ada")["done"]
    phases = [watch.event("phase", "ada") for _ in range(4)]
    assert [event["fields"]["to"] for event in phases if event] == [
        "suspending", "suspended", "resuming", "running",
    ]  # fmt: skip
    numbers = [event["seq"] for event in phases if event]
    assert numbers == sorted(numbers)


def test_the_end_of_the_last_process_is_told(asleep: Machine) -> None:
    first, second = asleep.worker("ada", mib=64), asleep.worker("ada")
    watch = asleep.watch()
    first.kill()
    assert watch.event("ended", timeout_s=0.6) is None
    second.kill()
    assert watch.event("ended", "ada")
    assert not asleep.of("ada")["alive"]


def test_an_account_broken_while_asleep_wakes_rather_than_hangs(asleep: Machine) -> None:
    asleep.worker("ada", mib=64)
    watch = asleep.watch()
    assert asleep.ask("suspend", lease="ada")["done"]
    directory = asleep.folder / "state" / "leases" / "ada"
    (directory / "account").unlink()
    event = watch.event("wanted", "ada")
    assert event
    assert "broken" in event["reason"]
    assert json.loads(json.dumps(event))["kind"] == "wanted"


def test_a_process_that_waits_in_the_library_may_be_killed(asleep: Machine) -> None:
    worker = asleep.worker("ada", mib=64)
    assert asleep.ask("suspend", lease="ada")["done"]
    newcomer = asleep.worker("ada", wait=False)
    newcomer.kill()
    assert asleep.ask("resume", lease="ada")["done"]
    assert worker.do("check") == "ok"
