"""Leases full to their limit can be suspended and restored, alone and beside full neighbours."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.driver.ladder import MARGIN_FLOOR_BYTES, margin_bytes, reserve_bytes
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, DriverGpu
from jupyter_gpushare.gpu.leases.devices import DeviceStates, Verdict
from jupyter_gpushare.gpu.leases.files import AccountFile, Slot, Taint
from jupyter_gpushare.gpu.moves.suspend import needed_bytes
from jupyter_gpushare.gpu.service.sampler import Sampler
from tests.gpu.leases import lease_of
from tests.gpu.machine import GIB, MIB, Machine, Worker, machine_in, until

HIDDEN_BYTES = 600 * MIB
GPU = DriverGpu("GPU-1", 0, "H100", 80 * GIB, mig=False, island="")


@pytest.mark.parametrize("gib", [5, 16, 24, 80])
@pytest.mark.parametrize("hidden_bytes", [0, HIDDEN_BYTES])
def test_what_is_never_granted_leaves_the_margin_of_a_lease_on_all_of_the_device(
    gib: int, hidden_bytes: int
) -> None:
    total = gib * GIB
    largest = total - reserve_bytes(replace(GPU, memory_bytes=total), hidden_bytes)
    assert largest + margin_bytes(largest) <= total - hidden_bytes


def reserve_after(devices: DeviceStates, *samples: tuple[float, int, dict[int, int | None]]) -> int:
    """The hidden bytes after samples: each at so many seconds, with used bytes and those of processes."""
    for at, used, processes in samples:
        before = devices.reserve_bytes(GPU)
        fell = devices.measure_hidden(
            "GPU-1", DeviceReading(used, GPU.memory_bytes - used, 0, processes, None), at
        )
        assert fell is (0 < devices.reserve_bytes(GPU) < before)
    return devices.reserve_bytes(GPU) - margin_bytes(GPU.memory_bytes)


def test_the_first_sample_says_what_an_empty_device_shows_as_used() -> None:
    devices = DeviceStates((GPU,))
    assert reserve_after(devices, (0, GIB, {7: None})) == 0  # part of it may be the process's
    assert reserve_after(devices, (1, GIB, {7: 2 * GIB})) == 0  # the list is older than the sum
    assert reserve_after(devices, (2, 3 * GIB, {7: 2 * GIB, 8: 0})) == GIB
    assert reserve_after(devices, (3, 60 * GIB, {}), (30, 60 * GIB, {})) == GIB


def test_what_was_freed_late_is_granted_once_samples_agree() -> None:
    devices = DeviceStates((GPU,))
    assert reserve_after(devices, (0, 8 * GIB, {}), (1, GIB, {}), (2, 2 * GIB, {})) == 8 * GIB
    assert reserve_after(devices, (3, GIB, {}), (6, GIB, {})) == 2 * GIB
    assert reserve_after(devices, (7, GIB, {}), (12, GIB, {})) == GIB


def test_a_list_that_lags_behind_what_is_free_lowers_nothing() -> None:
    devices = DeviceStates((GPU,))
    listed: dict[int, int | None] = {7: GIB // 2}
    assert reserve_after(devices, (0, GIB, {}), (1, GIB, listed), (3, GIB, listed), (4, GIB, {})) == GIB
    assert reserve_after(devices, (5, GIB, listed), (9, GIB, {7: 2 * GIB}), (10, GIB, listed)) == GIB


def reserve_of(machine: Machine) -> int:
    (device,) = machine.ask("inventory")["devices"]
    count: int = device["reserve_bytes"]
    return count


@pytest.fixture
def unlisted(tmp_path: Path) -> Iterator[Machine]:
    """A machine with a driver that does not list a dead process with memory."""
    yield from machine_in(tmp_path, spec="1xH100-80GB,host=512GiB,context=0,dead=unlisted")


def test_memory_that_comes_free_after_the_helper_started_is_granted(unlisted: Machine) -> None:
    stranger = unlisted.worker(mib=8 * 1024)
    worker = int(stranger.do("fork"))
    stranger.kill()
    unlisted.start(before="from jupyter_gpushare.gpu.leases import devices; devices.HIDDEN_SETTLES_S = 0.5")
    least = margin_bytes(80 * GIB)
    assert reserve_of(unlisted) == 8 * GIB + least
    events = unlisted.watch()
    os.kill(worker, signal.SIGKILL)
    until(lambda: reserve_of(unlisted) == least, "the reserve falls")
    changed = events.event("device")
    assert changed is not None
    assert changed["fields"] == {"reserve_bytes": str(least)}


def test_memory_that_no_process_explains_takes_at_most_an_eighth_of_a_device() -> None:
    devices = DeviceStates((GPU,))
    devices.measure_hidden("GPU-1", DeviceReading(60 * GIB, 20 * GIB, 0, {}, None), 0)
    assert devices.reserve_bytes(GPU) == 10 * GIB + margin_bytes(GPU.memory_bytes)


def test_the_margin_is_half_a_gib_or_three_percent() -> None:
    assert margin_bytes(GIB) == MARGIN_FLOOR_BYTES == 512 * MIB
    assert margin_bytes(100 * GIB) == 3 * GIB


def fill(machine: Machine, name: str, limit_bytes: int) -> Worker:
    """A process that holds all that its lease may hold, its context included."""
    machine.lease(name, limit_bytes)
    before = machine.sim.device_used(0)
    worker = machine.worker(name, mib=1)
    context = machine.sim.device_used(0) - before
    assert worker.do(f"alloc {(limit_bytes - context) // MIB}") == "0"
    return worker


@pytest.fixture
def sized(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with one device of as many GB as the test asks for, some of it hidden."""
    gib, hidden_bytes = request.param
    for machine in machine_in(tmp_path, spec=f"1xGPU-{gib}GB,host=512GiB,reserved={hidden_bytes // MIB}MiB"):
        machine.start()
        yield machine


@pytest.mark.parametrize("sized", [(5, 0), (16, HIDDEN_BYTES), (24, 0), (80, HIDDEN_BYTES)], indirect=True)
def test_full_leases_come_back_beside_full_neighbours_and_alone(
    sized: Machine, request: pytest.FixtureRequest
) -> None:
    (device,) = sized.ask("inventory")["devices"]
    hidden_bytes = request.node.callspec.params["sized"][1]
    assert device["reserve_bytes"] == hidden_bytes + margin_bytes(device["memory_bytes"])
    granted = device["memory_bytes"] - device["reserve_bytes"]
    for parts in (4, 2, 1):
        names = [f"p{parts}-{index}" for index in range(parts)]
        workers = [fill(sized, name, granted // parts) for name in names]
        moved = sized.ask("suspend", lease=names[0])
        assert moved["done"], (parts, moved)
        moved = sized.ask("resume", lease=names[0])
        assert moved["done"], (parts, moved)
        assert workers[0].do("check") == "ok"
        for worker in workers:
            worker.kill()
        until(lambda: sized.sim.device_used(0) == 0, "the device is empty")
        for name in names:
            assert sized.ask("drop", lease=name)["known"]


def test_an_account_that_claims_more_than_the_limit_is_not_believed() -> None:
    lease = lease_of(limits={"GPU-1": 8 * GIB})
    shown: dict[tuple[int, int], dict[str, int]] = {(7, 1): {"GPU-1": GIB}, (8, 1): {"GPU-1": GIB}}

    def account(*used: int) -> AccountFile:
        keys = [(7 + n, 1) for n in range(len(used))]
        slots = {
            key: Slot(Taint(0), 0, 0, 0, 0, (count,), key) for key, count in zip(keys, used, strict=True)
        }
        return AccountFile(0, slots)

    def needed(found: AccountFile | None) -> list[int]:
        return [held["GPU-1"] for held in needed_bytes(lease, found, shown).values()]

    assert needed(None) == [GIB, GIB]
    assert needed(account(GIB // 2, 3 * GIB)) == [GIB, 3 * GIB]
    assert needed(account(6 * GIB, 3 * GIB)) == [GIB, GIB]
    assert needed(account(3 * GIB)) == [3 * GIB, GIB]


def test_bytes_of_processes_that_the_driver_hides_are_not_reserved() -> None:
    devices = DeviceStates((GPU,))
    devices.measure_hidden("GPU-1", DeviceReading(4 * GIB, 76 * GIB, 0, {7: 0}, None), 0)
    assert devices.reserve_bytes(GPU) == 4 * GIB + margin_bytes(GPU.memory_bytes)
    devices.set_verdict("GPU-1", Verdict(suspendable=False, blind=True))
    assert devices.reserve_bytes(GPU) == margin_bytes(GPU.memory_bytes)


def test_the_first_context_of_a_lease_is_charged_before_it_is_made(tmp_path: Path) -> None:
    """A sample charges it once the process has allocated up to the limit (H100: 4.35 of 4 GiB)."""
    limit_bytes = 4 * GIB
    for machine in machine_in(tmp_path, spec="1xH100-80GB,host=512GiB"):
        machine.start("--sample-s", "3", examine=True)
        worker = machine.session("ada", limit_bytes, mib=1)
        context_mib = machine.sim.device_used(0) // MIB - 1
        assert context_mib > 256
        assert worker.do(f"alloc {limit_bytes // MIB - context_mib + 64}") == "2"
        while worker.do("alloc 64") == "0":
            assert machine.sim.device_used(0) <= limit_bytes
        assert machine.sim.device_used(0) > limit_bytes - 128 * MIB


@pytest.mark.parametrize(("shown", "charged"), [([5, 1, 1], [1, 1, 1]), ([5, 5, 2], [1, 5, 2])])
def test_a_rise_of_what_contexts_take_is_charged_when_it_is_seen_twice(
    shown: list[int], charged: list[int]
) -> None:
    """Memory that came and went between two looks at the account is no context: nobody is denied for it."""
    lease = lease_of("ada", {"a": 80 * GIB})
    lease.files = SimpleNamespace(set_context=lambda *_: None)  # type: ignore[assignment]
    lease.contexts = {"a": GIB}
    sampler: Any = SimpleNamespace(_states=SimpleNamespace(contexts=lambda devices: {"a": GIB}))
    account: Any = SimpleNamespace(held=dict)
    found = []
    for gib in shown:
        lease.held = {(1, 1): {"a": gib * GIB}}
        Sampler._charge_contexts(sampler, lease, account)
        found.append(lease.contexts["a"] // GIB)
    assert found == charged
