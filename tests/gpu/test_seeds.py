"""Many moves in random order, with faults and kills: nothing is ever lost.

The simulated driver loses a process for ever when a restore runs out of memory,
as the real one does; its ledger is the judge.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.gpu.machine import GIB, PATIENCE_S, Machine, Refused, Worker, machine_in
from tests.simulator import Fault

LEASES = ("ada", "bo", "cy")
# Any two fit, three do not: moves get in each other's way.
HELD_MIB = 34 * 1024
ROUNDS = int(os.environ.get("GPUSHARE_TEST_ROUNDS", "12"))
# Not RESTORE_FAILS: what a driver refuses to restore twice counts as lost (gpu/moves/steps.py).
FAULTS = (Fault.LOCK_TIMEOUT, Fault.CHECKPOINT_FAILS_UNHARMED, Fault.UNLOCK_FAILS)


def ask(machine: Machine, verb: str, lease: str, results: list[bool], **fields: object) -> None:
    try:
        results.append(machine.ask(verb, lease=lease, **fields)["done"])
    except (Refused, AssertionError, OSError):
        results.append(False)  # the helper was killed under it


def together(machine: Machine, requests: list[tuple[str, str, dict[str, object]]]) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=ask, args=(machine, verb, lease, results), kwargs=fields)
        for verb, lease, fields in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def requests(chance: random.Random) -> list[tuple[str, str, dict[str, object]]]:
    return [
        (chance.choice(("suspend", "resume")), lease, {"timeout_s": chance.choice((0.2, 1.0))})
        for lease in chance.sample(LEASES, chance.randint(1, len(LEASES)))
    ]


Asked = list[tuple[str, str, dict[str, object]]]


def restart(machine: Machine, chance: random.Random, asked: Asked | None = None) -> None:
    threading.Timer(chance.uniform(0.0, 0.1), lambda: machine.helper and machine.helper.kill()).start()
    together(machine, asked or requests(chance))
    assert machine.helper
    assert machine.helper.wait(PATIENCE_S) == -signal.SIGKILL
    machine.helper = None
    machine.start()


@pytest.mark.long_form
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_over_random_moves_faults_and_kills(machine: Machine, seed: int) -> None:
    chance = random.Random(seed)
    machine.sim.fault(Fault.HANG_CHECKPOINT, count=ROUNDS, value=20)
    workers: dict[str, Worker] = {}
    for lease in LEASES:
        for other in workers:
            assert machine.ask("suspend", lease=other)["done"]
        machine.lease(lease, 70 * GIB)
        workers[lease] = machine.worker(lease, mib=HELD_MIB)
    for _ in range(ROUNDS):
        if chance.random() < 0.4:
            machine.sim.fault(chance.choice(FAULTS), count=chance.randint(1, 2))
        if chance.random() < 0.15:
            restart(machine, chance)
        else:
            together(machine, requests(chance))
    machine.sim.clear_faults()
    for lease in LEASES:
        for other in LEASES:
            if other != lease:
                assert settled_ask(machine, "suspend", other)
        assert settled_ask(machine, "resume", lease)
        assert workers[lease].do("check") == "ok"
    assert "lost" not in {machine.of(lease)["phase"] for lease in LEASES}
    events = {event.event for event in machine.sim.ledger()}
    assert "poison" not in events
    assert "checkpoint" in events


@pytest.mark.long_form
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_over_random_moves_between_devices(tmp_path: Path, seed: int) -> None:
    """Each device takes two of the three leases; a resume asks for any device."""
    chance = random.Random(seed)
    spec = "2xH100-80GB,host=512GiB,caller-dies=" + chance.choice(("done", "undone"))
    for machine in machine_in(tmp_path, spec=spec):
        machine.movable = True
        machine.start()
        workers: dict[str, list[Worker]] = {}
        for lease in LEASES:
            for other in workers:
                assert machine.ask("suspend", lease=other)["done"]
            machine.lease(lease, 70 * GIB)
            workers[lease] = [machine.worker(lease, mib=HELD_MIB // 2) for _ in range(2)]
        for _ in range(ROUNDS):
            asked = [
                (
                    verb,
                    lease,
                    fields | ({"devices": [chance.choice(machine.uuids())]} if "res" in verb else {}),
                )
                for verb, lease, fields in requests(chance)
            ]
            if chance.random() < 0.4:
                machine.sim.fault(chance.choice(FAULTS), count=chance.randint(1, 2))
            if chance.random() < 0.3:
                restart(machine, chance, asked)
            else:
                together(machine, asked)
        machine.sim.clear_faults()
        for lease in LEASES:
            for other in LEASES:
                if other != lease:
                    assert settled_ask(machine, "suspend", other)
            assert settled_ask(machine, "resume", lease)
            assert [worker.do("check") for worker in workers[lease]] == ["ok", "ok"]
            (here,) = machine.of(lease)["devices"]
            held = [machine.sim.device_used(device) for device in (0, 1)]
            # The child of a self-test holds less.
            assert [count > GIB for count in held] == [uuid == here for uuid in machine.uuids()]
        assert "poison" not in {event.event for event in machine.sim.ledger()}


def settled_ask(machine: Machine, verb: str, lease: str) -> bool:
    """A move may be refused while an earlier one is settled; not for ever."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        moved = machine.ask(verb, lease=lease)
        if moved["done"]:
            return True
        # What the driver failed to checkpoint is left alone for minutes: ask for another.
        if moved["refused"] == "not_suspendable":
            machine.stop()
            machine.start()
        time.sleep(0.02)
    return False
