"""Read what lies in the memory of processes, such as their environment and arguments.

For such a read (proc(5): environ, cmdline, maps) the kernel takes the lock of the process's
memory.  A process can hold that lock for as long as it likes, for example in mmap(2) of
a file of a FUSE filesystem with a server that does not answer, and the read waits.  So the
processes of each user are read in threads of that user, and waited for together:

* a caller waits `ANSWER_S` at most; a later answer is kept for the next call;
* a user with a thread that is stuck (in one process for `ANSWER_S`) is not waited for;
* at most `THREADS_PER_USER` threads of a user are stuck.  Then its other processes are
  not read, until one returns; those of other users are.
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
# A larger environment can hide the mark from us; the process tree still finds it.
ENVIRON_BYTES = 256 << 10

_Value = TypeVar("_Value")


class Words(NamedTuple):
    """The arguments and the environment of a process; empty when it is gone or they may not be read."""

    command: bytes
    environ: bytes


def words(pid: int) -> Words:
    """The arguments and the environment of a process; waits for as long as it does not answer.

    Raises:
        OSError: no descriptor or memory is left to look.
    """
    return Words(procfs.read(pid, "cmdline", COMMAND_BYTES), procfs.read(pid, "environ", ENVIRON_BYTES))


@dataclass(frozen=True, slots=True)
class Reading(Generic[_Value]):
    """What was read of a process, and when that read began (``time.monotonic()``)."""

    value: _Value
    began_at: float


class ProcessMemoryReader(Generic[_Value]):
    """Reads processes without waiting long for any; several threads may ask."""

    def __init__(self, read: Callable[[int], _Value]) -> None:
        """``read`` reads the process with a pid; it raises nothing but `OSError`."""
        self._read = read
        self._guard = threading.Lock()  # held for moments only
        self._looks: dict[int, list[_Look]] = {}  # by user, those that have not ended
        self._answers: dict[Key, Reading[_Value]] = {}  # the newest of each process
        self._error: OSError | None = None

    def read(self, users: Mapping[Key, int], within_s: float | None = None) -> dict[Key, Reading[_Value]]:
        """The newest answer of each of these processes; ``users`` has the user of each.

        One that does not answer within ``within_s`` (default `ANSWER_S`) has an older answer, or none.

        Raises:
            OSError: no descriptor or memory is left to look.
        """
        deadline = time.monotonic() + (ANSWER_S if within_s is None else within_s)
        with self._guard:
            awaited = self._begin(users)
        for look in awaited:
            look.ended.wait(max(0.0, deadline - time.monotonic()))
        with self._guard:
            self._answers = {key: answer for key, answer in self._answers.items() if key in users}
            error, self._error = self._error, None
            if error is not None:
                raise error
            return dict(self._answers)

    def _begin(self, users: Mapping[Key, int]) -> list[_Look]:
        """Start to read what is not being read; returns the looks that are worth a wait."""
        for user, looks in list(self._looks.items()):
            self._looks[user] = [look for look in looks if not look.ended.is_set()]
            if not self._looks[user]:
                del self._looks[user]
        awaited: list[_Look] = []
        for user in set(users.values()):
            looks = self._looks.setdefault(user, [])
            stuck = [look for look in looks if look.is_stuck()]
            for look in stuck:
                look.overtaken = True
            # What comes after the process that a stuck look hangs at is read by another one.
            under_way = {key for look in looks for key in ([look.left[0]] if look in stuck else look.left)}
            keys = [key for key in users if users[key] == user and key not in under_way]
            if keys and len(looks) < THREADS_PER_USER:
                looks.append(self._look(keys))
            if not stuck:
                awaited += looks
        return awaited

    def _look(self, keys: Sequence[Key]) -> _Look:
        look = _Look(keys)
        try:
            threading.Thread(target=self._run, args=(look,), name="process-memory", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            raise OSError(errno.ENOMEM, str(error)) from None
        return look

    def _run(self, look: _Look) -> None:
        """Read processes one after the other, in a thread of their user."""
        try:
            while look.left and not look.overtaken:
                look.since = time.monotonic()
                key = look.left[0]
                answer = Reading(self._read(key[0]), look.since)
                with self._guard:
                    self._answers[key] = answer
                    look.left.popleft()
        except OSError as error:
            self._error = error
        finally:
            look.ended.set()


class _Look:
    """One thread's work: processes, read one after the other."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.left = deque(keys)  # the first is being read,
        self.since = time.monotonic()  # since then
        self.overtaken = False  # another look reads the rest
        self.ended = threading.Event()

    def is_stuck(self) -> bool:
        """Whether it has been reading one process for so long that it may never end."""
        return time.monotonic() - self.since >= ANSWER_S


def shares_memory_of_nccl(pid: int) -> bool:
    """Whether a process maps shared memory of NCCL ranks on one host (named in its src/transport/shm.cc)."""
    try:
        with open(procfs.path(pid, "maps"), "rb") as maps:
            return any(b" /dev/shm/nccl-" in line for line in maps)
    except OSError:
        return False
