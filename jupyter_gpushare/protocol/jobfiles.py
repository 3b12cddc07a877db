"""Logs and records of jobs in the user's own files, bounded in size.

    ~/.local/share/gpushare/jobs/<job>/attempt-<n>.log                 the first `HEAD_BYTES` it printed
                                       attempt-<n>.log.<offset>        later parts, named by their offset
                                       attempt-<n>.json                state, code, reason (`AttemptRecord`)

Rules:

* A long log keeps its head and its newest bytes, in at most `TAIL_PARTS` parts of `PART_BYTES`.
  Offsets count every byte that the job printed, so that readers detect gaps.
* Writing never raises and never ends a job.  Bytes that the disk refuses, or does not take in time,
  are counted as left out.  When the disk takes bytes again, a line in the log has their number and the
  reason.
* The runner holds the newest `HELD_BYTES` in memory, written or not, and shows the last `RECENT_BYTES`.
* The files can be read with a pager and by `read_log`, with or without a runner.
* Retention: all jobs that have not ended, the newest `KEEP_JOBS` ended jobs, and for each job
  the logs of the newest `KEEP_ATTEMPTS` attempts.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import functools
import json
import math
import os
import queue
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

T = TypeVar("T")

HEAD_BYTES = 32 << 20
PART_BYTES = 8 << 20
TAIL_PARTS = 4
RECENT_BYTES = 64 << 10
# The bytes kept in memory, for a disk that is slow or silent.
HELD_BYTES = 256 << 10
# The maximum by which a silent disk delays the output of a job, or its end.
DISK_PATIENCE_S = 5.0
SILENT = "the disk does not answer"
# The maximum number of parts of a log; each refusal of the disk ends a part.
MAX_PARTS = 64
KEEP_JOBS = 200
KEEP_ATTEMPTS = 3
# Seconds without output after which an unfinished job counts as abandoned.
LIVE_S = 30 * 86400.0

_LOG = re.compile(r"attempt-([1-9][0-9]{0,6})\.log")
_RECORD = re.compile(r"attempt-([1-9][0-9]{0,6})\.json")
# UTF-8 (RFC 3629): the bytes that continue a character, and the maximum length of a character.
_CONTINUATION = bytes(range(0x80, 0xC0))
_MAX_CHARACTER_BYTES = 4
_JOB_ID = re.compile(r"[a-z0-9]{1,40}")
# The limits of the last lines of a failed command.
_LAST_BYTES = 16 << 10
_LAST_LINES = 5
_CELL = "[gpushare] cell "  # `job.notebook`
_LAST_CHARS = 200  # of each line
# CSI sequences (ECMA-48): colours and cursor movements of a terminal.
_CSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def open_for_reading(path: Path) -> BinaryIO:
    """Open a regular file in a user's folder without waiting.

    Without O_NONBLOCK, open(2) waits for the other end of a FIFO, and up to
    `fs.lease-break-time` (45 s) for a lease (fcntl(2)) that a user holds on the file.

    Raises:
        OSError: the file cannot be opened without waiting, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(fd, "rb")


def jobs_dir(home: Path) -> Path:
    """Return the folder of all jobs of the user with this home directory."""
    return home / ".local" / "share" / "gpushare" / "jobs"


def log_path(home: Path, job: str, attempt: int) -> Path:
    """Return the path of the first part of an attempt's log.

    Raises:
        ValueError: ``job`` is not the id of a job, and could name another folder.
    """
    if not _JOB_ID.fullmatch(job) or attempt < 1:
        raise ValueError(f"{job[:60]!r}, attempt {attempt}: no such job")
    return jobs_dir(home) / job / f"attempt-{attempt}.log"


def own_output(output: Path, job: str) -> Path:
    """Return the path of a job's notebook if another job has written ``output``."""
    return output.with_name(f"{output.stem}-{job}{output.suffix}")


def attempts_of(folder: Path) -> list[int]:
    """Return the numbers of a job's attempts with a log in its folder, in order."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if match := _LOG.fullmatch(path.name):
                found.append(int(match[1]))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a log; ``data`` begins at ``offset``."""

    offset: int  # larger than the requested offset if bytes were left out there
    data: bytes

    @property
    def next_offset(self) -> int:
        """Return the offset of the first byte after this piece."""
        return self.offset + len(self.data)


def _parts(path: Path) -> list[tuple[int, Path]]:
    """Return the files of a log in order, with the offset at which each begins."""
    found = []
    with contextlib.suppress(OSError):
        if path.is_file():
            found.append((0, path))
        for other in path.parent.glob(f"{path.name}.*"):
            begin = other.name[len(path.name) + 1 :]
            if begin.isascii() and begin.isdigit():
                found.append((int(begin), other))
    return sorted(found)


def read_log(path: Path, offset: int, max_bytes: int) -> Piece:
    """Return the output of a job from ``offset`` on; without data if there is no more yet."""
    for begin, part in _parts(path):
        try:
            with open_for_reading(part) as file:
                size = os.fstat(file.fileno()).st_size
                if begin + size <= offset:
                    continue
                file.seek(max(0, offset - begin))
                return Piece(max(begin, offset), file.read(max_bytes))
        except OSError:
            continue  # the part was removed meanwhile
    return Piece(offset, b"")


def read_text(
    read: Callable[[int, int], Piece], offset: int, max_bytes: int, *, anywhere: bool = False
) -> Piece:
    """Return a piece of ``read`` in whole UTF-8 characters, so a few bytes more or less.

    ``offset`` is the end of an earlier piece, unless ``anywhere``.  With ``anywhere``, and after a gap, the
    rest of a character that began earlier is skipped.  A character that is not complete yet is left for
    the next call.
    """
    piece = read(offset, max_bytes)
    if anywhere or piece.offset > offset:
        rest = piece.data.lstrip(_CONTINUATION)
        piece = Piece(piece.next_offset - len(rest), rest)
    for _ in range(_MAX_CHARACTER_BYTES - 1):
        if not (incomplete := _incomplete_bytes(piece.data)):
            return piece
        more = read(piece.next_offset, 1)
        if more.offset > piece.next_offset:
            return piece  # the rest of the character was left out
        if not more.data:
            return Piece(piece.offset, piece.data[:-incomplete])
        piece = Piece(piece.offset, piece.data + more.data)
    return Piece(piece.offset, piece.data[: len(piece.data) - _incomplete_bytes(piece.data)])


def _incomplete_bytes(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[1 - _MAX_CHARACTER_BYTES :])
    return len(decoder.getstate()[0])


def log_end(path: Path) -> int:
    """Return the offset after the last byte in the files of a log."""
    ends = [0]
    for begin, part in _parts(path):
        with contextlib.suppress(OSError):
            ends.append(begin + part.stat().st_size)
    return max(ends)


def last_lines(printed: bytes) -> list[str]:
    """Return the last lines with text: at most 5 of 200 characters, without control characters.

    For a notebook, lines before its last cell are left out, because the start of a kernel prints warnings.
    """
    text = printed[-_LAST_BYTES:].decode(errors="replace")
    # Of a line that is redrawn, like a progress bar, only the last version is used.
    drawn = (line.rstrip("\r").rpartition("\r")[2] for line in _CSI.sub("", text).split("\n"))
    plain = ("".join(c if c.isprintable() else " " for c in line).rstrip() for line in drawn)
    kept = [line for line in plain if line][-_LAST_LINES:]
    kept = kept[max((n for n, line in enumerate(kept) if line.startswith(_CELL)), default=0) :]
    return [line if len(line) <= _LAST_CHARS else f"{line[: _LAST_CHARS - 3]}..." for line in kept]


def _words(error: OSError) -> str:
    return error.strerror or type(error).__name__


class Disk:
    """Makes calls that a dead disk may block, in order, in its own thread.

    The thread is a daemon: a call that never returns delays neither its caller nor the end of the process.
    """

    def __init__(self, patience_s: float = DISK_PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._since = math.inf  # the start of the current call
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Return whether a call has not returned for `patience_s`."""
        return time.monotonic() - self._since > self.patience_s

    def call(self, function: Callable[..., T], *args: Any, **named: Any) -> Future[T]:
        """Make a call after all earlier ones; the caller limits the number of waiting calls."""
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(function, *args, **named)))
        return future

    async def ask(self, function: Callable[..., T], *args: Any) -> T:
        """Make a call; return its result.

        Raises:
            TimeoutError: the disk did not answer within `patience_s`, or is silent already.
        """
        if self.is_silent:
            raise TimeoutError
        return await asyncio.wait_for(asyncio.wrap_future(self.call(function, *args)), self.patience_s)

    async def do(self, within_s: float, function: Callable[..., object], *args: Any) -> bool:
        """Make a call; return whether it was done ``within_s``, and False at once if the disk is silent.

        A late call is not cancelled.

        Raises:
            Exception: the call raised it in that time.
        """
        called = self.call(function, *args)
        if self.is_silent:
            return False
        done, _ = await asyncio.wait({asyncio.wrap_future(called)}, timeout=within_s)
        for future in done:
            future.result()
        return bool(done)

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            self._since = time.monotonic()
            try:
                result = call()
            except Exception as error:
                self._since = math.inf
                future.set_exception(error)
            else:
                self._since = math.inf
                future.set_result(result)


class BoundedLog:
    """The writing end of a log; it can be used from several threads.

    Output goes to memory at once.  Only the thread of `Disk` touches files: it writes the bytes in memory.
    When a silent disk answers again, the bytes that memory no longer has are left out.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk,
        *,
        head_bytes: int = HEAD_BYTES,
        part_bytes: int = PART_BYTES,
        tail_parts: int = TAIL_PARTS,
    ) -> None:
        self.path = path
        self._disk = disk
        # This condition guards the next fields; it is never held during a call of the disk.
        self._changed = threading.Condition()
        self._held = bytearray()  # the newest bytes: `HELD_BYTES` to twice that, or all that were printed
        self._end = 0
        self._done = 0  # the disk has taken or refused all bytes before this offset
        self._left_out_bytes = 0
        self._why = ""
        self._unreported_bytes = 0  # left out, and not yet reported in the log
        self._is_late = False  # the disk did not answer in time
        self._is_storing = False  # a call of `_store` waits or runs
        # The next fields belong to the disk's thread.
        self._part_bytes = part_bytes
        self._tail_parts = tail_parts
        self._file: int | None = None
        self._unsynced_bytes = 0  # written to the open file, but the disk may still refuse them
        self._room_bytes = head_bytes  # in the open part
        self._tail: dict[Path, int] = {}  # the parts, oldest first, with their sizes in bytes
        self._part: Path | None = None  # the open part, while it is empty
        disk.call(self._begin)

    @property
    def end(self) -> int:
        """Return the number of bytes that were printed, kept or not."""
        return self._end

    @property
    def left_out_bytes(self) -> int:
        """Return the number of bytes that the disk did not take; if it is silent, also of waiting bytes."""
        with self._changed:
            return self._left_out_bytes + (self._end - self._done if self._is_late else 0)

    @property
    def why(self) -> str:
        """Return why the disk did not take the last of them."""
        return SILENT if self._is_late else self._why

    def read(self, offset: int, max_bytes: int) -> Piece:
        """Read like `read_log`, with bytes from memory that the files lack."""
        held = self.held(offset, max_bytes)  # before the files, which can then only have more
        piece = read_log(self.path, offset, max_bytes)
        if not piece.data or held.offset < piece.offset:
            return held if held.data else piece
        return piece

    def held(self, offset: int, max_bytes: int) -> Piece:
        """Return the bytes in memory from ``offset`` on, without touching a file."""
        with self._changed:
            begin = max(offset, self._end - len(self._held))
            return Piece(begin, self._from(begin, max_bytes))

    def recent(self) -> Piece:
        """Return the newest `RECENT_BYTES` that were printed, kept or not, without touching a file."""
        return self.held(self._end - RECENT_BYTES, 2 * RECENT_BYTES)

    def write(self, data: bytes, *, waits: bool = True) -> None:
        """Append to the log; return even if the disk is full, gone or silent.

        With ``waits``, wait while memory is full of bytes for a slow disk, but at most `Disk.patience_s`
        for a silent one.
        """
        for at in range(0, len(data), RECENT_BYTES):
            with self._changed:
                if waits and not self._is_late:
                    is_room = self._changed.wait_for(self._has_room, self._disk.patience_s)
                    self._is_late |= not is_room
                self._append(data[at : at + RECENT_BYTES])

    def flush(self, within_s: float = math.inf) -> None:
        """Wait until the disk has all bytes, at most `Disk.patience_s` and ``within_s``."""
        within_s = 0.0 if self._disk.is_silent else min(within_s, self._disk.patience_s)
        until = time.monotonic() + within_s
        with self._changed:
            answers = self._changed.wait_for(lambda: self._done == self._end, within_s)
        if answers:
            answers = not wait([self._disk.call(self._sync)], max(0.0, until - time.monotonic())).not_done
        with self._changed:
            self._is_late |= not answers and self._done < self._end

    def close(self, within_s: float = math.inf) -> None:
        """Flush and close the log, unless the disk does not answer ``within_s``."""
        self.flush(within_s)
        closed = self._disk.call(self._close)
        if not self._disk.is_silent:
            wait([closed], min(within_s, self._disk.patience_s))

    # ---- memory; the caller holds `_changed` ------------------------------------

    def _has_room(self) -> bool:
        return self._end - self._done <= HELD_BYTES - RECENT_BYTES

    def _append(self, data: bytes) -> None:
        self._end += len(data)
        self._held += data
        if len(self._held) > 2 * HELD_BYTES:
            del self._held[: -max(HELD_BYTES, min(self._end - self._done, 2 * HELD_BYTES))]
        if not self._is_storing:
            self._is_storing = True
            self._disk.call(self._store)

    def _from(self, begin: int, max_bytes: int) -> bytes:
        at = max(0, begin - self._end + len(self._held))
        return bytes(self._held[at : at + max_bytes])

    def _lose(self, count: int, why: str) -> None:
        self._why = why
        self._left_out_bytes += count
        self._unreported_bytes += count

    def _report_loss(self) -> None:
        """Report in the log the bytes that were left out, when the disk takes bytes again."""
        at_begin = self._held.endswith(b"\n")
        line = f"[gpushare] {self._unreported_bytes:,} bytes were not written: {self._why}\n"
        self._unreported_bytes = 0
        self._append(line.encode() if at_begin else b"\n" + line.encode())

    # ---- in the thread of the disk ----------------------------------------------

    def _begin(self) -> None:
        for _, old in _parts(self.path):
            with contextlib.suppress(OSError):
                old.unlink()
        self._open(self.path)

    def _store(self) -> None:
        """Write the next waiting bytes; other calls of the disk run between two pieces."""
        with self._changed:
            begin = max(self._done, self._end - len(self._held))
            data = self._from(begin, RECENT_BYTES)
            if missing := begin - self._done:
                self._lose(missing, SILENT)
                self._room_bytes = 0
        written = self._put(begin, data)
        with self._changed:
            self._done = begin + len(data)
            self._is_late = self._is_late and self._done < self._end
            if written == len(data) and self._unreported_bytes:
                self._report_loss()
            self._is_storing = self._done < self._end
            if self._is_storing:
                self._disk.call(self._store)
            self._changed.notify_all()

    def _put(self, begin: int, data: bytes) -> int:
        """Write bytes that were printed from ``begin`` on; return the number that the disk took."""
        taken = 0
        while data:
            if self._room_bytes == 0:
                self._next_part(begin)
            now, data = data[: self._room_bytes], data[self._room_bytes :]
            written = self._write(now)
            taken += written
            begin += len(now)
            # A refusal ends the part, because the offset in a part's name must fit all of its bytes.
            self._room_bytes = self._room_bytes - written if written == len(now) else 0
        return taken

    def _close(self) -> None:
        with self._changed:
            if self._is_storing:  # `_store` writes the rest first
                self._disk.call(self._close)
                return
        if self._unsynced_bytes:
            self._sync()
        self._close_file()
        self._drop_empty()

    def _sync(self) -> None:
        """Flush to the disk; a network disk may refuse bytes only now."""
        if self._file is not None:
            try:
                os.fsync(self._file)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    self._lose_unsynced(error)
        self._unsynced_bytes = 0

    def _close_file(self) -> None:
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError as error:
                self._lose_unsynced(error)
            self._file, self._unsynced_bytes = None, 0

    def _lose_unsynced(self, error: OSError) -> None:
        """Count all bytes that were not flushed as left out; fewer may be missing."""
        with self._changed:
            self._lose(self._unsynced_bytes, _words(error))
            self._unsynced_bytes = 0

    def _drop_empty(self) -> None:
        if self._part is not None:
            with contextlib.suppress(OSError):
                self._part.unlink(missing_ok=True)
            self._part = None

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, flags | os.O_NONBLOCK, 0o600)
        except OSError as error:
            self._file, self._why = None, _words(error)

    def _write(self, data: bytes) -> int:
        """Write bytes; return the number that the disk took.  The others are left out."""
        written, why = 0, self._why
        if self._file is not None:
            why = os.strerror(errno.ENOSPC)
            try:
                written = os.write(self._file, data)
            except OSError as error:
                why = _words(error)
        with self._changed:
            self._unsynced_bytes += written
            if written < len(data):
                self._lose(len(data) - written, why)
        if written and self._part is not None:
            self._keep_part(self._part)
        if written and self._tail:
            self._tail[next(reversed(self._tail))] += written
        return written

    def _next_part(self, begin: int) -> None:
        self._close_file()
        self._drop_empty()
        self._part = self.path.with_name(f"{self.path.name}.{begin:015d}")
        self._open(self._part)
        self._room_bytes = self._part_bytes

    def _keep_part(self, part: Path) -> None:
        """Count a part when it is not empty, so that a full disk does not remove older parts."""
        self._part = None
        if not self._tail:
            with contextlib.suppress(OSError):
                self.path.touch(0o600)  # `attempts_of` finds an attempt by its head
        room = (self._tail_parts - 1) * self._part_bytes
        sizes = [min(size, self._part_bytes) for size in self._tail.values()]
        while sizes and (len(sizes) >= MAX_PARTS or sum(sizes) > room):
            oldest = next(iter(self._tail))
            del self._tail[oldest], sizes[0]
            with contextlib.suppress(OSError):
                oldest.unlink()
        self._tail[part] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """The state and the result of one attempt, in the JSON file beside its log."""

    id: str
    attempt: int
    name: str
    command: list[str]
    state: Literal["starting", "running", "ended"]
    log: str
    exit_code: int | None = None  # negative: the signal that ended it
    reason: str = ""
    stopped: bool = False  # it was requested to stop
    reported: bool = False  # the broker knows how it ended
    log_bytes: int = 0
    log_left_out_bytes: int = 0


def write_record(path: Path, record: AttemptRecord) -> bool:
    """Replace the file atomically; return whether the disk took it."""
    fresh = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(fresh, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(record), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        return False
    return True


def forget_old_jobs(folder: Path, keep: int = KEEP_JOBS) -> None:
    """Remove the folders of ended jobs, except the ``keep`` that were written last.

    A job that has not ended keeps its folder until it had no output for `LIVE_S`, because the failure of a
    machine leaves records of jobs that never end.
    """
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for job in folder.iterdir():
            if _JOB_ID.fullmatch(job.name) and not job.is_symlink() and job.is_dir():
                with contextlib.suppress(OSError):
                    # The folder's own time changes only when a file is added or removed.
                    written_at = max(f.lstat().st_mtime for f in (job, *job.iterdir()))
                    if _has_ended(job) or time.time() - written_at > LIVE_S:
                        found.append((written_at, job))
    for _, job in sorted(found, reverse=True)[keep:]:
        shutil.rmtree(job, ignore_errors=True)


def _has_ended(job: Path) -> bool:
    """Return whether the newest record in a job's folder has ended, or there is no record."""
    records = {int(m[1]): path for path in job.iterdir() if (m := _RECORD.fullmatch(path.name))}
    found = read_record(records[max(records)]) if records else None
    return found is None or found.state == "ended"


def read_record(path: Path) -> AttemptRecord | None:
    """Return the record in a file that a user can change; None if there is no valid one."""
    try:
        with open_for_reading(path) as file:
            return wire.decode(file.read(wire.MAX_BODY_BYTES), AttemptRecord)
    except (OSError, InvalidRequest):
        return None


def unseen_outcome(folder: Path, settled: int, attempt: int) -> AttemptRecord | None:
    """Return the record of a start that the broker may not know of; None if the attempt may run.

    The record is of this attempt, of an earlier attempt after ``settled``, or of an attempt that succeeded,
    so that the job is done.
    """
    for number in range(attempt, max(0, attempt - KEEP_ATTEMPTS - 1), -1):
        found = read_record(folder / f"attempt-{number}.json")
        if found is not None and found.attempt == number:
            succeeded = found.state == "ended" and found.exit_code == 0 and not found.stopped
            return found if number > settled or succeeded else None
    return None


def forget_old_attempts(folder: Path, keep: int = KEEP_ATTEMPTS) -> None:
    """Remove the logs and records of all attempts of one job, except the newest ``keep``."""
    for attempt in attempts_of(folder)[:-keep]:
        log = folder / f"attempt-{attempt}.log"
        # The head is removed last, because `attempts_of` finds an attempt by it.
        for path in (log.with_suffix(".json"), *(part for _, part in reversed(_parts(log)))):
            with contextlib.suppress(OSError):
                path.unlink()
