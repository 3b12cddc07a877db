from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.protocol.jobfiles import (
    HELD_BYTES,
    LIVE_S,
    RECENT_BYTES,
    SILENT,
    AttemptRecord,
    BoundedLog,
    Disk,
    attempts_of,
    forget_old_attempts,
    forget_old_jobs,
    last_lines,
    log_end,
    log_path,
    read_log,
    read_text,
    write_record,
)
from tests.waiting import PATIENCE_S, until

DISK = Disk()


def small(path: Path) -> BoundedLog:
    return BoundedLog(path, DISK, head_bytes=10, part_bytes=4, tail_parts=2)


def written(path: Path, *chunks: bytes) -> BoundedLog:
    log = small(path)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    return log


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        yield


def read_all(path: Path) -> list[tuple[int, bytes]]:
    pieces, offset = [], 0
    while (piece := read_log(path, offset, 100)).data:
        pieces.append((piece.offset, piece.data))
        offset = piece.next_offset
    return pieces


def test_a_short_log_is_one_file_for_its_owner_only(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "job" / "attempt-1.log", DISK)
    log.write(b"one\n")
    log.write(b"two\n")
    log.close()
    assert (tmp_path / "job" / "attempt-1.log").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "job" / "attempt-1.log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


def test_of_a_long_log_beginning_and_end_are_kept_with_their_offsets(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = written(path, b"0123456789abcdefghijklmnopqrstuvwxyz")
    assert read_all(path) == [(0, b"0123456789"), (30, b"uvwx"), (34, b"yz")]
    assert log_end(path) == log.end == 36


@given(st.lists(st.binary(min_size=1, max_size=25), max_size=12))
def test_what_is_kept_is_what_was_printed_there(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    written(path, *chunks)
    printed = b"".join(chunks)
    pieces = read_all(path)
    for offset, data in pieces:
        assert printed[offset : offset + len(data)] == data
    assert sum(len(data) for _, data in pieces) <= 10 + 2 * 4
    assert printed.startswith(pieces[0][1] if pieces else b"")
    assert log_end(path) == len(printed)


def test_a_reader_behind_what_was_left_out_goes_on_behind_it(tmp_path: Path) -> None:
    log = small(tmp_path / "log")
    log.write(b"0123456789")
    log.flush()
    assert read_log(tmp_path / "log", 10, 100).data == b""
    log.write(b"a" * 20)
    log.flush()
    piece = read_log(tmp_path / "log", 10, 100)
    assert piece.offset > 10
    assert piece.data == b"aaaa"


@given(st.text(max_size=30), st.integers(1, 9), st.lists(st.integers(1, 40), max_size=6))
def test_pieces_of_text_are_whole_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, at_most: int, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    log = BoundedLog(path, DISK, head_bytes=10, part_bytes=4, tail_parts=99)
    printed, read, offset = text.encode(), "", 0
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(printed)]):
        log.write(printed[begin:end])
        log.flush()
        while (piece := read_text(partial(read_log, path), offset, at_most)).data:
            assert piece.offset == offset
            assert piece.data.decode() in text
            read, offset = read + piece.data.decode(), piece.next_offset
    log.close()
    assert read == text


def test_a_piece_of_text_behind_a_gap_or_anywhere_begins_with_a_character(tmp_path: Path) -> None:
    log = small(tmp_path / "log")
    log.write("€€€€€€€€".encode())  # 3 bytes each; kept: 0-10 and 18-24
    log.write(b"\xe2")
    log.flush()
    assert (
        read_text(partial(read_log, tmp_path / "log"), 0, 100).data == b"\xe2\x82\xac" * 3 + b"\xe2"
    )  # it was cut
    piece = read_text(partial(read_log, tmp_path / "log"), 10, 100)
    assert (piece.offset, piece.data.decode()) == (18, "€€")
    assert read_text(partial(read_log, tmp_path / "log"), 24, 100).data == b""
    for offset in (19, 20, 21):
        piece = read_text(partial(read_log, tmp_path / "log"), offset, 100, anywhere=True)
        assert (piece.offset, piece.data.decode()) == (21, "€")


@given(st.binary(max_size=60), st.integers(1, 9))
def test_what_is_no_text_is_read_to_its_end(
    tmp_path_factory: pytest.TempPathFactory, printed: bytes, at_most: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(printed)
    read = b""
    while (piece := read_text(partial(read_log, path), len(read), at_most)).data:
        read += piece.data
    assert printed.startswith(read)
    assert len(printed) - len(read) < 4
    assert (printed + b".").decode(errors="replace").startswith(read.decode(errors="replace"))


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none" / "log", 7, 10).data == b""
    assert log_end(tmp_path / "none" / "log") == 0


def test_a_disk_that_takes_nothing_is_survived_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = BoundedLog(tmp_path / "log", DISK)
    log.write(b"good")
    log.flush()
    with full_disk(monkeypatch):
        log.write(b"lost")
        log.flush()
    log.write(b"good again\n")
    log.close()
    assert log.left_out_bytes == 4
    assert read_all(tmp_path / "log")[0] == (0, b"good")
    said = b"[gpushare] 4 bytes were not written: No space left on device\n"
    assert read_all(tmp_path / "log")[1:] == [(8, b"good again\n" + said)]
    assert log_end(tmp_path / "log") == log.end == 19 + len(said)
    assert log.recent().data == b"goodlostgood again\n" + said
    assert log.read(4, 99).data.startswith(b"lost")


def test_a_folder_that_cannot_be_made_yet_loses_no_later_line(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    log = BoundedLog(tmp_path / "home" / "attempt-1.log", DISK)
    log.write(b"x" * (2 * HELD_BYTES + RECENT_BYTES))
    log.flush()
    assert log.why == "Not a directory" or log.why == "File exists"
    held = log.read(0, 2 * HELD_BYTES)
    assert log.end - held.offset == len(held.data) >= HELD_BYTES
    assert log.read(log.end, 4).data == b""
    (tmp_path / "home").unlink()
    log.write(b"good\n")
    log.close()
    assert attempts_of(tmp_path / "home") == [1]
    assert read_all(log.path)[-1][1].startswith(b"good\n[gpushare] 589,824 bytes were not written: ")


def test_a_full_disk_costs_nothing_that_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = small(tmp_path / "log")
    log.write(b"0123456789abcdefgh")
    log.flush()
    kept = [(0, b"0123456789"), (10, b"abcd"), (14, b"efgh")]
    with full_disk(monkeypatch):
        for _ in range(9):
            log.write(b"x")
        log.flush()
    assert log.left_out_bytes == 9
    assert [piece for piece in read_all(tmp_path / "log") if piece[1]] == kept
    assert len(list(tmp_path.iterdir())) <= 4
    log.write(b"back")
    log.close()
    said = b"back\n[gpushare] 9 bytes were not written: No space left on device\n"
    pieces = read_all(tmp_path / "log")
    assert pieces[0] == kept[0]
    assert b"".join(data for _, data in pieces[1:]) == said[-6:]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_disk_that_is_full_now_and_then_costs_only_what_it_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = BoundedLog(tmp_path / "log", DISK, part_bytes=1000, tail_parts=2)
    for period in range(9):
        log.write(b"%d" % period * 10)
        log.flush()
        with full_disk(monkeypatch):
            log.write(b"-")
            log.flush()
    log.close()
    kept = b"".join(data for _, data in read_all(tmp_path / "log"))
    assert all(b"%d" % period * 10 in kept for period in range(9))


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_what_a_network_s_disk_refuses_late_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """NFS takes bytes over a quota into memory, and says so when they are flushed or the file is closed."""
    log = BoundedLog(tmp_path / "log", DISK, head_bytes=10)
    log.write(b"0123456789")
    real = getattr(os, call)

    def refused(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        if call == "close":
            log.write(b"next")
        log.flush()
    assert (log.left_out_bytes, log.why) == (10, "Disk quota exceeded")
    log.close()


class SilentDisk:
    """A call of the operating system that does not return until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        real = getattr(os, call)
        self.called, self.answers = threading.Event(), threading.Event()

        def silent(*given: Any) -> Any:
            self.called.set()
            self.answers.wait(PATIENCE_S)
            return real(*given)

        monkeypatch.setattr(os, call, silent)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], SilentDisk]]:
    made: list[SilentDisk] = []

    def make(call: str) -> SilentDisk:
        made.append(SilentDisk(monkeypatch, call))
        return made[-1]

    yield make
    for each in made:
        each.answers.set()


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_silent_disk_delays_a_log_once_and_takes_the_newest_when_it_answers(
    tmp_path: Path, silent: Callable[[str], SilentDisk], call: str
) -> None:
    dead = silent(call)
    disk = Disk(PATIENCE_S if call == "fsync" else 0.1)
    log = BoundedLog(tmp_path / "log", disk)
    printed = b"first\n" + b"x" * 3 * HELD_BYTES + b"\nlast\n"
    began_at = time.monotonic()
    log.write(printed)
    disk.patience_s = 0.5
    log.flush()
    assert dead.called.is_set()
    assert time.monotonic() - began_at < 5
    # What was written is not lost because its flush takes long.
    assert (log.left_out_bytes, log.why) == ((0, "") if call == "fsync" else (len(printed), SILENT))
    assert log.recent().data.endswith(b"x\nlast\n")
    assert log.held(0, 9).offset >= log.end - 2 * HELD_BYTES
    disk.patience_s = PATIENCE_S
    dead.answers.set()
    log.flush()
    log.close()
    assert read_all(log.path)[0][1].startswith(b"first\n" if call != "open" else b"x")
    kept = b"".join(data for _, data in read_all(log.path))
    assert kept[-200:] == log.recent().data[-200:]
    if call == "fsync":
        assert (log.left_out_bytes, kept) == (0, printed)
    else:
        said = f"[gpushare] {log.left_out_bytes:,} bytes were not written: {SILENT}\n"
        assert kept.endswith(b"\nlast\n" + said.encode())
        assert len(kept) + log.left_out_bytes == log.end


def test_the_runner_s_own_lines_wait_for_no_disk(tmp_path: Path, silent: Callable[[str], SilentDisk]) -> None:
    silent("open")
    log = BoundedLog(tmp_path / "log", Disk())
    log.write(b"x" * (HELD_BYTES - RECENT_BYTES + 1))
    began_at = time.monotonic()
    log.write(b"asked to stop\n", waits=False)
    assert time.monotonic() - began_at < 1
    assert log.recent().data.endswith(b"asked to stop\n")


def test_a_log_that_is_closed_while_its_disk_is_slow_is_written_to_its_end(
    tmp_path: Path, silent: Callable[[str], SilentDisk]
) -> None:
    dead = silent("write")
    disk = Disk(0.1)
    log = BoundedLog(tmp_path / "log", disk)
    printed = b"".join(b"%d\n" % number for number in range(20_000))
    log.write(printed)
    log.close()
    dead.answers.set()
    until(lambda: not log.left_out_bytes, "the rest is written")
    disk.call(len, "").result(PATIENCE_S)
    assert b"".join(data for _, data in read_all(log.path)) == printed


async def test_what_a_slow_disk_is_to_do_is_done_in_the_end(
    silent: Callable[[str], SilentDisk], tmp_path: Path
) -> None:
    disk = Disk(0.05)
    dead = silent("open")
    assert not await disk.do(0.05, (tmp_path / "one").touch)
    time.sleep(disk.patience_s)
    assert not await disk.do(PATIENCE_S, (tmp_path / "two").touch)  # it is silent: not waited for
    dead.answers.set()
    disk.call(len, "").result(PATIENCE_S)
    assert await disk.do(PATIENCE_S, len, "")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


async def test_a_silent_disk_is_asked_once(silent: Callable[[str], SilentDisk], tmp_path: Path) -> None:
    disk = Disk(patience_s=0.05)
    (tmp_path / "log").touch()
    dead = silent("fstat")
    with pytest.raises(TimeoutError):
        await disk.ask(read_log, tmp_path / "log", 0, 9)
    assert dead.called.is_set()
    time.sleep(disk.patience_s)
    assert disk.is_silent
    began_at = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError):
            await disk.ask(read_log, tmp_path / "log", 0, 9)
    assert time.monotonic() - began_at < 100 * disk.patience_s
    dead.answers.set()
    await asyncio.wrap_future(disk.call(len, ""))
    assert (await disk.ask(read_log, tmp_path / "log", 0, 9)).data == b""


def test_a_log_of_an_earlier_life_of_the_same_attempt_is_replaced(tmp_path: Path) -> None:
    written(tmp_path / "log", b"x" * 30)
    written(tmp_path / "log", b"new")
    assert read_all(tmp_path / "log") == [(0, b"new")]


def test_a_link_in_the_place_of_a_log_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "log").symlink_to(tmp_path / "target")
    written(tmp_path / "log", b"x")
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert (tmp_path / "log").read_bytes() == b"x"


@pytest.mark.parametrize(("job", "attempt"), [("../x", 1), ("", 1), ("a/b", 1), ("abc", 0), ("A", 1)])
def test_a_name_that_is_no_job_leads_nowhere(tmp_path: Path, job: str, attempt: int) -> None:
    with pytest.raises(ValueError, match="no such job"):
        log_path(tmp_path, job, attempt)


def test_only_the_folders_that_were_written_to_last_are_kept(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / f"job{n}").mkdir()
        (tmp_path / f"job{n}" / "attempt-1.log").touch()
        os.utime(tmp_path / f"job{n}" / "attempt-1.log", (n, n))
        os.utime(tmp_path / f"job{n}", (n, n))
    os.utime(tmp_path / "job1" / "attempt-1.log", (9, 9))  # it still writes
    (tmp_path / "Not a job").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "job4")
    forget_old_jobs(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Not a job", "job1", "job4", "link"]


def record(folder: Path, attempt: int, state: Any, written_at: float) -> None:
    made = AttemptRecord(id=folder.name, attempt=attempt, name="n", command=["x"], state=state, log="l")
    assert write_record(folder / f"attempt-{attempt}.json", made)
    for path in (folder / f"attempt-{attempt}.json", folder):
        os.utime(path, (written_at, written_at))


def test_a_quiet_job_keeps_its_folder_until_it_has_ended(tmp_path: Path) -> None:
    now = time.time()
    for name, states in {
        "running": ["running"],
        "again": ["ended", "starting"],
        "ended": ["running", "ended"],
        "newest": ["ended"],
    }.items():
        for attempt, state in enumerate(states, 1):
            record(tmp_path / name, attempt, state, now - (0 if name == "newest" else 86400))
    record(tmp_path / "forgotten", 1, "running", now - LIVE_S - 86400)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "attempt-1.json").write_text("[")
    for path in (tmp_path / "broken" / "attempt-1.json", tmp_path / "broken"):
        os.utime(path, (now - 9, now - 9))
    forget_old_jobs(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "newest", "running"]


def test_of_many_attempts_the_newest_logs_are_kept(tmp_path: Path) -> None:
    for attempt in (1, 2, 3, 9, 10):
        written(tmp_path / f"attempt-{attempt}.log", b"x" * 20)
        record(tmp_path, attempt, "ended", 0)
    forget_old_attempts(tmp_path)
    assert attempts_of(tmp_path) == [3, 9, 10]
    assert len(list(tmp_path.glob("*.log*"))) == 3 * 3
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_record_is_replaced_in_one_step_or_not_at_all(tmp_path: Path) -> None:
    record = AttemptRecord(id="a", attempt=1, name="n", command=["x"], state="running", log="l")
    assert write_record(tmp_path / "job" / "attempt-1.json", record)
    assert (tmp_path / "job" / "attempt-1.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "job") == ["attempt-1.json"]
    (tmp_path / "file").touch()
    assert not write_record(tmp_path / "file" / "attempt-1.json", record)


def test_the_last_lines_of_a_notebook_begin_at_its_newest_cell() -> None:
    began = b"[IPKernelApp] WARNING | Kernel is running over TCP\n[gpushare] cell 1 of 1\n"
    died = b"Fatal Python error\n[gpushare] the kernel died\n"
    assert last_lines(began + died) == [
        "[gpushare] cell 1 of 1",
        "Fatal Python error",
        "[gpushare] the kernel died",
    ]
