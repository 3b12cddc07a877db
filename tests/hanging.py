"""A FUSE file whose reads never return, and processes whose memory no other process can read."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_gpushare import procfs
from tests.waiting import PATIENCE_S, until

# linux/fuse.h, version 7.31
_GETATTR, _OPEN, _READ, _INIT = 3, 14, 15, 26
_DIRECT_IO, _KEEP_CACHE = 1, 2  # FOPEN_*: without _KEEP_CACHE, open(2) itself waits for the page
_MODE = 0o100666
_REQUEST = struct.Struct("<IIQ")  # length, operation, number
_INITED = struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 1 << 16, 1, 0, 0, *[0] * 8)
_ATTRIBUTES = struct.pack("<QII6Q10I", 1 << 30, 0, 0, 1, 4096, 8, 0, 0, 0, *[0] * 3, _MODE, 1, *[0] * 5)
_ENOSYS = 38
_FORCE, _DETACH = 1, 2  # mount.h

# A thread reads the file, which never returns and keeps the file's page locked.  Then mmap(2) maps
# the file past the page cache: it waits for that page and holds the lock of the process's memory.
_HANGS = """
import ctypes, os, signal, sys, threading
os.setuid(int(sys.argv[2])) if os.geteuid() == 0 else None
cached = os.open(sys.argv[1], os.O_RDONLY)
threading.Thread(target=os.read, args=(cached, 1)).start()
mmap = ctypes.CDLL(None).mmap
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
mmap(None, 4096, 1, 2, os.open(sys.argv[1], os.O_RDONLY), 0)
signal.pause()
"""


class HangingFile:
    """A FUSE mount on an empty file; each read waits until `unmount`."""

    def __init__(self, path: Path) -> None:
        """Mount the file.

        Raises:
            OSError: the mount needs root, /dev/fuse, and the right to mount.
        """
        self.path = path
        self.opened_again = threading.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fuse},rootmode={_MODE:o},user_id=0,group_id=0,allow_other"
        if self._libc.mount(b"hangs", os.fsencode(path), b"fuse", 0, options.encode()):
            os.close(self._fuse)
            raise OSError(ctypes.get_errno(), f"FUSE: {os.strerror(ctypes.get_errno())}")
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    def unmount(self) -> None:
        """Unmount the file; waiting reads fail."""
        self._libc.umount2(os.fsencode(self.path), _FORCE | _DETACH)
        self._server.join(PATIENCE_S)
        if self._fuse >= 0:
            os.close(self._fuse)
            self._fuse = -1

    def _serve(self) -> None:
        opened, waiting, is_read = 0, 0, False
        with contextlib.suppress(OSError):  # unmounted
            while True:
                _, operation, number = _REQUEST.unpack_from(os.read(self._fuse, 1 << 17))
                if operation == _INIT:
                    self._answer(number, _INITED)
                elif operation == _GETATTR:
                    self._answer(number, _ATTRIBUTES)
                elif operation == _READ:
                    is_read = True
                elif operation == _OPEN and not opened:
                    opened = 1
                    self._answer(number, struct.pack("<QII", 1, 0, 0))
                elif operation == _OPEN:
                    waiting = number
                else:
                    self._answer(number, b"", _ENOSYS)
                if waiting and is_read:  # the page is locked
                    self._answer(waiting, struct.pack("<QII", 2, _DIRECT_IO | _KEEP_CACHE, 0))
                    waiting = 0
                    self.opened_again.set()

    def _answer(self, number: int, body: bytes, error: int = 0) -> None:
        os.write(self._fuse, struct.pack("<IiQ", 16 + len(body), -error, number) + body)


def why_not() -> str:
    """Return why this machine cannot mount such a file, or "" if it can."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            HangingFile(Path(file.name)).unmount()
        except OSError as error:
            return str(error)
    return ""


@contextmanager
def hanging_process(uid: int, env: dict[str, str]) -> Iterator[tuple[int, HangingFile]]:
    """Yield the pid of a process that holds the lock of its memory until the file is unmounted, and the file.

    The process runs as ``uid`` if this process runs as root.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "file")
        path.touch()
        file = HangingFile(path)
        child = subprocess.Popen([sys.executable, "-c", _HANGS, str(path), str(uid)], env=env)
        try:
            until(file.opened_again.is_set, "it opened the file twice", process=child)
            until(lambda: procfs.stat_fields(child.pid)[procfs.STATE] == b"D", "it waits in mmap(2)")
            yield child.pid, file
        finally:
            child.kill()
            file.unmount()
            child.wait()
