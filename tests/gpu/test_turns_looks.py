"""How the helper looks at leases that take turns (`gpu.turns.turns`), without a helper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases import files
from jupyter_gpushare.gpu.leases.files import ACCOUNT_HEAD, ACCOUNT_NAME, SLOT, LeaseDirectory
from jupyter_gpushare.gpu.leases.journal import JournalRecord
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.turns.turns import CONTESTED_POLL_S, POLL_S, Turns
from jupyter_gpushare.protocol.helper import ComputeShare, Phase, SetLimit

UUID = "GPU-00000000-0000-0000-0000-000000000000"
PROCESS = (4242, 7)


def turns_of(*leases: HelperLease) -> Turns:
    registry: Any = SimpleNamespace(all=lambda: list(leases))
    devices: Any = SimpleNamespace(turns_obstacle=lambda lease, proves_end: "")
    return Turns(registry, devices, proves_end=True)


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[HelperLease]:
    """A lease with one process."""
    asked = SetLimit(
        lease="a", uid=os.geteuid(), limits={UUID: 1 << 30}, compute_share=ComputeShare.STRICT, share=0.5
    )
    lease = HelperLease(JournalRecord(asked=asked, phase=Phase.RUNNING), LeaseDirectory(tmp_path, "a"))
    lease.create_files({})
    lease.processes = (SimpleNamespace(key=PROCESS),)  # type: ignore[assignment]
    yield lease
    lease.files.close()


def counts(lease: HelperLease, *, work: int, waiting: int) -> None:
    """Write an account as the process does that has settled 5 calls."""
    path = lease.files.path / ACCOUNT_NAME
    raw = bytearray(files.ACCOUNT_BYTES)
    ACCOUNT_HEAD.pack_into(raw, 0, files.ACCOUNT_MAGIC, files.VERSION, 0)
    SLOT.pack_into(raw, ACCOUNT_HEAD.size, PROCESS[0], 0, PROCESS[1], work, 0, 0, 0, 0, 5, waiting, 0)
    path.write_bytes(raw)
    lease.account = lease.files.account()


def test_a_process_far_behind_the_others_is_seen_with_the_next_sample(strict: HelperLease) -> None:
    """Nobody read the account while those between it and the first one came and ended."""
    counts(strict, work=5, waiting=0)
    assert [[slot.key for slot in strict.files.turn_slots()] for _ in range(2)] == [[PROCESS]] * 2
    with (strict.files.path / ACCOUNT_NAME).open("r+b") as account:
        account.seek(ACCOUNT_HEAD.size + 40 * SLOT.size)
        account.write(SLOT.pack(99, 0, 1, *[0] * 8))
    assert strict.files.account()
    assert [slot.key for slot in strict.files.turn_slots()] == [PROCESS, (99, 1)]


def test_leases_that_compute_nothing_are_looked_at_rarely(strict: HelperLease) -> None:
    turns = turns_of(strict)
    counts(strict, work=6, waiting=1)
    assert turns.step(100.0) == CONTESTED_POLL_S
    counts(strict, work=5, waiting=0)
    assert turns.step(100.5) == CONTESTED_POLL_S
    assert turns.step(102.0) == POLL_S
    counts(strict, work=6, waiting=1)
    assert turns.step(102.1) == CONTESTED_POLL_S
