"""Seats: a lease has device memory only while one of its seats is connected to the helper."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.leases.seats import (
    LOST_S,
    MARGIN_S,
    MAX_SEATS,
    START_S,
    UNKNOWN_GRACE_S,
    SeatTable,
    lease_id,
)
from jupyter_gpushare.protocol.seats import Sit
from tests.gpu.machine import PATIENCE_S, Machine, Refused, Worker
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SeatTable:
    found = SeatTable(required=True, clock=clock)
    clock.now += START_S
    return found


GPU_0 = ("GPU-0",)


def sit(seat: str = "seat-1", lease: str = "b1", **more: Any) -> Sit:
    given: dict[str, Any] = {"epoch": 1, "devices": ("GPU-0",), "grace_s": 180.0} | more
    return Sit(seat=seat, lease=lease, **given)


# ---- the rule, by a clock of its own ---------------------------------------------


def test_without_a_seat_a_lease_gets_no_memory(table: SeatTable) -> None:
    assert not table.may_gain("b1-1", GPU_0)
    assert not table.may_keep("b1-1", GPU_0)
    table.sit(sit(), 1)
    assert table.may_gain("b1-1", GPU_0)
    assert table.may_keep("b1-2", GPU_0)  # any attempt
    assert not table.may_gain("b11-1", GPU_0)


def test_a_seat_counts_for_leases_with_all_devices_among_its_own(table: SeatTable, clock: Clock) -> None:
    table.sit(sit("seat-1", devices=("GPU-1", "GPU-2")), 1)
    assert table.may_gain("b1-1", ("GPU-2", "GPU-1"))
    for devices in (("GPU-0",), ("GPU-0", "GPU-1")):
        assert not table.may_gain("b1-1", devices)
        assert not table.may_keep("b1-1", devices)
    assert table.ends_at("b1-1", GPU_0) == clock.now + UNKNOWN_GRACE_S - MARGIN_S


def test_in_a_unit_pool_a_seat_counts_for_as_many_devices_as_its_own(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "unit-pool"
    table = SeatTable(required=True, clock=clock, file=file)
    clock.now += START_S
    table.sit(sit("seat-1", devices=("GPU-1", "GPU-2")), 1)
    assert not table.may_gain("b1-1", GPU_0)
    table.count(by_number=True)
    assert table.may_gain("b1-1", GPU_0)
    assert table.may_keep("b1-1", ("GPU-0", "GPU-3"))
    assert not table.may_gain("b1-1", ("GPU-0", "GPU-1", "GPU-2"))
    assert not table.may_gain("b2-1", GPU_0)
    assert SeatTable(required=True, file=file).by_number, "the next helper knows it"
    table.count(by_number=False)
    assert not table.may_gain("b1-1", GPU_0)
    assert not SeatTable(required=True, file=file).by_number
    with pytest.raises(HelperError, match="cannot be written"):
        SeatTable(file=tmp_path / "none" / "unit-pool").count(by_number=True)


def test_a_seat_that_returns_to_leave_gains_nothing(table: SeatTable, clock: Clock) -> None:
    table.sit(sit(), 1)
    table.vacate("seat-1", 60.0)
    table.lose("seat-1")
    table.sit(sit(returns=True, leaving=True), 1)
    assert not table.may_gain("b1-1", GPU_0)
    assert table.ends_at("b1-1", GPU_0) == clock.now + 60.0 - MARGIN_S


def test_on_a_machine_without_seats_every_lease_may() -> None:
    table = SeatTable()
    assert table.may_gain("b1-1", GPU_0)
    assert table.may_keep("b1-1", GPU_0)


def test_a_lost_connection_counts_after_a_while(table: SeatTable, clock: Clock) -> None:
    table.sit(sit(), 1)
    table.lose("seat-1")
    assert not table.may_gain("b1-1", GPU_0)
    clock.now += LOST_S - 0.1
    assert table.may_keep("b1-1", GPU_0)
    clock.now += 0.1
    assert not table.may_keep("b1-1", GPU_0)
    assert table.ends_at("b1-1", GPU_0) == clock.now - LOST_S + 180.0 - MARGIN_S


def test_a_seat_that_comes_back_in_time_changes_nothing(table: SeatTable, clock: Clock) -> None:
    table.sit(sit(), 1)
    table.lose("seat-1")
    clock.now += LOST_S - 0.1
    table.sit(sit(returns=True), 1)
    clock.now += 100
    assert table.may_gain("b1-1", GPU_0)


def test_a_leaving_seat_counts_no_more_at_once(table: SeatTable, clock: Clock) -> None:
    table.sit(sit(), 1)
    table.vacate("seat-1", 60.0)
    assert not table.may_keep("b1-1", GPU_0)
    assert table.ends_at("b1-1", GPU_0) == clock.now + 60.0 - MARGIN_S
    table.lose("seat-1")  # its connection breaks as well: the first deadline stays
    assert table.ends_at("b1-1", GPU_0) == clock.now + 60.0 - MARGIN_S


def test_a_seat_cannot_claim_more_time_than_its_grace(table: SeatTable, clock: Clock) -> None:
    table.sit(sit(grace_s=30.0), 1)
    table.vacate("seat-1", 1e9)
    assert table.ends_at("b1-1", GPU_0) == clock.now + 30.0 - MARGIN_S


def test_another_seat_of_the_lease_carries_it(table: SeatTable) -> None:
    table.sit(sit("seat-1"), 1)
    table.vacate("seat-1", 60.0)
    table.sit(sit("seat-2"), 1)
    assert table.may_gain("b1-1", GPU_0)
    table.forget("seat-1")
    assert table.may_gain("b1-1", GPU_0)


def test_a_helper_that_starts_waits_for_its_seats(clock: Clock) -> None:
    table = SeatTable(required=True, clock=clock)
    assert table.may_keep("b1-1", GPU_0)
    assert not table.may_gain("b1-1", GPU_0)
    clock.now += START_S
    assert not table.may_keep("b1-1", GPU_0)
    assert table.ends_at("b1-1", GPU_0) == clock.now + UNKNOWN_GRACE_S - MARGIN_S
    clock.now += 5
    assert table.ends_at("b1-1", GPU_0) == clock.now - 5 + UNKNOWN_GRACE_S - MARGIN_S  # it does not move
    table.keep_missed([])
    assert table.ends_at("b1-1", GPU_0) == clock.now + UNKNOWN_GRACE_S - MARGIN_S


def test_a_seat_of_an_older_broker_is_refused_unless_it_returns(table: SeatTable) -> None:
    with pytest.raises(HelperError, match="stale"):
        table.sit(sit(epoch=1), 2)
    table.sit(sit(epoch=1, returns=True), 2)
    assert table.may_gain("b1-1", GPU_0)


def test_a_name_sits_once_at_a_time(table: SeatTable) -> None:
    table.sit(sit(), 1)
    with pytest.raises(HelperError, match="connected already"):
        table.sit(sit(lease="b2"), 1)


def test_seats_are_bounded(table: SeatTable) -> None:
    for number in range(MAX_SEATS):
        table.sit(sit(f"seat-{number}", f"b{number}"), 1)
    with pytest.raises(HelperError, match=str(MAX_SEATS)):
        table.sit(sit("one-more", "one-more"), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease": "../b1"},
        {"seat": ""},
        {"seat": "a/b"},
        {"epoch": -1},
        {"devices": ()},
        {"devices": ("GPU-0", "GPU-0")},
        {"devices": ("",)},
        {"grace_s": MARGIN_S},
        {"grace_s": float("inf")},
        {"grace_s": float("nan")},
    ],
)
def test_a_seat_that_makes_no_sense_is_refused(table: SeatTable, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        table.sit(sit(**wrong), 1)
    assert table.sample() == ()


def test_the_id_of_a_lease_may_have_hyphens() -> None:
    assert lease_id("k3v9-m2x7-12") == "k3v9-m2x7"


# ---- a helper and seats as processes ---------------------------------------------


class Node(Machine):
    """A machine on which leases need seats."""

    seats: dict[str, subprocess.Popen[bytes]]

    def begin(self) -> None:
        self.seats = {}
        self.start("--seat-socket", str(self.folder / "seat.sock"), "--node", "n1")

    def seat(
        self,
        name: str = "seat-1",
        lease: str = "b1",
        grace_s: float = 180.0,
        wait: bool = True,
        epoch: int = 1,
    ) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        command = [
            sys.executable, "-m", "jupyter_gpushare.kube.node.seat", "--name", name, "--lease", lease,
            "--epoch", str(epoch), "--grace-s", str(grace_s), "--host-dir", str(self.folder),
        ]  # fmt: skip
        # What an image says about devices is not read.
        environment = self.environment | {
            "NVIDIA_VISIBLE_DEVICES": "GPU-of-another",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = self.seats[name] = subprocess.Popen(command, env=environment, stderr=log)
        log.close()
        if wait:
            until(lambda: self.seated(name), f"{name} sits", process=process)
        return process

    def listed(self) -> dict[str, dict[str, Any]]:
        return {seat["seat"]: seat for seat in self.ask("sample")["seats"]}

    def seated(self, name: str) -> bool:
        return bool(self.listed().get(name, {}).get("connected"))

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in getattr(self, "seats", {}).values():
            process.kill()
            process.wait()
        super().close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        node.begin()
        yield node
    finally:
        node.close()


def holder(node: Node, mib: int = 64) -> Worker:
    node.lease("b1-1")
    return node.worker("b1-1", mib=mib)


def phase(node: Node) -> Callable[[str], bool]:
    return lambda wanted: node.of("b1-1")["phase"] == wanted


def test_a_seat_says_what_the_driver_shows(node: Node) -> None:
    node.seat()
    assert node.listed()["seat-1"] == {
        "seat": "seat-1",
        "lease": "b1",
        "devices": node.uuids(),
        "connected": True,
        "leaving": False,
    }


def test_limits_and_resumes_need_a_seat(node: Node) -> None:
    with pytest.raises(Refused, match="no seat of lease b1-1"):
        node.lease("b1-1")
    node.lease("b1-1", suspended=True)
    refused = node.ask("resume", lease="b1-1")
    assert (refused["done"], refused["refused"]) == (False, "no_memory")
    assert "no seat" in refused["reason"]
    node.seat()
    assert node.ask("resume", lease="b1-1")["done"]


def test_a_seat_that_is_asked_to_end_leaves_after_its_lease(node: Node) -> None:
    seat = node.seat()
    worker = holder(node)
    seat.terminate()
    assert seat.wait(PATIENCE_S) == 0
    assert "suspended" in node.said("seat-1").splitlines()[-1]
    # When it ends the driver shows none of it.
    assert node.sim.device_used(0) == 0
    assert node.of("b1-1")["phase"] == "suspended"
    until(lambda: not node.listed(), "the seat is forgotten")
    node.seat("seat-2")
    assert node.ask("resume", lease="b1-1")["done"]
    assert worker.do("check") == "ok"


def test_a_seat_without_a_lease_ends_at_once(node: Node) -> None:
    seat = node.seat()
    seat.terminate()
    assert seat.wait(PATIENCE_S) == 0
    assert "empty" in node.said("seat-1").splitlines()[-1]


def test_a_killed_seat_is_followed_by_a_suspension(node: Node) -> None:
    seat = node.seat()
    worker = holder(node)
    seat.kill()
    until(lambda: phase(node)("suspended"), "it is suspended")
    assert node.sim.device_used(0) == 0
    until(lambda: not node.listed(), "the lost seat is forgotten")
    node.seat("seat-2")
    assert node.ask("resume", lease="b1-1")["done"]
    assert worker.do("check") == "ok"


def test_a_lease_that_cannot_be_suspended_is_ended_before_the_seat_is_killed(node: Node) -> None:
    seat = node.seat(grace_s=MARGIN_S + 2)
    worker = holder(node)
    server = node.worker("b1-1", wait=False, command=(sys.executable, "-c", "input()"))  # without memory
    assert worker.do("taint 1") == "0"
    watch = node.watch()
    seat.terminate()
    assert seat.wait(PATIENCE_S) == 0
    assert worker.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert server.process.poll() is None
    assert "ended" in node.said("seat-1").splitlines()[-1]
    # The driver lists the process no more, and gives its memory back some time after its end.
    until(lambda: node.sim.device_used(0) == 0, "its memory is free")
    event = watch.event("evicted", "b1-1")
    assert event is not None
    assert "managed memory" in event["reason"]


def test_a_job_that_stops_for_another_saves_its_memory_and_is_never_suspended(node: Node) -> None:
    seat = node.seat()
    node.lease("b1-1", stops=True)
    worker = node.worker("b1-1", mib=64)
    assert worker.do("save") == "0"
    watch = node.watch()
    seat.terminate()  # no broker sends SIGTERM
    assert worker.answer() == "saved ok"
    assert seat.wait(PATIENCE_S) == 0
    assert "empty" in node.said("seat-1").splitlines()[-1]
    phases = []
    while (event := json.loads(watch.line()))["kind"] != "ended":
        phases += [event["fields"]] if event["kind"] == "phase" else []
    assert phases == []


def test_a_restarted_helper_suspends_what_has_lost_its_seat_meanwhile(node: Node) -> None:
    seat = node.seat()
    holder(node)
    node.stop(signal.SIGKILL)
    seat.kill()
    seat.wait()
    node.start("--seat-socket", str(node.folder / "seat.sock"))
    until(lambda: phase(node)("suspended"), "it is suspended")


def test_a_seat_asked_to_end_while_the_helper_restarts_still_vacates(node: Node) -> None:
    seat = node.seat()
    holder(node)
    node.stop(signal.SIGKILL)
    seat.terminate()
    node.start("--seat-socket", str(node.folder / "seat.sock"))
    assert seat.wait(PATIENCE_S) == 0
    assert node.of("b1-1")["phase"] == "suspended"


def test_a_seat_without_any_helper_ends_when_asked(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.seats = {}
    try:
        seat = node.seat(wait=False)
        until(lambda: "no device helper" in node.said("seat-1"), "it has looked")
        seat.terminate()
        assert seat.wait(PATIENCE_S) == 0
    finally:
        node.close()


def test_a_seat_of_an_older_broker_ends_with_the_reason(node: Node) -> None:
    assert not node.client(epoch=7).ask("drop", lease="none")["known"]
    seat = node.seat(wait=False)
    assert seat.wait(PATIENCE_S) == 1
    assert "stale" in node.said("seat-1")


@pytest.mark.parametrize("line", [b"nonsense", b'{"verb":"sample"}', b'{"verb":"sit","seat":"s"}', b"[]"])
def test_what_is_no_seat_is_refused(node: Node, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(node.folder / "seat.sock"))
        peer.sendall(line + b"\n")
        answer = json.loads(peer.recv(65536))
        assert not answer["ok"]
        assert peer.recv(1) == b""
    assert node.listed() == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_only_root_may_sit(node: Node) -> None:
    path = str(node.folder / "seat.sock")
    for folder in (node.folder, *node.folder.parents):
        if folder.stat().st_mode & 0o777 == 0o700:
            folder.chmod(0o711)  # so that only the socket's own rights count
    if not (child := os.fork()):
        os.setuid(12345)
        try:
            socket.socket(socket.AF_UNIX).connect(path)
        except PermissionError:
            os._exit(13)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13


@pytest.mark.parametrize(
    "given", [["--name", "s", "--lease", "b1"], ["--name", "s", "--lease", "b1", "--epoch", "x"]]
)
def test_wrong_options_of_a_seat_are_refused(given: list[str]) -> None:
    command = [sys.executable, "-m", "jupyter_gpushare.kube.node.seat", *given]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "--epoch" in found.stderr
