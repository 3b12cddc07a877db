"""A helper is killed at any step; the next one finds out and goes on."""

from __future__ import annotations

import ctypes
import json
import signal
from pathlib import Path

import pytest

from tests.gpu.machine import MIB, PATIENCE_S, Machine, Refused, until
from tests.simulator import Fault

SUSPEND_STEPS = [
    "suspend:intent", "suspend:locked", "suspend:one", "suspend:parked", "suspend:done",
]  # fmt: skip
RESUME_STEPS = ["resume:intent", "resume:one", "resume:restored", "resume:unlocked", "resume:done"]


def killed_during(bare: Machine, step: str, verb: str) -> None:
    """A lease with two processes, and a helper that died at a step of this verb."""
    bare.start()
    bare.lease("ada")
    if verb == "resume":
        workers = [bare.worker("ada", mib=64) for _ in range(2)]
        assert bare.ask("suspend", lease="ada")["done"]
        bare.stop(signal.SIGKILL)
        bare.start(step=step)
    else:
        bare.stop(signal.SIGKILL)
        bare.start(step=step)
        workers = [bare.worker("ada", mib=64) for _ in range(2)]
    bare.client().send(f'{{"verb":"{verb}","epoch":1,"lease":"ada"}}\n'.encode())
    bare.died()
    bare.workers = workers


def ends_well(bare: Machine) -> None:
    """Whatever phase the next helper found: the lease moves both ways and its bytes are there."""
    bare.start()
    until(lambda: bare.of("ada")["phase"] in ("running", "suspended"), "settled")
    shown = bare.of("ada")
    if shown["phase"] == "suspended":
        assert sum(shown["saved_bytes"].values()) >= 2 * 64 * MIB
        assert bare.sim.device_used(0) == 0
        assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in bare.workers] == ["ok", "ok"]
    assert bare.ask("suspend", lease="ada")["done"]
    assert bare.sim.device_used(0) == 0
    assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in bare.workers] == ["ok", "ok"]


@pytest.mark.parametrize("step", SUSPEND_STEPS)
def test_killed_while_suspending(bare: Machine, step: str) -> None:
    killed_during(bare, step, "suspend")
    ends_well(bare)


@pytest.mark.parametrize("step", RESUME_STEPS)
def test_killed_while_resuming(bare: Machine, step: str) -> None:
    killed_during(bare, step, "resume")
    ends_well(bare)


@pytest.mark.parametrize("step", ["suspend:one", "resume:one"])
def test_killed_half_way_with_no_room_to_go_back_all_processes_sleep(bare: Machine, step: str) -> None:
    killed_during(bare, step, step.split(":")[0])
    bare.sim.fault(Fault.RESTORE_FAILS, count=-1)
    bare.start()
    assert bare.of("ada")["phase"] == "suspended"
    assert bare.sim.device_used(0) == 0
    bare.sim.clear_faults()
    assert bare.ask("resume", lease="ada")["done"]
    assert [worker.do("check") for worker in bare.workers] == ["ok", "ok"]


@pytest.mark.parametrize("step", ["suspend:locked", "resume:one"])
def test_processes_that_died_together_with_the_helper_are_dropped(bare: Machine, step: str) -> None:
    killed_during(bare, step, step.split(":")[0])
    bare.workers[0].kill()
    bare.start()
    if bare.of("ada")["phase"] == "suspended":
        assert bare.ask("resume", lease="ada")["done"]
    assert bare.workers[1].do("check") == "ok"


def test_a_suspended_lease_stays_asleep_over_a_clean_stop(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    worker = bare.worker("ada", mib=64)
    saved = bare.ask("suspend", lease="ada")["bytes"]
    assert bare.stop() == 0
    worker.tell("check")
    assert worker.answer(0.3) == ""
    bare.start()
    shown = bare.of("ada")
    assert (shown["phase"], sum(shown["saved_bytes"].values())) == ("suspended", saved)
    # The call was entered while no helper ran: it is not lost.
    until(lambda: bare.of("ada")["wanted"], "the wish is seen")
    assert bare.ask("resume", lease="ada")["done"]
    assert worker.answer() == "check ok"


def test_a_stop_is_heard_whichever_thread_the_kernel_hands_it_to(bare: Machine) -> None:
    bare.start()
    assert bare.helper
    pid = bare.helper.pid
    threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir() if int(each.name) != pid]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(pid, threads[0], signal.SIGTERM) == 0, ctypes.get_errno()
    assert bare.helper.wait(PATIENCE_S) == 0
    assert "helper stopped" in bare.log.read_text()


def test_a_running_lease_is_adopted_with_its_limit(bare: Machine) -> None:
    bare.start()
    bare.lease("ada", 100 * MIB)
    worker = bare.worker("ada", mib=64)
    bare.stop(signal.SIGKILL)
    assert worker.do("alloc 64") == "2"
    bare.start()
    assert bare.of("ada")["alive"]
    assert worker.do("alloc 64") == "2"
    assert worker.do("check") == "ok"


def test_an_epoch_outlives_the_helper(bare: Machine) -> None:
    bare.start()
    bare.client(epoch=7).ask("hello")
    bare.stop(signal.SIGKILL)
    bare.start()
    assert bare.client(epoch=8).ask("hello")["epoch"] == 8
    with pytest.raises(Refused) as refused:
        bare.client(epoch=7).ask("drop", lease="ada")
    assert refused.value.kind == "stale_epoch"
    assert bare.client(epoch=8).ask("drop", lease="ada") == {"known": False}


def test_a_stale_broker_can_change_nothing(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    old, new = bare.client(epoch=1), bare.client(epoch=2)
    new.ask("hello")
    for verb, fields in (
        ("suspend", {}),
        ("resume", {}),
        ("drop", {}),
        ("signal", {"number": 15}),
        ("set_limit", {"uid": 0, "limits": {}}),
    ):
        with pytest.raises(Refused) as refused:
            old.ask(verb, lease="ada", **fields)
        assert refused.value.kind == "stale_epoch" or verb == "set_limit"
    assert new.ask("sample")["leases"][0]["phase"] == "running"


def test_only_one_helper_works_on_a_state_directory(bare: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    bare.start()
    first = bare.helper
    log = bare.log
    bare.log = bare.folder / "second.log"
    bare.start(wait=False)
    assert bare.helper
    assert bare.helper.wait(PATIENCE_S) == 1
    said = bare.log.read_text()
    assert "another device helper" in said
    assert str(first.pid if first else 0) in said
    bare.helper, bare.log = first, log
    assert bare.ask("hello")["pid"] == (first.pid if first else 0)


def test_a_lease_of_an_earlier_boot_is_forgotten(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    bare.stop()
    record = bare.state_dir / "private" / "journal" / "ada"
    record.write_text(record.read_text().replace('"boot_id": "', '"boot_id": "other-'))
    bare.start()
    assert bare.ask("sample")["leases"] == []
    assert not (bare.state_dir / "leases" / "ada").exists()


def test_a_torn_record_removes_its_lease_and_nothing_else(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    bare.lease("bo")
    bare.stop()
    record = bare.state_dir / "private" / "journal" / "ada"
    record.write_bytes(record.read_bytes()[:20])
    bare.start()
    assert [lease["lease"] for lease in bare.ask("sample")["leases"]] == ["bo"]


def test_a_lease_written_by_another_version_is_not_forgotten(bare: Machine) -> None:
    bare.start()
    bare.lease("ada")
    worker = bare.worker("ada", mib=64)
    assert bare.ask("suspend", lease="ada")["done"]
    bare.stop(signal.SIGKILL)
    record = bare.state_dir / "private" / "journal" / "ada"
    written = record.read_bytes()
    record.write_text(json.dumps({**json.loads(written), "of_a_newer_version": 1}))
    bare.start(wait=False)
    assert bare.helper
    assert bare.helper.wait(PATIENCE_S) == 1
    bare.helper = None
    assert "of_a_newer_version" in bare.log.read_text()
    record.write_bytes(written)
    bare.start()
    assert bare.ask("resume", lease="ada")["done"]
    assert worker.do("check") == "ok"


def test_a_damaged_epoch_is_not_taken_for_zero(bare: Machine) -> None:
    bare.start()
    bare.stop()
    (bare.state_dir / "private" / "epoch").write_text("")
    bare.start(wait=False)
    assert bare.helper
    assert bare.helper.wait(PATIENCE_S) == 1
    bare.helper = None
    assert "epoch is damaged" in bare.log.read_text()


def test_the_verdict_of_the_self_test_outlives_the_helper(bare: Machine) -> None:
    bare.start(examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    bare.lease("ada", 79 << 30)
    bare.worker("ada", mib=79 * 1024)  # no room for another test
    bare.stop(signal.SIGKILL)
    bare.start(examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
