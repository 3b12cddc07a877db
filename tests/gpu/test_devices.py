"""A lease with several devices moves as a whole, or not at all; what NCCL does to it is told."""

from __future__ import annotations

import pytest

from tests.gpu.machine import GIB, MIB, Machine, until
from tests.simulator import Fault


@pytest.fixture
def big(two: Machine) -> Machine:
    """A machine with a lease ``big`` on both devices."""
    two.lease("big", devices=(0, 1))
    return two


def used(machine: Machine) -> list[int]:
    return [machine.sim.device_used(device) for device in (0, 1)]


def test_a_lease_on_two_devices_moves_on_both(big: Machine) -> None:
    first, second = big.worker("big", mib=64), big.worker("big", device=1, mib=64)
    assert big.ask("suspend", lease="big")["done"]
    assert used(big) == [0, 0]
    saved = big.of("big")["saved_bytes"]
    assert set(saved) == set(big.uuids())
    assert big.ask("sample")["host_saved_bytes"] == sum(saved.values())
    assert big.ask("resume", lease="big")["done"]
    assert [first.do("check"), second.do("check")] == ["ok", "ok"]


def test_one_process_on_two_devices_moves_on_both(big: Machine) -> None:
    worker = big.worker("big", devices=(0, 1), mib=64)
    assert worker.do("second 128") == "0"
    moved = big.ask("suspend", lease="big", calls=big.settled("big"))
    assert moved["done"], moved
    assert used(big) == [0, 0]
    first, second = (big.of("big")["saved_bytes"][uuid] for uuid in big.uuids())
    assert first >= 64 * MIB
    assert second - first == 64 * MIB
    big.resume("big", worker)


def test_peer_access_between_its_devices_keeps_it_awake_and_is_told(big: Machine) -> None:
    worker = big.worker("big", devices=(0, 1), mib=64)
    assert worker.do("peer") == "0"
    until(lambda: not big.of("big")["suspendable"], "the taint is seen")
    reason = "it uses peer access between GPUs"
    assert big.of("big")["suspend_reason"] == reason
    moved = big.ask("suspend", lease="big")
    assert (moved["refused"], moved["reason"]) == ("not_suspendable", reason)
    assert worker.do("check") == "ok"


def test_ranks_of_nccl_are_not_suspended(big: Machine) -> None:
    ranks = [big.worker("big", device=device, mib=64) for device in (0, 1)]
    assert ranks[1].do("nccl") == "0"
    moved = big.ask("suspend", lease="big")
    assert (moved["refused"], moved["reason"]) == ("not_suspendable", "it uses NCCL between processes")
    assert [rank.do("check") for rank in ranks] == ["ok", "ok"]
    ranks[1].kill()
    assert big.ask("suspend", lease="big")["done"]
    assert big.ask("resume", lease="big")["done"]
    assert ranks[0].do("check") == "ok"


def test_a_rank_that_waits_for_another_in_a_kernel_lets_all_go_on(big: Machine) -> None:
    """Its kernel ends only with the other's, which is locked: the driver's lock times out."""
    ranks = [big.worker("big", device=device, mib=64) for device in (0, 1)]
    for rank in ranks:
        big.sim.fault(Fault.LOCK_TIMEOUT, pid=rank.pid)
        moved = big.ask("suspend", lease="big")
        assert (moved["done"], moved["refused"]) == (False, "busy")
        assert [each.do("check") for each in ranks] == ["ok", "ok"]
    assert big.of("big")["phase"] == "running"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_checkpoint_that_fails_on_one_device_puts_back_what_left_the_other(
    big: Machine, failing: int
) -> None:
    ranks = [big.worker("big", device=device, mib=64) for device in (0, 1)]
    before = used(big)
    big.sim.fault(Fault.CHECKPOINT_FAILS, pid=ranks[failing].pid)
    assert not big.ask("suspend", lease="big")["done"]
    # After a failed checkpoint the driver gives no promise for that process; the other is unharmed.
    assert [rank.do("check") for rank in ranks] == ["bad" if n == failing else "ok" for n in (0, 1)]
    # The device is tested again after such a failure, by a process that holds memory for a moment.
    # A context grows by 16 MiB with its first restore.
    until(
        lambda: all(now - was in (0, 16 * MIB) for now, was in zip(used(big), before, strict=True)),
        "both are back, and nothing else",
    )


def test_a_device_without_free_memory_keeps_the_whole_lease_asleep(big: Machine) -> None:
    big.lease("bo", 70 * GIB, devices=(1,))
    ranks = [big.worker("big", device=device, mib=30 * 1024) for device in (0, 1)]
    assert big.ask("suspend", lease="big")["done"]
    bo = big.worker("bo", device=1, mib=60 * 1024)
    moved = big.ask("resume", lease="big", timeout_s=0.2)
    assert (moved["done"], moved["refused"]) == (False, "no_memory")
    assert big.uuids()[1] in moved["reason"]
    assert big.sim.device_used(0) == 0
    assert bo.do("check") == "ok"
    bo.kill()
    assert big.ask("resume", lease="big")["done"]
    assert [rank.do("check") for rank in ranks] == ["ok", "ok"]


def test_a_device_out_of_service_keeps_the_whole_lease_where_it_is(big: Machine) -> None:
    ranks = [big.worker("big", device=device, mib=64) for device in (0, 1)]
    watch = big.watch()
    big.hears()
    big.sim.fault(Fault.XID, device=1, value=79)
    assert watch.event("device")
    moved = big.ask("suspend", lease="big")
    assert (moved["done"], moved["refused"]) == (False, "busy")
    assert "out of service" in moved["reason"]
    assert [rank.do("check") for rank in ranks] == ["ok", "ok"]
