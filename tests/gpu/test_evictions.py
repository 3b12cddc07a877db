"""What is done to leases without a seat, by a clock and a driver of the test's own."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.seats import LOST_S, MARGIN_S, START_S, UNKNOWN_GRACE_S, SeatTable
from jupyter_gpushare.gpu.moves.vacate import BROKER_S, FAILURES, RETRY_S, TERM_S, Evictions
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import MoveResult, Phase, Refusal
from jupyter_gpushare.protocol.seats import Sit
from tests.gpu.leases import lease_of

GRACE_S = 60.0


class Node:
    """A machine of leases with one process each, of which the driver shows memory where `held` says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.seats = SeatTable(required=True, clock=lambda: self.now)
        self.leases: list[HelperLease] = []
        self.held: dict[str, dict[int, int]] = {}
        self.broken = False
        self.is_unattended = False
        self.suspended: list[str] = []
        self.scans = 0
        self.sent: list[tuple[Key, int]] = []
        machine: Any = SimpleNamespace(
            seats=self.seats,
            nvml=SimpleNamespace(processes=self._processes),
            processes=SimpleNamespace(
                signal=self._signal, alive=lambda key: True, image=lambda pid: (pid, 1)
            ),
            events=SimpleNamespace(publish=lambda *_, **__: None),
        )
        registry: Any = SimpleNamespace(
            all=lambda: list(self.leases),
            living=self.living,
            may_be_alive=lambda lease: True,
            is_unattended=lambda: self.is_unattended,
        )
        mover: Any = SimpleNamespace(suspend=self._suspend)
        self.evictions = Evictions(machine, registry, mover, clock=lambda: self.now)
        self.now += START_S

    def lease(
        self,
        name: str = "b1-1",
        phase: Phase = Phase.RUNNING,
        devices: tuple[str, ...] = ("GPU-0",),
        stops: bool = False,
    ) -> HelperLease:
        pid = 100 + len(self.leases)
        limits = dict.fromkeys(devices, 1 << 30)
        lease = lease_of(name, limits, phase=phase, stops=stops)
        process = SimpleNamespace(pid=pid, key=(pid, 1), parent=1, carries=name, lease=name, image=(pid, 1))
        lease.processes = (process,)  # type: ignore[assignment]
        self.leases.append(lease)
        return lease

    def hold(self, lease: HelperLease, uuid: str = "GPU-0") -> None:
        """Let the driver, and the last measurement, show memory of a lease."""
        key = lease.processes[0].key
        self.held.setdefault(uuid, {})[key[0]] = 1
        lease.held = {key: {uuid: 1}}

    def sit(
        self, seat: str = "seat-1", lease: str = "b1", devices: tuple[str, ...] = ("GPU-0",), **more: Any
    ) -> None:
        self.seats.sit(Sit(seat=seat, lease=lease, epoch=1, devices=devices, grace_s=GRACE_S, **more), 1)

    def goes_on(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += RETRY_S
            self.evictions.check_all()
            for thread in threading.enumerate():
                if thread.name == "evict":
                    thread.join()

    def living(self, name: str) -> tuple[Any, ...]:
        self.scans += 1
        return next(lease.processes for lease in self.leases if lease.name == name)

    def _processes(self, uuid: str, wait_s: float) -> dict[int, int]:
        if self.broken:
            raise DeviceError("nvmlDeviceGetComputeRunningProcesses", 999)
        return self.held.get(uuid, {})

    def _signal(self, key: Key, number: int) -> bool:
        self.sent.append((key, number))
        return True

    def _suspend(self, lease: HelperLease, calls: str, timeout_s: float) -> MoveResult:
        self.suspended.append(lease.name)
        return MoveResult(done=False, refused=Refusal.BUSY, reason="not now")


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_sleeping_lease_without_a_seat_is_left_alone_when_its_device_fails(node: Node) -> None:
    node.lease(phase=Phase.SUSPENDED)
    node.goes_on(UNKNOWN_GRACE_S)
    node.broken = True
    node.goes_on(UNKNOWN_GRACE_S)
    assert node.sent == []


def test_a_sleeping_lease_on_a_device_that_never_answered_is_left_alone(node: Node) -> None:
    lease = node.lease(phase=Phase.SUSPENDED)
    node.hold(lease)
    node.broken = True
    node.goes_on(2 * UNKNOWN_GRACE_S)
    assert node.sent == []


def test_a_sleeping_lease_is_looked_at_until_it_was_seen_off_its_devices(node: Node) -> None:
    node.lease(phase=Phase.SUSPENDED)
    node.goes_on(2)
    node.scans = 0
    node.goes_on(2 * UNKNOWN_GRACE_S)
    assert node.scans == 0


def test_a_suspended_lease_that_still_has_device_memory_is_ended_at_the_deadline(node: Node) -> None:
    lease = node.lease(phase=Phase.SUSPENDED)
    node.hold(lease)
    node.goes_on(UNKNOWN_GRACE_S - MARGIN_S - 1)
    assert node.sent == []
    node.goes_on(2 + TERM_S)
    assert [number for _, number in node.sent][:1] == [signal.SIGTERM]
    assert signal.SIGKILL in [number for _, number in node.sent]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SUSPENDED])
def test_processes_that_keep_the_memory_of_a_dead_one_are_ended_at_the_deadline(
    node: Node, phase: Phase
) -> None:
    lease = node.lease(phase=phase)
    lease.keepers = lease.processes
    lease.leftover_bytes = {"GPU-0": 1 << 30}
    node.goes_on(UNKNOWN_GRACE_S - MARGIN_S - 1)
    assert node.sent == []
    node.goes_on(2 + TERM_S)
    assert node.sent[0] == (lease.keepers[0].key, signal.SIGTERM)
    assert (lease.keepers[0].key, signal.SIGKILL) in node.sent


def test_one_failed_look_ends_no_process_and_repeated_ones_those_last_seen_on_the_device(node: Node) -> None:
    on_device, beside = node.lease("b1-1"), node.lease("b2-1")
    node.hold(on_device)
    node.goes_on(UNKNOWN_GRACE_S - MARGIN_S)
    node.sent.clear()
    node.held = {}
    node.goes_on(1)
    node.hold(on_device)
    node.broken = True
    node.goes_on(FAILURES - 1)
    assert node.sent == []
    node.goes_on(1)
    assert node.sent == [(on_device.processes[0].key, signal.SIGTERM)]
    assert beside.processes


def test_a_look_that_fails_ends_neither_the_thread_nor_the_look_at_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.sit("seat-1", "b1")
    node.sit("seat-2", "b2")
    node.lease("b1-1", phase=Phase.SUSPENDED)
    node.lease("b2-1", phase=Phase.SUSPENDED)
    node.seats.lose("seat-1")
    node.seats.lose("seat-2")
    living = node.living

    def failing(name: str) -> tuple[Any, ...]:
        if name == "b1-1":
            raise OSError(24, "Too many open files")
        return living(name)

    monkeypatch.setattr(node.evictions._registry, "living", failing)
    node.goes_on(LOST_S + 1)
    assert [seat.seat for seat in node.seats.sample()] == ["seat-1"]
    monkeypatch.setattr(node.evictions._registry, "living", living)
    node.goes_on(1)
    assert node.seats.sample() == ()


def test_a_seat_that_comes_back_during_the_look_is_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.sit()
    node.hold(node.lease(phase=Phase.SUSPENDED))
    node.seats.lose("seat-1")
    node.goes_on(LOST_S + 1)
    assert [seat.connected for seat in node.seats.sample()] == [False]  # it still has memory

    def returning(name: str) -> tuple[Any, ...]:
        node.sit(returns=True)
        return ()

    # From here on only the look at the lost seats asks: the lease itself is looked at every `RETRY_S`.
    monkeypatch.setattr(node.evictions._registry, "living", returning)
    monkeypatch.setattr(node.evictions._registry, "may_be_alive", lambda lease: False)
    node.evictions.check_all()
    assert [seat.connected for seat in node.seats.sample()] == [True]


def test_memory_leaves_the_old_device_although_a_new_seat_sits_on_another(node: Node) -> None:
    node.sit("old", devices=("GPU-0",))
    lease = node.lease()
    node.hold(lease)
    node.sit("new", devices=("GPU-1",))
    node.seats.vacate("old", GRACE_S)
    assert node.evictions.outcome("b1") is None
    node.goes_on(GRACE_S - MARGIN_S)
    assert node.sent[:1] == [(lease.processes[0].key, signal.SIGTERM)]


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_that_stops_is_asked_once_where_the_broker_does_not_and_never_suspended(
    node: Node, answers: bool
) -> None:
    node.sit()
    lease = node.lease(stops=True)
    node.hold(lease)
    node.is_unattended = not answers
    asked = (lease.processes[0].key, signal.SIGTERM)
    node.seats.vacate("seat-1", GRACE_S)
    node.evictions.check_all()
    assert node.sent == ([] if answers else [asked])
    node.goes_on(BROKER_S)
    assert node.sent == [asked]
    node.goes_on(GRACE_S - MARGIN_S - BROKER_S - 1)
    assert node.sent == [asked]
    node.goes_on(2 + TERM_S)
    assert node.sent[1:3] == [asked, (lease.processes[0].key, signal.SIGKILL)]
    assert node.suspended == []
