"""Processes and files of users that keep their readers waiting: other users and leases go on."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_gpushare.gpu.leases import own_memory
from jupyter_gpushare.gpu.leases.files import LeaseDirectory, PagePhase
from jupyter_gpushare.gpu.leases.own_memory import OwnMemoryReader
from jupyter_gpushare.gpu.leases.processes import Processes
from tests.gpu.machine import GIB, Machine, until
from tests.hanging import HangingFile, hanging_process, why_not

EVE_UID = 40_000_000 + os.getpid()  # of no process of another run
NO_FUSE = why_not()


def with_fuse(test: Callable[..., None]) -> Callable[..., None] | None:
    """Collect a test only where a filesystem can be mounted; nowhere is it skipped."""
    return None if NO_FUSE else test


def threads() -> int:
    return sum(thread.name == "own-memory" for thread in threading.enumerate())


def test_a_user_holds_four_threads_at_most_and_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_memory, "LOOK_S", 0.2)
    answers, before = threading.Event(), threads()
    reader = OwnMemoryReader(lambda pid: pid < 100 and answers.wait())
    eves, others = {(pid, 1): 1 for pid in range(1, 10)}, {(101, 1): 2, (102, 1): 3}
    for _ in range(6):
        until(lambda: reader.read(eves | others).keys() == others.keys(), "others are read")
    until(lambda: threads() - before == own_memory.THREADS_PER_USER, "the others have ended")
    answers.set()
    until(lambda: reader.read(eves | others).keys() == eves.keys() | others.keys(), "all are read")
    until(lambda: threads() == before, "no thread is left")


@with_fuse
def test_a_process_that_holds_its_memory_delays_no_scan(tmp_path: Path) -> None:
    eve = f"eve{uuid.uuid4().hex}"
    processes = Processes(tmp_path)
    try:
        with hanging_process(EVE_UID, {**os.environ, "GPUSHARE_LEASE": eve}) as (pid, file):
            assert processes.scan({eve: EVE_UID}) == {eve: ()}
            assert EVE_UID in processes.unread_users
            process = processes.find(pid)
            assert process is not None
            assert (process.unread, process.uid) == (True, EVE_UID)
            file.unmount()
            until(lambda: processes.scan({eve: EVE_UID})[eve], "it is read once it answers")
            assert EVE_UID not in processes.unread_users
    finally:
        processes.close()


@with_fuse
def test_the_leases_of_others_are_measured_and_moved_beside_it(bare: Machine) -> None:
    with hanging_process(EVE_UID, dict(os.environ)) as (_, file):
        bare.start()
        limits = {bare.uuids()[0]: 8 * GIB}
        bare.ask("set_limit", lease="eve", uid=EVE_UID, limits=limits)
        bare.lease("ada", 8 * GIB)
        worker = bare.worker("ada", mib=64)
        until(lambda: bare.of("eve")["unread_since"] > 0, "the helper says that eve's do not answer")
        assert bare.of("ada")["unread_since"] == 0
        assert bare.ask("suspend", lease="ada", calls=bare.settled("ada"))["done"]
        assert bare.ask("resume", lease="ada")["done"]
        assert worker.do("check") == "ok"
        file.unmount()
        until(lambda: bare.of("eve")["unread_since"] == 0, "they answer")


def test_nothing_is_judged_gone_while_a_process_of_its_user_does_not_answer(bare: Machine) -> None:
    answers = bare.folder / "answers"
    silent = bare.folder / "silent"
    silent.symlink_to(shutil.which("sleep") or "sleep")
    bare.start(before=SILENT.format(answers=str(answers)))
    bare.lease("ada", 8 * GIB)
    worker, events = bare.worker("ada", mib=64), bare.watch()
    sleeps = bare.worker(command=(str(silent), "600"), wait=False)
    until(lambda: bare.of("ada")["unread_since"] > 0, "the helper says that a process does not answer")
    worker.kill()
    bare.settled("ada")
    assert bare.of("ada")["alive"]
    bare.lease("bo", 8 * GIB)
    bare.worker("bo")  # is seen
    answers.touch()
    ended = events.event("ended", "ada")
    assert ended is not None
    assert not bare.of("ada")["alive"]
    sleeps.kill()


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
