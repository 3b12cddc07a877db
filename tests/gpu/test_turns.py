"""Whose turn it is, in virtual time: shares of compute time of leases on one device (`gpu.turns.ring`)."""

from __future__ import annotations

import itertools
import random

import pytest

from jupyter_gpushare.gpu.turns.ring import (
    DEBT_S,
    DRAIN_S,
    LINGER_S,
    LONGEST_S,
    SHORTEST_S,
    Contender,
    Turn,
    TurnRing,
)
from tests.gpu.turns_model import Lease, Program, Trainer, TurnMachine

LONG = pytest.mark.long
POINTS = 0.05
# The first competition: what was in flight before is not counted.
SETTLED_S = 5.0
KERNELS_S = (0.0001, 0.001, 0.01, 0.1, 0.5)
WEIGHTS = ((1, 1), (1, 3), (1, 9))


def shares(machine: TurnMachine, seconds: float) -> dict[str, float]:
    """The part of the served time that each lease gets within so many seconds."""
    before = {name: lease.served_s for name, lease in machine.leases.items()}
    machine.run(machine.at + seconds)
    got = {name: lease.served_s - before[name] for name, lease in machine.leases.items()}
    return {name: each / sum(got.values()) for name, each in got.items()}


def check_weights(weights: tuple[int, int], kernels_s: tuple[float, float]) -> None:
    """Two leases that launch without pause get their weights, over 60 turns and 100 kernels of each."""
    leases = {
        name: Lease(weight / sum(weights), [Program(kernel_s)])
        for name, weight, kernel_s in zip("ab", weights, kernels_s, strict=True)
    }
    machine = TurnMachine(leases, tick_s=0.004 if max(kernels_s) > 0.2 else 0.001)
    machine.run(SETTLED_S)
    begun = {name: (lease.served_s, lease.turns, lease.done) for name, lease in leases.items()}
    busy_s, at = machine.busy_s, machine.at
    machine.run(
        lambda: all(
            lease.turns - begun[name][1] >= 60 and lease.done - begun[name][2] >= 100
            for name, lease in leases.items()
        )
    )
    got = {name: lease.served_s - begun[name][0] for name, lease in leases.items()}
    for name, weight in zip("ab", weights, strict=True):
        assert got[name] / sum(got.values()) == pytest.approx(weight / sum(weights), abs=POINTS), name
        measured = machine.ring.measured_share(name, machine.at)
        assert measured == pytest.approx(weight / sum(weights), abs=POINTS), name
    assert (machine.busy_s - busy_s) / (machine.at - at) > 0.95


@pytest.mark.parametrize(
    ("weights", "kernels_s"),
    [((1, 1), (0.5, 0.001)), ((1, 3), (0.01, 0.1)), ((1, 9), (0.0001, 0.0001))],
    ids=str,
)
def test_two_leases_get_time_by_weight(weights: tuple[int, int], kernels_s: tuple[float, float]) -> None:
    check_weights(weights, kernels_s)


@pytest.mark.long
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("kernels_s", list(itertools.product(KERNELS_S, KERNELS_S)), ids=str)
def test_two_leases_get_time_by_weight_whatever_their_kernels(
    weights: tuple[int, int], kernels_s: tuple[float, float]
) -> None:
    check_weights(weights, kernels_s)


def test_a_lease_of_four_processes_counts_as_one() -> None:
    leases = {"a": Lease(0.5, [Program(0.01) for _ in range(4)]), "b": Lease(0.5, [Program(0.01)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    assert shares(machine, 20.0)["a"] == pytest.approx(0.5, abs=POINTS)


def test_four_leases_leave_no_time_unused_while_one_works() -> None:
    pauses = {"a": 0.4, "b": 1.3, "c": 2.9}
    leases = {
        name: Lease(0.25, [Program(0.005, wants=lambda at, p=pause: at % (2 * p) < p)])  # type: ignore[misc]
        for name, pause in pauses.items()
    }
    leases["d"] = Lease(0.25, [Program(0.02)])
    machine = TurnMachine(leases)
    machine.run(30.0)
    assert machine.busy_s / machine.at > 0.95


def test_a_lease_that_waits_between_kernels_gets_its_share_while_it_wants_it() -> None:
    """Small steps with a pause behind each, as a training loop that waits for its input."""
    leases = {
        "loop": Lease(0.5, [Program(0.005, wants=lambda at: at % 0.05 < 0.03)]),
        "flood": Lease(0.5, [Program(0.005)]),
    }
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    assert shares(machine, 30.0)["loop"] > 0.3  # of 0.6 that it could use alone


@pytest.mark.parametrize(
    ("trainer", "keeps"),
    [((0.001, 25, 0.025), 0.88), ((0.005, 20, 0.1), 0.95), ((0.005, 30, 0.05), 0.95)],
    ids=str,
)
def test_a_lease_that_comes_back_from_a_pause_hardly_waits_for_a_light_one(
    trainer: tuple[float, int, float], keeps: float
) -> None:
    """What the light one launched in the pause is no more than its share: 2 ms, not 20."""
    kernel_s, kernels, pause_s = trainer
    leases = {"host": Lease(0.9, [Trainer(*trainer)]), "guest": Lease(0.1, [Program(0.001)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    before, at = leases["host"].served_s, machine.at
    machine.run(at + 15.0)
    alone = kernels * kernel_s / (kernels * kernel_s + pause_s)
    assert (leases["host"].served_s - before) / 15.0 > keeps * alone
    assert machine.busy_s / machine.at > 0.9


def test_a_lease_alone_has_no_turns() -> None:
    leases = {"a": Lease(0.25, [Program(0.01)]), "b": Lease(0.75, [Program(0.01, wants=lambda at: at < 2.0)])}
    machine = TurnMachine(leases)
    machine.run(1.0)
    assert machine.turn["a"] is not Turn.NONE
    machine.run(2.0 + 0.5 * LINGER_S)
    assert machine.turn["a"] is Turn.OPEN
    machine.run(2.0 + 3 * LINGER_S)
    assert machine.turn == {"a": Turn.NONE, "b": Turn.NONE}
    before = leases["a"].served_s
    machine.run(machine.at + 5.0)
    assert leases["a"].served_s - before == pytest.approx(5.0, rel=0.01)


def test_a_lease_that_begins_gets_the_next_turn() -> None:
    leases = {name: Lease(0.25, [Program(0.005)]) for name in ("a", "b", "c")}
    leases["cell"] = Lease(0.25, [Program(0.005, wants=lambda at: at >= 10.0)])
    machine = TurnMachine(leases)
    machine.run(lambda: leases["cell"].served_s > 0)
    assert (
        machine.at - 10.0 < SHORTEST_S + 0.03
    )  # the end of a turn that has run for long enough, and its drain


def test_nobody_waits_longer_than_the_turns_of_the_others_and_their_longest_kernel() -> None:
    kernels_s = {"a": 0.3, "b": 0.01, "c": 0.001, "d": 0.05}
    leases = {name: Lease(0.25, [Program(kernel_s)]) for name, kernel_s in kernels_s.items()}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    for lease in leases.values():
        lease.waited_s = 0.0
    machine.run(60.0)
    for name in "bcd":
        others = [each for each in leases if each != name]
        turns_s = sum(0.1 + 0.02 + min(kernels_s[each], DRAIN_S) for each in others)
        assert leases[name].waited_s < turns_s + max(kernels_s[each] for each in others), name


def test_a_kernel_longer_than_a_turn_costs_its_owner() -> None:
    leases = {"long": Lease(0.1, [Program(0.5)]), "short": Lease(0.9, [Program(0.001)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    assert shares(machine, 60.0)["long"] == pytest.approx(0.1, abs=0.03)


def test_a_lease_that_proves_nothing_is_waited_for_a_moment_and_charged() -> None:
    leases = {"silent": Lease(0.5, [Program(0.01, proves=False)]), "other": Lease(0.5, [Program(0.01)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    assert 0.5 - POINTS < shares(machine, 30.0)["other"] < 0.9
    assert machine.busy_s / machine.at > 0.7


@pytest.mark.parametrize("leaves", ["dies", "is suspended"])
def test_a_lease_that_leaves_in_its_turn_frees_the_device_at_once(leaves: str) -> None:
    leases = {"a": Lease(0.5, [Program(0.01)]), "b": Lease(0.5, [Program(0.01)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    machine.run(lambda: machine.turn["a"] is Turn.OPEN)
    if leaves == "dies":
        leases.pop("a")
    else:
        leases["a"].asleep = True
        leases["a"].programs[0].queue.clear()
    at, before = machine.at, leases["b"].served_s
    machine.run(at + 0.05)
    assert leases["b"].served_s - before > 0.035
    if leaves == "is suspended":
        machine.run(machine.at + 3.0)
        leases["a"].asleep = False
        machine.run(machine.at + 1.0)
        assert shares(machine, 10.0)["a"] == pytest.approx(0.5, abs=POINTS)


def test_a_lease_that_is_resized_in_its_turn_gets_its_new_share() -> None:
    leases = {"a": Lease(0.5, [Program(0.01)]), "b": Lease(0.5, [Program(0.01)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    machine.run(lambda: machine.turn["a"] is Turn.OPEN)
    leases["a"].share = 0.125
    machine.run(machine.at + 2.0)
    assert shares(machine, 20.0)["a"] == pytest.approx(0.2, abs=POINTS)


def test_a_lease_of_two_devices_has_its_turn_on_both_together() -> None:
    leases = {
        "both": Lease(0.5, [Program(0.01)], ("GPU-0", "GPU-1")),
        "first": Lease(0.5, [Program(0.01)], ("GPU-0",)),
        "second": Lease(0.5, [Program(0.02)], ("GPU-1",)),
    }
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    before = {name: lease.served_s for name, lease in leases.items()}
    while machine.at < 30.0:
        machine.tick()
        if machine.turn["both"] is Turn.OPEN:
            assert {machine.turn["first"], machine.turn["second"]} == {Turn.HELD}
    got = {name: lease.served_s - before[name] for name, lease in leases.items()}
    seconds = 30.0 - SETTLED_S
    assert got["first"] / seconds == pytest.approx(0.5, abs=POINTS)
    assert got["second"] / seconds == pytest.approx(0.5, abs=POINTS)
    assert got["both"] / 2 / seconds == pytest.approx(0.5, abs=POINTS)


@pytest.mark.parametrize("share", [0.125, 0.5])
def test_a_strict_share_is_a_cap_also_alone(share: float) -> None:
    lease = Lease(share, [Program(0.005)], strict=True)
    machine = TurnMachine({"a": lease})
    machine.run(SETTLED_S)
    before = lease.served_s
    machine.run(machine.at + 20.0)
    assert (lease.served_s - before) / 20.0 == pytest.approx(share, abs=POINTS)


def test_a_cap_holds_for_kernels_that_are_longer_than_a_turn() -> None:
    lease = Lease(0.25, [Program(0.3)], strict=True)
    machine = TurnMachine({"a": lease}, tick_s=0.002)
    machine.run(SETTLED_S)
    before = lease.served_s
    machine.run(machine.at + 40.0)
    assert (lease.served_s - before) / 40.0 == pytest.approx(0.25, abs=0.03)


@pytest.mark.long
def test_a_lease_that_comes_back_after_long_is_owed_a_moment_alone() -> None:
    leases = {"a": Lease(0.5, [Program(0.005)]), "b": Lease(0.5, [Program(0.005)])}
    leases["late"] = Lease(0.5, [Program(0.005, wants=lambda at: at < 1.0 or at >= 60.0)])
    machine = TurnMachine(leases, tick_s=0.002)
    machine.run(60.0)
    assert shares(machine, 3.0)["late"] < 0.5


def test_two_leases_do_not_compute_at_once_where_their_kernels_are_short() -> None:
    leases = {name: Lease(0.5, [Program(0.02)]) for name in "ab"}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    both = 0
    for _ in range(10_000):
        machine.tick()
        both += all(lease.programs[0].queue for lease in leases.values())
    assert both < 100


def test_what_strict_shares_leave_a_fair_lease_gets() -> None:
    leases = {"capped": Lease(0.25, [Program(0.005)], strict=True), "free": Lease(0.25, [Program(0.005)])}
    machine = TurnMachine(leases)
    machine.run(SETTLED_S)
    assert shares(machine, 20.0)["capped"] == pytest.approx(0.25, abs=POINTS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=LONG) for s in range(1, 60))])
def test_any_programs_share_a_machine(seed: int) -> None:
    """Never two turns on a device at once (the machine checks it), nobody starves, nothing is left unused."""
    rng = random.Random(seed)
    leases: dict[str, Lease] = {}
    for number in range(rng.randrange(2, 7)):
        start, period, part = rng.uniform(0, 5), rng.uniform(0.05, 4), rng.choice([0.3, 0.7, 1.0])
        kernel_s = rng.choice([0.0005, 0.004, 0.03, 0.2])
        programs = [
            Program(kernel_s, wants=lambda at, s=start, p=period, w=part: at >= s and (at - s) % p < w * p)  # type: ignore[misc]
            for _ in range(rng.choice([1, 1, 1, 3]))
        ]
        devices = rng.choice([("GPU-0",), ("GPU-0",), ("GPU-1",), ("GPU-0", "GPU-1")])
        leases[f"l{number}"] = Lease(rng.choice([0.1, 0.25, 0.5]), programs, devices)
    machine = TurnMachine(leases, tick_s=0.002, seed=seed)
    machine.run(20.0)
    for name, lease in leases.items():
        assert lease.served_s > 0, name


def test_what_was_in_flight_before_the_competition_is_not_charged() -> None:
    """A program alone queues a second of work; its first turn comes soon all the same."""
    leases = {"a": Lease(0.1, [Program(0.001)]), "b": Lease(0.9, [Program(0.001, wants=lambda at: at > 3.0)])}
    machine = TurnMachine(leases)
    machine.run(3.0)
    machine.run(8.0)
    assert leases["a"].waited_s < 1.0


def test_a_debt_has_a_bound() -> None:
    """One that hangs in the driver for ten minutes gets turns again soon after that."""
    ring, at = TurnRing(), 0.0
    other = Contender(("GPU-0",), 0.5, busy=1, waits=True)
    while at < 600.0:
        at += 0.02
        ring.step(at, {"hangs": Contender(("GPU-0",), 0.5, busy=4), "other": other})
    for _ in range(int(1.1 * DEBT_S / 0.02)):
        at += 0.02
        if (
            ring.step(at, {"hangs": Contender(("GPU-0",), 0.5, waits=True), "other": other})["hangs"]
            is Turn.OPEN
        ):
            return
    pytest.fail("it got no turn")


def test_no_turn_is_longer_than_the_longest_while_another_waits() -> None:
    machine = TurnMachine({name: Lease(0.5, [Program(0.001)]) for name in "ab"})
    machine.run(SETTLED_S)
    opened_at, longest_s = machine.at, 0.0
    while machine.at < 30.0:
        before = machine.turn["a"]
        machine.tick()
        if machine.turn["a"] is not before:
            if machine.turn["a"] is Turn.OPEN:
                opened_at = machine.at
            else:
                longest_s = max(longest_s, machine.at - opened_at)
    assert 0.1 < longest_s <= LONGEST_S


@pytest.mark.parametrize("first", ["alone", pytest.param("both", marks=LONG)])
def test_a_lease_of_two_devices_gets_its_share_whatever_they_did_before(first: str) -> None:
    """One device has computed for a minute, the other has not: their virtual times are far apart."""
    begins = {"alone": 60.0, "both": 60.0} | {first: 59.0}
    leases = {
        "always": Lease(0.5, [Program(0.005)], ("GPU-0",)),
        "alone": Lease(0.5, [Program(0.005, wants=lambda at: at > begins["alone"])], ("GPU-1",)),
        "both": Lease(0.5, [Program(0.005, wants=lambda at: at > begins["both"])], ("GPU-0", "GPU-1")),
    }
    machine = TurnMachine(leases, tick_s=0.002)
    machine.run(61.0)
    before = {name: lease.served_s for name, lease in leases.items()}
    machine.run(71.0)
    got = {name: (lease.served_s - before[name]) / 10.0 for name, lease in leases.items()}
    assert got["always"] == pytest.approx(0.5, abs=0.1)
    assert got["alone"] == pytest.approx(0.5, abs=0.1)
    assert got["both"] / 2 == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("begins", ["long", "short"])
def test_who_competes_anew_is_charged_for_what_it_launches(begins: str) -> None:
    """Three processes with long kernels always have something in flight, also out of their turns."""
    at = {"long": 0.0, "short": 0.0} | {begins: 3.0}
    leases = {
        "long": Lease(0.5, [Program(k, wants=lambda now: now >= at["long"]) for k in (0.3, 0.34, 0.38)]),
        "short": Lease(0.5, [Program(0.001, wants=lambda now: now >= at["short"])]),
    }
    machine = TurnMachine(leases)
    machine.run(3.0)
    assert shares(machine, 10.0)["short"] > 0.33  # a second of each process was in flight before
    assert leases["short"].waited_s < 1.0


@pytest.mark.parametrize(
    "kernels_s",
    [(0.02, 0.15), *(pytest.param(each, marks=LONG) for each in ((0.005, 0.005), (0.05, 0.08), (0.3, 0.2)))],
    ids=str,
)
def test_a_lease_of_two_devices_soon_finds_both_free(kernels_s: tuple[float, float]) -> None:
    """Turns of the others that fill the time until one device is free do not keep the other from it."""
    leases = {
        "both": Lease(0.5, [Program(0.005)], ("GPU-0", "GPU-1")),
        "first": Lease(0.5, [Program(kernels_s[0])], ("GPU-0",)),
        "second": Lease(0.5, [Program(kernels_s[1])], ("GPU-1",)),
    }
    machine = TurnMachine(leases, tick_s=0.002)
    machine.run(SETTLED_S)
    for lease in leases.values():
        lease.waited_s = 0.0
    machine.run(30.0)
    for name, lease in leases.items():
        assert lease.waited_s < LONGEST_S + DRAIN_S + max(kernels_s), name
        assert machine.ring.measured_share(name, machine.at) > 0.35, name


def test_a_lease_of_all_devices_gets_its_turns() -> None:
    devices = tuple(f"GPU-{number}" for number in range(8))
    leases = {"all": Lease(0.5, [Program(0.05) for _ in devices], devices)}
    for number, device in enumerate(devices):
        leases[device] = Lease(0.5, [Program(0.004 + 0.0007 * number)], (device,))
    machine = TurnMachine(leases, tick_s=0.002)
    machine.run(12.0)
    for name, lease in leases.items():
        assert machine.ring.measured_share(name, machine.at) == pytest.approx(0.5, abs=POINTS), name
        assert lease.waited_s < 1.5, name


@pytest.mark.long
def test_who_used_what_a_lease_of_two_devices_could_not_use_waits_no_time_for_it() -> None:
    """That lease gets a quarter of the first device, as of the second; another one comes to the first."""
    leases = {
        "both": Lease(0.25, [Program(0.005)], ("GPU-0", "GPU-1")),
        "first": Lease(0.25, [Program(0.005)], ("GPU-0",)),
        "comes": Lease(0.25, [Program(0.005, wants=lambda at: at > 40)], ("GPU-0",)),
        "half": Lease(0.5, [Program(0.005)], ("GPU-1",)),
        "quarter": Lease(0.25, [Program(0.005)], ("GPU-1",)),
    }
    machine = TurnMachine(leases, tick_s=0.002)
    machine.run(40.0)
    leases["first"].waited_s = 0.0
    machine.run(50.0)
    assert leases["first"].waited_s < 2.5


@pytest.mark.parametrize("strict", [False, True])
def test_a_lease_is_not_charged_for_all_the_time_in_which_the_helper_was_stopped(strict: bool) -> None:
    ring, at = TurnRing(), 0.0
    shares_ = {"a": 0.25} if strict else {"a": 0.25, "b": 0.75}
    turn = dict.fromkeys(shares_, Turn.HELD)
    opened_at: list[float] = []
    for _ in range(3000):
        turn = ring.step(
            at,
            {
                name: Contender(("GPU-0",), share, strict, turn[name] is Turn.OPEN, True)
                for name, share in shares_.items()
            },
        )
        if turn["a"] is Turn.OPEN:
            opened_at.append(at)
        at += 5.0 if len(opened_at) == 1 and at == opened_at[0] else 0.002
    stopped_until = opened_at[0] + 5.0
    assert any(stopped_until + 0.3 < each < stopped_until + 4.0 for each in opened_at)
