"""Guests on the device of another lease: the host always wins, nothing is lost, and all of it is in the record."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases import files
from jupyter_gpushare.protocol.helper import Level
from tests.gpu.machine import GIB, Machine, Refused, Worker, machine_in
from tests.gpu.test_turns_of_leases import LAUNCHER, got
from tests.simulator import Fault
from tests.waiting import until

WHOLE = 70 * GIB
GUEST = 20 * GIB
MIB_OF_GIB = 1024


def kept(machine: Machine, name: str, index: int = 0) -> int:
    """Bytes that a limit page keeps for another lease."""
    page = (machine.state_dir / "leases" / name / "limit").read_bytes()
    at = files.LIMIT_HEAD.size + index * files.LIMIT_DEVICE.size + files.KEPT_IN_DEVICE
    return int.from_bytes(page[at : at + 8], sys.byteorder)


def record(machine: Machine, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((machine.state_dir / "private" / "journal" / name).read_bytes())
    return found


def start_guest(machine: Machine, gib: int = 4, guest_bytes: int = GUEST, **fields: Any) -> Worker:
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=guest_bytes, **fields)
    return machine.worker("guest", mib=gib * MIB_OF_GIB)


def denied(machine: Machine, name: str) -> int:
    raw = (machine.state_dir / "leases" / name / "account").read_bytes()
    return int(files.ACCOUNT_HEAD.unpack_from(raw)[2])


@pytest.fixture
def pair(machine: Machine) -> tuple[Machine, Worker, Worker]:
    """A host that holds 30 GiB of 70, and a guest with 4 of 20."""
    host = machine.session("host", WHOLE, mib=30 * MIB_OF_GIB)
    return machine, host, start_guest(machine)


def test_a_guest_has_what_its_host_keeps_for_it(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, host, guest = pair
    assert (kept(machine, "host"), kept(machine, "guest")) == (GUEST, WHOLE - GUEST)
    assert machine.of("guest")["guest_of"] == "host"
    assert machine.of("host")["guest_of"] == ""
    assert host.do("alloc 10240") == "0"
    assert guest.do("alloc 10240") == "0"
    assert machine.of("guest")["phase"] == "running"


def test_the_host_asks_and_the_guest_leaves(pair: tuple[Machine, Worker, Worker]) -> None:
    machine, host, guest = pair
    watch = machine.watch()
    assert host.do("alloc 35000") == "0"
    event = watch.event("guest")
    assert event is not None
    assert (event["lease"], event["reason"]) == ("guest", "host_memory")
    fields = event["fields"]
    assert (fields["host"], fields["ended"]) == ("host", "false")
    assert int(fields["bytes"]) >= 4 * GIB
    assert 0 < float(fields["took_s"]) < 5
    assert (kept(machine, "host"), denied(machine, "host")) == (0, 0)
    shown = machine.of("guest")
    assert (shown["phase"], shown["guest_of"]) == ("suspended", "")
    assert record(machine, "guest")["phase"] == "suspended"
    assert host.do("check") == "ok"
    assert host.do("free") == "0"
    machine.lease("guest", WHOLE, guest_of="host", guest_bytes=GUEST)
    assert kept(machine, "host") == 0
    machine.resume("guest", guest)
    assert kept(machine, "host") == GUEST


def test_a_guest_that_wants_more_waits_until_it_has_its_own_capacity(
    pair: tuple[Machine, Worker, Worker],
) -> None:
    machine, host, guest = pair
    watch = machine.watch()
    guest.tell("alloc 30720")
    event = watch.event("guest")
    assert event is not None
    assert event["reason"] == "own_memory"
    assert guest.answer(0.3) == ""
    assert machine.of("guest")["phase"] == "suspended"
    assert machine.ask("suspend", lease="host")["done"]
    machine.lease("guest", WHOLE)
    assert machine.ask("resume", lease="guest")["done"]
    assert guest.answer() == "alloc 0"
    assert guest.do("check") == "ok"
    assert kept(machine, "guest") == 0
    assert denied(machine, "guest") == 0
