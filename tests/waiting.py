"""Wait for conditions in tests.  Standard library only.

A wait ends as soon as its condition holds.  It fails after `QUIET_S` without activity, and after
`PATIENCE_S` in any case.  Activity means that the log grows, that a process of the tests starts or
ends, or that these processes together use more than `IDLE_SHARE` of a processor.  So a test waits
for a busy machine, but not for one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Less than pytest's own timeout (300 s), so that the failure names the condition.
PATIENCE_S = 60.0
QUIET_S = 15.0
# Of a processor.  An idle Hub, its broker and a server together use 2 to 4 % of one.
IDLE_SHARE = 0.05
# The environment variable that every process of this run inherits (tests/conftest.py).
RUN_VARIABLE = "GPUSHARE_TEST_RUN"
# The first pause between two checks, the longest, and the factor from each to the next.
FIRST_S, EVERY_S, GROWTH = 0.005, 0.1, 1.4
_SAMPLE_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name (proc(5)): state, parent, utime and stime, start.
_STATE, _PARENT, _TIMES, _START = 0, 1, slice(11, 13), 19


def marked_processes(mark: str) -> dict[int, str]:
    """Return the command lines, by pid, of the living processes with ``mark`` in their environment.

    Processes in an uninterruptible wait are skipped: one may hold the lock of its memory
    (tests/hanging.py), and then a reader of its environment would wait too.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if _stat(folder)[_STATE] != b"D" and mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()[:200]
        except (OSError, ValueError):
            continue  # gone, or another user's
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return _stat(Path(f"/proc/{pid}"))[_STATE] not in (b"Z", b"X")
    except OSError:
        return False


def _stat(folder: Path) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name; this read never waits for the process."""
    return (folder / "stat").read_bytes().rpartition(b") ")[2].split()


# Processes by pid and start: a descendant of this process stays one when its parent ends.
_descendants: set[tuple[int, bytes]] = set()
_counting = threading.Lock()


def _used_s() -> dict[int, float]:
    """Return the processor seconds of this process's descendants, by pid."""
    seen: dict[int, list[bytes]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            seen[int(folder.name)] = _stat(folder)
    with _counting:
        _descendants.intersection_update({(pid, fields[_START]) for pid, fields in seen.items()})
        parents = {os.getpid(), *(pid for pid, _ in _descendants)}
        while new := {
            p for p, fields in seen.items() if p not in parents and int(fields[_PARENT]) in parents
        }:
            parents |= new
            _descendants.update((pid, seen[pid][_START]) for pid in new)
        return {pid: sum(map(int, seen[pid][_TIMES])) / _TICKS_PER_S for pid, _ in _descendants}


@dataclass(slots=True)
class Activity:
    """The activity of this process and its descendants, and its last time (monotonic seconds).

    ``own_s`` returns the processor seconds of this process, which also runs servers for tests.
    """

    own_s: Callable[[], float]
    log: Path | None = None
    happened_at: float = field(default_factory=time.monotonic)
    last: str = "nothing happened"
    _size: int = 0
    _sampled_at: float = 0.0
    _used_s: dict[int, float] = field(default_factory=dict)

    def quiet_s(self) -> float:
        """Return the seconds since the last activity; sample at most once a second."""
        now = time.monotonic()
        if now - self._sampled_at >= _SAMPLE_S:
            event = self._sample(now - self._sampled_at)
            if event:
                self.happened_at, self.last = now, event
            self._sampled_at = now
        return now - self.happened_at

    def _sample(self, since_s: float) -> str:
        size = self.log.stat().st_size if self.log is not None and self.log.exists() else 0
        grown, self._size = size != self._size, size
        used = {os.getpid(): self.own_s(), **_used_s()}
        before, self._used_s = self._used_s, used
        if grown:
            return "the log grew"
        if before.keys() != used.keys():
            return f"processes {sorted(before.keys() ^ used.keys())} started or ended"
        busiest = max(used, key=lambda pid: used[pid] - before[pid])
        if sum(used.values()) - sum(before.values()) > IDLE_SHARE * since_s:
            return f"process {busiest} was busy"
        return ""


def _other_threads_s() -> float:
    """Return the processor seconds of the threads of this process, except the waiting one."""
    return time.process_time() - time.thread_time()


def until(
    condition: Callable[[], T],
    what: str = "it happens",
    patience_s: float = PATIENCE_S,
    *,
    process: subprocess.Popen[Any] | None = None,
    log: Path | None = None,
) -> T:
    """Return the first true value of ``condition``.

    Checks often at first, then every `EVERY_S`, because a check may cost other processes time.
    Fails when ``process`` has ended, after `QUIET_S` without activity, and after ``patience_s``.
    ``log`` need not exist yet.

    Raises:
        AssertionError: the condition did not become true; the text has ``what``, the last activity
            and the end of ``log``.
    """
    activity, began_at, pause_s = Activity(_other_threads_s, log), time.monotonic(), FIRST_S
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended before {what} ({found!r}){_printed(log)}")
        _check(activity, began_at, patience_s, f"{what} ({found!r})")
        time.sleep(pause_s)
        pause_s = min(EVERY_S, GROWTH * pause_s)
    return found


async def becomes(condition: Callable[[], T], what: str = "it happens") -> T:
    """Return the first true value of ``condition``, like `until`, while other tasks of the loop run.

    Raises:
        AssertionError: the condition did not become true.
    """
    activity, began_at = Activity(time.process_time), time.monotonic()
    while not (found := condition()):
        _check(activity, began_at, PATIENCE_S, f"{what} ({found!r})")
        await asyncio.sleep(0.01)
    return found


def _check(activity: Activity, began_at: float, patience_s: float, what: str) -> None:
    waited_s, quiet_s = time.monotonic() - began_at, activity.quiet_s()
    if waited_s > patience_s or quiet_s > QUIET_S:
        last = f"last, {quiet_s:.0f} s ago: {activity.last}"
        raise AssertionError(f"not within {waited_s:.3g} s: {what}; {last}{_printed(activity.log)}")


def _printed(log: Path | None) -> str:
    return f":\n{log.read_text(errors='replace')[-3000:]}" if log is not None and log.exists() else ""
