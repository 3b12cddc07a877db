"""Read what lies in the memory of processes, such as their environment and arguments.

For such a read (proc(5): environ, cmdline, maps) the kernel takes the lock of the process's
memory.  The process can hold that lock without end, for example in mmap(2) of a file on a FUSE
filesystem whose server does not answer, and the read waits meanwhile.  So each user's processes
are read in separate threads, and the caller waits for all these threads together:

* A caller waits `ANSWER_S` unless it gives another time.  A later answer is kept for the next call.
* A thread that has read one process for `ANSWER_S` is stuck.  No caller waits for its user.
* At most `THREADS_PER_USER` threads of a user are stuck.  Until one of them returns, no other process
  of that user is read; processes of other users are.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.os.processes import Key

ANSWER_S = 0.05
THREADS_PER_USER = 4
COMMAND_BYTES = 8192
# A larger environment may hide the name of the lease; the process then belongs to its parent's lease.
ENVIRON_BYTES = 256 << 10

_Value = TypeVar("_Value")


class Words(NamedTuple):
    """Arguments and environment of a process; empty if it has ended or they may not be read."""

    command: bytes
    environ: bytes


def words(pid: int) -> Words:
    """Return the arguments and the environment of a process; wait until it answers.

    Raises:
        OSError: no descriptor or memory is free.
    """
    return Words(procfs.read(pid, "cmdline", COMMAND_BYTES), procfs.read(pid, "environ", ENVIRON_BYTES))


@dataclass(frozen=True, slots=True)
class ProcessReading(Generic[_Value]):
    """What was read from a process, and when that read began (``time.monotonic()``)."""

    value: _Value
    began_at: float


class ProcessMemoryReader(Generic[_Value]):
    """Reads processes without a long wait for any of them; safe to use from several threads."""

    def __init__(self, read: Callable[[int], _Value]) -> None:
        """``read`` reads the process that has a pid; it may raise `OSError` only."""
        self._read = read
        self._guard = threading.Lock()  # held for moments only
        self._batches: dict[int, list[_Batch]] = {}  # by user, the batches that have not ended
        self._answers: dict[Key, ProcessReading[_Value]] = {}  # the newest of each process
        self._error: OSError | None = None

    def read(
        self, users: Mapping[Key, int], within_s: float | None = None
    ) -> dict[Key, ProcessReading[_Value]]:
        """Return the newest answer of each process in ``users``, which has the uid of each process.

        A process that does not answer within ``within_s`` seconds (default `ANSWER_S`) has an older
        answer, or none.

        Raises:
            OSError: no descriptor or memory is free.
        """
        deadline = time.monotonic() + (ANSWER_S if within_s is None else within_s)
        with self._guard:
            awaited = self._begin(users)
        for batch in awaited:
            batch.ended.wait(max(0.0, deadline - time.monotonic()))
        with self._guard:
            self._answers = {key: answer for key, answer in self._answers.items() if key in users}
            error, self._error = self._error, None
            if error is not None:
                raise error
            return dict(self._answers)

    def _begin(self, users: Mapping[Key, int]) -> list[_Batch]:
        """Start to read the processes that no thread reads; return the batches that are worth a wait."""
        for user, batches in list(self._batches.items()):
            self._batches[user] = [batch for batch in batches if not batch.ended.is_set()]
            if not self._batches[user]:
                del self._batches[user]
        awaited: list[_Batch] = []
        for user in set(users.values()):
            batches = self._batches.setdefault(user, [])
            stuck = [batch for batch in batches if batch.is_stuck()]
            for batch in stuck:
                batch.overtaken = True
            # Another thread reads the processes that a stuck thread has not reached.
            in_progress = {
                key
                for batch in batches
                for key in ([batch.remaining[0]] if batch in stuck else batch.remaining)
            }
            keys = [key for key in users if users[key] == user and key not in in_progress]
            if keys and len(batches) < THREADS_PER_USER:
                batches.append(self._start(keys))
            if not stuck:
                awaited += batches
        return awaited

    def _start(self, keys: Sequence[Key]) -> _Batch:
        batch = _Batch(keys)
        try:
            threading.Thread(target=self._run, args=(batch,), name="process-memory", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            raise OSError(errno.ENOMEM, str(error)) from None
        return batch

    def _run(self, batch: _Batch) -> None:
        """Read processes one after the other, in a thread of their user."""
        try:
            while batch.remaining and not batch.overtaken:
                batch.since = time.monotonic()
                key = batch.remaining[0]
                answer = ProcessReading(self._read(key[0]), batch.since)
                with self._guard:
                    self._answers[key] = answer
                    batch.remaining.popleft()
        except OSError as error:
            self._error = error
        finally:
            batch.ended.set()


class _Batch:
    """The processes that one thread reads, one after the other."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.remaining = deque(keys)  # the first is being read
        self.since = time.monotonic()  # when the read of the first began
        self.overtaken = False  # another thread reads the rest
        self.ended = threading.Event()

    def is_stuck(self) -> bool:
        """Return whether the thread has read one process for `ANSWER_S`, so that it may never return."""
        return time.monotonic() - self.since >= ANSWER_S


def shares_memory_of_nccl(pid: int) -> bool:
    """Return whether a process maps shared memory of NCCL ranks (named in NCCL's src/transport/shm.cc)."""
    try:
        with open(procfs.path(pid, "maps"), "rb") as maps:
            return any(b" /dev/shm/nccl-" in line for line in maps)
    except OSError:
        return False
