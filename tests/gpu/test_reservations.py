"""A restore never meets a full device: many seeded histories on a modelled driver.

The driver here is a few numbers: what each process holds, and a restore that loses
its process for ever when it does not fit, as the real one does.  Before every answer
it lets the neighbours allocate, free and end, so that whatever was looked up may be
different a moment later.  The mover, the reservations, the leases and their files are real.

    GPUSHARE_TEST_HISTORIES=10000 pytest tests/gpu/test_reservations.py -k loses -s --timeout 0
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver import denied
from jupyter_gpushare.gpu.driver.bounded import TIMED_OUT
from jupyter_gpushare.gpu.driver.checkpoint import CallNotMade, ProcessState
from jupyter_gpushare.gpu.driver.ladder import margin_bytes
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, DriverGpu
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.devices import DeviceStates, Verdict
from jupyter_gpushare.gpu.leases.files import PagePhase
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.moves import reservations, steps, suspend
from jupyter_gpushare.gpu.moves.reservations import MemoryReservations, MoveRefused
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.protocol.helper import Phase, Refusal
from tests.gpu.leases import lease_of, process_of

HISTORIES = int(os.environ.get("GPUSHARE_TEST_HISTORIES", "60"))
GIB = 1 << 30
MIB = 1 << 20
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
GPU = DriverGpu(UUID, 0, "paper", 80 * GIB, mig=False, island="")
OTHER = replace(GPU, uuid="GPU-ffeeddcc-bbaa-9988-7766-554433221100", index=1)
NAMES = ("ada", "bo", "cy", "di")


class Paper:
    """The driver, and all that the mover needs beside it."""

    unavailable = ""
    gpus = (GPU, OTHER)
    left_out = ()
    driver = "999"

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance = chance
        self.held: dict[int, int] = {}  # on its device, by pid
        self.place: dict[int, str] = {}
        self.parked: dict[int, int] = {}
        self.states: dict[int, ProcessState] = {}
        self.lost: list[int] = []
        self.restores = 0
        self.leases: list[HelperLease] = []
        for index, name in enumerate(NAMES):
            pid = 1000 + index
            limits = {UUID: chance.choice((20, 40, 77)) * GIB}
            lease = lease_of(name, limits, folder=folder)
            lease.files.create(os.geteuid(), lease.limits, PagePhase.RUNNING)
            lease.processes = (process_of(pid, lease=name),)
            self.leases.append(lease)
            self.held[pid], self.place[pid] = 512 * MIB, UUID
            self.states[pid] = ProcessState.RUNNING
            self.allocate(lease, pid)

    def free(self, uuid: str = UUID) -> int:
        return GPU.memory_bytes - sum(self.on(uuid).values())

    def on(self, uuid: str) -> dict[int, int]:
        return {pid: count for pid, count in self.held.items() if self.place[pid] == uuid}

    def allocate(self, lease: HelperLease, pid: int) -> None:
        """As the library lets it: within the limit, and not while its page says to wait."""
        if lease.files.phase() is not PagePhase.RUNNING or self.states[pid] is not ProcessState.RUNNING:
            return
        here = self.place[pid]  # a running lease has it
        most = min(lease.limits[here] - self.held[pid], self.free(here))
        if most > 0:
            self.held[pid] += self.chance.randrange(most + 1)

    def meanwhile(self) -> None:
        """What neighbours do between any two calls."""
        for lease in self.leases:
            pid = lease.processes[0].pid
            dice = self.chance.random()
            if dice < 0.5:
                self.allocate(lease, pid)
            elif dice < 0.6 and self.states[pid] is ProcessState.RUNNING:
                self.held[pid] = 512 * MIB

    # Nvml
    def free_bytes(self, uuid: str) -> int:
        self.meanwhile()
        free = self.free(uuid)
        self.meanwhile()
        return free

    def processes(self, uuid: str, wait_s: float | None = None) -> dict[int, int]:
        self.meanwhile()
        return {pid: count for pid, count in self.on(uuid).items() if count}

    def usage(self, uuid: str) -> DeviceReading:
        self.meanwhile()
        shown = self.processes(uuid)
        if self.chance.random() < 0.1:  # two calls of the driver: what is free may be of another moment
            self.meanwhile()
        free = self.free(uuid)
        return DeviceReading(GPU.memory_bytes - free, free, 0, dict(shown), None)

    def under_mps(self, uuid: str) -> frozenset[int]:
        return frozenset()

    def persistence_mode(self, uuid: str) -> bool | None:
        return None

    # Checkpoint
    def state(self, pid: int) -> ProcessState:
        return self.states[pid]

    def lock(self, pid: int, timeout_s: float) -> None:
        self.meanwhile()
        self.states[pid] = ProcessState.LOCKED

    def checkpoint(self, pid: int, timeout_s: float) -> None:
        self.parked[pid], self.held[pid] = self.held[pid], 0
        self.states[pid] = ProcessState.CHECKPOINTED
        self.meanwhile()

    def restore(self, pid: int, timeout_s: float, moves: Mapping[str, str]) -> None:
        place = self.place[pid]
        if moves and place not in moves:
            raise DeviceError("cuCheckpointProcessRestore", 1)
        place = moves.get(place, place)
        # The driver's bookkeeping takes a little more than was there before.
        needed = self.parked[pid] + self.chance.randrange(margin_bytes(self.parked[pid]))
        self.restores += 1
        if pid in self.lost:
            raise DeviceError("cuCheckpointProcessRestore", 304)
        if needed > self.free(place):
            # It stays CHECKPOINTED: NVIDIA/cuda-checkpoint issue 44, driver 580.95.05.
            self.lost.append(pid)
            raise DeviceError("cuCheckpointProcessRestore", 2)
        self.held[pid], self.place[pid] = needed, place
        self.states[pid] = ProcessState.LOCKED
        self.meanwhile()

    def unlock(self, pid: int) -> None:
        self.states[pid] = ProcessState.RUNNING
        self.meanwhile()


class Margin(DeviceStates):
    """Devices with this margin for restores, and a passed self-test."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__((GPU, OTHER))
        for uuid in (UUID, OTHER.uuid):
            self.set_verdict(uuid, Verdict(suspendable=True, movable=True))
        self._factor = factor

    def margin_bytes(self, uuid: str, saved_bytes: int) -> int:
        return self._factor * super().margin_bytes(uuid, saved_bytes)


def mover_on(
    paper: Paper,
    alive: Callable[[tuple[int, int]], bool] = lambda key: True,
    devices: DeviceStates | None = None,
) -> Mover:
    processes = SimpleNamespace(
        alive=alive,
        core_filter=lambda key: -1,
        exit_status=lambda key: None if alive(key) else signal.SIGKILL,
        is_contained=lambda process: False,
    )

    def put_on(lease: HelperLease, devices: Sequence[str]) -> None:
        lease.put_on(devices)
        lease.files.set_devices(devices)

    registry: Any = SimpleNamespace(
        all=lambda: paper.leases,
        living=lambda name: tuple(
            each
            for lease in paper.leases
            if lease.name == name
            for each in lease.processes
            if alive(each.key)
        ),
        phase_changed=lambda lease: None,
        put_on=put_on,
    )
    machine: Any = SimpleNamespace(
        nvml=paper,
        checkpoint=paper,
        processes=processes,
        state=SimpleNamespace(save=lambda record: None, boot_id="b"),
        host=SimpleNamespace(promise=lambda by_pid, held, lease: NoLimit()),
        events=Events(),
        files=SimpleNamespace(are_closed=False),
        seats=SimpleNamespace(required=False),
    )
    return Mover(machine, registry, devices or Margin(), lambda lease: None)


class NoLimit:
    """Host memory that never runs out."""

    def __enter__(self) -> str:
        return ""

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (reservations, "FREE_WAIT_S"),
        (suspend, "FREE_WAIT_S"),
        (reservations, "SETTLE_S"),
        (reservations, "POLL_S"),
    ):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(steps, "GONE_WAIT_S", 0.05)


def history(seed: int, folder: Path, *, elsewhere: bool = False, **other: Any) -> Paper:
    """Some dozen moves in random order; with ``elsewhere`` a resume is on any of two devices."""
    folder.mkdir()
    chance = random.Random(seed)
    paper = Paper(chance, folder)
    mover = mover_on(paper, **other)
    for _ in range(24):
        lease = chance.choice(paper.leases)
        if lease.phase is Phase.RUNNING:
            mover.suspend(lease, "", 1.0)
        elif lease.phase is Phase.SUSPENDED:
            mover.resume(lease, 0.0, [chance.choice((UUID, OTHER.uuid))] if elsewhere else ())
        paper.meanwhile()
    for lease in paper.leases:
        lease.files.close()
    return paper


@pytest.mark.long_form
def test_no_history_loses_a_process(tmp_path: Path, impatient: None) -> None:
    restores = 0
    for seed in range(HISTORIES):
        paper = history(seed, tmp_path / str(seed))
        assert not paper.lost, f"seed {seed}"
        assert not [lease.name for lease in paper.leases if lease.phase is Phase.LOST]
        restores += paper.restores
    assert restores > 2 * HISTORIES
    print(f"\n{HISTORIES} histories, {restores} restores, none lost")


@pytest.mark.long_form
def test_no_history_of_moves_loses_a_process(tmp_path: Path, impatient: None) -> None:
    """A lease is where its memory is, whether it moved or was refused."""
    moved = 0
    for seed in range(HISTORIES):
        paper = history(seed, tmp_path / str(seed), elsewhere=True)
        assert not paper.lost, f"seed {seed}"
        for lease in paper.leases:
            place = paper.place[lease.processes[0].pid]
            assert list(lease.limits) == [place]
            assert (lease.moves_from, lease.phase in (Phase.RUNNING, Phase.SUSPENDED)) == ((), True)
            moved += place != UUID
    assert moved > HISTORIES


def unchecked(self: MemoryReservations, saved: Any, timeout_s: float) -> Any:
    return NoLimit()


def unpaused(self: MemoryReservations, saved: Any) -> Any:
    return NoLimit()


@pytest.mark.parametrize(("name", "without"), [("reserve", unchecked), ("_allocations_paused", unpaused)])
def test_each_part_of_the_gate_is_needed(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, name: str, without: Callable[..., Any]
) -> None:
    """The same histories without the look, or without reserving the memory: processes are lost."""
    monkeypatch.setattr(MemoryReservations, name, without)
    assert any(history(seed, tmp_path / str(seed)).lost for seed in range(60))


def test_the_margin_is_needed(tmp_path: Path, impatient: None) -> None:
    lost = [history(s, tmp_path / str(s), devices=Margin(0)).lost for s in range(60)]
    assert any(lost)


def test_restores_are_served_in_the_order_of_their_requests(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small restore does not slip in front of a large one that waits for the same memory."""
    free = [30 * GIB]
    nvml = SimpleNamespace(free_bytes=lambda uuid: free[0], gpus=(GPU,))
    registry: Any = SimpleNamespace(all=list)
    reservations_of = MemoryReservations(nvml, Margin(0), registry)  # type: ignore[arg-type]
    large, small = {UUID: 40 * GIB}, {UUID: 10 * GIB}
    reservations_of._waiting.append(large)  # as while it waits
    with pytest.raises(MoveRefused) as refused, reservations_of.reserve(small, 0.0):
        pass
    assert refused.value.refused is Refusal.NO_MEMORY
    free[0] = 50 * GIB
    with reservations_of.reserve(small, 0.0):
        pass
    reservations_of._waiting.clear()
    free[0] = 30 * GIB
    with reservations_of.reserve(small, 0.0), reservations_of.reserve({UUID: 20 * GIB}, 0.0):
        pass


@pytest.mark.parametrize(
    ("call", "phase"),
    [("lock", Phase.RUNNING), ("checkpoint", Phase.SUSPENDED), ("restore", Phase.RUNNING)],
)
def test_a_move_that_breaks_off_for_an_unexpected_reason_is_settled_later(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, call: str, phase: Phase
) -> None:
    paper = Paper(random.Random(1), tmp_path)
    mover, lease = mover_on(paper), paper.leases[0]
    paper.meanwhile = lambda: None  # type: ignore[method-assign]  # there is memory to come back to
    if call == "restore":
        assert mover.suspend(lease, "", 1.0).done
    done = getattr(paper, call)

    def breaks_off(pid: int, timeout_s: float, *moves: Any) -> None:
        done(pid, timeout_s, *moves)
        raise OSError("Too many open files")

    monkeypatch.setattr(paper, call, breaks_off)
    with pytest.raises(OSError, match="Too many"):
        mover.resume(lease, 0.0) if lease.phase is Phase.SUSPENDED else mover.suspend(lease, "", 1.0)
    assert lease.unsettled  # so the sampler's thread calls this
    monkeypatch.setattr(paper, call, done)
    mover.settle(lease)
    assert (lease.phase, lease.unsettled) == (phase, False)
    reached = ProcessState.RUNNING if phase is Phase.RUNNING else ProcessState.CHECKPOINTED
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
    assert paper.states[process.pid] is ProcessState.RUNNING


@pytest.mark.parametrize(
    ("code", "may_trace", "says"),
    [
        (304, False, ": the helper needs root or CAP_SYS_PTRACE"),
        (800, False, ": the helper needs root or CAP_SYS_PTRACE"),
        (304, True, ": this GPU or driver may not support it"),
        (801, False, "failed with code 801"),
    ],
)
def test_a_lock_that_is_denied_says_what_is_missing(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, code: int, may_trace: bool, says: str
) -> None:
    """NVIDIA/cuda-checkpoint issues 6, 25 and 37: for want of rights, and to root."""
    monkeypatch.setattr(denied, "_may_trace", lambda: may_trace)
    paper = Paper(random.Random(1), tmp_path)

    def refuse(pid: int, timeout_s: float) -> None:
        raise DeviceError("cuCheckpointProcessLock", code)

    paper.lock = refuse  # type: ignore[method-assign]
    moved = mover_on(paper).suspend(paper.leases[0], "", 1.0)
    assert moved.refused is Refusal.NOT_SUSPENDABLE
    assert moved.reason.endswith(says)


@pytest.mark.parametrize("code", [1, 3])
def test_a_process_that_the_driver_says_uses_no_cuda_is_left_out_without_fault(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It may be listed with bytes all the same (llm-d-rl-time-slicing pull request 148)."""
    paper, devices = Paper(random.Random(1), tmp_path), Margin()
    lease = paper.leases[0]

    def refuse(pid: int, timeout_s: float) -> None:
        raise DeviceError("cuCheckpointProcessLock", code)

    monkeypatch.setattr(paper, "lock", refuse)
    assert mover_on(paper, devices=devices).suspend(lease, "", 1.0).done
    assert (lease.parked, lease.failures, devices.is_doubted(UUID)) == ({}, {}, False)


def test_a_suspension_is_undone_while_the_device_shows_its_memory_as_used(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of processes alone does not show that the memory is free."""
    paper = Paper(random.Random(1), tmp_path)
    monkeypatch.setattr(paper, "meanwhile", lambda: None)
    lease, look, used_bytes = paper.leases[0], paper.usage, GPU.memory_bytes - paper.free()
    monkeypatch.setattr(paper, "usage", lambda uuid: replace(look(uuid), used_bytes=used_bytes))
    moved = mover_on(paper).suspend(lease, "", 1.0)
    assert (moved.refused, moved.reason) == (Refusal.BUSY, "the driver still shows the memory of the lease")
    assert paper.states[lease.processes[0].pid] is ProcessState.RUNNING


@pytest.mark.parametrize(("code", "final"), [(2, 1), (304, 2), (401, 2), (801, 2), (999, 2), (719, 0)])
def test_the_codes_of_a_restore_say_whether_its_process_is_lost(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, code: int, final: int
) -> None:
    """The number is that of the answer after which nothing is tried again; 0: it may go on."""
    ends = (final, Phase.LOST) if final else (steps.RETRIES, Phase.SUSPENDED)
    paper = Paper(random.Random(1), tmp_path)
    monkeypatch.setattr(paper, "meanwhile", lambda: None)
    mover, lease, asked = mover_on(paper), paper.leases[0], []
    assert mover.suspend(lease, "", 1.0).done

    def refuse(pid: int, timeout_s: float, moves: Mapping[str, str]) -> None:
        asked.append(pid)
        raise DeviceError("cuCheckpointProcessRestore", code)

    monkeypatch.setattr(paper, "restore", refuse)
    assert not mover.resume(lease, 0.0).done
    assert (len(asked), lease.phase) == ends


@pytest.mark.parametrize(
    ("answers", "is_lost"),
    [
        ([DeviceError("cuCheckpointProcessGetState", TIMED_OUT)] * 2, True),
        ([CallNotMade("cuCheckpointProcessGetState", "16 driver calls have not returned")] * 2, False),
        (
            [
                DeviceError("cuCheckpointProcessGetState", TIMED_OUT),
                ProcessState.RESTORING,
                DeviceError("cuCheckpointProcessGetState", TIMED_OUT),
            ],
            False,
        ),
    ],
)
def test_a_process_is_out_of_step_where_every_question_about_it_fails_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[ProcessState | DeviceError], is_lost: bool
) -> None:
    """Each answer comes 40 s after the one before; a copy takes 30 s at most."""
    paper, now = Paper(random.Random(1), tmp_path), [0.0]
    monkeypatch.setattr(paper, "meanwhile", lambda: None)
    mover, lease = mover_on(paper), paper.leases[0]
    assert mover.suspend(lease, "", 1.0).done
    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(steps, "copy_s", lambda parked: 30.0)

    def answer(pid: int) -> ProcessState:
        said = answers[int(now[0] // 40)]
        if isinstance(said, DeviceError):
            raise said
        return said

    monkeypatch.setattr(paper, "state", answer)
    for _ in answers:
        mover.settle(lease)
        now[0] += 40
    assert bool(lease.lost) == is_lost


def test_a_process_that_the_driver_answers_for_again_writes_core_files_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper, filters = Paper(random.Random(1), tmp_path), []
    monkeypatch.setattr(paper, "meanwhile", lambda: None)
    mover, lease = mover_on(paper), paper.leases[0]
    assert mover.suspend(lease, "", 1.0).done
    ((key, parked),) = lease.parked.items()
    lease.lost, lease.parked = {key: replace(parked, out_of_step=True, core_filter=0x33)}, {}
    lease.enter(Phase.LOST)
    monkeypatch.setattr(mover._machine.processes, "alive", lambda key: True)
    monkeypatch.setattr(
        mover._machine.processes, "set_core_filter", lambda *given: filters.append(given), raising=False
    )
    mover.forget_lost(lease)
    assert (lease.phase, filters) == (Phase.LOST, [])
    paper.states[key[0]] = ProcessState.LOCKED
    mover.forget_lost(lease)
    assert (lease.phase, paper.states[key[0]], filters) == (
        Phase.RUNNING,
        ProcessState.RUNNING,
        [(key, 0x33)],
    )


def test_a_lease_is_held_back_until_the_last_restore_beside_it_is_over(tmp_path: Path) -> None:
    paper = Paper(random.Random(1), tmp_path)
    bo = paper.leases[1]
    with bo.allocations_paused():
        with bo.allocations_paused():
            assert bo.files.phase() is PagePhase.PAUSED
        assert bo.files.phase() is PagePhase.PAUSED
        bo.enter(Phase.SUSPENDING)  # its own move says more
        assert bo.files.phase() is PagePhase.SUSPENDING
    assert bo.files.phase() is PagePhase.SUSPENDING
    with bo.allocations_paused():
        bo.enter(Phase.RUNNING)
        assert bo.files.phase() is PagePhase.PAUSED
        bo.dropped = True
        bo.files.revoke()
    assert bo.files.phase() is None


@pytest.mark.parametrize(
    ("held_gib", "unlisted_gib", "paused"),
    [(1, 0, False), (1, 40, True), (18, 0, False), (18, 12, True)],
)
def test_memory_that_no_process_of_a_session_explains_counts_beside_a_restore(
    tmp_path: Path, held_gib: int, unlisted_gib: int, paused: bool
) -> None:
    """Graphics sessions are not listed, and of some processes the driver does not say what they hold.

    What a session holds is part of its limit.
    """
    paper = Paper(random.Random(1), tmp_path)
    bo = paper.leases[1]
    bo.limits[UUID] = 36 * GIB
    used = (held_gib + unlisted_gib) * GIB
    listed = {bo.processes[0].pid: held_gib * GIB, 7: None}
    usage = DeviceReading(used, GPU.memory_bytes - used, 0, listed, None)
    shows = SimpleNamespace(gpus=(GPU,), usage=lambda uuid: usage, free_bytes=lambda uuid: 60 * GIB)
    registry = SimpleNamespace(all=lambda: [bo])
    reservations = MemoryReservations(shows, DeviceStates((GPU,)), registry)  # type: ignore[arg-type]
    with reservations.reserve({UUID: 30 * GIB}, 1.0):
        assert (bo.files.phase() is PagePhase.PAUSED) == paused
    assert bo.files.phase() is PagePhase.RUNNING
