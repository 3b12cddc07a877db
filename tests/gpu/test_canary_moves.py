"""A device is offered for moves only where its self-test moved a child to its equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.checks import canary
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases.devices import DeviceStates, Verdict
from jupyter_gpushare.protocol.helper import Level
from tests.gpu.machine import Machine, machine_in, until
from tests.simulator import Fault

TWO = "2xH100-80GB,host=512GiB"
GPU = DriverGpu("GPU-1", 0, "H100", 80 << 30, mig=False, island="")


@pytest.fixture
def equal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with two devices, equal unless the test asks for others; no helper yet."""
    yield from machine_in(tmp_path, spec=getattr(request, "param", TWO))


def says(machine: Machine) -> list[tuple[bool, bool, str]]:
    """What each device offers: suspending, moving, and why not moving."""
    devices = machine.ask("inventory")["devices"]
    return [(each["suspendable"], each["movable"], each["move_reason"]) for each in devices]


@pytest.mark.parametrize(
    "equal",
    [
        "1xA100-80GB+2xH100-80GB,host=512GiB",
        *(
            pytest.param(spec, marks=pytest.mark.long)
            for spec in (
                TWO,
                f"{TWO},pairs=used",
                f"{TWO},moved-uuid=old",
                f"{TWO},caller-dies=done",
                f"{TWO},listed=allocated",
                "3xH100-80GB,host=512GiB",
            )
        ),
    ],
    indirect=True,
)
def test_a_child_of_each_device_moves_once_to_the_next_equal_one(equal: Machine) -> None:
    equal.start(examine=True)
    unequal = equal.sim.spec.startswith("1xA100")
    offered = [(True, True, "")] * len(equal.ask("inventory")["devices"])
    expected = [(True, False, canary.NO_OTHER), *offered[1:]] if unequal else offered
    assert says(equal) == expected
    first, last = int(unequal), len(offered) - 1
    moves = [(each.from_device, each.device) for each in equal.sim.ledger() if each.event == "move"]
    assert moves == [*((at, at + 1) for at in range(first, last)), (last, first)]
    until(lambda: not any(map(equal.sim.device_used, range(len(offered)))), "nothing of a child is left")
    assert list((equal.state_dir / "leases").iterdir()) == []
    assert "unleased_process" not in equal.log.read_text()


@pytest.mark.parametrize(
    "equal",
    [
        pytest.param("1xH100-80GB,host=512GiB", marks=pytest.mark.long),
        pytest.param("1xH100-80GB+1xA100-80GB,host=512GiB", marks=pytest.mark.long),
        "1xH100-80GB+1xH100-40GB,host=512GiB",
    ],
    indirect=True,
)
def test_without_an_equal_device_nothing_moves(equal: Machine) -> None:
    equal.start(examine=True)
    assert set(says(equal)) == {(True, False, "no other device of the same model")}
    assert "move" not in {each.event for each in equal.sim.ledger()}


@pytest.mark.parametrize("equal", [f"{TWO},driver=575.57"], indirect=True)
def test_an_older_driver_moves_nothing(equal: Machine) -> None:
    equal.start(examine=True)
    why = "the driver 575.57-simulated restores a process on its own device alone (r580 or later moves)"
    assert says(equal) == [(True, False, why)] * 2


#: One call of the self-test's move answers as it should not.
REFUSES = """
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.errors import DeviceError
restore = Checkpoint.restore
def refusing(self, pid, timeout_s, moves={}):
    if moves:
        raise DeviceError("cuCheckpointProcessRestore", 1, "CUDA_ERROR_INVALID_VALUE")
    restore(self, pid, timeout_s)
Checkpoint.restore = refusing
"""
IGNORES = """
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
restore = Checkpoint.restore
Checkpoint.restore = lambda self, pid, timeout_s, moves={}: restore(self, pid, timeout_s)
"""
LOSES = """
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.checks import canary
answer, restore, moved = canary._answer, Checkpoint.restore, []
def moving(self, pid, timeout_s, moves={}):
    moved[:] = moves
    restore(self, pid, timeout_s, moves)
Checkpoint.restore = moving
canary._answer = lambda child, timeout_s, first, words: (
    answer(child, timeout_s, first, words) if first or not moved else ["0" * 64])
"""
STAYS = """
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.driver import nvml
look, held = nvml._processes, {}
def both(handle):
    held.update({pid: used for pid, used in look(handle).items() if used})
    return look(handle) | {pid: used for pid, used in held.items() if len(moved) and pid in moved}
nvml._processes, moved, restore = both, [], Checkpoint.restore
def moving(self, pid, timeout_s, moves={}):
    moved[:] = [pid] if moves else []
    restore(self, pid, timeout_s, moves)
Checkpoint.restore = moving
"""


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (REFUSES, "CUDA_ERROR_INVALID_VALUE"),
        (IGNORES, "the driver does not show its memory on the other device"),
        (LOSES, "its memory came back changed"),
        (STAYS, "the driver still shows its memory on its first device"),
    ],
)
def test_a_move_that_fails_is_not_offered_and_suspending_is(equal: Machine, before: str, why: str) -> None:
    equal.start(examine=True, before=before)
    for suspendable, movable, reason in says(equal):
        assert (suspendable, movable) == (True, False)
        assert reason.startswith("self-test of a move failed: ")
        assert why in reason
    assert {each["level"] for each in equal.ask("inventory")["devices"]} == {"preload"}
    until(lambda: not equal.sim.device_used(0) + equal.sim.device_used(1), "no child is left")


def test_what_cannot_be_suspended_does_not_move_either(equal: Machine) -> None:
    equal.sim.fault(Fault.CHECKPOINT_FAILS)
    equal.start(examine=True)
    first, second = says(equal)
    assert (first[:2], second) == ((False, False), (True, True, ""))
    assert "self-test failed" in first[2]


#: Says in the log that a device was tested.
COUNTS = """
import sys
from jupyter_gpushare.gpu.checks import canary
examine = canary.Canary.examine
def counting(self, gpu, other):
    verdict = examine(self, gpu, other)
    print("tested", gpu.index, file=sys.stderr, flush=True)
    return verdict
canary.Canary.examine = counting
"""


def test_a_move_without_room_is_tested_again_and_takes_nothing_away(equal: Machine) -> None:
    other = equal.worker(device=1, mib=79 * 1024)
    equal.start(examine=True, before=COUNTS)
    assert says(equal) == [(True, False, canary.NO_MEMORY_ON_OTHER), (False, False, canary.NO_MEMORY)]
    seen = equal.log.read_text().count("tested 1")
    until(lambda: equal.log.read_text().count("tested 1") > seen + 1, "the full one is tested again")
    assert equal.log.read_text().count("tested 0") == 1  # it could move nowhere
    own = equal.worker(mib=79 * 1024)  # no test has room there now
    other.kill()
    until(lambda: equal.log.read_text().count("tested 0") > 2, "it is tested again")
    assert says(equal)[0] == (True, False, canary.NO_MEMORY)
    own.kill()
    until(lambda: says(equal) == [(True, True, "")] * 2, "both have room")


FAILS_ONCE = """
from jupyter_gpushare.gpu.checks import canary
examine, tested = canary.Canary.examine, []
def failing(self, gpu, other):
    tested.append(gpu.index)
    if gpu.index == 0 and tested.count(0) == 2:
        return canary.Verdict(suspendable=False, works=False, reason="bad", move_reason="one bad moment")
    return examine(self, gpu, other)
canary.Canary.examine = failing
"""


def test_another_test_of_a_move_that_fails_takes_no_suspension_away(equal: Machine) -> None:
    other = equal.worker(device=1, mib=79 * 1024)
    equal.start(examine=True, before=FAILS_ONCE)
    assert says(equal)[0] == (True, False, canary.NO_MEMORY_ON_OTHER)
    other.kill()
    until(lambda: says(equal)[0] == (True, False, "one bad moment"), "it is tested again")


def test_the_room_of_a_move_is_reserved_beside_what_is_kept_for_other_restores(equal: Machine) -> None:
    """It would fit, but not beside a margin: a restore of a lease may need that."""
    context_mib = 500
    other = equal.worker(device=1, mib=80 * 1024 - 800 - context_mib)
    equal.start(examine=True)
    assert says(equal)[0] == (True, False, canary.NO_MEMORY_ON_OTHER)
    assert "(and a margin of 0.5 GiB) are needed on" in equal.log.read_text()
    other.kill()
    until(lambda: says(equal)[0] == (True, True, ""), "it has room")


def test_a_self_test_of_a_move_leaves_a_lease_on_the_other_device_alone(equal: Machine) -> None:
    equal.start()
    equal.lease("ada", devices=(1,))
    worker = equal.worker("ada", device=1, mib=64)
    equal.stop()
    (equal.state_dir / "private" / "canary").unlink()
    equal.start(examine=True)
    assert says(equal) == [(True, True, "")] * 2
    assert worker.do("check") == "ok"
    until(lambda: equal.of("ada")["alive"], "it is seen")
    assert (equal.of("ada")["phase"], equal.of("ada")["suspendable"]) == ("running", True)


def test_a_device_moves_once_its_equal_is_back_in_service(equal: Machine) -> None:
    equal.sim.fault(Fault.RECOVERY_ACTION, device=1, value=1)
    equal.start("--sample-s", "0.05", examine=True)
    assert says(equal)[0] == (True, False, canary.NO_OTHER)
    equal.sim.fault(Fault.RECOVERY_ACTION, device=1, value=0)
    until(lambda: says(equal) == [(True, True, "")] * 2, "both are tested")


def test_verdicts_of_a_helper_that_knew_no_moves_are_kept_and_moves_are_tested(equal: Machine) -> None:
    equal.keep_verdicts()
    path = equal.state_dir / "private" / "canary"
    kept = json.loads(path.read_bytes())
    for verdict in kept["devices"].values():
        for name in ("movable", "move_reason", "move_final"):
            del verdict[name]
    path.write_text(json.dumps(kept))
    first = DeviceStates((replace(GPU, uuid=equal.uuids()[0]),))
    first.load(kept, kept["key"])
    known = first.verdict(equal.uuids()[0])
    assert (known.suspendable, known.offers(Level.PRELOAD), known.move_final) == (True, True, False)
    equal.start(examine=True)
    until(lambda: says(equal) == [(True, True, "")] * 2, "moves are tested")


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(suspendable=True, movable=True),
        Verdict(suspendable=True, move_reason=canary.NO_OTHER),
        Verdict(suspendable=True, move_reason=canary.NO_MEMORY_ON_OTHER, move_final=False),
    ],
)
def test_what_is_known_of_moves_outlives_the_helper(verdict: Verdict) -> None:
    devices, again = DeviceStates((GPU,)), DeviceStates((GPU,))
    devices.load({}, "boot driver")
    devices.set_verdict("GPU-1", verdict)
    saved: dict[str, Any] = json.loads(json.dumps(devices.saved()))
    again.load(saved, "boot driver")
    assert again.verdict("GPU-1") == verdict
    assert again.all_complete() == verdict.move_final


@pytest.mark.parametrize("uuid", ["", "GPU-1", "MIG-3f0c12ab-5a6e-4a86-9a3a-21c6a4b50d3e", "GPU-" + "x" * 36])
def test_a_move_to_what_is_no_gpu_is_refused_before_the_driver_is_asked(
    uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: object) -> None:
        pytest.fail("the driver was asked")

    monkeypatch.setattr(Checkpoint, "_call", asked)
    checkpoint = Checkpoint.__new__(Checkpoint)
    whole = "GPU-3f0c12ab-5a6e-4a86-9a3a-21c6a4b50d3e"
    for moves in ({uuid: whole}, {whole: uuid}):
        with pytest.raises(DeviceError, match="is not the UUID of a GPU"):
            checkpoint.restore(1, 1.0, moves)
