"""Processes and files of users that keep their readers waiting: other users and leases go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases.files import LeaseDirectory, PagePhase
from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.gpu.os import process_memory
from jupyter_gpushare.gpu.os.process_memory import ProcessMemoryReader
from tests.gpu.machine import GIB, PATIENCE_S, WORKER, Machine, Worker, until
from tests.hanging import HangingFile, hanging_process, why_not

EVE_UID = 40_000_000 + os.getpid()  # of no process of another run
NO_FUSE = why_not()


def with_fuse(test: Callable[..., None]) -> Callable[..., None] | None:
    """Collect a test only where a filesystem can be mounted; nowhere is it skipped."""
    return None if NO_FUSE else test


def threads() -> int:
    return sum(thread.name == "process-memory" for thread in threading.enumerate())


def test_a_user_holds_four_threads_at_most_and_no_other_user() -> None:
    answers, before = threading.Event(), threads()
    reader = ProcessMemoryReader(lambda pid: pid < 100 and answers.wait())
    eves, others = {(pid, 1): 1 for pid in range(1, 10)}, {(101, 1): 2, (102, 1): 3}

    def hold_all() -> bool:
        assert reader.read(eves | others).keys() <= others.keys()
        return threads() - before == process_memory.THREADS_PER_USER

    until(hold_all, "they hold all that they may")
    for _ in range(3):
        time.sleep(process_memory.ANSWER_S)
        until(lambda: reader.read(eves | others).keys() == others.keys(), "others are read")
    until(hold_all, "the others have ended")
    answers.set()
    until(lambda: reader.read(eves | others).keys() == eves.keys() | others.keys(), "all are read")
    until(lambda: threads() == before, "no thread is left")


@with_fuse
def test_a_process_that_holds_its_memory_delays_no_scan(tmp_path: Path) -> None:
    eve = f"eve{uuid.uuid4().hex}"
    processes = Processes(tmp_path)
    with hanging_process(EVE_UID, {**os.environ, "GPUSHARE_LEASE": eve}) as (pid, file):
        assert processes.scan({eve: EVE_UID}) == {eve: ()}
        assert EVE_UID in {process.uid for process in processes.unread}
        process = processes.find(pid)
        assert process is not None
        assert (process.unread, process.uid) == (True, EVE_UID)
        file.unmount()
        until(lambda: processes.scan({eve: EVE_UID})[eve], "it is read once it answers")
        assert EVE_UID not in {process.uid for process in processes.unread}


@with_fuse
def test_leases_are_measured_and_moved_beside_it(bare: Machine) -> None:
    with hanging_process(EVE_UID, dict(os.environ)):
        bare.start()
        limits = {bare.uuids()[0]: 8 * GIB}
        bare.ask("set_limit", lease="eve", uid=EVE_UID, limits=limits)
        worker = bare.session("ada", 8 * GIB)
        bare.settled("eve")
        # It uses no device: eve's lease may end.
        assert [bare.of(lease)["unread_since"] for lease in ("eve", "ada")] == [0, 0]
        assert bare.ask("suspend", lease="ada", calls=bare.settled("ada"))["done"]
        bare.resume("ada", worker)


class Silent:
    """A machine on which the processes named ``silent`` do not answer until `answer`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._answers = machine.folder / "answers"
        self._python = machine.folder / "silent"
        self._python.symlink_to(os.path.realpath(sys.executable))
        self.start()

    def start(self) -> None:
        self.machine.start(before=SILENT.format(answers=str(self._answers)))

    def worker(self, lease: str = "", **how: Any) -> Worker:
        worker = self.machine.worker(lease, command=(str(self._python), str(WORKER)), wait=False, **how)
        assert worker.answer() == "ready 0"
        return worker

    def answer(self) -> None:
        self._answers.touch()


@pytest.fixture
def silent(bare: Machine) -> Silent:
    return Silent(bare)


def test_a_lease_with_a_process_on_its_device_that_does_not_answer_is_not_judged_gone(
    silent: Silent,
) -> None:
    machine = silent.machine
    machine.lease("ada", 8 * GIB)
    worker, events = machine.worker("ada", mib=64), machine.watch()
    hidden = silent.worker()
    until(lambda: machine.of("ada")["unread_since"] > 0, "the helper says that a process does not answer")
    worker.kill()
    machine.settled("ada")
    assert machine.of("ada")["alive"]
    machine.lease("bo", 8 * GIB)
    machine.worker("bo")  # is seen
    silent.answer()
    ended = events.event("ended", "ada")
    assert ended is not None
    assert (machine.of("ada")["alive"], machine.of("ada")["unread_since"]) == (False, 0)
    hidden.kill()


def test_a_process_that_uses_no_device_and_does_not_answer_keeps_no_lease_from_ending(
    silent: Silent,
) -> None:
    machine = silent.machine
    machine.lease("ada", 8 * GIB)
    worker, events = machine.worker("ada", mib=64), machine.watch()
    silent.machine.worker(command=(str(machine.folder / "silent"), "-c", "input()"), wait=False)
    machine.settled("ada")
    worker.kill()
    assert events.event("ended", "ada") is not None


@pytest.mark.parametrize("preload", [True, False], ids=["counted in the account", "not counted"])
def test_a_new_helper_takes_no_lease_as_gone_with_processes_that_do_not_answer(
    silent: Silent, preload: bool
) -> None:
    machine = silent.machine
    machine.lease("ada", 8 * GIB)
    worker = silent.worker("ada", preload=preload)
    assert worker.do("alloc 64") == "0"
    machine.stop(signal.SIGKILL)
    silent.start()
    machine.settled("ada")
    ada = machine.of("ada")
    assert ada["alive"] if preload else ada["unread_since"] > 0


def test_a_new_helper_knows_the_suspended_processes_of_a_lease_that_do_not_answer(silent: Silent) -> None:
    machine = silent.machine
    machine.lease("ada", 8 * GIB)
    worker = silent.worker("ada")
    assert worker.do("alloc 64") == "0"
    until(lambda: machine.of("ada")["processes"], "the account names it")
    assert machine.ask("suspend", lease="ada", calls=machine.settled("ada"))["done"]
    (machine.state_dir / "leases" / "ada" / "account").unlink()
    machine.stop(signal.SIGKILL)
    silent.start()
    machine.settled("ada")
    assert machine.of("ada")["alive"]
    machine.resume("ada", worker)


def test_a_late_answer_is_used_by_the_next_look() -> None:
    answers, asked = threading.Event(), {(1, 1): 1}
    reader = ProcessMemoryReader(lambda pid: answers.wait())
    assert reader.read(asked, 0.0) == {}
    before = time.monotonic()
    answers.set()
    answer = until(lambda: reader.read(asked, 0.0), "it is kept")
    assert answer[1, 1].value is True
    assert reader.read({}, 0.0) == {}
    assert answer[1, 1].began_at <= before or reader.read(asked)


def test_no_scan_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    processes = Processes(tmp_path)
    waiting = threading.Event()

    def read(users: Mapping[Any, int], within_s: float) -> dict[Any, Any]:
        if within_s == PATIENCE_S:
            waiting.set()
            answers.wait(within_s)
        return {}

    monkeypatch.setattr(processes._memory, "read", read)
    first = threading.Thread(target=processes.scan, args=({}, PATIENCE_S))
    first.start()
    try:
        assert waiting.wait(PATIENCE_S)
        processes.scan({})
        assert first.is_alive()
    finally:
        answers.set()
        first.join()


# Run in the helper: the memory of processes named "silent" does not answer before the file is there.
SILENT = """
import os, time
from jupyter_gpushare import procfs
def read(pid, name, limit_bytes, read=procfs.read):
    while name in ("cmdline", "environ") and read(pid, "comm", 64) == b"silent\\n":
        if os.path.exists({answers!r}):
            break
        time.sleep(0.02)
    return read(pid, name, limit_bytes)
procfs.read = read
"""


@with_fuse
def test_an_account_on_another_filesystem_reads_as_broken(tmp_path: Path) -> None:
    files = LeaseDirectory(tmp_path, "eve")
    files.create(os.geteuid(), {"GPU-00000000-0000-0000-0000-000000000000": GIB}, PagePhase.RUNNING)
    assert files.account() is not None
    file = HangingFile(files.path / "account")
    try:
        assert files.account() is None
    finally:
        file.unmount()
    assert files.account() is not None
    files.close()
