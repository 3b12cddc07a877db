"""What wakes a suspended lease, and what does not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import GIB, Machine, machine_in, until

#: Rounds of the long form (`make test-long`).
WAKE_ROUNDS = int(os.environ.get("GPUSHARE_TEST_WAKES", "3"))


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
    asleep.resume("ada", worker)


#: As `wake` does it, sooner.
QUICK = """
from jupyter_gpushare.gpu.moves import wake
wake.STALLED_S, wake.STALL_POLL_S = {stalled_s}, {poll_s}
"""


@pytest.fixture
def netted(tmp_path: Path) -> Iterator[Machine]:
    """A machine with a helper that finds stalled processes after 1 s."""
    for machine in machine_in(tmp_path):
        machine.start(before=QUICK.format(stalled_s=1.0, poll_s=0.2))
        machine.lease("ada")
        yield machine


def test_a_call_that_nothing_counted_is_reported_for_as_long_as_it_waits(netted: Machine) -> None:
    """The broker wakes the lease once its kernel has been busy for 5 s (tests/broker/test_story.py)."""
    worker = netted.worker("ada", mib=64, preload=False)
    until(lambda: netted.of("ada")["used_bytes"], "its memory")
    assert netted.ask("suspend", lease="ada")["done"]
    assert not netted.of("ada")["stalled"]
    worker.tell("check")
    until(lambda: netted.of("ada")["stalled"], "the call is found")
    assert not netted.of("ada")["wanted"]
    assert netted.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"
    assert not netted.of("ada")["stalled"]


def test_a_wait_that_ends_is_no_longer_reported(netted: Machine) -> None:
    worker = netted.worker("ada", mib=64, preload=False)
    until(lambda: netted.of("ada")["used_bytes"], "its memory")
    assert netted.ask("suspend", lease="ada")["done"]
    worker.tell("join")  # a lock of the program itself looks the same
    until(lambda: netted.of("ada")["stalled"], "the wait is found")
    assert worker.answer() == "join 0"
    until(lambda: not netted.of("ada")["stalled"], "the wait is over")


def test_a_process_that_reads_sleeps_polls_or_waits_for_a_child_wakes_nothing(netted: Machine) -> None:
    """`input()`, `time.sleep`, a slow HTTP request, `!command`: without the library nothing is counted."""
    commands = {
        "rest": "",
        "nap": "sleep 4",
        "request": "receive 4",
        "select": "select 4",
        "child": "child 4",
    }
    for name in commands:
        netted.lease(name, 8 * GIB)
    workers = {name: netted.worker(name, mib=64, preload=False) for name in commands}
    until(lambda: all(netted.of(name)["used_bytes"] for name in commands), "their memory")
    for name in commands:
        assert netted.ask("suspend", lease=name)["done"]
    for name, command in commands.items():
        if command:
            workers[name].tell(command)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        woken = [name for name in commands if netted.of(name)["stalled"] or netted.of(name)["wanted"]]
        assert woken == []
        time.sleep(0.1)


#: By what `poll` of the worker calls: see `QUERIES` there.
QUERIES = (
    "stream", "event", "pointer", "range", "context", "priorities", "capture", "elapsed", "primary", "pool",
)  # fmt: skip


@pytest.mark.parametrize("period_s", ["0.05", pytest.param("1", marks=pytest.mark.long)])
def test_a_kernel_that_polls_falls_asleep_and_stays_asleep(machine: Machine, period_s: str) -> None:
    """Each query by a session of its own: the broker lends it after `active_at`, unless ``calls`` differ."""
    workers = {}
    for query in QUERIES:
        machine.lease(query, 4 * GIB)
        workers[query] = machine.worker(query, mib=64)
        assert workers[query].do(f"poll {query} {period_s}") == "0"
    watched_s = 40 * float(period_s)
    machine.settled(QUERIES[-1])
    before = {query: machine.of(query) for query in QUERIES}
    queried = {query: int(worker.do("count")) for query, worker in workers.items()}
    time.sleep(watched_s)
    machine.settled(QUERIES[-1])
    for query in QUERIES:
        now = machine.of(query)
        assert (now["calls"], now["active_at"]) == (before[query]["calls"], before[query]["active_at"]), query
        assert int(workers[query].do("count")) > queried[query], query
    watch = machine.watch()
    for query in QUERIES:
        assert machine.ask("suspend", lease=query, calls=before[query]["calls"])["done"], query
    deadline = time.monotonic() + watched_s
    while event := watch.event("wanted", timeout_s=max(0.0, deadline - time.monotonic())):
        assert event["fields"] == {"queries_only": "true"}, event["lease"]
    assert all(machine.of(query)["phase"] == "suspended" for query in QUERIES)


@pytest.mark.long_form
def test_no_uncounted_call_hangs(tmp_path: Path) -> None:
    """Rounds of suspend, a call past the library, wake: the net finds each."""
    for machine in machine_in(tmp_path):
        machine.start("--sample-s", "0.05", before=QUICK.format(stalled_s=0.1, poll_s=0.04))
        worker = machine.session("ada", mib=1, preload=False)
        until(lambda m=machine: m.of("ada")["used_bytes"], "its memory")
        for _ in range(WAKE_ROUNDS):
            suspended = machine.ask("suspend", lease="ada")
            assert suspended["done"], suspended
            worker.tell("check")
            until(lambda m=machine: m.of("ada")["stalled"], "the call is found")
            resumed = machine.ask("resume", lease="ada")
            assert resumed["done"], resumed
            assert worker.answer() == "check ok"
    print(f"\n{WAKE_ROUNDS} rounds with an uncounted call, none hung")
