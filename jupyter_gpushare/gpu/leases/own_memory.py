"""Read what lies in the memory of processes, such as their environment and arguments.

For such a read (proc(5): environ, cmdline, maps) the kernel takes the lock of the process's
memory.  A process can hold that lock for as long as it likes, for example in mmap(2) of
a file of a FUSE filesystem with a server that does not answer, and the read waits.  So the
processes of each user are read in threads of that user, and waited for together:

* a look returns after `LOOK_S` at the latest, without the processes that did not answer;
* at most `THREADS_PER_USER` threads of a user are stuck.  Then its other processes are
  not read, until one returns; those of other users are.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from jupyter_gpushare import procfs

LOOK_S = 1.0
THREADS_PER_USER = 4
COMMAND_BYTES = 8192
# A larger environment can hide the mark from us; the process tree still finds it.
ENVIRON_BYTES = 256 << 10

Key = tuple[int, int]  # pid, start ticks
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


class OwnMemoryReader(Generic[_Value]):
    """Reads processes without waiting long for any."""

    def __init__(self, read: Callable[[int], _Value]) -> None:
        """``read`` reads the process with a pid; it raises nothing but `OSError`."""
        self._read = read
        self._guard = threading.Lock()
        self._looks: dict[int, list[_Look[_Value]]] = {}  # by user, those that have not ended

    def read(self, users: Mapping[Key, int]) -> dict[Key, _Value]:
        """What was read of each of these processes that answered; ``users`` has the user of each.

        Raises:
            OSError: no descriptor or memory is left to look.
        """
        deadline = time.monotonic() + LOOK_S
        with self._guard:
            begun = self._begin(users)
        found: dict[Key, _Value] = {}
        for look in begun:
            found |= look.result(deadline)
        return found

    def _begin(self, users: Mapping[Key, int]) -> list[_Look[_Value]]:
        for user, looks in list(self._looks.items()):
            self._looks[user] = [look for look in looks if not look.ended.is_set()]
            if not self._looks[user]:
                del self._looks[user]
        begun = []
        for user in set(users.values()):
            looks = self._looks.setdefault(user, [])
            stuck_at = {look.at for look in looks}
            keys = [key for key in users if users[key] == user and key not in stuck_at]
            if keys and len(looks) < THREADS_PER_USER:
                try:
                    look = _Look(self._read, keys)
                except RuntimeError as error:  # no thread can be started
                    raise OSError(errno.ENOMEM, str(error)) from None
                looks.append(look)
                begun.append(look)
        return begun


class _Look(Generic[_Value]):
    """Reads processes one after the other, in a thread; drops what it reads after its result was taken."""

    def __init__(self, read: Callable[[int], _Value], keys: Iterable[Key]) -> None:
        self._read = read
        self._keys = keys
        self._found: dict[Key, _Value] = {}
        self._error: OSError | None = None
        self._taken = False
        self.at: Key | None = None  # the process that is read now
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="own-memory", daemon=True).start()

    def result(self, deadline: float) -> dict[Key, _Value]:
        """What was read until the deadline.

        Raises:
            OSError: no descriptor or memory is left to look.
        """
        self.ended.wait(max(0.0, deadline - time.monotonic()))
        self._taken = True
        if self._error is not None:
            raise self._error
        return dict(self._found)

    def _run(self) -> None:
        try:
            for key in self._keys:
                self.at = key
                value = self._read(key[0])
                if self._taken:
                    return
                self._found[key] = value
        except OSError as error:
            self._error = error
        finally:
            self.ended.set()
