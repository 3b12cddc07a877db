"""A restore never meets a full device: many seeded histories on a driver made of paper.

The driver here is a few numbers: what each process holds, and a restore that loses
its process for ever when it does not fit, as the real one does.  Before every answer
it lets the neighbours allocate, free and end, so that whatever was looked up may be
different a moment later.  The mover, the room, the leases and their files are real.

    GPUSHARE_TEST_HISTORIES=10000 pytest tests/gpu/test_room.py -k poisons -s --timeout 0
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu import room, steps, suspend
from jupyter_gpushare.gpu.checkpoint import State
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.isolation import LeaseDirectory, PagePhase
from jupyter_gpushare.gpu.journal import Record
from jupyter_gpushare.gpu.lease import Lease
from jupyter_gpushare.gpu.nvml import Gpu
from jupyter_gpushare.gpu.processes import Process
from jupyter_gpushare.gpu.room import DeviceRoom, Undo
from jupyter_gpushare.gpu.suspend import Mover
from jupyter_gpushare.gpu.verbs import Phase, Refusal

HISTORIES = int(os.environ.get("GPUSHARE_TEST_HISTORIES", "150"))
GIB = 1 << 30
MIB = 1 << 20
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
GPU = Gpu(UUID, 0, "paper", 80 * GIB, mig=False, island="")
NAMES = ("ada", "bo", "cy", "di")


class Paper:
    """The driver, and all that the mover needs beside it."""

    unavailable = ""
    gpus = (GPU,)

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance = chance
        self.held: dict[int, int] = {}  # on the device, by pid
        self.parked: dict[int, int] = {}
        self.states: dict[int, State] = {}
        self.poisoned: list[int] = []
        self.restores = 0
        self.leases: list[Lease] = []
        for index, name in enumerate(NAMES):
            pid = 1000 + index
            record = Record(
                boot_id="b", lease=name, uid=os.geteuid(), phase=Phase.RUNNING,
                limits={UUID: chance.choice((20, 40, 77)) * GIB},
            )  # fmt: skip
            lease = Lease(record, LeaseDirectory(folder, name))
            lease.files.create(os.geteuid(), lease.limits, PagePhase.RUNNING)
            lease.processes = (
                Process(pid=pid, start_ticks=1, started_at=0, uid=0, parent=1, name="", kernel="",
                        carries=name, lease=name),
            )  # fmt: skip
            self.leases.append(lease)
            self.held[pid] = 512 * MIB
            self.states[pid] = State.RUNNING
            self.allocate(lease, pid)

    def free(self) -> int:
        return GPU.memory_bytes - sum(self.held.values())

    def allocate(self, lease: Lease, pid: int) -> None:
        """As the library lets it: within the limit, and not while its page says to wait."""
        if lease.files.phase() is not PagePhase.RUNNING or self.states[pid] is not State.RUNNING:
            return
        most = min(lease.limits[UUID] - self.held[pid], self.free())
        if most > 0:
            self.held[pid] += self.chance.randrange(most + 1)

    def meanwhile(self) -> None:
        """What neighbours do between any two calls."""
        for lease in self.leases:
            pid = lease.processes[0].pid
            dice = self.chance.random()
            if dice < 0.5:
                self.allocate(lease, pid)
            elif dice < 0.6 and self.states[pid] is State.RUNNING:
                self.held[pid] = 512 * MIB

    # Nvml
    def free_bytes(self, uuid: str) -> int:
        self.meanwhile()
        free = self.free()
        self.meanwhile()
        return free

    def processes(self, uuid: str, turn_s: float | None = None) -> dict[int, int]:
        self.meanwhile()
        return {pid: count for pid, count in self.held.items() if count}

    def under_mps(self, uuid: str) -> frozenset[int]:
        return frozenset()

    # Checkpoint
    def state(self, pid: int) -> State:
        return self.states[pid]

    def lock(self, pid: int, timeout_s: float) -> None:
        self.meanwhile()
        self.states[pid] = State.LOCKED

    def checkpoint(self, pid: int, timeout_s: float) -> None:
        self.parked[pid], self.held[pid] = self.held[pid], 0
        self.states[pid] = State.CHECKPOINTED
        self.meanwhile()

    def restore(self, pid: int, timeout_s: float) -> None:
        # The driver's bookkeeping takes a little more than was there before.
        needed = self.parked[pid] + self.chance.randrange(room.MARGIN_BYTES)
        self.restores += 1
        if needed > self.free():
            self.states[pid] = State.FAILED
            self.poisoned.append(pid)
            return
        self.held[pid] = needed
        self.states[pid] = State.LOCKED
        self.meanwhile()

    def unlock(self, pid: int) -> None:
        self.states[pid] = State.RUNNING
        self.meanwhile()


def mover_on(
    paper: Paper, alive: Callable[[tuple[int, int]], bool] = lambda key: True, **other: Any
) -> Mover:
    processes = SimpleNamespace(
        alive=alive,
        scan=lambda owners: {
            lease.name: tuple(each for each in lease.processes if alive(each.key)) for lease in paper.leases
        },
        core_filter=lambda key: -1,
    )
    keeps = SimpleNamespace(save=lambda record: None)
    everything: dict[str, Any] = {
        "nvml": paper, "checkpoint": paper, "processes": processes, "state": keeps,
        "host": SimpleNamespace(promise=lambda by_pid, held: NoLimit()),
        "events": Events(), "boot_id": "b", "hindrance": lambda uuid: "", "out_of_service": lambda uuid: "",
        "on_driver_error": lambda uuid: None, "margin_bytes": lambda uuid: room.MARGIN_BYTES,
        "leases": lambda: paper.leases, "on_suspended": lambda: None, "on_phase": lambda lease: None,
    }  # fmt: skip
    return Mover(**(everything | other))


class NoLimit:
    """Host memory that never runs out."""

    def __enter__(self) -> str:
        return ""

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (room, "ROOM_WAIT_S"),
        (suspend, "ROOM_WAIT_S"),
        (room, "SETTLE_S"),
        (room, "POLL_S"),
    ):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(steps, "GONE_WAIT_S", 0.05)


def history(seed: int, folder: Path, **other: Any) -> Paper:
    """Some dozen moves in random order."""
    folder.mkdir()
    chance = random.Random(seed)
    paper = Paper(chance, folder)
    mover = mover_on(paper, **other)
    for _ in range(24):
        lease = chance.choice(paper.leases)
        for each in paper.leases:  # as the last sample saw it
            each.used_bytes = {UUID: paper.held[each.processes[0].pid]}
        if lease.phase is Phase.RUNNING:
            mover.suspend(lease, "", 1.0)
        elif lease.phase is Phase.SUSPENDED:
            mover.resume(lease, 0.0)
        paper.meanwhile()
    for lease in paper.leases:
        lease.files.close()
    return paper


def test_no_history_poisons_a_process(tmp_path: Path, impatient: None) -> None:
    restores = 0
    for seed in range(HISTORIES):
        paper = history(seed, tmp_path / str(seed))
        assert not paper.poisoned, f"seed {seed}"
        assert not [lease.name for lease in paper.leases if lease.phase is Phase.LOST]
        restores += paper.restores
    assert restores > 2 * HISTORIES
    print(f"\n{HISTORIES} histories, {restores} restores, none poisoned")


def blind(self: DeviceRoom, saved: Any, timeout_s: float) -> Any:
    return NoLimit()


def believing(self: DeviceRoom, saved: Any) -> Any:
    return NoLimit()


@pytest.mark.parametrize(("name", "without"), [("promise", blind), ("_held_back", believing)])
def test_each_part_of_the_gate_is_needed(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, name: str, without: Callable[..., Any]
) -> None:
    """The same histories without the look, or without keeping the room: processes are lost."""
    monkeypatch.setattr(DeviceRoom, name, without)
    assert any(history(seed, tmp_path / str(seed)).poisoned for seed in range(60))


def test_the_margin_is_needed(tmp_path: Path, impatient: None) -> None:
    lost = [history(s, tmp_path / str(s), margin_bytes=lambda uuid: 0).poisoned for s in range(60)]
    assert any(lost)


def test_who_waits_first_is_served_first(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small restore does not slip in front of a large one that waits for the same room."""
    free = [30 * GIB]
    nvml = SimpleNamespace(free_bytes=lambda uuid: free[0], gpus=(GPU,))
    rooms = DeviceRoom(nvml, lambda uuid: 0, lambda: ())  # type: ignore[arg-type]
    large, small = {UUID: 40 * GIB}, {UUID: 10 * GIB}
    rooms._waiting.append(large)  # as while it waits
    with pytest.raises(Undo) as refused, rooms.promise(small, 0.0):
        pass
    assert refused.value.refused is Refusal.NO_ROOM
    free[0] = 50 * GIB
    with rooms.promise(small, 0.0):
        pass
    rooms._waiting.clear()
    free[0] = 30 * GIB
    with rooms.promise(small, 0.0), rooms.promise({UUID: 20 * GIB}, 0.0):
        pass


@pytest.mark.parametrize(
    ("step", "phase"),
    [
        ("suspend:locked", Phase.RUNNING),
        ("suspend:one", Phase.SUSPENDED),
        ("resume:restored", Phase.RUNNING),
    ],
)
def test_a_move_that_breaks_off_for_a_reason_nobody_thought_of_is_settled_later(
    tmp_path: Path, impatient: None, step: str, phase: Phase
) -> None:
    paper = Paper(random.Random(1), tmp_path)
    breaks = [step]

    def broken(name: str) -> None:
        if name in breaks:
            raise OSError("Too many open files")

    mover, lease = mover_on(paper, step=broken), paper.leases[0]
    if step.startswith("resume"):
        assert mover.suspend(lease, "", 1.0).done
    with pytest.raises(OSError, match="Too many"):
        mover.resume(lease, 0.0) if lease.phase is Phase.SUSPENDED else mover.suspend(lease, "", 1.0)
    assert lease.unsettled  # so the sampler's thread calls this
    breaks.clear()
    mover.settle(lease)
    assert (lease.phase, lease.unsettled) == (phase, False)
    reached = State.RUNNING if phase is Phase.RUNNING else State.CHECKPOINTED
    assert paper.states[lease.processes[0].pid] is reached
    assert mover.suspend(lease, "", 1.0).done
    assert not lease.unsettled


def test_a_lock_that_hit_another_process_with_the_pid_of_one_that_ended_is_undone(
    tmp_path: Path, impatient: None
) -> None:
    """The driver knows pids only, and one may be used again between the look and the lock."""
    paper = Paper(random.Random(1), tmp_path)
    lease = paper.leases[0]
    process, lock = lease.processes[0], paper.lock
    ended: list[tuple[int, int]] = []

    def lock_the_next_with_this_pid(pid: int, timeout_s: float) -> None:
        ended.append(process.key)
        lock(pid, timeout_s)

    paper.lock = lock_the_next_with_this_pid  # type: ignore[method-assign]
    mover = mover_on(paper, alive=lambda key: key not in ended)
    assert mover.suspend(lease, "", 1.0).done
    assert lease.parked == {}
    assert paper.states[process.pid] is State.RUNNING


def test_a_lease_is_held_back_until_the_last_restore_beside_it_is_over(tmp_path: Path) -> None:
    paper = Paper(random.Random(1), tmp_path)
    bo = paper.leases[1]
    with bo.held_back():
        with bo.held_back():
            assert bo.files.phase() is PagePhase.RESUMING
        assert bo.files.phase() is PagePhase.RESUMING
        bo.enter(Phase.SUSPENDING)  # its own move says more
        assert bo.files.phase() is PagePhase.SUSPENDING
    assert bo.files.phase() is PagePhase.SUSPENDING
    with bo.held_back():
        bo.enter(Phase.RUNNING)
        assert bo.files.phase() is PagePhase.RESUMING
        bo.dropped = True
        bo.files.revoke()
    assert bo.files.phase() is None
